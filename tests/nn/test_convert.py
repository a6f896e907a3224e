"""Mean-pooled key/value heads: a model with fewer of them, equal where the heads of a group were equal."""

from __future__ import annotations

import pytest
import torch
from tests.nn.test_layer import loud
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from clearhead.errors import ArgumentError
from clearhead.nn import Decoder, MultiHeadAttention, llama_to_gqa, mha_to_gqa


def repeated(projection: torch.nn.Linear, heads: int, groups: int) -> None:
    """Make the heads of each group equal."""
    with torch.no_grad():
        for tensor in filter(lambda t: t is not None, (projection.weight, projection.bias)):
            split = tensor.view(groups, heads // groups, -1, *tensor.shape[1:])
            split.copy_(split[:, :1].clone().expand_as(split))


def test_a_pooled_head_is_the_mean_of_its_group() -> None:
    layer = loud(MultiHeadAttention(12, 6, kdim=5))
    made = mha_to_gqa(layer, 2)
    assert (made.num_heads, made.num_kv_heads) == (6, 2)
    for old, new in ((layer.k_proj, made.k_proj), (layer.v_proj, made.v_proj)):
        heads = old.weight.view(6, 2, -1)
        torch.testing.assert_close(
            new.weight.view(2, 2, -1), torch.stack([heads[:3].mean(0), heads[3:].mean(0)])
        )
        torch.testing.assert_close(new.bias.view(2, 2), old.bias.view(2, 3, 2).mean(1))
    assert layer.num_kv_heads == 6  # a copy: the layer itself is as it was


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equal_heads_give_equal_outputs(groups: int) -> None:
    layer = loud(
        MultiHeadAttention(16, 4, causal=True, positions="rotary", qk_norm=True, dtype=torch.float64)
    )
    repeated(layer.k_proj, 4, groups)
    repeated(layer.v_proj, 4, groups)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(mha_to_gqa(layer, groups)(x), layer(x))


def test_pooling_twice_is_pooling_once() -> None:
    layer = loud(MultiHeadAttention(16, 8))
    x = torch.randn(1, 5, 16)
    torch.testing.assert_close(mha_to_gqa(mha_to_gqa(layer, 4), 2)(x), mha_to_gqa(layer, 2)(x))


def test_a_whole_model_is_converted_and_trains_on() -> None:
    model = Decoder(20, 16, 2, 4)
    made = mha_to_gqa(model, 1)
    assert [block.attention.num_kv_heads for block in made.blocks] == [1, 1]
    ids = torch.randint(20, (2, 9))
    made.loss(ids).backward()
    assert all(block.attention.k_proj.weight.grad is not None for block in made.blocks)
    assert made.blocks[0].attention.positions is made.blocks[1].attention.positions


def test_a_transformers_model_is_converted() -> None:
    config = LlamaConfig(
        vocab_size=30,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        attention_bias=True,
    )
    model = loud(LlamaForCausalLM(config)).eval()
    for layer in model.model.layers:
        repeated(layer.self_attn.k_proj, 4, 2)
        repeated(layer.self_attn.v_proj, 4, 2)
    made = llama_to_gqa(model, 2)
    assert (made.config.num_key_value_heads, model.config.num_key_value_heads) == (2, 4)
    ids = torch.randint(30, (1, 6))
    torch.testing.assert_close(made(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-4)
    assert made.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 9)


def test_what_cannot_be_pooled_is_refused() -> None:
    layer = MultiHeadAttention(16, 4)
    with pytest.raises(
        ArgumentError, match="groups is 3, and there are 4 key/value heads: it must divide them"
    ):
        mha_to_gqa(layer, 3)
    with pytest.raises(ArgumentError, match="groups is 8"):
        mha_to_gqa(layer, 8)
    with pytest.raises(ArgumentError, match="groups must be an integer of at least 1, got 0"):
        mha_to_gqa(layer, 0)
    with pytest.raises(ArgumentError, match="must be or hold a MultiHeadAttention, got Linear"):
        mha_to_gqa(torch.nn.Linear(2, 2), 1)
    with pytest.raises(ArgumentError, match=r"must be a transformers model .* got Linear"):
        llama_to_gqa(torch.nn.Linear(2, 2), 1)
    config = Olmo2Config(
        vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(
        ArgumentError, match=r"norm over the keys of all heads \(model\.layers\.0\.self_attn\.k_norm\)"
    ):
        llama_to_gqa(Olmo2ForCausalLM(config), 2)
