"""Attention by torch's fused kernels, with everything they leave out done tile by tile.

The fused kernel runs where the mask is nothing or plainly causal (`_fused`); windows, packed documents,
biases, softcaps and the like go through `tiles`, which is linear in memory too. Both give the log-sum-exp, so
observations never change which kernel computes the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from clearhead.backends import tiles
from clearhead.backends.base import Request, Result, own_precision
from clearhead.errors import BackendError
from clearhead.observables import Observable

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Sdpa:
    """torch's fused kernels, completed."""

    name = "sdpa"

    def supports(self, request: Request) -> str | None:
        """Everything."""
        return None

    def forward(self, request: Request) -> Result:
        """Return out and lse; gradients to q, k, v, bias and sink_logits come from one backward."""
        inputs = (request.q, request.k, request.v, request.bias, request.sink_logits)
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        with own_precision(request):
            if wanted:
                out, lse = _Attention.apply(request, *inputs)  # type: ignore[no-untyped-call]
            else:
                out, lse = _forward(request)
        return Result(out, lse if request.needs_lse else None)

    @torch.no_grad()
    def observe(self, request: Request, result: Result, observables: Sequence[Observable]) -> tuple[Any, ...]:
        """Answer from tiles of exact weights, exp(scores - lse)."""
        assert result.lse is not None
        with own_precision(request):
            return tiles.observe(request, result.lse, observables)


def _fused(request: Request) -> bool:
    """True if torch's own kernel computes this request, with its log-sum-exp, in linear memory."""
    s, seen = request.shape, request.visibility
    plain = request.softcap is None and request.bias is None and not request.dropout and s.d == s.dv
    plain &= request.scale > 0  # it scales -inf after masking: NaN for 0, +inf below (torch 2.13)
    unit = all(t.stride(-1) == 1 for t in (request.q, request.k, request.v))  # what the kernel reads
    return plain and unit and request.q.device.type == "cpu" and (seen.plain_causal or seen.everything)


def _forward(request: Request) -> tuple[Tensor, Tensor]:
    if not _fused(request):
        return tiles.forward(request)
    causal = not request.visibility.everything
    out, lse = _FLASH(request.q, request.k, request.v, 0.0, causal, scale=request.scale)
    if request.sink_logits is not None:
        sink = request.sink_logits.detach().to(lse).view(1, -1, 1)
        share = torch.sigmoid(lse - sink)  # what the keys keep of the weight: e^lse / (e^lse + e^sink)
        out = out * share[..., None].to(out.dtype)
        lse = torch.logaddexp(lse, sink)
    return out, lse


class _Attention(Function):
    """`_forward` with a backward: torch's own where it ran and only `out` is differentiated, else tiles."""

    @staticmethod
    def forward(
        ctx: Any, request: Request, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(request)
        # The tensors go through save_for_backward alone: checkpointing must be able to let go of them.
        nothing = q.new_empty(0)
        ctx.request = replace(request, q=nothing, k=nothing, v=nothing, bias=None, sink_logits=None)
        ctx.save_for_backward(q, k, v, bias, sink, out, lse)
        ctx.versions = _versions(request)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise BackendError(
                "sdpa: second derivatives are not supported (create_graph=True); use backend='reference'"
            )
        if ctx.versions != _versions(ctx.request):
            raise BackendError(
                "sdpa: the dense mask was changed in place between forward and backward; give a copy"
            )
        q, k, v, bias, sink, out, lse = ctx.saved_tensors
        request: Request = replace(ctx.request, q=q, k=k, v=v, bias=bias, sink_logits=sink)
        if grad_out is None and grad_lse is None:
            return (None,) * 6
        if _fused(request) and grad_lse is None and request.sink_logits is None:
            causal = not request.visibility.everything
            grads = _FLASH_BACKWARD(grad_out, q, k, v, out, lse, 0.0, causal, scale=request.scale)
            return (None, *grads, None, None)
        with own_precision(request):
            return (None, *tiles.backward(request, out, lse, grad_out, grad_lse))


def _versions(request: Request) -> list[int]:
    """How often the user's dense masks have been changed in place (inference tensors do not count)."""
    mask = request.visibility.mask
    dense = [part.dense for part in (mask, *mask.also) if part.dense is not None]
    return [tensor._version for tensor in dense if not tensor.is_inference()]
