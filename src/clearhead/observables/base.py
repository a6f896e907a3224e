"""What can be asked about attention weights that are never written down.

An `Observable` is a question; `start` opens its account for one attention call, a backend hands the account
every tile of exact weights once, and `result` closes it. Most questions are linear in the weights: "an
attention over other values" (`LinearObservable`), and need only say which values.

To write a new one, in a file of your own, subclass either and pass it to `attention(observe=[...])`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from clearhead.errors import ObserveError
from clearhead.shapes import Shape, compute_dtype
from clearhead.visibility import Visibility

#: Which queries: all of them, the last one, a slice, or indices (negative ones count from the end).
Rows = str | slice | Sequence[int] | Tensor


@dataclass(frozen=True)
class Setting:
    """One attention call, as an observable sees it.

    q (B, Hq, Lq, d), k (B, Hkv, Lk, d), v (B, Hkv, Lk, dv); queries: the R chosen ones, a slice or (R,)
    indices.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    shape: Shape
    visibility: Visibility
    queries: slice | Tensor

    @property
    def R(self) -> int:  # noqa: N802, the name of the axis
        """The number of chosen queries."""
        q = self.queries
        return len(q) if isinstance(q, Tensor) else q.stop - q.start

    @property
    def dtype(self) -> torch.dtype:
        """float64 for float64 inputs, else float32: the dtype of weights and results."""
        return compute_dtype(self.q.dtype)

    @property
    def key_offset(self) -> int:
        """The position of the first key."""
        return self.visibility.mask.key_offset

    @cached_property
    def query_index(self) -> Tensor:
        """The chosen queries as indices, (R,)."""
        if isinstance(self.queries, Tensor):
            return self.queries
        return torch.arange(self.queries.start, self.queries.stop, device=self.q.device)

    @cached_property
    def query_positions(self) -> Tensor:
        """Where the chosen queries sit, (B | 1, R), on the axis on which key j sits at key_offset + j."""
        offset = self.visibility.offset
        first = offset.to(self.q.device)[:, None] if isinstance(offset, Tensor) else offset
        return self.query_index[None] + first

    @cached_property
    def key_positions(self) -> Tensor:
        """Where the keys sit, (Lk,)."""
        return torch.arange(self.shape.Lk, device=self.q.device) + self.key_offset

    def zeros(self, *sizes: int) -> Tensor:
        """A zero tensor of the results' dtype on the right device."""
        return torch.zeros(sizes, dtype=self.dtype, device=self.q.device)


class Tile(NamedTuple):
    """Exact weights of some chosen queries on some keys.

    Only valid during `Account.add`: the backend reuses the memory.
    """

    weights: Tensor  # (B, Hq, r, c), softmax weights; exactly 0 where hidden
    log_weights: Tensor  # (B, Hq, r, c), their logarithm; any finite number where hidden
    rows: slice  # which of the R chosen queries
    cols: slice  # which of the Lk keys
    spare: Tensor  # (B, Hq, r, c) memory to write into, such as a product of the two; holds anything


class Account(Protocol):
    """What an observable has gathered so far in one attention call."""

    def add(self, tile: Tile) -> None:
        """Take one tile; every (chosen query, key) pair that may be visible comes exactly once.

        All tiles of a range of rows come one after the other.
        """

    def result(self) -> Any:
        """Return what was asked for."""


@dataclass(frozen=True, eq=False)
class Observable(ABC):
    """A question about the weights P (B, Hq, Lq, Lk) of one attention call.

    rows: which queries: "all", "last", a slice, or a sequence or tensor of indices. Their number is R.
    """

    rows: Rows = field(default="all", kw_only=True)

    #: The name under which a trace keeps the result.
    name: ClassVar[str]

    @property
    @abstractmethod
    def axes(self) -> tuple[str, ...]:
        """The names of the result's axes; the first two are "batch" and "head"."""

    @abstractmethod
    def start(self, setting: Setting) -> Account:
        """Open the account of one attention call. Raises ObserveError if the question does not fit it."""

    def definition(self, weights: Tensor, setting: Setting) -> Any:
        """Return the result from the full weights of the chosen queries, (B, Hq, R, Lk): the equation itself.

        The reference backend answers with it. Without one of its own an observable gets the whole matrix as
        one tile.
        """
        account = self.start(setting)
        rows, cols = slice(0, setting.R), slice(0, setting.shape.Lk)
        floor = torch.finfo(weights.dtype).tiny
        logs = weights.clamp(min=floor).log()
        account.add(Tile(weights, logs, rows, cols, torch.empty_like(weights)))
        return account.result()


class LinearObservable(Observable):
    """A question whose answer is an attention over other values: result = finish(P · values)."""

    @abstractmethod
    def values(self, setting: Setting) -> Tensor:
        """Return (B | 1, Hkv | 1, Lk, m) values of the setting's dtype."""

    def finish(self, mean: Tensor, setting: Setting) -> Tensor:
        """Turn P · values, (B, Hq, R, m), into the result."""
        return mean

    def start(self, setting: Setting) -> Account:
        """Open an account that multiplies every tile with the values."""
        return _LinearAccount(self, setting)

    def definition(self, weights: Tensor, setting: Setting) -> Any:
        """P · values, then `finish`."""
        return self.finish(apply(weights, self.values(setting)), setting)


class _LinearAccount:
    def __init__(self, observable: LinearObservable, setting: Setting) -> None:
        self.observable, self.setting = observable, setting
        self.values = observable.values(setting)
        shared = self.values.shape[0] == self.values.shape[1] == 1
        self.flat = (
            self.values.flatten(0, 2) if shared else None
        )  # one (Lk, m) for all heads: a plain product
        self.mean: Tensor | None = None

    def add(self, tile: Tile) -> None:
        shape = self.setting.shape
        if self.flat is not None:
            rows = tile.weights.view(-1, tile.weights.shape[3])
            values = self.flat if rows.shape[1] == shape.Lk else self.flat[tile.cols]
            part = torch.mm(rows, values).view(shape.B, shape.Hq, -1, values.shape[1])
        else:
            part = apply(tile.weights, self.values[:, :, tile.cols])
        if self.mean is None and part.shape[2] == self.setting.R:
            self.mean = part
            return
        if self.mean is None:
            self.mean = self.setting.zeros(shape.B, shape.Hq, self.setting.R, part.shape[-1])
        self.mean[:, :, tile.rows].add_(part)  # += would copy the slice onto itself afterwards

    def result(self) -> Tensor:
        shape = self.setting.shape
        if self.mean is None:
            self.mean = self.setting.zeros(shape.B, shape.Hq, self.setting.R, self.values.shape[-1])
        return self.observable.finish(self.mean, self.setting)


def apply(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights (B, Hq, r, c) · values (B | 1, Hkv | 1, c, m) as (B, Hq, r, m), grouped heads shared."""
    B, Hq, r, c = weights.shape
    Hkv = values.shape[1]
    if values.shape[0] == 1 and Hkv == 1:
        return weights @ values[0, 0]
    return (weights.reshape(B, Hkv, Hq // Hkv * r, c) @ values).view(B, Hq, r, values.shape[-1])


def resolve_rows(rows: Rows, Lq: int, device: torch.device) -> slice | Tensor:
    """Return `rows` as a slice with step 1 and both bounds, or as indices from 0 to Lq - 1.

    Raises ObserveError if a row is out of range or the choice is empty or malformed.
    """
    if isinstance(rows, str):
        if rows == "all":
            return slice(0, Lq)
        if rows == "last":
            return slice(Lq - 1, Lq)
        raise ObserveError(f"rows must be 'all', 'last', a slice or indices, got {rows!r}")
    if isinstance(rows, slice):
        for bound in (rows.start, rows.stop, rows.step):
            if bound is not None and (not isinstance(bound, int) or (bound == 0 and bound is rows.step)):
                raise ObserveError(f"rows={rows} must have integers as bounds and a step that is not 0")
        for bound in (rows.start, rows.stop):
            if bound is not None and not -Lq <= bound <= Lq:
                raise ObserveError(f"rows={rows} is out of range: there are {Lq} queries")
        start, stop, step = rows.indices(Lq)
        chosen = range(start, stop, step)
        if not chosen:
            raise ObserveError(f"rows={rows} chooses none of the {Lq} queries")
        return slice(start, stop) if step == 1 else torch.tensor(list(chosen), device=device)
    try:
        index = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObserveError(f"rows must be 'all', 'last', a slice or indices, got {rows!r:.60}") from error
    if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool or not len(index):
        raise ObserveError(
            f"rows must be 'all', 'last', a slice or a non-empty list of integers, got {rows!r}"
        )
    low, high = int(index.min()), int(index.max())
    if low < -Lq or high >= Lq:
        raise ObserveError(
            f"rows holds {low if low < -Lq else high}, allowed are {-Lq}..{Lq - 1} ({Lq} queries)"
        )
    index = index.to(device)
    return torch.where(index < 0, index + Lq, index)
