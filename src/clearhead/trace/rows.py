"""Which queries of one attention call are wanted, item by item.

Rows are counted in the item's own real tokens, so that an item of a padded batch gives what it would give
alone. An attention call takes one choice for the whole batch: it is asked for the union, out of which each
item's own rows are then picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ObserveError
from clearhead.observables import Rows


class Choice(NamedTuple):
    """The wanted queries of one call."""

    rows: Rows  # what the call is asked for
    queries: Tensor  # (B | 1, R) numbers of the queries among the item's real tokens, -1 where it has none
    pick: Tensor | None  # (B, R) each item's own among the rows asked for; None: all of them


def checked(rows: Rows) -> Rows:
    """Return `rows` as "all", "last", a slice with plain bounds, or a tuple of integers.

    Raises ObserveError for anything else, and for negative ones: how long a run gets is not known before.
    """
    if isinstance(rows, str):
        if rows not in ("all", "last"):
            raise ObserveError(f"rows must be 'all', 'last', a slice or a list of integers, got {rows!r}")
        return rows
    if isinstance(rows, slice):
        for bound in (rows.start, rows.stop, rows.step):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
                raise ObserveError(f"rows={rows}: bounds must be integers")
        start, stop, step = rows.start or 0, rows.stop, 1 if rows.step is None else rows.step
        if start < 0 or (stop is not None and stop < 0) or step < 1:
            raise ObserveError(
                f"rows={rows}: in a trace bounds count tokens from 0 on and the step is at least 1; "
                'rows="last" is each item\'s last token'
            )
        if stop is not None and stop <= start:
            raise ObserveError(f"rows={rows} chooses nothing")
        return slice(start, stop, step)
    index = rows.tolist() if isinstance(rows, Tensor) else rows
    if not isinstance(index, Sequence) or isinstance(index, bytes) or not len(index):
        raise ObserveError(
            f"rows must be 'all', 'last', a slice or a non-empty list of integers, got {rows!r}"
        )
    for i in index:
        if isinstance(i, bool) or not isinstance(i, int):
            raise ObserveError(f"rows must hold integers, got {i!r}")
        if i < 0:
            raise ObserveError(
                f"rows holds {i}: in a trace rows count an item's tokens from 0 on; "
                'rows="last" is each item\'s last token'
            )
    if len(set(index)) != len(index):
        raise ObserveError(f"rows must differ, got {list(index)}")
    return tuple(index)


def first_missing(rows: Rows, tokens: int) -> str | None:
    """What of `rows` (as `checked` gives them) a run of this many tokens did not have; None if nothing."""
    if isinstance(rows, str):
        return None
    if isinstance(rows, slice):
        return None if rows.start < tokens else f"rows={rows} chooses none of the {tokens} queries"
    beyond = [i for i in rows if int(i) >= tokens]
    return f"rows holds {beyond[0]}, allowed are 0..{tokens - 1} ({tokens} queries)" if beyond else None


def choose(rows: Rows, numbers: Tensor) -> Choice | None:
    """Choose among the queries of one call.

    rows: as `checked` gives them. numbers: (B | 1, Lq), each query's number among its item's real tokens, -1
    for padding; one row if the items do not differ. Returns None if no query is wanted.
    """
    if isinstance(rows, str) and rows == "all":
        return Choice("all", numbers, None) if bool((numbers >= 0).any()) else None
    wanted = [_of_item(rows, row) for row in numbers]
    R = max(len(item) for item in wanted)
    if R == 0:
        return None
    if all(item == wanted[0] for item in wanted):
        index = torch.tensor(wanted[0], device=numbers.device)
        return Choice(_compact(wanted[0]), numbers[:, index], None)
    union = sorted({i for item in wanted for i in item})
    place = {i: n for n, i in enumerate(union)}
    pick = torch.tensor([[place[i] for i in item] + [0] * (R - len(item)) for item in wanted])
    queries = torch.full((len(wanted), R), -1)
    for b, item in enumerate(wanted):
        queries[b, : len(item)] = numbers[b, item]
    return Choice(_compact(union), queries, pick)


def _of_item(rows: Rows, numbers: Tensor) -> list[int]:
    """Which places of `numbers` (Lq,) are wanted."""
    if isinstance(rows, str):
        real = (numbers >= 0).nonzero()[:, 0]
        return [int(real[-1])] if len(real) else []
    if isinstance(rows, slice):
        wanted = (numbers >= rows.start) & ((numbers - rows.start) % rows.step == 0)
        if rows.stop is not None:
            wanted &= numbers < rows.stop
        found: list[int] = wanted.nonzero()[:, 0].tolist()
        return found
    place = {n: i for i, n in enumerate(numbers.tolist()) if n >= 0}
    return [place[i] for i in map(int, rows) if i in place]


def _compact(index: list[int]) -> Rows:
    """A slice where the places follow one another, which costs no copy of the queries."""
    if index == list(range(index[0], index[0] + len(index))):
        return slice(index[0], index[0] + len(index))
    return tuple(index)
