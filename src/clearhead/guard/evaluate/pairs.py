"""Six texts from each context, so that length, place and instruction do not tell the classes apart."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clearhead.errors import ArgumentError
from clearhead.guard.composing import Inserted, insert
from clearhead.guard.evaluate.metrics import auroc
from clearhead.guard.material import load
from clearhead.guard.samples import Sample

PLACES = ("start", "middle", "end")


class Context(NamedTuple):
    """A benign text and the instruction it comes with. name: unique within its set."""

    name: str
    text: str
    instruction: str
    kind: str
    language: str = "en"


class Line(NamedTuple):
    """A benign line to insert, and the kinds of text that it fits in ("any": all)."""

    text: str
    fits: tuple[str, ...] = ("any",)


@dataclass(frozen=True)
class Inserts:
    """Benign lines: orders meant for people, and statements that have nothing to do with the text."""

    imperatives: Sequence[Line]
    statements: Sequence[Line]

    @classmethod
    def packaged(cls, language: str = "en") -> Inserts:
        """Return every second of the lines that come with the package.

        The generator uses all of them: a set built with these leaves half of its benign texts to learn
        from when inserted texts must not be on both sides.
        """
        both = cls.of(load(language, "inserts"), f"the package's lines ({language})")
        return cls(both.imperatives[::2], both.statements[::2])

    @classmethod
    def read(cls, path: str | Path) -> Inserts:
        """Read own lines: JSON, {"imperatives": [{"text", "fits"}], "statements": [...]}, or plain texts.

        Raises ArgumentError for anything else.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ArgumentError(f"{path} cannot be read as JSON: {error}") from error
        return cls.of(found, str(path))

    @classmethod
    def of(cls, found: object, name: str) -> Inserts:
        """Return lines from plain lists and objects. Raises ArgumentError where they are not of that form."""
        parts = []
        for key in ("imperatives", "statements"):
            items = found.get(key) if isinstance(found, dict) else None
            lines = [_line(item) for item in items] if isinstance(items, list) else []
            if not lines or None in lines:
                raise ArgumentError(
                    f'{name}: "{key}" must be a list of texts or of {{"text", "fits"}}, and not empty'
                )
            parts.append([line for line in lines if line is not None])
        return cls(*parts)


def _line(item: object) -> Line | None:
    if isinstance(item, str) and item.strip():
        return Line(item)
    if isinstance(item, dict) and isinstance(item.get("text"), str) and item["text"].strip():
        fits = item.get("fits", ["any"])
        return Line(item["text"], tuple(str(kind) for kind in fits)) if isinstance(fits, list) else None
    return None


def build(
    contexts: Sequence[Context],
    attacks: Mapping[str, Sequence[str]],
    inserts: Inserts,
    *,
    source: str,
    seed: int = 0,
    rounds: int = 1,
    per_kind: Mapping[str, Sequence[str]] | None = None,
) -> list[Sample]:
    """Return six texts of every context: plain, + a statement, + an imperative, + attacks at three places.

    attacks: texts by family. per_kind: families that go with a kind of text, where not all do. The benign
    lines of a context are as long as its attacks, as nearly as there are such, at places drawn evenly; the
    instruction is the same in all six. Families and texts come evenly.

    Raises ArgumentError where there is no context or no attack.
    """
    if not contexts:
        raise ArgumentError(f"{source}: there is no context to build samples of")
    if not any(attacks.values()):
        raise ArgumentError(f"{source}: there is no attack to build samples of")
    rng = random.Random(f"{seed} {source}")
    decks = _Decks(rng)
    out: list[Sample] = []
    for round_ in range(rounds):
        for context in contexts:
            families = (per_kind or {}).get(context.kind) or list(attacks)
            out += _six(context, families, attacks, inserts, source, decks, rng, with_plain=round_ == 0)
    return out


class _Decks:
    """Draw evenly: every item once before any comes again."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.left: dict[object, list[str]] = {}

    def next(self, key: object, pool: Sequence[str]) -> str:
        if not self.left.get(key):
            self.left[key] = list(pool)
            self.rng.shuffle(self.left[key])
        return self.left[key].pop()


def _six(
    context: Context,
    families: Sequence[str],
    attacks: Mapping[str, Sequence[str]],
    inserts: Inserts,
    source: str,
    decks: _Decks,
    rng: random.Random,
    *,
    with_plain: bool,
) -> list[Sample]:
    def sample(text: str, label: str, family: str, place: str = "none", at: Inserted | None = None) -> Sample:
        start, end = (None, None) if at is None else (at.start, at.end)
        return Sample(
            context.instruction, text, label, start, end, context.kind, place, family, context.language,
            f"{source} {context.name}", source,
        )  # fmt: skip

    out = [sample(context.text, "none", "plain")] if with_plain else []
    lengths = []
    for place in PLACES:
        family = decks.next(tuple(families), families)
        attack = decks.next(family, attacks[family])
        lengths.append(len(attack))
        done = insert(context.text, attack, place, rng)
        out.append(sample(done.text, "attack", family, place, done))
    for family, label, pool in (
        ("statement", "none", inserts.statements),
        ("imperative", "imperative", inserts.imperatives),
    ):
        line = as_long(pool, context.kind, rng.choice(lengths), rng)
        place = decks.next(family, PLACES)
        done = insert(context.text, line, place, rng)
        out.append(sample(done.text, label, family, place, done))
    return out


def as_long(pool: Sequence[Line], kind: str, length: int, rng: random.Random) -> str:
    """Return a line that fits a kind of text and has about so many characters; several where it is long.

    One of the five nearest is drawn, so that no line comes too often.
    """
    fitting = [line.text for line in pool if kind in line.fits or "any" in line.fits]
    if len(fitting) < 5:
        fitting = [line.text for line in pool]
    pieces: list[str] = []
    left = length
    while True:
        nearest = sorted((abs(len(text) - left), text) for text in fitting if text not in pieces)[:5]
        if not nearest:
            break
        piece = rng.choice(nearest)[1]
        pieces.append(piece)
        left -= len(piece) + 1
        if left < min(map(len, fitting)):
            break
    return " ".join(pieces)


class Shortcuts(NamedTuple):
    """What a look at something other than the content reaches, as AUROC; .5 is nothing, None: not to be said.

    length: of the whole text. insert_length: of what was inserted, among texts with something inserted.
    position: the best rule by place alone, fitted on the same texts, among those. instruction: the same by
    the instruction's wording. Each is the better of both directions, so at least .5.
    """

    length: float | None
    insert_length: float | None
    position: float | None
    instruction: float | None


def shortcuts(samples: Sequence[Sample]) -> Shortcuts:
    """Tell how far length, place and instruction alone tell attacked from benign texts in a set."""
    inserted = [s for s in samples if s.start is not None and s.position != "whole"]
    return Shortcuts(
        _either([len(s.text) for s in samples], samples),
        _either([(s.end or 0) - (s.start or 0) for s in inserted], inserted),
        _either(_shares([s.position for s in inserted], inserted), inserted),
        _either(_shares([s.instruction for s in samples], samples), samples),
    )


def _shares(keys: Sequence[str], samples: Sequence[Sample]) -> list[float]:
    """For each sample the share of attacked ones among those with the same key."""
    counts: dict[str, list[int]] = {}
    for key, sample in zip(keys, samples, strict=True):
        seen = counts.setdefault(key, [0, 0])
        seen[sample.attacked] += 1
    return [counts[key][1] / sum(counts[key]) for key in keys]


def _either(values: Sequence[float], samples: Sequence[Sample]) -> float | None:
    labels = np.array([s.attacked for s in samples], dtype=bool)
    if labels.all() or not labels.any():
        return None
    found = auroc(np.asarray(values, dtype=np.float64), labels)
    return max(found, 1 - found)
