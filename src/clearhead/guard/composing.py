"""Insert a text into another one, so that neither length nor place nor separator gives it away."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=\S)|(?<=[。！？])(?=\S)")
_FENCE = re.compile(r"^\s*(```|~~~)", re.MULTILINE)


class Inserted(NamedTuple):
    """The text with something inserted: characters start to end are the insert."""

    text: str
    start: int
    end: int


def insert(text: str, piece: str, position: str, rng: random.Random) -> Inserted:
    """Insert a piece at the "start", in the "middle" or at the "end" of a text.

    In the middle it stands between two lines, or between two sentences of a text without inner lines, inside
    a fenced block only where the text is nothing else. What separates it from its neighbours is drawn: a
    line's end, a blank line, or, at a sentence's end, a blank.
    """
    piece = piece.strip()
    if position == "start":
        at = len(text) - len(text.lstrip())
    elif position == "end":
        at = len(text.rstrip())
    else:
        at = rng.choice(_inner(text) or [len(text.rstrip())])
    before, after = text[:at], text[at:]
    flowing = "\n" not in piece and not _touches_line(before, after)
    left = "" if not before.strip() else _separator(before, flowing, rng)
    right = "" if not after.strip() else _separator(piece, flowing, rng)
    if before.endswith("\n") and left:
        left = left[1:] if left.startswith("\n") else ""
    if after.startswith(("\n", " ")) and right:
        right = "" if after.startswith("\n") else right.rstrip(" ")
    start = len(before) + len(left)
    return Inserted(before + left + piece + right + after, start, start + len(piece))


def _inner(text: str) -> list[int]:
    """Places between two lines or sentences, outside fenced blocks as long as there are such."""
    inside = len(text.strip())
    fences = [match.start() for match in _FENCE.finditer(text)]
    lines = [m.end() for m in re.finditer(r"\n+(?=\S)", text) if 0 < m.end() < len(text.rstrip())]
    places = lines if len(lines) > 2 else [*lines, *(m.end() for m in _SENTENCE.finditer(text))]
    free = [p for p in places if sum(f < p for f in fences) % 2 == 0]
    low, high = inside * 0.15, inside * 0.85
    return [p for p in free if low < p < high] or free or places


def _touches_line(before: str, after: str) -> bool:
    return (not before.strip() or before.endswith("\n")) and (not after.strip() or after.startswith("\n"))


def _separator(left: str, flowing: bool, rng: random.Random) -> str:
    if flowing and left.rstrip().endswith((".", "!", "?", ":")) and rng.random() < 0.35:
        return " "
    return "\n\n" if rng.random() < 0.3 else "\n"
