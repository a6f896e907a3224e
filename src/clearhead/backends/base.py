"""What a backend is: one small interface, the same for ours and for a stranger's.

A backend may refuse a request, with a reason; it may never change what the request means.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from clearhead.bias import Distances
from clearhead.observables import Observable, Setting, resolve_rows
from clearhead.shapes import Shape
from clearhead.stored import Stored
from clearhead.visibility import Visibility


@dataclass(slots=True)  # not frozen: that costs two microseconds a call; nobody changes one all the same
class Request:
    """One checked attention call.

    q (B, Hq, Lq, d), k (B, Hkv, Lk, d), v (B, Hkv, Lk, dv). k and v are `keys` and `values`; what is stored
    in another way is written out when a backend first asks.
    scores = softcap(scale · q kᵀ) + bias, seen through `visibility`; sink_logits (Hq,) one extra logit per
    head that takes weight and has no value.
    bias: (B | 1, Hq | 1, Lq | 1, Lk | 1). relative: a bias by distance, in the dtype of the scores. Both are
    added. dropout: probability; `seed` makes it repeatable.
    observe: what will be asked about the weights; a backend may answer in the pass that computes the output.
    """

    q: Tensor
    keys: Tensor | Stored
    values: Tensor | Stored
    shape: Shape
    visibility: Visibility
    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    sink_logits: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    needs_lse: bool = False
    observe: tuple[Observable, ...] = ()
    relative: Distances | None = None
    _k: Tensor | None = None
    _v: Tensor | None = None

    @property
    def k(self) -> Tensor:
        """The keys, (B, Hkv, Lk, d); stored bytes as float32."""
        if isinstance(self.keys, Tensor):
            return self.keys
        if self._k is None:
            self._k = self.keys.dense()
        return self._k

    @property
    def v(self) -> Tensor:
        """The values, (B, Hkv, Lk, dv); stored bytes as float32."""
        if isinstance(self.values, Tensor):
            return self.values
        if self._v is None:
            self._v = self.values.dense()
        return self._v

    @property
    def carries_gradient(self) -> bool:
        """Whether a gradient can reach any input."""
        if not torch.is_grad_enabled():
            return False
        return (
            self.q.requires_grad
            or (isinstance(self.keys, Tensor) and self.keys.requires_grad)
            or (isinstance(self.values, Tensor) and self.values.requires_grad)
            or (self.bias is not None and self.bias.requires_grad)
            or (self.sink_logits is not None and self.sink_logits.requires_grad)
            or (self.relative is not None and self.relative.values.requires_grad)
        )

    def setting(self, observable: Observable) -> Setting:
        """The call as this observable sees it; checks its choice of rows."""
        queries = resolve_rows(observable.rows, self.shape.Lq, self.q.device)
        return Setting(self.q, self.k, self.v, self.shape, self.visibility, queries)


def own_precision(request: Request) -> AbstractContextManager[Any]:
    """A context in which autocast does not lower the precision that attention is computed in.

    The inputs have the dtype that the caller (or autocast, before) gave them; from there on it is float32 or
    float64 (`compute_dtype`), whatever autocast does to matrix products around.
    """
    kind = request.q.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


class Result(NamedTuple):
    """Output, log-sum-exp, and the answers that came with the pass."""

    out: Tensor  # (B, Hq, Lq, dv), q's dtype
    lse: Tensor | None  # (B, Hq, Lq), natural logarithm, float32 or float64; None if not asked for
    seen: tuple[Any, ...] = ()  # one per item of request.observe, None: still to be asked; or ()


class Backend(Protocol):
    """Computes attention and answers observables.

    It may also have `declines(request) -> str | None`: the reason why another backend is the better choice
    for a request that it could do, as a sentence, or None. It is asked only where no backend was named.
    """

    name: str

    def supports(self, request: Request) -> str | None:
        """Return None, or the reason why this backend cannot do the request, as a sentence."""

    def forward(self, request: Request) -> Result:
        """Return the result; out and lse carry gradients to q, k, v, bias, relative and sink_logits.

        `out` and `lse` are the same bits whatever `request.observe` holds.
        """

    def observe(self, request: Request, result: Result, observables: Sequence[Observable]) -> tuple[Any, ...]:
        """Answer these observables, in order, without gradients; result.lse is there.

        They are those of `request.observe` that `result.seen` leaves open.
        """
