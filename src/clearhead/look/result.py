"""What one look found, ready to be printed, saved as JSON or drawn.

Plain numbers and numpy arrays only: nothing here knows torch, models or HTML.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.guard.finding import Finding, Span


@dataclass(frozen=True)
class Source:
    """One row of the table: a named source and what it got.

    All shares are averages over the chosen layers, heads and queries; over all sources they add up to 1.
    """

    name: str
    role: str  # system, user, assistant, tool, data, template, or sink: the first token, shown apart
    trusted: bool
    tokens: int
    mass: float  # share of the attention, 0..1
    per_token: float  # mass per token, divided by the average over all tokens but the first; 1 = average
    output: float  # share of the lengths of the parts of the heads' outputs, 0..1
    heads: tuple[tuple[int, int, float], ...]  # (layer number, head number, mass), the most, heaviest first


@dataclass(frozen=True)
class TopToken:
    """A token that the heads look at most: its position, text, source number and share of the attention."""

    position: int
    text: str
    source: int
    weight: float


@dataclass(frozen=True)
class PulledSpan:
    """A span that the guard names, and the tokens of the look that hold it.

    marked: it is one of those for which there is an alarm; the others only are the strongest there are.
    """

    span: Span
    tokens: tuple[int, ...]
    marked: bool


@dataclass(frozen=True)
class Pull:
    """What the guard says about the look's prompt. All of the model's layers, whatever the look was at.

    before, after: how far every head moved, (layers, heads), see `clearhead.guard.finding.HeadMoves`; before
    is None where there was nothing to read, after where the strongest span is all there is.
    """

    finding: Finding
    spans: tuple[PulledSpan, ...]  # strongest first
    before: NDArray[np.float32] | None
    after: NDArray[np.float32] | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values: the finding's, with the spans' tokens and the heads' moves."""
        return self.finding.to_dict() | {
            "spans": [
                asdict(found.span) | {"tokens": list(found.tokens), "marked": found.marked}
                for found in self.spans
            ],
            "moves_before": None if self.before is None else self.before.tolist(),
            "moves_after": None if self.after is None else self.after.tolist(),
        }


@dataclass(frozen=True)
class Look:
    """What the heads of one model looked at on one prompt.

    `sources[i]` is source number i in `ids`. Arrays: L layers, H heads, S sources, Q queries with a map,
    n tokens.
    """

    model: str
    model_hash: str
    query: str  # which queries the table averages over, in words: "the last token", "all 120 tokens", …
    tokens: tuple[str, ...]  # n pieces of text; joined they are the prompt as the model saw it
    ids: NDArray[np.int64]  # (n,) source number of every token
    sources: tuple[Source, ...]  # S
    layers: tuple[int, ...]  # L, the numbers of the layers looked at
    mass: NDArray[np.float32]  # (L, H, S), mean over the chosen queries
    entropy: NDArray[np.float32]  # (L, H), nats, mean over the chosen queries
    top_tokens: tuple[TopToken, ...]  # of all tokens but the first, heaviest first
    map_queries: tuple[int, ...]  # Q, positions of the queries whose full weights are kept
    maps: NDArray[np.float32]  # (L, H, Q, n), weights of those queries
    evidence: str  # what a map of this look is worth as evidence, one sentence
    evidence_url: str  # where the docs explain that sentence
    notes: tuple[str, ...] = ()  # what a reader should know: tokens that cross a border, control text …
    command: str = ""  # the command line that made it
    guard: Pull | None = None  # None: the guard was not asked, or cannot judge (then a note says why)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the maps as plain values, ready for JSON."""
        return {
            "model": self.model,
            "model_hash": self.model_hash,
            "query": self.query,
            "sources": [asdict(source) for source in self.sources],
            "layers": list(self.layers),
            "mass": self.mass.tolist(),
            "entropy": self.entropy.tolist(),
            "top_tokens": [asdict(token) for token in self.top_tokens],
            "tokens": list(self.tokens),
            "ids": self.ids.tolist(),
            "evidence": self.evidence,
            "evidence_url": self.evidence_url,
            "notes": list(self.notes),
            "command": self.command,
            "guard": None if self.guard is None else self.guard.to_dict(),
        }
