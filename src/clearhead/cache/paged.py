"""A cache of transformers in blocks of a pool: nothing is copied as it grows, beams share common blocks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from clearhead.cache.pool import BlockPool, pages_of
from clearhead.cache.rows import BlockRow, grow
from clearhead.cache.sizes import check_attention, layer_sizes
from clearhead.errors import ArgumentError, ModelError, ShapeError
from clearhead.stored import Pages


class PagedCache(Cache):  # type: ignore[misc]
    """Keys and values behind a block table: exact, for `model(…, cache=c)` and `model.generate(…, cache=c)`.

    config: the model's configuration (`model.config`), or a `LayerSize` for each layer.
    cache_bytes: what the pool may take over all layers; allocated at once, touched when used.
    page, dtype: as in `BlockPool`; dtype None is the model's, or float32 if it names none.
    pool: a pool to share with other caches, in place of cache_bytes.

    Beams and returned sequences share their common blocks; a block is copied when one of them writes to it.
    `update` returns `clearhead.Pages`: attention reads the blocks where they lie. Rows of a batch are padded
    as in any cache, and pads take their place.

    Raises PoolFullError when a forward needs more blocks than are free, in its first layer, before anything
    is written: free or crop, and go on. Raises ModelError for a model with another attention implementation,
    ShapeError for the keys of another model or another batch, ArgumentError or DTypeError as `BlockPool`.
    """

    layers: list[PagedLayer]

    def __init__(
        self,
        config: Any,
        *,
        cache_bytes: int | None = None,
        page: int = 16,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        pool: BlockPool | None = None,
    ) -> None:
        sizes = tuple(config) if isinstance(config, list | tuple) else layer_sizes(config)
        if pool is None:
            if cache_bytes is None:
                raise ArgumentError("give cache_bytes, what the cache may take over all layers, or a pool")
            named = getattr(config, "dtype", None)
            kind = dtype or (named if isinstance(named, torch.dtype) else torch.float32)
            pool = BlockPool(sizes, cache_bytes=cache_bytes, page=page, dtype=kind, device=device)
        elif pool.layers != sizes:
            raise ShapeError(
                f"pool has layers of {set(pool.layers)}, the model of {set(sizes)} (heads, d, dv)"
            )
        self.config, self.pool = config, pool
        super().__init__(layers=[PagedLayer(self, number) for number in range(len(sizes))])
        self.rows: list[BlockRow] = []
        self._finalizer = weakref.finalize(self, _free, self.rows)
        self._forget()

    # ------------------------------------------------------------------ what it says of itself

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that this cache holds, shared ones counted once (all: `pool.nbytes`)."""
        return len({block for row in self.rows for block in row.blocks}) * self.pool.block_bytes

    @property
    def capacity(self) -> int:
        """How many tokens the pool has room for, over all rows of all its users."""
        return self.pool.capacity

    @property
    def evicted(self) -> int:
        """0: nothing is ever let go of."""
        return 0

    def fork(self) -> PagedCache:
        """Return another cache that holds the same, in the same blocks; what it writes is its own."""
        other = PagedCache(self.config, pool=self.pool)
        other.rows += [row.fork() for row in self.rows]
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            theirs.length = mine.length
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A fork: transformers copies a cache to go on from one prompt several times."""
        return self.fork()

    # ------------------------------------------------------------------ what transformers asks for

    def crop(self, tokens_to_remove: int) -> None:
        """Take away the last -tokens_to_remove tokens; also those that a forward that failed has left."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}"
            )
        length = max(self.get_seq_length() + tokens_to_remove, 0)
        for row in self.rows:
            row.crop(min(length, row.length))
        for layer in self.layers:
            layer.length = min(layer.length, length)
        self._forget()

    def reset(self) -> None:
        """Give all blocks back; the cache is empty and can be used again, with any batch."""
        for row in self.rows:
            row.free()
        self.rows.clear()
        for layer in self.layers:
            layer.length = 0
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b goes on from what row beam_idx[b] has; nothing is copied."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        chosen = torch.as_tensor(indices)
        self._select((chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other; nothing is copied."""
        self._select([number for number in range(len(self.rows)) for _ in range(repeats)])

    def _select(self, numbers: list[int]) -> None:
        if not self.rows:
            return
        chosen = [self.rows[number].fork() for number in numbers]
        for row in self.rows:
            row.free()
        self.rows[:] = chosen
        self._forget()

    # ------------------------------------------------------------------ what its layers ask for

    def _forget(self) -> None:
        self._pages: Pages | None = None  # of layer 0, at the length that it has now
        self._slots: tuple[Tensor, Tensor] | None = None
        self._places: dict[int, Tensor] = {}  # heads -> rows of the pool that this forward writes to

    def _advance(self, length: int, batch: int, new: int) -> None:
        """Make room for the forward that layer 0 begins with, and say where its tokens go."""
        check_attention(self.config)
        if not self.rows:
            self.rows += [BlockRow(self.pool) for _ in range(batch)]
        if len(self.rows) != batch:
            raise ShapeError(
                f"the cache holds {len(self.rows)} rows, keys came for {batch}: reset() it first"
            )
        for row in self.rows:  # room that an update took and then refused to fill
            row.crop(min(row.length, length))
        grow(self.rows, [length + new] * batch)
        self._forget()
        self._pages = pages = self._described(length + new)
        device, table = pages.device, pages.table
        positions = torch.arange(length, length + new, device=device)
        numbers = table[:, positions // self.pool.page].long().flatten()
        self._slots = numbers, (positions % self.pool.page).repeat(batch)

    def _described(self, length: int) -> Pages:
        """The pages of all rows, as layer 0 has them."""
        most = max(len(row.blocks) for row in self.rows)
        blocks = [[*row.blocks, *[0] * (most - len(row.blocks))] for row in self.rows]
        device = self.pool.keys[0].device
        table = torch.tensor(blocks, dtype=torch.int32, device=device)
        return Pages(self.pool.keys[0], table, torch.full((len(self.rows),), length, device=device))

    def _write(self, number: int, keys: Tensor, values: Tensor) -> tuple[Pages, Pages]:
        assert self._pages is not None
        assert self._slots is not None
        heads = self.pool.layers[number].heads
        if heads not in self._places:
            self._places[heads] = self.pool.rows(number, *self._slots)
        flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (keys, values))  # (B · new, heads, d)
        self.pool.write(number, self._places[heads], *flat)
        return pages_of(self._pages, self.pool, number)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `PagedCache`; it knows how far it has come, and its cache knows the rest."""

    is_sliding = False
    is_croppable = True
    is_initialized = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, number: int) -> None:
        self._cache = weakref.ref(cache)
        self.number, self.length = number, 0

    @property
    def cache(self) -> PagedCache:
        """The cache that this layer belongs to."""
        cache = self._cache()
        assert cache is not None
        return cache

    @property
    def keys(self) -> Pages | None:
        """The keys so far, None before the first."""
        return self._stored()[0]

    @property
    def values(self) -> Pages | None:
        """The values so far, None before the first."""
        return self._stored()[1]

    def _stored(self) -> tuple[Pages, Pages] | tuple[None, None]:
        cache = self.cache
        if cache._pages is None and self.length:  # rows were chosen or cropped since
            cache._pages = cache._described(self.length)
        return (None, None) if cache._pages is None else pages_of(cache._pages, cache.pool, self.number)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pool is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Pages, Pages]:
        """Write keys (B, heads, new, d) and values (B, heads, new, dv); return all there are, as pages."""
        cache, new = self.cache, key_states.shape[2]
        first = cache.layers[0].length
        if self.number == 0:
            behind = min(layer.length for layer in cache.layers)
            if behind != first:
                raise ModelError(
                    f"the forward before this one stopped in the middle: {first} tokens are in the first "
                    f"layer, {behind} in a later one; crop({behind - first}) or reset() the cache"
                )
            cache._advance(self.length, key_states.shape[0], new)
        pages = cache._write(self.number, key_states, value_states)
        self.length += new
        return pages

    def get_seq_length(self) -> int:
        """How many tokens each row has."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(how many keys there will be, 0)."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: the pool is the limit, and what a row takes of it depends on the others."""
        return -1


def _free(rows: list[BlockRow]) -> None:
    for row in rows:
        row.free()
