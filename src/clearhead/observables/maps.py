"""Pictures of the weights: pooled to a small map, or as they are for few queries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from clearhead.errors import ObserveError, SizeError
from clearhead.observables.base import Account, Observable, Rows, Setting, Tile

#: `Weights` refuses results above this many bytes.
WEIGHTS_LIMIT = 2**31


def _edges(length: int, bins: int, device: torch.device) -> Tensor:
    """Borders of `bins` ranges that share `length` places evenly, (bins + 1,)."""
    return torch.arange(bins + 1, device=device) * length // bins


@dataclass(frozen=True, eq=False, init=False)
class PooledMap(Observable):
    """The n × n weights pooled to a map of rows × cols cells, in linear memory.

    rows, cols: the size of the map. Cell (r, c) covers the chosen queries from r·R // rows up to
    (r + 1)·R // rows and the keys from c·Lk // cols on likewise. reduce: "mean" (hidden pairs count as 0)
    or "max" over the cell. queries: which queries, as `rows=` of the other observables.
    Result: (B, Hq, rows, cols), float; a cell that covers no pair is 0.
    Raises ObserveError for sizes below 1 or another reduce.
    """

    map_rows: int
    map_cols: int
    reduce: Literal["mean", "max"]
    name: ClassVar[str] = "pooled_map"

    def __init__(
        self, rows: int, cols: int, reduce: Literal["mean", "max"] = "mean", *, queries: Rows = "all"
    ) -> None:
        for label, size in (("rows", rows), ("cols", cols)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ObserveError(f"PooledMap needs {label} of at least 1, got {size!r}")
        if reduce not in ("mean", "max"):
            raise ObserveError(f"PooledMap reduce must be 'mean' or 'max', got {reduce!r}")
        object.__setattr__(self, "map_rows", rows)
        object.__setattr__(self, "map_cols", cols)
        object.__setattr__(self, "reduce", reduce)
        object.__setattr__(self, "rows", queries)

    @property
    def axes(self) -> tuple[str, ...]:
        """(batch, head, map_row, map_column)."""
        return ("batch", "head", "map_row", "map_column")

    def start(self, setting: Setting) -> Account:
        """Open an account of cells."""
        return _PooledAccount(self, setting)

    def definition(self, weights: Tensor, setting: Setting) -> Tensor:
        """Mean or maximum of each rectangle of P."""
        down = _edges(setting.R, self.map_rows, weights.device).tolist()
        across = _edges(setting.shape.Lk, self.map_cols, weights.device).tolist()
        out = weights.new_zeros(*weights.shape[:2], self.map_rows, self.map_cols)
        for r in range(self.map_rows):
            for c in range(self.map_cols):
                cell = weights[:, :, down[r] : down[r + 1], across[c] : across[c + 1]].flatten(2)
                if cell.shape[2]:
                    out[:, :, r, c] = cell.mean(2) if self.reduce == "mean" else cell.amax(2)
        return out


class _PooledAccount:
    def __init__(self, observable: PooledMap, setting: Setting) -> None:
        self.reduce = observable.reduce
        shape, device = setting.shape, setting.q.device
        self.down = _edges(setting.R, observable.map_rows, device)
        self.across = _edges(shape.Lk, observable.map_cols, device)
        self.cells = setting.zeros(shape.B, shape.Hq, observable.map_rows, observable.map_cols)

    def add(self, tile: Tile) -> None:
        columns = _reduced(tile.weights, self.across, tile.cols, self.reduce)  # (B, Hq, r, cells touched)
        first, block = columns
        first_row, block = _reduced(block.transpose(2, 3), self.down, tile.rows, self.reduce)
        block = block.transpose(2, 3)
        into = self.cells[:, :, first_row : first_row + block.shape[2], first : first + block.shape[3]]
        if self.reduce == "mean":
            into += block
        else:
            torch.maximum(into, block, out=into)

    def result(self) -> Tensor:
        if self.reduce == "mean":
            area = self.down.diff()[:, None] * self.across.diff()
            self.cells /= area.clamp(min=1)
        return self.cells


def _reduced(block: Tensor, edges: Tensor, place: slice, reduce: str) -> tuple[int, Tensor]:
    """The first bin that the places of the last axis fall into, and the sum or maximum of each bin."""
    borders = edges.tolist()
    first = max(b for b in range(len(borders) - 1) if borders[b] <= place.start)
    pieces = []
    for b in range(first, len(borders) - 1):
        low, high = max(borders[b], place.start), min(borders[b + 1], place.stop)
        if borders[b] >= place.stop:
            break
        piece = block[..., low - place.start : max(high, low) - place.start]
        if piece.shape[-1] == 0:
            pieces.append(block.new_zeros(block.shape[:-1]))
        else:
            pieces.append(piece.sum(-1) if reduce == "mean" else piece.amax(-1))
    return first, torch.stack(pieces, -1)


@dataclass(frozen=True, eq=False)
class Weights(Observable):
    """The weights themselves, for few queries: P[b, h, i, j].

    Result: (B, Hq, R, Lk), float, quadratic if all queries are chosen. Raises SizeError above 2 GiB.
    """

    rows: Rows = field(default="last", kw_only=True)
    name: ClassVar[str] = "weights"

    @property
    def axes(self) -> tuple[str, ...]:
        """(batch, head, query, key)."""
        return ("batch", "head", "query", "key")

    def start(self, setting: Setting) -> Account:
        """Open an account that keeps every tile."""
        shape = setting.shape
        size = shape.B * shape.Hq * setting.R * shape.Lk * setting.dtype.itemsize
        if size > WEIGHTS_LIMIT:
            raise SizeError(
                f"Weights of {setting.R} queries on {shape.Lk} keys would take {size} bytes, more than "
                f"{WEIGHTS_LIMIT}: choose fewer rows, or PooledMap, SegmentMass or TopKeys, which are linear"
            )
        return _WeightsAccount(setting)

    def definition(self, weights: Tensor, setting: Setting) -> Tensor:
        """P."""
        return weights


class _WeightsAccount:
    def __init__(self, setting: Setting) -> None:
        shape = setting.shape
        self.weights = setting.zeros(shape.B, shape.Hq, setting.R, shape.Lk)

    def add(self, tile: Tile) -> None:
        self.weights[:, :, tile.rows, tile.cols] = tile.weights

    def result(self) -> Tensor:
        return self.weights
