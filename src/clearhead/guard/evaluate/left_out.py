"""Learners judged on what they were not fitted to: sets and attack families left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.baselines import Learner
from clearhead.guard.evaluate.figures import Figure, contexts, estimate, figures, labels
from clearhead.guard.evaluate.metrics import Bools, Floats, auroc_interval
from clearhead.guard.evaluate.scanning import Scored, Tell
from clearhead.guard.evaluate.splits import (
    Indices,
    Split,
    folds,
    leave_one_family_out,
    leave_one_set_out,
)  # fmt: skip
from clearhead.guard.samples import Sample

Curve = tuple[Floats, Bools]
"""Scores (n,) and labels (n,)."""

CARRIED = {"fpr_5": 0.05, "fpr_1": 0.01}
"""Thresholds that are fixed on out-of-fold benign texts of the learning side and carried over."""


def judged(
    learner: Learner,
    samples: Sequence[Sample],
    splits: Sequence[Split],
    *,
    carry: bool = False,
    tell: Tell | None = None,
) -> tuple[Indices, Scored, dict[str, Floats]]:
    """Return which texts were judged, their scores, and the carried-over alarms by preset, each (m,).

    carry: also fix thresholds on each split's learning side, by three folds of its contexts.
    """
    where: list[Indices] = []
    scores: list[Floats] = []
    alarms: dict[str, list[Floats]] = {preset: [] for preset in CARRIED} if carry else {}
    for number, split in enumerate(splits):
        found = learner.fit(split.train)(split.test)
        where.append(split.test)
        scores.append(found)
        if carry:
            for preset, threshold in _thresholds(learner, samples, split.train).items():
                alarms[preset].append((found >= threshold).astype(np.float64))
        if tell is not None:
            tell(f"{learner.name}: {split.name}", (number + 1) / len(splits))
    index = np.concatenate(where)
    scored = Scored(learner.name, learner.about, np.concatenate(scores), np.zeros(len(index), bool))
    return index, scored, {preset: np.concatenate(found) for preset, found in alarms.items()}


def _thresholds(learner: Learner, samples: Sequence[Sample], train: Indices) -> dict[str, float]:
    """What 5% and 1% of the learning side's benign texts reach, each scored by what did not see it."""
    own = [samples[i] for i in train]
    benign: list[Floats] = []
    for split in folds(own, 3):
        test = np.array([i for i in split.test if not own[i].attacked], np.int64)
        if len(test):
            benign.append(learner.fit(train[split.train])(train[test]))
    if not benign:
        raise ArgumentError("a threshold needs benign texts of two contexts at least to learn from")
    scores = np.sort(np.concatenate(benign))
    out = {}
    for preset, fpr in CARRIED.items():
        at = len(scores) - 1 - int(np.floor(fpr * len(scores) + 1e-9))
        out[preset] = float(np.nextafter(scores[max(at, 0)], np.inf))
    return out


def sets_left_out(
    learners: Sequence[Learner],
    samples: Sequence[Sample],
    sets: Sequence[str],
    *,
    resamples: int,
    seed: int = 0,
    tell: Tell | None = None,
) -> tuple[list[Figure], dict[str, Curve]]:
    """Return per set and learner the figures on a set that nothing was learned from.

    Also, by learner, the scores and labels of all sets together.
    """
    rows: list[Figure] = []
    curves: dict[str, list[Curve]] = {}
    for name in sets:
        splits = leave_one_set_out(samples, [name])
        if not splits:
            reason = "the other sets hold one class only, or nothing: add --generator or another --set"
            rows.append({"set": name, "reason": reason})
            continue
        for learner in learners:
            index, scored, alarms = judged(learner, samples, splits, carry=learner.learns, tell=tell)
            part = [samples[i] for i in index]
            found = figures(scored, part, resamples=resamples, seed=seed)
            found["presets"] = {
                preset: figures(
                    Scored(learner.name, "", alarm, scored.unjudged, {preset: 0.5}), part,
                    resamples=resamples, seed=seed,
                )["presets"][preset]
                for preset, alarm in alarms.items()
            }  # fmt: skip
            rows.append(_row(learner, name, splits, found))
            curves.setdefault(learner.name, []).append((scored.scores, labels(part)))
    joined = {
        name: (np.concatenate([s for s, _ in parts]), np.concatenate([y for _, y in parts]))
        for name, parts in curves.items()
    }
    return rows, joined


def families_left_out(
    learners: Sequence[Learner],
    samples: Sequence[Sample],
    sets: Sequence[str],
    *,
    resamples: int,
    seed: int = 0,
    tell: Tell | None = None,
) -> list[Figure]:
    """Return per learner the figures over all families of the sets, each judged by what never saw it.

    A benign text, which is judged with every family of its context, counts once, with its mean score.
    """
    out = []
    splits = leave_one_family_out(samples, sets)
    for learner in learners if splits else ():
        index, scored, _ = judged(learner, samples, splits, tell=tell)
        once, mean = _averaged(index, scored)
        part = [samples[i] for i in once]
        row = _row(learner, "", splits, figures(mean, part, resamples=resamples, seed=seed))
        row["families"] = [
            {
                "family": split.name,
                "attacked": sum(samples[i].attacked for i in split.test),
                "auroc": _one(scored.scores[here], [samples[i] for i in split.test], seed),
            }
            for split, here in zip(splits, _places(splits), strict=True)
        ]
        out.append(row)
    return out


def attacks_known(
    learners: Sequence[Learner],
    samples: Sequence[Sample],
    sets: Sequence[str],
    *,
    resamples: int,
    seed: int = 0,
    tell: Tell | None = None,
) -> list[Figure]:
    """Return per learner the figures of five folds by context, attack texts on both sides: what flatters."""
    own = [i for i, s in enumerate(samples) if s.source in set(sets)]
    part = [samples[i] for i in own]
    splits = [
        split._replace(train=np.array(own)[split.train], test=np.array(own)[split.test])
        for split in folds(part, 5, seed)
    ]
    out = []
    for learner in learners if splits else ():
        index, scored, _ = judged(learner, samples, splits, tell=tell)
        found = figures(scored, [samples[i] for i in index], resamples=resamples, seed=seed)
        out.append(_row(learner, "", splits, found))
    return out


def _averaged(index: Indices, scored: Scored) -> tuple[Indices, Scored]:
    once, own = np.unique(index, return_inverse=True)
    mean = np.bincount(own, weights=scored.scores) / np.bincount(own)
    return once, Scored(scored.name, scored.about, mean, np.zeros(len(once), bool))


def _places(splits: Sequence[Split]) -> list[Any]:
    ends = np.cumsum([len(split.test) for split in splits])
    return [slice(end - len(split.test), end) for end, split in zip(ends, splits, strict=True)]


def _one(scores: Floats, part: list[Sample], seed: int) -> Figure:
    y = labels(part)
    return estimate(lambda: auroc_interval(scores, y, contexts(part), resamples=0, seed=seed))


def _row(learner: Learner, name: str, splits: Sequence[Split], found: Figure) -> Figure:
    shared = sorted({what for split in splits for what in split.shared})
    return {
        "set": name,
        "judge": learner.name,
        "about": learner.about,
        "learned_from": int(np.mean([len(split.train) for split in splits])),
        "shared": shared,
    } | found
