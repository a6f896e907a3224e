"""HTML's character references, undone with their places kept."""

from __future__ import annotations

import html
import re

from clearhead.guard.origin import Edit, Origin, edited

_REFERENCE = re.compile(r"&(?:#[0-9]{1,7};?|#[xX][0-9a-fA-F]{1,6};?|[A-Za-z][A-Za-z0-9]{1,31};?)")
_SPACES = re.compile(r"[ \t\r\n\f]+")


def unescaped(text: str, start: int) -> tuple[str, Origin]:
    """Return a text of the file that begins at `start` with its references undone, and the way back."""
    origin = Origin.verbatim(start, len(text))
    edits = []
    for match in _REFERENCE.finditer(text):
        plain = html.unescape(match.group())
        if plain != match.group():
            edits.append(Edit(*match.span(), plain))
    return edited(text, origin, edits)


def collapsed(text: str, origin: Origin) -> tuple[str, Origin]:
    """Return the text with each run of white space as one space, as a browser shows it."""
    return edited(text, origin, [Edit(*m.span(), " ") for m in _SPACES.finditer(text) if m.group() != " "])
