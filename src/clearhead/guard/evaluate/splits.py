"""Who is learned from and who is judged: whole sets or attack families left out, nothing else shared."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.guard.material import LANGUAGES, load
from clearhead.guard.samples import Sample

Indices = NDArray[np.int64]

#: Characters that the fixed part of a wording must have to be one.
_FIXED = 12
#: The share of the texts to learn from that may go for the sake of unseen wordings.
_MOST_LOST = 0.7


class Split(NamedTuple):
    """Numbers of samples to learn from and to judge.

    name: what was left out; several splits of one name judge different texts. shared: what could not be kept
    apart, in words; contexts and inserted texts always are.
    """

    name: str
    train: Indices
    test: Indices
    shared: tuple[str, ...] = ()


def leave_one_set_out(samples: Sequence[Sample], judged: Iterable[str] | None = None) -> list[Split]:
    """Return splits that learn from all sets but one and judge that one, in two halves by wording.

    judged: names of the sets to leave out, or None for each. Where both sides have the same instruction
    wordings, one half of them is judged by what was learned with the other half, and the other way round.
    """
    sources = np.array([s.source for s in samples])
    out: list[Split] = []
    for name in dict.fromkeys(sources) if judged is None else judged:
        test = np.flatnonzero(sources == name)
        train = np.flatnonzero(sources != name)
        out += _halves(str(name), samples, train, test)
    return [split for split in out if _usable(split, samples)]


def leave_one_family_out(samples: Sequence[Sample], judged: Iterable[str] | None = None) -> list[Split]:
    """Return for every attack family a split that judges its attacks and the benign texts of their contexts.

    Learned from are the other families' attacks and the other contexts. judged: names of sets whose families
    are left out, or None for all.
    """
    of = None if judged is None else set(judged)
    families = dict.fromkeys(s.family for s in samples if s.attacked and (of is None or s.source in of))
    out = []
    for family in families:
        contexts = {
            s.context for s in samples if s.attacked and s.family == family and (of is None or s.source in of)
        }
        test = [
            i
            for i, s in enumerate(samples)
            if s.context in contexts and (not s.attacked or s.family == family)
        ]
        train = [
            i
            for i, s in enumerate(samples)
            if s.context not in contexts and not (s.attacked and s.family == family)
        ]
        out.append(separated(family, samples, np.array(train, np.int64), np.array(test, np.int64)))
    return [split for split in out if _usable(split, samples)]


def folds(samples: Sequence[Sample], k: int = 5, seed: int = 0) -> list[Split]:
    """Return k splits by whole contexts; the texts of attacks and benign lines are on both sides."""
    keys = [f"{s.source}\0{s.context}" for s in samples]
    names = sorted(set(keys))
    random.Random(seed).shuffle(names)
    fold = {name: number % k for number, name in enumerate(names)}
    own = np.array([fold[key] for key in keys])
    out = [Split("folds", np.flatnonzero(own != i), np.flatnonzero(own == i)) for i in range(k)]
    return [split for split in out if _usable(split, samples)]


def separated(name: str, samples: Sequence[Sample], train: Indices, test: Indices) -> Split:
    """Return a split without texts to learn from that share a context, an inserted text or a wording.

    Wordings stay shared, and the split says so, where keeping them apart would cost most of the texts.
    """
    contexts = {samples[i].context for i in test}
    inserts = {key for i in test if (key := _insert(samples[i]))}
    kept = np.array(
        [i for i in train if samples[i].context not in contexts and _insert(samples[i]) not in inserts],
        np.int64,
    )
    wordings = {wording(samples[i].instruction) for i in test}
    strict = np.array([i for i in kept if wording(samples[i].instruction) not in wordings], np.int64)
    if len(strict) == len(kept):
        return Split(name, strict, test)
    enough = len(strict) >= (1 - _MOST_LOST) * len(kept) and _both(samples, strict)
    return Split(name, strict, test) if enough else Split(name, kept, test, ("instruction wordings",))


def _halves(name: str, samples: Sequence[Sample], train: Indices, test: Indices) -> list[Split]:
    whole = separated(name, samples, train, test)
    wordings = sorted({wording(samples[i].instruction) for i in test})
    if not whole.shared or len(wordings) < 2:
        return [whole]
    random.Random(name).shuffle(wordings)
    out = []
    for half in (set(wordings[::2]), set(wordings[1::2])):
        own = np.array([i for i in test if wording(samples[i].instruction) in half], np.int64)
        out.append(separated(name, samples, train, own))
    return out


def _insert(sample: Sample) -> str:
    if sample.start is None:
        return ""
    return " ".join(sample.text[sample.start : sample.end].casefold().split())


def wording(instruction: str) -> str:
    """Return which wording an instruction has: the package's one that it follows, or all of itself."""
    for pattern, name in _wordings():
        if pattern.fullmatch(instruction):
            return name
    return instruction


@cache
def _wordings() -> tuple[tuple[re.Pattern[str], str], ...]:
    out = []
    for language in LANGUAGES:
        try:
            found = load(language, "instructions")["system"]
        except FileNotFoundError:
            continue
        for text in found:
            before, slot, after = text.partition("{task}")
            if slot and len(before.strip()) + len(after.strip()) >= _FIXED:
                pattern = re.escape(before) + ".*" + re.escape(after)
                out.append((re.compile(pattern, re.DOTALL), text))
    return tuple(sorted(out, key=lambda pair: -len(pair[1])))


def _both(samples: Sequence[Sample], indices: Indices) -> bool:
    return len({samples[i].attacked for i in indices}) == 2


def _usable(split: Split, samples: Sequence[Sample]) -> bool:
    return len(split.test) > 0 and _both(samples, split.train)
