"""Every sample through a detector or a classifier, one after the other, resumed where it was stopped."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from clearhead.errors import ArgumentError, ClearheadError
from clearhead.guard.evaluate.metrics import Bools, Floats, Place
from clearhead.guard.samples import Sample

Tell = Callable[[str, float], None]
"""Told what is being done and the share of it that is done, 0…1."""


class Judge(Protocol):
    """What scans: `InjectionDetector`, `Classifier`, or anything of that shape."""

    def scan(self, instruction: str, sources: str) -> Any:
        """Return a finding: score, verdict, spans with start and end, tokens, seconds."""
        ...


@dataclass(frozen=True)
class Scored:
    """What one judge says of n samples.

    scores (n,): higher for attacks. thresholds: by name, "fpr_5" and "fpr_1" for our detector. spans: of each
    sample the strongest first, or None where it names none. seconds, tokens (n,): of each scan, or None.
    unjudged (n,): what it refused; its score counts nonetheless, unless it gave none (then 0). calibrated:
    whether scores are meant as probabilities. learned_from: names of sets that it was calibrated on. about:
    what it is.
    """

    name: str
    about: str
    scores: Floats
    unjudged: Bools
    thresholds: dict[str, float] = field(default_factory=dict)
    spans: tuple[tuple[Place, ...], ...] | None = None
    seconds: Floats | None = None
    tokens: Floats | None = None
    calibrated: bool = False
    learned_from: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.scores) == len(self.unjudged) == len(self.spans or self.scores):
            raise ArgumentError(f"{self.name}: scores, unjudged and spans must be of the same samples")

    def of(self, indices: Any) -> Scored:
        """Return the same of some of the samples."""
        return Scored(
            self.name,
            self.about,
            self.scores[indices],
            self.unjudged[indices],
            self.thresholds,
            None if self.spans is None else tuple(self.spans[i] for i in indices),
            None if self.seconds is None else self.seconds[indices],
            None if self.tokens is None else self.tokens[indices],
            self.calibrated,
            self.learned_from,
        )


def scan_all(
    judge: Judge,
    samples: Sequence[Sample],
    *,
    name: str = "",
    about: str = "",
    cache: Path | None = None,
    tell: Tell | None = None,
) -> Scored:
    """Scan every sample.

    cache: a folder where what was found is kept, by hash of judge, instruction and text, one line as soon as
    a text was read; a later run goes on from there. No text is written into it. tell: for progress.

    Raises ArgumentError where the folder cannot be written. A text at which the judge raises a ClearheadError
    counts as unjudged, with score 0.
    """
    name = name or str(getattr(judge, "method", type(judge).__name__))
    identity = _identity(judge)
    rows: list[dict[str, Any]] = []
    with _kept(cache, identity) as (known, file):
        for number, sample in enumerate(samples):
            key = _key(identity, sample)
            row = known.get(key)
            if row is None:
                row = _scan(judge, sample)
                known[key] = row
                if file is not None:
                    file.write(json.dumps({"key": key} | row) + "\n")
                    file.flush()
            rows.append(row)
            if tell is not None:
                tell(f"{name}: {number + 1} of {len(samples)} texts", (number + 1) / len(samples))
    return Scored(
        name,
        about or name,
        np.array([row["score"] for row in rows], np.float64),
        np.array([row["verdict"] == "unjudged" for row in rows], bool),
        thresholds_of(judge),
        tuple(tuple((int(a), int(b)) for a, b in row["spans"]) for row in rows)
        if getattr(judge, "localises", True)
        else None,
        np.array([row["seconds"] for row in rows], np.float64),
        np.array([row["tokens"] for row in rows], np.float64),
        bool(getattr(judge, "calibrated", hasattr(judge, "calibration"))),
        tuple(getattr(getattr(judge, "calibration", None), "mix", {}) or ()),
    )


def thresholds_of(judge: Judge) -> dict[str, float]:
    """Return a judge's alarm thresholds by preset: all that its calibration has, else the one in use."""
    calibration = getattr(judge, "calibration", None)
    by_views = getattr(calibration, "thresholds", None)
    views = "+".join(getattr(judge, "views", ()))
    if isinstance(by_views, dict) and isinstance(by_views.get(views), dict):
        return {preset: float(found.flag) for preset, found in by_views[views].items()}
    found = getattr(judge, "thresholds", None)
    return {} if found is None else {str(getattr(judge, "preset", "default")): float(found.flag)}


def _scan(judge: Judge, sample: Sample) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        found = judge.scan(sample.instruction, sample.text)
    except ClearheadError as error:
        return {
            "score": 0.0, "verdict": "unjudged", "spans": [], "tokens": 0,
            "seconds": time.perf_counter() - start, "reason": type(error).__name__,
        }  # fmt: skip
    return {
        "score": float(found.score),
        "verdict": found.verdict,
        "spans": [[span.start, span.end] for span in found.spans],
        "tokens": int(found.tokens),
        "seconds": float(found.seconds),
    }


def _identity(judge: Judge) -> str:
    from clearhead import __version__

    calibration = getattr(judge, "calibration", None)
    loaded = getattr(judge, "loaded", None)
    parts = [__version__, str(getattr(calibration, "id", ""))]
    parts += [str(getattr(loaded, what, "")) for what in ("name", "hash")]
    parts += [str(getattr(judge, what, "")) for what in ("identity", "method", "views")]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _key(identity: str, sample: Sample) -> str:
    told = f"{identity}\0{sample.instruction}\0{sample.text}"
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@contextmanager
def _kept(cache: Path | None, identity: str) -> Iterator[tuple[dict[str, dict[str, Any]], IO[str] | None]]:
    if cache is None:
        yield {}, None
        return
    path = cache / f"scans-{identity}.jsonl"
    known: dict[str, dict[str, Any]] = {}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for line in path.read_text(encoding="utf-8").split("\n"):
                try:
                    row = json.loads(line)
                    known[row.pop("key")] = row
                except (ValueError, KeyError, AttributeError, TypeError):
                    continue  # the last line of a run that was killed
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")  # ends such a line
            yield known, file
    except OSError as error:
        raise ArgumentError(f"the cache {path} cannot be used: {error}") from error
