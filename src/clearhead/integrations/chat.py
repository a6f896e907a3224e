"""What the chat formats of the hosts have in common: content as text or blocks, and what was asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from clearhead.guard.policy import Decision
from clearhead.guard.redacting import MARKER

WITHHELD = f"{MARKER} The text was withheld: it held instructions that the user did not give."
UNREAD = f"{MARKER} The text was withheld: it could not be checked."


def notice(decision: Decision) -> str:
    """Return what stands in place of a refused text. One of two constants: no word of the text is in it."""
    return UNREAD if decision.unjudged else WITHHELD


def pieces(content: Any) -> list[str]:
    """Return the texts of a message's content: a str, or a list of str and of blocks with a "text".

    Images and other blocks without text are not read.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        return []
    found = (block if isinstance(block, str) else _text(block) for block in content)
    return [text for text in found if text is not None]


def refilled(content: Any, texts: Iterable[str]) -> Any:
    """Return the content with other texts in the places of `pieces(content)`."""
    left = iter(texts)
    if isinstance(content, str):
        return next(left)
    return [_refilled(block, left) for block in content]


def named(name: str, texts: list[str]) -> dict[str, str]:
    """Return the texts as sources: name, name 2, name 3, …"""
    return {name if n == 1 else f"{name} {n}": text for n, text in enumerate(texts, 1)}


def instruction(*said: str) -> str:
    """Return what is asked for: what operator and user said, a paragraph each, empty ones left out."""
    return "\n\n".join(text.strip() for text in said if text.strip())


def last_user(messages: Iterable[Any]) -> str:
    """Return the text of the last message whose role is user, in OpenAI's format, or ""."""
    found = ""
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") == "user":
            found = "\n".join(pieces(message.get("content"))) or found
    return found


def _refilled(block: Any, left: Iterator[str]) -> Any:
    if isinstance(block, str):
        return next(left)
    return block if _text(block) is None else {**block, "text": next(left)}


def _text(block: Any) -> str | None:
    text = block.get("text") if isinstance(block, Mapping) else None
    return text if isinstance(text, str) else None
