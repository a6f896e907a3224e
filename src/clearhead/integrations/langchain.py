"""LangChain 1.x: a middleware that sees tool results before the model does, and the state before a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from clearhead.errors import MissingExtraError
from clearhead.guard.policy import Decision, Guarded
from clearhead.integrations.chat import UNREAD, WITHHELD, instruction, named, notice, pieces, refilled

try:
    from langchain.agents.middleware import AgentMiddleware, hook_config
    from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
    from langgraph.types import Command
except ImportError as error:
    raise MissingExtraError(
        "the LangChain middleware needs langchain 1: pip install 'clearhead[langchain]'"
    ) from error


class GuardMiddleware(AgentMiddleware):
    """Pass tool results by a guard: `create_agent(model, tools, middleware=[GuardMiddleware(guarded)])`.

    After a tool call: a refused result is replaced by a notice (status "error"), a redacted one loses the
    spans that pulled; what was decided stands in the message's `additional_kwargs["clearhead"]`.
    Before each model call: every message of the state whose type is in `types` is judged (results that passed
    before come from the guard's cache), so that what came another way is seen too: memory, a resumed thread.
    A refused one ends the run with a message; a redacted one is replaced in the state.
    instruction: of the operator; the user's last message is added to it.
    """

    def __init__(self, guarded: Guarded, *, instruction: str = "", types: Sequence[str] = ("tool",)) -> None:
        super().__init__()
        self.guarded, self.instruction, self.types = guarded, instruction, tuple(types)

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], ToolMessage | Command[Any]]) -> Any:
        """Run the tool, then judge its result."""
        return self._checked(handler(request), self._asked(request.state["messages"]))

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """The same in a thread beside the event loop."""
        result = await handler(request)
        return await asyncio.to_thread(self._checked, result, self._asked(request.state["messages"]))

    @hook_config(can_jump_to=["end"])
    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Judge what the model is about to read."""
        messages = state["messages"]
        asked, changed = self._asked(messages), []
        for message in messages:
            if message.type not in self.types or message is _last_human(messages):
                continue
            decision = self._decide(message, asked)
            if decision is not None and decision.action == "refuse":
                told = {"clearhead": decision.summary()}
                return {"jump_to": "end", "messages": [AIMessage(notice(decision), additional_kwargs=told)]}
            if decision is not None and decision.action == "redact":
                changed.append(_told(message, decision))
        return {"messages": changed} if changed else None

    @hook_config(can_jump_to=["end"])
    async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """The same in a thread beside the event loop."""
        return await asyncio.to_thread(self.before_model, state, runtime)

    def _asked(self, messages: Sequence[AnyMessage]) -> str:
        human = _last_human(messages)
        return instruction(self.instruction, "\n".join(pieces(human.content)) if human else "")

    def _decide(self, message: AnyMessage, asked: str) -> Decision | None:
        texts = pieces(message.content)
        if texts in ([WITHHELD], [UNREAD]):
            return None
        return self.guarded.decide(asked, named(message.name or message.type, texts))

    def _checked(self, result: Any, asked: str) -> Any:
        if isinstance(result, ToolMessage):
            decision = self._decide(result, asked)
            return result if decision is None else _told(result, decision)
        if isinstance(result, Command) and isinstance(result.update, dict):
            update = dict(result.update)
            if isinstance(update.get("messages"), list):
                update["messages"] = [
                    self._checked(m, asked) if isinstance(m, ToolMessage) else m for m in update["messages"]
                ]
            return Command(graph=result.graph, update=update, resume=result.resume, goto=result.goto)
        return result  # an update of another shape: before_model sees what became of it


def _last_human(messages: Sequence[AnyMessage]) -> AnyMessage | None:
    return next((m for m in reversed(messages) if isinstance(m, HumanMessage)), None)


def _told(message: AnyMessage, decision: Decision) -> AnyMessage:
    change: dict[str, Any] = {
        "additional_kwargs": {**message.additional_kwargs, "clearhead": decision.summary()}
    }
    if decision.action == "redact":
        change["content"] = refilled(message.content, decision.texts.values())
    elif decision.action == "refuse":
        change |= {"content": notice(decision), "status": "error", "artifact": None}
    return message.model_copy(update=change)
