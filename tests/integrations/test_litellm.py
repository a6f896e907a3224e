"""The LiteLLM guardrail, called by LiteLLM's own translation of requests and answers, and built from a config."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
from litellm.exceptions import GuardrailRaisedException
from litellm.llms.openai.chat.guardrail_translation.handler import OpenAIChatCompletionsHandler
from litellm.proxy.guardrails.guardrail_hooks.unified_guardrail.unified_guardrail import UnifiedLLMGuardrails
from litellm.types.utils import ModelResponse
from tests.integrations.fakes import ATTACK, PLAIN, PLANTED, Fake

from clearhead.errors import ArgumentError
from clearhead.guard.policy import Guarded
from clearhead.integrations.litellm import ClearheadGuardrail

# LiteLLM's modules warn while pydantic reads their types, when they are first imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SETTINGS: dict[str, Any] = {"guardrail_name": "clearhead", "event_hook": "pre_call", "default_on": True}


def guardrail(fake: Fake | None = None, mode: str = "block", **more: Any) -> ClearheadGuardrail:
    return ClearheadGuardrail(Guarded(fake or Fake(), mode=mode, on_error="closed"), **{**SETTINGS, **more})


def request(result: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "read_page", "arguments": "{}"}}
    return {
        "model": "some-model",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "When does it open?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": result},
        ],
    }


def before(guard: ClearheadGuardrail, data: dict[str, Any]) -> dict[str, Any]:
    return asyncio.run(OpenAIChatCompletionsHandler().process_input_messages(copy.deepcopy(data), guard))


def test_a_clean_request_goes_on_as_it_is_and_only_the_tools_words_were_judged() -> None:
    fake = Fake()
    assert before(guardrail(fake), request(PLAIN))["messages"] == request(PLAIN)["messages"]
    assert fake.seen == [("Be brief.\n\nWhen does it open?", {"tool 3": PLAIN})]


@pytest.mark.parametrize(
    "content", [PLANTED, [{"type": "text", "text": PLAIN}, {"type": "text", "text": PLANTED}]]
)
def test_a_refused_request_is_an_error_without_a_word_of_it(content: Any) -> None:
    with pytest.raises(GuardrailRaisedException) as caught:
        before(guardrail(), request(content))
    assert (caught.value.status_code, caught.value.blocked_content) == (400, True)
    assert "verdict block, score 0.97" in str(caught.value)
    assert ATTACK not in str(caught.value)


def test_what_is_left_of_a_redacted_result_goes_on() -> None:
    content = [{"type": "text", "text": PLAIN}, {"type": "text", "text": PLANTED}]
    message = before(guardrail(mode="redact"), request(content))["messages"][3]
    assert message["content"][0]["text"] == PLAIN
    assert message["content"][1]["text"] == "Open from nine to five. [removed by guard] Closed on Mondays."


def test_a_request_that_could_not_be_judged_is_no_verdict_on_its_content() -> None:
    fake = Fake()
    fake.error = RuntimeError()
    with pytest.raises(GuardrailRaisedException) as caught:
        before(guardrail(fake), request(PLAIN))
    assert not caught.value.blocked_content


def test_texts_whose_roles_are_not_known_are_all_judged() -> None:
    inputs = {"texts": [PLAIN, PLANTED]}
    with pytest.raises(GuardrailRaisedException):
        asyncio.run(guardrail().apply_guardrail(inputs, {}, "request"))


@pytest.mark.parametrize(
    ("mode", "left"),
    [("redact", "Open from nine to five. [removed by guard] Closed on Mondays."), ("observe", PLANTED)],
)
def test_an_answer_is_judged_as_data(mode: str, left: str) -> None:
    answer = ModelResponse(choices=[{"message": {"role": "assistant", "content": PLANTED}}])
    guard = guardrail(mode=mode, event_hook="post_call")
    handler = OpenAIChatCompletionsHandler()
    out = asyncio.run(handler.process_output_response(answer, guard, request_data=request(PLAIN)))
    assert out.choices[0].message.content == left  # type: ignore[union-attr]


def test_during_call_refuses_and_cannot_redact() -> None:
    data = {**request(PLANTED), "guardrail_to_apply": guardrail(event_hook="during_call")}
    with pytest.raises(GuardrailRaisedException):
        asyncio.run(UnifiedLLMGuardrails().async_moderation_hook(data, user(), "acompletion"))
    with pytest.raises(ArgumentError, match="during_call cannot redact"):
        guardrail(mode="redact", event_hook=["pre_call", "during_call"])


def test_the_proxys_own_pre_call_hook_runs_it() -> None:
    data = {**request(PLANTED), "guardrail_to_apply": guardrail()}
    with pytest.raises(GuardrailRaisedException):
        asyncio.run(UnifiedLLMGuardrails().async_pre_call_hook(user(), None, data, "acompletion"))  # type: ignore[arg-type]


def user() -> Any:
    from litellm.proxy._types import UserAPIKeyAuth

    return UserAPIKeyAuth()


def test_the_class_that_a_config_names_is_found_and_built_as_the_proxy_builds_it(tmp_path: Path) -> None:
    from litellm.proxy.types_utils.utils import get_instance_fn

    (tmp_path / "my_guard.py").write_text(
        "from clearhead.guard.policy import Guarded\n"
        "from clearhead.integrations.litellm import ClearheadGuardrail\n"
        "from tests.integrations.fakes import Fake\n"
        "class Guard(ClearheadGuardrail):\n"
        "    guarded = Guarded(Fake(), mode='block', on_error='closed')\n",
        encoding="utf-8",
    )
    named = get_instance_fn("my_guard.Guard", config_file_path=str(tmp_path / "config.yaml"))
    # initialize_custom_guardrail: these, and what else stands in litellm_params
    built = named(guardrail_name="clearhead", event_hook="pre_call", default_on=True, api_key=None)
    assert isinstance(built, ClearheadGuardrail)
    with pytest.raises(GuardrailRaisedException):
        before(built, request(PLANTED))


def test_without_a_guarded_there_is_no_guardrail() -> None:
    with pytest.raises(ArgumentError, match="ClearheadGuardrail needs a Guarded"):
        ClearheadGuardrail(**SETTINGS)
