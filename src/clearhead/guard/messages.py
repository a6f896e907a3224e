"""A chat history as an instruction and the texts that tools brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.errors import ArgumentError

UNTRUSTED = ("tool", "function", "data")
"""Roles whose text is scanned."""


def split_messages(messages: Any, tools: Sequence[str] | None = None) -> tuple[str | None, dict[str, str]]:
    """Return the instruction and the sources by name.

    The instruction is the text of the system (and developer) messages and of the last user message, None if
    there is none. A source is called by its tool's name (or "tool"), with a number where names repeat.
    tools: whose results are taken; None: all.

    Raises ArgumentError for messages that are no mappings with a role and a content of text.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise ArgumentError(f"messages must be a list of messages, got {type(messages).__name__}")
    if isinstance(tools, str):
        raise ArgumentError(f"tools must be a list of names, got {tools!r}")
    names = _names_of_calls(messages)
    system: list[str] = []
    user = ""
    sources: dict[str, str] = {}
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ArgumentError(f"message {number} must be a mapping with a role, got {message!r:.80}")
        role, text = message["role"], _text(message.get("content"), number)
        if role in ("system", "developer"):
            system.append(text)
        elif role == "user":
            user = text
        elif role in UNTRUSTED:
            given = message.get("name") or names.get(message.get("tool_call_id")) or role
            name = str(given)
            if tools is None or name in tools:
                sources[_unused(name, sources)] = text
    instruction = "\n\n".join(part for part in (*system, user) if part.strip())
    return instruction or None, sources


def _names_of_calls(messages: Sequence[Any]) -> dict[Any, str]:
    """Call id to tool name, as assistant messages give them."""
    out: dict[Any, str] = {}
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                out[call.get("id")] = function["name"]
    return out


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = []
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts.append(part["text"])
            elif isinstance(part, str):
                parts.append(part)
            else:
                raise ArgumentError(f"message {number}: content must be text, got a part {part!r:.80}")
        return "\n".join(parts)
    raise ArgumentError(f"message {number}: content must be text or text parts, got {type(content).__name__}")


def _unused(name: str, taken: Mapping[str, str]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name} {number}" in taken:
        number += 1
    return f"{name} {number}"
