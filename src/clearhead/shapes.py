"""The axes of attention and the checks on them.

B batch, Hq query heads, Hkv key/value heads, Lq queries, Lk keys, d head size of queries and keys, dv head
size of values. Everything that is wrong with a tensor's rank, size, dtype or device is found here, before
any work is done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ArgumentError, DeviceError, DTypeError, ShapeError

#: The dtypes that attention computes with; half types are stored as such and computed in float32.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Shape(NamedTuple):
    """The sizes of one attention call."""

    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    d: int
    dv: int


def check_qkv(q: Any, k: Any, v: Any) -> Shape:
    """Return the sizes of q (B, Hq, Lq, d), k (B, Hkv, Lk, d), v (B, Hkv, Lk, dv).

    Raises ShapeError, DTypeError or DeviceError naming the argument, what came and what is allowed.
    """
    try:  # all at once where all is well: this runs in every call of every layer
        (B, Hq, Lq, d), (Bk, Hkv, Lk, dk), (Bv, Hv, Lv, dv) = q.shape, k.shape, v.shape
        dtype, device = q.dtype, q.device
        if (
            B == Bk == Bv > 0
            and Hkv == Hv > 0 == Hq % Hkv
            and Lk == Lv > 0
            and d == dk > 0
            and Hq > 0
            and Lq > 0
            and dv > 0
            and dtype is k.dtype
            and dtype is v.dtype
            and dtype in DTYPES
            and device == k.device
            and device == v.device
            and isinstance(q, Tensor)
            and isinstance(k, Tensor)
            and isinstance(v, Tensor)
        ):
            return tuple.__new__(Shape, (B, Hq, Hkv, Lq, Lk, d, dv))  # half the time of Shape(...)
    except (AttributeError, TypeError, ValueError):
        pass
    return _named(q, k, v)


def _named(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """The same checks one by one, to say which one fails."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim != 4:
            raise ShapeError(f"{name} must have shape (B, H, L, d), got {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise DTypeError(f"{name} has dtype {tensor.dtype}, allowed are {allowed}")
        if tensor.dtype != q.dtype:
            raise DTypeError(f"q has dtype {q.dtype} and {name} {tensor.dtype}: they must be the same")
        if tensor.device != q.device:
            raise DeviceError(f"q is on {q.device} and {name} on {tensor.device}: they must be the same")
        if 0 in tensor.shape:
            raise ShapeError(f"{name} is empty, shape {tuple(tensor.shape)}: every axis must be at least 1")
    (B, Hq, Lq, d), (_, Hkv, Lk, _), dv = q.shape, k.shape, v.shape[3]
    if k.shape[0] != B or v.shape[0] != B:
        raise ShapeError(
            f"q, k and v have batches of {B}, {k.shape[0]} and {v.shape[0]}: they must be the same"
        )
    if k.shape[3] != d:
        raise ShapeError(f"q has head size {d} and k {k.shape[3]}: they must be the same ({_shapes(q, k)})")
    if v.shape[1:3] != k.shape[1:3]:
        raise ShapeError(f"k and v must have the same heads and length ({_shapes(k, v, names='kv')})")
    if Hq % Hkv:
        raise ShapeError(
            f"q has {Hq} heads and k {Hkv}: query heads must be a multiple of key heads ({_shapes(q, k)})"
        )
    return Shape(B, Hq, Hkv, Lq, Lk, d, dv)


def check_bias(bias: Tensor, shape: Shape, q: Tensor) -> Tensor:
    """Return `bias` as a view (B | 1, Hq | 1, Lq | 1, Lk | 1); it must be floating and on q's device.

    Raises ShapeError, DTypeError or DeviceError, and ArgumentError for NaN and +inf.
    """
    want = (shape.B, shape.Hq, shape.Lq, shape.Lk)
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        what = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise DTypeError(f"bias must be a floating-point tensor, got {what}; booleans go to mask=")
    if bias.device != q.device:
        raise DeviceError(f"q is on {q.device} and bias on {bias.device}: they must be the same")
    padded = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)) if bias.ndim <= 4 else bias
    if padded.ndim != 4 or any(h not in (1, w) for h, w in zip(padded.shape, want, strict=True)):
        raise ShapeError(f"bias must broadcast to (B, Hq, Lq, Lk) = {want}, got shape {tuple(bias.shape)}")
    padded = unexpanded(padded)
    if not torch.compiler.is_compiling() and not bool((padded.detach() < torch.inf).all()):
        raise ArgumentError("bias holds NaN or +inf; allowed are -inf and numbers")
    return padded


def unexpanded(tensor: Tensor) -> Tensor:
    """The tensor with its expanded axes (stride 0) cut to size 1: what broadcasts needs no n × n memory."""
    for axis in range(tensor.ndim):
        if tensor.stride(axis) == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def check_sink_logits(sink_logits: Tensor, shape: Shape, q: Tensor) -> Tensor:
    """Return learned sink logits, (Hq,), one extra logit per head.

    Raises ShapeError, DTypeError or DeviceError.
    """
    if not isinstance(sink_logits, Tensor) or not sink_logits.is_floating_point():
        what = sink_logits.dtype if isinstance(sink_logits, Tensor) else type(sink_logits).__name__
        raise DTypeError(f"sink_logits must be a floating-point tensor, got {what}")
    if tuple(sink_logits.shape) != (shape.Hq,):
        raise ShapeError(f"sink_logits must have shape ({shape.Hq},), got {tuple(sink_logits.shape)}")
    if sink_logits.device != q.device:
        raise DeviceError(
            f"q is on {q.device} and sink_logits on {sink_logits.device}: they must be the same"
        )
    if not torch.compiler.is_compiling() and not bool((sink_logits.detach() < torch.inf).all()):
        raise ArgumentError(f"sink_logits must be numbers or -inf, got {sink_logits.detach().tolist()}")
    return sink_logits


def _shapes(a: Tensor, b: Tensor, names: str = "qk") -> str:
    return f"{names[0]} is {tuple(a.shape)}, {names[1]} {tuple(b.shape)}"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, weights and statistics: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
