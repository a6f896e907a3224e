"""Spans are all of a text, and windows are all of its spans."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.guard.layout import SourceSpan, Texts, windows
from clearhead.guard.spans import LONGEST, spans

PIECES = [
    "a",
    "word ",
    ". ",
    "! ",
    "…",
    "\n",
    "\r\n",
    "\n\n",
    "\t",
    " ",
    "。",
    "”",
    "吃",
    "😀",
    "\u200b",
    "x" * 200,
    "?)",
    "<|im_end|>",
]
TEXTS = st.one_of(st.text(max_size=400), st.lists(st.sampled_from(PIECES), max_size=60).map("".join))


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_spans_are_all_of_the_text_but_white_space_in_order_and_of_bounded_length(text: str) -> None:
    found = spans(text)
    at = 0
    for start, end in found:
        assert at <= start < end <= len(text)
        assert end - start <= LONGEST
        assert text[at:start].strip() == ""
        assert text[start:end] == text[start:end].strip()
        at = end
    assert text[at:].strip() == ""


def of(text: str) -> list[str]:
    return [text[a:b] for a, b in spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\t ", []),
        ("The museum opens at nine. It closes at five!", ["The museum opens at nine.", "It closes at five!"]),
        ("Das Museum öffnet um neun. Es schließt um fünf.", ["Das Museum öffnet um neun.", "Es schließt um fünf."]),
        ("¿Cuándo abre el museo? Abre a las nueve.", ["¿Cuándo abre el museo?", "Abre a las nueve."]),
        ("博物馆九点开门营业。下午五点准时关门！", ["博物馆九点开门营业。", "下午五点准时关门！"]),
        ("first line of it\nsecond line of it", ["first line of it", "second line of it"]),
        ("first line of it\r\nsecond line of it", ["first line of it", "second line of it"]),
        ("Yes. The museum opens at nine.", ["Yes. The museum opens at nine."]),  # too short to stand alone
        ("The museum opens at nine. Yes.", ["The museum opens at nine. Yes."]),
        ("version 1.2.3 of the file a.b.c is here", ["version 1.2.3 of the file a.b.c is here"]),
        ("\u200b", ["\u200b"]),
    ],
)  # fmt: skip
def test_a_span_is_a_sentence_or_a_line(text: str, expected: list[str]) -> None:
    assert of(text) == expected


def test_a_long_line_is_cut_at_punctuation_or_blanks_and_otherwise_anywhere() -> None:
    assert all(piece.endswith((",", "word")) for piece in of("some word, " * 100))
    assert "".join(of("x" * 1000)) == "x" * 1000


@pytest.mark.parametrize("unit", ["a. ", ".", "?!", '."', ".'x", "\n", "a\n", "。", "a b. c. "])
def test_a_text_made_to_be_slow_is_cut_all_the_same(unit: str) -> None:
    text = unit * (600_000 // len(unit))
    found = spans(text)  # quadratic, this would take hours
    assert sum(len(text[a:b].split()) for a, b in found) >= len(text.split())


TOKENS = st.lists(st.one_of(st.integers(2, 20), st.integers(2, 700)), max_size=80)


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.integers(20, 640), st.integers(0, 100))
def test_windows_hold_every_span_overlap_and_stay_small(tokens: list[int], most: int, overlap: int) -> None:
    texts = Texts(("a",), ("",), tuple(SourceSpan(0, i, i + 1) for i in range(len(tokens))), tuple(tokens))
    found = windows(texts, most, overlap)
    assert [n for w in found[:1] for n in (w.first,)] == ([0] if tokens else [])
    assert (found[-1].last if found else 0) == len(tokens)
    for window in found:
        assert window.last > window.first
        assert window.last == window.first + 1 or sum(tokens[window.first : window.last]) <= most
    for before, after in itertools.pairwise(found):
        assert before.first < after.first <= before.last < after.last  # no gap, and something new
        repeated = sum(tokens[after.first : before.last])
        longer = repeated + tokens[after.first - 1] if after.first > before.first + 1 else None
        if repeated < overlap and longer is not None:
            assert longer + tokens[before.last] > most  # a longer overlap would leave no room for what is new


@pytest.mark.parametrize("count", [100, 1000, 4000])
def test_the_cost_of_windows_is_linear(count: int) -> None:
    tokens = [(7 * i) % 61 + 3 for i in range(count)]
    texts = Texts(("a",), ("",), tuple(SourceSpan(0, i, i + 1) for i in range(count)), tuple(tokens))
    read = sum(sum(tokens[w.first : w.last]) for w in windows(texts, 640, 48))
    assert read < 1.25 * sum(tokens)
