"""JSON: every text with its JSON pointer, and chat histories with their messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from clearhead.errors import ReadingError
from clearhead.guard.origin import Edit, Origin, edited
from clearhead.guard.reading.document import Builder, Document, Part

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}(?:\\u[0-9a-fA-F]{4})*|.)", re.DOTALL)
DATA_ROLES = frozenset({"tool", "function", "data"})
"""Roles whose content comes from elsewhere and is scanned."""
_ROLES = DATA_ROLES | {"system", "developer", "user", "assistant"}


class Text(NamedTuple):
    """A string of the file. pointer: RFC 6901. key: whether it is the name of a member."""

    pointer: str
    text: str
    origin: Origin
    key: bool


def read_json(text: str, name: str, *, lines: bool = False) -> Document:
    """Return a JSON file as a document; lines: one value per line.

    A list of messages with roles, or an object with such a list as "messages", is a chat: a part per message
    whose role is tool, function or data, called by its place ("message 3 (tool)"). Anything else is one part
    with all strings, keys before their texts, labelled with their JSON pointers; of lines, with the line.

    Raises ReadingError for what is not JSON, naming line and column, or nested too deep.
    """
    if not text.strip():
        return Document(name, "json", text, ())
    if lines:
        return _read_lines(text, name)
    value = _parse(text, name)
    found = list(strings(text))
    messages = _messages(value)
    if messages is not None:
        return _chat(text, name, messages, "" if isinstance(value, list) else "/messages", found)
    return Document(name, "json", text, _one_part(text, found))


def _read_lines(text: str, name: str) -> Document:
    builder = Builder(text)
    at = 0
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            _parse(line, name, number)
            _add(builder, strings(text, at, at + len(line)), f"line {number}: ")
        at += len(line) + 1
    return Document(name, "json", text, (builder.part("strings"),) if len(builder) else ())


def _parse(text: str, name: str, line: int = 0) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {line or error.lineno}, column {error.colno}"
        raise ReadingError(f"{name} is not JSON: {error.msg} at {at}") from error
    except RecursionError as error:
        raise ReadingError(f"{name} is JSON nested too deep to be read") from error
    except ValueError as error:  # an integer of too many digits
        raise ReadingError(f"{name} is JSON that cannot be read: {error}") from error


def strings(text: str, start: int = 0, end: int | None = None) -> Iterator[Text]:
    """Yield the strings of valid JSON in their order, with pointers and the way back. Not recursive."""
    path: list[Any] = []
    state: list[str] = []  # "[" or "{" (a key comes) or ":" (its value comes)
    for match in _TOKEN.finditer(text, start, len(text) if end is None else end):
        token = match.group()
        if token in "[{":
            state.append(token)
            path.append(0 if token == "[" else "")
        elif token in "]}":
            state.pop()
            path.pop()
        elif token == ",":
            if state[-1] == "[":
                path[-1] += 1
            else:
                state[-1] = "{"
        elif token == ":":
            state[-1] = ":"
        elif token[0] == '"':
            plain, origin = _unescaped(token[1:-1], match.start() + 1)
            key = bool(state) and state[-1] == "{"
            if key:
                path[-1] = plain.replace("~", "~0").replace("/", "~1")
            if plain.strip():
                yield Text("".join(f"/{part}" for part in path[-64:]), plain, origin, key)


def _unescaped(raw: str, start: int) -> tuple[str, Origin]:
    origin = Origin.verbatim(start, len(raw))
    if "\\" not in raw:
        return raw, origin
    edits = []
    for match in _ESCAPE.finditer(raw):
        plain = json.loads(f'"{match.group()}"')
        edits.append(Edit(*match.span(), plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")))
    return edited(raw, origin, edits)


def _one_part(text: str, found: list[Text]) -> tuple[Part, ...]:
    builder = Builder(text)
    _add(builder, found)
    return (builder.part("strings"),) if len(builder) else ()


def _add(builder: Builder, found: list[Text] | Iterator[Text], label: str = "") -> None:
    for item in found:
        if not item.key and builder.ends_with(":"):
            builder.gap(" ")
        else:
            builder.gap("\n")
        before = len(builder)
        builder.add(item.text, item.origin)
        builder.label(before, f"{label}{item.pointer}" + (" (key)" if item.key else ""))
        if item.key:
            builder.gap(":")


def _messages(value: Any) -> list[Mapping[str, Any]] | None:
    if isinstance(value, dict):
        value = value.get("messages")
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(m, dict) and m.get("role") in _ROLES for m in value):
        return None
    return value


def _chat(text: str, name: str, messages: list[Mapping[str, Any]], root: str, found: list[Text]) -> Document:
    parts: list[Part] = []
    out: list[Mapping[str, Any]] = []
    notes = []
    inside: dict[int, list[Text]] = {}
    for item in found:
        if item.key or not item.pointer.startswith(f"{root}/"):
            continue
        steps = item.pointer[len(root) + 1 :].split("/")
        plain = steps[1:] == ["content"]
        nested = len(steps) >= 4 and steps[1] == "content" and steps[-1] in ("text", "content")
        if steps[0].isdigit() and (plain or nested):
            inside.setdefault(int(steps[0]), []).append(item)
    for number, message in enumerate(messages):
        role = message["role"]
        texts = inside.get(number, [])
        said = "\n".join(item.text for item in texts)
        if role not in DATA_ROLES:
            out.append({"role": "system" if role == "developer" else role, "content": said, "part": ""})
            continue
        builder = Builder(text)
        for item in texts:
            builder.gap("\n")
            before = len(builder)
            builder.add(item.text, item.origin)
            builder.label(before, item.pointer)
        title = f"message {number} ({role})"
        if len(builder):
            parts.append(builder.part(title))
        out.append({"role": "tool", "content": parts[-1].text if len(builder) else "", "part": title})
    if not parts:
        notes.append("no message of this chat is from a tool or a data source: nothing in it is scanned")
    return Document(name, "chat", text, tuple(parts), messages=tuple(out), notes=tuple(notes))
