"""The LangChain middleware in a real agent, with a model that says what it is told to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.types import Command
from tests.integrations.fakes import ATTACK, FLAGGED, PLAIN, PLANTED, Fake

from clearhead.guard.policy import Guarded
from clearhead.integrations.chat import UNREAD, WITHHELD
from clearhead.integrations.langchain import GuardMiddleware

CALL = AIMessage("", tool_calls=[{"name": "read_page", "args": {}, "id": "call 1"}])
ASK = HumanMessage("When does it open?", id="ask")


class Model(FakeMessagesListChatModel):
    """Calls the tool, then answers; keeps what it was given."""

    given: list[list[BaseMessage]] = []  # noqa: RUF012  # a field of pydantic: each model has its own

    def _generate(self, messages: list[BaseMessage], *args: Any, **more: Any) -> Any:
        self.given.append(list(messages))
        return super()._generate(messages, *args, **more)

    def bind_tools(self, tools: Any, **more: Any) -> Model:
        return self


def run(
    page: Any,
    *,
    mode: str = "block",
    fake: Fake | None = None,
    messages: Any = (ASK,),
    loop: bool = False,
    **more: Any,
) -> tuple[Model, list[BaseMessage], Fake]:
    @tool
    def read_page() -> Any:
        """Read the page."""
        return page

    fake = fake or Fake()
    guarded = Guarded(fake, mode=mode, on_error="closed")
    model = Model(
        responses=[CALL, AIMessage("From nine.")] if page is not None else [AIMessage("From nine.")]
    )
    agent = create_agent(model, [read_page], middleware=[GuardMiddleware(guarded, **more)])
    given = {"messages": list(messages)}
    out = asyncio.run(agent.ainvoke(given)) if loop else agent.invoke(given)
    return model, out["messages"], fake


@pytest.fixture(params=[False, True], ids=["invoke", "ainvoke"])
def loop(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_clean_result_reaches_the_model_and_is_judged_against_the_users_words(loop: bool) -> None:
    model, messages, fake = run(PLAIN, loop=loop, instruction="Be brief.")
    assert model.given[1][-1].content == PLAIN
    assert messages[-1].content == "From nine."
    assert fake.seen == [("Be brief.\n\nWhen does it open?", {"read_page": PLAIN})]


def test_the_model_never_sees_a_refused_result(loop: bool) -> None:
    model, messages, _ = run(PLANTED, loop=loop)
    seen = model.given[1][-1]
    assert isinstance(seen, ToolMessage)
    assert (seen.content, seen.status, seen.tool_call_id) == (WITHHELD, "error", "call 1")
    assert seen.additional_kwargs["clearhead"]["verdict"] == "block"
    assert messages[-1].content == "From nine."
    assert ATTACK not in str(model.given) + str(messages)


def test_what_is_left_of_a_redacted_result_reaches_the_model(loop: bool) -> None:
    model, _, _ = run(PLANTED, mode="redact", loop=loop)
    assert model.given[1][-1].content == "Open from nine to five. [removed by guard] Closed on Mondays."


def test_a_flagged_result_passes_and_says_so() -> None:
    model, _, _ = run(FLAGGED, mode="flag")
    assert model.given[1][-1].content == FLAGGED
    assert model.given[1][-1].additional_kwargs["clearhead"]["verdict"] == "flag"


def test_blocks_of_a_result_are_read_one_by_one_and_images_stay() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    model, _, fake = run(
        [{"type": "text", "text": PLAIN}, image, {"type": "text", "text": PLANTED}], mode="redact"
    )
    assert fake.seen[0][1] == {"read_page": PLAIN, "read_page 2": PLANTED}
    content: Any = model.given[1][-1].content
    assert content[:2] == [{"type": "text", "text": PLAIN}, image]
    assert ATTACK not in content[2]["text"]


def test_a_result_in_a_command_is_judged_too() -> None:
    message = ToolMessage(PLANTED, tool_call_id="call 1", name="read_page")
    model, _, _ = run(Command(update={"messages": [message]}))
    assert model.given[1][-1].content == WITHHELD


def test_a_result_that_came_another_way_ends_the_run_before_the_model(loop: bool) -> None:
    old = ToolMessage(PLANTED, tool_call_id="call 1", name="memory", id="old")
    model, messages, _ = run(None, messages=[CALL, old, ASK], loop=loop)
    assert model.given == []
    assert isinstance(messages[-1], AIMessage)
    assert messages[-1].content == WITHHELD


def test_a_redacted_message_is_replaced_in_the_state() -> None:
    old = ToolMessage(PLANTED, tool_call_id="call 1", name="memory", id="old")
    _, messages, _ = run(None, mode="redact", messages=[CALL, old, ASK])
    assert [m.id for m in messages][1:3] == ["old", "ask"]
    assert ATTACK not in str(messages)


def test_a_result_is_read_once_however_often_the_model_is_called() -> None:
    _, _, fake = run(PLAIN)
    assert len(fake.seen) == 1


def test_a_scanner_that_fails_withholds_the_result() -> None:
    fake = Fake()
    fake.error = RuntimeError("out of memory")
    model, _, _ = run(PLAIN, fake=fake)
    assert model.given[1][-1].content == UNREAD
