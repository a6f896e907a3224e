"""With a cache, step by step or in pieces, a layer gives what it gives for the whole text at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.test_layer import forms, loud
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.llama.modeling_llama import LlamaConfig

import clearhead as ch
from clearhead.errors import ArgumentError, ShapeError
from clearhead.nn import MultiHeadAttention


def pieces(x: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    edges = [0, *sorted(cuts), x.shape[1]]
    return [x[:, a:b] for a, b in itertools.pairwise(edges) if b > a]


@settings(max_examples=50, deadline=None)
@given(forms(), st.integers(1, 3), st.integers(1, 17), st.integers(0, 99), st.data())
def test_pieces_with_a_cache_are_the_whole(
    form: dict[str, Any], B: int, L: int, seed: int, data: st.DataObject
) -> None:
    layer = loud(MultiHeadAttention(**form | {"causal": True}, dtype=torch.float64), seed)
    x = torch.randn(B, L, layer.embed_dim, dtype=torch.float64)
    cuts = data.draw(st.just(list(range(L))) | st.lists(st.integers(0, L), max_size=4))
    cache = DynamicLayer()
    out = torch.cat([layer(piece, cache=cache) for piece in pieces(x, cuts)], dim=1)
    torch.testing.assert_close(out, layer(x), atol=1e-9, rtol=1e-9)
    assert cache.get_seq_length() == L
    assert cache.keys.shape == (B, layer.num_kv_heads, L, layer.head_dim)


@pytest.mark.parametrize("positions", ["rotary", "alibi", "relative", None])
def test_a_window_needs_no_more_than_its_keys(positions: str | None) -> None:
    layer = loud(
        MultiHeadAttention(
            16, 4, num_kv_heads=2, causal=True, window=5, positions=positions, dtype=torch.float64
        )
    )
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    cache = DynamicSlidingWindowLayer(sliding_window=5)
    out = torch.cat([layer(piece, cache=cache) for piece in pieces(x, [3, 4, 5, 6, 7, 15, 16, 17])], dim=1)
    torch.testing.assert_close(out, layer(x), atol=1e-9, rtol=1e-9)
    assert cache.keys.shape[2] == 4


def test_a_buffer_longer_than_the_text_is_read_up_to_the_last_token() -> None:
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    layer = loud(MultiHeadAttention(16, 4, num_kv_heads=2, causal=True, positions="rotary"))
    x = torch.randn(2, 9, 16)
    cache = StaticCache(config=config, max_cache_len=32)
    out = torch.cat([layer(piece, cache=cache) for piece in pieces(x, [4, 5, 6])], dim=1)
    torch.testing.assert_close(out, layer(x), atol=2e-5, rtol=1e-4)


def test_layers_of_a_whole_cache_keep_apart() -> None:
    layers = [
        loud(MultiHeadAttention(8, 2, causal=True, positions="rotary", layer_idx=i), seed=i) for i in range(2)
    ]
    x, cache = torch.randn(1, 6, 8), DynamicCache()
    steps = [layers[1](layers[0](x[:, i : i + 1], cache=cache), cache=cache) for i in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), layers[1](layers[0](x)), atol=2e-5, rtol=1e-4)


def test_padded_rows_are_as_they_would_be_alone() -> None:
    layer = loud(MultiHeadAttention(8, 2, causal=True, window=4, sinks=2, positions="rotary"))
    texts = [torch.randn(1, 9, 8), torch.randn(1, 5, 8)]
    x = torch.cat([texts[0], torch.cat([torch.zeros(1, 4, 8), texts[1]], 1)])
    cache, outs = DynamicLayer(), []
    for piece in pieces(x, [6, 7, 8]):
        seen = cache.get_seq_length() + piece.shape[1]
        real = torch.arange(seen) >= torch.tensor([[0], [4]])
        outs.append(layer(piece, mask=ch.Mask(padding=real), cache=cache))
    out = torch.cat(outs, 1)
    torch.testing.assert_close(out[:1], layer(texts[0]), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(out[1:, 4:], layer(texts[1]), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_cross_attention_reads_its_keys_once(whole: bool) -> None:
    layer = loud(MultiHeadAttention(8, 2, kdim=6, vdim=5))
    x, key, value = torch.randn(2, 7, 8), torch.randn(2, 4, 6), torch.randn(2, 4, 5)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if whole else DynamicLayer()
    steps = [layer(x[:, i : i + 1], key, value, cache=cache) for i in range(7)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x, key, value), atol=1e-5, rtol=1e-4)
    held = cache.cross_attention_cache.layers[0] if whole else cache
    assert held.get_seq_length() == 4
    with pytest.raises(ShapeError, match="key has length 3, and the cache holds 4 keys"):
        layer(x, key[:, :3], value[:, :3], cache=cache)


def test_what_a_new_token_looked_at_is_told_with_a_cache_too() -> None:
    layer = loud(MultiHeadAttention(8, 2, causal=True, positions="rotary"))
    x, cache = torch.randn(1, 6, 8), DynamicLayer()
    _, (whole,) = layer(x, observe=ch.Entropy())
    layer(x[:, :5], cache=cache)
    _, (last,) = layer(x[:, 5:], cache=cache, observe=[ch.Entropy()])
    torch.testing.assert_close(last, whole[:, :, 5:], atol=1e-5, rtol=1e-4)


def test_a_cache_that_is_none_or_not_this_layers_is_refused_before_anything_is_lost() -> None:
    layer = MultiHeadAttention(8, 2, causal=True)
    with pytest.raises(ArgumentError, match=r"cache must be a layer of a cache or a whole one.*got dict"):
        layer(torch.randn(1, 3, 8), cache={})
    cache = DynamicLayer()
    MultiHeadAttention(8, 4, causal=True)(torch.randn(1, 3, 8), cache=cache)
    with pytest.raises(
        ShapeError, match=r"cache holds keys \(B, Hkv, d\) = \(1, 4, 2\) and this layer has \(1, 2, 4\)"
    ):
        layer(torch.randn(1, 3, 8), cache=cache)
    assert cache.get_seq_length() == 3


def test_a_cache_that_breaks_its_word_is_found_out() -> None:
    class Liar(DynamicLayer):
        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return super().get_mask_sizes(query_length)[0] + 1, 0

    with pytest.raises(ShapeError, match="said that it would hold 4 keys and handed back 3"):
        MultiHeadAttention(8, 2, causal=True)(torch.randn(1, 3, 8), cache=Liar())


def test_sinks_that_a_cache_lets_go_are_an_error_before_they_are_gone() -> None:
    layer = MultiHeadAttention(8, 2, causal=True, window=4, sinks=2)
    cache = DynamicSlidingWindowLayer(sliding_window=4)
    layer(torch.randn(1, 3, 8), cache=cache)
    layer(torch.randn(1, 1, 8), cache=cache)
    with pytest.raises(ArgumentError, match="sinks=2"):
        layer(torch.randn(1, 1, 8), cache=cache)
    assert cache.get_seq_length() == 4
