"""Full blocks of tokens that were computed already, found again by what is in them and before them."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from clearhead.cache.pool import BlockPool


def chain(tokens: Sequence[int], page: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Return a name for each full block of a sequence: the hash of its tokens and of all before it.

    known: the names of its first blocks, as far as they are known. blake2b of 16 bytes: nobody can make two
    texts that get the same name.
    """
    names = list(known)
    for block in range(len(names), len(tokens) // page):
        before = names[-1] if names else b""
        held = array("q", tokens[block * page : (block + 1) * page]).tobytes()
        names.append(hashlib.blake2b(before + held, digest_size=16).digest())
    return names


class Prefixes:
    """Keeps a reference to each block that it knows; gives them back, oldest first, to who needs room."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        pool.reclaim = self.reclaim

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    @property
    def spare(self) -> int:
        """How many blocks nobody else holds: room that can be had."""
        return sum(self.pool.references[block] == 1 for block in self._blocks.values())

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known beginning."""
        found = []
        for name in names:
            if name not in self._blocks:
                break
            found.append(self._blocks[name])
        for name in reversed(
            names[: len(found)]
        ):  # a block is of no use without those before it: they go last
            self._blocks.move_to_end(name)
        return found

    def add(self, name: bytes, block: int) -> None:
        """Remember a full block, unless another one with the same tokens is known."""
        if name not in self._blocks:
            self.pool.share([block])
            self._blocks[name] = block

    def reclaim(self, count: int) -> None:
        """Let go of up to `count` blocks that nobody else holds."""
        for name, block in list(self._blocks.items()):
            if count <= 0:
                return
            if self.pool.references[block] == 1:
                del self._blocks[name]
                self.pool.release([block])
                count -= 1

    def clear(self) -> None:
        """Forget all of them."""
        self.pool.release(list(self._blocks.values()))
        self._blocks.clear()
