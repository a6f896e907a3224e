"""A mask, evaluated: which keys a set of queries may see, tile by tile.

`Visibility` binds a `Mask` to sizes and a device. It answers two questions without ever making the n × n
booleans: which ranges of keys can be visible at all (`spans`, the rest is never computed), and what a tile
looks like (`tile`, None where everything in it is visible). It computes no attention.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.errors import MaskError, ShapeError
from clearhead.mask import Mask

Rows = slice | Tensor  # a range of queries (step 1, bounds given) or a 1-D index tensor


class Fields(NamedTuple):
    """A mask as plain arrays that fit the sizes: what a kernel needs that evaluates it by itself.

    Key j sits at key_offset + j, query i of item b at offset[b] + i. Integers are int64; b is an axis of size
    B or 1. The meaning of each field is that of `Mask`; every one that is not None narrows.
    """

    key_offset: int
    offset: Tensor  # (b,)
    causal: bool = False
    prefix: Tensor | None = None  # (b,)
    blocks: tuple[Tensor, Tensor] | None = None  # (b, Lq) and (b, Lk)
    left: int | None = None  # of the window
    right: int | None = None
    sinks: int = 0
    chunk: int | None = None
    documents: tuple[Tensor, Tensor] | None = None  # (b, Lq) and (b, Lk)
    lengths: Tensor | None = None  # (B,): the real keys are the first ones of each row …
    real: Tensor | None = None  # … or (b, Lk) booleans
    origin: Tensor | None = None  # (b, Lk): where the row or document of each key starts; None: 0
    dense: Tensor | None = None  # (b, Hq | 1, Lq, Lk) booleans, stride 0 where they do not vary
    also: tuple[Fields, ...] = ()  # further masks that must hold too


class Visibility:
    """A mask bound to (B, Hq, Lq, Lk) on a device.

    Raises ShapeError or MaskError if a field of the mask does not fit the sizes.
    """

    def __init__(self, mask: Mask, B: int, Hq: int, Lq: int, Lk: int, device: torch.device) -> None:
        self.mask, self.Lq, self.Lk = mask, Lq, Lk
        self.kept: dict[str, Any] = {}  # room for what a backend works out from the mask once for all layers
        self._device, self._B = device, B
        self._also = [Visibility(part, B, Hq, Lq, Lk, device) for part in mask.also]
        offset = mask.key_offset + Lk - Lq if mask.offset is None else mask.offset
        self.offset = offset  # position of the first query: an int, or (B,)
        for name in ("offset", "prefix", "start"):
            value = getattr(mask, name)
            if isinstance(value, Tensor):
                _check_batch(name, value, B)
        self._known_spans: dict[
            tuple[int, int], list[tuple[int, int]]
        ] = {}  # the layers of a model ask alike
        self._real = self._real_keys(B)
        self._dense = self._fitted_dense(B, Hq)
        self._documents = self._query_and_key_ids("documents", mask.documents, B)
        self._blocks = self._query_and_key_ids("blocks", mask.blocks, B)

    @staticmethod
    def of(mask: Mask, B: int, Hq: int, Lq: int, Lk: int, device: torch.device) -> Visibility:
        """Return the mask bound to these sizes; the layers of a model share one."""
        key = (B, Hq, Lq, Lk, device)
        last: tuple[object, Visibility] | None = mask.__dict__.get("_bound")
        if last is None or last[0] != key:
            last = (key, Visibility(mask, *key))
            object.__setattr__(mask, "_bound", last)
        return last[1]

    # ------------------------------------------------------------------ the questions

    @cached_property
    def everything(self) -> bool:
        """True if every query surely sees every key (False may also mean: not worth finding out)."""
        m = self.mask
        if m.is_trivial or self.Lq == 0 or self.Lk == 0:
            return True
        loose = self._dense is not None or self._documents is not None or self._real is not None
        lifted = m.chunk is not None or m.blocks is not None or m.prefix is not None
        if loose or lifted or isinstance(self.offset, Tensor):
            return False
        first, last = (
            self.offset - m.key_offset,
            self.offset - m.key_offset + self.Lq - 1,
        )  # the queries' slots
        left, right = m.window or (None, None)
        wide = not m.causal or first >= self.Lk - 1
        wide &= left is None or last - left <= 0
        wide &= right is None or first + right >= self.Lk - 1
        return wide and all(part.everything for part in self._also)

    @property
    def plain_causal(self) -> bool:
        """True if the mask is the lower triangle of a square and nothing else (torch's is_causal)."""
        m = self.mask
        lifted = m.prefix is not None or m.blocks is not None
        aligned = not isinstance(self.offset, Tensor) and self.offset == m.key_offset and self.Lq == self.Lk
        return m.causal and not lifted and aligned and self._real is None and self._hides_only_direction

    @property
    def by_keys(self) -> Tensor | None:
        """The (B | 1, Lk) booleans of real keys, if padding is all that the mask hides; else None."""
        return self._real if self._hides_only_direction and not self.mask.causal else None

    @property
    def _hides_only_direction(self) -> bool:
        m = self.mask
        others = (m.window, m.documents, m.chunk, m.dense)
        return all(field is None for field in others) and not m.also

    @cached_property
    def fields(self) -> Fields:
        """The mask as plain arrays; where every query sees every key, only where things sit."""
        m = self.mask
        offset = torch.as_tensor(self.offset, device=self._device).reshape(-1)
        if self.everything:
            return Fields(m.key_offset, offset)
        left, right = m.window or (None, None)
        prefix = None if m.prefix is None else torch.as_tensor(m.prefix, device=self._device).reshape(-1)
        lengths = None
        if (
            self._real is not None
            and m.padding is not None
            and m.padding.ndim == 1
            and m.padding_side == "right"
        ):
            lengths = m.padding.to(self._device).expand(self._B).contiguous()
        return Fields(
            m.key_offset,
            offset,
            m.causal,
            prefix,
            self._blocks,
            left,
            right,
            m.sinks,
            m.chunk,
            self._documents,
            lengths,
            None if self._real is None or lengths is not None else self._real,
            self._origin,
            self._dense,
            tuple(part.fields for part in self._also),
        )

    @property
    def query_positions(self) -> Tensor:
        """Where the queries sit, (B | 1, Lq)."""
        return self._q

    @property
    def key_positions(self) -> Tensor:
        """Where the keys sit, (Lk,)."""
        return self._k[0]

    @cached_property
    def distances(self) -> tuple[int, int]:
        """The smallest and the largest distance, position of a query minus position of a key."""
        nearest, farthest = self._reach(slice(0, self.Lq))
        return nearest - self.mask.key_offset - self.Lk + 1, farthest - self.mask.key_offset

    def spans(self, rows: Rows) -> list[tuple[int, int]]:
        """Return disjoint, sorted ranges of keys outside which none of these queries sees anything."""
        if isinstance(rows, Tensor):
            return self._spans(rows)
        key = (rows.start, rows.stop)
        if key not in self._known_spans:
            self._known_spans[key] = self._spans(rows)
        return self._known_spans[key]

    def _spans(self, rows: Rows) -> list[tuple[int, int]]:
        if self.Lk == 0 or _count(rows) == 0:
            return []
        low, high = self._bounds
        main = (max(int(low[rows].min()), 0), min(int(high[rows].max()), self.Lk))
        found = [main] if main[0] < main[1] else []
        if self._sinks is not None:
            sink = (max(int(self._sinks[0][rows].min()), 0), min(int(self._sinks[1][rows].max()), self.Lk))
            found = _united([*found, sink])
        for part in self._also:
            found = _intersected(found, part.spans(rows))
        return found

    def borders(self, rows: Rows) -> list[int]:
        """Return the keys at which these queries stop seeing all alike (the diagonal, the window's edge).

        Tiles that end there are wholly visible on one side and cost no mask. Only a hint: sorted, maybe none.
        """
        m, found = self.mask, []
        nearest, farthest = self._reach(rows)
        if m.causal:
            found.append(nearest + 1 - m.key_offset)
        if m.window is not None and m.window[0] is not None:
            found.append(farthest - m.window[0] - m.key_offset)
        if m.window is not None and m.window[1] is not None:
            found.append(nearest + m.window[1] + 1 - m.key_offset)
        return sorted(found)

    def tile(self, rows: Rows, cols: slice) -> Tensor | None:
        """Return (B | 1, Hq | 1, rows, cols) booleans, True = visible, or None where all of it is."""
        m = self.mask
        ahead_matters = m.causal and self._crosses_diagonal(rows, cols)
        near_matters = m.window is not None and self._leaves_window(rows, cols)
        fields = (m.chunk, self._documents, self._real, self._dense)
        if not (ahead_matters or near_matters or self._also) and all(f is None for f in fields):
            return None
        q, k = self._q[:, rows][:, :, None], self._k[:, cols][:, None, :]
        parts: list[Tensor] = []
        if ahead_matters:
            ahead = k <= q
            if m.prefix is not None:
                prefix = m.prefix
                if isinstance(prefix, Tensor):
                    prefix = prefix.to(self._device)[:, None, None]
                ahead = ahead | self._within(prefix, cols)
            if self._blocks is not None:
                mine, theirs = self._blocks[0][:, rows][:, :, None], self._blocks[1][:, cols][:, None, :]
                ahead = ahead | ((mine == theirs) & (theirs >= 0))
            parts.append(ahead)
        if m.window is not None and near_matters:
            left, right = m.window
            near: Tensor | None = None
            if left is not None:
                near = k >= q - left
            if right is not None:
                near = k <= q + right if near is None else near & (k <= q + right)
            assert near is not None
            if m.sinks:
                near = near | self._within(m.sinks, cols)
            parts.append(near)
        if m.chunk is not None:
            origin = self._from(cols)
            parts.append(_chunk(q - origin, m.chunk) == _chunk(k - origin, m.chunk))
        if self._documents is not None:
            mine, theirs = self._documents[0][:, rows][:, :, None], self._documents[1][:, cols][:, None, :]
            parts.append(mine == theirs)
        if self._real is not None:
            real = self._real[:, None, cols]
            if not bool(real.all()):
                parts.append(real.expand(-1, q.shape[1], -1))
        seen: Tensor | None = None
        for part in parts:
            seen = part if seen is None else seen & part
        if seen is not None:
            seen = seen[:, None]
        if self._dense is not None:
            dense = self._dense[:, :, rows, cols]
            seen = dense if seen is None else seen & dense
        for other in self._also:
            extra = other.tile(rows, cols)
            if extra is not None:
                seen = extra if seen is None else seen & extra
        return seen

    # ------------------------------------------------------------------ fitting the fields to the sizes

    def _real_keys(self, B: int) -> Tensor | None:
        padding = self.mask.padding
        if padding is None:
            return None
        _check_batch("padding", padding, B)
        if padding.ndim == 1:
            if padding.numel() and int(padding.max()) > self.Lk:
                raise MaskError(f"padding has a length of {int(padding.max())}, but there are {self.Lk} keys")
            slot = torch.arange(self.Lk, device=self._device)[None]
            lengths = padding.to(self._device)[:, None]
            real = slot < lengths if self.mask.padding_side == "right" else slot >= self.Lk - lengths
        else:
            if padding.shape[1] != self.Lk:
                raise ShapeError(f"padding has shape {tuple(padding.shape)}, but there are {self.Lk} keys")
            real = padding.to(self._device)
        return None if bool(real.all()) else real

    def _fitted_dense(self, B: int, Hq: int) -> Tensor | None:
        dense = self.mask.dense
        if dense is None:
            return None
        dense = dense.to(self._device).reshape((1,) * (4 - dense.ndim) + tuple(dense.shape))
        want = (B, Hq, self.Lq, self.Lk)
        for axis, (have, need) in enumerate(zip(dense.shape, want, strict=True)):
            if have not in (1, need):
                raise ShapeError(
                    f"dense mask of shape {tuple(dense.shape)} does not broadcast to {want} (B, Hq, Lq, Lk): "
                    f"axis {axis} is {have}, allowed are 1 and {need}"
                )
        return dense.expand(dense.shape[0], dense.shape[1], self.Lq, self.Lk)

    def _query_and_key_ids(
        self, name: str, ids: Tensor | tuple[Tensor, Tensor] | None, B: int
    ) -> tuple[Tensor, Tensor] | None:
        if ids is None:
            return None
        query, key = ids if isinstance(ids, tuple) else (None, ids)
        key = self._fitted_ids(name, "keys", key, B, self.Lk)
        if query is not None:
            return self._fitted_ids(name, "queries", query, B, self.Lq), key
        slot = self._q - self.mask.key_offset  # the queries are some of the keys: look their numbers up
        if slot.numel() and (int(slot.min()) < 0 or int(slot.max()) >= self.Lk):
            raise MaskError(
                f"{name} covers {self.Lk} keys, but the queries sit at key {int(slot.min())} to "
                f"{int(slot.max())}; give a pair {name}=(query numbers, key numbers)"
            )
        rows = max(slot.shape[0], key.shape[0])
        return key.expand(rows, -1).gather(1, slot.expand(rows, -1)), key

    def _fitted_ids(self, name: str, whose: str, ids: Tensor, B: int, length: int) -> Tensor:
        ids = ids if ids.ndim == 2 else ids[None]
        if ids.shape[1] != length or ids.shape[0] not in (1, B):
            raise ShapeError(
                f"{name} of the {whose} must have shape ({length},) or ({B}, {length}), "
                f"got {tuple(ids.shape)}"
            )
        return ids.to(self._device)

    @cached_property
    def _q(self) -> Tensor:
        """Positions of the queries, (B | 1, Lq)."""
        q = torch.arange(self.Lq, device=self._device)
        offset = self.offset
        return offset.to(self._device)[:, None] + q if isinstance(offset, Tensor) else (q + offset)[None]

    @cached_property
    def _k(self) -> Tensor:
        """Positions of the keys, (1, Lk)."""
        first = self.mask.key_offset
        return torch.arange(first, first + self.Lk, device=self._device)[None]

    @cached_property
    def _origin(self) -> Tensor | None:
        """Where each key's row or document starts, (B | 1, Lk); None for 0 everywhere."""
        m = self.mask
        if not (m.sinks or m.chunk or m.prefix is not None):
            return None  # nothing counts from the start
        start: Tensor | None = None
        if m.start is not None:
            start = torch.as_tensor(m.start, device=self._device).reshape(-1, 1)
        elif self._real is not None:
            first = self._real.long().argmax(1, keepdim=True)
            start = torch.where(first > 0, first + m.key_offset, 0)
        if self._documents is None:
            return None if start is None else start.expand(-1, self.Lk)
        ids = self._documents[1]
        _, number = torch.unique(ids, return_inverse=True)
        head = torch.full((ids.shape[0], int(number.max()) + 1 if number.numel() else 1), self.Lk)
        head = head.to(self._device)
        slots = torch.arange(self.Lk, device=self._device).expand_as(number)
        if self._real is not None:  # a document starts at its first real token
            rows = max(number.shape[0], self._real.shape[0])
            number, slots = number.expand(rows, -1), slots[:1].expand(rows, -1)
            head = head.expand(rows, -1).clone()
            slots = slots.masked_fill(~self._real, self.Lk)
        head = head.scatter_reduce(1, number, slots, "amin")
        return head.gather(1, number) + m.key_offset

    def _from(self, cols: slice) -> Tensor:
        """Where the row or document of each key starts: (B | 1, 1, cols)."""
        if self._origin is None:
            return self._k.new_zeros(1, 1, 1)
        return self._origin[:, None, cols]

    def _within(self, count: int | Tensor, cols: slice) -> Tensor:
        """True for the first `count` keys of each row or document: (B | 1, 1, cols)."""
        place = self._k[:, cols][:, None, :] - self._from(cols)
        return (place >= 0) & (place < count)

    # ------------------------------------------------------------------ bounds

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        """For each query the first and one past the last key slot it can see in any batch row, (Lq,) each.

        Sinks, which lie outside, are kept apart in `_sinks`.
        """
        m = self.mask
        base = m.key_offset
        q = self._q - base  # slots
        low, high = torch.zeros_like(q), torch.full_like(q, self.Lk)
        origin = None if self._origin is None else self._origin - base
        if m.causal:
            edge = q + 1
            if m.prefix is not None:
                prefix = m.prefix
                prefix = prefix.to(self._device)[:, None] if isinstance(prefix, Tensor) else prefix
                reach = prefix if origin is None else origin.max(1, keepdim=True).values + prefix
                edge = torch.maximum(edge, torch.as_tensor(reach - (base if origin is None else 0)))
            if self._blocks is not None:
                edge = torch.full_like(q, self.Lk)
            high = torch.minimum(high, edge)
        if m.window is not None:
            left, right = m.window
            if left is not None:
                low = torch.maximum(low, q - left)
            if right is not None:
                high = torch.minimum(high, q + right + 1)
        if m.chunk is not None and self._documents is None:
            begin = torch.zeros_like(q) - base if origin is None else origin[:, :1] + torch.zeros_like(q)
            first = begin + _chunk(q - begin, m.chunk) * m.chunk
            low, high = torch.maximum(low, first), torch.minimum(high, first + m.chunk)
        if self._documents is not None and not m.sinks:
            first, last = _document_ranges(*self._documents)
            low, high = torch.maximum(low, first), torch.minimum(high, last)
        if self._real is not None:
            slots = torch.arange(self.Lk, device=self._device)
            first = slots.expand_as(self._real).masked_fill(~self._real, self.Lk).amin()
            last = slots.expand_as(self._real).masked_fill(~self._real, -1).amax() + 1
            low, high = torch.maximum(low, first), torch.minimum(high, last)
        return low.amin(0).cpu(), high.amax(0).cpu()

    @cached_property
    def _sinks(self) -> tuple[Tensor, Tensor] | None:
        """For each query the first and one past the last sink slot in any batch row; None without sinks."""
        m = self.mask
        if not m.sinks:
            return None
        base, origin = m.key_offset, self._origin
        q = self._q - base
        if self._documents is not None:  # the sinks of whichever document: anything may be one
            low, high = torch.zeros_like(q), torch.full_like(q, self.Lk)
        elif origin is None:
            low, high = torch.full_like(q, -base), torch.full_like(q, m.sinks - base)
        else:
            low = origin[:, :1] - base + torch.zeros_like(q)
            high = low + m.sinks
        if m.causal and m.prefix is None and m.blocks is None:
            high = torch.minimum(high, q + 1)
        return low.amin(0).cpu(), high.amax(0).cpu()

    def _crosses_diagonal(self, rows: Rows, cols: slice) -> bool:
        return bool(self.mask.key_offset + cols.stop - 1 > self._reach(rows)[0])

    def _leaves_window(self, rows: Rows, cols: slice) -> bool:
        assert self.mask.window is not None
        left, right = self.mask.window
        nearest, farthest = self._reach(rows)
        first, last = self.mask.key_offset + cols.start, self.mask.key_offset + cols.stop - 1
        return (left is not None and first < farthest - left) or (
            right is not None and last > nearest + right
        )

    def _reach(self, rows: Rows) -> tuple[int, int]:
        """The lowest and the highest position of these queries."""
        if isinstance(rows, slice) and not isinstance(self.offset, Tensor):
            return self.offset + rows.start, self.offset + rows.stop - 1
        q = self._q[:, rows]
        return int(q.min()), int(q.max())


def _chunk(position: Tensor, size: int) -> Tensor:
    return torch.div(position, size, rounding_mode="floor")


def _count(rows: Rows) -> int:
    return len(rows) if isinstance(rows, Tensor) else rows.stop - rows.start


def _check_batch(name: str, value: Tensor, B: int) -> None:
    if value.shape[0] not in (1, B):
        raise ShapeError(f"{name} has {value.shape[0]} rows, but the batch has {B} (allowed: 1 or {B})")


def _document_ranges(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """For each query the first and one past the last key slot that carries its number."""
    numbers = torch.unique(torch.cat([query.flatten(), key.flatten()]))
    q, k = torch.searchsorted(numbers, query.contiguous()), torch.searchsorted(numbers, key.contiguous())
    slots = torch.arange(key.shape[1], device=key.device).expand_as(k)
    size = (k.shape[0], len(numbers))
    first = torch.full(size, key.shape[1], device=key.device).scatter_reduce(1, k, slots, "amin")
    last = torch.full(size, 0, device=key.device).scatter_reduce(1, k, slots + 1, "amax")
    rows = max(q.shape[0], k.shape[0])
    q = q.expand(rows, -1)
    return first.expand(rows, -1).gather(1, q), last.expand(rows, -1).gather(1, q)


def _united(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(r for r in ranges if r[0] < r[1]):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _intersected(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> list[tuple[int, int]]:
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return sorted((low, high) for low, high in pairs if low < high)
