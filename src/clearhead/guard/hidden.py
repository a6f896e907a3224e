"""Hidden text: what a reader does not see and a model reads, made plain, with the offsets kept."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clearhead.guard.blobs import decoded
from clearhead.guard.lookalikes import disguised_words, plain_letters, spaced_words
from clearhead.guard.origin import Edit, Origin, edited

KINDS: dict[str, str] = {
    "unicode-tags": "Unicode tag characters that spell text nobody sees",
    "variation-selectors": "variation selectors that carry bytes",
    "zero-width": "characters without width between letters",
    "bidi": "direction controls: the text reads otherwise than it is stored",
    "soft-hyphens": "soft hyphens between single letters",
    "homoglyphs": "letters of another script that look like Latin ones",
    "styled-letters": "fullwidth or mathematical letters instead of plain ones",
    "letter-spacing": "a word with spaces between its letters",
    "base64": "base64 that decodes to readable text",
    "hex": "hexadecimal digits that decode to readable text",
    "terminal-escapes": "escape sequences that hide or move text on a terminal",
    "html-comment": "an HTML comment",
    "hidden-html": "text that the page's style hides",
    "hidden-pdf": "text that the page does not show",
}
"""Kinds of tricks and what they are. The last three are found by the readers of files."""


@dataclass(frozen=True)
class Trick:
    """A place where text is hidden or disguised.

    kind: one of `KINDS`. start, end: characters of the text that was given. shown: the text that comes out,
    or what was found. level: "warning" where no honest use is known that looks like this, "note" where there
    are many (a preheader of a mail, base64 in a log).
    """

    kind: str
    start: int
    end: int
    shown: str
    level: str = "warning"


@dataclass(frozen=True)
class Normalised:
    """A text as the model should read it.

    text: plain. tricks: in order of their places in the text that was given. origin: from the characters of
    `text` to those of the text that was given.
    """

    text: str
    tricks: tuple[Trick, ...]
    origin: Origin


#: start, end, what to put there, (kind, level, shown) or None where it is ordinary.
_Found = tuple[int, int, str, tuple[str, str, str] | None]


def normalise(text: str) -> Normalised:
    """Find hidden and disguised text, and make it plain for the model. Linear in the text's length.

    Left as they are: emoji sequences, joiners of scripts that need them, direction marks in right-to-left
    text, punctuation of full width. Soft hyphens between syllables and colours of a terminal are taken out
    without a word. Raises nothing.
    """
    origin = Origin.verbatim(0, len(text))
    tricks: list[Trick] = []
    passes: tuple[Callable[[str], Iterator[_Found]], ...] = (
        _escapes, _tags, _selectors, _zero_width, _bidi, _soft_hyphens,
        plain_letters, disguised_words, spaced_words, decoded,
    )  # fmt: skip
    for find in passes:
        edits = []
        for start, end, put, trick in find(text):
            edits.append(Edit(start, end, put))
            if trick is not None:
                kind, level, shown = trick
                tricks.append(Trick(kind, *origin.span(start, end), shown, level))
        text, origin = edited(text, origin, edits)
    return Normalised(text, tuple(sorted(_together(tricks), key=lambda t: (t.start, t.end))), origin)


_LONGEST_SHOWN = 1000
"""Characters of one trick after which no more of its neighbours' are shown."""


def _together(tricks: list[Trick]) -> list[Trick]:
    """Neighbours of one kind, closer than a line, are one trick."""
    out: list[Trick] = []
    for trick in tricks:
        last = out[-1] if out else None
        same = last is not None and (last.kind, last.level) == (trick.kind, trick.level)
        if last is not None and same and 0 <= trick.start - last.end <= 24:
            known = trick.shown in last.shown or len(last.shown) > _LONGEST_SHOWN
            shown = last.shown if known else f"{last.shown} {trick.shown}"
            out[-1] = Trick(last.kind, last.start, trick.end, shown, last.level)
        else:
            out.append(trick)
    return out


# ------------------------------------------------------------------ terminals

_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # control sequences
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, strings
    r"|\x1b[ -/]*[0-~]|[\x1b\x9b]"
)
_COLOUR = re.compile(r"(?:\x1b\[|\x9b)[0-9;:]*m|(?:\x1b\[|\x9b)0?K")


def _escapes(text: str) -> Iterator[_Found]:
    for match in _ESCAPE.finditer(text):
        sequence = match.group()
        numbers = re.split(r"[;:]", re.sub(r"[^0-9;:]", "", sequence))
        honest = _COLOUR.fullmatch(sequence) and "8" not in _attributes(numbers)
        shown = sequence.replace("\x1b", "ESC").replace("\x9b", "CSI")
        yield *match.span(), "", None if honest else ("terminal-escapes", "warning", shown)


def _attributes(numbers: list[str]) -> list[str]:
    """The attributes of a colour sequence without the arguments of 38 and 48."""
    out, skip = [], 0
    for at, number in enumerate(numbers):
        if skip:
            skip -= 1
        elif number in ("38", "48", "58"):
            skip = {"5": 2, "2": 4}.get(numbers[at + 1] if at + 1 < len(numbers) else "", 0)
        else:
            out.append(number)
    return out


# ----------------------------------------------------------------- what has no width

_TAGS = re.compile("[\U000e0000-\U000e007f]+")
_FLAG = re.compile("[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,6}\U000e007f")


def _tags(text: str) -> Iterator[_Found]:
    for match in _TAGS.finditer(text):
        if text[max(0, match.start() - 1) : match.start()] == "\U0001f3f4" and _FLAG.fullmatch(match.group()):
            continue  # the flag of England, Scotland, Wales …
        said = "".join(chr(ord(c) - 0xE0000) for c in match.group() if 0x20 <= ord(c) - 0xE0000 < 0x7F)
        put = f" {said} " if said.strip() else ""
        shown = said or f"{len(match.group())} tag characters"
        yield *match.span(), put, ("unicode-tags", "warning", shown)


_SELECTORS = re.compile(
    "[\ufe00-\ufe0f\U000e0100-\U000e01ef]{2,}|(?<=[ -~])[\ufe00-\ufe0d\U000e0100-\U000e01ef]"
)


def _selectors(text: str) -> Iterator[_Found]:
    for match in _SELECTORS.finditer(text):
        points = [ord(c) for c in match.group()]
        data = bytes(p - 0xFE00 if p < 0x10000 else p - 0xE0100 + 16 for p in points)
        said = data.decode("utf-8", "replace")
        readable = said.isprintable() and "\ufffd" not in said
        shown = said if readable else f"{len(points)} variation selectors: {data[:32].hex()}"
        put = f" {said} " if readable and len(said) > 1 else said if readable else ""
        yield *match.span(), put, ("variation-selectors", "warning", shown)


_NO_WIDTH = re.compile("[\u200b-\u200d\u2060-\u2064\ufeff\u180e\u115f\u1160\u3164\uffa0\u034f]+")
_MANY = 6


def _zero_width(text: str) -> Iterator[_Found]:
    found: list[tuple[int, int, bool]] = []
    for match in _NO_WIDTH.finditer(text):
        start, end = match.span()
        before, after = text[start - 1 : start], text[end : end + 1]
        if end - start < _MANY and (_needs_joiner(before) or _needs_joiner(after)):
            continue
        inside = _european(before) and _european(after)
        found.append((start, end, inside))
    for number, (start, end, inside) in enumerate(found):
        near = found[max(0, number - 2) : number + 3]
        words = sum(other[2] for other in near if abs(other[0] - start) < 40)
        bad = end - start >= _MANY or (inside and words >= 3)
        said = _bits(text[start:end])
        shown = said or f"{end - start} character{'s' * (end - start > 1)} without width"
        yield start, end, f" {said} " if said else "", (
            "zero-width", "warning" if bad else "note", shown
        )  # fmt: skip


def _european(character: str) -> bool:
    return character.isalpha() and ord(character) < 0x530


def _needs_joiner(character: str) -> bool:
    """Whether a joiner beside it may be honest: emoji, and scripts from Hebrew to Korean."""
    if not character:
        return False
    point = ord(character)
    kind = unicodedata.category(character)
    picture = kind in ("So", "Sk") or 0x1F000 <= point <= 0x1FAFF or point in (0xFE0F, 0x20E3)
    return picture or (kind[0] in "LM" and (0x590 <= point < 0x1E00 or 0x2E80 <= point < 0xFE00))


def _bits(run: str) -> str:
    """Text written in two of the characters, as bits; empty if there is none."""
    signs = sorted(set(run))
    if len(signs) != 2 or len(run) < 16:
        return ""
    for zero in signs:
        bits = "".join("0" if c == zero else "1" for c in run)
        data = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits) - 7, 8))
        try:
            said = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if said.isprintable():
            return said
    return ""


# ----------------------------------------------------------------- direction

_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]")


def _bidi(text: str) -> Iterator[_Found]:
    rtl = None
    for match in _DIRECTION.finditer(text):
        sign = match.group()
        if rtl is None:
            rtl = any(unicodedata.bidirectional(c) in ("R", "AL") for c in text if ord(c) > 0x58F)
        override = sign in "\u202d\u202e"
        if rtl and not override:
            continue
        if sign in "\u202c\u2069":  # only ends what another began
            yield *match.span(), "", None
            continue
        line_end = text.find("\n", match.end(), match.end() + 80)
        rest = text[match.end() : min(match.end() + 80, line_end if line_end >= 0 else len(text))]
        shown = _DIRECTION.sub("", rest).strip() or unicodedata.name(sign)
        level = "warning" if override else "note"
        yield *match.span(), "", ("bidi", level, shown)


_SOFT = re.compile("\u00ad+")
_SINGLE = re.compile("(?:[^\\W\\d_]\u00ad+){3,}[^\\W\\d_]?")


def _soft_hyphens(text: str) -> Iterator[_Found]:
    spaced = [(m.start(), m.end(), m.group()[:_LONGEST_SHOWN]) for m in _SINGLE.finditer(text)]
    at = 0
    for match in _SOFT.finditer(text):
        while at < len(spaced) and spaced[at][1] <= match.start():
            at += 1
        inside = at < len(spaced) and spaced[at][0] <= match.start() < spaced[at][1]
        shown = spaced[at][2].replace("\u00ad", "") if inside else ""
        yield *match.span(), "", ("soft-hyphens", "warning", shown) if inside else None
