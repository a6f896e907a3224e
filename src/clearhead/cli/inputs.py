"""From options to a prompt: texts as they are typed, @files, standard input, chat files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from clearhead.errors import ArgumentError, PromptError
from clearhead.models.chat import LARGEST_FILE, decode, read_chat, read_text
from clearhead.models.prompt import Segment

T = TypeVar("T")
R = TypeVar("R")


class Texts:
    """Turns option values into texts; standard input can be read once. files: those that were read."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self._stdin_taken_by: str | None = None

    def read(self, option: str, value: str) -> tuple[str, str | None]:
        """Return the text and the name of the file it came from, None for typed text.

        "@page.txt" is that file, "-" standard input, "@@x" the text "@x"; anything else is the text itself.
        """
        if value == "-":
            return self.stdin(option), "stdin"
        if value.startswith("@@"):
            return value[1:], None
        if value.startswith("@"):
            if value == "@":
                raise ArgumentError(
                    f"{option}: a file name must follow the @ (@@ for a text that begins with @)"
                )
            path = Path(value[1:])
            text = _named(option, read_text, path)
            self.files.append(path)
            return text, path.name
        return value, None

    def stdin(self, option: str) -> str:
        """Return all of standard input. Raises ArgumentError the second time."""
        if self._stdin_taken_by is not None:
            raise ArgumentError(f"{option}: standard input is read by {self._stdin_taken_by} already")
        self._stdin_taken_by = option
        if sys.stdin is None:
            raise ArgumentError(f"{option}: standard input is closed")
        if sys.stdin.isatty() and sys.stderr is not None:
            print(
                f"reading {option} from the keyboard; end with Ctrl-D on a line of its own", file=sys.stderr
            )
        try:
            given = sys.stdin.buffer.read(LARGEST_FILE + 1)
        except OSError as error:  # a folder, a terminal that went away
            raise PromptError(f"{option}: standard input cannot be read: {error.strerror}") from error
        if len(given) > LARGEST_FILE:
            raise PromptError(
                f"{option}: standard input is too large: at most {LARGEST_FILE:,} bytes are read"
            )
        return decode(given, f"{option}: standard input")

    def chat(self, value: str) -> list[Segment]:
        """Return the segments of a JSON chat: a file, or "-"."""
        if value == "-":
            return _named("CHAT", read_chat, self.stdin("CHAT"))
        path = Path(value)
        if not os.path.lexists(path):
            raise ArgumentError(
                f"CHAT must be a JSON chat file or -, got {value[:200]!r}, and there is no such file; "
                "to give a text as it is, use --user, --data or --system"
            )
        found = _named("CHAT", read_chat, path)
        self.files.append(path)
        return found


def _named(option: str, read: Callable[[T], R], source: T) -> R:
    """Say in errors which option it was."""
    try:
        return read(source)
    except PromptError as error:
        raise PromptError(f"{option}: {error}") from error


def segments(
    chat: str | None,
    system: str | None,
    user: str | None,
    data: Sequence[str],
    texts: Texts | None = None,
    *,
    purpose: str = "look at",
) -> list[Segment]:
    """Return the segments that the options describe: a chat's own, then system, user, data.

    A chat file keeps its order; `system` may be given beside it only if it has none. Names differ: a file's
    own name, or "data", "data 2" …
    Raises ArgumentError or PromptError for options that do not go together or cannot be read.
    """
    texts = Texts() if texts is None else texts
    found: list[Segment] = []
    if chat is not None:
        found = texts.chat(chat)
        if system is not None and any(s.role == "system" for s in found):
            raise ArgumentError("--system: the chat has a system message already")
    taken = {s.name for s in found}
    if system is not None:
        found.insert(0, Segment(_free("system", taken), "system", texts.read("--system", system)[0]))
    if user is not None:
        found.append(Segment(_free("user", taken), "user", texts.read("--user", user)[0]))
    for value in data:
        text, name = texts.read("--data", value)
        found.append(Segment(_free(name or "data", taken), "data", text))
    if not found:
        raise ArgumentError(
            f"nothing to {purpose}: give --user, --data, --system, or a chat file (see --help)"
        )
    if not any(s.text for s in found):
        raise PromptError(f"nothing to {purpose}: all texts are empty")
    return found


def _free(name: str, taken: set[str]) -> str:
    """The name, or "name 2", "name 3" … if it is taken or has a meaning of its own."""
    name = name.encode("utf-8", "backslashreplace").decode().strip() or "data"  # names need not be UTF-8
    candidate, number = name, 2
    while candidate in taken or candidate in ("template", "output"):
        candidate, number = f"{name} {number}", number + 1
    taken.add(candidate)
    return candidate


def numbers(option: str, text: str | None) -> list[int] | None:
    """Return "3,5-8" as [3, 5, 6, 7, 8]. Raises ArgumentError for anything else."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        ends = (low.strip(), high.strip()) if dash else (low, low)
        if not all(end.isascii() and end.isdigit() and len(end) <= 5 for end in ends):
            raise ArgumentError(f"{option} must be numbers such as 3,5-8, got {text[:100]!r}")
        first, last = int(ends[0]), int(ends[1])
        if last < first:
            raise ArgumentError(f"{option} must be numbers such as 3,5-8, got {part!r}, which runs backwards")
        found.extend(range(first, last + 1))
    return list(dict.fromkeys(found))
