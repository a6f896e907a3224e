"""The attention function: what a model computes goes through `clearhead.attention`, seen or unseen.

The semantics are those of transformers' eager functions: a mask of None hides nothing, whatever `is_causal`
says on a module or in a call. Windows, chunks and documents come from the mask alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clearhead.backends.reference import scaled, scores, softmax
from clearhead.cache.ragged import Ragged
from clearhead.errors import ModelError, ShapeError, SizeError
from clearhead.front_door import attention
from clearhead.mask import Mask, as_mask
from clearhead.models.active import ACTIVE, Call
from clearhead.models.carrier import CarriedMask
from clearhead.models.narrow import RULE
from clearhead.observables import KeyMass, Observable
from clearhead.shapes import compute_dtype
from clearhead.stored import Held, Pages, Stored, masked_by_lengths
from clearhead.visibility import Visibility

#: `output_attentions=True` writes down at most this many weights per call (1 GiB in float32).
WEIGHTS_LIMIT = 2**28

#: Keywords that change what is computed and that this function does not know: refused, not ignored.
_REFUSED = {
    "indices": "which keys each query selected",
    "block_indices": "which blocks of keys each query selected",
    "sinks": "a sink logit per token",
}

_NO_MASK = Mask()


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Stored | Held | Ragged,
    value: Any,
    attention_mask: CarriedMask | Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention for one layer of a transformers model.

    query (B, Hq, Lq, d), key (B, Hkv, Lk, d), value (B, Hkv, Lk, dv), with any strides, or as a cache of
    clearhead hands them out (`clearhead.stored`), read as they lie. attention_mask: what
    our mask function made, a model's or user's dense mask (booleans, True = may look, or additive floats)
    that broadcasts to (B, Hq, Lq, Lk), or None: nothing is hidden. scaling: default 1/√d. dropout: used only
    while module.training. softcap: as in Gemma 2. s_aux: (Hq,) a learned sink logit per head (gpt-oss).
    position_bias: (B | 1, Hq | 1, Lq, Lk), added to the scores, with gradient (T5). Unknown keywords are
    ignored, as transformers passes on whatever nobody took.

    Returns out (B, Lq, Hq, dv), contiguous, and the weights (B, Hq, Lq, Lk) if `output_attentions=True`
    reached this call, else None. These weights are the exact ones before dropout, with gradient; a row that
    sees nothing has weights 0, and with s_aux a row adds up to less than 1.

    Raises SizeError if weights are asked for at a size beyond 2**28 entries; ShapeError if the mask does not
    belong to these queries and keys; ModelError for masks of other kinds and for keywords that would change
    the result but are not supported (`indices`, `block_indices`, `sinks`).

    Source: transformers.AttentionInterface, release 5.24.
    """
    for name in _REFUSED.keys() & kwargs.keys():
        if kwargs[name] is not None:
            raise ModelError(
                f"{type(module).__name__} passes {name}= ({_REFUSED[name]}), which clearhead does not "
                'support; use this model with attn_implementation="eager"'
            )
    mask, bias = _mask_and_bias(attention_mask, query, key)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if s_aux is not None:
        s_aux = s_aux.reshape(-1)
    if isinstance(key, Ragged):
        return _ragged(query, key, mask, (scaling, softcap, bias, s_aux), kwargs), None
    account = None
    if isinstance(key, Held):
        account = key.account
        query, key, mask = key.opened(query, mask, biased=bias is not None)
    how = (scaling, softcap, bias, s_aux)
    rule = RULE.get()
    if rule is not None:
        narrower = rule(Call(module, query, key, value, mask, _offset(mask, query, key), *how))
        mask = mask if narrower is None else mask & narrower
    given = query.dtype
    if isinstance(key, Tensor) and not given == key.dtype == value.dtype:
        # Under autocast, or with a float32 rotary embedding.
        common = torch.promote_types(torch.promote_types(given, key.dtype), value.dtype)
        query, key, value = query.to(common), key.to(common), value.to(common)
    setting: dict[str, Any] = {
        "mask": mask,
        "scale": scaling,
        "softcap": softcap,
        "bias": bias,
        "sink_logits": s_aux,
    }
    drop = dropout if module.training else 0.0

    recorder = ACTIVE.get()
    asked: tuple[Observable, ...] = ()
    if recorder is not None and torch._C._current_graph_task_id() == -1:  # else checkpoint recomputation
        call = Call(module, query, key, value, mask, _offset(mask, query, key), *how)
        asked = tuple(recorder.observables(call))
    asking = asked if account is None else (*asked, KeyMass())
    if asking:
        out, seen = attention(query, key, value, dropout=drop, observe=asking, **setting)
        if account is not None:
            account(seen[-1])
        if recorder is not None and asked:
            recorder.record(call, asked, seen[: len(asked)])
    else:
        out = attention(query, key, value, dropout=drop, **setting)
    weights = full_weights(query, key, **setting).to(given) if kwargs.get("output_attentions") else None
    return out.to(given).transpose(1, 2).contiguous(), weights


def full_weights(
    q: Tensor,
    k: Tensor | Stored,
    *,
    mask: Mask,
    scale: float | None,
    softcap: float | None,
    bias: Tensor | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Return softmax(scale · Q Kᵀ + M), (B, Hq, Lq, Lk), with gradient, by the reference's steps 1 to 3.

    q (B, Hq, Lq, d), k (B, Hkv, Lk, d), or as a cache stores them. Raises SizeError beyond 2**28 weights.
    """
    (B, Hq, Lq, d), (Hkv, Lk) = q.shape, k.shape[1:3]
    if B * Hq * Lq * Lk > WEIGHTS_LIMIT:
        raise SizeError(
            f"output_attentions=True would write down {B} x {Hq} x {Lq} x {Lk} = {B * Hq * Lq * Lk} weights "
            f"per layer, more than {WEIGHTS_LIMIT}; observe what you need of them instead "
            "(clearhead.observe): SegmentMass, TopKeys, Weights(rows=...) take memory linear in the length"
        )
    if isinstance(k, Pages):
        mask = masked_by_lengths(mask, k, Lq)
    if not isinstance(k, Tensor):
        k = k.dense()
    wide = compute_dtype(q.dtype)
    fit = scores(q.to(wide), k.to(wide).repeat_interleave(Hq // Hkv, dim=1))
    bias = None if bias is None else bias.to(wide)
    fit = scaled(fit, d**-0.5 if scale is None else scale, softcap, bias)
    visible = Visibility.of(mask, B, Hq, Lq, Lk, q.device).tile(slice(0, Lq), slice(0, Lk))
    weights, _ = softmax(fit, visible, sink_logits)
    return weights


def _ragged(query: Tensor, key: Ragged, mask: Mask, how: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A row of many sequences, which observes by itself."""
    if ACTIVE.get() is not None or RULE.get() is not None or kwargs.get("output_attentions"):
        raise ModelError(
            "a row of many sequences (clearhead.Engine) cannot be watched from outside: give segments to "
            "submit()"
        )
    scale, softcap, bias, sink_logits = how
    return key.attend(query, mask, scale=scale, softcap=softcap, bias=bias, sink_logits=sink_logits)


def _mask_and_bias(
    given: Any, query: Tensor, key: Tensor | Stored | Held | Ragged
) -> tuple[Mask, Tensor | None]:
    """Split what came as attention_mask into who may look and what is added to the scores."""
    if given is None:
        return _NO_MASK, None
    if isinstance(given, CarriedMask):
        B, (Lq, Lk) = query.shape[0], (query.shape[2], key.shape[2])
        if given.shape[0] not in (1, B) or tuple(given.shape[2:]) != (Lq, Lk):
            raise ShapeError(
                f"attention_mask was made for (B, 1, Lq, Lk) = {given.shape}, but the layer has B = {B}, "
                f"Lq = {Lq}, Lk = {Lk}: the model or its cache gave sizes that it does not keep"
            )
        return given.mask, None
    if isinstance(given, Tensor):
        return as_mask(given, query.dtype)
    raise ModelError(
        f"attention_mask must be None, a tensor or a mask made by clearhead's mask function, got "
        f"{type(given).__name__}"
    )


def _offset(mask: Mask, query: Tensor, key: Tensor | Stored) -> int | Tensor:
    """Position of the first query: the mask's, or so that the last query sits at its row's last key."""
    if mask.offset is None and isinstance(key, Pages):
        return key.lengths.long() - query.shape[2] + mask.key_offset
    return mask.key_offset + key.shape[2] - query.shape[2] if mask.offset is None else mask.offset
