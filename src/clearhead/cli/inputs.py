"""From options to a prompt: texts as they are typed, @files, standard input, chat files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from clearhead.errors import ArgumentError, PromptError
from clearhead.models.chat import decode, read_chat, read_text
from clearhead.models.prompt import Segment


class Texts:
    """Turns option values into texts; standard input can be read once."""

    def __init__(self) -> None:
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
            return read_text(value[1:]), Path(value[1:]).name
        return value, None

    def stdin(self, option: str) -> str:
        """Return all of standard input. Raises ArgumentError the second time."""
        if self._stdin_taken_by is not None:
            raise ArgumentError(f"{option}: standard input is read by {self._stdin_taken_by} already")
        self._stdin_taken_by = option
        return decode(sys.stdin.buffer.read(), "standard input")


def segments(chat: str | None, system: str | None, user: str | None, data: Sequence[str]) -> list[Segment]:
    """Return the segments that the options describe: a chat's own, then system, user, data.

    A chat file keeps its order; `system` may be given beside it only if it has none. Names differ: a file's
    own name, or "data", "data 2" …
    Raises ArgumentError or PromptError for options that do not go together or cannot be read.
    """
    texts = Texts()
    found: list[Segment] = []
    if chat is not None:
        found = read_chat(texts.stdin("the chat") if chat == "-" else Path(chat))
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
        raise ArgumentError("nothing to look at: give --user, --data, --system, or a chat file (see --help)")
    if not any(s.text for s in found):
        raise PromptError("nothing to look at: all texts are empty")
    return found


def _free(name: str, taken: set[str]) -> str:
    """The name, or "name 2", "name 3" … if it is taken or has a meaning of its own."""
    name = name.strip() or "data"
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
        if not low.isascii() or not low.isdigit() or (dash and not (high.isascii() and high.isdigit())):
            raise ArgumentError(f"{option} must be numbers such as 3,5-8, got {text!r}")
        first, last = int(low), int(high or low)
        if last < first or last > 100_000:
            raise ArgumentError(f"{option} must be numbers such as 3,5-8, got {text!r}")
        found.extend(range(first, last + 1))
    return list(dict.fromkeys(found))
