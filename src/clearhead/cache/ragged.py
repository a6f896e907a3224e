"""Many sequences in one row of tokens: each attends to its own pages, the linear layers see one long row.

A `Step` says which tokens of the row belong to whom. Its cache (`clearhead.cache.step`) writes keys and
values into the pool and hands the attention function a `Ragged` in their place, which attends part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.cache.pool import BlockPool, pages_of
from clearhead.cache.rows import BlockRow
from clearhead.errors import ArgumentError, MaskError, ModelError
from clearhead.front_door import attention
from clearhead.mask import Mask
from clearhead.observables import Observable
from clearhead.stored import Pages

#: What a mask may say in a step; all else would have to be said sequence by sequence.
_UNSAID = ("padding", "documents", "prefix", "blocks", "dense")

Seen = Callable[[int, Sequence[Any]], None]


class Part(NamedTuple):
    """Neighbouring tokens of the row that attend in one call.

    first, stop: which tokens. pages: table and lengths of their sequences, which share the tokens evenly: one
    sequence with all of them (a chunk of a prompt), or as many sequences as tokens (decoding).
    asked: what to observe; seen: called with (layer, answers).
    """

    first: int
    stop: int
    pages: Pages
    asked: tuple[Observable, ...] = ()
    seen: Seen | None = None


class Step:
    """One forward over a row of n tokens: its parts, and where each token is written.

    blocks, places: (n,) int64, the block of each token and its place in it.
    """

    def __init__(self, pool: BlockPool, parts: Sequence[Part], blocks: Tensor, places: Tensor) -> None:
        self.pool, self.parts, self.blocks, self.places = pool, tuple(parts), blocks, places
        self._rows: dict[int, Tensor] = {}
        self._bare: list[tuple[Mask, Mask]] = []

    @classmethod
    def of(cls, pool: BlockPool, groups: Sequence[Group]) -> Step:
        """Lay groups of sequences out one after the other. Their rows must have the room already."""
        parts, blocks, places = [], [], []
        page, device, at = pool.page, pool.keys[0].device, 0
        for group in groups:
            ends = [start + group.tokens for start in group.starts]
            most = max(-(-end // page) for end in ends)
            table = [(row.blocks + [0] * most)[:most] for row in group.rows]
            pages = Pages(
                pool.keys[0],
                torch.tensor(table, dtype=torch.int32, device=device),
                torch.tensor(ends, device=device),
            )
            for row, start, end in zip(group.rows, group.starts, ends, strict=True):
                if end > row.length:
                    raise ArgumentError(f"a row of {row.length} tokens has no room up to {end}")
                blocks += [row.blocks[position // page] for position in range(start, end)]
                places += [position % page for position in range(start, end)]
            count = group.tokens * len(group.rows)
            parts.append(Part(at, at + count, pages, group.asked, group.seen))
            at += count
        return cls(pool, parts, torch.tensor(blocks, device=device), torch.tensor(places, device=device))

    def rows(self, layer: int) -> Tensor:
        """Where a layer's keys are written; layers with as many heads share one answer."""
        heads = self.pool.layers[layer].heads
        if heads not in self._rows:
            self._rows[heads] = self.pool.rows(layer, self.blocks, self.places)
        return self._rows[heads]

    def bare(self, mask: Mask) -> Mask:
        """What the model's mask says of distances alone: it then holds for every sequence by itself.

        Raises MaskError for a mask that says more.
        """
        for known, made in self._bare:
            if known is mask:
                return made
        unsaid = [name for name in _UNSAID if getattr(mask, name) is not None]
        if unsaid or mask.also:
            raise MaskError(
                f"a row of many sequences takes masks of causality, windows and chunks; this model's has "
                f"{', '.join(unsaid) or 'several parts'}"
            )
        made = Mask(causal=mask.causal, window=mask.window, sinks=mask.sinks, chunk=mask.chunk)
        self._bare.append((mask, made))  # the layers of a model share a mask or two
        return made


class Group(NamedTuple):
    """Sequences that attend in one call: each writes `tokens` tokens from its place in `starts` on."""

    rows: Sequence[BlockRow]
    starts: Sequence[int]
    tokens: int
    asked: tuple[Observable, ...] = ()
    seen: Seen | None = None


class Ragged:
    """The keys and values of one layer in a step, for the attention function: (1, heads, n, d)."""

    def __init__(self, step: Step, layer: int) -> None:
        self.step, self.layer = step, layer
        sizes = step.pool.layers[layer]
        self.shape = torch.Size((1, sizes.heads, len(step.blocks), sizes.d))

    def attend(self, query: Tensor, mask: Mask, **setting: Any) -> Tensor:
        """Attention of every token over the pages of its own sequence.

        query (1, Hq, n, d); setting as `clearhead.attention` takes it. Returns (1, n, Hq, dv), contiguous.
        Raises MaskError for a mask that is not about causality, windows, sinks and chunks alone, ModelError
        for a bias per query and key.
        """
        if setting.get("bias") is not None:
            raise ModelError(
                "this model adds a bias per query and key, which a row of many sequences has no place for"
            )
        pool = self.step.pool
        out = query.new_empty(1, query.shape[2], query.shape[1], pool.layers[self.layer].dv)
        bare = self.step.bare(mask)
        for part in self.step.parts:
            keys, values = pages_of(part.pages, pool, self.layer)
            rows = slice(part.first, part.stop)
            single = len(part.pages.lengths) == 1
            q = query[:, :, rows] if single else query[0, :, rows].transpose(0, 1)[:, :, None]
            answer = attention(q, keys, values, mask=bare, observe=part.asked, **setting)
            if part.asked:
                answer, seen = answer
                if part.seen is not None:
                    part.seen(self.layer, seen)
            out[0, rows] = answer[0].transpose(0, 1) if single else answer[:, :, 0]
        return out
