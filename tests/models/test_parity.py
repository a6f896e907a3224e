"""A model computes the same with clearhead as with its own eager code, in every way it can be used.

Every mask that is made on the way is compared with the dense one of transformers' own `sdpa_mask`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from clearhead.errors import ModelError, ShapeError, SizeError
from clearhead.models import adapter
from clearhead.models.active import ACTIVE, Call
from clearhead.models.carrier import CarriedMask, mask_function
from clearhead.observables import Entropy, KeyMass, Observable, TopKeys

from .families import BY_NAME, FAMILIES, LLM, VISION, Family, N, V, floats, make, numbers, padded, text

TOLERANCE = 1e-5  # absolute, float32, on real positions

#: BERT with cross-attention cannot generate in transformers 5.24, not with eager either.
GENERATIVE = [f for f in FAMILIES if f.kind in ("decoder", "seq2seq") and f.name != "bert-cross"]
TEXT_ONLY = [f for f in FAMILIES if f.kind == "decoder" and f.inputs is text]


class MaskCheck:
    """Our mask function, held to `sdpa_mask` on every call."""

    def __init__(self) -> None:
        self.calls = 0
        self.unknown = 0

    def __call__(self, **arguments: Any) -> CarriedMask:
        carried = mask_function(**arguments)
        B, q, k = (arguments[name] for name in ("batch_size", "q_length", "kv_length"))
        plain = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        wanted = sdpa_mask(**{**arguments, **plain})
        got = carried.mask.to_dense(q, k, batch=B).expand(B, 1, q, k)
        assert torch.equal(got, wanted.expand(B, 1, q, k)), (carried, arguments)
        self.calls += 1
        self.unknown += carried.mask.dense is not None
        return carried


@pytest.fixture(autouse=True)
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[MaskCheck]:
    """Check every mask of the test; none of them may have needed the dense way out."""
    check = MaskCheck()
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "clearhead", check)
    yield check
    assert check.unknown == 0


class Watcher:
    """A recorder that asks for some of everything and counts."""

    def __init__(self, *observables: Observable) -> None:
        self.asked = observables
        self.calls: list[Call] = []
        self.seen: list[Sequence[Any]] = []

    def observables(self, call: Call) -> Sequence[Observable]:
        self.calls.append(call)
        return self.asked

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        assert tuple(observables) == self.asked
        self.seen.append(seen)


@contextmanager
def watched(*observables: Observable) -> Iterator[Watcher]:
    """Watch the attention calls of the block."""
    watcher = Watcher(*observables)
    token = ACTIVE.set(watcher)
    try:
        yield watcher
    finally:
        ACTIVE.reset(token)


def real(values: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Only the positions that are not padding; all, where no text axis is there."""
    mask = inputs.get("attention_mask")
    if mask is None or values.shape[:2] != mask.shape:
        return values
    return values[mask.bool()]


def distance(a: Any, b: Any, inputs: dict[str, Tensor]) -> float:
    """The largest absolute difference of any tensor in two model outputs, on real positions."""
    worst, compared = 0.0, 0
    for name, wanted in a.items():
        if isinstance(wanted, Tensor) and wanted.is_floating_point():
            if name == "encoder_last_hidden_state" and "decoder_input_ids" not in inputs:
                continue
            got = b[name]
            assert got.shape == wanted.shape, name
            assert got.isfinite().all(), name
            worst = max(worst, float((real(got, inputs) - real(wanted, inputs)).abs().max()))
            compared += 1
    assert compared
    return worst


CASES = [pytest.param(f, side, id=f"{f}-{side or 'full'}") for f in FAMILIES for side in f.sides]


@pytest.mark.parametrize(("family", "side"), CASES)
def test_the_logits_are_eager_s_and_watching_does_not_change_a_bit(family: Family, side: str | None) -> None:
    inputs = family.inputs(side)
    eager, ours = family.build("eager"), family.build("clearhead")
    with torch.no_grad():
        wanted, got = eager(**inputs), ours(**inputs)
        with watched(Entropy(), TopKeys(2), KeyMass()) as watcher:
            again = ours(**inputs)
    assert distance(wanted, got, inputs) <= TOLERANCE
    assert len(watcher.seen) == len(watcher.calls) >= 2
    for name, value in got.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, again[name]), name


def test_every_mask_of_the_families_was_compared(masks: MaskCheck) -> None:
    for name, calls in {"llama": 1, "gemma3": 2, "bert": 1, "t5": 3}.items():
        before = masks.calls
        with torch.no_grad():
            BY_NAME[name].build("clearhead")(**BY_NAME[name].inputs("left"))
        assert masks.calls - before == calls, name


# ---------------------------------------------------------------------- caches and generation


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", TEXT_ONLY, ids=str)
def test_a_cache_gives_what_recomputing_gives(family: Family, side: str | None) -> None:
    inputs = text(side)
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    model = family.build("clearhead")
    with torch.no_grad():
        whole = model(**inputs).logits
        pieces, cache = [], None
        for begin, end in [(0, 6), (6, 9), (9, 10), (10, 11), (11, 12)]:
            seen = {} if mask is None else {"attention_mask": mask[:, :end]}
            out = model(input_ids=ids[:, begin:end], cache=cache, use_cache=True, **seen)
            pieces.append(out.logits)
            cache = out.cache
    steps = torch.cat(pieces, 1)
    assert float((real(steps, inputs) - real(whole, inputs)).abs().max()) <= TOLERANCE


def generated(model: nn.Module, inputs: dict[str, Tensor], **settings: Any) -> Any:
    """Seven tokens, and the logits of each step."""
    inputs = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    return model.generate(  # type: ignore[operator]
        **inputs,
        max_new_tokens=7,
        min_new_tokens=7,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )


def same_generation(wanted: Any, got: Any) -> None:
    assert torch.equal(wanted.sequences, got.sequences)
    assert len(wanted.logits) == len(got.logits) >= 6
    for step, (a, b) in enumerate(zip(wanted.logits, got.logits, strict=True)):
        assert float((a - b).abs().max()) <= TOLERANCE, step


WAYS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", GENERATIVE, ids=str)
def test_generation_is_eager_s_token_by_token(family: Family, way: str) -> None:
    inputs = family.inputs("left" if "left" in family.sides else None)
    eager, ours = family.build("eager"), family.build("clearhead")
    same_generation(generated(eager, inputs, **WAYS[way]), generated(ours, inputs, **WAYS[way]))


def test_watching_does_not_change_generation() -> None:
    model, inputs = BY_NAME["gemma3"].build("clearhead"), text("left")
    plain = generated(model, inputs)
    with watched(Entropy(rows="last")) as watcher:
        seen = generated(model, inputs)
    assert torch.equal(plain.sequences, seen.sequences)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, seen.logits, strict=True))
    assert len(watcher.seen) == 2 * 7
    assert [int(call.offset) for call in watcher.calls[::2]] == [0, *range(N, N + 6)]


# ---------------------------------------------------------------------- packed documents


@pytest.mark.parametrize("family", [f for f in FAMILIES if "packed" in f.tags], ids=str)
def test_packed_documents_are_separate(family: Family) -> None:
    ids = numbers(7, 1, 16)
    lengths = [5, 3, 8]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    eager, ours = family.build("eager"), family.build("clearhead")
    with torch.no_grad():
        wanted = eager(input_ids=ids, position_ids=positions, use_cache=False).logits
        got = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = torch.cat([ours(input_ids=part).logits for part in ids.split(lengths, 1)], 1)
    assert float((got - wanted).abs().max()) <= TOLERANCE
    assert float((got - alone).abs().max()) <= TOLERANCE


def test_chunks_of_documents_that_do_not_start_at_zero_go_the_dense_way(masks: MaskCheck) -> None:
    ids, positions = numbers(7, 1, 10), torch.tensor([[3, 4, 5, 6, 7, 2, 3, 4, 5, 6]])
    eager, ours = (BY_NAME["llama4"].build(name) for name in ("eager", "clearhead"))
    with torch.no_grad():
        wanted = eager(input_ids=ids, position_ids=positions, use_cache=False).logits
        got = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert float((got - wanted).abs().max()) <= TOLERANCE
    assert masks.unknown == 1
    masks.unknown = 0


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if "trained" in f.tags], ids=str)
def test_checkpointed_training_has_eager_s_loss_and_gradients(
    family: Family, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    attention = adapter.attention
    monkeypatch.setattr(adapter, "attention", lambda *a, **k: computed.append(1) or attention(*a, **k))
    inputs = family.inputs("right")
    labels = numbers(9, 2, 7 if family.kind == "seq2seq" else N)
    if family.kind == "seq2seq":
        inputs.pop("decoder_input_ids")
    results = []
    for name in ("eager", "clearhead"):
        model = family.fresh(name)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for part in model.modules():  # the rates that attention functions get
            for rate in ("attention_dropout", "attn_dropout", "dropout", "dropout_prob"):
                if isinstance(getattr(part, rate, None), float):
                    setattr(part, rate, 0.0)
        model.train()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        with watched(Entropy()) as watcher:
            loss = model(**inputs, labels=labels).loss
            forward = len(watcher.seen)
            loss.backward()
        assert len(watcher.seen) == forward, "the recomputation was recorded too"
        assert forward == (0 if name == "eager" else len({call.module for call in watcher.calls}))
        results.append((loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (eager_loss, eager_grads), (loss, grads) = results
    assert len(computed) == 2 * forward, "nothing was recomputed: the test tests nothing"
    assert loss == pytest.approx(eager_loss, abs=TOLERANCE)
    assert grads.keys() == eager_grads.keys()
    assert len(grads) > 10
    for name, wanted in eager_grads.items():
        limit = TOLERANCE * max(1.0, float(wanted.abs().max()))
        assert float((grads[name] - wanted).abs().max()) <= limit, name


# ---------------------------------------------------------------------- weights for who asks for them

#: `output_attentions=True` does not reach the attention function of these (transformers 5.24).
NOT_ASKED = {"gpt2", "gpt2-cross", "gpt2-upcast", "siglip"}


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_output_attentions_gives_eager_s_weights(family: Family) -> None:
    inputs = family.inputs(None)
    with torch.no_grad():
        wanted, got = (
            family.build(name)(**inputs, output_attentions=True) for name in ("eager", "clearhead")
        )
    compared = 0
    for field in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        ours = getattr(got, field, None)
        for layer, theirs in enumerate(getattr(wanted, field, None) or ()):
            if ours and layer < len(ours) and ours[layer].shape == theirs.shape:
                assert float((ours[layer] - theirs).abs().max()) <= TOLERANCE, (field, layer)
                compared += 1
    if family.name in NOT_ASKED:
        assert compared == 0
    elif family.kind != "vision":
        assert compared >= 2


def test_weights_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "WEIGHTS_LIMIT", 2 * 4 * N * N - 1)
    with pytest.raises(SizeError, match=r"2 x 4 x 12 x 12 = 1152 weights per layer, more than 1151"):
        BY_NAME["llama"].build("clearhead")(**text(None), output_attentions=True)


def test_no_weights_are_made_for_who_does_not_ask() -> None:
    model = BY_NAME["llama"].build("clearhead")
    assert model(**text(None)).attentions is None
    assert all(layer is None for layer in model(**text(None), output_attentions=False).attentions or ())


# ---------------------------------------------------------------------- masks of the user, images in the text


@pytest.mark.parametrize("kind", ["additive", "bool"])
def test_a_dense_mask_of_the_user_is_obeyed(kind: str, masks: MaskCheck) -> None:
    allowed = torch.ones(2, 1, N, N, dtype=torch.bool).tril()
    allowed[1, :, :, 3] = False
    allowed[1, :, 3, 3] = True
    additive = torch.zeros(2, 1, N, N).masked_fill(~allowed, torch.finfo(torch.float32).min)
    ids = text(None)["input_ids"]
    eager, ours = (BY_NAME["llama"].build(name) for name in ("eager", "clearhead"))
    with torch.no_grad():
        wanted = eager(input_ids=ids, attention_mask=additive).logits
        got = ours(input_ids=ids, attention_mask=additive if kind == "additive" else allowed).logits
    assert float((got - wanted).abs().max()) <= TOLERANCE
    assert masks.calls == 0


def gemma3_with_images(implementation: str) -> nn.Module:
    """Gemma 3 with pictures of four tokens, which see each other both ways."""
    language = {
        **LLM,
        "head_dim": 8,
        "query_pre_attn_scalar": 13,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = tf.Gemma3Config(
        text_config=language,
        vision_config=dict(VISION),
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    return make(tf.Gemma3ForConditionalGeneration, config, implementation)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_pictures_in_gemma_3_see_themselves_both_ways(side: str | None, masks: MaskCheck) -> None:
    ids = numbers(1, 2, N)
    ids[:, 4:8] = 60
    mask = padded(side, pads=3)
    inputs = {
        "input_ids": ids,
        "token_type_ids": (ids == 60).long(),
        "pixel_values": floats(3, 2, 3, 16, 16),
    } | ({} if mask is None else {"attention_mask": mask})
    eager, ours = gemma3_with_images("eager"), gemma3_with_images("clearhead")
    with torch.no_grad():
        wanted, got = eager(**inputs).logits, ours(**inputs).logits
    assert float((real(got, inputs) - real(wanted, inputs)).abs().max()) <= TOLERANCE
    assert masks.calls >= 2
    same_generation(generated(eager, inputs), generated(ours, inputs))


# ---------------------------------------------------------------------- the attention function by itself


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_no_further_from_the_truth_than_eager(dtype: torch.dtype) -> None:
    inputs = text(None)
    with torch.no_grad():
        truth = BY_NAME["llama"].fresh("eager").double()(**inputs).logits
        eager, ours = (
            BY_NAME["llama"].fresh(name).to(dtype)(**inputs).logits for name in ("eager", "clearhead")
        )
    assert ours.dtype == dtype
    assert float((ours - truth).abs().max()) <= 2 * float((eager - truth).abs().max())


def call(**changes: Any) -> tuple[Tensor, Tensor | None]:
    """The attention function on small tensors, as a layer would call it."""
    states = [floats(i, 2, 5, heads, 8).transpose(1, 2) for i, heads in enumerate([4, 2, 2])]
    module = nn.Identity().eval()
    arguments: dict[str, Any] = {"attention_mask": None, "scaling": 0.3, "dropout": 0.0}
    return adapter.attention_function(module, *states, **{**arguments, **changes})


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["fused", "tiles"])
def test_out_is_laid_out_as_transformers_wants_it(softcap: float | None) -> None:
    out, weights = call(softcap=softcap)
    assert out.shape == (2, 5, 4, 8)
    assert out.is_contiguous()
    assert weights is None


def test_none_hides_nothing_whatever_is_causal_says() -> None:
    assert torch.equal(call()[0], call(is_causal=True)[0])


def test_unknown_keywords_are_no_failure() -> None:
    assert torch.equal(call()[0], call(position_ids=None, use_cache=True, anything=object())[0])


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_keywords_that_would_change_the_result_are_refused(name: str) -> None:
    assert torch.equal(call()[0], call(**{name: None})[0])
    with pytest.raises(ModelError, match=rf"Identity passes {name}= .*eager"):
        call(**{name: torch.zeros(1)})


def test_dropout_falls_only_in_training() -> None:
    assert torch.equal(call()[0], call(dropout=0.5)[0])


def test_different_dtypes_are_brought_together() -> None:
    q, k, v = (floats(i, 1, 2, 3, 8) for i in range(3))
    module = nn.Identity()
    out, _ = adapter.attention_function(module, q, k, v.bfloat16(), None)
    wanted, _ = adapter.attention_function(module, q, k, v.bfloat16().float(), None)
    assert out.dtype == torch.float32
    assert torch.equal(out, wanted)


def test_a_mask_of_other_sizes_is_refused() -> None:
    mask = mask_function(
        batch_size=2,
        q_length=5,
        kv_length=7,
        mask_function=tf.masking_utils.causal_mask_function,
    )
    with pytest.raises(
        ShapeError, match=r"made for .* \(2, 1, 5, 7\), but the layer has B = 2, Lq = 5, Lk = 5"
    ):
        call(attention_mask=mask)


def test_masks_of_other_kinds_are_refused() -> None:
    with pytest.raises(ModelError, match=r"must be None, a tensor or a mask made by clearhead.*got str"):
        call(attention_mask="causal")


def test_a_model_that_takes_the_mask_apart_is_told_so() -> None:
    mask = CarriedMask((1, 1, V, V), adapter.Mask(causal=True))
    for attempt in (lambda: mask[:, :, :2], lambda: mask + 1, lambda: 1.0 - mask, mask.to_dense):
        with pytest.raises(ModelError, match="takes the attention mask apart"):
            attempt()
    assert "CarriedMask((1, 1, 64, 64), Mask(causal=True))" in repr(mask)
