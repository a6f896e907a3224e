"""A conversation says what separate prompts would, and reads again only what is new."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.errors import ArgumentError
from clearhead.generation.conversation import Conversation
from clearhead.generation.generating import generate
from clearhead.models.loading import LoadedModel

from .bytes import loaded

HOW = {"max_new_tokens": 7, "ignore_end": True}


@pytest.fixture(scope="module")
def bytes_model() -> LoadedModel:
    return loaded(3)


def alone(model: LoadedModel, talk: Conversation) -> list[int]:
    """The latest answer, computed from nothing."""
    assert talk.prompt is not None
    return generate(model, talk.prompt, **HOW).result().ids


def test_every_answer_is_that_of_the_whole_conversation_read_at_once(bytes_model: LoadedModel) -> None:
    talk = Conversation(bytes_model, system="be kind", **HOW)
    for said in ("hello", "what?", "oh"):
        assert talk.say(said).result().ids == alone(bytes_model, talk)
    assert [s.name for s in talk.segments] == [
        "system", "user 1", "assistant 1", "user 2", "assistant 2", "user 3"
    ]  # fmt: skip


@pytest.mark.model
def test_what_was_said_before_is_not_read_again(smollm2: LoadedModel) -> None:
    talk = Conversation(smollm2, max_new_tokens=6)
    first = talk.say("Name a colour.").result()
    assert talk.reused == 0
    second = talk.say("Another?")
    assert talk.reused >= first.prompt_tokens + first.count - 2
    assert talk.prompt is not None
    assert second.result().ids == generate(smollm2, talk.prompt, max_new_tokens=6).result().ids


def test_an_answer_that_was_broken_off_is_remembered_as_far_as_it_came(bytes_model: LoadedModel) -> None:
    talk = Conversation(bytes_model, **HOW)
    answer = talk.say("hello")
    next(answer)
    next(answer)
    shown = answer.so_far().text
    assert talk.say("go on").result().ids == alone(bytes_model, talk)
    assert talk.segments[1].text.startswith(shown.strip())


def test_after_a_pass_that_failed_the_cache_begins_anew(
    bytes_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Conversation(bytes_model, **HOW)
    answer = talk.say("hello")
    next(answer)
    last = bytes_model.model.model.layers[1]

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            next(answer)
    assert talk.say("go on").result().ids == alone(bytes_model, talk)
    assert talk.reused == 0


def test_reset_forgets_everything_but_the_system_prompt(bytes_model: LoadedModel) -> None:
    talk = Conversation(bytes_model, system="be kind", **HOW)
    first = talk.say("hello").result().ids
    talk.say("more").result()
    talk.reset()
    assert talk.say("hello").result().ids == first
    assert len(talk.segments) == 2


def test_a_text_from_elsewhere_is_a_source_of_its_own(bytes_model: LoadedModel) -> None:
    talk = Conversation(bytes_model, **HOW)
    answer = talk.say("read this", data="a page")
    assert answer.sources[:2] == ("user 1", "data 1")


def test_what_cannot_be_said_was_not_said(bytes_model: LoadedModel) -> None:
    talk = Conversation(bytes_model, **HOW)
    talk.say("hello").result()
    with pytest.raises(ch.ClearheadError, match="the prompt is too long"):
        talk.say("x" * 5000)
    assert talk.say("again").result().ids == alone(bytes_model, talk)


def test_options_that_are_its_own_are_refused(bytes_model: LoadedModel) -> None:
    with pytest.raises(ArgumentError, match="cache and tokenizer are the conversation's own"):
        Conversation(bytes_model, tokenizer=None)
    with pytest.raises(ArgumentError, match="a paged cache has a limit"):
        Conversation(bytes_model, cache="paged")


def test_the_masses_are_those_of_the_whole_conversation(bytes_model: LoadedModel) -> None:
    talk = Conversation(bytes_model, **HOW)
    talk.say("hello").result()
    with_cache = talk.say("what?").result()
    assert talk.prompt is not None
    anew = generate(bytes_model, talk.prompt, **HOW).result()
    for a, b in zip(with_cache.tokens, anew.tokens, strict=True):
        assert a.mass is not None
        assert b.mass is not None
        assert torch.allclose(a.mass, b.mass, atol=1e-5)
