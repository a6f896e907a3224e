"""Blocks are held, shared, copied and given back; none is lost, and none is held by two who do not know it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from clearhead.cache.pool import BlockPool, LayerSize
from clearhead.cache.rows import BlockRow, grow
from clearhead.errors import ArgumentError, ClearheadError, DTypeError, PoolFullError, ShapeError
from clearhead.stored import Int8Rows

PAGE, BLOCKS = 16, 12
TINY = (LayerSize(1, 4, 4), LayerSize(2, 4, 8))


class Sequences(RuleBasedStateMachine):
    """Rows in a small pool, each with the text that it should hold; every token is written for real."""

    rows = Bundle("rows")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TINY, blocks=BLOCKS, page=PAGE)
        self.texts: dict[BlockRow, list[float]] = {}
        self.written = 0.0

    @rule(target=rows)
    def new(self) -> BlockRow:
        row = BlockRow(self.pool)
        self.texts[row] = []
        return row

    @rule(chosen=st.lists(rows, min_size=1, max_size=3, unique=True), count=st.integers(0, 40))
    def append(self, chosen: list[BlockRow], count: int) -> None:
        before = self.state()
        starts = [row.length for row in chosen]
        try:
            grow(chosen, [row.length + count for row in chosen])
        except PoolFullError:
            assert self.state() == before  # nothing is lost, nothing half done
            return
        for row, start in zip(chosen, starts, strict=True):
            for place in range(start, row.length):
                self.written += 1
                self.texts[row].append(self.written)
                block = row.blocks[place // PAGE]
                for stored in (*self.pool.keys, *self.pool.values):
                    assert isinstance(stored, torch.Tensor)
                    stored[block, :, place % PAGE] = self.written

    @rule(target=rows, row=rows)
    def fork(self, row: BlockRow) -> BlockRow:
        used = self.pool.used
        other = row.fork()
        assert self.pool.used == used  # nothing is copied
        self.texts[other] = list(self.texts[row])
        return other

    @rule(row=rows, keep=st.floats(0, 1))
    def crop(self, row: BlockRow, keep: float) -> None:
        length = int(row.length * keep)
        row.crop(length)
        del self.texts[row][length:]

    @rule(row=rows)
    def free(self, row: BlockRow) -> None:
        row.free()
        self.texts[row] = []

    @rule(row=consumes(rows))
    def free_for_good(self, row: BlockRow) -> None:
        row.free()
        del self.texts[row]

    @precondition(lambda self: any(row.length >= PAGE for row in self.texts))
    @rule(target=rows)
    def begin_with_full_blocks_of_another(self) -> BlockRow:
        source = max(self.texts, key=lambda row: row.length)
        full = source.length // PAGE
        other = BlockRow(self.pool, source.blocks[:full])
        self.texts[other] = self.texts[source][: full * PAGE]
        return other

    def state(self) -> object:
        return list(self.pool.references), [(list(row.blocks), row.length) for row in self.texts]

    @invariant()
    def every_reference_is_counted_and_no_block_leaks(self) -> None:
        held = [block for row in self.texts for block in row.blocks]
        assert self.pool.references == [held.count(block) for block in range(BLOCKS)]
        assert self.pool.used == len(set(held))
        assert self.pool.free == BLOCKS - len(set(held))

    @invariant()
    def every_row_holds_what_was_written_to_it(self) -> None:
        for row, text in self.texts.items():
            assert row.length == len(text)
            assert len(row.blocks) == -(-row.length // PAGE)
            for stored in (*self.pool.keys, *self.pool.values):
                assert isinstance(stored, torch.Tensor)
                held = [float(stored[row.blocks[j // PAGE], -1, j % PAGE, -1]) for j in range(len(text))]
                assert held == text


Sequences.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestSequences = Sequences.TestCase


def test_the_pool_takes_what_the_formula_says_and_not_more_than_the_limit() -> None:
    sizes = [LayerSize(3, 64, 64)] * 30
    pool = BlockPool(sizes, cache_bytes=50_000_000, page=16)
    assert pool.block_bytes == 2 * 30 * 3 * 64 * 16 * 4  # 2 · layers · KV heads · d · n · size
    assert pool.nbytes <= 50_000_000 < pool.nbytes + pool.block_bytes
    stored = [t for t in (*pool.keys, *pool.values) if isinstance(t, torch.Tensor)]
    assert sum(t.numel() * t.itemsize for t in stored) == pool.nbytes
    assert pool.capacity == pool.blocks * 16


def test_a_pool_of_bytes_counts_its_scales() -> None:
    pool = BlockPool([LayerSize(3, 64, 64)], blocks=5, dtype=torch.int8)
    stored = [t for t in (*pool.keys, *pool.values) if isinstance(t, Int8Rows)]
    assert sum(t.values.numel() + 4 * t.scales.numel() for t in stored) == pool.nbytes
    floats = BlockPool([LayerSize(3, 64, 64)], blocks=5)
    assert floats.nbytes / pool.nbytes > 3.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_is_written_is_read_back(dtype: torch.dtype) -> None:
    pool = BlockPool(TINY, blocks=3, dtype=dtype)
    kind = torch.float32 if dtype is torch.int8 else dtype
    k, v = torch.randn(20, 2, 4).to(kind), torch.randn(20, 2, 8).to(kind)
    blocks = torch.tensor([2] * 16 + [0] * 4)
    pool.write(1, pool.rows(1, blocks, torch.arange(20) % 16), k, v)
    for stored, given in ((pool.keys[1], k), (pool.values[1], v)):
        dense = stored.dense() if isinstance(stored, Int8Rows) else stored
        back = torch.cat([dense[2].transpose(0, 1), dense[0].transpose(0, 1)])[:20]
        assert torch.allclose(back.float(), given.float(), atol=0.02 if dtype is torch.int8 else 0)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"cache_bytes": 100}, PoolFullError, "cache_bytes=100 is too small: one block of 16 tokens"),
        ({"cache_bytes": 0}, ArgumentError, "cache_bytes must be an integer of at least 1, got 0"),
        ({}, ArgumentError, "either cache_bytes or blocks"),
        ({"blocks": 2, "cache_bytes": 9}, ArgumentError, "either cache_bytes or blocks"),
        ({"blocks": 2, "page": 24}, ArgumentError, "page must be a multiple of 16 up to 256, got 24"),
        ({"blocks": 2, "dtype": torch.int32}, DTypeError, "got torch.int32"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(arguments: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        BlockPool(TINY, **arguments)


def test_the_keys_of_another_model_are_refused() -> None:
    pool = BlockPool(TINY, blocks=1)
    place = pool.rows(0, torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ShapeError, match=r"keys of a token are \(2, 4\).*made for \(1, 4\).*another model"):
        pool.write(0, place, torch.zeros(1, 2, 4), torch.zeros(1, 1, 4))
    with pytest.raises(DTypeError, match=r"keys are torch.float64, the cache was made for torch.float32"):
        pool.write(0, place, torch.zeros(1, 1, 4).double(), torch.zeros(1, 1, 4))


def test_a_block_that_nobody_holds_can_be_neither_shared_nor_given_back() -> None:
    pool = BlockPool(TINY, blocks=2)
    for call in (pool.share, pool.release):
        for block in (0, 2, -1):
            with pytest.raises(ArgumentError, match=f"block {block} is not held"):
                call([block])


def test_a_full_pool_says_how_full_it_is() -> None:
    pool = BlockPool(TINY, blocks=2)
    row = BlockRow(pool)
    row.append(17)
    with pytest.raises(PoolFullError, match=r"1 more blocks of 16 tokens are needed, 0 of 2 are free"):
        row.append(16)
    assert isinstance(PoolFullError(), MemoryError)
    assert isinstance(PoolFullError(), ClearheadError)
    assert row.length == 17
