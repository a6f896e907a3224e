"""`clearhead steps` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

SENTENCE = "the animal didn't cross the road because it was too tired ."


@pytest.mark.usefixtures("tiny")
def test_all_four_steps_and_the_words_are_shown(cli: Callable[..., Any]) -> None:
    done = cli("steps", SENTENCE, "--token", "it", "--layer", "1", "--head", "2")
    assert (done.code, done.err) == (0, "")
    for text in (
        "smollm2, layer 1, head 2, the token 'it'",
        "1. its vector      x = [",
        "divided by √8 = 2.828; 3. softmax; 4. weighted values:",
        "without ÷ √d",
        "the weights add up to 1.000000",
        "where 'it' looks, over all heads",
        "hidden in every head: ",
        "not shown to be why the model answered",
    ):
        assert text in done.out, text


@pytest.mark.usefixtures("tiny")
def test_each_word_asked_about_gets_its_sentences(cli: Callable[..., Any]) -> None:
    done = cli("steps", SENTENCE, "--token", "it", "--on", "animal", "--on", "road")
    for word, other in (("animal", "road"), ("road", "animal")):
        assert f"of 'it' on '{word}'; on the others: {other} " in done.out
        assert f"'{word}' hidden in every head: " in done.out


@pytest.mark.usefixtures("tiny")
def test_json_is_all_there_is_on_standard_output(cli: Callable[..., Any]) -> None:
    done = cli("steps", SENTENCE, "--token", "it", "--on", "animal", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["total"] == pytest.approx(1)
    assert [look["word"] for look in found["words"]] == ["animal"]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--token", "zebra"],
            "token must be a word of the text, got 'zebra'; there are: the, animal, didn't",
        ),
        (["--token", "it", "--on", "tired"], "on must be a word that the token can see, got 'tired'"),
        (["--token", "it", "--layer", "2"], "layer must lie in 0..1, got 2"),
        (["--token", "it", "--head", "4"], "head must lie in 0..3, got 4"),
    ],
)
def test_unknown_words_layers_and_heads_are_errors(
    cli: Callable[..., Any], arguments: list[str], message: str
) -> None:
    done = cli("steps", SENTENCE, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_model_without_next_tokens_leaves_out_what_deleting_does(cli: Callable[..., Any]) -> None:
    done = cli("steps", "The animal slept because it was tired.", "--token", "it", "--model", "minilm")
    assert done.code == 0
    assert "deleted" not in done.out
    assert "note: this model has no next-token distribution to compare" in done.out


def test_an_encoder_can_be_looked_at_and_the_notes_say_how(cli: Callable[..., Any]) -> None:
    done = cli("look", "--system", "a", "--user", "b", "--model", "minilm")
    assert done.code == 0
    assert "note: the model has no chat template: it reads the texts one after the other" in done.out
    assert "note: this model writes no answer" in done.out
