"""What transformers' own eager code says a model looked at: full weights, and every answer out of them."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.families import BY_NAME, Inputs
from torch import Tensor

#: Where a model's output holds the weights of each stream.
_FIELDS = {"attentions": "self", "cross_attentions": "cross", "decoder_attentions": "self", "encoder_attentions": "encoder"}  # fmt: skip


def weights(name: str, inputs: Inputs) -> dict[str, Tensor]:
    """Return the eager weights of every stream, (layer, B, H, Lq, Lk)."""
    with torch.no_grad():
        out = BY_NAME[name].build("eager")(**inputs, output_attentions=True)
    found: dict[str, Tensor] = {}
    for field, stream in _FIELDS.items():
        per_layer = out.get(field)
        if per_layer:
            found[stream] = torch.stack(list(per_layer))
    for field, stream in {"text_model_output": "self", "vision_model_output": "vision"}.items():
        if field in out:
            found[stream] = torch.stack(list(out[field].attentions))
    return found


def pooled(P: Tensor, rows: int, cols: int) -> Tensor:
    """Means of P (…, Lq, Lk) over rows × cols cells."""
    down = [[*range(r * P.shape[-2] // rows, (r + 1) * P.shape[-2] // rows)] for r in range(rows)]
    across = [[*range(c * P.shape[-1] // cols, (c + 1) * P.shape[-1] // cols)] for c in range(cols)]
    cells = [[P[..., r, :][..., c].mean((-2, -1)) for c in across] for r in down]
    return torch.stack([torch.stack(row, -1) for row in cells], -2)


def answers(P: Tensor, ids: Tensor | None = None, count: int = 0, v: Tensor | None = None) -> dict[str, Tensor]:  # fmt: skip
    """Return what observables say about the weights P (layer, H, Lq, Lk) of one item without padding.

    ids: (Lk,) segment numbers below `count`. v: the values (layer, H, Lk, dv).
    """
    top = P.topk(min(3, P.shape[-1]), dim=-1)
    out = {
        "weights": P,
        "entropy": -torch.xlogy(P, P).sum(-1),
        "max_weight": P.amax(-1),
        "key_mass": P.sum(2),
        "top_keys.weights": top.values,
        "top_keys.indices": torch.where(top.values > 0, top.indices, -1),
    }
    Lq, Lk = P.shape[-2:]
    far = (torch.arange(Lq)[:, None] + Lk - Lq - torch.arange(Lk)).abs()
    out["mean_distance"] = (P * far).sum(-1)
    if ids is not None:
        out["mass"] = torch.stack([P[..., ids == s].sum(-1) for s in range(count)], dim=-1)
        if v is not None:
            parts = [P[..., ids == s] @ v[..., ids == s, :] for s in range(count)]
            out["segment_output"] = torch.stack(parts, dim=-2)
    return out


def alone(inputs: Inputs, b: int) -> Inputs:
    """The inputs of one item of a padded batch, without its padding."""
    out: dict[str, Any] = {}
    for side, names in {
        "attention_mask": ("input_ids",),
        "encoder_attention_mask": ("encoder_hidden_states",),
        "decoder_attention_mask": ("decoder_input_ids",),
    }.items():
        mask = inputs.get(side)
        for name in names:
            if name in inputs and mask is not None:
                out[name] = inputs[name][b][mask[b].bool()][None]
    for name, value in inputs.items():
        if not name.endswith("attention_mask") and name not in out:
            out[name] = value[b : b + 1]
    for name in ("image_attention_mask", "cross_attention_mask"):  # (B, Lq, …): which images each token sees
        if name in inputs:
            out[name] = inputs[name][b][inputs["attention_mask"][b].bool()][None]
    return out
