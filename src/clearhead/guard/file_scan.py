"""A file, scanned: the detector's finding and the hidden text, at their places in the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from clearhead.errors import ClearheadError
from clearhead.guard.finding import Finding, Span
from clearhead.guard.hidden import Normalised, normalise
from clearhead.guard.origin import Origin
from clearhead.guard.reading.document import Document, Part

DEFAULT_INSTRUCTION = "Answer the user's question about this text."
"""What the model is taken to be asked where nobody says it."""
LIKELY = 0.5
"""Pull from which a further span of an alarmed file is named besides the strongest."""
MOST_NAMED = 10


class Detector(Protocol):
    """What is needed of `clearhead.guard.detector.InjectionDetector`."""

    def scan(self, instruction: str, sources: Mapping[str, str], *, confirm: bool = False) -> Finding:
        """Scan named texts."""
        ...

    def scan_chat(self, messages: Sequence[Mapping[str, Any]], *, confirm: bool = False) -> Finding:
        """Scan the tool messages of a chat."""
        ...


@dataclass(frozen=True)
class Hit:
    """One thing found in a file.

    rule: "injection" or a kind of `hidden.KINDS`. level: "error" (verdict block), "warning" (flag, or text
    hidden in a way that no honest writing has) or "note". part: of the file. label: what the place is called
    in it ("/3/content", "page 2"), or "". start, end: characters of the file's text; line, column, end_line,
    end_column: from 1, the end behind the last character. text: what stands there. said: what the model
    reads there (decoded, without hidden characters). pull, attention: of the span (`finding.Span`); None for
    hidden text.
    """

    rule: str
    level: str
    part: str
    label: str
    start: int
    end: int
    line: int
    column: int
    end_line: int
    end_column: int
    text: str
    said: str
    pull: float | None = None
    attention: float | None = None


@dataclass(frozen=True)
class FileResult:
    """What a scan of one file came to.

    verdict: of the detector, or "unread" (error says why) or "skipped" (a file of a walked folder that is no
    text). score: None where there is none. hits: strongest pull first, then hidden text in reading order.
    document: None where the file's text is not needed any more.
    """

    name: str
    verdict: str
    score: float | None = None
    hits: tuple[Hit, ...] = ()
    finding: Finding | None = None
    document: Document | None = None
    error: str = ""
    notes: tuple[str, ...] = ()
    kind: str = ""

    @property
    def found(self) -> bool:
        """Whether there is something to act on: an alarm, or hidden text with no honest use."""
        return any(hit.level != "note" for hit in self.hits)

    @property
    def failed(self) -> bool:
        """Whether the file could not be read or judged."""
        return self.verdict in ("unread", "unjudged")

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain lists, dicts, texts and numbers, without the file's text."""
        return {
            "name": self.name,
            "kind": self.kind,
            "verdict": self.verdict,
            "score": self.score,
            "found": self.found,
            "hits": [asdict(hit) for hit in self.hits],
            "error": self.error,
            "notes": list(self.notes),
            "finding": self.finding.to_dict() if self.finding else None,
        }


@dataclass(frozen=True)
class _Source:
    """A part as the model reads it; origin: to the file."""

    part: Part
    normal: Normalised
    origin: Origin


def scan_document(
    detector: Detector,
    document: Document,
    instruction: str | None = None,
    *,
    confirm: bool = False,
    everything: bool = False,
) -> FileResult:
    """Scan a document. instruction: None means `DEFAULT_INSTRUCTION`, or for a chat its own messages.

    everything: scripts and styles too. The detector's errors become a result whose verdict is "unjudged".
    """
    notes = list(document.notes)
    sources: dict[str, _Source] = {}
    for part in document.parts:
        if not (part.scanned or everything):
            notes.append(f"not scanned: {part.name} ({len(part.text):,} characters)")
            continue
        normal = normalise(part.text)
        sources[part.name] = _Source(part, normal, normal.origin.through(part.origin))
    hidden = _hidden(document, sources)
    texts = {name: s.normal.text for name, s in sources.items() if s.normal.text.strip()}
    if not texts:
        unseen = document.kind == "chat" or (document.kind == "pdf" and not document.parts)
        if not unseen:
            notes.append("no text to scan")
        verdict = "unjudged" if unseen else "allow"
        return FileResult(
            document.name, verdict, None, hidden, None, document, "", tuple(notes), document.kind
        )
    try:
        if document.kind == "chat" and instruction is None:
            messages = [
                {"role": m["role"], "content": texts.get(m["part"], "") if m["part"] else m["content"]}
                for m in document.messages
            ]
            finding = detector.scan_chat(messages, confirm=confirm)
        else:
            finding = detector.scan(instruction or DEFAULT_INSTRUCTION, texts, confirm=confirm)
    except ClearheadError as error:
        return FileResult(
            document.name, "unjudged", None, hidden, None, document, str(error), tuple(notes), document.kind
        )
    notes += [*([finding.reason] if finding.reason else []), *finding.notes]
    hits = (*_pulled(document, sources, finding), *hidden)
    return FileResult(
        document.name,
        finding.verdict,
        finding.score,
        hits,
        finding,
        document,
        "",
        tuple(notes),
        document.kind,
    )


def _pulled(document: Document, sources: Mapping[str, _Source], finding: Finding) -> list[Hit]:
    if not finding.alarmed:
        return []
    level = "error" if finding.verdict == "block" else "warning"
    hits = []
    named = [s for i, s in enumerate(finding.spans) if i == 0 or s.pull >= LIKELY][:MOST_NAMED]
    for span in named:
        source, start = _find(sources, span)
        if source is None:
            continue
        hits.append(_hit(document, "injection", level, source, start, start + len(span.text), span))
    return hits


def _find(sources: Mapping[str, _Source], span: Span) -> tuple[_Source | None, int]:
    """The source of a span: by its name, or, where the detector names them its own way, by its text."""
    own = sources.get(span.source)
    order = [own] if own is not None else list(sources.values())
    for source in order:
        if source.normal.text[span.start : span.end] == span.text:
            return source, span.start
    for source in sources.values():
        at = source.normal.text.find(span.text)
        if at >= 0:
            return source, at
    return None, 0


def _hidden(document: Document, sources: Mapping[str, _Source]) -> tuple[Hit, ...]:
    hits = []
    for source in sources.values():
        for trick in source.normal.tricks:
            start, end = source.part.origin.span(trick.start, trick.end)
            label = source.part.label(trick.start)
            hits.append(
                _place(document, trick.kind, trick.level, source.part.name, label, start, end, trick.shown)
            )
    for trick in document.tricks:
        hits.append(_place(document, trick.kind, trick.level, "", "", trick.start, trick.end, trick.shown))
    return tuple(sorted(hits, key=lambda hit: (hit.start, hit.end)))


def _hit(document: Document, rule: str, level: str, source: _Source, start: int, end: int, span: Span) -> Hit:
    first, last = source.origin.span(start, end)
    at = source.normal.origin.span(start, end)[0]
    label = source.part.label(at)
    return _place(
        document, rule, level, source.part.name, label, first, last, span.text, span.pull, span.attention
    )


def _place(
    document: Document,
    rule: str,
    level: str,
    part: str,
    label: str,
    start: int,
    end: int,
    said: str,
    pull: float | None = None,
    attention: float | None = None,
) -> Hit:
    line, column = document.place(start)
    end_line, end_column = document.place(max(start, end - 1)) if end > start else (line, column - 1)
    text = document.text[start:end]
    return Hit(
        rule,
        level,
        part,
        label,
        start,
        end,
        line,
        column,
        end_line,
        end_column + 1,
        text,
        said,
        pull,
        attention,
    )
