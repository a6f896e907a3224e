"""Findings kept by hash, so that the same text is not read twice; bounded, and none of the text is kept."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from clearhead.errors import ArgumentError
from clearhead.guard.finding import Finding, Span


def key(instruction: str, sources: Mapping[str, str], calibration: str) -> str:
    """Return the SHA-256 of instruction, sources (names, texts and their order) and calibration id."""
    out = hashlib.sha256()
    for part in (calibration, instruction, *(item for pair in sources.items() for item in pair)):
        data = part.encode("utf-8", "surrogatepass")
        out.update(len(data).to_bytes(8, "big") + data)
    return out.hexdigest()


class Results:
    """The last `size` findings, by key. Thread-safe. size 0 keeps none.

    What is kept of a span is where it stands, not its text; the text is taken from the caller's sources when
    the finding is asked for again. Raises ArgumentError for a negative size.
    """

    def __init__(self, size: int) -> None:
        if type(size) is not int or size < 0:
            raise ArgumentError(f"cache must be a number of findings, 0 or more, got {size!r}")
        self.size = size
        self._kept: OrderedDict[str, Finding] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: str, sources: Mapping[str, str]) -> Finding | None:
        """Return the finding kept under a key, with a note that it was, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
        return _with_texts(replace(found, notes=(*found.notes, "scanned before: from the cache")), sources)

    def put(self, key: str, finding: Finding) -> None:
        """Keep a finding. One that is unjudged is not kept: the next try may succeed."""
        if not self.size or finding.verdict == "unjudged":
            return
        bare = _with_texts(finding, {})
        with self._lock:
            self._kept[key] = bare
            self._kept.move_to_end(key)
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)


def _with_texts(finding: Finding, sources: Mapping[str, str]) -> Finding:
    def filled(span: Span) -> Span:
        return replace(span, text=sources.get(span.source, "")[span.start : span.end])

    confirmation = finding.confirmation
    if confirmation is not None:
        confirmation = replace(confirmation, span=filled(confirmation.span))
    return replace(finding, spans=tuple(filled(span) for span in finding.spans), confirmation=confirmation)
