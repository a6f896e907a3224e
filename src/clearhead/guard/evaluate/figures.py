"""The figures of one judge on some samples, each with its interval, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.metrics import (
    Bools,
    Estimate,
    auroc_interval,
    ece,
    hit_within,
    reliability,
    share_interval,
    tpr_interval,
)  # fmt: skip
from clearhead.guard.evaluate.scanning import Scored
from clearhead.guard.samples import Sample

Figure = dict[str, Any]
"""value, low, high, n, attacked, contexts; or reason alone."""

FEW = 10
"""Attacked texts below which a cell is shown but does not count as the lowest one."""


def estimate(make: Callable[[], Estimate]) -> Figure:
    """Return an estimate as plain values, or why it cannot be made."""
    try:
        return {name: _plain(value) for name, value in make()._asdict().items()}
    except ArgumentError as error:
        return {"reason": str(error)}


def _plain(value: Any) -> Any:
    return None if value is None else round(float(value), 6) if isinstance(value, float) else int(value)


def labels(samples: Sequence[Sample]) -> Bools:
    """Return which samples are attacked, (n,)."""
    return np.array([s.attacked for s in samples], dtype=bool)


def contexts(samples: Sequence[Sample]) -> list[str]:
    """Return what is resampled: the context within its set."""
    return [f"{s.source}\0{s.context}" for s in samples]


def figures(scored: Scored, samples: Sequence[Sample], *, resamples: int, seed: int = 0) -> Figure:
    """Return all figures of a judge on samples.

    auroc; tpr_5, tpr_1: at 5% and 1% false alarms on these samples; by preset: the shares alarmed among
    attacked ones and among benign ones, these also by family; accuracy of what is benign only; ece and
    reliability where scores are probabilities; hit_1, hit_2: whether the strongest (one of the two
    strongest) spans is the attack, where the text holds more than it; seconds per 1,000 tokens; unjudged.
    """
    y, own = labels(samples), contexts(samples)
    draw = {"resamples": resamples, "seed": seed}
    out: Figure = {
        "n": len(samples),
        "attacked": int(y.sum()),
        "auroc": estimate(lambda: auroc_interval(scored.scores, y, own, **draw)),
        "tpr_5": estimate(lambda: tpr_interval(scored.scores, y, own, 0.05, **draw)),
        "tpr_1": estimate(lambda: tpr_interval(scored.scores, y, own, 0.01, **draw)),
        "presets": {
            preset: _at(scored.scores >= threshold, samples, y, own, draw) | {"threshold": threshold}
            for preset, threshold in scored.thresholds.items()
        },
        "unjudged": int(scored.unjudged.sum()),
    }
    if scored.calibrated and len(samples):
        out["ece"] = round(ece(scored.scores, y), 6)
        out["reliability"] = [
            [round(b.score, 4), round(b.share, 4), b.n] for b in reliability(scored.scores, y)
        ]
    if scored.spans is not None:
        out |= _hits(scored.spans, samples, draw)
    if scored.seconds is not None and scored.tokens is not None:
        out |= _times(scored.seconds, scored.tokens)
    return out


def _at(alarm: Bools, samples: Sequence[Sample], y: Bools, own: list[str], draw: dict[str, int]) -> Figure:
    def share(chosen: Bools) -> Figure:
        names = [own[i] for i in np.flatnonzero(chosen)]
        return estimate(lambda: share_interval(alarm[chosen], names, attacked=y[chosen], **draw))

    families = dict.fromkeys(s.family for s in samples if not s.attacked)
    by_family = {
        family: share(np.array([s.family == family and not s.attacked for s in samples], bool))
        for family in families
    }
    return {"tpr": share(y), "fpr": share(~y), "fpr_by_family": by_family}


def _hits(spans: Sequence[Any], samples: Sequence[Sample], draw: dict[str, int]) -> Figure:
    asked = [
        i
        for i, s in enumerate(samples)
        if s.attacked and s.start is not None and s.end is not None and s.position != "whole"
    ]
    own = contexts([samples[i] for i in asked])
    every = np.ones(len(asked), bool)

    def share(k: int) -> Figure:
        hits = [
            hit_within(spans[i], (samples[i].start or 0, samples[i].end or 0), k)
            for i in asked
        ]  # fmt: skip
        return estimate(lambda: share_interval(np.array(hits, bool), own, attacked=every, **draw))

    return {"hit_1": share(1), "hit_2": share(2)}


def _times(seconds: Any, tokens: Any) -> Figure:
    read = tokens > 0
    if not read.any():
        return {}
    per = 1000 * seconds[read] / tokens[read]
    return {
        "seconds_per_1k_p50": round(float(np.quantile(per, 0.5)), 4),
        "seconds_per_1k_p95": round(float(np.quantile(per, 0.95)), 4),
        "timed": int(read.sum()),
    }


def cells(
    scored: Scored, samples: Sequence[Sample], *, resamples: int, seed: int = 0, by_family: bool = True
) -> list[Figure]:
    """Return the AUROC of every set × kind of text × place (× attack family).

    A cell's attacks stand against all benign texts of the same set and kind; where a kind has none, against
    those of the set.
    """
    keys = [
        (s.source, s.kind, s.position, s.family) if by_family else (s.source, s.kind, s.position)
        for s in samples
    ]
    out = []
    for key in dict.fromkeys(k for k, s in zip(keys, samples, strict=True) if s.attacked):
        benign = [
            i for i, s in enumerate(samples) if not s.attacked and (s.source, s.kind) == key[:2]
        ] or [i for i, s in enumerate(samples) if not s.attacked and s.source == key[0]]  # fmt: skip
        chosen = [i for i, k in enumerate(keys) if k == key and samples[i].attacked] + benign
        part = [samples[i] for i in chosen]
        index = np.array(chosen)
        found = estimate(
            lambda part=part, index=index: auroc_interval(  # type: ignore[misc]
                scored.scores[index], labels(part), contexts(part), resamples=resamples, seed=seed
            )
        )
        names = ("set", "kind", "position", "family")[: len(key)]
        out.append(dict(zip(names, key, strict=True)) | {"auroc": found})
    return out


def lowest(cells: Sequence[Figure]) -> Figure | None:
    """Return the cell with the lowest AUROC among those with at least `FEW` attacked texts."""
    counted = [c for c in cells if c["auroc"].get("attacked", 0) >= FEW]
    return min(counted, key=lambda c: c["auroc"]["value"], default=None)
