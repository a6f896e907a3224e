"""Letters that stand in for others: styled, of another script, or spaced out."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

Found = tuple[int, int, str, tuple[str, str, str] | None]

#: Small letters and capitals of Cyrillic, Greek and Armenian that are drawn like Latin ones, a choice from
#: the confusables of Unicode Technical Standard 39, and the Latin ones.
_PAIRS = (
    ("абсԁеһіјӏоԛԍрѕԝхуѵց", "abcdehijloqgpswxyvg"),
    ("АВСЕНІЈКМОРЅТХУԜԌԚЅ", "ABCEHIJKMOPSTXYWGQS"),
    ("ανορυικγωχτ", "avopuikywxt"),
    ("ΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "ABEZHIKMNOPTYX"),
    ("օսոհցքգզ", "ounhgpqq"),
    ("ıɑɡɩɪʏᴄᴏᴠᴡᴢⅰⅼⅽⅾⅿ", "iagiiycovwzilcdm"),
)
_LATIN = {strange: plain for one, other in _PAIRS for strange, plain in zip(one, other, strict=True)}
_WORD = re.compile(r"[^\W\d_]+")
_STYLED = re.compile("[\uff21-\uff3a\uff41-\uff5a\u2100-\u214f\u24b6-\u24e9\U0001d400-\U0001d7ff"
                     "\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189]")  # fmt: skip
_STYLED_WORDS = re.compile(f"(?:{_STYLED.pattern}+[ \u3000]?)+")


def plain_letters(text: str) -> Iterator[Found]:
    """Letters of full width, mathematical and circled letters, as plain ones.

    A trick from four in a word on, if not all are capitals of full width, as acronyms are in Japanese.
    """
    for match in _STYLED_WORDS.finditer(text):
        whole = match.group().rstrip(" \u3000")
        plain = "".join(_plain(c) for c in whole)
        letters = [c for c in whole if c not in " \u3000"]
        acronym = all("\uff21" <= c <= "\uff3a" for c in letters) and len(letters) <= 12
        longest = max((len(w) for w in plain.split()), default=0)
        if plain == whole or (longest < 2 and len(letters) < 4):
            continue
        trick = None if longest < 4 or acronym else ("styled-letters", "note", plain)
        yield match.start(), match.start() + len(whole), plain, trick


def _plain(character: str) -> str:
    if character == "\u3000":
        return " "
    point = ord(character)
    for first in (0x1F130, 0x1F150, 0x1F170):  # squared, circled: no compatibility form
        if first <= point < first + 26:
            return chr(65 + point - first)
    plain = unicodedata.normalize("NFKC", character)
    return plain if len(plain) == 1 and plain.isalnum() else character


def disguised_words(text: str) -> Iterator[Found]:
    """Words in which letters of another script stand for Latin ones.

    Words that mix both, and, in a text that holds no other word of that script, words of look-alikes alone.
    """
    if text.isascii():
        return
    suspects: list[tuple[int, int, str, bool]] = []
    scripts: set[str] = set()
    for match in _WORD.finditer(text):
        word = match.group()
        if word.isascii():
            continue
        strange = [c for c in word if ord(c) > 0x24F]
        if not strange or len(word) < 3:
            continue
        if all(c in _LATIN for c in strange):
            suspects.append((*match.span(), word, len(strange) < len(word)))
        else:
            scripts |= {_script(c) for c in strange}
    for start, end, word, mixed in suspects:
        if not mixed and _script(word[0]) in scripts:
            continue
        plain = "".join(_LATIN.get(c, c) for c in word)
        yield start, end, plain, ("homoglyphs", "warning", plain)


def _script(character: str) -> str:
    return unicodedata.name(character, "?").split(" ")[0]


_SPACED = re.compile(
    r"(?<![^\W_])[^\W\d_](?:([ ._*·\u2009\u200a\u00a0-])[^\W\d_](?:\1[^\W\d_]){3,})(?![^\W_])"
)


def spaced_words(text: str) -> Iterator[Found]:
    """Words of five letters or more with one sign between all letters; lists such as "a b c d e" are none."""
    for match in _SPACED.finditer(text):
        said = match.group()[::2]
        steps = {ord(b) - ord(a) for a, b in pairwise(said)}
        if len(steps) < 3 or len(set(said.lower())) < 4 or any(c > "\u2e80" for c in said):
            continue
        yield *match.span(), said, ("letter-spacing", "note", said)
