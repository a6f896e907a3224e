"""Attention by torch's fused kernels, with everything they leave out done tile by tile.

The fused kernel runs where the mask is nothing or plainly causal (`_fused`); windows, packed documents,
biases, softcaps and the like go through `tiles`, which is linear in memory too. Both give the log-sum-exp, so
observations never change which kernel computes the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.backends import tiles
from clearhead.backends.base import Request, Result, own_precision
from clearhead.backends.differentiable import differentiable
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
        """Return out and lse; gradients to all inputs come from one backward."""
        with own_precision(request):
            out, lse = differentiable(self, request) if request.carries_gradient else _forward(request)
        return Result(out, lse if request.needs_lse else None)

    def compute(self, request: Request) -> tuple[Tensor, Tensor]:
        """Return out and lse, without gradients."""
        return _forward(request)

    def gradients(
        self, request: Request, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tiles.Gradients:
        """torch's own backward where its kernel ran and only `out` is differentiated, else tiles."""
        if _fused(request) and grad_lse is None and request.sink_logits is None:
            causal = not request.visibility.everything
            q, k, v = request.q, request.k, request.v
            dq, dk, dv = _FLASH_BACKWARD(grad_out, q, k, v, out, lse, 0.0, causal, scale=request.scale)
            return tiles.Gradients(dq, dk, dv, None, None, None)
        return tiles.backward(request, out, lse, grad_out, grad_lse)

    @torch.no_grad()
    def observe(self, request: Request, result: Result, observables: Sequence[Observable]) -> tuple[Any, ...]:
        """Answer from tiles of exact weights, exp(scores - lse)."""
        assert result.lse is not None
        with own_precision(request):
            return tiles.observe(request, result.lse, observables)


def _fused(request: Request) -> bool:
    """True if torch's own kernel computes this request, with its log-sum-exp, in linear memory."""
    s, seen = request.shape, request.visibility
    plain = request.softcap is None and not tiles.has_bias(request) and not request.dropout and s.d == s.dv
    plain &= request.scale > 0  # it scales -inf after masking: NaN for 0, +inf below (torch 2.13)
    plain &= request.q.dtype == request.k.dtype == request.v.dtype  # stored bytes become float32
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
