"""A text in spans: sentences and lines, the pieces that a finding can point at."""

from __future__ import annotations

import re
from typing import NamedTuple

SHORTEST, LONGEST = 12, 300
"""Characters. A shorter piece, those of Chinese, Japanese and Korean counted three times, joins its neighbour
in the same paragraph; a longer one is split."""
_ENDS = re.compile(
    r"""
    \n+                                  # a line
    | (?<![.!?…])[.!?…]++["'”’»)\]]*+(?=\s)\s*  # a sentence; a run of marks is tried once, not n times
    | [。！？]+[”’」』）]*                   # a sentence without spaces
    """,
    re.VERBOSE,
)
_SOFTER = re.compile(r"[;:,，；：、|]\s*|\s+")
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


class Place(NamedTuple):
    """Characters of a text: from start to one before end."""

    start: int
    end: int


def spans(text: str) -> list[Place]:
    """Return the spans of a text, in order; together they are all of it but white space around them. Linear.

    A span ends at a line's end or after a sentence. Pieces of less than `SHORTEST` characters join the piece
    before them if it stands on the same line, and otherwise the next one; pieces of more than `LONGEST` are
    cut at punctuation, else at white space, else anywhere.
    """
    pieces = [Place(a, b) for a, b in _pieces(text) if text[a:b].strip()]
    joined: list[Place] = []
    same_line, looked = True, 0  # whether the last of them has had no line's end, up to where that is known
    for piece in pieces:
        last = joined[-1] if joined else Place(0, 0)
        same_line = same_line and "\n" not in text[looked : piece.start]
        looked = piece.start
        fits = piece.end - last.start <= LONGEST
        if joined and ((same_line and _short(text, piece)) or (fits and _short(text, last))):
            joined[-1] = Place(last.start, piece.end)
        else:
            joined.append(piece)
            same_line = True
    out: list[Place] = []
    for piece in joined:
        out += _cut(text, piece)
    return [_trim(text, piece) for piece in out]


def _pieces(text: str) -> list[tuple[int, int]]:
    ends = [match.end() for match in _ENDS.finditer(text)]
    if not ends or ends[-1] < len(text):
        ends.append(len(text))
    starts = [0, *ends[:-1]]
    return list(zip(starts, ends, strict=True))


def _short(text: str, piece: Place) -> bool:
    inside = text[piece.start : piece.end].strip()
    return len(inside) < SHORTEST and len(inside) + 2 * len(_WIDE.findall(inside)) < SHORTEST


def _cut(text: str, piece: Place) -> list[Place]:
    out: list[Place] = []
    start = piece.start
    while piece.end - start > LONGEST:
        middle = text[start + LONGEST // 2 : start + LONGEST]
        breaks = [match.end() for match in _SOFTER.finditer(middle)]
        end = start + LONGEST // 2 + (breaks[-1] if breaks else len(middle))
        if text[start:end].strip():
            out.append(Place(start, end))
        start = end
    if text[start : piece.end].strip():
        out.append(Place(start, piece.end))
    return out


def _trim(text: str, piece: Place) -> Place:
    inside = text[piece.start : piece.end]
    left = len(inside) - len(inside.lstrip())
    return Place(piece.start + left, piece.start + len(inside.rstrip()))
