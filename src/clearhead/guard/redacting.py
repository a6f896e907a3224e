"""Cut out of the sources what pulled."""

from __future__ import annotations

from collections.abc import Mapping

from clearhead.errors import ArgumentError
from clearhead.guard.finding import Finding, Span

MARKER = "[removed by guard]"
"""What stands where something was cut out."""


def pulled(finding: Finding, least: float = 0.5) -> tuple[Span, ...]:
    """Return the spans of an alarm that are to go: those with a pull of `least` or more, and in every source
    with an alarm, and in the whole, the strongest one in any case. Empty if the finding is no alarm."""
    if not finding.alarmed:
        return ()
    found = {id(span): span for span in finding.spans if span.pull >= least}
    alarmed = {source.name for source in finding.sources if source.verdict in ("flag", "block")}
    for name in alarmed:
        own = [span for span in finding.spans if span.source == name]
        if own:
            best = max(own, key=lambda span: span.pull)
            found[id(best)] = best
    if finding.spans:
        best = max(finding.spans, key=lambda span: span.pull)
        found[id(best)] = best
    return tuple(found.values())


def redact(
    finding: Finding, sources: Mapping[str, str], marker: str = MARKER, *, least: float = 0.5
) -> dict[str, str]:
    """Return the sources with the spans that pulled cut out, each place marked.

    finding: of a scan of these sources. sources: name → text. least: see `pulled`. Spans that touch or
    overlap become one cut. Without an alarm the texts come back as they are.
    Raises ArgumentError for a span of a source that is not there, or whose text stands elsewhere.
    """
    cuts: dict[str, list[tuple[int, int]]] = {}
    for span in pulled(finding, least):
        if span.source not in sources:
            raise ArgumentError(f"the finding speaks of source {span.source!r}, which is not among sources")
        text = sources[span.source]
        if not 0 <= span.start < span.end <= len(text) or text[span.start : span.end] != span.text:
            raise ArgumentError(
                f"the finding is of another text of source {span.source!r}: characters {span.start} to "
                f"{span.end} are not the span's"
            )
        cuts.setdefault(span.source, []).append((span.start, span.end))
    return {name: _cut(text, cuts.get(name, []), marker) for name, text in sources.items()}


def _cut(text: str, places: list[tuple[int, int]], marker: str) -> str:
    pieces: list[str] = []
    done = 0
    for start, end in sorted(places):
        if start > done or not pieces:
            pieces += [text[done:start], marker]
        done = max(done, end)
    return "".join([*pieces, text[done:]])
