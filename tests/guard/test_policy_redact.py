"""What is cut out, and what stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.integrations.fakes import ATTACK, PLAIN, PLANTED, Fake

from clearhead.errors import ArgumentError
from clearhead.guard.finding import Finding, Span
from clearhead.guard.redacting import pulled, redact

TEXT = "One. Two. Three. Four."


def finding(*places: tuple[int, int, float], verdict: str = "block", source: str = "page") -> Finding:
    spans = tuple(Span(source, a, b, 1, a + 1, TEXT[a:b], pull, 1.0) for a, b, pull in places)
    return replace(Fake().scan("", {source: ATTACK}), spans=spans, verdict=verdict)


def test_the_rest_stays_to_the_character() -> None:
    page = {"page": PLANTED, "mail": PLAIN}
    cut = redact(Fake().scan("", page), page, "[…]")
    assert cut == {"page": PLANTED.replace(ATTACK, "[…]"), "mail": PLAIN}


@pytest.mark.parametrize(
    ("places", "left"),
    [
        ([(5, 9, 0.9), (17, 22, 0.8)], "One. # Three. #"),
        ([(5, 12, 0.9), (10, 16, 0.8)], "One. # Four."),
        ([(5, 10, 0.9), (10, 16, 0.8)], "One. # Four."),
        ([(5, 16, 0.9), (10, 12, 0.8)], "One. # Four."),
        ([(0, 22, 0.9)], "#"),
        ([(0, 4, 0.1), (5, 9, 0.2)], "One. # Three. Four."),
    ],
)
def test_spans_that_touch_become_one_cut_and_weak_ones_stay(
    places: list[tuple[int, int, float]], left: str
) -> None:
    assert redact(finding(*places), {"page": TEXT}, "#") == {"page": left}


def test_a_clean_text_loses_nothing() -> None:
    clean = finding((0, 4, 0.9), verdict="allow")
    assert pulled(clean) == ()
    assert redact(clean, {"page": TEXT}) == {"page": TEXT}


@pytest.mark.parametrize("sources", [{"mail": TEXT}, {"page": "Another text altogether."}, {"page": ""}])
def test_a_finding_of_another_text_cuts_nothing_out_of_this_one(sources: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match="the finding"):
        redact(finding((5, 9, 0.9)), sources)
