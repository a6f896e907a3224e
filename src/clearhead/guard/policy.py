"""What a host does about a finding: modes, allow-list, deadline, errors, cache. No model and no torch."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from clearhead.errors import ArgumentError, ClearheadError
from clearhead.guard.allow import AllowList
from clearhead.guard.finding import Finding, Thresholds
from clearhead.guard.redacting import MARKER, pulled, redact
from clearhead.guard.results import Results, key
from clearhead.guard.running import Running

MODES = ("observe", "flag", "redact", "block")
ON_ERROR = ("open", "closed")
ACTIONS = ("pass", "redact", "refuse")
SHARE = 0.8
"""Of the time that is left when a scan begins, what a scanner that takes a deadline is given."""
WHOLE = "text"
"""The name of a source that came without one."""

_log = logging.getLogger("clearhead.guard")


class Scanner(Protocol):
    """What judges: `InjectionDetector`, or anything of that shape.

    If it has an attribute `calibration` with an `id`, a `preset`, a `method` or `views`, the cache tells by
    them. If its scan takes a `deadline` in seconds, it is given one, so that it says what it found by then.
    """

    def scan(self, instruction: str | None, sources: Mapping[str, str]) -> Finding:
        """Return what pulls away from the instruction in the sources, name → text. None: nobody gave one."""
        ...


@dataclass(frozen=True)
class Decision:
    """What to do with the texts.

    action: one of `ACTIONS`: pass them on, pass on what is left of them, refuse them. texts: name → what may
    be passed on; empty if refused. finding: why; its notes say what the policy did. error: what the scanner
    raised, if it did.
    """

    action: str
    finding: Finding
    texts: dict[str, str]
    error: BaseException | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str | None:
        """The text, if there was one source and it may be passed on, else None."""
        return next(iter(self.texts.values())) if len(self.texts) == 1 else None

    @property
    def unjudged(self) -> bool:
        """Whether nothing can be said of the texts."""
        return self.finding.verdict == "unjudged"

    def summary(self) -> dict[str, Any]:
        """Return what happened in plain values, without a word of the texts: for logs, headers and errors."""
        finding = self.finding
        return {
            "action": self.action,
            "verdict": finding.verdict,
            "score": finding.score,
            "preset": finding.preset,
            "flag_threshold": finding.thresholds.flag,
            "flag_false_alarms": finding.thresholds.flag_fpr,
            "spans": [
                {"source": span.source, "line": span.line, "start": span.start, "end": span.end}
                for span in pulled(finding)
            ],
            "calibration": finding.calibration,
            "reason": finding.reason,
            "notes": list(finding.notes),
        }


class Guarded:
    """A scanner and what its verdicts mean for the host. Thread-safe.

    mode: "observe": everything is passed on, and logged. "flag": the same, and the host is told. "redact":
    with an alarm (flag or block) the spans that pulled are cut out; without a span to cut, refused. "block":
    the verdict block is refused, flag is passed on and the host is told.
    on_error: what becomes of texts that could not be judged (the scanner said so, raised, or was late):
    "open" passes them on, "closed" refuses them; in mode "observe" they are passed on in any case.
    Neither has a default: both are the host's to decide. Which it was stands in the finding's notes.
    deadline: seconds that a decision may take, waiting included; None: as long as it takes. The scan of a
    late text goes on in its thread, up to the scanner's own deadline if it takes one, and what it finds is in
    the cache for the next time.
    allow: what passes unscanned. cache: how many findings are kept, by hash of instruction, texts and
    calibration id. threads: how many scans run at once. log_text: whether the log may quote the texts.
    Raises ArgumentError for values outside these.
    """

    def __init__(
        self,
        scanner: Scanner,
        *,
        mode: str,
        on_error: str,
        deadline: float | None = None,
        allow: AllowList | None = None,
        cache: int = 1024,
        threads: int = 1,
        marker: str = MARKER,
        log_text: bool = False,
    ) -> None:
        if not callable(getattr(scanner, "scan", None)):
            raise ArgumentError(
                f"scanner must have a method scan(instruction, sources), got {type(scanner).__name__}"
            )
        if mode not in MODES:
            raise ArgumentError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if on_error not in ON_ERROR:
            raise ArgumentError(f"on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        if deadline is not None and not (isinstance(deadline, int | float) and 0 < deadline < 1e6):
            raise ArgumentError(f"deadline must be a number of seconds above 0, or None, got {deadline!r}")
        if not isinstance(allow, AllowList | None):
            raise ArgumentError(f"allow must be an AllowList or None, got {type(allow).__name__}")
        self.scanner, self.mode, self.on_error, self.deadline = scanner, mode, on_error, deadline
        self.allow = allow or AllowList()
        self.marker, self.log_text = marker, log_text
        self.results = Results(cache)
        self._running = Running(threads)
        self._takes_deadline = "deadline" in inspect.signature(scanner.scan).parameters

    def decide(self, instruction: str, sources: str | Mapping[str, str]) -> Decision:
        """Scan texts that came with an instruction, and decide. Blocks until decided; see `adecide`.

        instruction: what the texts are for, or "" where nobody said. sources: one text, or name → text.
        Raises ArgumentError for anything else: a mistake of the host is never an "open" error.
        """
        raised: Exception | None
        started, texts = time.perf_counter(), _named(instruction, sources)
        scanned, notes, task = self._begin(instruction, texts, started)
        if not isinstance(task, Future):
            return self._end(texts, scanned, task, notes, None)
        try:
            return self._end(texts, scanned, task.result(self.deadline), notes, None)
        except Late as error:
            raised = error if task.done() else None
        except Exception as error:
            raised = error
        return self._failed(texts, scanned, task, raised, notes, time.perf_counter() - started)

    async def adecide(self, instruction: str, sources: str | Mapping[str, str]) -> Decision:
        """The same without blocking the event loop: the scan runs in a thread."""
        raised: Exception | None
        started, texts = time.perf_counter(), _named(instruction, sources)
        scanned, notes, task = self._begin(instruction, texts, started)
        if not isinstance(task, Future):
            return self._end(texts, scanned, task, notes, None)
        try:
            waiting = asyncio.shield(asyncio.wrap_future(task))
            finding = await asyncio.wait_for(waiting, self.deadline)
            return self._end(texts, scanned, finding, notes, None)
        except asyncio.CancelledError:
            self._running.leave(task)
            raise
        except TimeoutError as error:
            raised = error if task.done() else None
        except Exception as error:
            raised = error
        return self._failed(texts, scanned, task, raised, notes, time.perf_counter() - started)

    def _begin(
        self, instruction: str, texts: dict[str, str], started: float
    ) -> tuple[dict[str, str], tuple[str, ...], Finding | Future[Finding]]:
        notes: list[str] = []
        scanned: dict[str, str] = {}
        for name, text in texts.items():
            why = "it is empty" if not text.strip() else self.allow.why(name, text)
            if why:
                notes.append(f"source {name!r} was not scanned: {why}")
            else:
                scanned[name] = text
        if scanned and not instruction.strip():
            notes.append("nobody said what the texts are for")
        if not scanned:
            return scanned, tuple(notes), _unscored("allow", "", _calibration(self.scanner))
        told = key(instruction, scanned, _identity(self.scanner))
        kept = self.results.get(told, scanned)
        if kept is not None:
            return scanned, tuple(notes), kept

        def scan() -> Finding:
            more: dict[str, Any] = {}
            if self.deadline is not None and self._takes_deadline:
                left = self.deadline - (time.perf_counter() - started)
                more["deadline"] = max(left, 0.01) * SHARE
            finding = self.scanner.scan(instruction if instruction.strip() else None, scanned, **more)
            self.results.put(told, finding)
            return finding

        return scanned, tuple(notes), self._running.begin(told, scan)

    def _failed(
        self,
        texts: dict[str, str],
        scanned: dict[str, str],
        task: Future[Finding],
        error: BaseException | None,
        notes: tuple[str, ...],
        seconds: float,
    ) -> Decision:
        if error is None:
            self._running.leave(task)
            reason = f"not read within {self.deadline:g} s"
        elif isinstance(error, ClearheadError):
            reason = f"{type(error).__name__}: {error}"
        else:
            reason = f"the scanner raised {type(error).__name__}"  # its message may quote the text
        finding = _unscored("unjudged", reason, _calibration(self.scanner), seconds)
        return self._end(texts, scanned, finding, notes, error)

    def _end(
        self,
        texts: dict[str, str],
        scanned: dict[str, str],
        finding: Finding,
        notes: tuple[str, ...],
        error: BaseException | None,
    ) -> Decision:
        action, why, passed = "pass", "", texts
        if finding.verdict == "unjudged":
            refused = self.on_error == "closed" and self.mode != "observe"
            action = "refuse" if refused else "pass"
            why = f"unjudged, mode {self.mode}, on_error={self.on_error}: "
            why += "refused" if refused else "passed on"
        elif finding.alarmed:
            if self.mode == "redact" and finding.spans:
                try:
                    passed = {**texts, **redact(finding, scanned, self.marker)}
                    action, why = "redact", f"mode redact: {len(pulled(finding))} span(s) cut out"
                except ArgumentError as wrong:
                    action, why = "refuse", f"mode redact: refused, nothing could be cut out: {wrong}"
            elif self.mode == "redact":
                action, why = "refuse", "mode redact: refused, no span to cut out"
            elif self.mode == "block" and finding.verdict == "block":
                action, why = "refuse", "mode block: refused"
            else:
                why = f"mode {self.mode}: passed on"
        finding = replace(finding, notes=(*finding.notes, *notes, *((why,) if why else ())))
        decision = Decision(action, finding, {} if action == "refuse" else dict(passed), error)
        if why:
            self._say(decision)
        return decision

    def _say(self, decision: Decision) -> None:
        finding = decision.finding
        quoted = [span.text for span in pulled(finding)] if self.log_text else "not logged"
        _log.warning(
            "%s: verdict %s, score %.3f, %d source(s), %s; text: %a",
            decision.action,
            finding.verdict,
            finding.score,
            len(finding.sources),
            finding.reason.split(":")[0] or finding.preset,
            quoted,
        )


def _named(instruction: str, sources: str | Mapping[str, str]) -> dict[str, str]:
    texts = {WHOLE: sources} if isinstance(sources, str) else sources
    if not isinstance(instruction, str):
        raise ArgumentError(f"instruction must be a str, got {type(instruction).__name__}")
    if not isinstance(texts, Mapping):
        raise ArgumentError(f"sources must be a str or a mapping name → text, got {type(sources).__name__}")
    for name, text in texts.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ArgumentError(
                f"sources must map str to str, got {type(name).__name__} → {type(text).__name__}"
            )
    return dict(texts)


def _calibration(scanner: Scanner) -> str:
    return str(getattr(getattr(scanner, "calibration", None), "id", ""))


def _identity(scanner: Scanner) -> str:
    parts = (str(getattr(scanner, name, "")) for name in ("preset", "method", "views"))
    return "\n".join((_calibration(scanner), *parts))


def _unscored(verdict: str, reason: str, calibration: str, seconds: float = 0.0) -> Finding:
    return Finding(
        score=0.0,
        verdict=verdict,
        classes={},
        thresholds=Thresholds(1.0, 1.0, 0.0, 0.0, 0, "none: nothing was scored"),
        preset="",
        spans=(),
        heads=(),
        sources=(),
        tokens=0,
        windows=0,
        seconds=seconds,
        calibration=calibration,
        method="none",
        reason=reason,
    )
