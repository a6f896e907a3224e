"""How widely a query looks: entropy, largest weight, mean distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from clearhead.observables.base import Account, Observable, Setting, Tile


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products over the last axis."""
    return cast(Tensor, torch.linalg.vecdot(a, b))


class _PerQuery(Observable):
    """A number per query."""

    @property
    def axes(self) -> tuple[str, ...]:
        """(batch, head, query)."""
        return ("batch", "head", "query")


class _SumAccount:
    """Adds up one number per query and tile."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.total: Tensor | None = None

    def of(self, tile: Tile) -> Tensor:
        raise NotImplementedError

    def add(self, tile: Tile) -> None:
        part = self.of(tile)
        if self.total is None and part.shape[2] == self.setting.R:
            self.total = part
        else:
            self._all()[:, :, tile.rows].add_(part)

    def _all(self) -> Tensor:
        if self.total is None:
            shape = self.setting.shape
            self.total = self.setting.zeros(shape.B, shape.Hq, self.setting.R)
        return self.total

    def result(self) -> Tensor:
        return self._all()


@dataclass(frozen=True, eq=False)
class Entropy(_PerQuery):
    """How spread a query's attention is, in nats: H[b, h, i] = -sum over j of P log P (Shannon 1948).

    Result: (B, Hq, R), float: 0 when all weight is on one key, log n when it is even over n keys. The share
    that a learned sink takes is no key and has no term; a fully masked row has 0.
    """

    name: ClassVar[str] = "entropy"

    def start(self, setting: Setting) -> Account:
        """Open an account of -P log P."""
        return _EntropyAccount(setting)

    def definition(self, weights: Tensor, setting: Setting) -> Tensor:
        """-P log P, summed over keys; 0 log 0 = 0."""
        return -torch.xlogy(weights, weights).sum(-1)


class _EntropyAccount(_SumAccount):
    def of(self, tile: Tile) -> Tensor:
        return torch.mul(tile.weights, tile.log_weights, out=tile.spare).sum(-1)

    def result(self) -> Tensor:
        # 0 - sum gives 0.0 and not -0.0; all weight on one key may come out as -1e-7.
        return torch.rsub(super().result(), 0.0).clamp_(min=0.0)


@dataclass(frozen=True, eq=False)
class MaxWeight(_PerQuery):
    """The largest weight of each query: max over j of P. Result: (B, Hq, R), float; 0 if fully masked."""

    name: ClassVar[str] = "max_weight"

    def start(self, setting: Setting) -> Account:
        """Open an account of maxima."""
        return _MaxAccount(setting)

    def definition(self, weights: Tensor, setting: Setting) -> Tensor:
        """The maximum of P over keys."""
        return weights.amax(-1)


class _MaxAccount(_SumAccount):
    def add(self, tile: Tile) -> None:
        best = self._all()[:, :, tile.rows]
        torch.maximum(best, tile.weights.amax(-1), out=best)


@dataclass(frozen=True, eq=False)
class MeanDistance(_PerQuery):
    """How far a query looks, in tokens: sum over j of P · |position of i - position of j|.

    Result: (B, Hq, R), float (mean attention distance, Vig & Belinkov 2019, eq. 2). Positions are those of
    the mask: key j at key_offset + j, query i at offset + i. Where a learned sink takes a share, the keys'
    weights are used as they are.
    """

    name: ClassVar[str] = "mean_distance"

    def start(self, setting: Setting) -> Account:
        """Open an account of weighted distances."""
        return _DistanceAccount(setting)

    def definition(self, weights: Tensor, setting: Setting) -> Tensor:
        """P times the distances, summed over keys."""
        distance = (setting.query_positions[:, :, None] - setting.key_positions).abs()
        return (weights * distance[:, None]).sum(-1)


class _DistanceAccount(_SumAccount):
    def of(self, tile: Tile) -> Tensor:
        q, k = self.setting.query_positions[:, tile.rows], self.setting.key_positions[tile.cols]
        distance = (q[:, :, None] - k).abs().to(tile.weights.dtype)
        return _dot(tile.weights, distance[:, None].expand_as(tile.weights))
