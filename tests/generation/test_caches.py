"""Every cache by name: what transformers' own loop gives with it, and heads that are watched all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.families import BY_NAME, numbers

import clearhead as ch
from clearhead.errors import ArgumentError, ModelError, PromptError
from clearhead.generation.caches import BOUNDED, NAMES, cache_bytes, endless, make_cache
from clearhead.generation.conversation import Conversation
from clearhead.generation.generating import generate
from clearhead.models.loading import LoadedModel

from .bytes import loaded

SMALL = {"window": 16, "sinks": 2}
PROMPT, NEW = 24, 12


@pytest.fixture(scope="module")
def bytes_model() -> LoadedModel:
    return loaded(5)


def made(name: str, model: LoadedModel) -> Any:
    return make_cache(name, model.model, tokens=PROMPT + NEW, **SMALL)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers_with_the_same_cache(bytes_model: LoadedModel, name: str) -> None:
    ids = numbers(1, 1, PROMPT)
    got = generate(bytes_model, ids, cache=made(name, bytes_model), max_new_tokens=NEW, ignore_end=True)
    with torch.inference_mode():
        want = bytes_model.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=made(name, bytes_model),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
        )
    result = got.result()
    assert result.ids == want[0, PROMPT:].tolist()
    assert result.cache_bytes == got.cache.nbytes > 0


@pytest.mark.parametrize("name", ["dynamic", "paged"])
def test_exact_caches_give_the_tokens_without_a_cache(bytes_model: LoadedModel, name: str) -> None:
    ids = numbers(1, 1, PROMPT)
    got = generate(bytes_model, ids, cache=name, max_new_tokens=6, ignore_end=True).result().ids
    for token in got:
        with torch.inference_mode():
            assert token == int(bytes_model.model(ids, use_cache=False).logits[0, -1].argmax())
        ids = torch.cat([ids, torch.tensor([[token]])], 1)


@pytest.mark.parametrize("name", NAMES)
def test_watching_changes_no_token_and_the_shares_add_up(bytes_model: LoadedModel, name: str) -> None:
    ids = numbers(1, 1, PROMPT)
    how: dict[str, Any] = {"max_new_tokens": NEW, "ignore_end": True}
    plain = generate(bytes_model, ids, cache=made(name, bytes_model), observe=None, **how).result()
    seen = generate(bytes_model, ids, cache=made(name, bytes_model), **how).result()
    assert seen.ids == plain.ids
    for token in seen.tokens:
        assert token.mass is not None
        assert float(token.mass.sum()) == pytest.approx(1, abs=1e-5)


def kept(name: str, cache: Any, seen: int, layer: int, head: int) -> set[int]:
    """Which tokens a head can see after so many."""
    if name == "sliding":
        return set(range(seen - 16, seen))
    if name == "sink":
        return {0, 1, *range(seen - 16, seen)}
    if name == "heavy":
        return set(cache.layers[layer].positions[0, head].tolist())
    return set(range(seen))


@pytest.mark.parametrize("name", NAMES)
def test_sources_are_told_by_the_tokens_that_are_there(bytes_model: LoadedModel, name: str) -> None:
    cache = made(name, bytes_model)
    running = generate(
        bytes_model,
        numbers(1, 1, PROMPT),
        cache=cache,
        max_new_tokens=NEW,
        ignore_end=True,
        observe=[ch.SegmentMass, ch.TopKeys(64)],
        average=(),
    )
    for count, token in enumerate(running):
        if not count:
            continue  # the prompt: queries of several windows
        seen = PROMPT + count
        where, weights = token.seen["top_keys.indices"], token.seen["top_keys.weights"]
        mass = token.seen["mass"]
        for layer in range(2):
            for head in range(4):
                found = where[layer, head] >= 0
                places = where[layer, head][found]
                assert set(places.tolist()) == kept(name, cache, seen, layer, head // 2)
                source = torch.where(places < PROMPT, 0, 1).where(places > 0, torch.tensor(2))
                want = torch.zeros(3).scatter_add_(0, source, weights[layer, head][found])
                assert torch.allclose(mass[layer, head], want, atol=1e-5)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_may_go_on_past_the_models_positions_in_memory_that_does_not_grow(name: str) -> None:
    model = loaded(5, max_position_embeddings=32)
    cache = make_cache(name, model.model, **SMALL)
    running = generate(
        model, numbers(1, 1, 40), cache=cache, max_new_tokens=None, prefill_chunk=8, keep=False
    )
    running._ends = frozenset()
    for _ in range(20):
        next(running)
    bytes_held = cache_bytes(cache)
    for _ in range(60):
        next(running)
    assert cache_bytes(cache) == bytes_held
    assert running.stop() is not None
    assert running.result().count == 80


def test_learned_positions_end_where_their_table_ends() -> None:
    model = BY_NAME["gpt2"].build("clearhead")
    assert not endless("sliding", model)
    with pytest.raises(PromptError, match="the prompt is too long"):
        generate(model, numbers(1, 1, 40), cache="sliding", max_new_tokens=40, observe=None)
    with pytest.raises(ArgumentError, match="max_new_tokens=None goes on without end"):
        generate(model, numbers(1, 1, 4), cache="sliding", max_new_tokens=None, observe=None)
    with pytest.raises(ModelError):
        generate(model, numbers(1, 1, 4), cache="sink", max_new_tokens=4, observe=None)


@pytest.mark.parametrize("name", ["int8", "sliding", "sink", "heavy"])
def test_a_conversation_goes_on_in_any_cache(bytes_model: LoadedModel, name: str) -> None:
    talk = Conversation(
        bytes_model,
        cache=lambda: make_cache(name, bytes_model.model, **SMALL),
        max_new_tokens=5,
        ignore_end=True,
    )
    for said in ("hello", "what is it?", "oh"):
        assert talk.say(said).result().count == 5


def test_bad_sizes_are_refused_by_the_cache_itself(bytes_model: LoadedModel) -> None:
    with pytest.raises(ArgumentError, match="window"):
        make_cache("sliding", bytes_model.model, window=0)
    with pytest.raises(ArgumentError, match="sinks must be fewer than the window"):
        make_cache("sink", bytes_model.model, window=4, sinks=4)


def test_a_cache_of_another_shape_is_refused(bytes_model: LoadedModel) -> None:
    running = generate(bytes_model, numbers(1, 1, 6), cache="dynamic", max_new_tokens=2)
    running.result()
    other = generate(
        loaded(5, num_key_value_heads=1), numbers(1, 1, 9), cache=running.cache, max_new_tokens=2
    )
    with pytest.raises(ch.ClearheadError, match="was filled by another model or batch"):
        next(other)
