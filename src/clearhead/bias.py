"""Biases that depend on the distance between query and key alone: a description and not an n × n matrix.

A `RelativePosition` says what is added at each distance; `Distances` is the same worked out for the distances
that occur in one call, Lq + Lk - 1 numbers per head. Positions are those of the mask (an offset per row
included). Knows nothing of scores or softmax.

Distance means: position of the query minus position of the key, positive where the key lies before.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ArgumentError, DTypeError, ShapeError


class Distances(NamedTuple):
    """What is added at each distance of one call: values[h, distance - first]."""

    values: Tensor  # (Hq, span)
    first: int  # the distance of the first value

    def places(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Where in `values` the pairs of positions (B | 1, r) and (c,) are: (B | 1, r, c)."""
        return queries[:, :, None] - keys - self.first

    def tile(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias of queries at positions (B | 1, r) on keys at positions (c,): (B | 1, Hq, r, c)."""
        return self.values[:, self.places(queries, keys)].transpose(0, 1)


class RelativePosition(ABC):
    """A bias that depends on the distance alone. Give one to `attention(bias=...)`."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """For how many query heads it holds."""

    @abstractmethod
    def by_distance(self, first: int, last: int, device: torch.device | None = None) -> Tensor:
        """What is added at the distances first … last: (Hq, last - first + 1), float32 (or float64).

        Gradients reach what it was made from.
        """

    def to_dense(self, Lq: int, Lk: int | None = None) -> Tensor:
        """The bias as a matrix (1, Hq, Lq, Lk), for looking at; queries are aligned with the last keys."""
        Lk = Lq if Lk is None else Lk
        first = Lk - Lq - (Lk - 1)
        values = self.by_distance(first, Lk - 1)
        return Distances(values, first).tile(torch.arange(Lk - Lq, Lk)[None], torch.arange(Lk))


class ALiBi(RelativePosition):
    """Attention with linear biases: scores - slope · |distance| (Press et al. 2022, section 3).

    slopes: (Hq,), one per head; `ALiBi.for_heads(Hq)` gives those of the paper.

    Models write the same thing in several ways that differ by a constant per row, which softmax does not see:
    Bloom adds slope · position of the key, MPT slope · (position of the key - that of the last one). Under a
    causal mask the weights and the output are the same; lse differs by that constant. Without a causal mask
    this is the symmetric form, as FlashAttention has it: keys ahead are as far as keys behind.

    Raises ArgumentError, DTypeError or ShapeError for slopes that are not a row of finite numbers.

    >>> ALiBi([0.5]).to_dense(3)[0, 0] + 0.0
    tensor([[ 0.0000, -0.5000, -1.0000],
            [-0.5000,  0.0000, -0.5000],
            [-1.0000, -0.5000,  0.0000]])
    """

    def __init__(self, slopes: Tensor | Sequence[float]) -> None:
        tensor = torch.as_tensor(slopes)
        if not tensor.is_floating_point():
            raise DTypeError(f"ALiBi slopes must be floating-point numbers, got {tensor.dtype}")
        if tensor.ndim != 1 or not len(tensor):
            raise ShapeError(f"ALiBi slopes must have shape (Hq,), got {tuple(tensor.shape)}")
        if not torch.compiler.is_compiling() and not bool(tensor.detach().isfinite().all()):
            raise ArgumentError(f"ALiBi slopes must be finite numbers, got {tensor.detach().tolist()}")
        self.slopes = tensor

    @classmethod
    def for_heads(cls, Hq: int) -> ALiBi:
        """The slopes of the paper for Hq heads: 2^(-8/Hq), 2^(-16/Hq) … for a power of two.

        Else those of the power of two below, then every other one of the power of two above.
        """
        if isinstance(Hq, bool) or not isinstance(Hq, int) or Hq < 1:
            raise ArgumentError(f"ALiBi.for_heads needs a number of heads of at least 1, got {Hq!r}")
        below = 2 ** (Hq.bit_length() - 1)
        slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
        slopes += [2 ** (-4 * (2 * i + 1) / below) for i in range(Hq - below)]
        return cls(torch.tensor(slopes))

    @property
    def heads(self) -> int:
        """One per slope."""
        return len(self.slopes)

    def by_distance(self, first: int, last: int, device: torch.device | None = None) -> Tensor:
        """-slope · |distance|."""
        wide = torch.float64 if self.slopes.dtype == torch.float64 else torch.float32
        slopes = self.slopes.to(device, wide)
        return slopes[:, None] * -torch.arange(first, last + 1, device=slopes.device).abs().to(wide)

    def __repr__(self) -> str:
        return f"ALiBi({self.heads} heads)"


class RelativeBias(RelativePosition):
    """T5's learned bias: one number per head and bucket of distances (Raffel et al. 2020, section 2.1).

    table: (buckets, Hq), as `T5Attention.relative_attention_bias.weight`; may carry a gradient.
    bidirectional: whether keys ahead have buckets of their own (encoders); else all share bucket 0.
    max_distance: from here on all distances share the last bucket.

    The buckets are those of transformers' `T5Attention`, number by number: one per distance up to half of
    them, growing with the logarithm of the distance from there.

    Raises ArgumentError, DTypeError or ShapeError for a table or numbers that make no buckets.
    """

    def __init__(self, table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> None:
        if not isinstance(table, Tensor) or not table.is_floating_point():
            what = table.dtype if isinstance(table, Tensor) else type(table).__name__
            raise DTypeError(f"RelativeBias table must be a floating-point tensor, got {what}")
        if table.ndim != 2 or 0 in table.shape:
            raise ShapeError(f"RelativeBias table must have shape (buckets, Hq), got {tuple(table.shape)}")
        if not isinstance(bidirectional, bool):
            raise ArgumentError(f"bidirectional must be True or False, got {bidirectional!r}")
        exact = (len(table) // 2 if bidirectional else len(table)) // 2
        if exact < 1:
            least = 4 if bidirectional else 2
            raise ArgumentError(f"RelativeBias needs at least {least} buckets, got a table of {len(table)}")
        if isinstance(max_distance, bool) or not isinstance(max_distance, int) or max_distance <= exact:
            raise ArgumentError(
                f"max_distance must be an integer above {exact} (the distances with buckets of their own), "
                f"got {max_distance!r}"
            )
        self.table, self.bidirectional, self.max_distance = table, bidirectional, max_distance

    @property
    def heads(self) -> int:
        """One per column of the table."""
        return self.table.shape[1]

    def by_distance(self, first: int, last: int, device: torch.device | None = None) -> Tensor:
        """The table's row of each distance's bucket."""
        wide = torch.float64 if self.table.dtype == torch.float64 else torch.float32
        table = self.table.to(device)
        distance = torch.arange(first, last + 1, device=table.device)
        return table[self.buckets(distance)].to(wide).transpose(0, 1)

    def buckets(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, integers of the same shape."""
        count, start = len(self.table), torch.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            start = torch.where(distance < 0, count, start)
            distance = distance.abs()
        else:
            distance = distance.clamp(min=0)
        exact = count // 2
        # In float32 and in this order, so that the borders between buckets fall where transformers has them.
        growth = torch.log(distance.float() / exact) / math.log(self.max_distance / exact) * (count - exact)
        far = exact + growth.clamp(min=0).to(torch.long)
        return start + torch.where(distance < exact, distance, far.clamp(max=count - 1))

    def __repr__(self) -> str:
        buckets, heads = self.table.shape
        sides = "both ways" if self.bidirectional else "backwards"
        return f"RelativeBias({buckets} buckets up to {self.max_distance} {sides}, {heads} heads)"
