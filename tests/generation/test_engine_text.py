"""The engine with the real model and its tokenizer: text as it comes, stop strings, prompts of named sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.generation.engine import Engine

pytestmark = pytest.mark.model

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write the word emoji in Japanese, and one emoji.",
    "Count from one to ten.",
    "Who wrote Hamlet?",
    "What is 2 + 2?",
]


def prompt(tokenizer: Any, question: str) -> ch.Prompt:
    return ch.Prompt(
        [ch.Segment("system", "system", "Answer in one sentence."), ch.Segment("user", "user", question)],
        tokenizer,
    )


@pytest.fixture(scope="module")
def engine(smollm2: Any) -> Any:
    with Engine(smollm2.model, smollm2.tokenizer, cache_bytes=64 << 20) as made:
        yield made


def test_every_answer_is_the_one_that_the_model_gives_alone(smollm2: Any, engine: Engine) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer
    prompts = [prompt(tokenizer, question) for question in QUESTIONS]
    handles = [engine.submit(each, max_new_tokens=12, segments=each.segments) for each in prompts]
    for handle, each in zip(handles, prompts, strict=True):
        result = handle.result()
        alone = model.generate(**each.inputs, max_new_tokens=12, do_sample=False)
        assert result.ids == alone[0, each.input_ids.shape[1] :].tolist()
        assert result.text == tokenizer.decode(result.ids, skip_special_tokens=True)
        assert result.text == "".join(token.text for token in result.tokens)
        assert result.sources == each.names
        for token in result.tokens:
            assert token.mass is not None
            assert torch.allclose(token.mass.sum(-1), torch.ones(30, 9), atol=1e-4)
    assert "Paris" in handles[0].result().text


def test_text_ends_before_a_stop_string_and_none_of_it_is_shown(smollm2: Any, engine: Engine) -> None:
    asked = prompt(smollm2.tokenizer, QUESTIONS[0])
    whole = engine.submit(asked, max_new_tokens=12).result()
    stop = whole.text[5:12]
    shown = ""
    handle = engine.submit(asked, max_new_tokens=12, stop=[stop, "never said"])
    for token in handle:
        shown += token.text
        assert whole.text.startswith(shown)
        assert len(shown) <= 5
    assert handle.result().stopped == "stop string"
    assert handle.result().text == shown == whole.text[:5]


def test_plain_text_is_a_prompt_too(smollm2: Any, engine: Engine) -> None:
    given = smollm2.tokenizer("The capital of France is", return_tensors="pt")
    alone = smollm2.model.generate(**given, max_new_tokens=5, do_sample=False)
    assert engine.submit("The capital of France is", max_new_tokens=5).result().ids == alone[0, -5:].tolist()
