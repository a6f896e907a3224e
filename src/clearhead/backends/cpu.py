"""Attention by the compiled core: tiled, vectorised, with the observables answered in the same pass.

This module turns requests into calls of `clearhead._core` and decides which requests it can take. The kernels
themselves are under csrc/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.backends import flatten, native, questions, tiles
from clearhead.backends.base import Request, Result, own_precision
from clearhead.backends.differentiable import differentiable
from clearhead.observables import Observable

Asked = tuple[questions.Question | None, ...]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Cpu:
    """The compiled core."""

    name = "cpu"

    def supports(self, request: Request) -> str | None:
        """float32, bfloat16 and float16 on the CPU, everything but dropout."""
        q = request.q
        forward_mode = forward_ad._current_level >= 0
        if (
            q.is_cpu
            and q.dtype in DTYPES
            and not request.dropout
            and not forward_mode
            and native.core() is not None
        ):
            return None
        if forward_mode:
            return "forward-mode derivatives are not supported; use backend='reference'"
        if native.core() is None:
            return native.why_not()
        if not q.is_cpu:
            return f"{q.device} is not supported (the CPU is); use backend='sdpa'"
        if request.dropout:
            return "dropout is not supported; use backend='sdpa'"
        kind = str(q.dtype).removeprefix("torch.")
        return f"{kind} is not supported (float32, bfloat16 and float16 are); use backend='sdpa'"

    def declines(self, request: Request) -> str | None:
        """None: it takes whatever it can."""
        return None

    def forward(self, request: Request) -> Result:
        """Return out, lse and the answers to all observables that the core knows."""
        asked = tuple(questions.ask(request, o) for o in request.observe) if request.observe else ()
        if request.carries_gradient:
            request = replace(request, keys=request.k, values=request.v)  # stored ones are written out
            with own_precision(request):
                out, lse = differentiable(_Passes(asked), request)
            return Result(out, lse if request.needs_lse else None, _answers(asked))
        return Result(*_run(request, asked, request.needs_lse), _answers(asked) if asked else ())

    def gradients(
        self, request: Request, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tiles.Gradients:
        """Return the gradients of all inputs from those of out and lse."""
        return _Passes(()).gradients(request, out, lse, grad_out, grad_lse)

    @torch.no_grad()
    def observe(self, request: Request, result: Result, observables: Sequence[Observable]) -> tuple[Any, ...]:
        """Answer what the core has no question for (observables of a user's own) from tiles."""
        assert result.lse is not None
        with own_precision(request):
            return tiles.observe(request, result.lse, observables)


class _Passes:
    """The two passes of one call, the first of which answers what was asked."""

    name = "cpu"

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    def compute(self, request: Request) -> tuple[Tensor, Tensor]:
        """Return out and lse, without gradients."""
        out, lse = _run(request, self.asked, True)
        assert lse is not None
        return out, lse

    def gradients(
        self, request: Request, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tiles.Gradients:
        """Return the gradients of q, k and v from the core; or all from tiles, if a bias wants one."""
        values = None if request.relative is None else request.relative.values
        extras = (request.bias, request.sink_logits, values)
        if any(tensor is not None and tensor.requires_grad for tensor in extras):
            return tiles.backward(request, out, lse, grad_out, grad_lse)
        return tiles.Gradients(*_run_back(request, out, lse, grad_out, grad_lse), None, None, None)


def _answers(asked: Asked) -> tuple[Any, ...]:
    return tuple(None if question is None else question.result() for question in asked)


def _run(request: Request, asked: Asked, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """One pass of the core. out lies in memory as q does where it can (models keep heads inside tokens)."""
    shape, q, k, v = request.shape, request.q, request.keys, request.values
    if isinstance(k, Tensor) and isinstance(v, Tensor):
        if q.is_neg() or k.is_neg() or v.is_neg():  # lazily negated views of complex numbers
            q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        kind = flatten.TYPES[k.dtype]
        keys, values = (k.data_ptr(), kind, *k.stride()), (v.data_ptr(), kind, *v.stride())
    else:
        q, keys, values = q.resolve_neg(), flatten.rows(k), flatten.rows(v)
    out = torch.empty_like(q) if shape.d == shape.dv else q.new_empty((*shape[:2], shape.Lq, shape.dv))
    by_batch, by_head, by_row, by_column = out.stride()
    if by_column != 1:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        by_batch, by_head, by_row, _ = out.stride()
    lse = torch.empty(shape.B, shape.Hq, shape.Lq) if with_lse else None
    plain = request.bias is None and request.relative is None and request.sink_logits is None
    bias, relative, sink, held = _NOTHING if plain else _extras(request)
    kind = flatten.TYPES[q.dtype]
    asks = tuple(question.flat for question in asked if question is not None) if asked else None
    core = native.core()
    assert core is not None
    core.forward(
        shape,
        (q.data_ptr(), kind, *q.stride()),
        keys,
        values,
        flatten.mask(request.visibility, positions=relative is not None or asks is not None),
        request.scale,
        request.softcap or 0.0,
        bias,
        relative,
        sink,
        (out.data_ptr(), kind, by_batch, by_head, by_row),
        0 if lse is None else lse.data_ptr(),
        asks,
        torch.get_num_threads(),
    )
    del held  # only now may the memory go that the addresses above point to
    return out, lse


def _run_back(
    request: Request, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass of the core: the gradients of q, k and v, in their dtypes."""
    shape = request.shape
    q, k, v = (t.detach().resolve_neg() for t in (request.q, request.k, request.v))
    dq, dk, dv = (torch.empty(t.shape, dtype=torch.float32) for t in (q, k, v))
    out, lse = out.resolve_neg(), lse.contiguous()
    if grad_out is not None:
        grad_out = grad_out.to(out.dtype).resolve_neg()
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float32).contiguous().resolve_neg()
    bias, relative, sink, held = _extras(request)
    core = native.core()
    assert core is not None
    core.backward(
        shape,
        flatten.rows(q),
        flatten.rows(k),
        flatten.rows(v),
        flatten.mask(request.visibility, positions=relative is not None),
        request.scale,
        request.softcap or 0.0,
        bias,
        relative,
        sink,
        flatten.rows(out),
        None if grad_out is None else flatten.rows(grad_out),
        lse.data_ptr(),
        0 if grad_lse is None else grad_lse.data_ptr(),
        (dq.data_ptr(), dk.data_ptr(), dv.data_ptr()),
        torch.get_num_threads(),
    )
    del held
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


_Extras = tuple[tuple[int, ...] | None, tuple[int, int, int] | None, int, tuple[Tensor, ...]]
_NOTHING: _Extras = (None, None, 0, ())


def _extras(request: Request) -> _Extras:
    """Bias, bias by distance and sinks as the core reads them, and the tensors that must live as long."""
    bias, relative, sink = request.bias, request.relative, request.sink_logits
    held: list[Tensor] = []
    by_distance, address = None, 0
    if bias is not None:
        if bias.dtype not in flatten.TYPES or bias.is_neg():
            bias = bias.detach().float().resolve_neg()
        held.append(bias)
    if relative is not None:
        values = relative.values.detach().to(torch.float32).contiguous()
        held.append(values)
        by_distance = flatten.relative(values, relative.first)
    if sink is not None:
        sink = sink.detach().to(torch.float32).contiguous().resolve_neg()
        held.append(sink)
        address = sink.data_ptr()
    return flatten.bias(bias), by_distance, address, tuple(held)
