"""How much attention goes where: mass per segment, mass per key, and each segment's part of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from clearhead.errors import DTypeError, ObserveError, ShapeError
from clearhead.observables.base import Account, LinearObservable, Observable, Rows, Setting, Tile, apply
from clearhead.segments import Segments


class _Membership:
    """Which segment each key belongs to: numbers per key, or `Segments`, which go by position."""

    def __init__(self, ids: Tensor | Segments) -> None:
        self.by_position = isinstance(ids, Segments)
        if isinstance(ids, Segments):
            self.segments = ids
            return
        try:
            tensor = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ObserveError(
                f"segment ids must be a tensor or a list of integers, got {ids!r:.60}"
            ) from error
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            raise DTypeError(f"segment ids must be integers, got {tensor.dtype}")
        if tensor.numel() and int(tensor.min()) < 0:
            raise ObserveError(f"segment ids must be at least 0, got {int(tensor.min())}")
        count = int(tensor.max()) + 1 if tensor.numel() else 0
        self.segments = Segments(tensor, [str(number) for number in range(count)])

    def __len__(self) -> int:
        return len(self.segments)

    def of_keys(self, setting: Setting) -> Tensor:
        """The segment number of every key, (B | 1, Lk)."""
        B, Lk = setting.shape.B, setting.shape.Lk
        ids = self.segments.ids
        if self.by_position:
            ids = self.segments.cover(setting.key_offset, Lk).ids
        elif ids.shape[-1] != Lk:
            raise ShapeError(f"segment ids cover {ids.shape[-1]} keys, but there are {Lk}")
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.shape[0] not in (1, B):
            if B % ids.shape[0]:
                raise ShapeError(f"segment ids have {ids.shape[0]} rows, but the batch has {B}")
            ids = ids.repeat_interleave(B // ids.shape[0], 0)  # beams: several rows from one prompt
        return ids.to(setting.q.device)


@dataclass(frozen=True, eq=False, init=False)
class SegmentMass(LinearObservable):
    """How much each query attends to each segment: mass[b, h, i, s] = sum over keys j of segment s of P.

    ids: segment numbers from 0 of the given keys, (Lk,) or (B, Lk), or `Segments`, which go by the keys'
        positions (key j sits at key_offset + j). Result: (B, Hq, R, S), float; over s it adds
    up to 1 (to the share that the keys get, where a learned sink takes some; to 0 in fully masked rows).
    P · one-hot(ids): an attention over other values.

    Raises ObserveError, DTypeError or ShapeError for ids that are negative, not integers, or of the wrong
    length.
    """

    membership: _Membership
    name: ClassVar[str] = "mass"

    def __init__(self, ids: Tensor | Segments, *, rows: Rows = "all") -> None:
        object.__setattr__(self, "membership", _Membership(ids))
        object.__setattr__(self, "rows", rows)

    @property
    def axes(self) -> tuple[str, ...]:
        """(batch, head, query, segment)."""
        return ("batch", "head", "query", "segment")

    def values(self, setting: Setting) -> Tensor:
        """One-hot segment numbers, (B | 1, 1, Lk, S)."""
        key = (setting.key_offset, setting.shape.Lk, setting.shape.B, setting.dtype, setting.q.device)
        last: tuple[object, Tensor] | None = getattr(self, "_one_hot", None)
        if last is None or last[0] != key:  # the layers of a model share one
            ids = self.membership.of_keys(setting)
            one_hot = setting.zeros(*ids.shape, len(self.membership))
            one_hot.scatter_(-1, ids[..., None], 1.0)
            last = (key, one_hot[:, None])
            object.__setattr__(self, "_one_hot", last)
        return last[1]


@dataclass(frozen=True, eq=False)
class KeyMass(Observable):
    """How much attention each key receives from the chosen queries: received[b, h, j] = sum over i of P.

    Result: (B, Hq, Lk), float. Summed over all keys it is the number of chosen queries that see anything.
    Column sums of P, which no fused kernel gives (used by heavy-hitter caches, Zhang et al. 2023, H2O).
    """

    name: ClassVar[str] = "key_mass"

    @property
    def axes(self) -> tuple[str, ...]:
        """(batch, head, key)."""
        return ("batch", "head", "key")

    def start(self, setting: Setting) -> Account:
        """Open an account of column sums."""
        return _KeyMassAccount(setting)

    def definition(self, weights: Tensor, setting: Setting) -> Tensor:
        """P summed over the chosen queries."""
        return weights.sum(2)


class _KeyMassAccount:
    def __init__(self, setting: Setting) -> None:
        shape = setting.shape
        self.received = setting.zeros(shape.B, shape.Hq, shape.Lk)

    def add(self, tile: Tile) -> None:
        self.received[:, :, tile.cols].add_(tile.weights.sum(2))

    def result(self) -> Tensor:
        return self.received


@dataclass(frozen=True, eq=False, init=False)
class SegmentOutput(Observable):
    """The part of each head's output that comes from each segment: part = sum over j of segment s of P v.

    ids: as in `SegmentMass`. The parts add up to the head's output (before the output projection).
    norms=False: vectors, (B, Hq, R, S, dv). norms=True: their Euclidean lengths, (B, Hq, R, S), in memory
    that does not hold the vectors (value-weighted attention, after Kobayashi et al. 2020, eq. 3, summed over
    a segment before taking the norm). Exact to float32 relative to the output: a part of less than 1e-7 of
    it may be lost.

    Raises as `SegmentMass` does.
    """

    membership: _Membership
    norms: bool
    name: ClassVar[str] = "segment_output"

    def __init__(self, ids: Tensor | Segments, *, norms: bool = False, rows: Rows = "all") -> None:
        object.__setattr__(self, "membership", _Membership(ids))
        object.__setattr__(self, "norms", norms)
        object.__setattr__(self, "rows", rows)

    @property
    def axes(self) -> tuple[str, ...]:
        """(batch, head, query, segment), and (feature) for vectors."""
        return ("batch", "head", "query", "segment", *(() if self.norms else ("feature",)))

    def start(self, setting: Setting) -> Account:
        """Open an account of partial outputs."""
        return _SegmentOutputAccount(self, setting)

    def definition(self, weights: Tensor, setting: Setting) -> Tensor:
        """The weights of one segment times its values, segment by segment."""
        ids = self.membership.of_keys(setting)[:, None, None]
        v = setting.v.to(weights.dtype)
        parts = torch.stack([apply(weights * (ids == s), v) for s in range(len(self.membership))], dim=3)
        return parts.norm(dim=-1) if self.norms else parts


class _SegmentOutputAccount:
    def __init__(self, observable: SegmentOutput, setting: Setting) -> None:
        self.norms, self.setting = observable.norms, setting
        shape = setting.shape
        self.S = len(observable.membership)
        self.ids = observable.membership.of_keys(setting)
        sizes = (shape.B, shape.Hq, setting.R, self.S)
        self.out = setting.zeros(*sizes) if self.norms else setting.zeros(*sizes, shape.dv)
        self.open: slice | None = None  # the rows whose vectors are being gathered, for norms
        self.vectors = self.out

    def add(self, tile: Tile) -> None:
        if self.norms and self.open != tile.rows:
            self._close()
            self.open = tile.rows
            B, Hq = tile.weights.shape[:2]
            r = tile.rows.stop - tile.rows.start
            self.vectors = self.setting.zeros(B, Hq, r, self.S, self.setting.shape.dv)
        into = self.vectors if self.norms else self.vectors[:, :, tile.rows]
        v = self.setting.v[:, :, tile.cols].to(self.setting.dtype)
        for b, ids in enumerate(self.ids[:, tile.cols]):
            batch = slice(None) if self.ids.shape[0] == 1 else slice(b, b + 1)
            numbers, run = torch.unique_consecutive(ids, return_counts=True)
            if len(numbers) == len(set(numbers.tolist())):  # each segment is one piece: slices, no copies
                ends = run.cumsum(0).tolist()
                pieces = [slice(e - n, e) for e, n in zip(ends, run.tolist(), strict=True)]
                chosen: list[tuple[int, slice | Tensor]] = list(zip(numbers.tolist(), pieces, strict=True))
            else:
                unique = torch.unique(ids).tolist()
                chosen = [(s, (ids == s).nonzero()[:, 0]) for s in unique]
            for s, piece in chosen:
                into[batch, :, :, s] += apply(tile.weights[batch, :, :, piece], v[batch, :, piece])

    def _close(self) -> None:
        if self.open is not None:
            self.out[:, :, self.open] = self.vectors.norm(dim=-1)
            self.open = None

    def result(self) -> Tensor:
        if self.norms:
            self._close()
        return self.out
