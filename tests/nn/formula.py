"""The layer written down: the formula of each paper in float64, with n × n weights and no shared code."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from clearhead.bias import ALiBi
from clearhead.nn import MultiHeadAttention, RelativePositions, Rotary


def project(x: Tensor, linear: torch.nn.Linear, heads: int) -> Tensor:
    """x Wᵀ + b, as (B, heads, L, d)."""
    y = x.double() @ linear.weight.double().T
    y = y if linear.bias is None else y + linear.bias.double()
    return y.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def normed(x: Tensor, norm: torch.nn.RMSNorm | None) -> Tensor:
    if norm is None:
        return x
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()


def turned(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Su et al. 2021, equation 13 for pairs (i, i + dim/2): a product with e^(i · position · θ)."""
    half = rotary.dim // 2
    theta = rotary.base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[:, None, :, None] * theta
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], dim=-1)


def by_distance(layer: MultiHeadAttention, q_at: Tensor, k_at: Tensor) -> Tensor | float:
    """What is added to the scores of queries at (Lq,) and keys at (Lk,): (Hq, Lq, Lk)."""
    distance = q_at[:, None] - k_at
    if isinstance(layer.positions, ALiBi):
        H = layer.num_heads
        assert H & (H - 1) == 0, "the paper's plain rule is for powers of two"
        slopes = torch.tensor([2 ** (-8 * (h + 1) / H) for h in range(H)], dtype=torch.float64)
        return -slopes[:, None, None] * distance.abs()
    if isinstance(layer.positions, RelativePositions):
        own = layer.positions
        buckets = T5Attention._relative_position_bucket(
            -distance,
            bidirectional=own.bidirectional,
            num_buckets=len(own.table),
            max_distance=own.max_distance,
        )
        return own.table.double()[buckets].permute(2, 0, 1)
    return 0.0


def plain(
    layer: MultiHeadAttention,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output of a batch-first layer, (B, Lq, E), and its weights (B, Hq, Lq, Lk); float64.

    visible: booleans that broadcast to the weights. Queries sit at the end of the keys.
    """
    key = query if key is None else key
    value = key if value is None else value
    Lq, Lk, Hq = query.shape[1], key.shape[1], layer.num_heads
    q = normed(project(query, layer.q_proj, Hq), layer.q_norm)
    k = normed(project(key, layer.k_proj, layer.num_kv_heads), layer.k_norm)
    v = project(value, layer.v_proj, layer.num_kv_heads)
    q_at, k_at = torch.arange(Lk - Lq, Lk), torch.arange(Lk)
    if isinstance(layer.positions, Rotary):
        q, k = turned(q, q_at[None], layer.positions), turned(k, k_at[None], layer.positions)
    groups = Hq // layer.num_kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (1 / math.sqrt(layer.head_dim) if layer.scale is None else layer.scale)
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores + by_distance(layer, q_at, k_at)
    distance = q_at[:, None] - k_at
    sees = torch.ones(Lq, Lk, dtype=torch.bool)
    if layer.mask.causal:
        sees &= distance >= 0
    if layer.mask.window is not None:
        left, right = layer.mask.window
        near = torch.ones_like(sees) if left is None else distance <= left
        near &= torch.ones_like(sees) if right is None else distance >= -right
        sees &= near | (k_at < layer.mask.sinks)
    sees = sees if visible is None else sees & visible
    scores = scores.masked_fill(~sees, -math.inf)
    if layer.sink_logits is not None:
        sink = layer.sink_logits.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).nan_to_num(0.0)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    out = mixed @ layer.o_proj.weight.double().T
    return out if layer.o_proj.bias is None else out + layer.o_proj.bias.double(), weights
