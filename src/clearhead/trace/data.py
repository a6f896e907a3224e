"""What one model run looked at, as plain tensors with named axes. It knows no models and runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Stream:
    """The answers of one stack of layers.

    axes: for each answer, the names of its axes, "layer" and "batch" first: (layer, batch, head, …).
    values: for each answer, its tensor; an answer of several parts has them under "name.part".
    layers: the numbers of the layers, counted within the stream. heads: the numbers of the heads.
    queries: for each answer with a query axis, the position of each query in the padded row.
    last: the answers that hold, for every row of the batch, the query of its own last token.
    prompt: how many queries came up to the end of the first call; the later ones were generated.
    real: (B, Lk) booleans, False for padding, or None where all keys are real.
    own_queries: whether queries and keys are the same tokens (self-attention).
    """

    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    queries: dict[str, Tensor] = field(default_factory=dict)
    last: frozenset[str] = frozenset()
    real: Tensor | None = None
    own_queries: bool = True
    prompt: int = 0


@dataclass
class TraceData:
    """All streams of one run, with the model's name and the names of the segments."""

    model: str
    batch: int
    segments: tuple[str, ...]
    streams: dict[str, Stream]
