"""OpenAI Agents SDK: a guardrail for what tools return, and one for what an agent is given."""

from __future__ import annotations

import json
from typing import Any

from clearhead.errors import ArgumentError, MissingExtraError
from clearhead.guard.policy import WHOLE, Guarded
from clearhead.integrations.chat import instruction as joined
from clearhead.integrations.chat import last_user, named, notice, pieces

try:
    from agents import (
        GuardrailFunctionOutput,
        InputGuardrail,
        ToolGuardrailFunctionOutput,
        ToolOutputGuardrail,
    )
except ImportError as error:
    raise MissingExtraError(
        "the guardrails need the OpenAI Agents SDK: pip install 'clearhead[openai-agents]'"
    ) from error


def tool_output_guardrail(
    guarded: Guarded, *, instruction: str = "", refusal: str = "reject"
) -> ToolOutputGuardrail[Any]:
    """Return a guardrail for `@function_tool(tool_output_guardrails=[...])`: it judges what the tool returns.

    A refused result reaches the model as a notice (refusal="reject") or ends the run with
    ToolOutputGuardrailTripwireTriggered ("raise"); of a redacted one the rest reaches it. A result that is no
    str is judged, and passed on if redacted, as JSON. The instruction is what is given here, the agent's
    instructions if they are a str, and the user's last message. Raises ArgumentError for another refusal.
    """
    if refusal not in ("reject", "raise"):
        raise ArgumentError(f"refusal must be reject or raise, got {refusal!r}")

    async def clearhead_tool_output(data: Any) -> ToolGuardrailFunctionOutput:
        context = data.context
        asked = joined(instruction, _instructions(data.agent), last_user(context.turn_input))
        decision = await guarded.adecide(asked, {context.tool_name: _flat(data.output)})
        told = decision.summary()
        if decision.action == "redact":
            return ToolGuardrailFunctionOutput.reject_content(decision.text or "", told)
        if decision.action == "pass":
            return ToolGuardrailFunctionOutput.allow(told)
        if refusal == "raise":
            return ToolGuardrailFunctionOutput.raise_exception(told)
        return ToolGuardrailFunctionOutput.reject_content(notice(decision), told)

    return ToolOutputGuardrail(clearhead_tool_output, name="clearhead")


def input_guardrail(guarded: Guarded, *, instruction: str = "") -> InputGuardrail[Any]:
    """Return a guardrail for `Agent(input_guardrails=[...])`, for agents whose input is data: a mail, a page.

    What the user says is judged like any other text here, and so are tool results in the input; put no agent
    behind it whose input is the user's own request. The tripwire stops the run before the model is called,
    also where the guard would redact: an input guardrail cannot change what it sees. The instruction is what
    is given here and the agent's instructions if they are a str.
    """

    async def clearhead_input(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
        texts = [given] if isinstance(given, str) else [text for item in given for text in _texts(item)]
        decision = await guarded.adecide(joined(instruction, _instructions(agent)), named(WHOLE, texts))
        return GuardrailFunctionOutput(decision.summary(), tripwire_triggered=decision.action != "pass")

    return InputGuardrail(clearhead_input, name="clearhead", run_in_parallel=False)


def _instructions(agent: Any) -> str:
    given = getattr(agent, "instructions", None)
    return given if isinstance(given, str) else ""


def _flat(output: Any) -> str:
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False, default=str)


def _texts(item: Any) -> list[str]:
    if item.get("type") == "function_call_output":
        return pieces(item.get("output")) or [_flat(item.get("output"))]
    return pieces(item.get("content")) if item.get("role") == "user" else []
