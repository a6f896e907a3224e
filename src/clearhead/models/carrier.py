"""The mask function: transformers asks for a mask, and gets a description that its models pass on untouched.

Models hand a mask that they did not make themselves to the attention function as it is, if it is a tensor or
a `BlockMask` with four axes. So the description travels in a subclass of BlockMask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from clearhead.errors import ModelError
from clearhead.mask import Mask
from clearhead.models.decode import Frame, decode


class CarriedMask(BlockMask):
    """A `Mask` on its way through a model: shape (B, 1, Lq, Lk), and nothing of that size in memory."""

    ndim = 4  # some models look at it before they pass a mask on

    def __init__(self, shape: tuple[int, int, int, int], mask: Mask) -> None:
        # Not BlockMask's own __init__: there are no blocks here.
        self._shape = shape
        self.mask = mask

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the dense mask would have, (B, 1, Lq, Lk)."""
        return self._shape

    def size(self, axis: int | None = None) -> Any:
        """The shape, or one axis of it, as a tensor would answer."""
        return self._shape if axis is None else self._shape[axis]

    def dim(self) -> int:
        """4."""
        return 4

    def to(self, *args: Any, **kwargs: Any) -> CarriedMask:
        """Return itself: the description moves to the device of the query when it is evaluated."""
        return self

    def contiguous(self) -> CarriedMask:
        """Return itself."""
        return self

    def __repr__(self) -> str:
        return f"CarriedMask({self._shape}, {self.mask!r})"

    __str__ = __repr__

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            "this model's code takes the attention mask apart (indexing, arithmetic or a dense form), but "
            'with attn_implementation="clearhead" a mask is a description: the model does not use '
            "transformers' AttentionInterface as it is meant, use it with "
            'attn_implementation="eager"'
        )

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = _refuse
    to_dense = masked_fill = bool = logical_not = unsqueeze = expand = numel = sparsity = _refuse


def mask_function(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> CarriedMask:
    """Return the mask of one forward (and one kind of layer) as a description; never None.

    The arguments are those that transformers passes to every mask function, all by keyword: sizes, the
    position of the first query and key, the mask as a closure over positions, and attention_mask, (B, all
    tokens so far) booleans, True where a token is real; positions beyond its end count as masked.
    q_offset may be a tensor that a static cache changes later in place: its value is taken now.

    Where the closure cannot be read (`decode`), or under torch.compile, which cannot look into closures, the
    dense booleans of transformers' own `sdpa_mask` travel instead.

    Source: transformers.masking_utils.AttentionMaskInterface, release 5.24.
    """
    shape = (batch_size, 1, q_length, kv_length)
    described: Mask | None = None
    frame = Frame(q_length, kv_length, int(q_offset), int(kv_offset))
    if not torch.compiler.is_compiling():
        described = decode(mask_function, frame)
    if described is not None:
        return CarriedMask(shape, _with_padding(described, attention_mask, frame))
    from transformers.masking_utils import sdpa_mask  # transformers is what called: it is loaded

    arguments = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    dense = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **arguments,
    )
    return CarriedMask(shape, Mask(dense=dense, offset=frame.q_offset, key_offset=frame.kv_offset))


def _with_padding(mask: Mask, attention_mask: Tensor | None, frame: Frame) -> Mask:
    """Add the real keys out of (B, all tokens so far), unless that hides nothing."""
    if attention_mask is None:
        return mask
    real = attention_mask[:, frame.kv_offset : frame.kv_offset + frame.kv_length].bool()
    ahead = frame.kv_length  # keys from here on are hidden already
    if mask.causal and mask.blocks is None and mask.prefix is None:
        ahead = min(ahead, frame.q_offset + frame.q_length - frame.kv_offset)
    if real.shape[1] >= ahead and bool(real[:, :ahead].all()):
        return mask
    missing = frame.kv_length - real.shape[1]
    if missing > 0:
        real = torch.nn.functional.pad(real, (0, missing))
    return mask & Mask(padding=real)
