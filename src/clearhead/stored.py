"""Keys and values as caches store them: bytes with a scale per row, and pages behind a table. Descriptions.

`attention` takes them in the place of k and v. A backend that reads them as they lie copies nothing; for all
others `dense()` writes them out. Of attention it knows only that keys behind a row's length are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ArgumentError, DeviceError, DTypeError, MaskError, ModelError, ShapeError
from clearhead.mask import Mask
from clearhead.shapes import DTYPES, Shape, check_qkv

#: What a page may hold: a multiple of this many rows, and no more than MOST.
PAGE_STEP, PAGE_MOST = 16, 256


class _Description:
    """What is no tensor, and says so where another attention takes it for one."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:
        raise cls._unreadable()

    def __getitem__(self, index: object) -> Any:
        raise self._unreadable()

    @classmethod
    def _unreadable(cls) -> ModelError:
        return ModelError(
            f"{cls.__name__} are keys or values as a cache stores them, which only clearhead's attention "
            'reads: load the model with attn_implementation="clearhead"'
        )


class Int8Rows(_Description):
    """Rows of bytes, each with a scale: row (b, h, j) is values[b, h, j] · scales[b, h, j].

    values: (B, Hkv, L, d) int8. scales: (B, Hkv, L) float32. Any strides.
    Raises ShapeError, DTypeError or DeviceError for tensors that do not fit.
    """

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        _check_tensor("values", values, (torch.int8,), 4, "(B, Hkv, L, d)")
        _check_tensor("scales", scales, (torch.float32,), 3, "(B, Hkv, L)")
        if scales.shape != values.shape[:3]:
            raise ShapeError(
                f"scales must have shape {tuple(values.shape[:3])}, one per row of values, "
                f"got {tuple(scales.shape)}"
            )
        if scales.device != values.device:
            raise DeviceError(f"values are on {values.device} and scales on {scales.device}")
        self.values, self.scales = values, scales

    @classmethod
    def quantised(cls, tensor: Tensor) -> Int8Rows:
        """Round rows (B, Hkv, L, d) to 255 even steps: scale = largest magnitude / 127, symmetric around 0.

        The error of an element is at most half its row's scale. Carries no gradient.
        """
        _check_tensor("tensor", tensor, DTYPES, 4, "(B, Hkv, L, d)")
        wide = tensor.detach().float()
        scales = wide.abs().amax(-1) / 127
        steps = (wide / scales.masked_fill(scales == 0, 1.0)[..., None]).round()
        return cls(steps.to(torch.int8), scales)

    @property
    def shape(self) -> torch.Size:
        """(B, Hkv, L, d)."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where the bytes lie."""
        return self.values.device

    def dense(self) -> Tensor:
        """The rows as float32, (B, Hkv, L, d)."""
        return self.values.float() * self.scales[..., None]

    def __repr__(self) -> str:
        return f"Int8Rows({' x '.join(map(str, self.shape))})"


class Pages(_Description):
    """Keys or values in pages of a pool: row j of item b is row j % page of block table[b, j // page].

    pool: (blocks, Hkv, page, d), a tensor of floats or `Int8Rows`; page a multiple of 16 from 16 to 256.
    table: (B, pages) int32; what it holds beyond the pages of a row's length is not looked at.
    lengths: (B,) integers, how many keys each item has; they need not be the same. The longest is Lk.

    Causal masks are aligned at the end of each row: the last query of item b sees key lengths[b] - 1. Keys
    behind a row's length are hidden.
    The tensors are kept, not copied. Change lengths or table in place between calls as you like, but not
    so that a row gets longer than `Lk`, which is taken once: make another Pages, it costs next to nothing.

    Raises ShapeError, DTypeError, DeviceError or ArgumentError for what does not fit: lengths beyond the
    table's pages, block numbers outside the pool, odd sizes of a page.
    """

    def __init__(self, pool: Tensor | Int8Rows, table: Tensor, lengths: Tensor | Sequence[int]) -> None:
        if not isinstance(pool, Int8Rows):
            _check_tensor("pool", pool, DTYPES, 4, "(blocks, Hkv, page, d)")
        lengths = torch.as_tensor(lengths)
        _check_tensor("table", table, (torch.int32,), 2, "(B, pages)")
        _check_tensor("lengths", lengths, (torch.int32, torch.int64), 1, "(B,)")
        page = pool.shape[2]
        if page % PAGE_STEP or not 0 < page <= PAGE_MOST:
            raise ShapeError(
                f"pool has pages of {page} rows, allowed are multiples of {PAGE_STEP} up to {PAGE_MOST}"
            )
        if len(lengths) != len(table):
            raise ShapeError(f"table has {len(table)} rows and lengths {len(lengths)}: they must be the same")
        for name, tensor in (("table", table), ("lengths", lengths)):
            if tensor.device != pool.device:
                raise DeviceError(f"pool is on {pool.device} and {name} on {tensor.device}")
        self.pool, self.table, self.lengths = pool, table, lengths
        self.Lk = int(lengths.max())
        self._checked: tuple[Any, ...] | None = None
        self.check()

    @property
    def page(self) -> int:
        """How many rows a page holds."""
        return self.pool.shape[2]

    @property
    def shape(self) -> torch.Size:
        """(B, Hkv, Lk, d), with the longest row as Lk."""
        return torch.Size((len(self.lengths), self.pool.shape[1], self.Lk, self.pool.shape[3]))

    @property
    def device(self) -> torch.device:
        """Where the pool lies."""
        return self.pool.device

    def check(self) -> None:
        """Raise ArgumentError if a length or a block number is out of range; cheap if nothing has changed."""
        now = _version(self.table), _version(self.lengths)
        if self._checked == now and None not in now:
            return
        low, high = int(self.lengths.min()), int(self.lengths.max())
        room = self.table.shape[1] * self.page
        if low < 0 or high < 1 or high > room:
            raise ArgumentError(
                f"lengths run from {low} to {high}: allowed are 0 to {room} ({self.table.shape[1]} pages of "
                f"{self.page} rows), at least one of them above 0"
            )
        if high > self.Lk:
            raise ArgumentError(
                f"lengths have grown to {high} since Pages was made for {self.Lk}: make a new one"
            )
        blocks, used = self.pool.shape[0], self._used()
        numbers = self.table[used]
        least, most = int(numbers.min()), int(numbers.max())
        if least < 0 or most >= blocks:
            raise ArgumentError(
                f"table holds block {least if least < 0 else most}, allowed are 0..{blocks - 1}"
            )
        self._checked = now

    def _used(self) -> Tensor:
        """The entries of the table that a row's length reaches, (B, pages) booleans."""
        places = torch.arange(self.table.shape[1], device=self.device) * self.page
        return places < self.lengths[:, None]

    def dense(self) -> Tensor:
        """The rows in order, (B, Hkv, Lk, d), zeros behind each length; float32 for bytes."""
        pages = self.table.masked_fill(~self._used(), 0).long()
        pool = self.pool
        if isinstance(pool, Int8Rows):
            rows = pool.values[pages].float() * pool.scales[pages][..., None]
        else:
            rows = pool[pages]
        rows = rows.transpose(1, 2).flatten(2, 3)[:, :, : self.Lk]  # (B, Hkv, pages · page, d)
        there = torch.arange(self.Lk, device=self.device) < self.lengths[:, None]
        return rows.masked_fill(~there[:, None, :, None], 0.0)

    def __repr__(self) -> str:
        kind = "bytes" if isinstance(self.pool, Int8Rows) else str(self.pool.dtype).removeprefix("torch.")
        return f"Pages({' x '.join(map(str, self.shape))} of {kind}, pages of {self.page})"


class Held(_Description):
    """Keys as a cache hands them out together with what it knows of them, or wants to know.

    tensor: the keys, (B, Hkv, Lk, d); the values travel beside them as they are.
    mask: narrows who may look, in the positions that the cache tells (windows and sinks), or None.
    turn: applied to the queries (B, Hq, Lq, d) before they meet these keys, or None.
    account: called after the pass with the attention that each key received from all queries of the call,
        (B, Hq, Lk), or None (`KeyMass`, measured beside the same pass).
    scattered: the keys of a head are not neighbours in the text, and no two heads have the same: masks and
        biases by distance would be wrong, and are refused. gapless: padding would be kept as if it were
        text, and is refused.
    """

    def __init__(
        self,
        tensor: Tensor,
        *,
        mask: Mask | None = None,
        turn: Callable[[Tensor], Tensor] | None = None,
        account: Callable[[Tensor], None] | None = None,
        scattered: bool = False,
        gapless: bool = False,
    ) -> None:
        self.tensor, self.mask, self.turn, self.account = tensor, mask, turn, account
        self.scattered, self.gapless = scattered, gapless

    @property
    def shape(self) -> torch.Size:
        """(B, Hkv, Lk, d)."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """Where the keys lie."""
        return self.tensor.device

    def opened(self, q: Tensor, mask: Mask, *, biased: bool) -> tuple[Tensor, Tensor, Mask]:
        """Queries, keys and mask of the call that these keys ask for. biased: whether scores get a bias.

        Raises MaskError for what such keys cannot be combined with.
        """
        parts = (mask, *mask.also)
        if self.gapless and any(part.padding is not None for part in parts):
            raise MaskError(
                "this cache lets go of tokens by their place, and pads would take the places of text: give "
                "rows of equal length without padding, or a cache that keeps everything"
            )
        if self.scattered:
            named = ("window", "chunk", "documents", "blocks", "prefix", "dense")
            said = {name for part in parts for name in named if getattr(part, name) is not None}
            if said or biased:
                raise MaskError(
                    "this cache keeps other tokens in each head, so keys have no common positions; the model "
                    f"masks or biases by position ({', '.join(sorted(said)) or 'a bias'})"
                )
        narrow = mask if self.mask is None else mask & self.mask
        return q if self.turn is None else self.turn(q), self.tensor, narrow

    def __repr__(self) -> str:
        return f"Held({' x '.join(map(str, self.shape))})"


Stored = Int8Rows | Pages


def check_stored(q: object, k: Stored, v: object) -> Shape:
    """Return the sizes of q (B, Hq, Lq, d) with stored keys and values.

    Raises ShapeError, DTypeError, DeviceError or ArgumentError naming the argument, what came and what is
    allowed.
    """
    if not isinstance(v, Stored) or type(k) is not type(v):
        raise DTypeError(
            f"k is {type(k).__name__} and v {type(v).__name__}: both must be stored in the same way"
        )
    if isinstance(k, Pages) and isinstance(v, Pages):
        k.check()
        v.check()
        if type(k.pool) is not type(v.pool):
            raise DTypeError(f"k is {k!r} and v {v!r}: both must be stored in the same way")
        if k.lengths is not v.lengths and not torch.equal(k.lengths, v.lengths):
            raise ArgumentError("k and v have different lengths: they must be the same, row by row")
    if not isinstance(q, Tensor):
        raise DTypeError(f"q must be a tensor, got {type(q).__name__}")
    for name, stored in (("k", k), ("v", v)):
        if stored.device != q.device:
            raise DeviceError(f"q is on {q.device} and {name} on {stored.device}: they must be the same")
    # The other checks are those of tensors of these sizes.
    tensors = [torch.empty(s.shape, dtype=_dtype(s, q), device="meta") for s in (k, v)]
    return check_qkv(torch.empty_like(q, device="meta"), *tensors)


def _dtype(stored: Stored, q: Tensor) -> torch.dtype:
    """The dtype that has to be q's; bytes go with any."""
    if isinstance(stored, Pages) and not isinstance(stored.pool, Int8Rows):
        return stored.pool.dtype
    return q.dtype


#: The latest masks with lengths, and what they were made from.
_KEPT: tuple[tuple[Mask, Tensor, int, int, Mask], ...] = ()
_KEPT_MOST = 24


def masked_by_lengths(mask: Mask, pages: Pages, Lq: int) -> Mask:
    """The mask with keys behind each row's length hidden, and the last query at the last key of its row."""
    global _KEPT
    version = _version(pages.lengths)
    for of, lengths, at, rows, kept in _KEPT:  # the layers of a model ask alike
        if of is mask and lengths is pages.lengths and at == version and rows == Lq:
            return kept
    lengths = pages.lengths.long()
    offset = lengths - Lq + mask.key_offset if mask.offset is None else None
    made = Mask(padding=lengths, offset=offset) & mask
    if version is not None:
        _KEPT = ((mask, pages.lengths, version, Lq, made), *_KEPT[: _KEPT_MOST - 1])
    return made


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not count (inference mode)."""
    return None if tensor.is_inference() else tensor._version


def _check_tensor(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], ndim: int, shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise DTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DTypeError(f"{name} has dtype {tensor.dtype}, allowed are {allowed}")
    if tensor.ndim != ndim:
        raise ShapeError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if 0 in tensor.shape:
        raise ShapeError(f"{name} is empty, shape {tuple(tensor.shape)}: every axis must be at least 1")
