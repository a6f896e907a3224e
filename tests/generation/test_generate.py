"""`generate` gives the tokens of `model.generate`, one by one, with what the heads looked at while it ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.families import BY_NAME, make, numbers
from torch import Tensor

import clearhead as ch
from clearhead.errors import ArgumentError, ModelError, ObserveError, PromptError, ShapeError
from clearhead.generation.generating import Generation, generate
from clearhead.models.loading import LoadedModel

from .bytes import END, loaded

FAMILIES = ["llama", "qwen2", "gemma2", "gemma3", "gpt2", "gpt-oss", "gpt-neox", "mistral"]
SAMPLING = [
    {"temperature": 0.7, "seed": 1},
    {"top_k": 5, "seed": 2},
    {"top_p": 0.6, "seed": 3},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"seed": 5},
]


@pytest.fixture(scope="module")
def bytes_model() -> LoadedModel:
    return loaded()


def theirs(model: Any, ids: Tensor, count: int, **how: Any) -> list[int]:
    """What model.generate gives."""
    if "seed" in how:
        torch.manual_seed(how.pop("seed"))
        how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0} | how
    else:
        how = {"do_sample": False}
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, eos_token_id=None, **how)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    model = BY_NAME[name].build("clearhead")
    ids = numbers(3, 1, 9)
    got = generate(model, ids, max_new_tokens=12, ignore_end=True, observe=None).result()
    assert got.ids == theirs(model, ids, 12)
    assert got.stopped == "length"


@pytest.mark.parametrize("how", SAMPLING, ids=str)
def test_sampled_tokens_are_those_of_transformers_with_the_same_seed(
    bytes_model: LoadedModel, how: dict[str, Any]
) -> None:
    ids = numbers(4, 1, 9)
    got = generate(bytes_model, ids, max_new_tokens=20, ignore_end=True, **how).result()
    assert got.ids == theirs(bytes_model.model, ids, 20, **how)
    assert got.seed == how["seed"]


def test_without_a_seed_one_is_taken_that_gives_the_same_again(bytes_model: LoadedModel) -> None:
    first = generate(bytes_model, "once", max_new_tokens=12, temperature=1.2).result()
    again = generate(bytes_model, "once", max_new_tokens=12, temperature=1.2, seed=first.seed).result()
    assert first.ids == again.ids
    assert generate(bytes_model, "once", max_new_tokens=12, temperature=1.2).result().seed != first.seed


def test_a_temperature_of_0_is_greedy_whatever_the_seed(bytes_model: LoadedModel) -> None:
    greedy = generate(bytes_model, "once", max_new_tokens=6).result()
    same = generate(bytes_model, "once", max_new_tokens=6, temperature=0, top_k=3, seed=8).result()
    assert (same.ids, same.seed) == (greedy.ids, None)


# ---------------------------------------------------------------------- observing


@pytest.mark.parametrize("name", FAMILIES)
def test_observing_changes_no_token_and_no_probability(name: str) -> None:
    model = BY_NAME[name].build("clearhead")
    ids = numbers(3, 1, 9)
    plain = generate(model, ids, max_new_tokens=8, ignore_end=True, observe=None).result()
    seen = generate(
        model, ids, max_new_tokens=8, ignore_end=True, observe=[ch.SegmentMass, ch.Entropy, ch.TopKeys(3)]
    ).result()
    assert seen.ids == plain.ids
    assert [t.logprob for t in seen.tokens] == [t.logprob for t in plain.tokens]


def traced(loaded: LoadedModel, prompt: ch.Prompt, count: int) -> Any:
    """The same generation by transformers under clearhead.observe, whose last queries are looked at."""
    asked = [ch.SegmentMass(prompt.segments, rows="last"), ch.Entropy(rows="last")]
    with torch.inference_mode(), ch.observe(loaded.model, prompt.segments, asked) as trace:
        loaded.model.generate(**prompt.inputs, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return trace


def test_what_was_seen_is_what_a_trace_of_the_same_run_says(bytes_model: LoadedModel) -> None:
    prompt = ch.Prompt(
        [ch.Segment("ask", "user", "why?"), ch.Segment("page", "data", "so.")], bytes_model.tokenizer
    )
    got = generate(
        bytes_model,
        prompt,
        max_new_tokens=6,
        ignore_end=True,
        observe=[ch.SegmentMass, ch.Entropy],
        average=(),
    )
    tokens = list(got)
    trace = traced(bytes_model, prompt, 6)
    assert got.sources == ("ask", "page", "template", "output", "first token")
    mass = torch.stack([t.mass for t in tokens if t.mass is not None], 2)  # (L, H, tokens, S)
    assert mass.shape == (2, 4, 6, 5)
    assert torch.allclose(mass.sum(-1), torch.ones(2, 4, 6), atol=1e-6)
    mass[..., 2] += mass[..., 4]  # the first token is the template's
    assert torch.allclose(mass[..., :4], trace.mass, atol=1e-6)
    entropy = torch.stack([t.seen["entropy"] for t in tokens], 2)
    assert torch.allclose(entropy, trace.entropy, atol=1e-5)


@pytest.mark.parametrize(
    ("average", "shape"),
    [((), (2, 4, 4)), ("head", (2, 4)), (("layer",), (4, 4)), (("layer", "head"), (4,))],
    ids=str,
)
def test_answers_are_averaged_over_what_was_asked(
    bytes_model: LoadedModel, average: Any, shape: tuple[int, ...]
) -> None:
    token = next(generate(bytes_model, "abc", average=average))
    assert token.mass is not None
    assert token.mass.shape == shape
    everything = next(generate(bytes_model, "abc", average=()))
    assert everything.mass is not None
    flat = token.mass.reshape(-1, shape[-1])
    assert torch.allclose(flat.mean(0), everything.mass.mean((0, 1)), atol=1e-6)


def test_new_tokens_are_the_source_output(bytes_model: LoadedModel) -> None:
    tokens = list(generate(bytes_model, "abc", max_new_tokens=4, ignore_end=True))
    shares = [float(t.mass[-2]) for t in tokens if t.mass is not None]
    assert shares[0] == 0
    assert all(share > 0 for share in shares[1:])


def test_the_best_keys_are_named_by_their_places(bytes_model: LoadedModel) -> None:
    tokens = list(generate(bytes_model, "abc", max_new_tokens=3, ignore_end=True, observe=ch.TopKeys(2)))
    places = tokens[-1].seen["top_keys.indices"]
    assert places.shape == (2, 4, 2)
    assert int(places.max()) <= 4
    assert tokens[-1].seen["top_keys.weights"].shape == (2, 4, 2)


def test_somebody_who_watches_already_goes_on_watching(bytes_model: LoadedModel) -> None:
    ids = numbers(4, 1, 6)
    with ch.observe(bytes_model.model, observe=ch.Entropy()) as trace:
        generate(bytes_model, ids, max_new_tokens=3, ignore_end=True).result()
    assert trace.entropy.shape == (2, 4, 8)


def test_nobody_watches_between_two_tokens(bytes_model: LoadedModel) -> None:
    from clearhead.models.active import ACTIVE

    running = generate(bytes_model, "abc")
    next(running)
    assert ACTIVE.get() is None


# ---------------------------------------------------------------------- where it ends


def test_it_ends_with_the_models_end_token(bytes_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    third = generate(bytes_model, "abc", max_new_tokens=3, ignore_end=True).result().ids[-1]
    monkeypatch.setattr(bytes_model.model.generation_config, "eos_token_id", [END, third])
    ended = generate(bytes_model, "abc", max_new_tokens=9).result()
    assert ended.stopped == "end"
    assert ended.ids[-1] == third
    assert third not in ended.ids[:-1]
    assert len(generate(bytes_model, "abc", max_new_tokens=9, ignore_end=True).result().ids) == 9


@pytest.mark.model
def test_a_stop_string_that_spans_tokens_is_not_shown(smollm2: LoadedModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    whole = generate(smollm2, question, max_new_tokens=8, observe=None).result()
    assert whole.text.startswith("The capital of France is Paris")
    stopped = generate(smollm2, question, max_new_tokens=8, stop=["xyz", "al of Fr"], observe=None)
    shown = [token.text for token in stopped]
    result = stopped.result()
    assert "".join(shown) == result.text == "The capit"
    assert result.stopped == "stop string"
    assert result.ids == whole.ids[: len(result.ids)]


@pytest.mark.model
def test_it_is_what_the_real_model_says_by_itself(smollm2: LoadedModel) -> None:
    prompt = ch.Prompt([ch.Segment("q", "user", "Write a smiley 😀 and é.")], smollm2.tokenizer)
    got = generate(smollm2, prompt, max_new_tokens=24)
    shown = [token.text for token in got]
    with torch.inference_mode():
        want = smollm2.model.generate(**prompt.inputs, max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    result = got.result()
    assert result.ids == want.tolist()
    assert "".join(shown) == result.text == smollm2.tokenizer.decode(want, skip_special_tokens=True)
    assert result.cache_bytes == 30 * 2 * 3 * 64 * 4 * (len(prompt) + len(result.ids) - 1)


def test_broken_off_it_leaves_the_text_so_far(bytes_model: LoadedModel) -> None:
    whole = generate(bytes_model, "abc", max_new_tokens=8, ignore_end=True).result()
    running = generate(bytes_model, "abc", max_new_tokens=8, ignore_end=True)
    shown = next(running).text + next(running).text + running.stop()
    result = running.result()
    assert (result.text, result.stopped, result.ids) == (shown, "stopped", whole.ids[:2])
    assert list(running) == []


def test_the_result_can_be_had_at_once_and_says_how_fast_it_was(bytes_model: LoadedModel) -> None:
    running = generate(bytes_model, "abc", max_new_tokens=5, ignore_end=True)
    assert running.so_far().first_token_s is None
    result = running.result()
    assert result.count == len(result.tokens) == 5
    assert result.prompt_tokens == 3
    assert result.first_token_s is not None
    assert result.first_token_s > 0
    assert result.tokens_per_s is not None
    assert result.tokens_per_s > 0
    assert result.cache_bytes == 2 * 2 * 2 * 8 * 4 * 7


def test_what_is_not_kept_is_handed_out_all_the_same(bytes_model: LoadedModel) -> None:
    kept = generate(bytes_model, "abc", max_new_tokens=5, ignore_end=True).result()
    loose = generate(bytes_model, "abc", max_new_tokens=5, ignore_end=True, keep=False)
    assert [token.id for token in loose] == kept.ids
    assert (loose.so_far().tokens, loose.so_far().count) == ((), 5)


# ---------------------------------------------------------------------- the prompt and the cache


def test_a_prompt_read_in_pieces_gives_the_same(bytes_model: LoadedModel) -> None:
    text = "a longer text than one piece"
    whole = generate(bytes_model, text, max_new_tokens=5, ignore_end=True, average=()).result()
    pieces = generate(
        bytes_model, text, max_new_tokens=5, ignore_end=True, average=(), prefill_chunk=5
    ).result()
    assert whole.ids == pieces.ids
    for a, b in zip(whole.tokens, pieces.tokens, strict=True):
        assert a.mass is not None
        assert b.mass is not None
        assert torch.allclose(a.mass, b.mass, atol=1e-5)
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_a_cache_that_holds_the_beginning_is_not_filled_again(bytes_model: LoadedModel) -> None:
    text = "the beginning and the end"
    whole = generate(bytes_model, text, max_new_tokens=5, ignore_end=True).result()
    first = generate(bytes_model, "the beginning", max_new_tokens=1)
    next(first)
    rest = generate(bytes_model, text, max_new_tokens=5, ignore_end=True, cache=first.cache)
    assert rest.result().ids == whole.ids
    with pytest.raises(ArgumentError, match="at least the last must be new"):
        generate(bytes_model, "the", cache=rest.cache)


def test_logprob_is_the_models_own_before_temperature(bytes_model: LoadedModel) -> None:
    ids = numbers(4, 1, 6)
    token = next(generate(bytes_model, ids, temperature=0.3, seed=1))
    with torch.inference_mode():
        logits = bytes_model.model(ids).logits[0, -1]
    assert token.logprob == pytest.approx(float(logits.log_softmax(-1)[token.id]), abs=1e-5)


def test_a_text_a_chat_segments_and_a_prompt_are_read_as_what_they_are(bytes_model: LoadedModel) -> None:
    segments = [ch.Segment("user", "user", "hm")]
    prompt = ch.Prompt(segments, bytes_model.tokenizer)
    asked: list[Any] = [prompt, segments, [{"role": "user", "content": "hm"}], prompt.input_ids, prompt.text]
    runs = [generate(bytes_model, one, max_new_tokens=3, ignore_end=True) for one in asked]
    assert len({tuple(run.result().ids) for run in runs}) == 1
    assert [run.sources[0] for run in runs] == ["user", "user", "user", "text", "text"]


def test_a_transformers_model_needs_a_tokenizer_only_for_text(bytes_model: LoadedModel) -> None:
    ids = bytes_model.tokenizer("abc", return_tensors="pt")["input_ids"]
    mute = generate(bytes_model.model, ids, max_new_tokens=3, ignore_end=True).result()
    assert mute.text == ""
    spoken = generate(
        bytes_model.model, "abc", tokenizer=bytes_model.tokenizer, max_new_tokens=3, ignore_end=True
    )
    assert spoken.result().ids == mute.ids
    with pytest.raises(ArgumentError, match="a text or a chat needs a tokenizer"):
        generate(bytes_model.model, "abc")


# ---------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"max_new_tokens": 0},
            ArgumentError,
            "max_new_tokens must be a whole number of at least 1, or None, got 0",
        ),
        ({"max_new_tokens": True}, ArgumentError, "max_new_tokens must be a whole number"),
        (
            {"max_new_tokens": None},
            ArgumentError,
            "max_new_tokens=None goes on without end, which takes a cache",
        ),
        (
            {"prefill_chunk": -1},
            ArgumentError,
            "prefill_chunk must be a whole number of at least 1, or None, got -1",
        ),
        ({"temperature": -1}, ArgumentError, "temperature must be a finite number of at least 0, got -1"),
        (
            {"temperature": float("nan")},
            ArgumentError,
            "temperature must be a finite number of at least 0, got nan",
        ),
        ({"top_k": 0}, ArgumentError, "top_k must be a whole number of at least 1, got 0"),
        ({"top_p": 1.5}, ArgumentError, "top_p must be above 0 and at most 1, got 1.5"),
        ({"seed": -3}, ArgumentError, "seed must be a whole number from 0 to"),
        ({"seed": 1.5}, ArgumentError, "seed must be a whole number from 0 to"),
        ({"stop": [1]}, ArgumentError, "stop must be a string or a list of strings"),
        (
            {"cache": "big"},
            ArgumentError,
            "cache must be one of dynamic, sliding, sink, int8, heavy, paged or a cache",
        ),
        ({"cache": 5}, ArgumentError, "cache must be a name or a cache of transformers, got int"),
        ({"average": "query"}, ArgumentError, 'average must be out of "layer" and "head"'),
        ({"observe": [3]}, ObserveError, "observe must hold observables such as Entropy"),
        ({"observe": [ch.TopKeys]}, ObserveError, "TopKeys needs arguments"),
        ({"observe": [ch.SegmentMass(torch.zeros(3).long())]}, ObserveError, "give SegmentMass as a class"),
        ({"observe": [ch.Entropy, ch.Entropy()]}, ObserveError, "two observables named 'entropy'"),
        ({"max_new_tokens": 5000}, PromptError, "the prompt is too long: it has 3 tokens and 5000 more"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused_at_once(
    bytes_model: LoadedModel, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generate(bytes_model, "abc", **arguments)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", PromptError, "the prompt must have at least one token"),
        ([], PromptError, "must hold at least one message"),
        ([{"role": "king", "content": "x"}], PromptError, "role must be one of"),
        (5, ArgumentError, "prompt must be a Prompt, a text, a chat"),
        (torch.zeros(2, 3).long(), ShapeError, "tokens must have shape"),
        (torch.zeros(0).long(), ShapeError, "n at least 1"),
        (torch.zeros(3), ArgumentError, "tokens must be integers"),
    ],
    ids=str,
)
def test_prompts_that_are_none_are_refused(
    bytes_model: LoadedModel, prompt: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generate(bytes_model, prompt)


@pytest.mark.parametrize(
    ("name", "message"), [("t5", "is an encoder-decoder"), ("bert", "has no next token")]
)
def test_models_that_do_not_continue_one_text_are_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        generate(BY_NAME[name].build("clearhead"), numbers(1, 1, 4))


def test_a_model_that_attends_elsewhere_can_write_but_not_be_watched() -> None:
    family = BY_NAME["llama"]
    model = family.build("eager")
    with pytest.raises(ModelError, match='set to attn_implementation="eager"'):
        generate(model, numbers(3, 1, 9))
    got: Generation = generate(model, numbers(3, 1, 9), observe=None, max_new_tokens=5, ignore_end=True)
    ours = make(type(model), family.config(), "clearhead")
    assert got.result().ids == theirs(ours, numbers(3, 1, 9), 5)
