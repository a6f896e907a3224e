"""The front door: checks, choice of a backend, observables; everything above calls `attention()`.

The module is not named after its one function, so that `clearhead.attention` is the function whoever imports
what first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead import operator
from clearhead.backends import registry
from clearhead.backends.base import Backend, Request, Result
from clearhead.bias import Distances, RelativePosition
from clearhead.errors import ArgumentError, ShapeError, SizeError
from clearhead.mask import Mask, as_mask
from clearhead.observables import KeyMass, Observable
from clearhead.shapes import check_bias, check_qkv, check_sink_logits, compute_dtype
from clearhead.stored import Held, Pages, Stored, check_stored, masked_by_lengths
from clearhead.visibility import Visibility

#: A bias by distance is written down for at most this many distances.
DISTANCES_LIMIT = 2**26

_NO_MASK = Mask()
#: How many modes look at every torch operation just now (tracing, fake tensors, counting).
_dispatch_modes = torch._C._len_torch_dispatch_stack
#: Whether torch.jit.trace writes down what happens.
_scripting = torch._C._is_tracing


def attention(
    q: Tensor,
    k: Tensor | Stored | Held,
    v: Tensor | Stored,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | RelativePosition | None = None,
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    observe: Sequence[Observable] | Observable = (),
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Exact scaled dot-product attention, and what it looked at, in memory linear in the lengths.

    out = softmax(scale · Q Kᵀ + M) V (Vaswani et al. 2017, equation 1), per head; each key/value head serves
    Hq / Hkv query heads (grouped-query attention, Ainslie et al. 2023; Hkv = 1: multi-query, Shazeer 2019).

    q: (B, Hq, Lq, d). k: (B, Hkv, Lk, d). v: (B, Hkv, Lk, dv). Shapes as torch's
        scaled_dot_product_attention; Hq a multiple of Hkv; any strides. All float32, float64, bfloat16 or
        float16 (half types are computed in float32). k and v may also be what a cache stores, read as it
        lies: `Int8Rows` (bytes with a scale per row), `Pages` (a pool behind a table of blocks) or, for k,
        `clearhead.stored.Held` (with a mask of the cache's own, and the cache told what keys received).
    mask: a `Mask`, booleans (True = may look) or additive floats that broadcast to (B, Hq, Lq, Lk). With
        Lq ≠ Lk causal masks are aligned at the end, as a cache needs it: the last query sees the last key.
        For Lq = 2, Lk = 5 causal is [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]].
    scale: factor of the scores; default 1/√d.
    softcap: c: scores become c · tanh(s / c) after scaling, before mask and bias (Gemma 2).
    bias: floats that broadcast to (B, Hq, Lq, Lk), added to the scores; or a description, `ALiBi` or
        `RelativeBias` (T5), which needs no n × n memory. May carry a gradient.
    sink_logits: (Hq,) one more logit per head that takes weight and has no value (gpt-oss).
    dropout: probability with which a weight is zeroed; repeatable by torch.manual_seed. Observables show
        the weights before it.
    observe: observables; their answers carry no gradient.
    return_lse: also return the logarithm of each row's softmax denominator (the sink's term included).
    backend: a name from `clearhead.backends.registry.names()`; None chooses.

    Returns out (B, Hq, Lq, dv) in q's dtype; with `return_lse` or `observe` a tuple (out[, lse][, seen]):
    lse (B, Hq, Lq), natural logarithm, float32 (float64 for float64); `seen` a tuple in the order asked for.
    A fully masked row has out = 0, lse = -inf (the sink's logit, if there is one) and weights 0, never NaN,
    also in the backward. Gradients reach q, k, v, bias and sink_logits through out and lse, once (no second
    derivatives). Weights are exp(scores - lse) in all observables.

    Raises ShapeError, DTypeError, DeviceError, ArgumentError, MaskError or ObserveError naming the argument;
    BackendError if no backend can do it.

    >>> q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    >>> from clearhead.observables import Entropy
    >>> out, (entropy,) = attention(q, k, v, mask=Mask(causal=True), observe=[Entropy()])
    >>> out.shape, entropy.shape, entropy[0, 0, 0].item()  # the first query sees itself only
    (torch.Size([1, 4, 5, 8]), torch.Size([1, 4, 5]), 0.0)
    """
    if isinstance(k, Held):
        return _held(
            q,
            k,
            v,
            mask,
            bias,
            _checked_observables(observe),
            return_lse,
            scale=scale,
            softcap=softcap,
            sink_logits=sink_logits,
            dropout=dropout,
            backend=backend,
        )
    if torch.compiler.is_compiling() or _dispatch_modes() or _scripting():
        by_rows = isinstance(bias, RelativePosition) and isinstance(_offset(mask), Tensor)
        if not by_rows and not observe and not dropout and isinstance(k, Tensor) and isinstance(v, Tensor):
            out, lse = _traced(q, k, v, mask, scale, softcap, bias, sink_logits, backend)
            return (out, lse) if return_lse else out
        if torch.compiler.is_compiling():  # the operator has no way to say the rest: leave the graph for it
            return torch.compiler.disable(attention)(  # type: ignore[no-untyped-call]
                q,
                k,
                v,
                mask=mask,
                scale=scale,
                softcap=softcap,
                bias=bias,
                sink_logits=sink_logits,
                dropout=dropout,
                observe=observe,
                return_lse=return_lse,
                backend=backend,
            )
    if isinstance(k, Tensor) or not isinstance(k, Stored):
        shape = check_qkv(q, k, v)
    else:
        shape = check_stored(q, k, v)
    by_distance: RelativePosition | None = None
    if bias is not None and isinstance(bias, RelativePosition):
        by_distance, bias = bias, None
    if mask is None:
        who = _NO_MASK
    elif isinstance(mask, Mask):
        who = mask
    else:
        who, added = as_mask(mask, q.dtype)
        if added is not None:
            bias = _both(bias, added, q.dtype)
    if isinstance(k, Pages):
        who = masked_by_lengths(who, k, shape.Lq)
    if bias is not None:
        bias = check_bias(bias, shape, q)
    if sink_logits is not None:
        sink_logits = check_sink_logits(sink_logits, shape, q)
    scale = 1 / math.sqrt(shape.d) if scale is None else _checked_scale(scale, q.dtype)
    if softcap is not None or dropout != 0.0:
        _check_numbers(softcap, dropout)
    asked = observe if observe == () else _checked_observables(observe)
    visibility = Visibility.of(who, shape.B, shape.Hq, shape.Lq, shape.Lk, q.device)
    request = Request(
        q,
        k,
        v,
        shape,
        visibility,
        scale,
        softcap,
        bias,
        sink_logits,
        dropout,
        int(torch.randint(2**62, ()).item()) if dropout else 0,
        return_lse or asked != (),
        asked,
        None if by_distance is None else _distances(by_distance, *visibility.distances, shape.Hq, q),
    )
    chosen = registry.choose(request, backend)
    result = chosen.forward(request)
    if not request.needs_lse:
        return result.out
    answer: tuple[Any, ...] = (result.out, result.lse) if return_lse else (result.out,)
    if asked:
        answer = (*answer, _answers(chosen, request, result))
    return answer


def _held(
    q: Tensor,
    k: Held,
    v: Tensor | Stored,
    mask: Mask | Tensor | None,
    bias: Tensor | RelativePosition | None,
    asked: tuple[Observable, ...],
    return_lse: bool,
    **setting: Any,
) -> Any:
    """Attention over keys of a cache that has its own mask, or that is told what its keys received."""
    who, added = as_mask(mask, q.dtype)
    if added is not None:
        if isinstance(bias, RelativePosition):
            raise ArgumentError(
                f"mask holds additive floats, and bias is {bias!r}: give the mask as booleans"
            )
        bias = _both(bias, added, q.dtype)
    q, keys, who = k.opened(q, who, biased=bias is not None)
    asking = asked if k.account is None else (*asked, KeyMass())
    setting.update(mask=who, bias=bias, return_lse=return_lse)
    answer = attention(q, keys, v, observe=asking, **setting)
    if k.account is None:
        return answer
    *most, seen = answer
    k.account(seen[-1])
    most += [seen[:-1]] if asked else []
    return tuple(most) if len(most) > 1 else most[0]


def _traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None,
    scale: float | None,
    softcap: float | None,
    bias: Tensor | RelativePosition | None,
    sink_logits: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """out and lse by way of the operator that torch.compile sees; no check here looks at a value."""
    shape = check_qkv(q, k, v)
    by_distance, who = None, _NO_MASK
    if isinstance(mask, Mask):
        who = mask
    if isinstance(bias, RelativePosition):
        offset = _offset(mask)
        base = shape.Lk - shape.Lq if offset is None else offset - who.key_offset  # of a query to key 0
        assert not isinstance(base, Tensor)
        by_distance, bias = _distances(bias, base - shape.Lk + 1, base + shape.Lq - 1, shape.Hq, q), None
    if isinstance(mask, Tensor) and mask.is_floating_point():
        bias = _both(bias, operator.hidden_by_additive(mask, q.dtype), q.dtype)
    elif mask is not None and not isinstance(mask, Mask):
        who, _ = as_mask(mask, q.dtype)
    if bias is not None:
        bias = check_bias(bias, shape, q)
    if sink_logits is not None:
        sink_logits = check_sink_logits(sink_logits, shape, q)
    scale = 1 / math.sqrt(shape.d) if scale is None else _checked_scale(scale, q.dtype)
    _check_numbers(softcap, 0.0)
    return operator.traced(q, k, v, who, scale, softcap, bias, sink_logits, by_distance, backend)


def _offset(mask: Mask | Tensor | None) -> int | Tensor | None:
    return mask.offset if isinstance(mask, Mask) else None


def _both(bias: Tensor | None, added: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of two biases, which must not be rounded to half precision."""
    wide = compute_dtype(dtype)
    return added if bias is None else bias.to(wide) + added.to(wide)


def _answers(chosen: Backend, request: Request, result: Result) -> tuple[Any, ...]:
    """The answers to all observables: those that came with the pass, and the rest, asked for now."""
    came = result.seen or (None,) * len(request.observe)
    open_ones = [o for o, answer in zip(request.observe, came, strict=True) if answer is None]
    rest = iter(chosen.observe(request, result, open_ones) if open_ones else ())
    return tuple(next(rest) if answer is None else answer for answer in came)


def _distances(bias: RelativePosition, first: int, last: int, Hq: int, q: Tensor) -> Distances:
    """A bias by distance, worked out for the distances of this call."""
    if bias.heads != Hq:
        raise ShapeError(f"{bias!r} as bias: q has {Hq} heads, they must be as many")
    if last - first >= DISTANCES_LIMIT:
        raise SizeError(
            f"{bias!r} as bias: distances run from {first} to {last}, at most {DISTANCES_LIMIT} are allowed "
            "(the offsets of the mask lie that far apart)"
        )
    values = bias.by_distance(first, last, q.device).to(compute_dtype(q.dtype))
    if not torch.compiler.is_compiling() and not bool((values.detach() < math.inf).all()):
        raise ArgumentError(f"{bias!r} as bias holds NaN or +inf; allowed are -inf and numbers")
    return Distances(values.contiguous(), first)


def _checked_observables(observe: Sequence[Observable] | Observable) -> tuple[Observable, ...]:
    if isinstance(observe, Observable):
        return (observe,)
    if not isinstance(observe, Sequence):
        raise ArgumentError(f"observe must hold observables such as Entropy(), got {observe!r}")
    for item in observe:
        if not isinstance(item, Observable):
            raise ArgumentError(f"observe must hold observables such as Entropy(), got {item!r}")
    return tuple(observe)


def _checked_scale(scale: float, dtype: torch.dtype) -> float:
    largest = torch.finfo(compute_dtype(dtype)).max
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not -largest <= scale <= largest:
        raise ArgumentError(f"scale must be a finite number (of {compute_dtype(dtype)}), got {scale!r:.40}")
    return float(scale)


def _check_numbers(softcap: float | None, dropout: float) -> None:
    if softcap is not None and (not isinstance(softcap, int | float) or not 0 < softcap < math.inf):
        raise ArgumentError(f"softcap must be a positive number or None, got {softcap!r}")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ArgumentError(f"dropout must lie in 0 <= p < 1, got {dropout!r}")
