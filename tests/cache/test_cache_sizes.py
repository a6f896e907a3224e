"""What caches take is what the formula says; growing copies little; what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tests.models.families import BY_NAME, LLM, make, numbers

import clearhead as ch
from clearhead.cache import DynamicCache, HeavyHitterCache, Int8Cache, SinkCache, SlidingCache
from clearhead.cache.dynamic import DynamicLayer
from clearhead.cache.growing import Growing
from clearhead.errors import ArgumentError, ModelError, ShapeError

LAYERS, HEADS, D = 2, 2, 64


def formula(tokens: int, per_row: int = 4 * D) -> int:
    """Keys and values of all layers and heads."""
    return 2 * LAYERS * HEADS * tokens * per_row


@pytest.mark.parametrize("n", [40, 333])
@pytest.mark.parametrize(
    ("make_cache", "tokens", "per_row"),
    [
        (lambda c: DynamicCache(c), lambda n: n, 4 * D),
        (lambda c: Int8Cache(c), lambda n: n, D + 4),
        (lambda c: SlidingCache(c, window=128), lambda n: min(n, 127), 4 * D),
        (lambda c: SinkCache(c, sinks=4, window=128), lambda n: min(n, 132), 4 * D),
        (lambda c: HeavyHitterCache(c, budget=128), lambda n: min(n, 128), 4 * D),
    ],
    ids=["dynamic", "int8", "sliding", "sink", "heavy"],
)
def test_bytes_are_those_of_the_formula(
    make_cache: Callable[[Any], Any], tokens: Callable[[int], int], per_row: int, n: int
) -> None:
    model = make(tf.LlamaForCausalLM, tf.LlamaConfig(**{**LLM, "head_dim": D}), "clearhead")
    cache = make_cache(model.config)
    with torch.inference_mode():
        for piece in numbers(0, 1, n).split([n - 3, 1, 1, 1], 1):
            model(piece, cache=cache)
    extra = 2 * LAYERS * HEADS * 4 * 8 * D if isinstance(cache, SinkCache) else 0  # sinks as they came
    assert cache.nbytes == pytest.approx(formula(tokens(n), per_row) + extra, rel=0.05)
    cache.reset()
    assert cache.nbytes == 0


def test_each_row_is_copied_at_most_twice_as_a_cache_grows() -> None:
    layer = DynamicLayer()
    k = torch.randn(1, 2, 1, 8)
    addresses = set()
    for _ in range(3000):
        keys, _ = layer.update(k, k)
        addresses.add(keys.data_ptr())
    assert layer._keys.moved <= 2 * 3000
    assert len(addresses) <= 8
    assert keys.shape == (1, 2, 3000, 8)


def test_what_is_reserved_and_not_written_takes_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    rows = Growing()
    new = torch.randn(1, 4, 5000, 64)
    before = resident()
    rows.append(new)
    taken = resident() - before
    assert rows.reserved >= 1.9 * rows.nbytes
    assert taken < 1.4 * rows.nbytes


def test_rows_that_slide_move_a_little_at_a_time() -> None:
    rows, kept = Growing(keep=320, lead=4), []
    for t in range(2000):
        rows.append(torch.full((1, 1, 1, 2), float(t)))
        rows.drop_first(max(len(rows) - 320, 0))
        kept.append(rows.view()[0, 0, :, 0])
        assert kept[-1][-1] == t
        assert len(rows) == min(t + 1, 320)
        assert rows.view(lead=4).shape[2] == len(rows) + 4
    assert torch.equal(kept[-1], torch.arange(1680.0, 2000.0))
    assert rows.reserved <= 1.05 * rows.nbytes
    assert rows.moved <= 33 * 2000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SlidingCache(window=0), "window must be an integer of at least 1, got 0"),
        (lambda: SinkCache(window=0), "window must be an integer of at least 1, got 0"),
        (lambda: SinkCache(window=4, sinks=4), "sinks must be fewer than the window: sinks=4, window=4"),
        (lambda: SinkCache(window=4, sinks=-1), "sinks must be an integer of at least 0, got -1"),
        (lambda: SinkCache(window=4.0), "window must be an integer of at least 1, got 4.0"),
        (lambda: HeavyHitterCache(budget=0), "budget must be an integer of at least 1, got 0"),
        (
            lambda: HeavyHitterCache(budget=4, recent=5),
            "recent must be at most the budget: recent=5, budget=4",
        ),
        (lambda: HeavyHitterCache(budget=4, recent=0), "recent must be an integer of at least 1, got 0"),
        (lambda: DynamicCache(7), "config must be a model's configuration"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        wrong()


@pytest.mark.parametrize(
    "make_cache",
    [
        lambda m: DynamicCache(m.config),
        lambda m: Int8Cache(m.config),
        lambda m: SlidingCache(m.config, window=8),
        lambda m: SinkCache(m, window=8),
        lambda m: HeavyHitterCache(m.config, budget=8),
    ],
)
def test_a_cache_of_another_model_or_batch_is_refused(make_cache: Callable[[Any], Any]) -> None:
    model = BY_NAME["llama"].build("clearhead")
    other = make(tf.LlamaForCausalLM, tf.LlamaConfig(**{**LLM, "num_key_value_heads": 1}), "clearhead")
    deeper = make(tf.LlamaForCausalLM, tf.LlamaConfig(**{**LLM, "num_hidden_layers": 3}), "clearhead")
    cache = make_cache(model)
    model(numbers(0, 1, 5), cache=cache)
    with pytest.raises(ShapeError, match="filled by another model or batch"):
        other(numbers(0, 1, 1), cache=cache)
    with pytest.raises(ShapeError, match="filled by another model or batch"):
        model(numbers(0, 2, 1), cache=cache)
    with pytest.raises(ShapeError, match="holds 2 layers and was given keys of layer 2"):
        deeper(numbers(0, 1, 1), cache=cache)


def test_a_forward_that_stopped_in_the_middle_is_noticed_and_can_be_taken_back() -> None:
    model = make(tf.LlamaForCausalLM, tf.LlamaConfig(**LLM), "clearhead")
    ids = numbers(0, 1, 9)
    want = model(ids).logits[:, -3:]
    for cache in (DynamicCache(model.config), Int8Cache(model.config)):
        model(ids[:, :6], cache=cache)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.model.layers[1].self_attn, "forward", lambda **_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids[:, 6:], cache=cache)
        with pytest.raises(ModelError, match="layer 1 comes to 9 tokens and layer 0 to 12: a forward before"):
            model(ids[:, 6:], cache=cache)
        cache.crop(-6)
        out = model(ids[:, 6:], cache=cache).logits
        assert (out - want).abs().max() < (1e-5 if isinstance(cache, DynamicCache) else 0.1)


def test_lossy_caches_cannot_take_tokens_back() -> None:
    model = BY_NAME["llama"].build("clearhead")
    for cache in (SlidingCache(model.config, window=8), SinkCache(model, window=8)):
        model(numbers(0, 1, 5), cache=cache)
        cache.crop(0)
        with pytest.raises(ModelError, match="cannot take back 2 tokens"):
            cache.crop(-2)
        assert not cache.is_croppable
    with pytest.raises(ArgumentError, match="as a negative number, got 3"):
        DynamicLayer().crop(3)


def test_bytes_are_read_as_they_lie_and_observed_alike() -> None:
    model, ids = BY_NAME["llama"].build("clearhead"), numbers(2, 2, 20)
    cache = Int8Cache(model.config)
    with torch.inference_mode():
        whole = model(ids).logits
        segments = ch.Segments(torch.arange(20) // 10, ["first", "second"])
        with ch.observe(model, segments, [ch.SegmentMass, ch.Entropy()]) as trace:
            got = model(ids, cache=cache).logits
        weights = model(ids, cache=Int8Cache(model.config), output_attentions=True).attentions
    assert (got - whole).abs().max() < 0.01 * whole.abs().max()
    first = torch.stack([w[..., :10].sum(-1) for w in weights], 1)
    for b in range(2):
        torch.testing.assert_close(torch.as_tensor(trace[b].mass)[..., 0], first[b], atol=1e-5, rtol=0)
    assert isinstance(cache.layers[0].keys, ch.Int8Rows)


def test_bytes_serve_beams_assistants_and_encoder_decoders() -> None:
    model, ids = BY_NAME["llama"].build("clearhead"), numbers(3, 1, 9)
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    alone = model.generate(ids, cache=Int8Cache(model.config), **how)
    helped = model.generate(
        ids, cache=Int8Cache(model.config), assistant_model=BY_NAME["llama"].fresh("clearhead"), **how
    )
    assert torch.equal(alone, helped)
    assert model.generate(ids, cache=Int8Cache(model.config), num_beams=3, **how).shape == (1, 15)
    t5 = BY_NAME["t5"].build("clearhead")
    cache = tf.EncoderDecoderCache(Int8Cache(t5.config), Int8Cache(t5.config))
    given = {"decoder_input_ids": numbers(4, 1, 5)}
    with torch.inference_mode():
        want = t5(ids, **given).logits
        encoded = t5.get_encoder()(ids)
        got = torch.cat(
            [
                t5(encoder_outputs=encoded, decoder_input_ids=piece, cache=cache).logits
                for piece in given["decoder_input_ids"].split(1, 1)
            ],
            1,
        )
    assert (got - want).abs().max() < 0.05 * want.abs().max()
