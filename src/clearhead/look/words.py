"""Words of a text and the tokens that make them up: people read words, models read pieces."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


class Word(NamedTuple):
    """A word or a punctuation mark: its text and its tokens, [start, stop)."""

    text: str
    start: int
    stop: int


def words(text: str, tokens: Sequence[str]) -> list[Word]:
    """Return the words of `text` (the joined `tokens`), each with the tokens that hold its characters.

    A token belongs to the word that most of its letters are in, the earlier one on a tie; words that share
    all their tokens with a neighbour are joined to it ("--" in one token is one word).
    """
    spans = [match.span() for match in _WORD.finditer(text)]
    word_of = [-1] * len(text)
    for i, (low, high) in enumerate(spans):
        word_of[low:high] = [i] * (high - low)
    tokens_of: list[list[int]] = [[] for _ in spans]
    at = 0
    for t, token in enumerate(tokens):
        inside = Counter(i for i in word_of[at : at + len(token)] if i >= 0)
        if inside:
            tokens_of[inside.most_common(1)[0][0]].append(t)
        at += len(token)
    found: list[Word] = []
    for (low, high), mine in zip(spans, tokens_of, strict=True):
        if mine:
            found.append(Word(text[low:high], mine[0], mine[-1] + 1))
        elif found:
            last = found[-1]
            found[-1] = Word(last.text + text[low:high], last.start, last.stop)
    return found
