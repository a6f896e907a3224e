"""What is safe to print: text from anywhere, with everything a terminal would obey made visible."""

from __future__ import annotations

import os
import sys
import unicodedata
from typing import NoReturn

#: Blank characters beside those of Unicode category Cf.
_BLANK = {"\u115f", "\u1160", "\u2800", "\u3164", "\uffa0"}
#: Of control, format, half, private, unassigned characters and separators nothing may pass.
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
#: Accents on one letter: honest writing has no more; a tower of them paints over the lines around it.
ACCENTS = 4


def visible(text: str, *, newline: str = "\n", most: int | None = None) -> str:
    """Return `text` with characters that are not to be seen, or do something, as "<U+001B>".

    newline: what a line break becomes ("\\n" keeps it, "↵" shows it in a table). most: if more than so many
    characters would be shown, the rest is "…".
    """
    shown, accents, before = [], 0, " "
    for c in text if most is None else text[: most + 1]:
        category = unicodedata.category(c)
        accents = accents + 1 if category in ("Mn", "Me") else 0
        if c == "\n":
            shown.append(newline)
        elif c in _BLANK or category in _HIDDEN or accents > ACCENTS or _carries_bytes(c, before):
            shown.append(f"<U+{ord(c):04X}>")
        else:
            shown.append(c)
        before = c
    if most is None or sum(map(len, shown)) <= most:
        return "".join(shown)
    while sum(map(len, shown)) > most - 1:
        shown.pop()
    return f"{''.join(shown)}…"


def _carries_bytes(c: str, before: str) -> bool:
    """Variation selectors draw nothing: one after a picture is honest, others can hide bytes."""
    if "\ufe0e" <= c <= "\ufe0f":
        return before.isspace() or "\ufe00" <= before <= "\ufe0f"
    return "\ufe00" <= c <= "\ufe0d" or "\U000e0100" <= c <= "\U000e01ef"


def cell(text: str, most: int = 40) -> str:
    """Return a name or a word for one cell of a table: one line, visible, not too long."""
    return visible(text, newline="↵", most=most)


def token(text: str) -> str:
    """Return a token as one visible word: "·cat" for " cat", "↵" for a line break."""
    return cell(text).replace(" ", "·") or "∅"


def write(text: str) -> None:
    """Write to standard output; a reader who went away ends the program without a word."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        reader_gone()


def reader_gone() -> NoReturn:
    """End the program: nobody reads standard output any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # so that the interpreter's last flush does not complain
    raise SystemExit(0)
