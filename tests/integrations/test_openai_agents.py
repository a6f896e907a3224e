"""The guardrails of the OpenAI Agents SDK in real runs, with a model that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agents import (
    Agent,
    FunctionTool,
    InputGuardrailTripwireTriggered,
    ModelResponse,
    RunConfig,
    Runner,
    Usage,
)
from agents import ToolOutputGuardrailTripwireTriggered as Tripwire
from agents.models.interface import Model
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText
from tests.integrations.fakes import ATTACK, FLAGGED, PLAIN, PLANTED, Fake

from clearhead.errors import ArgumentError
from clearhead.guard.policy import Guarded
from clearhead.integrations.chat import WITHHELD
from clearhead.integrations.openai_agents import input_guardrail, tool_output_guardrail

ANSWER = ResponseOutputMessage(
    id="m", role="assistant", status="completed", type="message",
    content=[ResponseOutputText(text="From nine.", type="output_text", annotations=[])],
)  # fmt: skip
CALL = ResponseFunctionToolCall(arguments="{}", call_id="call 1", name="read_page", type="function_call")


class Script(Model):
    """Says one thing after the other; keeps what it was given."""

    def __init__(self, *says: Any) -> None:
        self.says, self.given = list(says), []

    async def get_response(self, *args: Any, **more: Any) -> ModelResponse:
        self.given.append(more.get("input", args[1] if len(args) > 1 else None))
        return ModelResponse(output=[self.says.pop(0)], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **more: Any) -> Any:
        raise NotImplementedError


def run(page: Any, *, mode: str = "block", fake: Fake | None = None, **more: Any) -> tuple[str, Fake]:
    """Return what the model was given as the tool's result."""
    fake, model = fake or Fake(), Script(CALL, ANSWER)

    async def read_page(context: Any, arguments: str) -> Any:
        return page

    guard = tool_output_guardrail(Guarded(fake, mode=mode, on_error="closed"), **more)
    tools = [
        FunctionTool(
            name="read_page",
            description="",
            params_json_schema={
                "type": "object",
                "properties": {},
                "additionalProperties": False,
                "required": [],
            },
            on_invoke_tool=read_page,
            tool_output_guardrails=[guard],
        )
    ]
    agent = Agent(name="guide", instructions="Be brief.", model=model, tools=tools)
    result = go(agent, "When does it open?")
    assert result.final_output == "From nine."
    return model.given[1][-1]["output"], fake


def go(agent: Any, given: Any) -> Any:
    return asyncio.run(Runner.run(agent, given, run_config=RunConfig(tracing_disabled=True)))


def test_a_clean_result_reaches_the_model_and_is_judged_against_all_that_was_asked() -> None:
    seen, fake = run(PLAIN, instruction="Trust nobody.")
    assert seen == PLAIN
    assert fake.seen == [("Trust nobody.\n\nBe brief.\n\nWhen does it open?", {"read_page": PLAIN})]


def test_the_model_sees_a_notice_in_place_of_a_refused_result() -> None:
    assert run(PLANTED)[0] == WITHHELD


def test_or_the_run_ends() -> None:
    with pytest.raises(Tripwire) as caught:
        run(PLANTED, refusal="raise")
    assert caught.value.output.output_info["verdict"] == "block"
    assert ATTACK not in str(caught.value.output.output_info)


def test_what_is_left_of_a_redacted_result_reaches_the_model() -> None:
    assert run(PLANTED, mode="redact")[0] == "Open from nine to five. [removed by guard] Closed on Mondays."


def test_a_flagged_result_passes() -> None:
    assert run(FLAGGED, mode="flag")[0] == FLAGGED


def test_a_result_that_is_no_text_is_judged_as_json() -> None:
    seen, fake = run({"page": PLANTED, "é": 1})
    assert seen == WITHHELD
    assert json.loads(fake.seen[0][1]["read_page"]) == {"page": PLANTED, "é": 1}


def test_a_scanner_that_fails_withholds_the_result() -> None:
    fake = Fake()
    fake.error = RuntimeError()
    assert "could not be checked" in run(PLAIN, fake=fake)[0]


def test_another_refusal_is_refused() -> None:
    with pytest.raises(ArgumentError, match="refusal must be reject or raise, got 'ignore'"):
        tool_output_guardrail(Guarded(Fake(), mode="block", on_error="closed"), refusal="ignore")


OUTPUT = {"type": "function_call_output", "call_id": "call 1", "output": PLANTED}


@pytest.mark.parametrize(
    "given", [PLANTED, [{"role": "user", "content": PLANTED}], [{"role": "user", "content": PLAIN}, OUTPUT]]
)
@pytest.mark.parametrize("mode", ["block", "redact"])
def test_an_agent_whose_input_is_data_is_not_run_on_an_attack(given: Any, mode: str) -> None:
    model = Script(ANSWER)
    guard = input_guardrail(Guarded(Fake(), mode=mode, on_error="closed"))
    agent = Agent(name="reader", instructions="Summarise the mail.", model=model, input_guardrails=[guard])
    with pytest.raises(InputGuardrailTripwireTriggered):
        go(agent, given)
    assert model.given == []


def test_an_agent_whose_input_is_clean_is_run() -> None:
    fake, model = Fake(), Script(ANSWER)
    guard = input_guardrail(Guarded(fake, mode="block", on_error="closed"))
    agent = Agent(name="reader", instructions="Summarise the mail.", model=model, input_guardrails=[guard])
    assert go(agent, PLAIN).final_output == "From nine."
    assert fake.seen == [("Summarise the mail.", {"text": PLAIN})]
