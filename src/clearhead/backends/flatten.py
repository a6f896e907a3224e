"""A request as the flat tuples of ints that the compiled core reads (`clearhead._core`).

Knows the layout of csrc/core/call.h and nothing of what is computed. A tuple holds addresses: whoever uses
one keeps the tensors alive that it was made from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.stored import Int8Rows, Stored
from clearhead.visibility import Fields, Visibility

#: The number of each element type in the core.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
#: `left` and `right` of a mask without a window.
NO_LIMIT = 2**63 - 1
#: Counts of tokens beyond this mean the same and are cut off here, so that adding them up cannot overflow.
LARGEST = 2**62


def rows(stored: Tensor | Stored) -> tuple[int, ...]:
    """An array (B, H, L, columns) in any layout, or stored rows as they lie."""
    if isinstance(stored, Tensor):
        return (stored.data_ptr(), TYPES[stored.dtype], *stored.stride())
    if isinstance(stored, Int8Rows):
        return (*rows(stored.values), stored.scales.data_ptr(), *stored.scales.stride())
    flat = rows(stored.pool)
    scaled = flat if isinstance(stored.pool, Int8Rows) else (*flat, 0, 0, 0, 0)
    return (*scaled, stored.table.data_ptr(), stored.table.stride(0), stored.page)


def bias(tensor: Tensor | None) -> tuple[int, ...] | None:
    """A bias (B | 1, Hq | 1, Lq | 1, Lk | 1): stride 0 along axes of size 1."""
    if tensor is None:
        return None
    return (tensor.data_ptr(), TYPES[tensor.dtype], *_broadcast(tensor))


def relative(values: Tensor, first: int) -> tuple[int, int, int]:
    """A bias by distance: values (Hq, span), contiguous, from distance `first` on."""
    return (values.data_ptr(), values.stride(0), first)


def mask(visibility: Visibility, *, positions: bool) -> tuple[Any, ...] | None:
    """A mask, worked out once for all layers; None where it hides nothing and no position matters."""
    made: tuple[Any, ...] | None = visibility.kept.get("flat")
    if made is None:
        held: list[Tensor] = []
        made = (_mask(visibility.fields, held), visibility.everything, held)
        visibility.kept["flat"] = made
    flat, bare, _ = made
    return None if bare and not positions else flat


def _mask(fields: Fields, held: list[Tensor]) -> tuple[Any, ...]:
    """One mask and, in its last place, the next; the tensors whose addresses it holds are added to `held`."""

    def address(tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        held.append(tensor)
        return tensor.data_ptr()

    def per_item(tensor: Tensor | None) -> tuple[int, int]:
        """The address of (b, …) and its stride from item to item, rows being contiguous."""
        if tensor is None:
            return 0, 0
        tensor = tensor.contiguous()
        return address(tensor), 0 if tensor.shape[0] == 1 else tensor.stride(0)

    def pair(tensors: tuple[Tensor, Tensor] | None) -> tuple[int, int, int, int]:
        query, key = (None, None) if tensors is None else tensors
        (first, first_step), (second, second_step) = per_item(query), per_item(key)
        return first, second, first_step, second_step

    dense = fields.dense
    flat: tuple[Any, ...] = (
        fields.key_offset,
        *per_item(fields.offset),
        int(fields.causal),
        *per_item(fields.prefix),
        *pair(fields.blocks),
        NO_LIMIT if fields.left is None else min(fields.left, LARGEST),
        NO_LIMIT if fields.right is None else min(fields.right, LARGEST),
        min(fields.sinks, LARGEST),
        min(fields.chunk or 0, LARGEST),
        *pair(fields.documents),
        *per_item(fields.real),
        address(fields.lengths),
        *per_item(fields.origin),
        address(dense),
        *((0, 0, 0, 0) if dense is None else _broadcast(dense)),
    )
    following = None
    for part in reversed(fields.also):
        following = (*_mask(part, held)[:-1], following)
    return (*flat, following)


def _broadcast(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor, 0 along axes of size 1."""
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
