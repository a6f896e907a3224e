"""AUROC, rates at low false-alarm rates, calibration error and localisation, with intervals by context."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import ArgumentError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

RESAMPLES = 1000
LEVEL = 0.95
#: Numbers of a block of resamples that are held at once.
_BLOCK = 4_000_000


class Estimate(NamedTuple):
    """A figure, its bootstrap interval, and on how much it rests.

    low, high: percentiles 2.5 and 97.5, None where the texts are of one context. n: texts. attacked: of them.
    contexts: resampled ones.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    attacked: int
    contexts: int


class Curve(NamedTuple):
    """A receiver operating characteristic, thresholds falling; all (k,) float64, from (0, 0) to (1, 1)."""

    thresholds: Floats
    fpr: Floats
    tpr: Floats


class Bin(NamedTuple):
    """Texts with scores in one interval: their mean score, the share of attacks among them, how many."""

    low: float
    high: float
    score: float
    share: float
    n: int


def roc(scores: Floats, attacked: Bools) -> Curve:
    """Return the ROC of scores (n,) against labels (n,). Raises ArgumentError for one class only."""
    _check(scores, attacked)
    order, ends = _ranked(scores)
    hits = attacked[order]
    tp, fp = np.cumsum(hits)[ends], np.cumsum(~hits)[ends]
    return Curve(
        np.concatenate([[np.inf], scores[order][ends]]),
        np.concatenate([[0.0], fp / fp[-1]]),
        np.concatenate([[0.0], tp / tp[-1]]),
    )


def auroc(scores: Floats, attacked: Bools) -> float:
    """Return the area under the ROC, ties counted half. Raises ArgumentError for one class only."""
    curve = roc(scores, attacked)
    return float(np.trapezoid(curve.tpr, curve.fpr))


def tpr_at(scores: Floats, attacked: Bools, fpr: float) -> float:
    """Return the largest true-positive rate at a false-positive rate of at most `fpr`, without interpolation.

    Raises ArgumentError for one class only, and where there are so few benign texts that one false alarm is
    already more than that: 1 / fpr are needed.
    """
    check_enough(attacked, fpr)
    curve = roc(scores, attacked)
    return float(curve.tpr[curve.fpr <= fpr + 1e-12].max())


def check_enough(attacked: Bools, fpr: float) -> None:
    """Raise ArgumentError where the benign texts are too few for a false-alarm rate."""
    benign, needed = int((~attacked).sum()), math.ceil(1 / fpr - 1e-9)
    if benign < needed:
        raise ArgumentError(
            f"a false-alarm rate of {fpr:.0%} needs {needed} benign texts at least, there are {benign}"
        )


def _ranked(scores: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Order of falling scores, and where each run of equal ones ends."""
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.diff(scores[order], append=np.nan) != 0)
    return order, ends


def _check(scores: Floats, attacked: Bools) -> None:
    if scores.shape != attacked.shape or scores.ndim != 1:
        raise ArgumentError(f"scores and labels must both be (n,), got {scores.shape} and {attacked.shape}")
    if not np.isfinite(scores).all():
        raise ArgumentError(f"scores must be finite, {int((~np.isfinite(scores)).sum())} are not")
    if attacked.all() or not attacked.any():
        count = int(attacked.sum())
        raise ArgumentError(
            f"both classes are needed, got {count} attacked and {len(attacked) - count} benign"
        )


def auroc_interval(
    scores: Floats, attacked: Bools, contexts: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Return the AUROC with its interval: contexts, with all their texts, are drawn with replacement.

    Raises ArgumentError for one class only.
    """
    _check(scores, attacked)
    order, ends = _ranked(scores)

    def areas(weights: Floats) -> Floats:
        tp, fp = _rates(weights, attacked, order, ends)
        return np.asarray(np.trapezoid(tp, fp, axis=1))

    return _interval(auroc(scores, attacked), areas, attacked, contexts, resamples, seed)


def tpr_interval(
    scores: Floats,
    attacked: Bools,
    contexts: Sequence[str],
    fpr: float,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Return `tpr_at` with its interval, the threshold fixed anew in every resample.

    Raises ArgumentError as `tpr_at` does.
    """
    value = tpr_at(scores, attacked, fpr)
    order, ends = _ranked(scores)

    def found(weights: Floats) -> Floats:
        tp, fp = _rates(weights, attacked, order, ends)
        best = np.where(fp <= fpr + 1e-12, tp, 0.0).max(1)
        return np.where(np.isnan(fp[:, -1]), np.nan, best)

    return _interval(value, found, attacked, contexts, resamples, seed)


def share_interval(
    hits: Bools,
    contexts: Sequence[str],
    *,
    attacked: Bools | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Return the share of hits, (n,), with its interval; where it is 0 or 1, the exact binomial bound.

    The bootstrap of a share without a single hit is a point; Clopper and Pearson's (1934) two-sided bound, as
    if every context were one trial, says what that leaves open.

    Raises ArgumentError for no texts.
    """
    if not len(hits):
        raise ArgumentError("a share needs at least one text, got none")
    value = float(hits.mean())
    labels = np.zeros(len(hits), bool) if attacked is None else attacked

    def found(weights: Floats) -> Floats:
        share: Floats = (weights @ hits.astype(np.float64)) / np.maximum(weights.sum(1), 1e-12)
        return share

    out = _interval(value, found, labels, contexts, resamples, seed)
    if value in (0.0, 1.0):
        bound = 1 - ((1 - LEVEL) / 2) ** (1 / max(out.contexts, 1))
        low, high = (0.0, bound) if value == 0.0 else (1 - bound, 1.0)
        out = out._replace(low=low, high=high)
    return out


def _rates(
    weights: Floats, attacked: Bools, order: NDArray[np.intp], ends: NDArray[np.intp]
) -> tuple[Floats, Floats]:
    """True and false positive rates at every threshold in every resample, (B, 1 + k)."""
    ranked, hits = weights[:, order], attacked[order]
    tp = np.cumsum(ranked * hits, axis=1)[:, ends]
    fp = np.cumsum(ranked * ~hits, axis=1)[:, ends]
    zero = np.zeros((len(weights), 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.hstack([zero, tp / tp[:, -1:]]), np.hstack([zero, fp / fp[:, -1:]])


def _interval(
    value: float,
    found: Callable[[Floats], Floats],
    attacked: Bools,
    contexts: Sequence[str],
    resamples: int,
    seed: int,
) -> Estimate:
    names, own = np.unique(np.asarray(contexts, dtype=object).astype(str), return_inverse=True)
    n, k = len(attacked), len(names)
    out = Estimate(value, None, None, n, int(attacked.sum()), k)
    if k < 2 or resamples < 1:
        return out
    rng = np.random.default_rng(seed)
    values: list[Floats] = []
    left = resamples
    while left:
        size = min(left, max(1, _BLOCK // n))
        counts = rng.multinomial(k, np.full(k, 1 / k), size=size)
        values.append(found(counts[:, own].astype(np.float64)))
        left -= size
    drawn = np.concatenate(values)
    drawn = drawn[np.isfinite(drawn)]  # a resample of one class says nothing
    if len(drawn) < resamples / 2:
        return out
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return out._replace(low=float(low), high=float(high))


def reliability(scores: Floats, attacked: Bools, bins: int = 10) -> list[Bin]:
    """Return the filled ones of `bins` equally wide intervals of scores 0…1.

    Raises ArgumentError for scores outside.
    """
    if len(scores) and (scores.min() < 0 or scores.max() > 1):
        raise ArgumentError(f"scores must be 0 to 1, got {scores.min():g} to {scores.max():g}")
    number = np.minimum((scores * bins).astype(int), bins - 1)
    return [
        Bin(i / bins, (i + 1) / bins, float(scores[own].mean()), float(attacked[own].mean()), int(own.sum()))
        for i in range(bins)
        if (own := number == i).any()
    ]


def ece(scores: Floats, attacked: Bools, bins: int = 10) -> float:
    """Expected calibration error: mean distance of score and share over the bins, weighted by their texts.

    Guo et al. 2017, equation 3. Raises ArgumentError for scores outside 0…1 and for none.
    """
    if not len(scores):
        raise ArgumentError("a calibration error needs at least one text, got none")
    return sum(b.n * abs(b.score - b.share) for b in reliability(scores, attacked, bins)) / len(scores)


Place = tuple[int, int]


def overlaps(found: Place, attack: Place) -> bool:
    """Whether a span points at an attack: they share at least half the characters of the shorter one."""
    shared = min(found[1], attack[1]) - max(found[0], attack[0])
    return shared > 0 and 2 * shared >= min(found[1] - found[0], attack[1] - attack[0])


def hit_within(ranked: Sequence[Place], attack: Place, k: int) -> bool:
    """Whether one of the k strongest spans points at the attack."""
    return any(overlaps(span, attack) for span in ranked[:k])
