"""The llm-guard scanners, alone and in llm-guard itself (`make integrations` installs it)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integrations.fakes import FLAGGED, PLAIN, PLANTED, Fake

from clearhead.guard.policy import Guarded
from clearhead.integrations.llm_guard import InjectionOutputScanner, InjectionScanner

LEFT = "Open from nine to five. [removed by guard] Closed on Mondays."


def scanner(mode: str = "block", on_error: str = "closed", fake: Fake | None = None) -> InjectionScanner:
    return InjectionScanner(
        Guarded(fake or Fake(), mode=mode, on_error=on_error), instruction="When does it open?"
    )


@pytest.mark.parametrize(
    ("mode", "text", "expected"),
    [
        ("block", "", ("", True, -1.0)),
        ("block", " \n", (" \n", True, -1.0)),
        ("block", PLAIN, (PLAIN, True, -0.96)),
        ("block", PLANTED, (PLANTED, False, 0.94)),
        ("block", FLAGGED, (FLAGGED, True, 0.2)),
        ("redact", PLANTED, (LEFT, False, 0.94)),
        ("flag", PLANTED, (PLANTED, True, 0.94)),
        ("observe", PLANTED, (PLANTED, True, 0.94)),
    ],
)
def test_text_validity_and_risk_are_those_of_llm_guard(
    mode: str, text: str, expected: tuple[str, bool, float]
) -> None:
    assert scanner(mode).scan(text) == expected
    guarded = Guarded(Fake(), mode=mode, on_error="closed")
    assert InjectionOutputScanner(guarded).scan("When does it open?", text) == expected


def test_an_output_is_judged_against_the_prompt_or_what_was_said() -> None:
    fake = Fake()
    guarded = Guarded(fake, mode="block", on_error="closed")
    InjectionOutputScanner(guarded).scan("When?", PLAIN)
    InjectionOutputScanner(guarded, instruction="Summarise.").scan("When?", PLAIN)
    assert [asked for asked, _ in fake.seen] == ["When?", "Summarise."]


@pytest.mark.parametrize(
    ("on_error", "expected"), [("closed", (PLAIN, False, 1.0)), ("open", (PLAIN, True, 0.0))]
)
def test_an_unjudged_text_is_what_on_error_says(on_error: str, expected: tuple[str, bool, float]) -> None:
    fake = Fake()
    fake.error = RuntimeError()
    assert scanner(on_error=on_error, fake=fake).scan(PLAIN) == expected


@pytest.fixture
def llm_guard() -> Any:
    return pytest.importorskip("llm_guard", reason="llm-guard is not installed: make integrations")


# What llm-guard's dependencies warn of when they are imported is not ours.
@pytest.mark.filterwarnings("default")
def test_llm_guard_runs_the_input_scanner(llm_guard: Any) -> None:
    assert llm_guard.scan_prompt([scanner()], PLAIN) == (
        PLAIN,
        {"InjectionScanner": True},
        {"InjectionScanner": -0.96},
    )
    assert llm_guard.scan_prompt([scanner("redact")], PLANTED) == (
        LEFT,
        {"InjectionScanner": False},
        {"InjectionScanner": 0.94},
    )


@pytest.mark.filterwarnings("default")
def test_llm_guard_runs_the_output_scanner_beside_its_own(llm_guard: Any) -> None:
    from llm_guard.output_scanners import BanSubstrings

    ours = InjectionOutputScanner(Guarded(Fake(), mode="redact", on_error="closed"))
    text, valid, risk = llm_guard.scan_output([ours, BanSubstrings(["Mondays"])], "When?", PLANTED)
    assert (text, risk["InjectionOutputScanner"]) == (LEFT, 0.94)
    assert valid == {"InjectionOutputScanner": False, "BanSubstrings": False}
