"""Where named pieces of text ended up: in a rendered prompt, and then in its tokens.

A chat template is a program. It may trim what it is given, move it, repeat it, drop it, change its case or
escape it. So nothing here assumes what it does: marks from Unicode's private-use areas go around every
piece, the prompt is rendered with and without them, and only if both agree are the marked places believed.
Where they do not agree, a place counts only if there is exactly one it can be; otherwise the answer is an
error, never a guess. Tokenizers and roles are not this file's business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import NamedTuple

from clearhead.errors import PromptError

PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""The code points that Unicode assigns to nobody: the three private-use areas."""

Render = Callable[[Sequence[str]], str]
"""Takes the content of every message, in order, and returns the text of the whole prompt."""


class Piece(NamedTuple):
    """A named stretch of a message: content[start:end] is the text of segment `segment`."""

    segment: int
    start: int
    end: int


@dataclass(frozen=True)
class Message:
    """The content of one message and the segments in it, in order and without overlap."""

    content: str
    pieces: tuple[Piece, ...]


class Span(NamedTuple):
    """Characters start (included) to end (excluded) of a text belong to segment `segment`."""

    segment: int
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """A rendered prompt and where its segments lie in it: spans in the order of the text, none overlap."""

    text: str
    spans: tuple[Span, ...]


def unused_characters(texts: Sequence[str], count: int) -> list[str]:
    """Return `count` private-use characters that occur in none of the texts.

    Raises PromptError if the texts leave fewer than that.
    """
    used = set(chain.from_iterable(texts))
    free = (chr(code) for code in chain.from_iterable(PRIVATE_USE) if chr(code) not in used)
    found = [char for char, _ in zip(free, range(count), strict=False)]
    if len(found) < count:
        raise PromptError(
            f"the prompt needs {count} private-use characters as marks, but its texts leave only "
            f"{len(found)} of them unused"
        )
    return found


def locate(messages: Sequence[Message], render: Render, names: Sequence[str]) -> Layout:
    """Render the messages and find every segment in the result.

    names: the name of each segment number, for error messages.

    A segment that the template drops has no span, one that it repeats has several. Raises PromptError if a
    segment was changed so that its place is not certain, and whatever `render` raises.
    """
    plain = render([message.content for message in messages])
    finder = _Finder(messages, render, plain)
    everything = range(len(messages))
    spans = finder.marked(everything, "none")
    if spans is None:
        spans = finder.marked(everything, "both")
    if spans is None:
        spans = _one_by_one(finder, names)
    return Layout(plain, tuple(sorted(spans, key=lambda span: (span.start, span.end))))


class _Finder:
    """Renders with marks around the segments of chosen messages, and reads the marks back."""

    def __init__(self, messages: Sequence[Message], render: Render, plain: str) -> None:
        self.messages = messages
        self.render = render
        self.plain = plain
        count = 1 + max((piece.segment for m in messages for piece in m.pieces), default=-1)
        marks = unused_characters([plain, *(m.content for m in messages)], 2 * count)
        self.opening, self.closing = marks[:count], marks[count:]
        self.segment_of = {mark: i % count for i, mark in enumerate(marks)}
        self.mark = re.compile(f"([{re.escape(''.join(marks))}])") if marks else re.compile("(?!)")

    def marked(self, chosen: Sequence[int], strip: str) -> list[Span] | None:
        """Return the spans of the chosen messages, or None if the marks changed the rendering."""
        text, spans = self.read(self.with_marks(chosen, strip))
        return spans if text == self.plain else None

    def with_marks(self, chosen: Sequence[int], strip: str) -> str:
        """Render with marks in the chosen messages, whose contents are stripped as a template might."""
        contents = [message.content for message in self.messages]
        for index in chosen:
            contents[index] = self.mark_up(self.messages[index], strip)
        return self.render(contents)

    def mark_up(self, message: Message, strip: str) -> str:
        content = message.content
        left = len(content) - len(content.lstrip()) if strip in ("left", "both") else 0
        right = len(content.rstrip()) if strip in ("right", "both") else len(content)
        right = max(left, right)
        out: list[str] = []
        at = left
        for piece in message.pieces:
            start, end = (min(max(place, left), right) for place in (piece.start, piece.end))
            out += content[at:start], self.opening[piece.segment]
            out += content[start:end], self.closing[piece.segment]
            at = end
        return "".join([*out, content[at:right]])

    def read(self, marked: str) -> tuple[str, list[Span] | None]:
        """Remove the marks; return the text and the spans, None for marks that do not pair up."""
        out: list[str] = []
        spans: list[Span] = []
        length, opened = 0, -1
        start, sound = 0, True
        for part in self.mark.split(marked):
            segment = self.segment_of.get(part)
            if segment is None:
                out.append(part)
                length += len(part)
            elif part == self.opening[segment]:
                sound &= opened < 0
                start, opened = length, segment
            else:
                sound &= opened == segment
                spans.append(Span(segment, start, length))
                opened = -1
        return "".join(out), spans if sound and opened < 0 else None

    def order(self) -> list[int]:
        """Return the segments in the order in which their marks come out of the template."""
        parts = self.mark.split(self.with_marks(range(len(self.messages)), "none"))
        return [self.segment_of[part] for part in parts if part in self.opening]


def _one_by_one(finder: _Finder, names: Sequence[str]) -> list[Span]:
    """Find the segments message by message: by marks if that holds for one message, else by search."""
    certain: dict[int, list[Span]] = {}
    searched: dict[int, str] = {}
    for index, message in enumerate(finder.messages):
        attempts = (finder.marked([index], strip) for strip in ("none", "left", "right", "both"))
        spans = next((spans for spans in attempts if spans is not None), None)
        for piece in message.pieces:
            if spans is not None:
                certain[piece.segment] = [span for span in spans if span.segment == piece.segment]
            else:
                searched[piece.segment] = message.content[piece.start : piece.end]
    found = [span for spans in certain.values() for span in spans]
    if any(text.strip() for text in searched.values()):
        found += _search(finder, certain, searched, names)
    return found


def _search(
    finder: _Finder, certain: dict[int, list[Span]], searched: dict[int, str], names: Sequence[str]
) -> list[Span]:
    """Search the texts in the order of their marks, and insist that there is one way to place them.

    The leftmost and the rightmost placement are compared: if they agree, no other exists.
    """
    plain = finder.plain
    steps: list[tuple[int, str]] = []
    for segment in finder.order():
        text = searched.get(segment, "")
        if text.strip():
            steps.append((segment, text if text in plain else text.strip()))
    blocked = sorted((span for spans in certain.values() for span in spans), key=lambda span: span.start)

    def fits(start: int, end: int) -> bool:
        return all(end <= span.start or start >= span.end for span in blocked)

    leftmost: list[Span] = []
    at = 0
    for segment, text in steps:
        start = plain.find(text, at)
        while start >= 0 and not fits(start, start + len(text)):
            start = plain.find(text, start + 1)
        if start < 0:
            raise PromptError(
                f"segment {names[segment]!r}: the chat template changes its text, and it cannot be found in "
                f"the prompt again; text that begins {text[:40]!r} was looked for"
            )
        at = start + len(text)
        leftmost.append(Span(segment, start, at))
    at = len(plain)
    for (segment, text), left in zip(reversed(steps), reversed(leftmost), strict=True):
        start = plain.rfind(text, 0, at)
        while not fits(start, start + len(text)):
            start = plain.rfind(text, 0, start + len(text) - 1)
        if start != left.start:
            raise PromptError(
                f"segment {names[segment]!r}: the chat template changes its text, and what is left, "
                f"{text[:40]!r}, stands in the prompt at more than one place (characters {left.start} and "
                f"{start}); which of them is meant cannot be told"
            )
        at = start
    return leftmost


class Ownership(NamedTuple):
    """Which segment each token belongs to, and which tokens touch more than one source."""

    ids: list[int]
    border: list[int]


def own(
    offsets: Sequence[tuple[int, int]], spans: Sequence[Span], *, nobody: int, control: Sequence[bool]
) -> Ownership:
    """Assign every token to the segment it overlaps most; to the later one on a tie; to `nobody` if to none.

    offsets: characters (start, end) of each token, as a fast tokenizer gives them.
    control: True for a token that is the template's own control token; such a token is nobody's, even where
        a tokenizer lets it swallow white space of the text beside it.

    A token of no characters stands for those skipped right before it (some tokenizers give a run of spaces as
    its end only); if there are none, it belongs to the segment that it lies inside, if any. `border` lists
    the tokens that overlap a segment and also anything else.
    """
    ids: list[int] = []
    border: list[int] = []
    first = 0  # the first span that a coming token may still touch
    reached = 0
    for position, ((start, end), is_control) in enumerate(zip(offsets, control, strict=True)):
        if start == end > reached:
            start = reached
        reached = max(reached, end)
        while first < len(spans) and spans[first].end <= start:
            first += 1
        owner, most = nobody, 0
        for span in islice(spans, first, None):
            if span.start >= max(end, start + 1):
                break
            if start == end and span.start < start < span.end:
                owner = span.segment
            overlap = min(end, span.end) - max(start, span.start)
            if overlap > 0 and overlap >= most:
                owner, most = span.segment, overlap
        if 0 < most < end - start:
            border.append(position)
        ids.append(nobody if is_control else owner)
    return Ownership(ids, border)


def runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (id, start, end) for every run of equal ids.

    >>> list(runs([2, 0, 0, 2]))
    [(2, 0, 1), (0, 1, 3), (2, 3, 4)]
    """
    changes = [0, *(i for i in range(1, len(ids)) if ids[i] != ids[i - 1]), len(ids)]
    for start, end in pairwise(changes):
        if start < end:
            yield ids[start], start, end


def cut(text: str, offsets: Sequence[tuple[int, int]]) -> list[str]:
    """Cut the text into one piece per token, so that the pieces joined are the text exactly.

    Characters between two tokens go to the later one; characters that several tokens share (an emoji of
    many bytes) go to the first; what follows the last token goes to it.

    >>> cut("a b!", [(0, 1), (2, 3), (2, 3)])
    ['a', ' b', '!']
    """
    pieces: list[str] = []
    at = 0
    for _, end in offsets:
        end = max(at, end)
        pieces.append(text[at:end])
        at = end
    if pieces:
        pieces[-1] += text[at:]
    return pieces
