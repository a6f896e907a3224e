"""The built-in observables as questions of the compiled core, answered in the pass that computes the output.

Knows which observable is which question, what memory its answer takes and how a choice of rows is said. An
observable that is not listed here (a user's own, or one whose choice of rows the core cannot say) has no
question; it is answered from tiles afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.backends.base import Request
from clearhead.observables import (
    Entropy,
    KeyMass,
    MaxWeight,
    MeanDistance,
    Observable,
    PooledMap,
    SegmentMass,
    SegmentOutput,
    Setting,
    Top,
    TopKeys,
    Weights,
    resolve_rows,
)

#: The numbers of `Question::Kind` in csrc/core/call.h.
KINDS = {
    "segment_mass": 0,
    "entropy": 1,
    "max_weight": 2,
    "mean_distance": 3,
    "top_keys": 4,
    "key_mass": 5,
    "pooled_mean": 6,
    "pooled_max": 7,
    "segment_output": 8,
    "segment_norm": 9,
    "weights": 10,
}


class Question(NamedTuple):
    """One question: the tuple that the core reads, the answer that it fills, and what must stay alive."""

    flat: tuple[int, ...]
    answer: Tensor | Top
    order: Tensor | None  # (R,) which row of the answer each chosen query has; None: they are in order
    held: tuple[Tensor, ...]

    def result(self) -> Any:
        """The answer as the observable promises it, when the core is done."""
        if self.order is None:
            return self.answer
        if isinstance(self.answer, Top):
            return Top(*(part.index_select(2, self.order) for part in self.answer))
        return self.answer.index_select(2, self.order)


def ask(request: Request, observable: Observable) -> Question | None:
    """Return the question, or None if it is none of the core's.

    Raises what the observable raises where it does not fit the call (ObserveError, ShapeError, SizeError).
    """
    make = _MAKERS.get(type(observable))
    if make is None:
        return None
    queries = resolve_rows(observable.rows, request.shape.Lq, request.q.device)
    # What is made here goes by sizes and positions alone: stored keys need not be written out for it.
    setting = Setting(request.q, request.q, request.q, request.shape, request.visibility, queries)
    place, order = _places(setting)
    if order is not None:
        if isinstance(observable, PooledMap):  # which cell a query belongs to depends on the order
            return None
        if isinstance(observable, KeyMass):
            if len(place.chosen) != setting.R:  # a query that is chosen twice counts twice
                return None
            order = None
        setting = replace(setting, queries=place.chosen)
    flat, answer, held = make(observable, setting)
    kind, out, index, ids, ids_batch, segments, count, map_rows, map_columns = flat
    return Question(
        (
            KINDS[kind],
            place.address,
            setting.R,
            out,
            index,
            ids,
            ids_batch,
            segments,
            count,
            map_rows,
            map_columns,
        ),
        answer,
        order,
        (place.table, *held),
    )


# ---------------------------------------------------------------------- which queries


class _Place(NamedTuple):
    """Where the answer for each query goes: `table` (Lq,) int32, -1 for queries that are not chosen."""

    table: Tensor
    chosen: Tensor  # the chosen queries, ascending and unique; empty for a range

    @property
    def address(self) -> int:
        return self.table.data_ptr()


def _places(setting: Setting) -> tuple[_Place, Tensor | None]:
    """The places of the chosen queries, and for each of them its row there, None where that is the same."""
    Lq, queries = setting.shape.Lq, setting.queries
    if isinstance(queries, slice):
        return _range(Lq, queries.start, queries.stop), None
    chosen, row = torch.unique(queries, return_inverse=True)
    table = torch.full((Lq,), -1, dtype=torch.int32)
    table[chosen] = torch.arange(len(chosen), dtype=torch.int32)
    same = len(chosen) == len(queries) and bool((row == torch.arange(len(row))).all())
    return _Place(table, chosen), None if same else row


@lru_cache(maxsize=32)  # the layers of a model ask alike
def _range(Lq: int, start: int, stop: int) -> _Place:
    with torch.inference_mode(False):  # it outlives the caller's mode
        table = torch.full((Lq,), -1, dtype=torch.int32)
        table[start:stop] = torch.arange(stop - start, dtype=torch.int32)
        return _Place(table, table[:0])


# ---------------------------------------------------------------------- what is asked

# kind, out, index, ids, ids_batch, segments, count, map_rows, map_columns
_Flat = tuple[str, int, int, int, int, int, int, int, int]
_Made = tuple[_Flat, Tensor | Top, tuple[Tensor, ...]]


def _empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype)


def _per_query(kind: str) -> Callable[[Any, Setting], _Made]:
    def make(_: Observable, setting: Setting) -> _Made:
        out = _empty(setting.shape.B, setting.shape.Hq, setting.R)
        return (kind, out.data_ptr(), 0, 0, 0, 0, 0, 0, 0), out, ()

    return make


def _top_keys(observable: TopKeys, setting: Setting) -> _Made:
    size = (setting.shape.B, setting.shape.Hq, setting.R, observable.k)
    top = Top(_empty(*size), _empty(*size, dtype=torch.int64))
    return ("top_keys", top.weights.data_ptr(), top.indices.data_ptr(), 0, 0, 0, observable.k, 0, 0), top, ()


def _key_mass(_: KeyMass, setting: Setting) -> _Made:
    out = _empty(setting.shape.B, setting.shape.Hq, setting.shape.Lk)
    return ("key_mass", out.data_ptr(), 0, 0, 0, 0, 0, 0, 0), out, ()


def _pooled_map(observable: PooledMap, setting: Setting) -> _Made:
    rows, columns = observable.map_rows, observable.map_cols
    out = _empty(setting.shape.B, setting.shape.Hq, rows, columns)
    return (f"pooled_{observable.reduce}", out.data_ptr(), 0, 0, 0, 0, 0, rows, columns), out, ()


def _weights(observable: Weights, setting: Setting) -> _Made:
    out = observable.start(setting).result()  # its own memory, after its own check of the size
    return ("weights", out.data_ptr(), 0, 0, 0, 0, 0, 0, 0), out, ()


def _segment_mass(observable: SegmentMass, setting: Setting) -> _Made:
    ids, S = _ids(observable, setting), len(observable.membership)
    out = _empty(setting.shape.B, setting.shape.Hq, setting.R, S)
    return ("segment_mass", out.data_ptr(), 0, *_address(ids), S, 0, 0, 0), out, (ids,)


def _segment_output(observable: SegmentOutput, setting: Setting) -> _Made:
    ids, S = _ids(observable, setting), len(observable.membership)
    size = (setting.shape.B, setting.shape.Hq, setting.R, S)
    kind, out = (
        ("segment_norm", _empty(*size))
        if observable.norms
        else ("segment_output", _empty(*size, setting.shape.dv))
    )
    return (kind, out.data_ptr(), 0, *_address(ids), S, 0, 0, 0), out, (ids,)


def _ids(observable: SegmentMass | SegmentOutput, setting: Setting) -> Tensor:
    """The segment number of every key, (B | 1, Lk) int32."""
    key = (setting.key_offset, setting.shape.Lk, setting.shape.B)
    last: tuple[object, Tensor] | None = getattr(observable, "_flat_ids", None)
    if last is None or last[0] != key:  # the layers of a model share one
        ids = observable.membership.of_keys(setting).to(torch.int32).contiguous()
        last = (key, ids)
        object.__setattr__(observable, "_flat_ids", last)
    return last[1]


def _address(ids: Tensor) -> tuple[int, int]:
    return ids.data_ptr(), 0 if ids.shape[0] == 1 else ids.shape[1]


_MAKERS: dict[type[Observable], Callable[[Any, Setting], _Made]] = {
    SegmentMass: _segment_mass,
    Entropy: _per_query("entropy"),
    MaxWeight: _per_query("max_weight"),
    MeanDistance: _per_query("mean_distance"),
    TopKeys: _top_keys,
    KeyMass: _key_mass,
    PooledMap: _pooled_map,
    SegmentOutput: _segment_output,
    Weights: _weights,
}
