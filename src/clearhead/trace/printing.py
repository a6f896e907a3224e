"""How names out of a stranger's file are shown: without control characters, and not at any length."""

from __future__ import annotations


def printable(text: str, most: int = 200) -> str:
    """The text with control characters spelled out and cut to `most` characters."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 1]}…"
