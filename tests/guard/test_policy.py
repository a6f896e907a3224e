"""What a host is told to do: modes, errors, deadlines, allow-lists, the cache."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.integrations.fakes import ATTACK, FLAGGED, PLAIN, PLANTED, Fake

from clearhead.errors import ArgumentError
from clearhead.guard.allow import AllowList, digest
from clearhead.guard.policy import Decision, Guarded

ASK = "When does it open?"


def guarded(fake: Fake | None = None, **options: Any) -> Guarded:
    return Guarded(fake or Fake(), **{"mode": "block", "on_error": "closed", **options})


@pytest.fixture(params=["threads", "event loop"])
def decide(request: pytest.FixtureRequest) -> Any:
    if request.param == "threads":
        return lambda guard, *given: guard.decide(*given)
    return lambda guard, *given: asyncio.run(guard.adecide(*given))


@pytest.mark.parametrize(
    ("mode", "text", "action", "left"),
    [
        ("observe", PLANTED, "pass", PLANTED),
        ("observe", PLAIN, "pass", PLAIN),
        ("flag", PLANTED, "pass", PLANTED),
        ("flag", FLAGGED, "pass", FLAGGED),
        ("redact", PLANTED, "redact", "Open from nine to five. [removed by guard] Closed on Mondays."),
        ("redact", FLAGGED, "redact", "[removed by guard]"),
        ("redact", PLAIN, "pass", PLAIN),
        ("block", PLANTED, "refuse", None),
        ("block", FLAGGED, "pass", FLAGGED),
        ("block", PLAIN, "pass", PLAIN),
    ],
)
def test_each_mode_does_what_it_says(
    decide: Any, mode: str, text: str, action: str, left: str | None
) -> None:
    decision = decide(guarded(mode=mode), ASK, text)
    assert (decision.action, decision.text) == (action, left)
    assert any(note.startswith(f"mode {mode}") for note in decision.finding.notes) == (text != PLAIN)


@pytest.mark.parametrize(
    ("mode", "on_error", "action"),
    [
        ("block", "closed", "refuse"),
        ("block", "open", "pass"),
        ("flag", "closed", "refuse"),
        ("observe", "closed", "pass"),
    ],
)
def test_an_error_is_unjudged_and_on_error_decides_and_is_said(
    decide: Any, mode: str, on_error: str, action: str
) -> None:
    fake = Fake()
    fake.error = RuntimeError(f"out of memory at {ATTACK}")
    decision = decide(guarded(fake, mode=mode, on_error=on_error), ASK, PLANTED)
    assert decision.action == action
    assert decision.unjudged
    assert decision.error is fake.error
    assert decision.finding.reason == "the scanner raised RuntimeError"
    assert f"on_error={on_error}" in decision.finding.notes[-1]
    assert ATTACK not in str(decision.summary())


def test_an_error_of_ours_says_why(decide: Any) -> None:
    fake = Fake()
    fake.error = ArgumentError("sources must be text")
    assert decide(guarded(fake), ASK, PLAIN).finding.reason == "ArgumentError: sources must be text"


@pytest.mark.parametrize(("on_error", "action"), [("closed", "refuse"), ("open", "pass")])
def test_a_late_text_is_unjudged_and_is_there_the_next_time(decide: Any, on_error: str, action: str) -> None:
    fake = Fake()
    guard = guarded(fake, on_error=on_error, deadline=0.02)
    fake.gate.clear()
    late = decide(guard, ASK, PLANTED)
    assert (late.action, late.finding.verdict) == (action, "unjudged")
    assert late.finding.reason == "not read within 0.02 s"
    assert late.finding.seconds >= 0.02
    fake.gate.set()
    while not len(guard.results):
        threading.Event().wait(0.001)
    assert decide(guard, ASK, PLANTED).finding.verdict == "block"
    assert len(fake.seen) == 1


def test_a_scanner_that_takes_a_deadline_is_given_less_than_is_left(decide: Any) -> None:
    class Timed(Fake):
        def scan(self, instruction: str | None, sources: Any, *, deadline: float | None = None) -> Any:
            given.append(deadline)
            return super().scan(instruction, sources)

    given: list[float | None] = []
    decide(guarded(Timed(), deadline=5.0), ASK, PLAIN)
    decide(guarded(Timed()), ASK, PLAIN)
    assert given[0] is not None
    assert 3.0 < given[0] <= 4.0
    assert given[1] is None


def test_a_timeout_that_the_scanner_raises_is_its_error_and_not_ours(decide: Any) -> None:
    fake = Fake()
    fake.error = TimeoutError()
    assert decide(guarded(fake, deadline=5), ASK, PLAIN).finding.reason == "the scanner raised TimeoutError"


def test_a_scan_that_nobody_waits_for_never_begins() -> None:
    fake = Fake()
    guard = guarded(fake, deadline=0.02)
    fake.gate.clear()
    for text in ("one", "two", "three"):
        assert guard.decide(ASK, text).unjudged
    fake.gate.set()
    assert guard.decide(ASK, "four").action == "pass"
    assert [texts["text"] for _, texts in fake.seen] == ["one", "four"]


def test_the_same_text_is_scanned_once_however_many_ask() -> None:
    fake = Fake()
    guard = guarded(fake)
    fake.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        tasks = [pool.submit(guard.decide, ASK, PLANTED) for _ in range(8)]
        threading.Event().wait(0.05)
        fake.gate.set()
        assert {task.result().action for task in tasks} == {"refuse"}
    assert guard.decide(ASK, PLANTED).finding.notes[0] == "scanned before: from the cache"
    assert len(fake.seen) == 1


def test_another_instruction_source_or_calibration_is_another_scan() -> None:
    fake = Fake()
    guard = guarded(fake)
    for ask, sources in [
        (ASK, {"a": PLAIN}),
        (ASK + "?", {"a": PLAIN}),
        (ASK, {"b": PLAIN}),
        (ASK, {"a": PLAIN, "b": PLAIN}),
    ]:
        guard.decide(ask, sources)
    fake.calibration.id = "fake-2"
    guard.decide(ASK, {"a": PLAIN})
    assert len(fake.seen) == 5


def test_the_cache_is_bounded_holds_no_text_and_gives_the_spans_back() -> None:
    fake = Fake()
    guard = guarded(fake, cache=2)
    first = guard.decide(ASK, PLANTED)
    assert ATTACK not in repr(guard.results._kept)
    assert guard.decide(ASK, PLANTED).finding.spans == first.finding.spans
    for n in range(3):
        guard.decide(ASK, f"text {n}")
    assert len(guard.results) == 2
    guard.decide(ASK, PLANTED)
    assert len(fake.seen) == 5


def test_without_a_cache_everything_is_read_again() -> None:
    fake = Fake()
    guard = guarded(fake, cache=0)
    assert guard.decide(ASK, PLAIN).action == guard.decide(ASK, PLAIN).action == "pass"
    assert len(fake.seen) == 2


def test_what_is_unjudged_is_tried_again() -> None:
    fake = Fake()
    guard = guarded(fake)
    fake.error = RuntimeError()
    assert guard.decide(ASK, PLANTED).unjudged
    fake.error = None
    assert guard.decide(ASK, PLANTED).finding.verdict == "block"


def test_allowed_sources_and_texts_pass_unscanned_and_it_is_said() -> None:
    fake = Fake()
    guard = guarded(fake, allow=AllowList(sources=["handbook"], texts=[digest(PLANTED)]))
    decision = guard.decide(ASK, {"handbook": ATTACK, "page": PLANTED, "mail": PLAIN, "nothing": " \n"})
    assert fake.seen == [(ASK, {"mail": PLAIN})]
    assert decision.texts == {"handbook": ATTACK, "page": PLANTED, "mail": PLAIN, "nothing": " \n"}
    assert decision.finding.notes == (
        "source 'handbook' was not scanned: its source is on the allow-list",
        "source 'page' was not scanned: its text is on the allow-list",
        "source 'nothing' was not scanned: it is empty",
    )
    assert guard.decide(ASK, PLANTED + " ").action == "refuse"
    assert guard.decide(ASK, {"handbook": ATTACK}).finding.verdict == "allow"


def test_a_text_that_nobody_asked_anything_of_is_judged_and_it_is_said() -> None:
    fake = Fake()
    decision = guarded(fake).decide(" ", PLANTED)
    assert (decision.action, fake.seen[0][0]) == ("refuse", None)
    assert "nobody said what the texts are for" in decision.finding.notes


def test_only_the_source_that_pulled_is_cut() -> None:
    decision = guarded(mode="redact").decide(ASK, {"page": PLANTED, "mail": PLAIN})
    assert decision.texts["mail"] == PLAIN
    assert ATTACK not in decision.texts["page"]


def test_an_alarm_without_a_span_to_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.integrations.fakes.ATTACK", "nowhere")
    decision = guarded(mode="redact").decide(ASK, "IGNORE")
    assert (decision.action, decision.texts) == ("refuse", {})


def test_the_log_quotes_no_text_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        guarded().decide(ASK, PLANTED)
        assert "refuse: verdict block" in caplog.text
        assert "IGNORE" not in caplog.text
        guarded(log_text=True).decide(ASK, PLANTED)
        assert ATTACK in caplog.text


def test_a_host_that_gives_up_does_not_break_the_next_one() -> None:
    fake = Fake()
    guard = guarded(fake)
    fake.gate.clear()

    async def both() -> Decision:
        first = asyncio.create_task(guard.adecide(ASK, PLANTED))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(guard.adecide(ASK, PLANTED))
        await asyncio.sleep(0.02)
        first.cancel()
        fake.gate.set()
        return await second

    assert asyncio.run(both()).action == "refuse"
    assert len(fake.seen) == 1


def test_the_event_loop_runs_on_while_a_text_is_read() -> None:
    fake = Fake()
    fake.gate.clear()

    async def run() -> str:
        task = asyncio.create_task(guarded(fake).adecide(ASK, PLAIN))
        await asyncio.sleep(0.02)
        assert not task.done()
        fake.gate.set()
        return (await task).action

    assert asyncio.run(run()) == "pass"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "panic"}, "mode must be one of observe, flag, redact, block, got 'panic'"),
        ({"on_error": "ajar"}, "on_error must be one of open, closed, got 'ajar'"),
        ({"deadline": 0}, "deadline must be a number of seconds above 0, or None, got 0"),
        ({"deadline": float("nan")}, "deadline must be a number of seconds above 0, or None, got nan"),
        ({"cache": -1}, "cache must be a number of findings, 0 or more, got -1"),
        ({"threads": 0}, "threads must be a whole number, 1 or more, got 0"),
        ({"allow": ["a"]}, "allow must be an AllowList or None, got list"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        guarded(**options)
    assert str(caught.value) == message


def test_mode_and_on_error_must_be_said() -> None:
    with pytest.raises(TypeError):
        Guarded(Fake())  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match="scanner must have a method scan"):
        Guarded("a scanner", mode="block", on_error="open")  # type: ignore[arg-type]


@pytest.mark.parametrize("sources", [None, 3, ["a"], {"a": b"bytes"}, {3: "a"}])
def test_a_mistake_of_the_host_is_never_an_open_error(decide: Any, sources: Any) -> None:
    with pytest.raises(ArgumentError, match="sources must"):
        decide(guarded(on_error="open"), ASK, sources)
    with pytest.raises(ArgumentError, match="instruction must be a str, got NoneType"):
        decide(guarded(on_error="open"), None, PLAIN)


@pytest.mark.parametrize(
    "given",
    [{"sources": "handbook"}, {"texts": "abc"}, {"texts": ["abc"]}, {"sources": [3]}, {"texts": ["A" * 64]}],
)
def test_an_allow_list_that_would_allow_something_else_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        AllowList(**given)


def test_lone_surrogates_have_a_digest() -> None:
    assert digest("\ud800") != digest("?")
    assert guarded().decide(ASK, "a \ud800 b").action == "pass"


def test_the_policy_needs_no_torch() -> None:
    code = "import sys, clearhead.guard.policy; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
