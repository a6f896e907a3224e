"""Words of a text and the tokens that make them up: people read words, models read pieces."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: Scripts that write without spaces: each of their characters stands by itself, as nothing says where a word
#: ends. Thai and Lao, Burmese, Khmer, kana, Han.
_NO_SPACES = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF)),
    *((0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)),
)
_APOSTROPHES = "'’"
_JOINER = "\u200d"


class Word(NamedTuple):
    """A word or a punctuation mark: its text and its tokens, [start, stop)."""

    text: str
    start: int
    stop: int


def words(text: str, tokens: Sequence[str]) -> list[Word]:
    """Return the words of `text` (the joined `tokens`), each with the tokens that hold its characters.

    A token belongs to the word that most of its letters are in, the earlier one on a tie. A token without
    characters ("") shares the character before it, as the later bytes of an emoji do. A word that is left
    without a token is joined to the one that has its characters ("--" in one token is one word). Words come
    in order, and no token is in two of them.
    """
    spans = list(_spans(text))
    word_of = [-1] * len(text)
    for i, (low, high) in enumerate(spans):
        word_of[low:high] = [i] * (high - low)
    tokens_of: list[list[int]] = [[] for _ in spans]
    holder = [-1] * len(text)  # for each character, the word that its token belongs to
    at = 0
    for t, token in enumerate(tokens):
        end = at + len(token)
        inside = Counter(i for i in word_of[at if token else at - 1 : end] if i >= 0)
        if inside:
            owner = inside.most_common(1)[0][0]
            tokens_of[owner].append(t)
            holder[at:end] = [owner] * (end - at)
        at = end
    reach = list(spans)
    for i, (low, high) in enumerate(spans):
        if not tokens_of[i]:
            first, last = reach[holder[low]]
            reach[holder[low]] = min(first, low), max(last, high)
    return [
        Word(text[low:high], mine[0], mine[-1] + 1)
        for (low, high), mine in zip(reach, tokens_of, strict=True)
        if mine
    ]


def tokens_holding(tokens: Sequence[str], marked: Sequence[int]) -> list[int]:
    """Return the numbers of the tokens that hold any character of the joined text whose mark is not 0."""
    found, at = [], 0
    for t, token in enumerate(tokens):
        end = at + len(token)
        if any(marked[max(0, at if token else at - 1) : end]):
            found.append(t)
        at = end
    return found


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where each word or punctuation mark lies."""
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        start, at = at, _end(text, at)
        yield start, at


def _end(text: str, at: int) -> int:
    """One past the last character of the word that begins at `at`."""
    first = text[at]
    at = _past_marks(text, at + 1)
    if _stands_alone(first):
        return at
    if not _letter(first):
        return _past_symbol(text, at, first)
    while at < len(text):
        inside = text[at] in _APOSTROPHES or text[at] in ("\u200c", _JOINER)
        ahead = at + 1 if inside else at
        if ahead >= len(text) or not _letter(text[ahead]) or _stands_alone(text[ahead]):
            break
        at = _past_marks(text, ahead + 1)
    return at


def _past_symbol(text: str, at: int, first: str) -> int:
    """Emoji are joined to one picture by joiners, and flags are two letters."""
    if _flag_letter(first) and at < len(text) and _flag_letter(text[at]):
        return at + 1
    while at + 1 < len(text) and text[at] == _JOINER and not text[at + 1].isspace():
        at = _past_marks(text, at + 2)
    return at


def _past_marks(text: str, at: int) -> int:
    while at < len(text) and _mark(text[at]):
        at += 1
    return at


def _letter(c: str) -> bool:
    return c.isalnum() or c == "_"


def _mark(c: str) -> bool:
    """Accents, vowel signs, variation selectors, skin tones, tags: what belongs to the character before."""
    tone, tag = "\U0001f3fb" <= c <= "\U0001f3ff", "\U000e0020" <= c < "\U000e0080"
    return tone or tag or unicodedata.category(c)[0] == "M"


def _stands_alone(c: str) -> bool:
    return any(low <= ord(c) <= high for low, high in _NO_SPACES) and _letter(c)


def _flag_letter(c: str) -> bool:
    return "\U0001f1e6" <= c <= "\U0001f1ff"
