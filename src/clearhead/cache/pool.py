"""Blocks of a preallocated pool: who holds which, counted, and never more of them than the limit says.

A block holds `page` tokens of every layer, keys and values. One number stands for it in all layers, so a
sequence is a list of numbers. Blocks are shared by count: who shares one holds a reference, and a block is
free again when the last reference is gone (Kwon et al. 2023, "Efficient Memory Management for Large Language
Model Serving with PagedAttention", section 4).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ArgumentError, DTypeError, PoolFullError, ShapeError
from clearhead.shapes import DTYPES
from clearhead.stored import PAGE_MOST, PAGE_STEP, Int8Rows, Pages


class LayerSize(NamedTuple):
    """What one layer keeps of a token: `heads` keys of `d` and values of `dv` numbers."""

    heads: int
    d: int
    dv: int


class BlockPool:
    """All blocks there are, allocated once.

    layers: the sizes of each layer. Give one of cache_bytes (what the pool may take in all, over all layers;
        as many blocks as fit) and blocks (how many). page: tokens of a block, a multiple of 16 up to 256.
    dtype: the model's float32, bfloat16 or float16, or torch.int8: bytes with a scale per row, 3.7 times
        smaller than float32 at d = 64, with rounding errors of half a step.

    Not for several threads at once; whoever shares a pool between threads holds a lock.
    Raises ArgumentError for a page, limit or sizes outside what is allowed, DTypeError for another dtype,
    PoolFullError if not even one block fits.
    """

    def __init__(
        self,
        layers: Sequence[LayerSize],
        *,
        cache_bytes: int | None = None,
        blocks: int | None = None,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = tuple(LayerSize(*sizes) for sizes in layers)
        if not self.layers or any(size < 1 for sizes in self.layers for size in sizes):
            raise ArgumentError(f"layers must hold sizes of at least 1, got {list(layers)}")
        if not isinstance(page, int) or page % PAGE_STEP or not 0 < page <= PAGE_MOST:
            raise ArgumentError(f"page must be a multiple of {PAGE_STEP} up to {PAGE_MOST}, got {page!r}")
        if dtype not in (*DTYPES, torch.int8):
            raise DTypeError(f"dtype must be a float type of attention or torch.int8, got {dtype}")
        self.page, self.dtype = page, dtype
        #: Bytes of one block over all layers.
        self.block_bytes = sum(_bytes(sizes, page, dtype) for sizes in self.layers)
        self.blocks = self._count(cache_bytes, blocks)
        #: Per layer (blocks, heads, page, d | dv), as `clearhead.Pages` reads them; touched when used.
        self.keys: tuple[Tensor | Int8Rows, ...] = tuple(
            self._rows(sizes.heads, sizes.d, device) for sizes in self.layers
        )
        self.values: tuple[Tensor | Int8Rows, ...] = tuple(
            self._rows(sizes.heads, sizes.dv, device) for sizes in self.layers
        )
        self.references = [0] * self.blocks
        self._free = list(range(self.blocks - 1, -1, -1))
        #: Asked for this many blocks when there are too few: gives back what is kept only for later use.
        self.reclaim: Callable[[int], None] | None = None

    def _count(self, cache_bytes: int | None, blocks: int | None) -> int:
        if (cache_bytes is None) == (blocks is None):
            raise ArgumentError("give either cache_bytes or blocks")
        name, given = ("blocks", blocks) if cache_bytes is None else ("cache_bytes", cache_bytes)
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ArgumentError(f"{name} must be an integer of at least 1, got {given!r}")
        count = given if cache_bytes is None else given // self.block_bytes
        if count < 1:
            raise PoolFullError(
                f"cache_bytes={given} is too small: one block of {self.page} tokens takes "
                f"{self.block_bytes} bytes"
            )
        return count

    def _rows(self, heads: int, d: int, device: torch.device | str) -> Tensor | Int8Rows:
        shape = (self.blocks, heads, self.page, d)
        zeros = torch.zeros(shape, dtype=self.dtype, device=device)  # not empty: no NaN waits in it
        if self.dtype is not torch.int8:
            return zeros
        return Int8Rows(zeros, torch.zeros(shape[:3], device=device))

    # ------------------------------------------------------------------ who holds what

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many blocks somebody holds."""
        return self.blocks - len(self._free)

    @property
    def capacity(self) -> int:
        """How many tokens fit."""
        return self.blocks * self.page

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.blocks * self.block_bytes

    def require(self, count: int) -> None:
        """Make sure that `count` blocks can be taken now. Raises PoolFullError, with nothing changed."""
        missing = count - len(self._free)
        if missing > 0 and self.reclaim is not None:
            self.reclaim(missing)
        if count > len(self._free):
            raise PoolFullError(
                f"the pool is full: {count} more blocks of {self.page} tokens are needed, {len(self._free)} "
                f"of {self.blocks} are free; free sequences or give it more cache_bytes (now {self.nbytes})"
            )

    def take(self, count: int) -> list[int]:
        """Hold `count` free blocks, each with one reference. Raises PoolFullError, with nothing changed."""
        self.require(count)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Hold one more reference to each. Raises ArgumentError for a block that nobody holds."""
        self._check_held(blocks)
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of one reference to each. Raises ArgumentError for a block that nobody holds."""
        self._check_held(blocks)
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self._free.append(block)

    def _check_held(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not 0 <= block < self.blocks or not self.references[block]:
                raise ArgumentError(f"block {block} is not held by anybody")

    # ------------------------------------------------------------------ what is in it

    def copy(self, source: int, target: int) -> None:
        """Copy what a block holds, in all layers."""
        for stored in (*self.keys, *self.values):
            for tensor in (stored.values, stored.scales) if isinstance(stored, Int8Rows) else (stored,):
                tensor[target] = tensor[source]

    def rows(self, layer: int, blocks: Tensor, places: Tensor) -> Tensor:
        """Where tokens lie in a layer, as numbers for `write`: (n · heads,), heads inside tokens.

        blocks, places: (n,) int64: the block of each token and its place in it.
        """
        heads = self.layers[layer].heads
        head = torch.arange(heads, device=blocks.device)
        return ((blocks[:, None] * heads + head) * self.page + places[:, None]).flatten()

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys (n, heads, d) and values (n, heads, dv) where `rows` says.

        Raises ShapeError for the keys of another model, DTypeError for another dtype.
        """
        sizes = self.layers[layer]
        for name, tensor, stored, d in (
            ("keys", keys, self.keys[layer], sizes.d),
            ("values", values, self.values[layer], sizes.dv),
        ):
            if tuple(tensor.shape[1:]) != (sizes.heads, d):
                raise ShapeError(
                    f"layer {layer}: {name} of a token are {tuple(tensor.shape[1:])} (heads, d), the cache "
                    f"was made for {(sizes.heads, d)}: it belongs to another model"
                )
            flat = tensor.reshape(-1, d)
            if isinstance(stored, Int8Rows):
                made = Int8Rows.quantised(flat[None, None])
                stored.values.view(-1, d).index_copy_(0, rows, made.values[0, 0])
                stored.scales.view(-1).index_copy_(0, rows, made.scales[0, 0])
                continue
            if tensor.dtype != self.dtype:
                raise DTypeError(
                    f"layer {layer}: {name} are {tensor.dtype}, the cache was made for {self.dtype}"
                )
            stored.view(-1, d).index_copy_(0, rows, flat.detach())

    def close(self) -> None:
        """Give the memory back to the system. The pool can hold nothing any more."""
        self.keys = self.values = ()

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"BlockPool({self.used} of {self.blocks} blocks held, {self.page} tokens each, {kind})"


def pages_of(pages: Pages, pool: BlockPool, layer: int) -> tuple[Pages, Pages]:
    """The keys and values of a layer, behind a table that has been checked already."""
    keys, values = copy.copy(pages), copy.copy(pages)
    keys.pool, values.pool = pool.keys[layer], pool.values[layer]
    return keys, values


def _bytes(sizes: LayerSize, page: int, dtype: torch.dtype) -> int:
    scales = 8 if dtype is torch.int8 else 0  # a float32 per row of keys and of values
    return page * sizes.heads * ((sizes.d + sizes.dv) * dtype.itemsize + scales)
