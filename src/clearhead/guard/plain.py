"""The sources as the model should read them, and the way back to the characters that were given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from clearhead.guard.finding import Finding, Span
from clearhead.guard.hidden import Normalised, normalise


@dataclass(frozen=True)
class Plain:
    """given: (name, text) as they came. read: the same, normalised."""

    given: tuple[tuple[str, str], ...]
    read: tuple[Normalised, ...]

    @property
    def texts(self) -> list[tuple[str, str]]:
        """(name, text) for the model."""
        return [(name, found.text) for (name, _), found in zip(self.given, self.read, strict=True)]

    def mapped(self, finding: Finding) -> Finding:
        """Return the finding with offsets and texts of its spans as they were given, and notes on tricks."""
        numbers = {name: n for n, (name, _) in enumerate(self.given)}
        spans = tuple(self._back(span, numbers[span.source]) for span in finding.spans)
        notes = tuple(
            f"source {name!r}: {len(found.tricks)} places with hidden or disguised text, made plain"
            for (name, _), found in zip(self.given, self.read, strict=True)
            if any(trick.level == "warning" for trick in found.tricks)
        )
        return replace(finding, spans=spans, notes=finding.notes + notes)

    def _back(self, span: Span, number: int) -> Span:
        text = self.given[number][1]
        start, end = self.read[number].origin.span(span.start, span.end)
        line = text.count("\n", 0, start)
        column = start - (text.rfind("\n", 0, start) + 1)
        return replace(span, start=start, end=end, line=line + 1, column=column + 1, text=text[start:end])


def made_plain(named: Sequence[tuple[str, str]]) -> Plain:
    """Normalise every source."""
    return Plain(tuple(named), tuple(normalise(text) for _, text in named))
