"""To and from `torch.nn.MultiheadAttention`: weights and masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.errors import ArgumentError, DTypeError, ShapeError
from clearhead.mask import Mask

if TYPE_CHECKING:
    from clearhead.nn.layer import MultiHeadAttention


def from_torch(cls: type[MultiHeadAttention], layer: nn.MultiheadAttention) -> MultiHeadAttention:
    """A layer of ours with the weights of torch's; see `MultiHeadAttention.from_torch`."""
    given: object = layer
    if not isinstance(given, nn.MultiheadAttention):
        raise DTypeError(f"layer must be a torch.nn.MultiheadAttention, got {type(given).__name__}")
    if layer.bias_k is not None or layer.bias_v is not None:
        raise ArgumentError(
            "layer was made with add_bias_kv=True: it has a learned key and value behind every sequence "
            "(bias_k, bias_v), which MultiHeadAttention has not"
        )
    weight = layer.out_proj.weight
    made = cls(
        layer.embed_dim,
        layer.num_heads,
        kdim=layer.kdim,
        vdim=layer.vdim,
        bias=layer.in_proj_bias is not None,
        sink_logits=layer.add_zero_attn,
        dropout=layer.dropout,
        batch_first=layer.batch_first,
        device=weight.device,
        dtype=weight.dtype,
    )
    if made.sink_logits is not None:  # torch's key of zeros: its score is 0, and so is its value
        made.sink_logits.requires_grad_(False)
    packed: Tensor | None = layer.in_proj_weight  # None where kdim or vdim differ
    weights: tuple[Tensor, ...]
    if packed is not None:
        weights = packed.chunk(3)
    else:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    inner = (made.q_proj, made.k_proj, made.v_proj)
    with torch.no_grad():
        for projection, its_weight in zip(inner, weights, strict=True):
            projection.weight.copy_(its_weight)
        if layer.in_proj_bias is not None:
            for projection, its_bias in zip(inner, layer.in_proj_bias.chunk(3), strict=True):
                projection.bias.copy_(its_bias)
        made.o_proj.weight.copy_(weight)
        if made.o_proj.bias is not None:
            made.o_proj.bias.copy_(layer.out_proj.bias)
    return made.train(layer.training)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """A torch layer with the weights of ours; see `MultiHeadAttention.to_torch`."""
    zero_attn = layer.sink_logits is not None and not layer.sink_logits.any()
    beyond = {
        "num_kv_heads below num_heads": layer.num_kv_heads != layer.num_heads,
        "head_dim other than embed_dim / num_heads": layer.head_dim * layer.num_heads != layer.embed_dim,
        "positions": layer.positions is not None,
        "causal or a window (give them with each call)": not layer.mask.is_trivial,
        "sink_logits other than 0": layer.sink_logits is not None and not zero_attn,
        "softcap": layer.softcap is not None,
        "scale": layer.scale is not None,
        "qk_norm": layer.q_norm is not None,
        "out_bias other than bias": (layer.q_proj.bias is None) != (layer.o_proj.bias is None),
    }
    for what, there in beyond.items():
        if there:
            raise ArgumentError(f"this layer has {what}, which torch.nn.MultiheadAttention has not")
    weight = layer.o_proj.weight
    made = nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        dropout=layer.dropout,
        bias=layer.q_proj.bias is not None,
        add_zero_attn=zero_attn,
        kdim=layer.kdim,
        vdim=layer.vdim,
        batch_first=layer.batch_first,
        device=weight.device,
        dtype=weight.dtype,
    )
    inner = (layer.q_proj, layer.k_proj, layer.v_proj)
    with torch.no_grad():
        packed: Tensor | None = made.in_proj_weight  # None where kdim or vdim differ
        if packed is not None:
            packed.copy_(torch.cat([projection.weight for projection in inner]))
        else:
            separate = (made.q_proj_weight, made.k_proj_weight, made.v_proj_weight)
            for theirs, projection in zip(separate, inner, strict=True):
                theirs.copy_(projection.weight)
        if made.in_proj_bias is not None:
            made.in_proj_bias.copy_(torch.cat([projection.bias for projection in inner]))
            made.out_proj.bias.copy_(layer.o_proj.bias)
        made.out_proj.weight.copy_(weight)
    return made.train(layer.training)


def torch_masks(
    key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None, *, num_heads: int
) -> Mask | Tensor | None:
    """The masks of torch's layer as `mask=` of ours.

    key_padding_mask: (B, Lk) or (Lk,), attn_mask: (Lq, Lk) or (B · num_heads, Lq, Lk), as torch's
    forward takes them: booleans, True = hidden (the other way round than here), or floats that are added to
    the scores.
    Returns a Mask where both are booleans, else floats (B | 1, num_heads | 1, Lq | 1, Lk); None for none.

    A row that sees nothing is NaN in torch and zeros here (before the output's bias).

    Raises ShapeError or DTypeError naming the argument.
    """
    for name, given, ndims in (
        ("key_padding_mask", key_padding_mask, (1, 2)),
        ("attn_mask", attn_mask, (2, 3)),
    ):
        if given is None:
            continue
        if not given.is_floating_point() and given.dtype != torch.bool:
            raise DTypeError(f"{name} must be booleans (True = hidden) or floats, got {given.dtype}")
        if given.ndim not in ndims:
            raise ShapeError(f"{name} must have {ndims[0]} or {ndims[1]} axes, got {tuple(given.shape)}")
    pads, pairs = key_padding_mask, attn_mask
    if pads is not None and pads.ndim == 1:
        pads = pads[None]
    if pairs is not None and pairs.ndim == 3:
        if len(pairs) % num_heads:
            raise ShapeError(f"attn_mask must have shape (B · {num_heads}, Lq, Lk), got {tuple(pairs.shape)}")
        pairs = pairs.reshape(-1, num_heads, *pairs.shape[1:])
    elif pairs is not None:
        pairs = pairs[None, None]
    if all(mask is None or mask.dtype == torch.bool for mask in (pads, pairs)):
        made = None if pads is None else Mask(padding=~pads)
        dense = None if pairs is None else Mask(dense=~pairs)
        return dense if made is None else made if dense is None else made & dense
    parts = [
        _additive(mask) for mask in (None if pads is None else pads[:, None, None], pairs) if mask is not None
    ]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _additive(mask: Tensor) -> Tensor:
    """A boolean mask of torch's as the floats that it stands for."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
