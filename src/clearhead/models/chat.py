"""Read texts and chats that somebody hands over: files that must be UTF-8, chats as JSON.

What is read is data. A text is never taken for a path, a path only where the argument is one, and nothing
is run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from clearhead.errors import PromptError
from clearhead.models.prompt import ROLES, Segment

LARGEST_FILE = 64 * 2**20
"""Bytes. A text of this size is some 16 million tokens, far beyond any model; more is surely a mistake."""


def read_text(path: str | os.PathLike[str], *, largest: int = LARGEST_FILE) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark and otherwise as it stands.

    path: the file. largest: the most bytes that are read.

    Raises PromptError, with the path, for a file that is missing, unreadable, a folder, too large or not
    UTF-8 (with the byte where it stops being that).
    """
    path = Path(path)
    try:
        is_folder = path.is_dir()
        data = b"" if is_folder else _read(path, largest + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PromptError(f"{path} cannot be read: {reason}") from error
    if is_folder:
        raise PromptError(f"{path} is a folder: a text file is needed")
    if len(data) > largest:
        raise PromptError(f"{path} is too large: at most {largest:,} bytes are read as a prompt")
    return decode(data, str(path))


def _read(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)


def decode(data: bytes, name: str) -> str:
    """Return UTF-8 bytes as text, without a byte-order mark. `name` says in errors where they came from.

    Raises PromptError naming the first byte that is not UTF-8.
    """
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x} ({error.reason}); "
            "convert it to UTF-8 first"
        ) from None


def read_chat(source: str | os.PathLike[str]) -> list[Segment]:
    """Return the segments of a JSON chat: `[{"role": …, "content": …}, …]`.

    source: the JSON itself if it is a str, the file that holds it if it is a path (pathlib.Path). `content`
    is a text, null, or a list of `{"type": "text", "text": …}` parts, which are put together. Roles are
    system, user, assistant, tool and data; "developer" is read as system. Other keys are passed over.

    Segments are called by role, "user", or "user 1", "user 2" where a role comes more than once. Tool and
    data messages are untrusted.

    Raises PromptError for text that is not such JSON, naming the message and what is allowed, and as
    `read_text` does.
    """
    if isinstance(source, str):
        name, text = "the chat", source
    else:
        name, text = str(source), read_text(source)
    try:
        chat = json.loads(text)
    except json.JSONDecodeError as error:
        raise PromptError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deep; an integer of too many digits
        raise PromptError(f"{name} is JSON that cannot be read: {error}") from error
    if not isinstance(chat, list):
        raise PromptError(
            f'{name} must be a JSON list of messages, [{{"role": …, "content": …}}, …], got {_kind(chat)}'
        )
    if not chat:
        raise PromptError(f"{name} must hold at least one message, got an empty list")
    messages = [_message(message, index, name) for index, message in enumerate(chat)]
    roles = [role for role, _ in messages]
    seen: dict[str, int] = {}
    segments = []
    for role, content in messages:
        seen[role] = seen.get(role, 0) + 1
        label = role if roles.count(role) == 1 else f"{role} {seen[role]}"
        segments.append(Segment(label, role, content))
    return segments


def _message(message: Any, index: int, name: str) -> tuple[str, str]:
    where = f"{name}, message {index}"
    if not isinstance(message, dict):
        raise PromptError(f"{where} must be an object with role and content, got {_kind(message)}")
    if "role" not in message:
        raise PromptError(f"{where} has no role: it must be one of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in ROLES:
        raise PromptError(f"{where}: role must be one of {', '.join(ROLES)}, got {message['role']!r}")
    if "content" not in message:
        raise PromptError(f"{where} has no content: it must be a text or a list of text parts")
    return role, _content(message["content"], where)


def _content(content: Any, where: str) -> str:
    if content is None:  # an assistant's message that only calls tools
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptError(f"{where}: content must be a text or a list of text parts, got {_kind(content)}")
    texts = []
    for number, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            got = f"type {part.get('type')!r}" if isinstance(part, dict) else _kind(part)
            raise PromptError(
                f'{where}: part {number} of content must be {{"type": "text", "text": …}}, got {got}'
            )
        texts.append(part["text"])
    return "".join(texts)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
