"""Attention as the formula has it, in float64, with everything written down. The oracle for all others.

    Attention(Q, K, V) = softmax(Q Kᵀ / √d_k) V                      (Vaswani et al. 2017, equation 1)

The four steps are four functions. It refuses to be fast or frugal: n × n weights exist here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.backends.base import Request, Result, own_precision
from clearhead.errors import SizeError
from clearhead.observables import Observable, Setting

#: More float64 weights than this (8 GiB) are refused.
WEIGHTS_LIMIT = 2**30


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Step 1, how well each query fits each key: Q Kᵀ.

    q (B, Hq, Lq, d), k (B, Hq, Lk, d) -> (B, Hq, Lq, Lk).
    """
    return q @ k.transpose(-2, -1)


def scaled(scores: Tensor, scale: float, softcap: float | None = None, bias: Tensor | None = None) -> Tensor:
    """Step 2, keep the scores in a range where the softmax still listens: scores · scale (1/√d_k).

    softcap: c · tanh(s / c) after scaling (Gemma 2). bias: added last (T5, ALiBi).
    """
    scores = scores * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores if bias is None else scores + bias


def softmax(
    scores: Tensor, visible: Tensor | None = None, sink_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Step 3, turn each row of scores into weights that add up to 1: exp(s) / Σ exp(s), hidden keys left out.

    visible: booleans that broadcast to the scores, True = may look. sink_logits: (Hq,), one more term in the
    sum of each head, which takes weight and has no value (gpt-oss).
    Returns weights (B, Hq, Lq, Lk) and the logarithm of the sum, lse (B, Hq, Lq). A row that sees nothing has
    weights 0 and lse -inf (or the sink's logit).
    """
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    peak = scores.detach().amax(-1, keepdim=True)
    if sink_logits is not None:
        sink = sink_logits[:, None, None].to(scores.dtype)
        peak = torch.maximum(peak, sink.detach())
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    terms = (scores - peak).exp()
    total = terms.sum(-1, keepdim=True)
    if sink_logits is not None:
        total = total + (sink - peak).exp()
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    lse = (safe.log() + peak).masked_fill(empty, -torch.inf)
    return terms / safe, lse.squeeze(-1)


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """Step 4, mix the values in these proportions: P V.

    weights (B, Hq, Lq, Lk), v (B, Hq, Lk, dv) -> (B, Hq, Lq, dv).
    """
    return weights @ v


def attention_weights(request: Request) -> tuple[Tensor, Tensor]:
    """Steps 1 to 3 for a request: weights (B, Hq, Lq, Lk) and lse (B, Hq, Lq), float64.

    Raises SizeError when the weights would take more than 8 GiB.
    """
    s = request.shape
    if s.B * s.Hq * s.Lq * s.Lk > WEIGHTS_LIMIT:
        raise SizeError(
            f"the reference backend writes down all {s.B} x {s.Hq} x {s.Lq} x {s.Lk} weights, more than "
            f"{WEIGHTS_LIMIT}: use another backend, or fewer tokens"
        )
    group = s.Hq // s.Hkv
    q, k = request.q.double(), request.k.double().repeat_interleave(group, dim=1)
    bias = None if request.bias is None else request.bias.double()
    if request.relative is not None:
        seen = request.visibility
        by_distance = request.relative.tile(seen.query_positions, seen.key_positions).double()
        bias = by_distance if bias is None else bias + by_distance
    fit = scaled(scores(q, k), request.scale, request.softcap, bias)
    visible = request.visibility.tile(slice(0, s.Lq), slice(0, s.Lk))
    return softmax(fit, visible, request.sink_logits)


class Reference:
    """The float64 oracle."""

    name = "reference"

    def supports(self, request: Request) -> str | None:
        """Everything, at sizes whose n × n weights fit (`attention_weights`)."""
        return None

    def forward(self, request: Request) -> Result:
        """The four steps. Dropout, where asked for, falls on the weights."""
        with own_precision(request):
            return self._forward(request)

    def _forward(self, request: Request) -> Result:
        weights, lse = attention_weights(request)
        if request.dropout:
            generator = torch.Generator(weights.device).manual_seed(request.seed)
            kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= request.dropout
            weights = weights * kept / (1 - request.dropout)
        group = request.shape.Hq // request.shape.Hkv
        out = weighted_sum(weights, request.v.double().repeat_interleave(group, dim=1))
        wide = torch.float64 if request.q.dtype == torch.float64 else torch.float32
        return Result(out.to(request.q.dtype), lse.to(wide) if request.needs_lse else None)

    @torch.no_grad()
    def observe(self, request: Request, result: Result, observables: Sequence[Observable]) -> tuple[Any, ...]:
        """Each observable's own definition on the full float64 weights."""
        with own_precision(request):
            weights, _ = attention_weights(request)
            return tuple(self._answer(o, weights, request.setting(o)) for o in observables)

    def _answer(self, observable: Observable, weights: Tensor, setting: Setting) -> Any:
        answer = observable.definition(weights[:, :, setting.queries], _widened(setting))
        return _cast(answer, setting.dtype)


def _widened(setting: Setting) -> Setting:
    """The same call with float64 tensors, so that an observable works in float64 too."""
    q, k, v = setting.q.double(), setting.k.double(), setting.v.double()
    return Setting(q, k, v, setting.shape, setting.visibility, setting.queries)


def _cast(answer: Any, dtype: torch.dtype) -> Any:
    if isinstance(answer, Tensor):
        return answer.to(dtype) if answer.is_floating_point() else answer
    if isinstance(answer, tuple) and hasattr(answer, "_fields"):
        return type(answer)(*(_cast(part, dtype) for part in answer))
    return answer
