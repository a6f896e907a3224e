"""A detector that looks for the word "ignore" and answers as the real one does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.errors import ArgumentError
from clearhead.guard.finding import Confirmation, Finding, SourceFinding, Span, Thresholds
from clearhead.guard.spans import spans

LIMITS = Thresholds(0.6, 0.9, 0.048, 0.009, 412, "a set of fakes")


class FakeDetector:
    """Pull .95 for spans with "ignore", .1 for others; "break" raises, "unclear" is unjudged."""

    def __init__(self, **arguments: Any) -> None:
        self.asked: list[str] = []
        self.seen: list[dict[str, str]] = []
        self.messages: list[Any] = []

    def scan(self, instruction: str, sources: Mapping[str, str], *, confirm: bool = False) -> Finding:
        """Scan named texts."""
        self.asked.append(instruction)
        self.seen.append(dict(sources))
        found = []
        for name, text in sources.items():
            if "break" in text:
                raise ArgumentError("the text holds break")
            for place in spans(text):
                said = text[place.start : place.end]
                pull = 0.95 if "ignore" in said.lower() else 0.1
                found.append(Span(name, place.start, place.end, 1, 1, said, pull, 2.5))
        found.sort(key=lambda s: -s.pull)
        score = found[0].pull if found else 0.0
        verdict = (
            "unjudged"
            if any("unclear" in t for t in sources.values())
            else "block"
            if score > 0.9
            else "allow"
        )
        return Finding(
            score, verdict, {}, LIMITS, "fpr_5", tuple(found), (),
            tuple(SourceFinding(n, score, verdict, 9, len(t), 1.0, 0.1, 0.1) for n, t in sources.items()),
            9, 1, 0.0, "fake/1", reason="it is unclear" if verdict == "unjudged" else "",
            confirmation=Confirmation(found[0], 0.1, 0.2, True) if confirm and score > 0.9 else None,
        )  # fmt: skip

    def scan_chat(self, messages: Sequence[Mapping[str, Any]], *, confirm: bool = False) -> Finding:
        """Scan the tool messages, under names of its own."""
        self.messages.append(list(messages))
        tools = [m["content"] for m in messages if m["role"] == "tool"]
        return self.scan("chat", {f"tool {i}": text for i, text in enumerate(tools)}, confirm=confirm)


def load(**arguments: Any) -> FakeDetector:
    """What a process of `--jobs` calls."""
    return FakeDetector(**arguments)


def load_slow_first(**arguments: Any) -> FakeDetector:
    """As `load`, but the first file takes longest."""

    class Slow(FakeDetector):
        def scan(self, instruction: str, sources: Mapping[str, str], *, confirm: bool = False) -> Finding:
            if any("first" in text for text in sources.values()):
                time.sleep(0.3)
            return super().scan(instruction, sources, confirm=confirm)

    return Slow(**arguments)
