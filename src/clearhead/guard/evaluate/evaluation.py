"""The whole evaluation: sets in, a report of plain values out."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.baselines import Learner, learners
from clearhead.guard.evaluate.figures import Figure, cells, figures, labels, lowest
from clearhead.guard.evaluate.left_out import Curve, attacks_known, families_left_out, sets_left_out
from clearhead.guard.evaluate.pairs import shortcuts
from clearhead.guard.evaluate.plots import roc_svg
from clearhead.guard.evaluate.scanning import Judge, Scored, Tell, scan_all
from clearhead.guard.samples import Sample

Refit = Callable[[Sequence[Sample], Tell | None], list[Learner]]
"""From all samples to the read-outs that can be fitted anew to some of them."""

RESAMPLES = 1000


@dataclass(frozen=True)
class Evaluation:
    """The report, as plain values, and its picture (None where no set has both classes)."""

    report: dict[str, Any]
    svg: str | None
    scored: tuple[Scored, ...] = field(default=(), repr=False)


def evaluate(
    sets: Mapping[str, Sequence[Sample]],
    judges: Mapping[str, Judge],
    *,
    learn_from: Sequence[Sample] = (),
    refit: Refit | None = None,
    cache: Path | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    tell: Tell | None = None,
) -> Evaluation:
    """Judge detectors, classifiers and baselines on sets.

    sets: samples by name. judges: what scans, by name. learn_from: further samples that baselines and
    read-outs are fitted on and that are not judged. refit: makes the read-outs that are fitted anew. cache: a
    folder where scans are kept. resamples: of the bootstrap, by context.

    Raises ArgumentError for no samples, and for fewer than 100 resamples.
    """
    if not any(sets.values()):
        raise ArgumentError("there is nothing to judge: no set holds a text")
    if resamples < 100:
        raise ArgumentError(f"resamples must be at least 100 for an interval of 95%, got {resamples}")
    named = [_named(sample, name) for name, part in sets.items() for sample in part]
    known = {(s.instruction, s.text) for s in named}
    pool = named + [s for s in learn_from if (s.instruction, s.text) not in known]
    names = list(dict.fromkeys(s.source for s in named))
    fixed = {"resamples": resamples, "seed": seed}
    scored = [
        scan_all(judge, named, name=name, about=_about(judge), cache=cache, tell=tell)
        for name, judge in judges.items()
    ]
    text_only = learners(pool)
    scored += [_unfitted(learner, len(named)) for learner in text_only if not learner.learns]
    fitted = [*text_only, *(refit(pool, tell) if refit is not None else [])]
    learning = [learner for learner in fitted if learner.learns]
    left_out, unseen = sets_left_out(learning, pool, names, **fixed, tell=tell)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "seed": seed,
        "resamples": resamples,
        "judges": [_described(s) for s in scored],
        "sets": [_set(name, [s for s in named if s.source == name]) for name in names],
        "learned_from": dict(Counter(s.source for s in pool)),
        "by_set": [_on(s, named, name, fixed) for name in names for s in scored],
        "pooled": [_on(s, named, "", fixed) for s in scored] if len(names) > 1 else [],
        "cells": [],
        "sets_left_out": left_out,
        "families_left_out": families_left_out(learning, pool, names, **fixed, tell=tell),
        "attacks_known": attacks_known(learning, pool, names, **fixed, tell=tell),
    }
    for one in scored:
        if one.name in judges:
            fine = cells(one, named, resamples=resamples, seed=seed)
            coarse = cells(one, named, resamples=resamples, seed=seed, by_family=False)
            report["cells"].append(
                {"judge": one.name, "cells": fine, "lowest": lowest(fine), "coarse": coarse}
                | {"lowest_coarse": lowest(coarse)}
            )
    return Evaluation(report, _picture(scored, unseen, named, names), tuple(scored))


def _named(sample: Sample, name: str) -> Sample:
    from dataclasses import replace

    return sample if sample.source else replace(sample, source=name)


def _about(judge: Judge) -> str:
    calibration = getattr(judge, "calibration", None)
    if calibration is not None:
        views = " + ".join(getattr(judge, "views", ()))
        return f"{calibration.name}, {views or getattr(judge, 'method', '')}, calibration {calibration.id}"
    loaded = getattr(judge, "loaded", None)
    if loaded is not None:
        return f"{loaded.name}, {getattr(judge, 'method', type(judge).__name__)}"
    return str(getattr(judge, "identity", getattr(judge, "method", type(judge).__name__)))


def _unfitted(learner: Learner, n: int) -> Scored:
    everything = np.arange(n)
    return Scored(
        learner.name, learner.about, learner.fit(everything)(everything), np.zeros(n, bool)
    )  # fmt: skip


def _described(scored: Scored) -> Figure:
    return {
        "name": scored.name,
        "about": scored.about,
        "thresholds": scored.thresholds,
        "calibrated_on": list(scored.learned_from),
    }


def _set(name: str, samples: list[Sample]) -> Figure:
    inserted = [s for s in samples if s.start is not None]
    return {
        "name": name,
        "n": len(samples),
        "labels": dict(Counter(s.label for s in samples)),
        "contexts": len({s.context for s in samples}),
        "families": len({s.family for s in samples if s.attacked}),
        "languages": dict(Counter(s.language for s in samples)),
        "kinds": dict(Counter(s.kind for s in samples)),
        "attack_texts": len({s.text[s.start : s.end] for s in inserted if s.attacked}),
        "shortcuts": {
            key: None if value is None else round(value, 4)
            for key, value in shortcuts(samples)._asdict().items()
        },
    }


def _on(scored: Scored, samples: Sequence[Sample], name: str, fixed: dict[str, int]) -> Figure:
    own = [i for i, s in enumerate(samples) if not name or s.source == name]
    part = [samples[i] for i in own]
    found = figures(scored.of(np.array(own)), part, **fixed)
    seen = any(_same(name, learned) for learned in scored.learned_from) if name else False
    return {"set": name, "judge": scored.name, "calibrated_on_it": seen} | found


def _same(name: str, learned: str) -> bool:
    """Whether a set was calibrated on: the same name, or a part of it ("BIPIA train", "bipia")."""
    left, right = name.casefold(), learned.casefold()
    return left == right or (left.startswith(right) and "test" not in left)


def _picture(
    scored: Sequence[Scored], unseen: Mapping[str, Curve], named: Sequence[Sample], names: Sequence[str]
) -> str | None:
    y = labels(named)
    if y.all() or not y.any():
        return None
    curves = {s.name: (s.scores, y) for s in scored}
    curves |= {f"{name} (set left out)": curve for name, curve in unseen.items()}
    title = f"{', '.join(names)}: {int(y.sum())} attacked, {int((~y).sum())} benign texts"
    return roc_svg(curves, title)
