"""A cache that keeps all that is seen gives what recomputing gives, in every way of generating."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.families import BY_NAME, numbers
from torch import Tensor
from transformers import EncoderDecoderCache

from clearhead.cache import DynamicCache, HeavyHitterCache, SinkCache, SlidingCache
from clearhead.errors import ModelError

DECODERS = ["llama", "gpt2", "gemma2", "gemma3", "mistral", "qwen3", "gpt-neox", "gpt-oss"]
SEQ2SEQ = ["t5", "bart"]
IDS = numbers(3, 2, 9)
LEFT = torch.ones(2, 9, dtype=torch.long)
LEFT[1, :4] = 0
STEPS = 10

Maker = Callable[[Any], Any]
#: With room for all of it, these keep all of it.
ROOMY: dict[str, Maker] = {
    "dynamic": lambda model: DynamicCache(model.config),
    "sliding": lambda model: SlidingCache(model.config, window=40),
    "sink": lambda model: SinkCache(model, window=40),
    "heavy": lambda model: HeavyHitterCache(model.config, budget=40),
}


def generated(model: Any, cache: Any = None, **how: Any) -> Any:
    """Tokens and logits of each step; without a cache everything is computed again for each token."""
    settings = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None, "output_logits": True}
    how = {**settings, **how}
    given = {"use_cache": False} if cache is None else {"cache": cache}
    torch.manual_seed(5)
    return model.generate(**given, **how, return_dict_in_generate=True)


def assert_same(one: Any, other: Any, tolerance: float = 1e-4) -> None:
    assert torch.equal(one.sequences, other.sequences)
    for a, b in zip(one.logits or (), other.logits or (), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize("mask", [None, LEFT], ids=["equal lengths", "left padding"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation_is_recomputation(name: str, mask: Tensor | None) -> None:
    model = BY_NAME[name].build("clearhead")
    given = {"inputs": IDS, "attention_mask": mask}
    assert_same(generated(model, **given), generated(model, DynamicCache(model.config), **given))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_dynamic_cache_serves_other_attention_too(name: str, implementation: str) -> None:
    model = BY_NAME[name].build(implementation)
    assert_same(generated(model, inputs=IDS), generated(model, DynamicCache(model.config), inputs=IDS))


@pytest.mark.parametrize("kind", [kind for kind in ROOMY if kind != "dynamic"])
def test_a_cache_with_room_for_all_is_exact(kind: str) -> None:
    model = BY_NAME["llama"].build("clearhead")
    cache = ROOMY[kind](model)
    assert_same(generated(model, inputs=IDS), generated(model, cache, inputs=IDS))
    assert cache.evicted == 0
    assert cache.get_seq_length() == IDS.shape[1] + STEPS - 1


@pytest.mark.parametrize("kind", ROOMY)
@pytest.mark.parametrize(
    "how",
    [{"do_sample": True, "temperature": 1.3, "num_return_sequences": 2}, {"num_beams": 3}],
    ids=["sampling", "beams"],
)
def test_rows_that_multiply_and_change_places_keep_what_is_theirs(kind: str, how: dict[str, Any]) -> None:
    for name in ["llama", "gpt2", "mistral"] if kind == "dynamic" else ["llama"]:
        model = BY_NAME[name].build("clearhead")
        assert_same(
            generated(model, inputs=IDS, **how), generated(model, ROOMY[kind](model), inputs=IDS, **how)
        )


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_assisted_decoding_takes_tokens_back(name: str) -> None:
    model = BY_NAME[name].build("clearhead")
    assistant = BY_NAME[name].fresh("clearhead")
    with torch.no_grad():  # close enough to be right now and then, and wrong now and then
        for parameter in assistant.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
    cache = DynamicCache(model.config)
    crops: list[int] = []
    crop = cache.crop
    cache.crop = lambda count: (crops.append(count), crop(count))[1]
    one = IDS[:1]
    out = generated(model, cache, inputs=one, assistant_model=assistant, max_new_tokens=16)
    assert torch.equal(out.sequences, generated(model, inputs=one, max_new_tokens=16).sequences)
    assert any(count < 0 for count in crops)


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"]
)
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoders_keep_both_halves(name: str, how: dict[str, Any]) -> None:
    model = BY_NAME[name].build("clearhead")
    given = {"inputs": IDS, "attention_mask": LEFT.flip(1), **how}
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert_same(generated(model, **given), generated(model, cache, **given))
    assert cache.self_attention_cache.get_seq_length() == STEPS
    assert cache.cross_attention_cache.get_seq_length() == IDS.shape[1]


def test_a_prompt_read_once_serves_many_copies() -> None:
    model = BY_NAME["llama"].build("clearhead")
    cache = DynamicCache(model.config)
    with torch.inference_mode():
        model(IDS[:, :-1], cache=cache)
    want = generated(model, inputs=IDS)
    for _ in range(2):
        assert_same(want, generated(model, copy.deepcopy(cache), inputs=IDS))
    assert cache.get_seq_length() == IDS.shape[1] - 1


@pytest.mark.parametrize("kind", ROOMY)
def test_rows_are_selected_repeated_and_forgotten(kind: str) -> None:
    model = BY_NAME["llama"].build("clearhead")
    cache = ROOMY[kind](model)
    with torch.no_grad():
        model(IDS, cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        swapped = model(IDS.flip(0)[:, :3], cache=cache).logits
        want = model(torch.cat([IDS, IDS[:, :3]], 1).flip(0)).logits[:, -3:]
        torch.testing.assert_close(swapped, want, atol=1e-5, rtol=0)
        cache.batch_select_indices(torch.tensor([False, True]))
        cache.reset()
        assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
        again = model(IDS[:1], cache=cache).logits
        torch.testing.assert_close(again, model(IDS[:1]).logits, atol=1e-5, rtol=0)


@pytest.mark.model
def test_the_real_model_generates_what_recomputing_gives(smollm2: Any) -> None:
    model, tokenizer = smollm2[:2]
    ids = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    given = {"inputs": ids, "max_new_tokens": 8}
    want = generated(model, **given)
    assert_same(want, generated(model, DynamicCache(model.config), **given))
    assert_same(want, generated(model, SinkCache(model, window=64), **given))


def test_what_needs_clearhead_says_so_to_other_attention() -> None:
    model = BY_NAME["llama"].build("sdpa")
    for kind in ("sliding", "sink", "heavy"):
        with pytest.raises(ModelError, match="attn_implementation='sdpa' cannot read"):
            ROOMY[kind](model)
    bare = HeavyHitterCache(budget=8)  # was not told the model
    with pytest.raises(ModelError, match="only clearhead's attention reads"):
        model(IDS, cache=bare)
