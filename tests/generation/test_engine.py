"""Requests that share a model get what they would get alone, and what one of them does harms no other."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from tests.models.families import EXPERTS, GPT2, LAYER_KINDS, LLM, V
from torch import Tensor

import clearhead as ch
from clearhead.errors import ArgumentError, EngineError, ModelError, PoolFullError
from clearhead.generation.engine import Engine

SMALL = 1 << 20
LENGTHS = (5, 12, 33, 40, 1, 17, 64, 8)
WINDOW = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 13}
KINDS = {
    "Llama": (tf.LlamaForCausalLM, tf.LlamaConfig, LLM),
    "GPT-2": (tf.GPT2LMHeadModel, tf.GPT2Config, {**GPT2, "n_positions": 128}),
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
    "Llama4": (
        tf.Llama4ForCausalLM,
        tf.Llama4TextConfig,
        {
            **LLM,
            **EXPERTS,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 4,
            "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 1,
        },
    ),
}
_MADE: dict[str, Any] = {}


def tiny(kind: str = "Llama") -> Any:
    """A tiny model with weights large enough to show errors."""
    if kind not in _MADE:
        model_class, config_class, settings = KINDS[kind]
        torch.manual_seed(0)
        model = model_class._from_config(config_class(**settings), attn_implementation="clearhead").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.25 * torch.randn_like(parameter))
        _MADE[kind] = model
    return _MADE[kind]


def ids(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, V - 4, (length,), generator=generator).tolist()


def alone(model: Any, prompt: list[int], new: int = 20, **more: Any) -> list[int]:
    """What `generate` gives for this prompt by itself."""
    given = torch.tensor([prompt])
    settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new, **more}
    out = model.generate(given, attention_mask=torch.ones_like(given), **settings)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [alone(tiny(), ids(n, n)) for n in LENGTHS]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(tiny(), cache_bytes=SMALL, max_batch=4, page=16) as made:
        yield made


def everything_is_free(engine: Engine) -> bool:
    """Whether nothing is held but what is kept for later, and nothing at all without that."""
    prefixes = engine._scheduler.prefixes
    kept = 0 if prefixes is None else len(prefixes)
    held = engine.pool.used
    engine.forget_prefixes()
    return held == kept and engine.pool.used == 0 and not any(engine.pool.references)


SETTINGS = {
    "all at once": {"max_batch": 8},
    "two at a time": {"max_batch": 2},
    "prompts in chunks": {"max_batch": 8, "step_tokens": 16},
    "no sharing": {"max_batch": 8, "share_prefixes": False},
    "large blocks": {"max_batch": 8, "page": 64},
    "a pool of 8 blocks": {"max_batch": 8, "page": 16, "cache_bytes": 8 * 4096},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_request_gets_what_it_would_get_alone(setting: str, expected: list[list[int]]) -> None:
    with Engine(tiny(), **{"cache_bytes": SMALL, **SETTINGS[setting]}) as engine:
        handles = [engine.submit(ids(n, n), max_new_tokens=20, stop_tokens=()) for n in LENGTHS]
        engine.run()
        assert [handle.result().ids for handle in handles] == expected
        assert (engine.counts.preempted > 0) == (setting == "a pool of 8 blocks")
        assert everything_is_free(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_families_with_windows_sinks_and_chunks_are_served_alike(kind: str) -> None:
    model = tiny(kind)
    with Engine(model, cache_bytes=SMALL, step_tokens=16) as engine:
        handles = [engine.submit(ids(n, n), max_new_tokens=12, stop_tokens=()) for n in (5, 21, 1, 33)]
        assert [h.result().ids for h in handles] == [alone(model, ids(n, n), 12) for n in (5, 21, 1, 33)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_half_precision_and_bytes_are_served_too(dtype: torch.dtype, expected: list[list[int]]) -> None:
    half = dtype is torch.bfloat16
    model = copy.deepcopy(tiny()).to(dtype) if half else tiny()
    with Engine(model, cache_bytes=SMALL, dtype=None if half else dtype) as engine:
        assert engine.pool.dtype is dtype
        handles = [engine.submit(ids(n, n), max_new_tokens=20, stop_tokens=()) for n in LENGTHS]
        got = [handle.result().ids for handle in handles]
    wanted = [alone(model, ids(n, n)) for n in LENGTHS] if half else expected
    same = sum(
        a == b for one, other in zip(got, wanted, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert same > 0.8 * 20 * len(LENGTHS)  # roundings may part two texts, and then they stay apart


def test_requests_are_admitted_while_others_run(engine: Engine, expected: list[list[int]]) -> None:
    handles = []
    for n in LENGTHS:
        handles.append(engine.submit(ids(n, n), max_new_tokens=20, stop_tokens=()))
        engine.step()
        engine.step()
    assert handles[0]._request.given
    assert [handle.result().ids for handle in handles] == expected


def test_tokens_come_one_by_one(engine: Engine, expected: list[list[int]]) -> None:
    first, second = (engine.submit(ids(n, n), max_new_tokens=20, stop_tokens=()) for n in LENGTHS[:2])
    came = []
    for token in first:
        came.append(token.id)
        assert len(first._request.given) == len(came)  # nothing runs ahead of who reads
    assert came == expected[0]
    assert [token.id for token in second] == expected[1]
    assert [token.id for token in second] == expected[1]  # and again
    assert len(first.seconds) == 20
    assert sorted(first.seconds) == list(first.seconds)


def test_a_common_beginning_is_computed_once() -> None:
    system = ids(64, 9)
    prompts = [system + ids(5 + n, n) for n in range(6)]
    with Engine(tiny(), cache_bytes=SMALL, page=16) as engine:
        handles = [engine.submit(prompt, max_new_tokens=8, stop_tokens=()) for prompt in prompts]
        got = [handle.result().ids for handle in handles]
        assert got == [alone(tiny(), prompt, 8) for prompt in prompts]
        new = sum(len(prompt) + 8 - 1 for prompt in prompts)
        assert engine.counts.shared == 5 * 64
        assert engine.counts.computed == new - 5 * 64
        again = engine.submit(prompts[0], max_new_tokens=8, stop_tokens=())  # known from before
        assert again.result().ids == got[0]
        assert engine.counts.shared == 6 * 64
        assert everything_is_free(engine)


def test_blocks_kept_for_later_make_room_when_they_must() -> None:
    with Engine(tiny(), cache_bytes=8 * 4096, page=16) as engine:
        for seed in range(6):
            engine.submit(ids(90, seed), max_new_tokens=4, stop_tokens=()).result()
        assert engine.counts.preempted == 0
        assert everything_is_free(engine)


def test_a_seed_gives_the_same_tokens_in_any_company(engine: Engine) -> None:
    how = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5, "max_new_tokens": 15, "stop_tokens": ()}
    by_itself = engine.submit(ids(12), **how).result()
    others = [engine.submit(ids(n, n), max_new_tokens=9, temperature=1.2) for n in LENGTHS]
    in_company = engine.submit(ids(12), **how)
    assert in_company.result().ids == by_itself.ids
    assert by_itself.seed == 5
    torch.manual_seed(5)
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    assert by_itself.ids == alone(tiny(), ids(12), 15, **sampled)
    assert len({tuple(other.result().ids) for other in others}) > 1


def test_a_request_ends_at_a_stop_token_and_says_so(engine: Engine, expected: list[list[int]]) -> None:
    stop = expected[1][6]
    first = expected[1].index(stop)
    result = engine.submit(ids(12, 12), stop_tokens=[stop], max_new_tokens=20).result()
    assert result.ids == expected[1][: first + 1]
    assert result.stopped == "end"
    result = engine.submit(ids(12, 12), stop_tokens=(), max_new_tokens=4).result()
    assert (result.stopped, result.count) == ("length", 4)


def test_cancelled_requests_keep_what_came_and_free_their_blocks(engine: Engine, expected: Any) -> None:
    running = engine.submit(ids(5, 5), max_new_tokens=100, stop_tokens=())
    rest = [engine.submit(ids(n, n), max_new_tokens=20, stop_tokens=()) for n in LENGTHS]
    stream = iter(running)
    came = [next(stream).id for _ in range(3)]
    waiting = rest.pop()
    waiting.cancel()
    running.cancel()
    fresh = engine.submit(ids(4), max_new_tokens=20)
    fresh.cancel()  # before any step has seen it
    assert fresh.result().ids == []
    assert running.result().stopped == waiting.result().stopped == "stopped"
    assert running.result().ids == came == expected[0][:3]
    assert [handle.result().ids for handle in rest] == expected[:-1]
    running.cancel()  # once more does nothing
    assert everything_is_free(engine)


class TroubleError(RuntimeError):
    pass


def troubled(model: Any, poison: int) -> Any:
    """Make the model raise in its last layer whenever a token is in the row. Returns the hooks."""
    seen: dict[str, Tensor] = {}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen["ids"] = kwargs["input_ids"]

    def fail(module: Any, args: Any, out: Any) -> None:
        if bool((seen["ids"] == poison).any()):
            raise TroubleError("the model raised")

    first = model.register_forward_pre_hook(note, with_kwargs=True)
    return first, model.model.layers[-1].register_forward_hook(fail)


def test_a_model_that_raises_ends_only_the_request_that_made_it(expected: list[list[int]]) -> None:
    hooks = troubled(tiny(), poison=V - 1)
    try:
        with Engine(tiny(), cache_bytes=SMALL, max_batch=16, page=16) as engine:
            good = [engine.submit(ids(n, n), max_new_tokens=20, stop_tokens=()) for n in LENGTHS[:4]]
            for _ in range(4):
                engine.step()
            bad = engine.submit([*ids(30), V - 1, 5], max_new_tokens=5)
            good += [engine.submit(ids(n, n), max_new_tokens=20, stop_tokens=()) for n in LENGTHS[4:]]
            assert [handle.result().ids for handle in good] == expected
            with pytest.raises(TroubleError, match="the model raised"):
                bad.result()
            with pytest.raises(TroubleError):
                list(bad)
            assert isinstance(bad.error, TroubleError)
            assert everything_is_free(engine)
    finally:
        for hook in hooks:
            hook.remove()


def test_a_model_that_says_nan_ends_that_request_and_its_numbers_stay_its_own(expected: Any) -> None:
    seen: dict[str, Tensor] = {}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen["ids"] = kwargs["input_ids"]

    def spoil(module: Any, args: Any, out: Tensor) -> Tensor:
        return out.masked_fill((seen["ids"] == V - 1)[..., None], float("nan"))

    model = tiny()
    hooks = [
        model.register_forward_pre_hook(note, with_kwargs=True),
        model.model.embed_tokens.register_forward_hook(spoil),
    ]
    try:
        with Engine(model, cache_bytes=9 * 4096, max_batch=4, page=16) as engine:
            bad = engine.submit([*ids(40), V - 1], max_new_tokens=5)
            with pytest.raises(EngineError, match="logits hold NaN"):
                bad.result()
            good = [engine.submit(ids(n, n), max_new_tokens=20, stop_tokens=()) for n in LENGTHS]
            assert [handle.result().ids for handle in good] == expected  # in blocks that held NaN
            assert everything_is_free(engine)
    finally:
        for hook in hooks:
            hook.remove()


def test_an_interrupt_leaves_the_engine_as_it_was(engine: Engine, expected: list[list[int]]) -> None:
    handle = engine.submit(ids(12, 12), max_new_tokens=20, stop_tokens=())
    engine.step()
    hook = tiny().model.layers[-1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    hook.remove()
    assert handle.result().ids == expected[1]


def test_each_new_token_says_what_it_looked_at(engine: Engine) -> None:
    prompt = ids(21)
    numbers = [0] * 6 + [1] * 10 + [2] * 5
    others = [engine.submit(ids(n, n), max_new_tokens=9, stop_tokens=()) for n in LENGTHS]
    handle = engine.submit(prompt, max_new_tokens=6, stop_tokens=(), segments=numbers)
    other = engine.submit(ids(7), max_new_tokens=6, stop_tokens=(), segments=[0] * 3 + [1] * 4)
    result = handle.result()
    assert result.sources == ("0", "1", "2", "output")
    given = torch.tensor([prompt])
    with ch.observe(tiny(), numbers, [ch.SegmentMass], rows="last") as trace:
        tiny().generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=6,
            eos_token_id=None,
        )
    for at, token in enumerate(result.tokens):
        assert token.mass is not None
        assert token.mass.shape == (2, 4, 4)
        assert (token.mass - trace.mass[:, :, at]).abs().max() < 1e-5
    mass = other.result().tokens[0].mass
    assert mass is not None
    assert mass.shape == (2, 4, 3)
    assert all(handle.result().tokens[0].mass is None for handle in others)


def test_a_thread_of_its_own_serves_many(expected: list[list[int]]) -> None:
    with Engine(tiny(), cache_bytes=SMALL, max_batch=3).start() as engine:
        got: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            n = LENGTHS[number]
            handle = engine.submit(ids(n, n), max_new_tokens=20, stop_tokens=())
            got[number] = [token.id for token in handle] if number % 2 else handle.result(60).ids

        askers = [threading.Thread(target=ask, args=(number,)) for number in range(len(LENGTHS))]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(60)
        assert [got[number] for number in range(len(LENGTHS))] == expected
        slow = engine.submit(ids(5), max_new_tokens=100, stop_tokens=())
        with pytest.raises(TimeoutError, match=r"did not end within 0\.001 seconds"):
            slow.result(timeout=0.001)
    with pytest.raises(EngineError, match="did not end: the engine is closed"):
        slow.result()
    assert not any(thread.name == "clearhead-engine" for thread in threading.enumerate())


def test_a_closed_engine_does_nothing_any_more(engine: Engine) -> None:
    done = engine.submit(ids(5), max_new_tokens=3, stop_tokens=())
    done.result()
    open_one = engine.submit(ids(5), max_new_tokens=3)
    engine.close()
    engine.close()
    for call in (lambda: engine.submit(ids(3)), engine.step, engine.start, lambda: engine.pool):
        with pytest.raises(EngineError, match="the engine is closed: it takes no requests"):
            call()
    with pytest.raises(EngineError, match="request 2 did not end: the engine is closed"):
        open_one.result()
    assert done.result().count == 3


REFUSED = [
    ({"prompt": []}, ArgumentError, "prompt is empty"),
    ({"prompt": [1, V]}, ArgumentError, f"prompt holds tokens 1 to {V}, the model has 0 to {V - 1}"),
    ({"prompt": "text"}, ArgumentError, "the engine has no tokenizer"),
    ({"prompt": torch.zeros(2, 3).long()}, ArgumentError, r"one sequence.*\(2, 3\)"),
    ({"prompt": 3.5}, ArgumentError, "prompt must be text, a clearhead.Prompt or token ids, got 3.5"),
    ({"max_new_tokens": 0}, ArgumentError, "max_new_tokens must be an integer of at least 1, got 0"),
    (
        {"max_new_tokens": 125},
        ArgumentError,
        "4 tokens, with max_new_tokens=125 that is 129: the model takes 128",
    ),
    ({"max_new_tokens": 100}, PoolFullError, "room for 103: the pool has room for 64"),
    ({"temperature": -1}, ArgumentError, "temperature"),
    ({"temperature": 1, "top_p": 0}, ArgumentError, "top_p"),
    ({"stop": "x"}, ArgumentError, "without one there is no text to stop at"),
    ({"stop": 7}, ArgumentError, "stop must be a string or a list of strings, got 7"),
    ({"stop_tokens": "x"}, ArgumentError, "stop_tokens must be a list of token ids or None, got 'x'"),
    ({"stop_tokens": [1.5]}, ArgumentError, r"stop_tokens must be integers of at least 0, got \[1.5\]"),
    ({"segments": [0, 1]}, ArgumentError, r"name each of the 4 tokens of the prompt, got \(2,\)"),
    ({"segments": ["a"]}, ArgumentError, "segments must be Segments, or a number for each token"),
    ({"segments": ch.Segments([0] * 4, ["a"])}, ArgumentError, "segments must have an output"),
]


@pytest.mark.parametrize(("asked", "error", "says"), REFUSED)
def test_what_cannot_be_done_is_refused_at_once(asked: dict, error: type, says: str) -> None:
    with Engine(tiny(), cache_bytes=4 * 4096, page=16) as engine:
        with pytest.raises(error, match=says):
            engine.submit(**{"prompt": [1, 2, 3, 4], "max_new_tokens": 5, **asked})
        assert not engine.step()


def test_models_and_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(PoolFullError, match="cache_bytes=100 is too small"):
        Engine(tiny(), cache_bytes=100)
    with pytest.raises(ArgumentError, match="step_tokens=8 must be at least max_batch=16"):
        Engine(tiny(), step_tokens=8)
    with pytest.raises(ArgumentError, match="max_batch must be an integer of at least 1, got 0"):
        Engine(tiny(), max_batch=0)
    eager = tf.LlamaForCausalLM._from_config(tf.LlamaConfig(**LLM), attn_implementation="eager")
    with pytest.raises(ModelError, match="training mode"):
        Engine(eager.train())
    with pytest.raises(ModelError):
        Engine(eager.eval())
    t5 = tf.T5ForConditionalGeneration._from_config(
        tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=V),
        attn_implementation="clearhead",
    )
    with pytest.raises(ModelError, match="is not a decoder that generates text"):
        Engine(t5.eval())


def test_watching_from_outside_is_refused_with_a_way_out(engine: Engine) -> None:
    with ch.observe(tiny(), observe=[ch.Entropy()]):
        handle = engine.submit(ids(5), max_new_tokens=2)
        with pytest.raises(ModelError, match=r"give segments to submit\(\)"):
            handle.result()
