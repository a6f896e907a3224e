"""How an instruction and the texts that come with it are laid out for the model, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from clearhead.guard.spans import spans
from clearhead.models.prompt import Prompt, Segment

INSTRUCTION, LABEL, QUESTION = "instruction", "label", "question"
"""Names of the segments that the layout itself adds to those of the sources."""

DATA = "Data:"
"""What stands before the texts (Hung et al. 2024, Attention Tracker, section 3)."""


class SourceSpan(NamedTuple):
    """A span of a source: number of the source, and characters of its text."""

    source: int
    start: int
    end: int


class Window(NamedTuple):
    """Part of the sources that the model reads at once: its spans, first to one past the last."""

    first: int
    last: int


class Texts(NamedTuple):
    """The sources of one scan cut into spans, with the tokens that each takes.

    names, texts: of the sources. spans: in reading order. tokens: per span, about as many as in the prompt.
    """

    names: tuple[str, ...]
    texts: tuple[str, ...]
    spans: tuple[SourceSpan, ...]
    tokens: tuple[int, ...]


def cut(sources: Sequence[tuple[str, str]], tokenizer: Any) -> Texts:
    """Cut every source, (name, text), into spans and count their tokens. Linear in the texts' lengths."""
    found: list[SourceSpan] = []
    counts: list[int] = []
    for number, (_, text) in enumerate(sources):
        places = spans(text)
        if not places:
            continue
        pieces = [text[place.start : place.end] for place in places]
        ids = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
        for place, tokens in zip(places, ids, strict=True):
            found.append(SourceSpan(number, place.start, place.end))
            counts.append(len(tokens) + 1)  # the white space after it
    return Texts(
        tuple(name for name, _ in sources), tuple(text for _, text in sources), tuple(found), tuple(counts)
    )


def windows(texts: Texts, most: int, overlap: int) -> list[Window]:
    """Return windows of whole spans that together hold all of them.

    most: tokens of a window. overlap: tokens at least that the next window repeats, in whole spans, as far as
    a new span fits beside them. A span of more than `most` tokens is a window of its own.
    """
    out: list[Window] = []
    first, n = 0, len(texts.spans)
    while first < n:
        last, size = first, 0
        while last < n and (last == first or size + texts.tokens[last] <= most):
            size += texts.tokens[last]
            last += 1
        out.append(Window(first, last))
        if last == n:
            break
        back, repeated = last, 0
        while back - 1 > first and repeated < overlap:
            back -= 1
            repeated += texts.tokens[back]
        while back < last and repeated + texts.tokens[last] > most:  # else it would hold nothing new
            repeated -= texts.tokens[back]
            back += 1
        first = back
    return out


class Laid(NamedTuple):
    """A window as a prompt, and where its spans lie in it.

    prompt: the prompt. spans: numbers into `Texts.spans`. characters: of each span in `prompt.text`.
    trusted: names of the segments whose text is the instruction.
    """

    prompt: Prompt
    spans: tuple[int, ...]
    characters: tuple[tuple[int, int], ...]
    trusted: tuple[str, ...]


def lay(instruction: str, texts: Texts, window: Window, tokenizer: Any, *, question: str = "") -> Laid:
    """Lay a window out: the instruction as system message, then "Data:" and the sources as the user's.

    question: asked after the data, in the same message.
    """
    segments = [Segment(INSTRUCTION, "system", instruction), Segment(LABEL, "user", DATA)]
    inside: dict[int, list[int]] = {}
    for number in range(window.first, window.last):
        inside.setdefault(texts.spans[number].source, []).append(number)
    pieces: list[tuple[str, list[int]]] = []
    for source, numbers in inside.items():
        start, end = texts.spans[numbers[0]].start, texts.spans[numbers[-1]].end
        name = f"source {source}"  # names of sources may collide with ours; these cannot
        segments.append(Segment(name, "data", texts.texts[source][start:end]))
        pieces.append((name, numbers))
    if question:
        segments.append(Segment(QUESTION, "user", question))
    prompt = Prompt(segments, tokenizer)
    characters: list[tuple[int, int]] = []
    order: list[int] = []
    for name, numbers in pieces:
        at = prompt.characters[name][0][0] - texts.spans[numbers[0]].start
        for number in numbers:
            span = texts.spans[number]
            characters.append((span.start + at, span.end + at))
            order.append(number)
    return Laid(prompt, tuple(order), tuple(characters), (INSTRUCTION,))
