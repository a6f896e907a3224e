"""A model whose attention does not go through clearhead is refused; nothing is left on its own path unseen."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from clearhead.errors import ModelError
from clearhead.models import probe
from clearhead.models.active import ACTIVE
from clearhead.models.probe import Coverage, check, ensure_supported

from .families import BY_NAME, FAMILIES, LLM, OWN_CODE, SEQ2SEQ, Family, make, text

#: Modules that the made-up inputs do not reach, and that are watched instead.
UNSEEN = {"idefics": 4, "mllama": 3}


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_probe_sees_every_attention_module_or_says_which_not(family: Family) -> None:
    model = family.build("clearhead")
    coverage = check(model)
    assert len(coverage.unseen) == UNSEEN.get(family.name, 0), coverage
    assert len(coverage.ours) + len(coverage.unseen) >= 2
    assert coverage.outside == (("vision_model.head.attention",) if family.name == "siglip" else ())
    assert bool(coverage.reason) == bool(coverage.unseen)


@pytest.mark.parametrize("name", OWN_CODE)
def test_families_with_their_own_attention_are_refused(name: str) -> None:
    kind, config = OWN_CODE[name]
    model = make(getattr(tf, kind), config(), "eager")
    with pytest.raises(ModelError, match=rf"{kind} computes attention in its own code.*Allowed are .*Llama"):
        ensure_supported(model)


def test_a_family_that_does_it_half_and_half_is_refused_by_the_probe() -> None:
    config = tf.LongT5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    model = make(tf.LongT5ForConditionalGeneration, config, "clearhead")
    with pytest.raises(ModelError, match=r"LongT5LocalAttention\) ran in a probe without calling clearhead"):
        check(model)


def test_another_implementation_is_refused_with_the_way_out() -> None:
    model = BY_NAME["llama"].build("eager")
    with pytest.raises(ModelError, match=r'"eager".*model.set_attn_implementation\("clearhead"\)'):
        ensure_supported(model)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "llama", None])
def test_what_is_no_transformers_model_is_refused(model: Any) -> None:
    with pytest.raises(ModelError, match=f"must be a transformers model .* got {type(model).__name__}"):
        check(model)


def test_a_wrapped_model_is_found() -> None:
    inner = BY_NAME["llama"].build("clearhead")
    assert check(nn.Sequential(inner)) == check(inner)


def test_the_probe_leaves_no_trace() -> None:
    model = BY_NAME["llama"].fresh("clearhead")
    model.train()
    model.model.layers[0].eval()  # type: ignore[operator, union-attr, index]
    flags = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    check(model)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert ACTIVE.get() is None


def test_a_model_is_probed_once_for_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].fresh("clearhead")
    probed = []
    monkeypatch.setattr(probe, "check", lambda root: probed.append(root) or Coverage((), (), (), None))
    ensure_supported(model)
    ensure_supported(model)
    assert len(probed) == 1
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    ensure_supported(model)
    assert len(probed) == 2


def test_half_a_model_is_allowed_and_the_other_half_named() -> None:
    model = BY_NAME["llava"].fresh("eager")
    model.set_attn_implementation({"text_config": "clearhead"})  # type: ignore[operator]
    with pytest.warns(UserWarning, match=r"vision_tower\S*self_attn.* does not go through clearhead"):
        coverage = ensure_supported(model)
    assert all("language_model" in name for name in coverage.ours)
    assert len(coverage.ours) == len(coverage.outside) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensure_supported(model)  # said once


# ---------------------------------------------------------------------- what the probe cannot reach


def test_unseen_modules_are_watched_until_they_have_called() -> None:
    family = BY_NAME["idefics"]
    model = family.fresh("clearhead")
    assert len(ensure_supported(model).unseen) == UNSEEN["idefics"]
    hooked = [module for module in model.modules() if module._forward_pre_hooks]
    assert len(hooked) == UNSEEN["idefics"]
    with torch.no_grad():
        wanted = family.build("clearhead")(**family.inputs(None)).logits
        assert torch.equal(model(**family.inputs(None)).logits, wanted)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in hooked)
    assert ACTIVE.get() is None


class OwnAttention(nn.Module):
    """Attention that asks nobody."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        weights = (hidden_states @ hidden_states.transpose(-2, -1)).softmax(-1)
        return weights @ hidden_states, None


def test_a_layer_on_its_own_path_is_refused() -> None:
    model = BY_NAME["llama"].fresh("clearhead")
    model.model.layers[1].self_attn = OwnAttention()  # type: ignore[operator, union-attr, index]
    with pytest.raises(ModelError, match=r"model.layers.1.self_attn \(OwnAttention\) ran in a probe"):
        check(model)


def test_a_watched_module_on_its_own_path_fails_its_first_forward() -> None:
    model = BY_NAME["llama"].fresh("clearhead")
    layer = model.model.layers[1]  # type: ignore[operator, union-attr, index]
    layer.self_attn = OwnAttention()
    probe._watch("model.layers.1.self_attn", layer.self_attn)
    with pytest.raises(ModelError, match=r"model.layers.1.self_attn \(OwnAttention\) ran without calling"):
        model(**text(None))
    assert ACTIVE.get() is None


def test_a_watched_module_that_fails_keeps_its_own_error() -> None:
    module = OwnAttention()
    probe._watch("it", module)
    with pytest.raises(AttributeError):
        module(None)
    assert ACTIVE.get() is None


def test_a_bart_without_decoder_ids_still_gets_its_cross_attention_probed() -> None:
    config = tf.BartConfig(**SEQ2SEQ, max_position_embeddings=64, decoder_start_token_id=2)
    coverage = check(make(tf.BartModel, config, "clearhead"))
    assert sum("encoder_attn" in name for name in coverage.ours) == 2


def test_the_made_up_tokens_mean_nothing_special() -> None:
    config = tf.LlamaConfig(**{**LLM, "bos_token_id": 3, "eos_token_id": 5})
    assert not {0, 3, 5} & set(probe._ids(config).flatten().tolist())
