"""The call as one operator of torch.library: what torch.compile and torch.export see of `attention`.

`clearhead::attention` and `clearhead::attention_backward` take tensors and numbers only; a mask travels as
both (`packed`) and is put together again inside. The operator checks nothing and chooses a backend as
`attention` does. In eager mode nobody comes here: a dispatch through torch costs more than a small call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from clearhead.backends import registry, tiles
from clearhead.backends.base import Request, own_precision
from clearhead.bias import Distances
from clearhead.mask import Mask
from clearhead.shapes import Shape, compute_dtype
from clearhead.visibility import Visibility

_FIELDS = tuple(f.name for f in fields(Mask))
_NONE, _NUMBER, _TENSOR, _TUPLE, _MASK, _LEFT, _RIGHT = range(7)


def packed(mask: Mask) -> tuple[list[int], list[Tensor]]:
    """Return a mask as numbers and tensors. No value is looked at, so that it can be traced."""
    numbers: list[int] = []
    tensors: list[Tensor] = []
    _pack(mask, numbers, tensors)
    return numbers, tensors


def _pack(value: Any, numbers: list[int], tensors: list[Tensor]) -> None:
    if value is None:
        numbers.append(_NONE)
    elif isinstance(value, Tensor):
        numbers.append(_TENSOR)
        tensors.append(value)
    elif isinstance(value, Mask):
        numbers.append(_MASK)
        for name in _FIELDS:
            _pack(getattr(value, name), numbers, tensors)
    elif isinstance(value, tuple):
        numbers.extend((_TUPLE, len(value)))
        for part in value:
            _pack(part, numbers, tensors)
    elif isinstance(value, str):
        numbers.append(_LEFT if value == "left" else _RIGHT)
    else:
        numbers.extend((_NUMBER, int(value) if isinstance(value, bool) else value))


def unpacked(numbers: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """Return the mask that `packed` took apart."""
    if not tensors:
        return _known(tuple(numbers))
    mask: Mask = _unpack(iter(numbers), iter(tensors))
    return mask


@lru_cache(maxsize=64)
def _known(numbers: tuple[int, ...]) -> Mask:
    """The same mask for the same numbers, so that all layers share what is worked out from it."""
    mask: Mask = _unpack(iter(numbers), iter(()))
    return mask


def _unpack(numbers: Any, tensors: Any) -> Any:
    kind = next(numbers)
    if kind == _NONE:
        return None
    if kind == _NUMBER:
        return next(numbers)
    if kind == _TENSOR:
        return next(tensors)
    if kind == _TUPLE:
        return tuple(_unpack(numbers, tensors) for _ in range(next(numbers)))
    if kind == _MASK:
        mask = object.__new__(Mask)  # its fields have been checked where it was made
        for name in _FIELDS:
            value = _unpack(numbers, tensors)
            object.__setattr__(mask, name, bool(value) if name == "causal" else value)
        return mask
    return "left" if kind == _LEFT else "right"


# ---------------------------------------------------------------------- the operators


def _request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: tuple[Tensor | None, ...],
    first_distance: int,
    mask: Mask,
    scale: float,
    softcap: float,
) -> Request:
    """extras: bias, sink_logits, by_distance."""
    bias, sink_logits, by_distance = extras
    (B, Hq, Lq, d), (Hkv, Lk), dv = q.shape, k.shape[1:3], v.shape[3]
    visibility = Visibility.of(mask, B, Hq, Lq, Lk, q.device)
    return Request(
        q,
        k,
        v,
        Shape(B, Hq, Hkv, Lq, Lk, d, dv),
        visibility,
        scale,
        softcap or None,
        bias,
        sink_logits,
        needs_lse=True,
        relative=None if by_distance is None else Distances(by_distance, first_distance),
    )


@torch.library.custom_op("clearhead::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    by_distance: Tensor | None,
    mask_tensors: Sequence[Tensor],
    mask_numbers: Sequence[int],
    first_distance: int,
    scale: float,
    softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return out (B, Hq, Lq, dv) and lse (B, Hq, Lq), contiguous. softcap 0: none; backend "": chosen."""
    with torch.no_grad():
        mask = unpacked(mask_numbers, mask_tensors)
        request = _request(q, k, v, (bias, sink_logits, by_distance), first_distance, mask, scale, softcap)
        out, lse, _ = registry.choose(request, backend or None).forward(request)
        assert lse is not None
        return out.contiguous(), lse.contiguous()


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    by_distance: Tensor | None,
    mask_tensors: Sequence[Tensor],
    mask_numbers: Sequence[int],
    first_distance: int,
    scale: float,
    softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    B, Hq, Lq, _ = q.shape
    return q.new_empty(B, Hq, Lq, v.shape[3]), q.new_empty(B, Hq, Lq, dtype=compute_dtype(q.dtype))


@torch.library.custom_op("clearhead::attention_backward", mutates_args=())
def attention_backward_op(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    by_distance: Tensor | None,
    mask_tensors: Sequence[Tensor],
    mask_numbers: Sequence[int],
    first_distance: int,
    scale: float,
    softcap: float,
    backend: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients of q, k, v, bias, sink_logits and by_distance.

    wanted: whether the last three are; those that are not, or whose input is not there, are empty.
    """
    with torch.no_grad():
        extras = tuple(
            t.detach().requires_grad_() if t is not None and want else t
            for t, want in zip((bias, sink_logits, by_distance), wanted, strict=True)
        )
        mask = unpacked(mask_numbers, mask_tensors)
        request = _request(q, k, v, extras, first_distance, mask, scale, softcap)
        chosen = registry.choose(request, backend or None)
        gradients = getattr(chosen, "gradients", tiles.backward)
        with own_precision(request):
            found = gradients(request, out, lse, grad_out, grad_lse)
        return [q.new_empty(0) if grad is None else grad.contiguous() for grad in found]


@attention_backward_op.register_fake
def _(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    by_distance: Tensor | None,
    mask_tensors: Sequence[Tensor],
    mask_numbers: Sequence[int],
    first_distance: int,
    scale: float,
    softcap: float,
    backend: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    grads = [t.new_empty(t.shape) for t in (q, k, v)]
    for tensor, want in zip((bias, sink_logits, by_distance), wanted, strict=True):
        grads.append(q.new_empty(0) if tensor is None or not want else tensor.new_empty(tensor.shape))
    return grads


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, sink_logits, by_distance, mask_tensors, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, bias, sink_logits, by_distance, *output, *mask_tensors)
    ctx.wanted = ctx.needs_input_grad[3:6]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, bias, sink_logits, by_distance, out, lse, *mask_tensors = ctx.saved_tensors
    nothing = (None,) * len(ctx.settings)
    none_of_mask = [None] * len(mask_tensors)
    if grad_out is None and grad_lse is None:
        return (None,) * 6 + (none_of_mask, *nothing)
    wanted = [bool(want) for want in ctx.wanted]
    grads = attention_backward_op(
        grad_out,
        grad_lse,
        out,
        lse,
        q,
        k,
        v,
        bias,
        sink_logits,
        by_distance,
        mask_tensors,
        *ctx.settings,
        wanted,
    )
    extras = (grad if want else None for grad, want in zip(grads[3:], wanted, strict=True))
    return (*grads[:3], *extras, none_of_mask, *nothing)


attention_op.register_autograd(_backward, setup_context=_setup)


# ---------------------------------------------------------------------- for the front door


def traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    by_distance: tuple[Tensor, int] | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a call by way of the operator."""
    numbers, tensors = packed(mask)
    values, first = (None, 0) if by_distance is None else by_distance
    out, lse = attention_op(
        q,
        k,
        v,
        bias,
        sink_logits,
        values,
        tensors,
        numbers,
        first,
        scale,
        softcap or 0.0,
        backend or "",
    )
    return out, lse


def hidden_by_additive(mask: Tensor, floor: torch.dtype) -> Tensor:
    """An additive mask as a bias: -inf where it says -inf or the lowest number of its dtype or of `floor`."""
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(floor).min)
    return mask.masked_fill(mask.detach() <= lowest, -math.inf)
