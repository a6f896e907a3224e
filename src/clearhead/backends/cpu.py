"""Attention by the compiled core: tiled, vectorised, with the observables answered in the same pass.

This module turns requests into calls of `clearhead._core` and decides which requests it can take. The kernels
themselves are under csrc/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.backends import flatten, native, questions, tiles
from clearhead.backends.base import Request, Result, own_precision
from clearhead.backends.differentiable import differentiable
from clearhead.observables import MeanDistance, Observable

Asked = tuple[questions.Question | None, ...]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Cpu:
    """The compiled core."""

    name = "cpu"

    def supports(self, request: Request) -> str | None:
        """float32, bfloat16 and float16 on the CPU, everything but dropout."""
        if native.core() is None:
            return native.why_not()
        if request.q.device.type != "cpu":
            return f"{request.q.device} is not supported (the CPU is); use backend='sdpa'"
        if request.q.dtype not in DTYPES:
            kind = str(request.q.dtype).removeprefix("torch.")
            return f"{kind} is not supported (float32, bfloat16 and float16 are); use backend='sdpa'"
        if request.dropout:
            return "dropout is not supported; use backend='sdpa'"
        return None

    def forward(self, request: Request) -> Result:
        """Return out, lse and the answers to all observables that the core knows."""
        asked = tuple(questions.ask(request, observable) for observable in request.observe)
        with own_precision(request):
            if request.carries_gradient:
                out, lse = differentiable(_Pass(asked), request)
            else:
                out, lse = _run(request, asked)
        seen = tuple(None if question is None else question.result() for question in asked)
        return Result(out, lse if request.needs_lse else None, seen)

    @torch.no_grad()
    def observe(self, request: Request, result: Result, observables: Sequence[Observable]) -> tuple[Any, ...]:
        """Answer what the core has no question for (observables of a user's own) from tiles."""
        assert result.lse is not None
        with own_precision(request):
            return tiles.observe(request, result.lse, observables)


class _Pass:
    """The two passes of one call."""

    name = "cpu"

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    def compute(self, request: Request) -> tuple[Tensor, Tensor]:
        """Return out and lse, without gradients."""
        return _run(request, self.asked)

    def gradients(
        self, request: Request, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tiles.Gradients:
        """Return the gradients of q, k and v from the core; of biases and sinks from tiles."""
        return tiles.backward(request, out, lse, grad_out, grad_lse)


def _run(request: Request, asked: Asked) -> tuple[Tensor, Tensor]:
    s, q = request.shape, request.q
    core = native.core()
    assert core is not None
    out = torch.empty(s.B, s.Hq, s.Lq, s.dv, dtype=q.dtype)
    lse = torch.empty(s.B, s.Hq, s.Lq, dtype=torch.float32)
    bias, sink = _as_read(request.bias), _as_read(request.sink_logits, torch.float32)
    values = None if request.relative is None else _as_read(request.relative.values, torch.float32)
    positions = request.relative is not None or any(isinstance(o, MeanDistance) for o in request.observe)
    core.forward(
        (s.B, s.Hq, s.Hkv, s.Lq, s.Lk, s.d, s.dv),
        flatten.rows(q),
        flatten.rows(request.k),
        flatten.rows(request.v),
        flatten.mask(request.visibility, positions=positions),
        request.scale,
        request.softcap or 0.0,
        flatten.bias(bias),
        None
        if values is None or request.relative is None
        else flatten.relative(values, request.relative.first),
        0 if sink is None else sink.data_ptr(),
        (out.data_ptr(), flatten.TYPES[q.dtype], *out.stride()[:3]),
        lse.data_ptr(),
        tuple(question.flat for question in asked if question is not None) or None,
        torch.get_num_threads(),
    )
    return out, lse


def _as_read(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """A small operand in a type that the core reads; biases of q's size are read as they are."""
    if tensor is None:
        return None
    if dtype is None:
        return tensor if tensor.dtype in flatten.TYPES else tensor.float()
    return tensor.detach().to(dtype).contiguous()
