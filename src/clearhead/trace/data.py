"""What one model run looked at, as plain tensors with named axes. It knows no models and runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Stream:
    """The answers of one stack of layers.

    axes: for each answer, the names of its axes, "layer" and "batch" first: (layer, batch, head, …).
    values: for each answer, its tensor; an answer of several parts has them under "name.part".
    layers: the numbers of the layers. heads: the numbers of the heads.
    queries: for each answer with a query axis, (B, R) integers: the number of each query among its item's
        real tokens, -1 where the item has no such query.
    real: (B, K) booleans, False for keys that are padding, or None where all keys are real.
    """

    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    queries: dict[str, Tensor] = field(default_factory=dict)
    real: Tensor | None = None

    @property
    def batch(self) -> int:
        """The number of items; a vision tower may have another than the text."""
        return next((int(value.shape[1]) for value in self.values.values()), 0)


@dataclass
class TraceData:
    """All streams of one run, with the model's name and the names of the segments."""

    model: str
    segments: tuple[str, ...]
    streams: dict[str, Stream]
