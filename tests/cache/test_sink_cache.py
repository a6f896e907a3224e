"""A cache with sinks is the paper's: first and last tokens, numbered by their places, without an end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from tests.models.families import GPT2, LLM, SEQ2SEQ, make, numbers

from clearhead.cache import SinkCache
from clearhead.cache.sink import SinkLayer
from clearhead.cache.turning import Turner, turners
from clearhead.errors import ArgumentError, MaskError, ModelError
from clearhead.nn import MultiHeadAttention, Rotary

S, W = 3, 8
ONE_LAYER = {**LLM, "num_hidden_layers": 1}
FORMS: dict[str, tuple[Any, Any]] = {
    "rotary": (tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**ONE_LAYER)),
    "partial rotary": (
        tf.GPTNeoXForCausalLM,
        lambda: tf.GPTNeoXConfig(
            **{key: value for key, value in ONE_LAYER.items() if key != "num_key_value_heads"}, rotary_pct=0.5
        ),
    ),
    "yarn": (
        tf.LlamaForCausalLM,
        lambda: tf.LlamaConfig(
            **ONE_LAYER,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    "a rotation per kind of layer": (
        tf.Gemma3ForCausalLM,
        lambda: tf.Gemma3TextConfig(
            **ONE_LAYER, head_dim=8, sliding_window=64, layer_types=["sliding_attention"]
        ),
    ),
}


def stream(model: Any, ids: torch.Tensor, cache: Any, pieces: list[int]) -> torch.Tensor:
    """The logits of all tokens, the text being given in pieces of these lengths."""
    with torch.inference_mode():
        return torch.cat([model(piece, cache=cache).logits for piece in ids.split(pieces, 1)], 1)


def as_defined(model: Any, ids: torch.Tensor, t: int) -> torch.Tensor:
    """The logits of token t of a model of one layer that reads [sinks + window] anew, numbered from 0."""
    near = ids[:, : t + 1]
    if t + 1 > S + W:
        near = torch.cat([ids[:, :S], ids[:, t + 1 - W : t + 1]], 1)
    with torch.inference_mode():
        return model(near).logits[:, -1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", [1, 2, 7, 11])
def test_one_layer_gives_what_sinks_and_window_alone_give(form: str, first: int) -> None:
    cls, config = FORMS[form]
    model = make(cls, config(), "clearhead")
    ids = numbers(1, 2, 50)
    cache = SinkCache(model, sinks=S, window=W)
    logits = stream(model, ids, cache, [first] + [1] * (50 - first))
    want = torch.stack([as_defined(model, ids, t) for t in range(50)], 1)
    scale = want.abs().max().clamp(min=1)
    torch.testing.assert_close(logits / scale, want / scale, atol=1e-6, rtol=0)
    assert (cache.capacity, cache.evicted) == (S + W, 50 - (S + W - 1))


def test_places_that_are_brought_down_change_nothing() -> None:
    model = make(*_built("rotary"), "clearhead")
    ids = numbers(2, 1, 200)
    plain, low = (SinkCache(model, sinks=S, window=W) for _ in range(2))
    low.layers.append(SinkLayer(S, W, turners(model).layer(0), rebase=24))
    pieces = [5] + [1] * 80 + [4, 3, 7] + [1] * 101
    one, other = stream(model, ids, plain, pieces), stream(model, ids, low, pieces)
    torch.testing.assert_close(one, other, atol=2e-6, rtol=0)
    assert low.layers[0].base > 150


def test_a_piece_of_text_is_masked_by_windows_and_sinks() -> None:
    model = make(*_built("rotary"), "clearhead")
    eager = make(*_built("rotary"), "eager")
    ids, n = numbers(3, 2, 40), 40
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = (j <= i) & ((i - j < W) | (j < S))
    want = eager(ids, attention_mask=torch.where(seen, 0.0, torch.finfo().min)[None, None]).logits
    torch.testing.assert_close(
        stream(model, ids, SinkCache(model, sinks=S, window=W), [n]), want, atol=1e-5, rtol=0
    )


def test_a_rotation_far_out_is_as_exact_as_one_near() -> None:
    model = make(*_built("rotary"), "clearhead")
    turner = turners(model).layer(0)
    assert turner is not None
    far, near = 4_000_000, 100
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    exact = (turner.turned(q.double(), near) * turner.turned(k.double(), near - 60)).sum()
    own_q, own_k = (_as_the_model(model, x, far - back) for x, back in ((q, 0), (k, 60)))
    moved = (turner.moved(own_q, far, near) * turner.moved(own_k, far - 60, near - 60)).sum()
    assert abs(moved - exact) < 1e-5
    assert abs((own_q * own_k).sum() - exact) > 100 * abs(moved - exact)


def test_memory_is_flat_and_the_formula_holds() -> None:
    model = make(*_built("rotary"), "clearhead")
    cache = SinkCache(model, sinks=4, window=128)
    stream(model, numbers(4, 1, 150), cache, [150])
    full = cache.nbytes
    stream(model, numbers(5, 1, 400), cache, [1] * 400)
    assert cache.nbytes == full
    rows = 2 * 2 * 8 * 4 * (128 + 4)  # keys and values, heads, d, bytes, tokens
    assert full == pytest.approx(rows, rel=0.1)  # d is 8: the sinks kept in float64 are 4 % here
    buffers = [cache.layers[0]._keys, cache.layers[0]._values]
    assert sum(b.reserved for b in buffers) <= 1.1 * rows
    assert max(b.moved for b in buffers) < 40 * 400


def test_from_a_configuration_alone_it_turns_as_the_model_does() -> None:
    for form in FORMS:
        cls, config = FORMS[form]
        model = make(cls, config(), "clearhead")
        ids = numbers(6, 1, 30)
        pieces = [12] + [1] * 18
        of_model = stream(model, ids, SinkCache(model, sinks=S, window=W), pieces)
        of_config = stream(model, ids, SinkCache(model.config, sinks=S, window=W), pieces)
        assert torch.equal(of_model, of_config)


def test_rows_with_padding_are_refused() -> None:
    model = make(*_built("rotary"), "clearhead")
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    with pytest.raises(MaskError, match="pads would take the places of text"):
        model(numbers(0, 2, 9), attention_mask=mask, cache=SinkCache(model, window=8))
    with pytest.raises(MaskError, match="pads would take the places of text"):
        model.generate(
            numbers(0, 2, 9), attention_mask=mask, cache=SinkCache(model, window=8), max_new_tokens=2
        )


def test_models_that_it_cannot_stream_are_refused() -> None:
    gpt2 = make(tf.GPT2LMHeadModel, tf.GPT2Config(**GPT2), "clearhead")
    for given in (gpt2, gpt2.config, tf.BartConfig(**SEQ2SEQ), tf.T5Config()):
        with pytest.raises(ModelError, match="not turns of its keys"):
            SinkCache(given, window=8)
    by_length = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ModelError, match="'dynamic' turns by angles that depend on the length"):
        SinkCache(tf.LlamaConfig(**LLM, rope_parameters=by_length), window=8)
    with pytest.raises(ModelError, match="does not turn feature i with feature"):
        SinkCache(tf.CohereConfig(**LLM), window=8)


def test_a_model_that_turns_its_keys_must_be_named() -> None:
    model = make(*_built("rotary"), "clearhead")
    with pytest.raises(ArgumentError, match="must know how the model turns its keys"):
        model(numbers(0, 1, 5), cache=SinkCache(window=8))
    layer = MultiHeadAttention(32, 4, causal=True, positions="rotary")
    with pytest.raises(ArgumentError, match="was not told how this layer turns them"):
        layer(torch.randn(1, 5, 32), cache=SinkCache(window=8))
    layer(torch.randn(1, 5, 32), cache=SinkCache(layer, window=8))
    with pytest.raises(ArgumentError, match="got dict"):
        SinkCache({}, window=8)


def test_positions_that_do_not_count_the_text_are_refused() -> None:
    model = make(*_built("rotary"), "clearhead")
    cache = SinkCache(model, window=8)
    model(numbers(0, 1, 5), cache=cache)
    with pytest.raises(ModelError, match="has seen 5 tokens and the model turned the next one to position"):
        model(numbers(0, 1, 1), cache=cache, position_ids=torch.tensor([[2]]))


def test_turning_back_undoes_turning() -> None:
    turner = Turner(Rotary(6))
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(turner.turned_back(turner.turned(x, 90), 90), x)
    torch.testing.assert_close(turner.shifted(turner.turned(x, 90), -40), turner.turned(x, 50))


def _built(form: str) -> tuple[Any, Any]:
    cls, config = FORMS[form]
    return cls, config()


def _as_the_model(model: Any, x: torch.Tensor, position: int) -> torch.Tensor:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = model.model.rotary_emb(x, torch.tensor([[position]]))
    return apply_rotary_pos_emb(x, x, cos, sin)[0]  # type: ignore[no-any-return]
