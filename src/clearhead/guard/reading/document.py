"""A file as the guard reads it: named parts of text, each with the way back to the file's own characters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from clearhead.guard.hidden import Trick
from clearhead.guard.origin import Origin


class Label(NamedTuple):
    """What characters of a part are called in their file: "/3/content", "row 3, column 2", "page 4"."""

    start: int
    end: int
    said: str


@dataclass(frozen=True)
class Part:
    """A text of a file that belongs together.

    name: unique in its document. text: what a model would be given. origin: from its characters to those of
    the document's text. visible: whether a reader sees it. scanned: whether the guard looks at it (scripts
    and styles are read, and passed over unless asked for). labels: in order of their places.
    """

    name: str
    text: str
    origin: Origin
    visible: bool = True
    scanned: bool = True
    labels: tuple[Label, ...] = ()

    def label(self, at: int) -> str:
        """Return what the character is called; empty if it has no name."""
        number = bisect_right(self.labels, at, key=lambda label: label.start) - 1
        return self.labels[number].said if number >= 0 and at < self.labels[number].end else ""


@dataclass(frozen=True)
class Document:
    """A file, read.

    name: of the file. kind: "text", "markdown", "html", "mail", "json", "chat", "csv" or "pdf". text: the
    file's own characters; for a PDF those of its pages. parts: what is scanned. tricks: hidden text that the
    reader of this kind of file found, places in `text`. messages: of a chat, with "part" naming the part that
    holds each content. notes: what a reader should know.
    """

    name: str
    kind: str
    text: str
    parts: tuple[Part, ...]
    tricks: tuple[Trick, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    @cached_property
    def _lines(self) -> list[int]:
        starts = [0]
        at = self.text.find("\n")
        while at >= 0:
            starts.append(at + 1)
            at = self.text.find("\n", at + 1)
        return starts

    def place(self, offset: int) -> tuple[int, int]:
        """Return line and column, both from 1, of a character of `text`."""
        line = bisect_right(self._lines, offset)
        return line, offset - self._lines[line - 1] + 1

    def line(self, number: int) -> tuple[int, int]:
        """Return where the line of that number starts and ends (without its end of line)."""
        start = self._lines[number - 1]
        end = self._lines[number] - 1 if number < len(self._lines) else len(self.text)
        return start, end


class Builder:
    """Puts a part together from pieces of a file."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._texts: list[str] = []
        self._origins: list[Origin] = []
        self._labels: list[Label] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def slice(self, start: int, end: int) -> None:
        """Add characters of the file as they stand."""
        self.add(self._source[start:end], Origin.verbatim(start, end - start))

    def add(self, text: str, origin: Origin) -> None:
        """Add a text with its own way back."""
        if text:
            self._texts.append(text)
            self._origins.append(origin)
            self._length += len(text)

    def gap(self, text: str) -> None:
        """Add a separator that does not stand in the file; none at the beginning, none twice."""
        if not self._length or self._texts[-1].endswith(text):
            return
        at = int(self._origins[-1].ends[-1])
        self.add(text, Origin.block(at, at, len(text)))

    def ends_with(self, text: str) -> bool:
        """Whether the last thing added ends so."""
        return bool(self._texts) and self._texts[-1].endswith(text)

    def label(self, start: int, said: str) -> None:
        """Name what was added since the part had `start` characters."""
        if self._length > start:
            self._labels.append(Label(start, self._length, said))

    def part(self, name: str, *, visible: bool = True, scanned: bool = True) -> Part:
        """Return the part."""
        labels = tuple(sorted(self._labels))
        return Part(name, "".join(self._texts), Origin.join(self._origins), visible, scanned, labels)
