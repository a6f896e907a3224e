"""A paged cache gives what recomputing gives, in every way of generating, and loses nothing when it is full."""

from __future__ import annotations

import copy
import gc
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from tests.models.families import EXPERTS, GPT2, LAYER_KINDS, LLM, SEQ2SEQ, V
from transformers import EncoderDecoderCache

from clearhead.cache.paged import PagedCache
from clearhead.cache.pool import BlockPool, LayerSize
from clearhead.cache.sizes import layer_sizes
from clearhead.errors import ArgumentError, ModelError, PoolFullError, ShapeError
from clearhead.nn.decoder import Decoder
from clearhead.stored import Pages

SMALL = 1 << 20
WINDOW = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 13}
KINDS = {
    "Llama": (tf.LlamaForCausalLM, tf.LlamaConfig, LLM),
    "GPT-2": (tf.GPT2LMHeadModel, tf.GPT2Config, GPT2),
    "Gemma2": (
        tf.Gemma2ForCausalLM,
        tf.Gemma2Config,
        {**LLM, **WINDOW, "attn_logit_softcapping": 2.0, **LAYER_KINDS},
    ),
    "gpt-oss": (
        tf.GptOssForCausalLM,
        tf.GptOssConfig,
        {**LLM, "head_dim": 8, "sliding_window": 4, **EXPERTS, **LAYER_KINDS},
    ),
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
SIDES = {**SEQ2SEQ, "encoder_layers": 1, "encoder_attention_heads": 8, "decoder_start_token_id": 2}
PAIRS = {
    "T5": (
        tf.T5ForConditionalGeneration,
        tf.T5Config,
        {**T5, "vocab_size": V, "pad_token_id": 0, "decoder_start_token_id": 0},
    ),
    "BART": (
        tf.BartForConditionalGeneration,
        tf.BartConfig,
        {**SIDES, "max_position_embeddings": 64, "forced_eos_token_id": None},
    ),
}


@cache
def tiny(kind: str = "Llama", implementation: str = "clearhead") -> Any:
    """A tiny model with weights large enough to show errors."""
    model_class, config_class, settings = {**KINDS, **PAIRS}[kind]
    torch.manual_seed(0)
    model = model_class._from_config(config_class(**settings), attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.25 * torch.randn_like(parameter))
    return model


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, V - 4, shape, generator=torch.Generator().manual_seed(seed))


def padded(length: int) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :5] = 0
    return mask


WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3},
    "left padding": {"do_sample": False, "attention_mask": padded(12)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_generation_is_that_of_transformers_own_cache(kind: str, way: str) -> None:
    model = tiny(kind)
    arguments = {"max_new_tokens": 25, "eos_token_id": None, "output_logits": True, **WAYS[way]}
    arguments["return_dict_in_generate"] = True
    torch.manual_seed(3)
    own = model.generate(ids(2, 12), **arguments)
    paged = PagedCache(model.config, cache_bytes=SMALL)
    torch.manual_seed(3)
    ours = model.generate(ids(2, 12), cache=paged, **arguments)
    assert torch.equal(own.sequences, ours.sequences)
    for a, b in zip(own.logits, ours.logits, strict=True):
        assert (a - b).abs().max() < 1e-4


def test_assisted_decoding_crops_and_goes_on() -> None:
    model, helper = tiny(), copy.deepcopy(tiny())
    with torch.no_grad():
        for parameter in helper.parameters():  # now and then of another opinion
            parameter.add_(0.03 * torch.randn_like(parameter))
    arguments = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    own = model.generate(ids(1, 9), **arguments)
    paged = PagedCache(model.config, cache_bytes=SMALL)
    assert torch.equal(own, model.generate(ids(1, 9), assistant_model=helper, cache=paged, **arguments))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", PAIRS)
def test_encoder_decoders_keep_both_kinds_of_keys_in_pages(kind: str, beams: int) -> None:
    model = tiny(kind)
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "num_beams": beams}
    arguments["attention_mask"] = padded(12).flip(1)
    own = model.generate(ids(2, 12), **arguments)
    halves = [PagedCache(model.config, cache_bytes=SMALL) for _ in range(2)]
    both = EncoderDecoderCache(*halves)
    assert torch.equal(own, model.generate(ids(2, 12), cache=both, **arguments))
    assert halves[1].get_seq_length() == 12


def test_attention_reads_the_pool_itself() -> None:
    paged = PagedCache(tiny().config, cache_bytes=SMALL)
    k = torch.randn(2, 2, 20, 8)
    keys, values = paged.update(k, k, 0)
    assert isinstance(keys, Pages)
    assert keys.pool is paged.pool.keys[0]
    assert values.pool is paged.pool.values[0]
    assert torch.equal(keys.dense(), k)


def test_beams_share_blocks_and_forks_copy_only_what_they_write() -> None:
    paged = PagedCache(tiny().config, cache_bytes=SMALL)
    k = torch.randn(1, 2, 40, 8)
    for layer in range(2):
        paged.update(k, k, layer)
    paged.batch_repeat_interleave(4)
    assert paged.pool.used == 3  # of 16 tokens; 4 beams
    one = torch.randn(4, 2, 1, 8)
    for layer in range(2):
        keys, _ = paged.update(one, one, layer)
    assert paged.pool.used == 2 + 4  # each beam's last block is its own now
    assert torch.equal(keys.dense(), torch.cat([k.expand(4, -1, -1, -1), one], 2))
    paged.reorder_cache(torch.tensor([3, 3, 0, 1]))
    assert paged.pool.used == 2 + 3
    other = copy.deepcopy(paged)
    assert other.pool is paged.pool
    for layer in range(2):
        other.update(one, one, layer)
    assert paged.get_seq_length() == 41
    assert other.get_seq_length() == 42
    paged.batch_select_indices(torch.tensor([2]))
    other.reset()
    assert paged.pool.used == 3


def test_it_says_what_it_takes() -> None:
    paged = PagedCache(tiny().config, cache_bytes=SMALL)
    k = torch.randn(2, 2, 320, 8)
    for layer in range(2):
        paged.update(k, k, layer)
    assert paged.nbytes == 2 * 2 * 2 * 8 * 640 * 4  # 2 · layers · KV heads · d · tokens · size
    assert (paged.capacity, paged.evicted) == (paged.pool.blocks * 16, 0)
    assert paged.pool.nbytes <= SMALL


def test_a_full_pool_raises_before_anything_is_lost() -> None:
    model = tiny()
    paged = PagedCache(model.config, cache_bytes=4 * 2 * 2 * 2 * 8 * 16 * 4)  # 4 blocks
    with torch.no_grad():
        model(ids(1, 40), cache=paged)
        with pytest.raises(PoolFullError, match="the pool is full: 2 more blocks"):
            model(ids(1, 40, seed=2), cache=paged)
        assert paged.get_seq_length() == 40
        after = model(ids(1, 8, seed=2), cache=paged).logits
        whole = model(torch.cat([ids(1, 40), ids(1, 8, seed=2)], 1)).logits[:, 40:]
    assert (after - whole).abs().max() < 1e-4


def test_a_forward_that_failed_in_the_middle_can_be_taken_back() -> None:
    model = tiny()
    paged = PagedCache(model.config, cache_bytes=SMALL)
    with torch.no_grad():
        model(ids(1, 10), cache=paged)
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids(1, 30, seed=2), cache=paged)
        hook.remove()
        with pytest.raises(ModelError, match=r"stopped in the middle.*crop\(-30\)"):
            model(ids(1, 5), cache=paged)
        paged.crop(-30)
        assert paged.pool.used == 1
        after = model(ids(1, 5, seed=2), cache=paged).logits
        whole = model(torch.cat([ids(1, 10), ids(1, 5, seed=2)], 1)).logits[:, 10:]
    assert (after - whole).abs().max() < 1e-4


def test_a_cache_that_nobody_holds_gives_its_blocks_back() -> None:
    config = tiny().config
    pool = BlockPool(layer_sizes(config), blocks=8)
    one, two = PagedCache(config, pool=pool), PagedCache(config, pool=pool)
    k = torch.randn(1, 2, 20, 8)
    one.update(k, k, 0)
    two.update(k, k, 0)
    assert pool.used == 4
    del one
    gc.collect()
    assert pool.used == 2
    two.reset()
    assert pool.used == 0


def test_numbers_left_behind_by_others_are_not_seen() -> None:
    """Blocks that held NaN are given to somebody else, who never looks behind its own length."""
    model = tiny()
    paged = PagedCache(model.config, cache_bytes=SMALL)
    for stored in (*paged.pool.keys, *paged.pool.values):
        stored.fill_(float("nan"))
    arguments = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    own = model.generate(ids(2, 12), **arguments)
    assert torch.equal(own, model.generate(ids(2, 12), cache=paged, **arguments))


def test_bytes_stay_close() -> None:
    model = tiny()
    paged = PagedCache(model.config, cache_bytes=SMALL, dtype=torch.int8)
    with torch.no_grad():
        whole = model(ids(2, 40)).logits[:, 39]
        model(ids(2, 40)[:, :39], cache=paged)
        last = model(ids(2, 40)[:, 39:], cache=paged).logits[:, 0]
    assert (last - whole).abs().max() < 0.1 * whole.abs().max()


def test_what_does_not_fit_is_refused() -> None:
    config = tiny().config
    with pytest.raises(ArgumentError, match="give cache_bytes"):
        PagedCache(config)
    with pytest.raises(ModelError, match="attn_implementation='eager' cannot"):
        PagedCache(tiny("Llama", "eager").config, cache_bytes=SMALL)
    with pytest.raises(ShapeError, match="pool has layers of"):
        PagedCache(config, pool=BlockPool(layer_sizes(tiny("GPT-2").config), blocks=1))
    paged = PagedCache(config, cache_bytes=SMALL)
    with pytest.raises(ShapeError, match="belongs to another model"):
        paged.update(torch.zeros(1, 3, 1, 8), torch.zeros(1, 3, 1, 8), 0)
    for layer in range(2):  # what was refused has left nothing behind
        paged.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), layer)
    with pytest.raises(ShapeError, match="holds 1 rows, keys came for 3"):
        paged.update(torch.zeros(3, 2, 1, 8), torch.zeros(3, 2, 1, 8), 0)
    with pytest.raises(ArgumentError, match="negative number"):
        paged.crop(3)


def test_layers_of_ones_own_use_it_too() -> None:
    torch.manual_seed(0)
    decoder = Decoder(V, 32, 2, 4, num_kv_heads=2).eval()
    with torch.no_grad():
        whole = decoder(ids(2, 40))
        for given in (decoder.config, [LayerSize(2, 8, 8)] * 2):
            paged = PagedCache(given, cache_bytes=SMALL)
            parts = [decoder(ids(2, 40)[:, a:b], cache=paged) for a, b in ((0, 17), (17, 39), (39, 40))]
            assert (torch.cat(parts, 1) - whole).abs().max() < 1e-4
