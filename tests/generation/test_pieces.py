"""Text as it comes: whole characters only, nothing of a stop string, and in the end all of the text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ArgumentError
from clearhead.generation.pieces import Pieces

from .bytes import END, tokenizer

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=24)


def spoken(text: str, stop: Any = (), before: str = "before") -> tuple[list[str], Pieces]:
    speak = tokenizer()
    pieces = Pieces(speak, speak.encode(before), stop)
    shown = [pieces.add(number) for number in speak.encode(text)]
    return [*shown, pieces.rest()], pieces


@given(TEXT, TEXT)
def test_pieces_are_whole_characters_and_together_the_text(text: str, before: str) -> None:
    shown, _ = spoken(text, before=before)
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)


@given(TEXT, st.text(st.sampled_from("ab€"), min_size=1, max_size=4), TEXT)
def test_the_text_ends_before_the_stop_string_wherever_its_tokens_are_cut(a: str, stop: str, b: str) -> None:
    shown, pieces = spoken(a + stop + b, stop)
    whole = a + stop + b
    assert "".join(shown) == whole[: whole.index(stop)]
    assert pieces.stopped_by == stop


@given(
    st.text(st.sampled_from("ab"), max_size=12), st.lists(st.sampled_from(["ab", "aab", "bba"]), min_size=1)
)
def test_no_stop_string_is_shown_even_in_part_and_then_taken_back(text: str, stop: list[str]) -> None:
    shown, pieces = spoken(text, stop)
    whole = "".join(shown)
    assert not any(s in whole for s in stop)
    assert text.startswith(whole)
    if pieces.stopped_by is None:
        assert whole == text
    else:
        assert text[len(whole) :].startswith(pieces.stopped_by)


def test_a_character_comes_with_its_last_byte() -> None:
    assert spoken("a😀b")[0] == ["a", "", "", "", "😀", "b", ""]


def test_text_that_may_become_a_stop_string_waits() -> None:
    assert spoken("xENd", "END")[0] == ["x", "", "", "ENd", ""]
    assert spoken("xEN", "END")[0] == ["x", "", "", "EN"]
    assert spoken("xEND", "END")[0] == ["x", "", "", "", ""]


def test_half_a_character_at_the_end_is_not_shown() -> None:
    speak = tokenizer()
    pieces = Pieces(speak, [], ())
    shown = [pieces.add(number) for number in speak.encode("é€")[:-1]]
    assert "".join([*shown, pieces.rest()]) == "é"


def test_bytes_that_are_no_character_are_shown_as_the_tokenizer_does_once_it_is_certain() -> None:
    speak = tokenizer()
    pieces = Pieces(speak, [], ())
    broken = [*speak.encode("€")[:2], *speak.encode("x")]
    assert [pieces.add(number) for number in broken] == ["", "", "\ufffdx"]


def test_control_tokens_have_no_text() -> None:
    pieces = Pieces(tokenizer(), [], ())
    assert pieces.add(END) == ""
    assert pieces.rest() == ""


@pytest.mark.parametrize("end", ["", "😀"])
def test_endless_bytes_that_are_no_text_wait_for_nothing(end: str) -> None:
    speak = tokenizer()
    pieces = Pieces(speak, [], ())
    noise = [speak.encode("€")[0]] * 400 + [END] * 400
    shown = "".join(pieces.add(number) for number in noise)
    assert len(pieces._ids) < 50
    assert set(shown) == {"\ufffd"}
    shown += "".join(pieces.add(number) for number in speak.encode(f"x{end}"))
    assert shown == "\ufffd" * 400 + f"x{end}"


def test_the_first_word_keeps_its_space_where_the_tokenizer_writes_it_between_words() -> None:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, unk_token="▁one"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=inner), [0], ())
    assert [pieces.add(1), pieces.add(2)] == [" two", " three"]


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ([""], "stop holds an empty string"),
        (5, "stop must be a string or a list of strings, got 5"),
        ([b"x"], r"stop must be a string or a list of strings, got \[b'x'\]"),
    ],
)
def test_stop_strings_that_are_none_are_refused(stop: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Pieces(tokenizer(), [], stop)


def test_stop_needs_a_tokenizer() -> None:
    with pytest.raises(ArgumentError, match="stop needs a tokenizer"):
        Pieces(None, [], "x")
