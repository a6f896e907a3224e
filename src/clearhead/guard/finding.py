"""What a scan found: a score, a verdict, the spans that pulled, and on what the thresholds were fixed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERDICTS = ("allow", "flag", "block", "unjudged")
"""unjudged: the text could not be judged (`Finding.reason` says why); it is never a silent pass."""


@dataclass(frozen=True)
class Span:
    """A sentence or line of a source, and how strongly it pulls.

    source: its name. start, end: characters of the source's own text. line, column: from 1. text: what stands
    there. pull: 0…1, the read-out's probability that it is an attack; only that of whole texts is calibrated.
    attention: attention per token of the answer's first query on it, as a multiple of that on the prompt's
    other tokens, mean over all heads.
    """

    source: str
    start: int
    end: int
    line: int
    column: int
    text: str
    pull: float
    attention: float


@dataclass(frozen=True)
class HeadMove:
    """A head whose attention moved from the instruction: log mass here against the benign baseline.

    layer, head: numbers in the model. moved: in standard deviations of benign texts of that length; positive
    is towards the source. instruction, source: its mass on both, shares of 1.
    """

    layer: int
    head: int
    moved: float
    instruction: float
    source: float


@dataclass(frozen=True)
class HeadMoves:
    """How far every head moved from the instruction to the texts in the window of the strongest span.

    before (layers, heads): as the window was read; after: with that span hidden from every head, against
    benign texts as long as the rest, None where there is no rest. In standard deviations of benign texts,
    positive towards the texts, float32.
    """

    before: NDArray[np.float32]
    after: NDArray[np.float32] | None


@dataclass(frozen=True)
class SourceFinding:
    """One source: its score, how much of it was read, its mass, and the benign baseline for that length.

    tokens and characters are its own; read is the share of its characters that the model saw, 0…1; mass and
    baseline are shares of the attention of the answer's first query, mean over heads.
    """

    name: str
    score: float
    verdict: str
    tokens: int
    characters: int
    read: float
    mass: float
    baseline: float


@dataclass(frozen=True)
class Thresholds:
    """From which score on a text is flagged and blocked, and what that costs in false alarms.

    flag, block: scores. flag_fpr, block_fpr: the share of benign texts of `fixed_on` above them, measured on
    texts that the read-out had not seen. benign: how many those were. fixed_on: which.
    """

    flag: float
    block: float
    flag_fpr: float
    block_fpr: float
    benign: int
    fixed_on: str


@dataclass(frozen=True)
class Confirmation:
    """The counterfactual look: what changes when the strongest span is hidden from attention.

    instruction_mass: change of the mass on the instruction, mean over heads. divergence: Jensen-Shannon
    divergence of the next-token distributions, in nats. changed: whether the most likely token changes.
    """

    span: Span
    instruction_mass: float
    divergence: float
    changed: bool


@dataclass(frozen=True)
class Finding:
    """The result of a scan.

    score: 0…1, calibrated: of texts of the calibration mix with that score about that share is an attack.
    verdict: one of `VERDICTS`. classes: probabilities of "none", "imperative" and "attack" of the strongest
    window. spans: strongest first. seconds: wall-clock time of the scan. calibration: its id. preset: name of
    the thresholds. reason: why a text is unjudged, else "". notes: what a reader should know.
    """

    score: float
    verdict: str
    classes: dict[str, float]
    thresholds: Thresholds
    preset: str
    spans: tuple[Span, ...]
    heads: tuple[HeadMove, ...]
    sources: tuple[SourceFinding, ...]
    tokens: int
    windows: int
    seconds: float
    calibration: str
    method: str = "readout"
    reason: str = ""
    confirmation: Confirmation | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def alarmed(self) -> bool:
        """Whether the verdict is flag or block."""
        return self.verdict in ("flag", "block")

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain lists, dicts, texts and numbers."""
        return asdict(self)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return it as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=indent)
