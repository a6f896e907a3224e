"""Fit a read-out to readings of labelled texts, and judge it on texts and attack families it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import GuardError
from clearhead.guard.features import Reading
from clearhead.guard.finding import Thresholds
from clearhead.guard.judging import head_odds, sigmoid, text_place
from clearhead.guard.logistic import Logistic, fit
from clearhead.guard.readout import Floats, Readout, features, pooled
from clearhead.guard.samples import Sample

C = 0.005
"""Inverse strength of the L2 penalty, on standardised features."""

HARD_FAMILIES, HARD = ("document", "quote"), 2.0
"""Benign texts that look like attacks, and how many times their spans count: there are few of them."""

FOLDS = 4
FEWEST = 20
"""Texts with an attack, and without, that a calibration needs at least."""

_MOSTLY, _HARDLY = 0.5, 0.1


class Example(NamedTuple):
    """A labelled text, reduced to what fitting needs.

    windows: per window the features of its spans for both views, (S, d) float16, or float32 where a number is
    too large for that. allowed: per window (S, 3), the classes that each span may be of. head_odds, tokens,
    mass: of the longest window the heads' log odds (H,) of text against instruction, the text's tokens, and
    the mean mass on the text. place: in the hidden space, (D,).
    """

    sample: Sample
    windows: tuple[NDArray[np.float16 | np.float32], ...]
    allowed: tuple[NDArray[np.bool_], ...]
    head_odds: Floats
    tokens: float
    mass: float
    place: Floats


def example(
    sample: Sample, readings: Sequence[tuple[Sequence[tuple[int, int]], Reading]], views: Sequence[str]
) -> Example:
    """Reduce a text to an example. readings: per window the characters of its spans, and what was read."""
    longest = max((reading for _, reading in readings), key=lambda r: float(r.sizes.sum()))
    return Example(
        sample,
        tuple(_small(features(reading, views)) for _, reading in readings),
        tuple(np.array([span_classes(sample, *p) for p in places]) for places, _ in readings),
        head_odds(longest),
        float(longest.sizes.sum()),
        float(longest.spans[-1].sum(0).mean()),
        text_place([reading for _, reading in readings]),
    )


def span_classes(sample: Sample, start: int, end: int) -> list[bool]:
    """Return which classes (none, imperative, attack) a span of a sample may be of.

    Spans of which more than half was inserted have the sample's label, those of which hardly anything was are
    no attack; those between are left open, and so is a text with an attack whose place is not known. What
    stands in a benign text by itself is none or an imperative.
    """
    if sample.start is None or sample.end is None:
        if sample.attacked:
            return [True, True, True]
        return [True, False, False] if sample.family == "plain" else [True, True, False]
    share = max(0, min(end, sample.end) - max(start, sample.start)) / max(1, end - start)
    if share > _MOSTLY:
        known = {"attack": 2, "imperative": 1, "none": 0}[sample.label]
        return [known == n for n in range(3)]
    if sample.label == "attack":
        return [True, True, share >= _HARDLY]
    return [True, True, False]


def folds(samples: Sequence[Sample], seed: int) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Return (train, test) choices: no context on both sides, and no attack family; every context is in one
    test side, and every attack in one or none. Where all attacks are of one family, that is on both sides."""
    rng = np.random.default_rng(seed)
    contexts = sorted({s.context for s in samples})
    families = sorted({s.family for s in samples if s.attacked})
    of_context = dict(zip(contexts, rng.permutation(len(contexts)) % FOLDS, strict=True))
    of_family = dict(zip(families, rng.permutation(len(families)) % FOLDS, strict=True))
    attacked = np.array([s.attacked for s in samples], np.bool_)
    out = []
    for k in range(FOLDS):
        here = np.array([of_context[s.context] == k for s in samples], np.bool_)
        if len(families) < 2:
            out.append((~here, here))
            continue
        family = np.array([of_family[s.family] == k if s.attacked else False for s in samples], np.bool_)
        out.append((~here & ~(attacked & family), here & (~attacked | family)))
    return out


def columns(views: Sequence[str], heads: int, hidden: int, layers: int) -> NDArray[np.int64]:
    """Return which columns of the features for both views are those of `views`."""
    attention, states = 3 * heads, layers * (hidden + 2)
    chosen: list[int] = []
    if "attention" in views:
        chosen += range(attention)
    if "hidden" in views:
        chosen += range(attention, attention + states)
    return np.array([*chosen, attention + states], np.int64)


def check_enough(samples: Sequence[Sample]) -> None:
    """Raise GuardError for fewer than `FEWEST` texts with an attack whose place is known, for fewer without
    one, and for texts from fewer than `FOLDS` contexts."""
    for what, count in (
        ("with an attack", sum(s.attacked and s.start is not None for s in samples)),
        ("without an attack", sum(not s.attacked for s in samples)),
    ):
        if count < FEWEST:
            known = " and its place (start, end)" if what.startswith("with ") else ""
            raise GuardError(f"pairs must hold at least {FEWEST} texts {what}{known}, got {count}")
    contexts = len({s.context for s in samples})
    if contexts < FOLDS:
        raise GuardError(
            f"pairs must come from at least {FOLDS} contexts, got {contexts}: the field context says from "
            "which text a sample was made, and no context is both learned from and judged by"
        )


class Trained(NamedTuple):
    """A read-out, and its out-of-fold scores: numbers of the examples, and the log odds of each."""

    readout: Readout
    tested: NDArray[np.int64]
    odds: NDArray[np.float64]


def train(
    examples: Sequence[Example], views: tuple[str, ...], chosen: NDArray[np.int64], *, seed: int = 0
) -> Trained:
    """Fit a read-out on all examples, and calibrate it on folds.

    Raises GuardError as `check_enough` does, and for texts from which nothing was learned.
    """
    samples = [e.sample for e in examples]
    check_enough(samples)
    tested: list[int] = []
    odds: list[float] = []
    for train_side, test_side in folds(samples, seed):
        model = fit_examples([e for e, here in zip(examples, train_side, strict=True) if here], chosen)
        for number in np.nonzero(test_side)[0].tolist():
            tested.append(number)
            odds.append(odds_of(model, examples[number], chosen))
    numbers, raw = np.array(tested), np.array(odds)
    attacked = np.array([samples[n].attacked for n in numbers])
    if attacked.all() or not attacked.any():
        raise GuardError("pairs must hold attacks of several families in many contexts: none can be held out")
    slope, offset = platt(raw, attacked)
    if not np.isfinite([slope, offset]).all() or slope <= 0:
        raise GuardError(
            "nothing was learned from these pairs: on texts that were held out, the odds of an attack are "
            f"not higher where there is one (slope {slope:.3g})"
        )
    model = fit_examples(examples, chosen)
    weights, bias = folded(model)
    return Trained(Readout(views, weights, bias, slope, offset), numbers, slope * raw + offset)


def folded(model: Logistic) -> tuple[Floats, Floats]:
    """Return weights (d, 2) and bias (2,) against the class none, for features that are not standardised."""
    weights = model.weights / model.scale[:, None]
    bias = model.bias - (model.mean / model.scale) @ model.weights
    return (weights[:, 1:] - weights[:, :1]).astype(np.float32), (bias[1:] - bias[:1]).astype(np.float32)


def platt(odds: NDArray[np.float64], attacked: NDArray[np.bool_]) -> tuple[float, float]:
    """Return slope and offset that make log odds calibrated on examples (Platt 1999), classes weighted alike.

    Weighted alike, a score of .5 means an even chance where half of the texts are attacked. A weight decay of
    1e-6 on the slope keeps it finite where the odds tell the classes apart without an error.
    """
    weight = np.where(attacked, 0.5 / max(1, attacked.sum()), 0.5 / max(1, (~attacked).sum()))
    slope, offset = 1.0, 0.0

    def loss(slope: float, offset: float) -> float:
        z = slope * odds + offset
        return float((weight * np.logaddexp(0, np.where(attacked, -z, z))).sum() + 0.5e-6 * slope**2)

    for _ in range(200):  # Newton's method, steps halved while they do not help
        p = 1 / (1 + np.exp(-np.clip(slope * odds + offset, -30, 30)))
        error, curve = weight * (p - attacked), weight * p * (1 - p) + 1e-12
        gradient = np.array([(error * odds).sum() + 1e-6 * slope, error.sum()])
        hessian = np.array(
            [[(curve * odds * odds).sum() + 1e-6, (curve * odds).sum()], [(curve * odds).sum(), curve.sum()]]
        )
        step = np.linalg.solve(hessian, gradient)
        before = loss(slope, offset)
        for _ in range(40):
            if loss(slope - float(step[0]), offset - float(step[1])) <= before:
                break
            step = step / 2
        else:
            break
        slope, offset = slope - float(step[0]), offset - float(step[1])
        if np.abs(step).max() < 1e-9:
            break
    return slope, offset


def thresholds(
    odds: NDArray[np.float64], families: Sequence[str], shares: tuple[float, float], fixed_on: str
) -> Thresholds:
    """Return the thresholds that given shares of benign texts reach: to be flagged, to be blocked.

    odds: of benign texts. families: of each ("plain", "imperative", "document", …); every family counts
    alike, whatever its number of texts, so that the many plain texts do not hide alarms on the hard ones.
    """
    scores = np.array([sigmoid(v) for v in odds])
    names = np.array(families)
    count = {name: int((names == name).sum()) for name in dict.fromkeys(families)}
    weight = np.array([1 / count[name] / len(count) for name in families])
    flag, block = (_limit(scores, weight, share) for share in shares)
    block = max(flag, block)
    return Thresholds(
        flag=flag,
        block=block,
        flag_fpr=float(weight[scores >= flag].sum()),
        block_fpr=float(weight[scores >= block].sum()),
        benign=len(scores),
        fixed_on=fixed_on,
    )


def reliability(
    odds: NDArray[np.float64], attacked: NDArray[np.bool_], bins: int = 10
) -> tuple[tuple[float, float, int], ...]:
    """Return rows of (mean score, share of attacks, texts), bins of equal width, classes weighted alike."""
    scores = np.array([sigmoid(v) for v in odds])
    weight = np.where(attacked, 0.5 / max(1, attacked.sum()), 0.5 / max(1, (~attacked).sum()))
    number = np.minimum((scores * bins).astype(int), bins - 1)
    rows = []
    for k in range(bins):
        here = number == k
        if here.any():
            total = weight[here].sum()
            mean = float((weight[here] * scores[here]).sum() / total)
            rows.append((mean, float((weight[here] * attacked[here]).sum() / total), int(here.sum())))
    return tuple(rows)


def _small(x: Floats) -> NDArray[np.float16 | np.float32]:
    """The same in float16 where all of it fits."""
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    return half if np.isfinite(half).all() or not np.isfinite(x).all() else x


def _limit(scores: NDArray[np.float64], weight: NDArray[np.float64], share: float) -> float:
    """The lowest score just above one of the scores that at most this share of the weight reaches."""
    order = np.argsort(-scores, kind="stable")
    above = np.concatenate([[0.0], np.cumsum(weight[order])])  # weight of the n highest
    n = int(np.nonzero(above <= share + 1e-12)[0][-1])
    while 0 < n < len(scores) and scores[order[n]] == scores[order[n - 1]]:
        n -= 1  # equal scores fall on one side
    return float(np.nextafter(scores[order[n]], 2.0)) if n < len(scores) else 0.0


def fit_examples(examples: Sequence[Example], chosen: NDArray[np.int64]) -> Logistic:
    """Fit the regression to the chosen columns of all spans of the examples."""
    x = np.concatenate([w[:, chosen] for e in examples for w in e.windows]).astype(np.float32)
    allowed = np.concatenate([a for e in examples for a in e.allowed])
    weight = [
        HARD if e.sample.family in HARD_FAMILIES else 1.0 for e in examples for w in e.windows for _ in w
    ]
    return fit(x, allowed, np.array(weight, np.float32), c=C)


def odds_of(model: Logistic, e: Example, chosen: NDArray[np.int64]) -> float:
    """Return the log odds of an example by a regression, not calibrated."""
    found = []
    for window in e.windows:
        z = model.logits(window[:, chosen].astype(np.float32))
        found.append(z[:, 2] - np.logaddexp(z[:, 0], z[:, 1]))
    return pooled(found, len(found))
