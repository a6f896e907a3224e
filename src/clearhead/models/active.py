"""Who is watching: the one variable that attention calls of models look at.

A `Recorder` says what it wants to know of each call and is handed the answers. It knows modules, not layers
or names: whoever sets it knows the model. Set `ACTIVE` in the thread that runs the model; threads started by
others do not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from clearhead.mask import Mask
from clearhead.models.context import ContextSlot
from clearhead.observables import Observable


class Call(NamedTuple):
    """One attention call of a model, as the attention function got it.

    The tensors are the model's own (often views, possibly carrying gradients): read them, do not keep them.
    """

    module: nn.Module  # the attention module that called; the key of everything that is recorded
    query: Tensor  # (B, Hq, Lq, d), rotated already
    key: Any  # (B, Hkv, Lk, d), out of the cache already: a tensor, or what a cache of clearhead stores
    value: Any  # (B, Hkv, Lk, dv), likewise
    mask: Mask  # who may look; a dense one where the model brought its own
    offset: int | Tensor  # position of the first query, int or (B,); key j sits at mask.key_offset + j
    scale: float | None = None  # None: 1/√d
    softcap: float | None = None
    bias: Tensor | None = None  # (B | 1, Hq | 1, Lq, Lk), added to the scores
    sink_logits: Tensor | None = None  # (Hq,), one learned logit per head


class Recorder(Protocol):
    """What is watching the calls. Bring your own: these two methods are all."""

    def observables(self, call: Call) -> Sequence[Observable]:
        """Return what to observe in this call; empty: nothing is asked of this module."""

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        """Take the answers, in the order of `observables`. Only called if something was asked.

        Never called for the recomputation of a gradient checkpoint: each forward is recorded once.
        """


#: The recorder of this context, or None. Set it with `token = ACTIVE.set(...)`, undo with `ACTIVE.reset`.
ACTIVE: ContextSlot[Recorder] = ContextSlot("clearhead_active_recorder")
