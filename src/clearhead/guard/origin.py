"""Where each character of a text came from: offsets that survive decoding, cutting and normalising."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class Origin:
    """For each character of a text the characters of another text that it stands for.

    starts, ends: (n,), int64, offsets; a character that was put in (a separator) has start == end.
    """

    starts: Offsets
    ends: Offsets

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def verbatim(cls, start: int, length: int) -> Origin:
        """`length` characters, each its own counterpart from `start` on."""
        starts = np.arange(start, start + length, dtype=np.int64)
        return cls(starts, starts + 1)

    @classmethod
    def block(cls, start: int, end: int, length: int) -> Origin:
        """`length` characters that all stand for the same block."""
        return cls(np.full(length, start, dtype=np.int64), np.full(length, end, dtype=np.int64))

    @classmethod
    def join(cls, origins: Iterable[Origin]) -> Origin:
        """One after the other."""
        found = list(origins)
        if not found:
            return cls.verbatim(0, 0)
        return cls(np.concatenate([o.starts for o in found]), np.concatenate([o.ends for o in found]))

    def cut(self, start: int, end: int) -> Origin:
        """The characters from start to one before end."""
        return Origin(self.starts[start:end], self.ends[start:end])

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return the smallest span of the other text that holds all counterparts of [start, end).

        An empty span, or one outside the text, is the place nearest to it. (0, 0) for an empty text.
        """
        if not len(self.starts):
            return 0, 0
        start = min(max(start, 0), len(self.starts))
        end = min(max(end, start), len(self.starts))
        if start == end:
            at = int(self.starts[start]) if start < len(self.starts) else int(self.ends[-1])
            return at, at
        return int(self.starts[start:end].min()), int(self.ends[start:end].max())

    def through(self, below: Origin) -> Origin:
        """Return the origin in the text that `below` leads to, where self leads to the text of `below`."""
        if not len(below):
            return Origin(np.zeros_like(self.starts), np.zeros_like(self.ends))
        last = len(below) - 1
        first = np.clip(self.starts, 0, last)
        final = np.clip(self.ends - 1, 0, last)
        starts = np.where(self.starts > last, below.ends[last], below.starts[first])
        ends = np.where(self.ends > self.starts, below.ends[final], starts)
        return Origin(starts, np.maximum(ends, starts))


@dataclass(frozen=True)
class Edit:
    """Replace the characters [start, end) by `text`; each of its characters then stands for all of them."""

    start: int
    end: int
    text: str = ""


def edited(text: str, origin: Origin, edits: Sequence[Edit]) -> tuple[str, Origin]:
    """Apply edits, which are in order and do not overlap, to a text and its origin."""
    if not edits:
        return text, origin
    pieces: list[str] = []
    origins: list[Origin] = []
    at = 0
    for edit in edits:
        pieces += [text[at : edit.start], edit.text]
        origins.append(origin.cut(at, edit.start))
        if edit.text:
            origins.append(Origin.block(*origin.span(edit.start, edit.end), len(edit.text)))
        at = edit.end
    pieces.append(text[at:])
    origins.append(origin.cut(at, len(text)))
    return "".join(pieces), Origin.join(origins)
