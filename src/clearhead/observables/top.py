"""Which keys a query looks at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ObserveError
from clearhead.observables.base import Account, Observable, Rows, Setting, Tile


class Top(NamedTuple):
    """The heaviest keys of each query, heaviest first."""

    weights: Tensor  # (B, Hq, R, k)
    indices: Tensor  # (B, Hq, R, k), key numbers; -1 where the query has fewer than k keys of weight > 0


@dataclass(frozen=True, eq=False, init=False)
class TopKeys(Observable):
    """The k keys with the largest weights of each query, heaviest first.

    Result: `Top(weights, indices)`, both (B, Hq, R, k). A query that has fewer than k keys of weight > 0
    (masked, or k > Lk) has weight 0 and index -1 in the places left over. Keys of equal weight come in any
    order. Raises ObserveError for k < 1.
    """

    k: int
    name: ClassVar[str] = "top_keys"

    def __init__(self, k: int, *, rows: Rows = "all") -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ObserveError(f"TopKeys needs k of at least 1, got {k!r}")
        object.__setattr__(self, "k", k)
        object.__setattr__(self, "rows", rows)

    @property
    def axes(self) -> tuple[str, ...]:
        """(batch, head, query, rank)."""
        return ("batch", "head", "query", "rank")

    def start(self, setting: Setting) -> Account:
        """Open an account of the best k so far."""
        return _TopAccount(self.k, setting)

    def definition(self, weights: Tensor, setting: Setting) -> Top:
        """The k largest of P over keys."""
        top = weights.topk(min(self.k, weights.shape[-1]), dim=-1)
        short = self.k - top.values.shape[-1]
        best = torch.nn.functional.pad(top.values, (0, short))
        index = torch.nn.functional.pad(top.indices, (0, short), value=-1)
        return Top(best, index.masked_fill(best <= 0, -1))


class _TopAccount:
    def __init__(self, k: int, setting: Setting) -> None:
        self.k = k
        shape = setting.shape
        self.weights = setting.zeros(shape.B, shape.Hq, setting.R, k)
        self.indices = torch.full(self.weights.shape, -1, device=setting.q.device)

    def add(self, tile: Tile) -> None:
        found = tile.weights.topk(min(self.k, tile.weights.shape[-1]), dim=-1)
        best, index = self.weights[:, :, tile.rows], self.indices[:, :, tile.rows]
        all_weights = torch.cat([best, found.values], -1)
        all_indices = torch.cat([index, found.indices + tile.cols.start], -1)
        kept = all_weights.topk(self.k, dim=-1)
        best.copy_(kept.values)
        index.copy_(all_indices.gather(-1, kept.indices))

    def result(self) -> Top:
        return Top(self.weights, self.indices.masked_fill_(self.weights <= 0, -1))
