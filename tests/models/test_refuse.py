"""Models with attention code of their own are refused when they are made, not left on their own path."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, DebertaV2Config, DebertaV2Model, LlamaConfig, MptConfig, PreTrainedConfig

import clearhead  # noqa: F401, registers the implementation
from clearhead.errors import ModelError

OWN = [
    DebertaV2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    ),
    MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=64),
]


@pytest.mark.parametrize("config", OWN, ids=lambda c: c.model_type)
def test_from_config_refuses(config: PreTrainedConfig) -> None:
    with pytest.raises(ModelError, match="has attention code of its own"):
        AutoModel.from_config(config, attn_implementation="clearhead")


def test_from_pretrained_and_set_attn_implementation_refuse(tmp_path: object) -> None:
    model = DebertaV2Model(OWN[0])
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r'DebertaV2Model has attention code of its own .* "eager"'):
        DebertaV2Model.from_pretrained(tmp_path, attn_implementation="clearhead")
    with pytest.raises(ModelError, match="DebertaV2Model has attention code of its own"):
        model.set_attn_implementation("clearhead")
    assert DebertaV2Model.from_pretrained(tmp_path, attn_implementation="eager").config is not None


def test_models_of_the_interface_are_let_through() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModel.from_config(config, attn_implementation="clearhead")
    assert model.config._attn_implementation == "clearhead"
    model.set_attn_implementation("eager")
    model.set_attn_implementation("clearhead")
    assert model(torch.tensor([[1, 2, 3]])).last_hidden_state.isfinite().all()
