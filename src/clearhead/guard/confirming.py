"""The second look: the same text with its strongest span hidden from attention.

The span is masked, not cut out: no token changes its place, and what stands before it comes from the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.cache import DynamicCache
from clearhead.guard.features import Reading, read_window, span_of_token
from clearhead.guard.finding import Confirmation, Span
from clearhead.guard.layout import Laid
from clearhead.mask import Mask
from clearhead.models.active import Call
from clearhead.models.narrow import narrowed
from clearhead.observables import SegmentMass
from clearhead.segments import Segments
from clearhead.trace.observe import observe

_FIRST = 2


def confirm_span(model: Any, laid: Laid, place: int, span: Span) -> Confirmation:
    """Return what changes for the answer's first token when a span's keys are hidden from every head.

    place: of the span in the window. The tokens before it are computed once; those from it on twice, with
    the span in view and hidden.
    """
    owners = span_of_token(laid)
    hidden = (owners == _FIRST + place).nonzero()[:, 0]
    first, n = int(hidden[0]), len(owners)
    ids = laid.prompt.input_ids.to(model.device)
    segments = Segments(owners.clamp_max(_FIRST), ["other", "instruction", "texts"])
    cache = DynamicCache(model.config)
    with torch.inference_mode():
        if first:
            model(input_ids=ids[:, :first], cache=cache, use_cache=True, logits_to_keep=1)

        def rest(rule: Any) -> tuple[float, Tensor]:
            asked = SegmentMass(segments, rows=[n - 1])
            with narrowed(rule), observe(model, segments, asked) as trace:
                out = model(input_ids=ids[:, first:], cache=cache, use_cache=True, logits_to_keep=1)
            cache.crop(first - n)
            mass = torch.as_tensor(trace.stream().mass)[..., 1].float().mean()
            return float(mass), out.logits[0, -1].double().log_softmax(-1)

        seen_mass, seen = rest(lambda call: None)
        hidden_mass, without = rest(_hiding(hidden))
    return Confirmation(
        span=span,
        instruction_mass=hidden_mass - seen_mass,
        divergence=_jensen_shannon(seen, without),
        changed=int(seen.argmax()) != int(without.argmax()),
    )


def read_without(model: Any, laid: Laid, place: int) -> Reading:
    """Return the reading of a window whose span `place` is hidden from every head; its own mass is 0."""
    hidden = (span_of_token(laid) == _FIRST + place).nonzero()[:, 0]
    with narrowed(_hiding(hidden)):
        return read_window(model, laid)


def _hiding(keys: Tensor) -> Any:
    def rule(call: Call) -> Mask:
        start, count = call.mask.key_offset, call.key.shape[2]
        dense = torch.ones(1, 1, 1, count, dtype=torch.bool, device=call.query.device)
        inside = keys[(keys >= start) & (keys < start + count)] - start
        dense[..., inside] = False
        return Mask(dense=dense)

    return rule


def _jensen_shannon(a: Tensor, b: Tensor) -> float:
    """Jensen-Shannon divergence of two log distributions, in nats (Lin 1991, eq. 4.1)."""
    middle = torch.logaddexp(a, b) - torch.log(torch.tensor(2.0, dtype=a.dtype))
    value = 0.5 * ((a.exp() * (a - middle)).sum() + (b.exp() * (b - middle)).sum())
    return float(value.clamp_min(0))
