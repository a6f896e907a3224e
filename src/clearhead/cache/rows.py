"""Sequences as lists of blocks: append, fork, crop and free; a shared block is copied when written to."""

from __future__ import annotations

from collections.abc import Sequence

from clearhead.cache.pool import BlockPool
from clearhead.errors import ArgumentError


class BlockRow:
    """One sequence in a pool: token j lies in block blocks[j // page], at place j % page.

    A row that is freed is an empty one and may be used again.
    """

    def __init__(self, pool: BlockPool, shared: Sequence[int] = ()) -> None:
        """Start empty, or with full blocks of others (`shared`), whose tokens are this row's first ones."""
        pool.share(shared)
        self.pool = pool
        self.blocks = list(shared)
        self.length = len(self.blocks) * pool.page

    def append(self, count: int) -> None:
        """Make room for `count` more tokens. Raises PoolFullError, with nothing changed."""
        grow([self], [self.length + count])

    def fork(self) -> BlockRow:
        """Return another row with the same tokens. No block is copied before one of them writes to it."""
        other = BlockRow(self.pool, self.blocks)
        other.length = self.length
        return other

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. Raises ArgumentError for more than there are."""
        if not 0 <= length <= self.length:
            raise ArgumentError(f"length must lie in 0..{self.length}, got {length}")
        keep = -(-length // self.pool.page)
        self.pool.release(self.blocks[keep:])
        del self.blocks[keep:]
        self.length = length

    def free(self) -> None:
        """Let go of everything."""
        self.crop(0)

    def __repr__(self) -> str:
        return f"BlockRow({self.length} tokens, blocks {self.blocks})"


def grow(rows: Sequence[BlockRow], lengths: Sequence[int]) -> None:
    """Make room in rows of one pool up to these lengths: all of them, or PoolFullError with nothing changed.

    The block that a row's next token goes to becomes its own: shared, it is copied.
    """
    if not rows:
        return
    pool = rows[0].pool
    shared: dict[int, int] = {}  # references that are left after the rows before have made their copies
    copied: list[bool] = []
    needed = 0
    for row, length in zip(rows, lengths, strict=True):
        if length < row.length:
            raise ArgumentError(f"length {length} is below the {row.length} tokens there are: crop does that")
        needed += -(-length // pool.page) - len(row.blocks)
        copies = False
        if length > row.length and row.length % pool.page:
            last = row.blocks[row.length // pool.page]
            left = shared.get(last, pool.references[last])
            copies = left > 1
            shared[last] = left - copies
        copied.append(copies)
        needed += copies
    pool.require(needed)
    for row, length, copies in zip(rows, lengths, copied, strict=True):
        if copies:
            at = row.length // pool.page
            (own,) = pool.take(1)
            pool.copy(row.blocks[at], own)
            pool.release([row.blocks[at]])
            row.blocks[at] = own
        row.blocks += pool.take(-(-length // pool.page) - len(row.blocks))
        row.length = length
