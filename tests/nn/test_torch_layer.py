"""A layer made from torch's gives torch's outputs, under all of its masks, and goes back to one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from clearhead.errors import ArgumentError, DTypeError, ShapeError
from clearhead.nn import MultiHeadAttention, torch_masks

SIZES = [
    {},
    {"kdim": 10},
    {"kdim": 10, "vdim": 6},
    {"vdim": 6, "bias": False},
    {"bias": False},
    {"add_zero_attn": True},
]
B, LQ, LK = 3, 7, 11


def theirs(**setting: object) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(24, 4, **setting)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return layer.eval()


def inputs(layer: nn.MultiheadAttention) -> list[torch.Tensor]:
    torch.manual_seed(1)
    sizes = [(LQ, 24), (LK, layer.kdim), (LK, layer.vdim)]
    return [torch.randn(B, L, d) if layer.batch_first else torch.randn(L, B, d) for L, d in sizes]


def masks() -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]:
    pads = torch.arange(LK) >= torch.tensor([[11], [4], [9]])
    pairs = torch.rand(LQ, LK, generator=torch.manual_seed(2)) < 0.4
    pairs[:, 0] = False
    per_head = torch.rand(B * 4, LQ, LK, generator=torch.manual_seed(3)) < 0.4
    per_head[:, :, 0] = False
    added = torch.randn(LQ, LK)
    return {
        "none": (None, None),
        "pads": (pads, None),
        "pairs": (None, pairs),
        "both": (pads, pairs),
        "per head": (pads, per_head),
        "added": (None, added),
        "added to pads": (torch.randn(B, LK), added),
        "hidden by floats": (None, torch.zeros(LQ, LK).masked_fill(pairs, -torch.inf)),
    }


@pytest.mark.parametrize("which", masks())
@pytest.mark.parametrize(("setting", "batch_first"), list(itertools.product(SIZES, (False, True))), ids=str)
def test_outputs_are_those_of_torch(setting: dict[str, object], batch_first: bool, which: str) -> None:
    layer = theirs(**setting, batch_first=batch_first)
    pads, pairs = masks()[which]
    want, _ = layer(*inputs(layer), key_padding_mask=pads, attn_mask=pairs)
    made = MultiHeadAttention.from_torch(layer)
    out = made(*inputs(layer), mask=torch_masks(pads, pairs, num_heads=4))
    assert (out - want).abs().max() <= 1e-5


def test_outputs_are_those_of_torch_for_self_attention_without_a_batch() -> None:
    layer = theirs()
    x = torch.randn(9, 24)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    want, _ = layer(x, x, x, attn_mask=hidden, key_padding_mask=torch.arange(9) > 6)
    out = MultiHeadAttention.from_torch(layer)(x, mask=torch_masks(torch.arange(9) > 6, hidden, num_heads=4))
    assert (out - want).abs().max() <= 1e-5


def test_gradients_are_those_of_torch() -> None:
    layer = theirs(batch_first=True)
    made = MultiHeadAttention.from_torch(layer)
    x = torch.randn(2, 5, 24)
    layer(x, x, x, need_weights=False)[0].square().sum().backward()
    made(x).square().sum().backward()
    ours = torch.cat([p.weight.grad for p in (made.q_proj, made.k_proj, made.v_proj)])
    torch.testing.assert_close(ours, layer.in_proj_weight.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(made.o_proj.weight.grad, layer.out_proj.weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("setting", SIZES, ids=str)
def test_weights_go_there_and_back(setting: dict[str, object]) -> None:
    layer = theirs(**setting, dropout=0.25, batch_first=True)
    back = MultiHeadAttention.from_torch(layer).to_torch()
    assert back.state_dict().keys() == layer.state_dict().keys()
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in layer.state_dict().items())
    same = ("dropout", "batch_first", "add_zero_attn", "kdim", "vdim", "training")
    assert all(getattr(back, name) == getattr(layer, name) for name in same)


def test_the_key_of_zeros_stays_zero_in_training() -> None:
    made = MultiHeadAttention.from_torch(theirs(add_zero_attn=True))
    assert made.sink_logits is not None
    assert not made.sink_logits.requires_grad


def test_dtype_device_and_mode_come_along() -> None:
    made = MultiHeadAttention.from_torch(theirs().double())
    assert made.o_proj.weight.dtype == torch.float64
    assert not made.training


def test_what_has_no_counterpart_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="add_bias_kv=True"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(DTypeError, match=r"must be a torch\.nn\.MultiheadAttention, got Linear"):
        MultiHeadAttention.from_torch(nn.Linear(2, 2))
    for setting, word in (
        ({"num_kv_heads": 1}, "num_kv_heads"),
        ({"head_dim": 3}, "head_dim"),
        ({"positions": "alibi"}, "positions"),
        ({"causal": True}, "causal"),
        ({"softcap": 1.0}, "softcap"),
        ({"scale": 1.0}, "scale"),
        ({"qk_norm": True}, "qk_norm"),
        ({"out_bias": False}, "out_bias"),
    ):
        with pytest.raises(ArgumentError, match=f"this layer has {word}"):
            MultiHeadAttention(8, 2, **setting).to_torch()


def test_masks_of_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(DTypeError, match=r"key_padding_mask must be booleans .* got torch\.int64"):
        torch_masks(torch.zeros(2, 3, dtype=torch.int64), num_heads=2)
    with pytest.raises(ShapeError, match="attn_mask must have 2 or 3 axes"):
        torch_masks(None, torch.zeros(3), num_heads=2)
    with pytest.raises(ShapeError, match="attn_mask must have shape"):
        torch_masks(None, torch.zeros(3, 4, 4), num_heads=2)
