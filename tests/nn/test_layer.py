"""The layer computes the formula of the papers, in every form and with every option, and so do its gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.formula import plain
from torch._subclasses import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

import clearhead as ch
from clearhead.nn import MultiHeadAttention, RelativePositions, Rotary

HEADS = [(1, 1), (4, 4), (4, 2), (4, 1), (2, 1)]


@st.composite
def forms(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of a layer of any form."""
    heads, kv_heads = draw(st.sampled_from(HEADS))
    head_dim = draw(st.sampled_from([2, 5, 8, 16]))
    kinds = ["alibi", "relative", None] + ["rotary"] * (head_dim % 2 == 0) + ["partial"] * (head_dim >= 5)
    kind = draw(st.sampled_from(kinds))
    window = draw(st.none() | st.integers(1, 6))
    causal = draw(st.booleans())
    return {
        "embed_dim": draw(st.integers(1, 20)),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "bias": draw(st.booleans()),
        "causal": causal,
        "window": window,
        "sinks": 0 if window is None else draw(st.integers(0, window - 1)),
        "positions": Rotary(4, base=draw(st.sampled_from([100.0, 10000.0]))) if kind == "partial" else kind,
        "sink_logits": draw(st.booleans()),
        "softcap": draw(st.none() | st.floats(0.5, 5.0)),
        "scale": draw(st.none() | st.floats(0.1, 2.0)),
        "qk_norm": draw(st.booleans()),
    }


def loud(layer: MultiHeadAttention, seed: int = 0) -> MultiHeadAttention:
    """The layer with every parameter drawn large enough that nothing of it can go unnoticed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


@settings(max_examples=60, deadline=None)
@given(forms(), st.integers(1, 3), st.integers(1, 19), st.integers(0, 99))
def test_self_attention_is_the_formula(form: dict[str, Any], B: int, L: int, seed: int) -> None:
    layer = loud(MultiHeadAttention(**form, dtype=torch.float64), seed)
    x = torch.randn(B, L, layer.embed_dim, dtype=torch.float64)
    want, weights = plain(layer, x)
    out, (seen,) = layer(x, observe=[ch.Weights(rows="all")])
    torch.testing.assert_close(out, want, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(seen, weights, atol=1e-9, rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(forms(), st.integers(1, 3), st.integers(1, 9), st.integers(1, 13), st.integers(0, 99), st.data())
def test_cross_attention_is_the_formula(
    form: dict[str, Any], B: int, Lq: int, Lk: int, seed: int, data: st.DataObject
) -> None:
    kdim, vdim = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    layer = loud(MultiHeadAttention(**form, kdim=kdim, vdim=vdim, dtype=torch.float64), seed)
    x = torch.randn(B, Lq, layer.embed_dim, dtype=torch.float64)
    key, value = torch.randn(B, Lk, kdim, dtype=torch.float64), torch.randn(B, Lk, vdim, dtype=torch.float64)
    lengths = data.draw(st.lists(st.integers(1, Lk), min_size=B, max_size=B))
    visible = (torch.arange(Lk) < torch.tensor(lengths)[:, None])[:, None, None]
    want, _ = plain(layer, x, key, value, visible=visible)
    for mask in (ch.Mask(padding=lengths), visible):
        torch.testing.assert_close(layer(x, key, value, mask=mask), want, atol=1e-9, rtol=1e-9)


@settings(max_examples=25, deadline=None)
@given(forms(), st.integers(1, 9), st.integers(0, 99))
def test_gradients_are_those_of_the_formula(form: dict[str, Any], L: int, seed: int) -> None:
    layer = loud(MultiHeadAttention(**form, dtype=torch.float64), seed)
    x = torch.randn(2, L, layer.embed_dim, dtype=torch.float64, requires_grad=True)
    weighting = torch.randn(2, L, layer.embed_dim, dtype=torch.float64)
    wanted = [x, *layer.parameters()]
    ours = torch.autograd.grad((layer(x) * weighting).sum(), wanted)
    theirs = torch.autograd.grad((plain(layer, x)[0] * weighting).sum(), wanted, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, atol=1e-8, rtol=1e-8)


@settings(max_examples=40, deadline=None)
@given(forms(), st.integers(1, 2), st.integers(1, 200), st.integers(0, 99))
def test_float32_is_the_formula_to_its_precision(form: dict[str, Any], B: int, L: int, seed: int) -> None:
    layer = loud(MultiHeadAttention(**form), seed)
    x = torch.randn(B, L, layer.embed_dim) / 4
    want, weights = plain(layer, x)
    out, (seen,) = layer(x, observe=[ch.Weights(rows="all")])
    assert (out - want).abs().max() <= 1e-4 * max(1.0, want.abs().max().item())
    torch.testing.assert_close(seen.double(), weights, atol=1e-4, rtol=1e-3)


def test_layouts_change_the_axes_and_nothing_else() -> None:
    first = loud(MultiHeadAttention(8, 2, kdim=6))
    other = MultiHeadAttention(8, 2, kdim=6, batch_first=False)
    other.load_state_dict(first.state_dict())
    x, key = torch.randn(3, 5, 8), torch.randn(3, 7, 6)
    value = torch.randn(3, 7, 8)
    want = first(x, key, value)
    assert torch.equal(other(*(t.transpose(0, 1) for t in (x, key, value))).transpose(0, 1), want)
    alone = first(x[1], key[1], value[1])
    assert alone.shape == (5, 8)
    torch.testing.assert_close(alone, want[1])


def test_rotary_turns_as_llama_does() -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 5e4}
    )
    theirs, ours = LlamaRotaryEmbedding(config), Rotary(16, base=5e4)
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    at = torch.stack([torch.arange(9), torch.arange(100, 109)])
    cos, sin = theirs(q, at)
    for x, want in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours.turn(x, at), want, atol=2e-5, rtol=0)
    for mine, its in zip(ours(q, at), (cos, sin), strict=True):
        torch.testing.assert_close(mine, its, atol=2e-5, rtol=0)


def test_rotary_scores_hold_at_four_million_positions() -> None:
    rotary, q, k = Rotary(64), torch.randn(1, 1, 8, 64), torch.randn(1, 1, 8, 64)
    near = rotary.turn(q, 8) @ rotary.turn(k, 0).mT
    far = rotary.turn(q, 4_000_008) @ rotary.turn(k, 4_000_000).mT
    torch.testing.assert_close(near, far, atol=1e-4, rtol=0)


def test_given_positions_are_the_ones_that_count() -> None:
    layer = loud(MultiHeadAttention(16, 2, positions="rotary", dtype=torch.float64))
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x, positions=torch.arange(50, 56)), layer(x))  # distances alone matter
    torch.testing.assert_close(layer(x, mask=ch.Mask(offset=3, key_offset=3)), layer(x))
    spread = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10]])
    out = layer(x, positions=spread)
    torch.testing.assert_close(out[0], layer(x)[0])
    assert not torch.allclose(out[1], layer(x)[1])


def test_packed_texts_do_not_see_each_other() -> None:
    layer = loud(
        MultiHeadAttention(16, 4, num_kv_heads=2, causal=True, window=3, sinks=1, positions="rotary")
    )
    x = torch.randn(1, 11, 16)
    packed = layer(x, mask=ch.Mask(documents=[0] * 4 + [1] * 7))
    torch.testing.assert_close(packed[:, :4], layer(x[:, :4]), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 4:], layer(x[:, 4:]), atol=2e-5, rtol=1e-5)


def test_layers_can_share_one_learned_bias() -> None:
    table = RelativePositions(2, buckets=8, max_distance=16)
    layers = torch.nn.ModuleList(MultiHeadAttention(8, 2, positions=table) for _ in range(2))
    x = layers[0](torch.randn(1, 9, 8))
    layers[1](x).sum().backward()
    assert table.table.grad is not None
    assert sum(p is table.table for p in layers.parameters()) == 1


def test_dropout_is_for_training_and_repeatable() -> None:
    layer, x = loud(MultiHeadAttention(8, 2, dropout=0.5)), torch.randn(1, 9, 8)
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    layer.eval()
    torch.testing.assert_close(layer(x).double(), plain(layer, x)[0], atol=1e-4, rtol=1e-4)


def test_a_state_dict_goes_there_and_back() -> None:
    form = {"num_kv_heads": 2, "positions": "relative", "sink_logits": True, "qk_norm": True}
    layer, other = loud(MultiHeadAttention(16, 4, **form)), MultiHeadAttention(16, 4, **form)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 5, 16)
    assert torch.equal(other(x), layer(x))
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "sink_logits", "positions"}
    assert {name.split(".")[0] for name in layer.state_dict()} == names


def test_half_precision_and_autocast() -> None:
    layer, x = loud(MultiHeadAttention(16, 4, causal=True, positions="rotary")), torch.randn(1, 9, 16)
    want = plain(layer, x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert (out.double() - want).norm() < 0.05 * want.norm()
    half = layer.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.double() - want).norm() < 0.05 * want.norm()


def test_a_used_layer_can_be_copied_and_saved(tmp_path: Path) -> None:
    layer = loud(MultiHeadAttention(16, 4, causal=True, window=5, sinks=2, positions="rotary"))
    x = torch.randn(1, 9, 16)
    with torch.inference_mode():
        want = layer(x)
    torch.save(layer, tmp_path / "layer.pt")
    for other in (copy.deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        out = other(x)
        out.sum().backward()
        assert torch.equal(out, want)


def test_shapes_can_be_worked_out_without_numbers() -> None:
    layer, x = MultiHeadAttention(16, 4, causal=True, positions="rotary"), torch.randn(1, 9, 16)
    before = layer(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (1, 9, 16)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_it_compiles_to_one_graph(positions: str) -> None:
    layer = loud(MultiHeadAttention(16, 4, num_kv_heads=2, causal=True, window=4, positions=positions))
    x = torch.randn(2, 9, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)


def test_what_it_prints_says_what_it_is() -> None:
    text = repr(MultiHeadAttention(16, 4, num_kv_heads=1, causal=True, window=4, sinks=1, positions="alibi"))
    for part in ("16, 4, num_kv_heads=1", "Mask(causal=True, window=4, sinks=1)", "ALiBi(4 heads)"):
        assert part in text
