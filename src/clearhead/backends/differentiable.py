"""One autograd function for every backend that brings its own backward: what is saved, what is refused.

It computes nothing. A backend hands over its two passes (`Passes`); gradients reach q, k, v, bias,
sink_logits and the values of a bias by distance, through out and through lse, once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from clearhead.backends.base import Request, own_precision
from clearhead.backends.tiles import Gradients
from clearhead.bias import Distances
from clearhead.errors import BackendError


class Passes(Protocol):
    """The two passes of a backend."""

    @property
    def name(self) -> str:
        """The backend's name, for messages."""

    def compute(self, request: Request) -> tuple[Tensor, Tensor]:
        """Return out and lse, without gradients."""

    def gradients(
        self, request: Request, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> Gradients:
        """Return the gradients of the inputs from those of out and lse, of which at least one is there."""


def differentiable(passes: Passes, request: Request) -> tuple[Tensor, Tensor]:
    """Return out and lse, which carry gradients to whatever in the request wants them."""
    values = None if request.relative is None else request.relative.values
    inputs = (request.q, request.k, request.v, request.bias, request.sink_logits, values)
    out, lse = _Attention.apply(passes, request, *inputs)  # type: ignore[no-untyped-call]
    return out, lse


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        passes: Passes,
        request: Request,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        values: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = passes.compute(request)
        # The tensors go through save_for_backward alone: checkpointing must be able to let go of them.
        ctx.first = None if request.relative is None else request.relative.first
        nothing = q.new_empty(0)
        ctx.request = replace(
            request,
            q=nothing,
            keys=nothing,
            values=nothing,
            bias=None,
            sink_logits=None,
            relative=None,
            observe=(),
            _k=None,
            _v=None,
        )
        ctx.save_for_backward(q, k, v, bias, sink, values, out, lse)
        ctx.passes, ctx.versions = passes, _versions(request)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise BackendError(
                f"{ctx.passes.name}: second derivatives are not supported (create_graph=True); "
                "use backend='reference'"
            )
        if ctx.versions != _versions(ctx.request):
            raise BackendError(
                f"{ctx.passes.name}: the dense mask was changed in place between forward and backward; "
                "give a copy"
            )
        q, k, v, bias, sink, values, out, lse = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return (None,) * 8
        relative = None if values is None else Distances(values, ctx.first)
        request = replace(ctx.request, q=q, keys=k, values=v, bias=bias, sink_logits=sink, relative=relative)
        with own_precision(request):
            return (None, None, *ctx.passes.gradients(request, out, lse, grad_out, grad_lse))


def _versions(request: Request) -> list[int]:
    """How often the user's dense masks have been changed in place (inference tensors do not count)."""
    mask = request.visibility.mask
    dense = [part.dense for part in (mask, *mask.also) if part.dense is not None]
    return [tensor._version for tensor in dense if not tensor.is_inference()]
