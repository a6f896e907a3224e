"""What is safe to print: text from anywhere, with everything a terminal would obey made visible."""

from __future__ import annotations

import unicodedata

#: Zero-width and direction-changing characters beside those of Unicode category Cf.
_HIDDEN = {"\u115f", "\u1160", "\u2800", "\u3164", "\uffa0"}


def visible(text: str, *, newline: str = "\n") -> str:
    """Return `text` with control, format and half characters as "<U+001B>"; nothing else changes.

    newline: what a line break becomes ("\\n" keeps it, "↵" shows it in a table).
    """
    return "".join(_shown(c, newline) for c in text)


def _shown(c: str, newline: str) -> str:
    if c == "\n":
        return newline
    if c in _HIDDEN or unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"<U+{ord(c):04X}>"
    return c


def token(text: str) -> str:
    """Return a token as one visible word: "·cat" for " cat", "↵" for a line break."""
    return visible(text, newline="↵").replace(" ", "·") or "∅"
