"""`observe` shows what a model looked at: the same numbers as eager weights, and the model none the wiser."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from tests.models.families import BY_NAME, LLM, OWN_CODE, make, numbers, padded, text
from tests.trace import eager
from torch import Tensor, nn

import clearhead as ch
from clearhead.errors import ClearheadError, ModelError, ObserveError, ShapeError, TraceError
from clearhead.models.active import ACTIVE
from clearhead.observables import Account, Setting, Tile
from clearhead.trace.trace import Trace, View

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),
]

CLOSE = 2e-5  # absolute, float32
N = 12
IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 0, 1, 2, 2, 2], [2, 1, 0, 1, 1, 2, 0, 0, 2, 2, 1, 0]])


def close(got: Tensor, wanted: Tensor, what: object = "") -> None:
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    if not got.is_floating_point():
        assert torch.equal(got, wanted), (what, got, wanted)
    elif got.numel():
        assert float((got - wanted).abs().max()) <= CLOSE, what


def everything() -> list[ch.Observable | type[ch.Observable]]:
    """One of each observable; all need no choice of rows of their own."""
    return [
        ch.SegmentMass, ch.SegmentOutput, ch.Entropy(), ch.TopKeys(3), ch.KeyMass(), ch.MeanDistance(),
        ch.MaxWeight(), ch.PooledMap(3, 2), ch.Weights(rows="all"),
    ]  # fmt: skip


def model_of(name: str) -> nn.Module:
    return BY_NAME[name].build("clearhead")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# ---------------------------------------------------------------------- the model is none the wiser

FORWARDS = [
    "llama",
    "gemma3",
    "gpt-oss",
    "bert",
    "t5",
    "bart",
    "gpt2-cross",
    "vit",
    "clip",
    "mllama",
    "idefics",
]


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("side", [None, "left"])
def test_outputs_are_bit_equal_with_and_without(name: str, side: str | None) -> None:
    family, model = BY_NAME[name], model_of(name)
    inputs = family.inputs(side if side in family.sides else None)
    plain = model(**inputs)
    kinds = [ch.Entropy(), ch.TopKeys(2), ch.KeyMass(), ch.Weights(rows="all"), ch.PooledMap(2, 2)]
    with ch.observe(model, observe=kinds) as trace:
        seen = model(**inputs)
    assert len(trace.streams) >= 1
    for field, value in plain.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, seen[field]), field


GENERATE: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5}
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 10},
    "beams": {"do_sample": False, "num_beams": 3},
    "static": {"do_sample": False, "cache_implementation": "static"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "bart"])
def test_generation_is_bit_equal_with_and_without(name: str, way: str) -> None:
    model, settings = model_of(name), GENERATE | WAYS[way]
    inputs = text("left")
    runs = []
    for observing in (False, True):
        torch.manual_seed(3)
        kept = {"output_logits": True, "return_dict_in_generate": True}
        if observing:
            with ch.observe(model, observe=[ch.Entropy(), ch.KeyMass()]) as trace:
                runs.append(model.generate(**inputs, **settings, **kept))  # type: ignore[operator]
        else:
            runs.append(model.generate(**inputs, **settings, **kept))  # type: ignore[operator]
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(runs[0].logits, runs[1].logits, strict=True))
    new = 5 if name == "bart" else N + 4  # the last token that is generated is never a query
    assert trace[0].queries("entropy").tolist() == list(range(new))


# ---------------------------------------------------------------------- the numbers are eager's

STREAMS = {
    "llama": ("self",), "gemma3": ("self",), "gpt-oss": ("self",), "qwen2": ("self",), "bert": ("self",),
    "vit": ("self",), "t5": ("encoder", "self", "cross"), "bart": ("encoder", "self", "cross"),
    "gpt2-cross": ("self", "cross"), "clip": ("self", "vision"),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_every_answer_is_that_of_eager_s_weights(name: str) -> None:
    inputs, model = BY_NAME[name].inputs(None), model_of(name)
    wanted = eager.weights(name, inputs)
    keys = next(iter(wanted.values())).shape[-1] if len(wanted) == 1 else N
    named = "cross" in wanted and name != "gpt2-cross"
    ids = torch.arange(keys) % 3
    with ch.observe(model, ids, observe=[*everything(), Values()]) as trace:
        model(**inputs)
    assert set(trace.streams) == set(wanted) == set(STREAMS[name])
    for stream, P in wanted.items():
        for b in range(P.shape[1]):
            view = trace.stream(stream, item=b)
            segmented = stream in ("encoder", "cross") if named else stream == "self"
            assert ("mass" in view.values) == ("segment_output" in view.values) == segmented
            facts = eager.answers(P[:, b], ids if segmented else None, 4, view.values_of_keys)
            if stream == "cross":  # tokens of two texts have no distance
                assert facts.pop("mean_distance") is not None
            facts["pooled_map"] = eager.pooled(P[:, b], 3, 2)
            assert set(facts) | {"values_of_keys"} == set(view.values)
            for answer, value in facts.items():
                close(view.value(answer), value, (stream, b, answer))


def test_learned_sinks_take_a_share_that_no_segment_gets() -> None:
    model, inputs = model_of("gpt-oss"), text(None)
    with ch.observe(model, IDS) as trace:
        model(**inputs)
    total = trace[0].mass.sum(-1)
    assert float(total.max()) < 1
    close(total, eager.weights("gpt-oss", inputs)["self"][:, 0].sum(-1))


@pytest.mark.parametrize("name", ["mllama", "idefics"])
def test_cross_attention_to_images_is_a_stream_of_its_own(name: str) -> None:
    inputs, model = BY_NAME[name].inputs(None), model_of(name)
    with ch.observe(model, observe=ch.Weights(rows="all")) as trace:
        model(**inputs)
    eager_out = BY_NAME[name].build("eager")(**inputs, output_attentions=True)
    assert {"self", "cross", "vision"} <= set(trace.streams)
    layers = trace.stream("cross", item=0).layers
    assert layers == ((1,) if name == "mllama" else (0, 1)), "numbered as the model's own layers"
    cross = trace.stream("cross", item=0).weights
    assert cross.shape[2:] == (N, 10)
    rows = cross.sum(-1)
    assert bool(((rows - 1).abs() < CLOSE).logical_or(rows == 0).all())
    assert trace[0].weights.shape[2:] == (N, N)
    if name == "mllama":  # layer 1 looks across
        assert len(trace.streams) == 4, "its vision has two stacks, which are not mixed"
        close(trace[1].weights[0], eager_out.attentions[0][1])
        close(trace.stream("cross", item=1).weights[0], eager_out.attentions[1][1])


# ---------------------------------------------------------------------- one item of a padded batch

PADDED = [
    ("llama", "left"), ("llama", "right"), ("t5", "left"), ("bert-cross", "right"), ("idefics", "right"),
    ("gemma3", "left"), ("gpt-oss", "left"), ("bert", "right"), ("t5", "right"), ("bart", "right"),
    ("gpt2-cross", "right"), ("idefics", "left"), ("mllama", "left"), ("clip", "right"),
]  # fmt: skip
ROWS: dict[str, Any] = {"all": None, "last": "last", "slice": slice(1, 6, 2), "list": [0, 3, 6]}


def _with_rows(cases: list[tuple[str, str]], *, often: int) -> list[tuple[str, str, str]]:
    """Every case with all rows, the first few of them with the other choices too."""
    return [(*case, rows) for n, case in enumerate(cases) for rows in ROWS if n < often or rows == "all"]


def same_view(got: View, wanted: View, what: object = "") -> None:
    """Every answer, with its queries and axes."""
    assert got.values == wanted.values, what
    assert got.axes == wanted.axes, what
    assert (got.layers, got.heads) == (wanted.layers, wanted.heads), what
    for name in wanted.values:
        if "query" in wanted.axes[name.split(".")[0]]:
            base = name.split(".")[0]
            assert got.queries(base).tolist() == wanted.queries(base).tolist(), (what, name)
        close(got.value(name), wanted.value(name), (what, name))


@pytest.mark.parametrize(("name", "side", "rows"), _with_rows(PADDED, often=5))
def test_an_item_of_a_padded_batch_is_the_item_alone(name: str, side: str, rows: str) -> None:
    model, inputs = model_of(name), BY_NAME[name].inputs(side)
    if name in ("t5", "bart", "gpt2-cross", "bert-cross") and rows != "all":  # the looking side padded, too
        other = "attention_mask" if "cross" in name else "decoder_attention_mask"
        inputs[other] = padded("right", inputs["input_ids" if "cross" in name else "decoder_input_ids"].shape[1], 2)  # fmt: skip
    ids = IDS[:, :N]
    kinds = everything()
    with ch.observe(model, ids, observe=kinds, rows=ROWS[rows]) as together:
        model(**inputs)
    mask = inputs.get("attention_mask")
    for b in range(2):
        single = ids[b] if mask is None else ids[b][mask[b].bool()]
        with ch.observe(model, single, observe=kinds, rows=ROWS[rows]) as trace:
            model(**eager.alone(inputs, b))
        assert trace.streams == together.streams
        for stream in trace.streams:
            if not (stream == "vision" or "vision" in stream):
                same_view(together.stream(stream, item=b), trace.stream(stream), (stream, b))


GENERATED = [("llama", "static"), ("gemma3", "greedy"), ("llama", "greedy"), ("gemma3", "static"),
             ("gpt-oss", "greedy"), ("mistral", "static"), ("gpt2", "greedy"), ("bart", "greedy")]  # fmt: skip


@pytest.mark.parametrize(("name", "way", "rows"), _with_rows(GENERATED, often=2))
def test_a_generated_item_of_a_padded_batch_is_the_item_alone(name: str, way: str, rows: str) -> None:
    model, inputs = model_of(name), text("left")
    if name == "bart":
        inputs = text("right")  # learned positions count from the row's start
    kinds = everything()
    if rows == "list":  # a row may be in the prompt of one item and generated in another: other calls
        kinds = [kind for kind in kinds if not isinstance(kind, ch.PooledMap)]
    chosen = [0, 2, 9] if rows == "list" else ROWS[rows]
    with ch.observe(model, IDS, observe=kinds, rows=chosen) as together:
        tokens = model.generate(**inputs, **GENERATE, **WAYS[way])  # type: ignore[operator]
    for b in range(2):
        single = eager.alone(inputs, b)
        ids = IDS[b][inputs["attention_mask"][b].bool()]
        with ch.observe(model, ids, observe=kinds, rows=chosen) as trace:
            found = model.generate(**single, **GENERATE, **WAYS[way])  # type: ignore[operator]
        assert torch.equal(found[0, -5:], tokens[b, -5:])
        for stream in trace.streams:
            same_view(together.stream(stream, item=b), trace.stream(stream), (stream, b))


@pytest.mark.parametrize(("name", "way"), [("llama", "greedy"), ("llama", "static"), ("gemma3", "greedy"),
                                           ("gemma3", "static"), ("mistral", "greedy"), ("gpt-oss", "sampled")])  # fmt: skip
def test_generating_shows_what_eager_sees_when_it_reads_the_whole_text_at_once(name: str, way: str) -> None:
    model, ids = model_of(name), text(None)["input_ids"][:1]
    with ch.observe(model, IDS[0], observe=everything()) as trace:
        tokens = model.generate(ids, **GENERATE, **WAYS[way])  # type: ignore[operator]
    P = eager.weights(name, {"input_ids": tokens[:, :-1]})["self"][:, 0]
    segments = torch.cat([IDS[0], torch.full((4,), 3)])
    assert trace.segments == ("0", "1", "2", "output")
    assert trace.queries("mass").tolist() == list(range(N + 4))
    for answer, value in eager.answers(P, segments, 4).items():
        close(trace.stream().value(answer), value, answer)
    assert trace.axes["pooled_map"] == ("layer", "call", "head", "map_row", "map_column")


def test_a_beam_s_row_starts_as_its_item_and_sees_all_of_it() -> None:
    model, inputs = model_of("llama"), text("left")
    with ch.observe(model, IDS, observe=[ch.SegmentMass, ch.Weights(rows="all")]) as trace:
        model.generate(**inputs, **GENERATE, **WAYS["beams"])  # type: ignore[operator]
    assert len(trace) == 6
    P = eager.weights("llama", inputs)["self"]
    for row in range(6):
        b, view = row // 3, trace[row]
        real = [N, N - 4][b]
        assert view.queries("mass").tolist() == list(range(real + 4))
        close(view.weights[:, :, :real, :real], P[:, b, :, N - real :, N - real :])
        close(view.mass.sum(-1), torch.ones(2, 4, real + 4))


def test_a_beam_of_an_encoder_decoder_reads_its_own_text() -> None:
    model, inputs = model_of("bart"), text("right")
    with ch.observe(model, IDS, observe=[ch.SegmentMass, ch.KeyMass()]) as trace:
        model.generate(**inputs, **GENERATE, **WAYS["beams"])  # type: ignore[operator]
    assert len(trace) == 6
    assert trace.stream("encoder", item=1).mass.shape[2] == N - 4
    assert trace.stream("cross", item=5).key_mass.shape[2] == N - 4
    with pytest.raises(IndexError, match="item 2 is out of range: the trace holds 2"):
        trace.stream("encoder", item=2)


@pytest.mark.parametrize(
    ("name", "side"), [("llama", "left"), ("llama", "right"), ("t5", "left"), ("bert", "right")]
)
def test_padding_is_known_where_a_dense_mask_hides_it(
    name: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = model_of(name), BY_NAME[name].inputs(side)
    if name == "t5":
        inputs["decoder_attention_mask"] = padded("right", 7, 2)
    runs = []
    for _ in range(2):
        with ch.observe(model, IDS, observe=everything()) as trace:
            model(**inputs)
        runs.append(trace)
        monkeypatch.setattr("clearhead.models.carrier.decode", lambda *_: None)
    for stream in runs[0].streams:
        for b in range(2):
            same_view(runs[1].stream(stream, item=b), runs[0].stream(stream, item=b), (stream, b))


@pytest.mark.parametrize("side", ["left", "right"])
def test_last_is_each_item_s_own_last_token(side: str) -> None:
    model, inputs = model_of("llama"), text(side)
    with ch.observe(model, IDS, rows="last") as trace:
        model(**inputs)
    assert [trace[b].queries("mass").tolist() for b in range(2)] == [[N - 1], [N - 5]]
    with ch.observe(model, IDS) as whole:
        model(**inputs)
    for b in range(2):
        close(trace[b].mass, whole[b].mass[:, :, -1:])


def test_rows_of_a_padded_batch_are_counted_in_each_item_s_own_tokens() -> None:
    model, inputs = model_of("llama"), text("left")
    with ch.observe(model, observe=ch.Entropy(), rows=[9, 2]) as trace:
        model(**inputs)
    assert [trace[b].queries("entropy").tolist() for b in range(2)] == [[9, 2], [2]]


def test_a_prompt_that_comes_in_pieces_is_one_trace() -> None:
    model, inputs = model_of("gemma3"), text("left")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    kinds = [k for k in everything() if not isinstance(k, ch.PooledMap)]
    with ch.observe(model, IDS, observe=kinds) as whole:
        model(**inputs)
    cache = None
    with ch.observe(model, IDS, observe=kinds) as trace:
        for begin, end in [(0, 6), (6, 9), (9, 10), (10, 12)]:
            out = model(
                input_ids=ids[:, begin:end], attention_mask=mask[:, :end], cache=cache, use_cache=True
            )
            cache = out.cache
    for b in range(2):
        same_view(trace[b], whole[b], b)


def test_a_cache_that_was_filled_before_gives_the_later_rows() -> None:
    model, ids = model_of("llama"), text(None)["input_ids"]
    cache = model(input_ids=ids[:, :7], use_cache=True).cache
    with ch.observe(model, IDS, observe=[ch.SegmentMass, ch.Weights(rows="all")]) as trace:
        model(input_ids=ids[:, 7:], cache=cache)
    P = eager.weights("llama", {"input_ids": ids})["self"]
    assert trace[0].queries("weights").tolist() == [7, 8, 9, 10, 11]
    close(trace[0].weights, P[:, 0, :, 7:])
    close(trace[0].mass, eager.answers(P[:, 0], IDS[0], 4)["mass"][:, :, 7:])


def test_a_cache_that_was_cropped_takes_its_queries_with_it() -> None:
    model, ids = model_of("llama"), text(None)["input_ids"]
    other = numbers(8, 2, 4)
    with ch.observe(model, observe=ch.Weights(rows="all")) as trace:
        cache = model(input_ids=ids, use_cache=True).cache
        cache.crop(-4)
        model(input_ids=other, cache=cache)
    P = eager.weights("llama", {"input_ids": torch.cat([ids[:, :8], other], 1)})["self"]
    for b in range(2):
        assert trace[b].queries("weights").tolist() == list(range(12))
        close(trace[b].weights, P[:, b])


# ---------------------------------------------------------------------- which layers, heads, streams


def test_layers_and_heads_keep_their_numbers() -> None:
    model, inputs = model_of("t5"), BY_NAME["t5"].inputs(None)
    with ch.observe(model, observe=everything()[2:], layers=1, heads=[3, 0]) as trace:
        model(**inputs)
    with ch.observe(model, observe=everything()[2:]) as whole:
        model(**inputs)
    for stream in ("self", "cross", "encoder"):
        view, full = trace.stream(stream, item=1), whole.stream(stream, item=1)
        assert (view.layers, view.heads) == ((1,), (3, 0))
        for name in view.values:
            close(view.value(name), full.value(name)[1:][:, [3, 0]], (stream, name))


def test_one_stream_can_be_chosen_and_segments_then_name_what_it_looks_at() -> None:
    model, inputs = model_of("bart"), BY_NAME["bart"].inputs(None)
    wanted = eager.weights("bart", inputs)
    for stream, length in [("self", 7), ("cross", N), ("encoder", N)]:
        ids = torch.arange(length) % 2
        with ch.observe(model, ids, streams=stream) as trace:
            model(**inputs)
        assert trace.streams == (stream,)
        close(trace[0].mass, eager.answers(wanted[stream][:, 0], ids, 3)["mass"], stream)
    model, inputs = model_of("clip"), BY_NAME["clip"].inputs(None)
    with ch.observe(model, torch.arange(17) % 4, streams=["vision"]) as trace:
        model(**inputs)
    assert trace[1].mass.shape == (2, 4, 17, 5)


def test_segments_of_an_encoder_decoder_are_those_of_its_input() -> None:
    model, inputs = model_of("t5"), BY_NAME["t5"].inputs("left")
    with ch.observe(model, IDS) as trace:
        model(**inputs)
    assert trace.stream("self", item=0).values == ("entropy",)
    close(trace.stream("cross", item=1).mass.sum(-1), torch.ones(2, 4, 7))
    with pytest.raises(AttributeError, match=r"holds entropy, not 'mass'.*streams encoder, cross"):
        _ = trace[0].mass


def test_images_and_text_of_a_contrastive_model_may_be_of_different_number() -> None:
    model, inputs = model_of("clip"), BY_NAME["clip"].inputs(None)
    inputs["pixel_values"] = inputs["pixel_values"][:1]
    with ch.observe(model) as trace:
        model(**inputs)
    assert len(trace) == 2
    assert trace.stream("vision").entropy.shape == (2, 4, 17)
    with pytest.raises(TraceError, match="has 2 items: choose one"):
        trace.stream("self")


# ---------------------------------------------------------------------- what is kept


def whole(tensor: Tensor) -> bool:
    """Whether the tensor has its memory for itself, without a gradient."""
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return alone and not tensor.requires_grad


@pytest.mark.parametrize("side", [None, "right"])
def test_nothing_is_kept_but_what_was_asked_for(side: str | None) -> None:
    model, inputs = model_of("llama"), text(side)
    kinds = [
        *everything()[2:],
        ch.SegmentOutput(IDS, norms=True),
        Centre(),
        KeyExtremes(),
        ch.SegmentMass(IDS),
    ]
    with torch.enable_grad(), ch.observe(model, observe=kinds, rows="last") as trace:
        model(**inputs)
        recording = trace._source.__self__  # type: ignore[union-attr]
        layers = next(iter(recording._running.values())).layers.values()
        held = [
            part
            for layer in layers
            for answers in layer.answers.values()
            for part in answers[0].parts.values()
        ]
    assert len(held) == 2 * (len(kinds) + 2)
    assert all(whole(part) for part in held), "neither while the model runs"
    assert not any(layer.answers for layer in layers), "nothing is held twice afterwards"
    stream = trace.data.streams["self"]
    assert all(whole(part) for part in [*stream.values.values(), *stream.queries.values()])
    assert stream.real is None if side is None else whole(stream.real)  # type: ignore[arg-type]
    assert stream.values["weights"].shape == (2, 2, 4, 1, N)
    assert stream.values["entropy"].shape == (2, 2, 4, 1)


def test_a_trace_does_not_keep_the_model_alive() -> None:
    model = BY_NAME["llama"].fresh("clearhead")
    with ch.observe(model) as trace:
        model(**text(None))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert trace[0].entropy.shape == (2, 4, N)


def test_nothing_is_recorded_after_the_context() -> None:
    model = model_of("llama")
    with ch.observe(model) as trace:
        model(**text(None))
    before = trace.data.streams["self"].values["entropy"].clone()
    hooks = len(model._forward_pre_hooks)
    model(input_ids=numbers(5, 2, 9))
    assert torch.equal(trace.data.streams["self"].values["entropy"], before)
    assert hooks == 0
    assert ACTIVE.get() is None


def test_the_trace_can_be_read_while_the_model_runs() -> None:
    model, ids = model_of("llama"), text(None)["input_ids"][:1]
    with ch.observe(model) as trace:
        assert len(trace) == 0
        out = model(input_ids=ids, use_cache=True)
        assert trace.entropy.shape == (2, 4, N)
        model(input_ids=ids[:, :1], cache=out.cache)
        assert trace.entropy.shape == (2, 4, N + 1)
    assert trace.entropy.shape == (2, 4, N + 1)


def test_nested_contexts_each_record_their_model() -> None:
    outer, inner = model_of("llama"), model_of("bert")
    with (
        ch.observe(outer) as a,
        ch.observe(inner, observe=ch.MaxWeight()) as b,
        ch.observe(outer, layers=1) as c,
    ):
        outer(**text(None))
        inner(**text(None))
    assert (a[0].values, b[0].values) == (("entropy",), ("max_weight",))
    assert (a[0].layers, b[0].layers, c[0].layers) == ((0, 1), (0, 1), (1,))
    close(a[0].entropy[1:], c[0].entropy)


def test_an_error_inside_ends_the_context_and_keeps_the_run_before_it() -> None:
    model = model_of("llama")

    def fails() -> None:
        with ch.observe(model) as trace:
            kept.append(trace)
            model(**text(None))
            raise KeyboardInterrupt

    kept: list[Trace] = []
    with pytest.raises(KeyboardInterrupt):
        fails()
    assert ACTIVE.get() is None
    assert not model._forward_pre_hooks
    assert kept[0][0].entropy.shape == (2, 4, N)


def test_a_run_that_breaks_off_between_two_layers_says_so() -> None:
    model = BY_NAME["llama"].fresh("clearhead")

    def stop(*_: object) -> None:
        raise RuntimeError("stop")

    kept: list[Trace] = []

    def run() -> None:
        with ch.observe(model) as trace:
            kept.append(trace)
            out = model(**text(None), use_cache=True)
            model.model.layers[1].register_forward_pre_hook(stop)  # type: ignore[union-attr, operator, index]
            model(input_ids=numbers(3, 2, 1), cache=out.cache)

    with pytest.raises(RuntimeError, match="stop"):
        run()
    assert "broke off" in repr(kept[0])
    with pytest.raises(
        TraceError, match=r"entropy has shape .* in layer 0 and .* in layer 1: the run broke off"
    ):
        _ = kept[0][0]


def test_threads_do_not_mix() -> None:
    model = model_of("llama")
    traces: dict[int, Trace] = {}
    meet = threading.Barrier(3)

    def work(length: int) -> None:
        with torch.no_grad(), ch.observe(model) as trace:
            meet.wait(30)
            model(input_ids=numbers(length, 1, length))
            meet.wait(30)
        traces[length] = trace

    threads = [threading.Thread(target=work, args=(length,)) for length in (5, 9)]
    for thread in threads:
        thread.start()
    meet.wait(30)
    with ch.observe(model) as idle:
        meet.wait(30)
    for thread in threads:
        thread.join()
    assert {n: tuple(t.entropy.shape) for n, t in traces.items()} == {5: (2, 4, 5), 9: (2, 4, 9)}
    assert not idle.streams


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_records_once(reentrant: bool) -> None:
    model = BY_NAME["llama"].fresh("clearhead")
    with torch.enable_grad():
        model.train()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        model.enable_input_require_grads()  # type: ignore[operator]
        with ch.observe(model, observe=[ch.Entropy(), ch.KeyMass()]) as trace:
            loss = model(**text(None), labels=text(None)["input_ids"], use_cache=False).loss
            loss.backward()
    assert trace[0].queries("entropy").tolist() == list(range(N))
    close(trace[0].key_mass.sum(-1), torch.full((2, 4), float(N)))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_a_second_run_needs_a_second_context(name: str) -> None:
    model, inputs = model_of(name), BY_NAME[name].inputs(None)
    kept: list[Trace] = []

    def run() -> None:
        with ch.observe(model) as trace:
            kept.append(trace)
            model(**inputs)
            model(**inputs)

    with pytest.raises(TraceError, match=r"open a new observe\(\) for each run"):
        run()
    assert kept[0][0].queries("entropy")[0] == 0, "the first run is still there"


def test_generating_without_a_cache_says_to_leave_it_on() -> None:
    model = model_of("llama")
    with pytest.raises(TraceError, match="leave use_cache on"), ch.observe(model, rows="last"):
        model.generate(**text(None), **GENERATE, use_cache=False)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_model_that_does_not_use_clearhead_is_told_how_to(name: str) -> None:
    model = BY_NAME["llama"].fresh(name)
    with pytest.raises(ModelError, match=r'set_attn_implementation\("clearhead"\)'), ch.observe(model):
        pytest.fail("the context opened")


def test_a_model_with_its_own_attention_and_what_is_no_model_are_refused() -> None:
    with pytest.raises(ModelError, match="transformers model"), ch.observe(nn.Linear(2, 2)):
        pytest.fail("the context opened")
    assert "bloom" in OWN_CODE
    import transformers as tf

    cls, config = OWN_CODE["bloom"]
    with pytest.raises(ModelError, match="own code"), ch.observe(make(getattr(tf, cls), config(), "eager")):
        pytest.fail("the context opened")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "layer beyond": ({"layers": [0, 99]}, r"layers holds 99, this model has self: 0\.\.1"),
    "layer negative": ({"layers": -1}, "layers must be different integers of at least 0, got -1"),
    "layer twice": ({"layers": [1, 1]}, "layers must be different"),
    "layer float": ({"layers": [1.0]}, "layers must be different integers"),
    "layer bool": ({"layers": True}, "layers must be different integers"),
    "no layer": ({"layers": []}, "layers must be"),
    "head negative": ({"heads": [-2]}, "heads must be different integers"),
    "head word": ({"heads": "first"}, "heads must be different integers"),
    "rows negative": ({"rows": [-1]}, 'rows holds -1.*rows="last"'),
    "rows slice negative": ({"rows": slice(-3, None)}, "bounds count tokens from 0 on"),
    "rows step": ({"rows": slice(0, 4, -1)}, "step is at least 1"),
    "rows nothing": ({"rows": slice(4, 2)}, "chooses nothing"),
    "rows empty": ({"rows": []}, "non-empty list"),
    "rows float": ({"rows": [1.5]}, "rows must hold integers, got 1.5"),
    "rows tensor of booleans": ({"rows": torch.tensor([True])}, "rows must hold integers, got True"),
    "rows twice": ({"rows": [2, 2]}, "rows must differ"),
    "rows number": ({"rows": 3}, "rows must be 'all', 'last', a slice or a non-empty list of integers, got 3"),
    "rows word": ({"rows": "first"}, "rows must be 'all', 'last', a slice or a list of integers, got 'first'"),
    "rows of an observable": ({"observe": ch.Entropy(rows=[-4])}, "rows holds -4"),
    "stream": ({"streams": "cross"}, "streams must be out of self, got 'cross'"),
    "no stream": ({"streams": []}, "streams must be out of self"),
    "no observable": ({"observe": []}, "at least one observable"),
    "twice": ({"observe": [ch.Entropy(), ch.Entropy(rows="last")]}, "two observables named 'entropy'"),
    "class without segments": ({"observe": ch.SegmentMass}, "SegmentMass needs segments"),
    "class that needs arguments": ({"observe": [ch.TopKeys]}, r"TopKeys needs arguments, give it as TopKeys"),
    "no observable at all": ({"observe": ["entropy"]}, "observe must hold observables .* got 'entropy'"),
    "segments of two sizes": (
        {"segments": IDS, "observe": [ch.SegmentMass(IDS * 2)]}, "mass has 5 segments and the others 4",
    ),
    "segments float": ({"segments": IDS.float()}, "segments must be integers, got torch.float32"),
    "segments boolean": ({"segments": IDS > 0}, "segments must be integers, got torch.bool"),
    "segments negative": ({"segments": IDS - 1}, "segments must be at least 0, got -1"),
    "segments ragged": ({"segments": [[1], [2, 3]]}, "segments must be prompt.segments or numbers per token"),
    "segments word": ({"segments": "user"}, "segments must be prompt.segments"),
    "segments of three axes": ({"segments": IDS[None]}, "segments must have shape"),
    "no segments": ({"segments": torch.zeros(0, dtype=torch.long)}, "segments must have shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_right_is_refused_before_the_model_runs(case: str) -> None:
    arguments, message = BAD[case]
    with pytest.raises(ObserveError, match=message), ch.observe(model_of("llama"), **arguments):
        pytest.fail("the context opened")
    assert ACTIVE.get() is None


LATE: dict[str, tuple[dict[str, Any], str]] = {
    "head beyond": ({"heads": [4]}, r"heads holds 4, allowed are 0\.\.3: self attention"),
    "row beyond": ({"rows": [3, 12]}, r"entropy: rows holds 12, allowed are 0\.\.11 \(12 queries\)"),
    "slice beyond": ({"rows": slice(12, 20)}, "chooses none of the 12 queries"),
    "too few segments": ({"segments": IDS[:, :-1]}, "segments has 11 numbers, but self attention has 12 tokens"),
    "too many segments": ({"segments": torch.zeros(13, dtype=torch.long)}, "segments has 13 numbers, but self"),
}  # fmt: skip


@pytest.mark.parametrize("case", LATE)
def test_what_does_not_fit_the_run_is_an_error_and_not_silence(case: str) -> None:
    arguments, message = LATE[case]
    model = model_of("llama")
    with pytest.raises(ObserveError, match=message), ch.observe(model, **arguments):
        model(**text(None))
    assert ACTIVE.get() is None


def test_segments_of_the_wrong_length_are_found_in_generation_and_across() -> None:
    model = model_of("llama")
    longer = torch.zeros(N + 1, dtype=torch.long)
    with pytest.raises(ObserveError, match="segments has 13 numbers, but the prompt in the run has 12 tokens"), \
            ch.observe(model, longer):  # fmt: skip
        model.generate(**text(None), **GENERATE)  # type: ignore[operator]
    model, inputs = model_of("t5"), BY_NAME["t5"].inputs(None)
    for segments in (longer, longer[:7], ch.Segments(longer[:7], ["a", "output"], output=1)):
        with pytest.raises(ObserveError, match=r"segments has (13|7) numbers, but encoder attention has 12"), \
                ch.observe(model, segments):  # fmt: skip
            model(**inputs)


def test_segments_of_another_batch_are_refused() -> None:
    with pytest.raises(ShapeError, match="segment ids have 3 rows, but the batch has 2"), \
            ch.observe(model_of("llama"), torch.zeros(3, N, dtype=torch.long)):  # fmt: skip
        model_of("llama")(**text(None))


def test_segments_that_name_an_output_may_be_shorter_than_a_text_read_at_once() -> None:
    segments = ch.Segments([0, 0, 0, 1, 1], ["system", "user", "output"], output=2)
    with ch.observe(model_of("llama"), segments) as trace:
        model_of("llama")(**text(None))
    assert trace.segments == ("system", "user", "output")
    assert float(trace[0].mass[:, :, :5, 2].max()) == 0
    assert float(trace[0].mass[:, :, 5:, 2].min()) > 0


# ---------------------------------------------------------------------- a user's own observables


@dataclass(frozen=True, eq=False)
class Values(ch.Observable):
    """The values themselves, one for each query head: (B, Hq, Lk, dv)."""

    name: ClassVar[str] = "values_of_keys"

    @property
    def axes(self) -> tuple[str, ...]:
        return ("batch", "head", "key", "feature")

    def start(self, setting: Setting) -> Account:
        return _Constant(setting.v.repeat_interleave(setting.shape.Hq // setting.shape.Hkv, dim=1))


class _Constant:
    def __init__(self, answer: Tensor) -> None:
        self.answer = answer

    def add(self, tile: Tile) -> None:
        pass

    def result(self) -> Tensor:
        return self.answer


@dataclass(frozen=True, eq=False)
class Centre(ch.LinearObservable):
    """Where a query looks on average: the mean position of its keys. (B, Hq, R)."""

    name: ClassVar[str] = "centre"

    @property
    def axes(self) -> tuple[str, ...]:
        return ("batch", "head", "query")

    def values(self, setting: Setting) -> Tensor:
        positions = setting.key_positions.to(setting.dtype)
        return torch.stack([positions, positions**2], dim=-1)[None, None]

    def finish(self, mean: Tensor, setting: Setting) -> Tensor:
        return mean[..., 0]  # a view of something larger


class Extremes(NamedTuple):
    most: Tensor
    total: Tensor


@dataclass(frozen=True, eq=False)
class KeyExtremes(ch.Observable):
    """Largest weight and whole weight that each key got: two (B, Hq, Lk)."""

    name: ClassVar[str] = "key_extremes"

    @property
    def axes(self) -> tuple[str, ...]:
        return ("batch", "head", "key")

    def start(self, setting: Setting) -> Account:
        s = setting.shape
        both = setting.zeros(2, s.B, s.Hq, s.Lk)
        return _ExtremesAccount(Extremes(both[0], both[1]))  # views of something larger


class _ExtremesAccount:
    def __init__(self, answer: Extremes) -> None:
        self.answer = answer

    def add(self, tile: Tile) -> None:
        most, total = (t[:, :, tile.cols] for t in self.answer)
        most.copy_(torch.maximum(most, tile.weights.amax(2)))
        total += tile.weights.sum(2)

    def result(self) -> Extremes:
        return self.answer


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_user_s_own_observables_go_the_whole_way(side: str | None, tmp_path: Any) -> None:
    model, inputs = model_of("llama"), text(side)
    with ch.observe(model, observe=[Centre, KeyExtremes(), ch.KeyMass()]) as trace:
        model(**inputs)
    trace.save(tmp_path / "own")
    loaded = ch.Trace.load(tmp_path / "own")
    P = eager.weights("llama", inputs)["self"]
    for b in range(2):
        real = (inputs["attention_mask"][b].bool() if side else torch.ones(N).bool()).nonzero()[:, 0]
        mine = P[:, b][:, :, real][..., real]
        for view in (trace[b], loaded[b]):
            close(view.centre, mine @ real.float())
            most, total = view.key_extremes
            close(most, mine.amax(2))
            close(total, mine.sum(2))
            close(view.key_mass, total)


@dataclass(frozen=True, eq=False)
class Faulty(Centre):
    """An observable whose answer is not what it says."""

    kind: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        more = {"rank": ("batch", "head", "query", "what"), "order": ("head", "batch", "query"),
                "twice": ("batch", "head", "head")}  # fmt: skip
        return more.get(self.kind, super().axes)

    def finish(self, mean: Tensor, setting: Setting) -> Any:
        return mean[..., 0].tolist() if self.kind == "list" else mean[..., 0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rank", r"centre has shape \(2, 4, 12\) for the axes"),
        ("order", 'must differ and start with "batch", "head"'),
        ("twice", 'must differ and start with "batch", "head"'),
        ("list", "centre must answer with a tensor or a named tuple of tensors, got list"),
    ],
)
def test_an_observable_whose_answer_is_not_what_it_says_is_told_so(kind: str, message: str) -> None:
    with pytest.raises(ObserveError, match=message), ch.observe(model_of("llama"), observe=Faulty(kind)):
        model_of("llama")(**text(None))


def test_every_error_of_this_file_can_be_caught_as_one() -> None:
    kinds: list[Callable[..., Exception]] = [ModelError, ObserveError, ShapeError, TraceError]
    assert all(issubclass(kind, ClearheadError) for kind in kinds)  # type: ignore[arg-type]


@pytest.mark.model
def test_smollm2_shows_eager_s_numbers(smollm2: Any) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer
    ids = tokenizer("The animal didn't cross the road because it was tired.", return_tensors="pt")[
        "input_ids"
    ]
    segments = torch.arange(ids.shape[1]) % 3
    with ch.observe(model, segments, observe=[ch.SegmentMass, ch.Entropy()], layers=[0, 29]) as trace:
        out = model(input_ids=ids, output_attentions=True)
    P = torch.stack([out.attentions[0], out.attentions[29]])[:, 0].float()
    wanted = eager.answers(P, segments, 4)
    assert trace.layers == (0, 29)
    close(trace.mass, wanted["mass"])
    close(trace.entropy, wanted["entropy"])
    assert LLM["num_hidden_layers"] == 2


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_item_whose_whole_input_is_padding_has_no_attention_and_hurts_no_other(name: str) -> None:
    model = model_of(name)
    inputs = dict(BY_NAME[name].inputs(None))
    mask = torch.ones(inputs["input_ids"].shape, dtype=torch.long)
    mask[1] = 0
    asked = [ch.KeyMass(), ch.PooledMap(2, 2)]
    with ch.observe(model, None, asked) as trace:
        model(**inputs | {"attention_mask": mask})
    cross = trace.stream("cross", item=0)
    assert float(cross.key_mass.sum()) > 0
    assert trace.stream("cross", item=1).key_mass.sum() == 0


def test_a_context_that_is_left_elsewhere_still_lets_go_of_the_model() -> None:
    import contextvars

    model = model_of("llama")
    context = ch.observe(model, None, ch.Entropy())
    trace = contextvars.copy_context().run(context.__enter__)
    with pytest.raises(ValueError, match="was created in a different Context"):
        context.__exit__(None, None, None)
    assert not model._forward_pre_hooks
    with pytest.raises(TraceError, match="the trace is empty"):
        trace.entropy  # noqa: B018


def test_the_segments_of_one_prompt_are_refused_for_a_padded_batch() -> None:
    model = model_of("llama")
    inputs = BY_NAME["llama"].inputs("left")
    one = ch.Segments(IDS[0], ["a", "b", "c", "output"], output=3)
    with (
        pytest.raises(ObserveError, match=r"give numbers for every row, \(B, L\)"),
        ch.observe(model, one, [ch.SegmentMass]),
    ):
        model(**inputs)
    with (
        pytest.raises(ObserveError, match=r"Prompt.batch\(prompts\).segments"),
        ch.observe(model, [one, one]),
    ):
        pass


def test_a_part_of_an_answer_is_asked_for_by_its_whole_name() -> None:
    model = model_of("llama")
    with ch.observe(model, None, ch.TopKeys(2)) as trace:
        model(**{name: value[:1] for name, value in BY_NAME["llama"].inputs(None).items()})
    with pytest.raises(TraceError, match="not 'top_keys': name one of its parts"):
        trace.to_pandas("top_keys")
    assert len(trace.to_pandas("top_keys.weights"))
