"""From readings of windows to a finding: spans, sources, heads, score, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from clearhead.guard.calibration import Baseline, Calibration
from clearhead.guard.features import FLOOR, Reading
from clearhead.guard.finding import Finding, HeadMove, SourceFinding, Span, Thresholds
from clearhead.guard.layout import Texts
from clearhead.guard.readout import CLASSES, Floats, Readout, features

SPANS, HEADS = 5, 8
"""How many spans and heads a finding names at most."""

MOVED = 2.0
"""Standard deviations of benign texts from which on a head counts as moved."""

_LOG_MOST = 30.0


class Reader(Protocol):
    """What judging needs to know of a detector."""

    calibration: Calibration
    readout: Readout
    thresholds: Thresholds
    preset: str
    method: str
    loaded: Any


class Judged(NamedTuple):
    """A finding, and where its strongest span was read: number of the window, place in it, its reading."""

    finding: Finding
    window: int
    place: int
    reading: Reading


def judge(
    reader: Reader, texts: Texts, readings: Sequence[tuple[Sequence[int], Reading]], *, late: bool = False
) -> Judged:
    """Judge texts by the readings of their windows.

    readings: per window the numbers of its spans and what was read. late: not all windows were read. A window
    that is longer than those of the calibration counts as several. A span without a token of its own is read
    with the neighbour that has them.
    """
    readout, calibration = reader.readout, reader.calibration
    odds: dict[int, float] = {}
    where: dict[int, tuple[int, int]] = {}
    window_odds: list[Floats] = []
    logits: list[Floats] = []
    for number, (spans, reading) in enumerate(readings):
        x = features(reading, readout.views)
        logits.append(readout.span_logits(x))
        found = np.where(reading.sizes > 0, readout.span_odds(x), -np.inf).astype(np.float32)
        window_odds.append(found)
        for place, (span, value) in enumerate(zip(spans, found, strict=True)):
            if span not in odds or value > odds[span]:
                odds[span], where[span] = float(value), (number, place)
    longer = [max(1.0, float(r.sizes.sum()) / calibration.window) for _, r in readings]
    score = sigmoid(readout.odds(window_odds, sum(longer)))
    ranked = sorted(odds, key=lambda span: -odds[span])
    best_window, best_place = where[ranked[0]]
    reading = readings[best_window][1]
    reason = calibration.domain.why_foreign(text_place([r for _, r in readings]))
    verdict = _verdict(score, reader.thresholds)
    sources = _sources(texts, odds, readings, readout, reader.thresholds, calibration.baseline)
    if reason:
        verdict = "unjudged"
        sources = tuple(replace(source, verdict=verdict) for source in sources)
    elif late and verdict == "allow":
        verdict, reason = (
            "unjudged",
            f"the deadline came before all was read ({len(odds)} of {len(texts.spans)} spans)",
        )
    finding = Finding(
        score=score,
        verdict=verdict,
        classes=_classes(logits[best_window][best_place]),
        thresholds=reader.thresholds,
        preset=reader.preset,
        spans=tuple(
            _span(texts, span, odds[span], readings[where[span][0]][1], where[span][1])
            for span in ranked[:SPANS]
        ),
        heads=moved_heads(reading, calibration.baseline, reader.loaded),
        sources=sources,
        tokens=sum(r.tokens for _, r in readings),
        windows=len(readings),
        seconds=0.0,
        calibration=calibration.id,
        method=reader.method,
        reason=reason,
    )
    return Judged(finding, best_window, best_place, reading)


def unread(reader: Reader, texts: Texts, note: str, seconds: float) -> Finding:
    """Return the finding of texts without a word in them: allowed, with a note."""
    sources = tuple(
        SourceFinding(name, 0.0, "allow", 0, len(text), 1.0, 0.0, 0.0)
        for name, text in zip(texts.names, texts.texts, strict=True)
    )
    return Finding(
        0.0, "allow", dict.fromkeys(CLASSES, 0.0) | {"none": 1.0}, reader.thresholds, reader.preset, (), (),
        sources, 0, 0, seconds, reader.calibration.id, reader.method, notes=(note,),
    )  # fmt: skip


def text_place(readings: Sequence[Reading]) -> Floats:
    """Return where texts lie in the hidden space: the spans' mean after the first kept layer, (D,)."""
    place: Floats = np.concatenate([reading.hidden[0] for reading in readings]).mean(0)
    return place


def sigmoid(value: float) -> float:
    """Return 1 / (1 + e^−value)."""
    return float(1 / (1 + np.exp(-np.clip(value, -_LOG_MOST, _LOG_MOST))))


def head_odds(reading: Reading) -> Floats:
    """Return per head log(mass on the texts / mass on the instruction) of the last token, (H,)."""
    text = reading.spans[-1].sum(0)
    out: Floats = np.log(text + FLOOR) - np.log(reading.instruction[-1] + FLOOR)
    return out


def moves(reading: Reading, baseline: Baseline, *, hidden: float = 0.0) -> Floats:
    """Return how far every head moved from the instruction to the texts, (H,): standard deviations of benign
    texts as long, positive towards the texts.

    hidden: tokens of the texts that no head could see, so that they count for nothing. There must be others.
    """
    usual = baseline.intercept + baseline.slope * np.log(reading.sizes.sum() - hidden)
    out: Floats = (head_odds(reading) - usual) / baseline.spread
    return out


def moved_heads(reading: Reading, baseline: Baseline, loaded: Any) -> tuple[HeadMove, ...]:
    """Return the heads that moved most from the instruction to the texts, against benign texts as long."""
    moved = moves(reading, baseline)
    heads = int(loaded.model.config.get_text_config().num_attention_heads)
    text = reading.spans[-1].sum(0)
    return tuple(
        HeadMove(
            int(h) // heads,
            int(h) % heads,
            float(moved[h]),
            float(reading.instruction[-1][h]),
            float(text[h]),
        )
        for h in np.argsort(-moved)[:HEADS]
        if moved[h] >= MOVED
    )


def _verdict(score: float, thresholds: Thresholds) -> str:
    return "block" if score >= thresholds.block else "flag" if score >= thresholds.flag else "allow"


def _classes(logits: Floats) -> dict[str, float]:
    z = np.exp(np.clip(np.array([0.0, *logits]), -_LOG_MOST, _LOG_MOST))
    return {name: float(p) for name, p in zip(CLASSES, z / z.sum(), strict=True)}


def _span(texts: Texts, number: int, odds: float, reading: Reading, place: int) -> Span:
    source, start, end = texts.spans[number]
    text = texts.texts[source]
    average = reading.spans[-1].mean(1)  # over heads
    others = (1 - average[place]) / max(1.0, reading.tokens - float(reading.sizes[place]))
    own = average[place] / max(1.0, float(reading.sizes[place]))
    return Span(
        source=texts.names[source],
        start=start,
        end=end,
        line=text.count("\n", 0, start) + 1,
        column=start - (text.rfind("\n", 0, start) + 1) + 1,
        text=text[start:end],
        pull=sigmoid(odds),
        attention=float(own / max(others, FLOOR)),
    )


def _sources(
    texts: Texts,
    odds: dict[int, float],
    readings: Sequence[tuple[Sequence[int], Reading]],
    readout: Readout,
    thresholds: Thresholds,
    baseline: Baseline,
) -> tuple[SourceFinding, ...]:
    mass: dict[int, list[tuple[float, float]]] = {}
    for spans, reading in readings:
        average = reading.spans[-1].mean(1)
        by_source: dict[int, list[float]] = {}
        for place, span in enumerate(spans):
            entry = by_source.setdefault(texts.spans[span].source, [0.0, 0.0])
            entry[0] += float(average[place])
            entry[1] += float(reading.sizes[place])
        for source, (got, size) in by_source.items():
            mass.setdefault(source, []).append((got, size))
    spans_of: list[list[int]] = [[] for _ in texts.names]
    for i, where in enumerate(texts.spans):
        spans_of[where.source].append(i)
    out = []
    for number, (name, text, own) in enumerate(zip(texts.names, texts.texts, spans_of, strict=True)):
        seen = [i for i in own if i in odds]
        whole = sum(texts.spans[i].end - texts.spans[i].start for i in own)
        share = sum(texts.spans[i].end - texts.spans[i].start for i in seen) / whole if whole else 1.0
        score = sigmoid(readout.odds([np.array([odds[i] for i in seen], np.float32)], 1.0)) if seen else 0.0
        verdict = _verdict(score, thresholds)
        if verdict == "allow" and len(seen) < len(own):
            verdict = "unjudged"
        best = max(mass.get(number, [(0.0, 0.0)]))
        usual = np.exp(baseline.mass[0] + baseline.mass[1] * np.log(max(1.0, best[1]))) if best[1] else 0.0
        out.append(
            SourceFinding(
                name=name,
                score=score,
                verdict=verdict,
                tokens=sum(texts.tokens[i] for i in own),
                characters=len(text),
                read=share,
                mass=best[0],
                baseline=float(usual),
            )
        )
    return tuple(out)
