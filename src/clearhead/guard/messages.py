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
    counts: dict[str, int] = {}
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ArgumentError(f"message {number} must be a mapping with a role, got {message!r:.80}")
        role = message["role"]
        if role not in ("system", "developer", "user", *UNTRUSTED):
            continue  # what the model said itself, whatever it is made of
        text = _text(message.get("content"), number)
        if role in ("system", "developer"):
            system.append(text)
        elif role == "user":
            user = text
        else:
            called = message.get("tool_call_id")
            given = message.get("name") or (names.get(called) if isinstance(called, str) else None)
            name = str(given or role)
            if tools is None or name in tools:
                sources[_unused(name, sources, counts)] = text
    instruction = "\n\n".join(part for part in (*system, user) if part.strip())
    return instruction or None, sources


def _names_of_calls(messages: Sequence[Any]) -> dict[str, str]:
    """Call id to tool name, as assistant messages give them."""
    out: dict[str, str] = {}
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(call.get("id"), str):
                continue
            if isinstance(function.get("name"), str):
                out[call["id"]] = function["name"]
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


def _unused(name: str, taken: Mapping[str, str], counts: dict[str, int]) -> str:
    """The name, with a number where it is taken. counts: how often each was asked for."""
    number = counts[name] = counts.get(name, 0) + 1
    unused = name if number == 1 else f"{name} {number}"
    return unused if unused not in taken else _unused(name, taken, counts)
