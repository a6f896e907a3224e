"""Read transformers' mask functions back into a `Mask`.

transformers describes a mask as a closure f(batch, head, query, key) -> bool, put together from a few known
parts (transformers.masking_utils, release 5.24). Each part is recognised by the name under which it was made
and by its free variables; it is never evaluated. What is not recognised, or cannot be said by a `Mask`, is
answered with None, and the caller takes the dense booleans: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.mask import Mask

MaskFunction = Callable[..., Any]


class Frame(NamedTuple):
    """Where the queries and keys of one mask are: query i at q_offset + i, key j at kv_offset + j."""

    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int


class Packing(NamedTuple):
    """Packed documents: each token's document and its position in it, (B, L) each."""

    documents: Tensor
    positions: Tensor | None


def decode(mask_function: MaskFunction, frame: Frame) -> Mask | None:
    """Return the description of `mask_function` in this frame, or None where there is no exact one.

    The result carries offset=q_offset and key_offset=kv_offset. Padding is no part of the function.
    """
    try:
        return _Decoder(frame).node(mask_function, None)
    except ClearheadError:  # a combination that Mask refuses, such as two different windows' starts
        return None


class _Decoder:
    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    def mask(self, **fields: Any) -> Mask:
        """A mask in this frame."""
        return Mask(offset=self.frame.q_offset, key_offset=self.frame.kv_offset, **fields)

    def node(self, function: MaskFunction, packing: Packing | None) -> Mask | None:
        part = _PARTS.get(_origin(function))
        return None if part is None else part(self, _free_variables(function), packing)

    # ------------------------------------------------------------------ one method per kind of part

    def causal(self, free: dict[str, Any], packing: Packing | None) -> Mask | None:
        return self.mask(causal=True)

    def bidirectional(self, free: dict[str, Any], packing: Packing | None) -> Mask | None:
        return self.mask()

    def conjunction(self, free: dict[str, Any], packing: Packing | None) -> Mask | None:
        functions = free["mask_functions"]
        for function in functions:  # documents first: they tell the other parts how to count
            if _origin(function) == _PACKED:
                documents = _free_variables(function)["packed_sequence_mask"]
                packing = Packing(documents, _positions(functions))
        return _all(self.node(function, packing) for function in functions)

    def union(self, free: dict[str, Any], packing: Packing | None) -> Mask | None:
        blocks = [f for f in free["mask_functions"] if _origin(f) == _BLOCKWISE]
        others = [f for f in free["mask_functions"] if _origin(f) != _BLOCKWISE]
        if len(blocks) != 1 or len(others) != 1:
            return None
        base = self.node(others[0], packing)
        if base is None or base.is_trivial:
            return base
        ids = _free_variables(blocks[0])["block_sequence_ids"]
        window = base.window
        if base != self.mask(causal=True, window=window):
            return None
        # (causal and window) or block  =  (causal or block) and window, if no block is longer than the window
        if window is not None and (window[0] is None or _longest(ids) > window[0] + 1):
            return None
        pair = self.at(ids)
        return None if pair is None else self.mask(causal=True, window=window, blocks=pair)

    def window_behind(self, free: dict[str, Any], packing: Packing | None) -> Mask | None:
        size = int(free["sliding_window"])  # k > q - size
        return self.mask(window=(size - 1, None)) if size >= 1 else None

    def window_around(self, free: dict[str, Any], packing: Packing | None) -> Mask | None:
        size = int(free["sliding_window"])  # |q - k| <= size
        return self.mask(window=(size, size)) if size >= 0 else None

    def chunk(self, free: dict[str, Any], packing: Packing | None) -> Mask | None:
        size, start = int(free["chunk_size"]), free["left_padding"]
        padded = bool((start != 0).any())
        if packing is None:
            return self.mask(chunk=size, start=start if padded else 0)
        if padded or packing.positions is None or not _count_from_zero(packing):
            return None
        return self.mask(chunk=size)  # counted from the first token of each document

    def packed(self, free: dict[str, Any], packing: Packing | None) -> Mask | None:
        pair = self.at(free["packed_sequence_mask"])
        return None if pair is None else self.mask(documents=pair)

    def remapped(self, free: dict[str, Any], packing: Packing | None) -> Mask | None:
        # Inside a document positions rise by one, so differences of positions are differences of places;
        # between documents nothing is visible. So the remapping can be left out, if both of this is so.
        positions = free["position_ids"]
        if packing is None or not _rise_by_one(packing.documents, positions):
            return None
        return self.node(free["mask_function"], Packing(packing.documents, positions))

    # ------------------------------------------------------------------ numbers per token

    def at(self, ids: Tensor) -> Tensor | tuple[Tensor, Tensor] | None:
        """The numbers of the queries and of the keys out of `ids` (B, all positions), None if it is short."""
        frame = self.frame
        q_end, k_end = frame.q_offset + frame.q_length, frame.kv_offset + frame.kv_length
        if ids.ndim != 2 or max(q_end, k_end) > ids.shape[1]:
            return None
        query, key = ids[:, frame.q_offset : q_end], ids[:, frame.kv_offset : k_end]
        return key if (frame.q_offset, q_end) == (frame.kv_offset, k_end) else (query, key)


def _inner(maker: str) -> str:
    return f"{maker}.<locals>.inner_mask"


_PACKED, _BLOCKWISE = _inner("packed_sequence_mask_function"), _inner("blockwise_overlay")
_REMAPPED = _inner("remap_positions_for_packed_sequence")

_PARTS: dict[str | None, Callable[[_Decoder, dict[str, Any], Packing | None], Mask | None]] = {
    "causal_mask_function": _Decoder.causal,
    "bidirectional_mask_function": _Decoder.bidirectional,
    "and_masks.<locals>.and_mask": _Decoder.conjunction,
    "or_masks.<locals>.or_mask": _Decoder.union,
    _inner("sliding_window_overlay"): _Decoder.window_behind,
    _inner("sliding_window_bidirectional_overlay"): _Decoder.window_around,
    _inner("chunked_overlay"): _Decoder.chunk,
    _PACKED: _Decoder.packed,
    _REMAPPED: _Decoder.remapped,
}


def _origin(function: MaskFunction) -> str | None:
    """The name under which transformers made this function; None for a stranger's."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return None
    return getattr(function, "__qualname__", None)


def _free_variables(function: Any) -> dict[str, Any]:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _all(masks: Any) -> Mask | None:
    found = list(masks)
    return None if any(mask is None for mask in found) else reduce(and_, found)


def _positions(functions: Any) -> Tensor | None:
    """The positions that a sibling of the packed documents counts by."""
    for function in functions:
        if _origin(function) == _REMAPPED:
            positions: Tensor = _free_variables(function)["position_ids"]
            return positions
    return None


def _rise_by_one(documents: Tensor, positions: Tensor) -> bool:
    """True if each document is one run of tokens with positions p, p + 1, p + 2 …"""
    if documents.shape[1] != positions.shape[1]:
        return False
    same = documents[:, 1:] == documents[:, :-1]
    rises = positions[:, 1:] - positions[:, :-1] == 1
    runs = documents[:, 1:] >= documents[:, :-1]
    return bool((runs & (rises | ~same)).all())


def _count_from_zero(packing: Packing) -> bool:
    """True if each document starts at position 0."""
    documents, positions = packing
    assert positions is not None
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return bool((positions.expand_as(documents)[first] == 0).all())


def _longest(ids: Tensor) -> int:
    """The most places that any block, -1 for none, spans from its first token to its last."""
    numbers = torch.unique(ids)
    slots = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    longest = 0
    for number in numbers[numbers >= 0]:
        mine = ids == number
        first = slots.masked_fill(~mine, ids.shape[1]).amin(1)
        last = slots.masked_fill(~mine, -1).amax(1)
        longest = max(longest, int((last - first + 1).max()))
    return longest
