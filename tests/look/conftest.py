"""The real model as its own eager code computes it, and tiny models with random weights and a few words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.models.active import ACTIVE, Call
from clearhead.models.loading import LoadedModel
from clearhead.models.prompt import Prompt
from clearhead.observables import Observable

WORDS = [
    "the",
    "animal",
    "didn't",
    "cross",
    "road",
    "because",
    "it",
    "was",
    "too",
    "tired",
    ".",
    "dog",
    "runs",
]


class Calls:
    """A recorder that keeps every call and asks for nothing."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def observables(self, call: Call) -> Sequence[Observable]:
        self.calls.append(
            call._replace(value=call.value.clone(), query=call.query.clone(), key=call.key.clone())
        )
        return ()

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        raise AssertionError("nothing was asked")


@pytest.fixture(scope="session")
def eager(smollm2: LoadedModel) -> nn.Module:
    """SmolLM2 with the attention that transformers brings along."""
    model = copy.deepcopy(smollm2.model)
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="session")
def eager_weights(eager: Any) -> Callable[[Prompt], Tensor]:
    """The weights of every layer and head, (L, H, n, n), float64."""

    def weights(prompt: Prompt) -> Tensor:
        with torch.no_grad():
            out = eager(**prompt.inputs, output_attentions=True)
        return torch.stack([layer[0] for layer in out.attentions]).double()

    return weights


@pytest.fixture(scope="session")
def head_values(smollm2: LoadedModel) -> Callable[[Prompt], Tensor]:
    """The value vectors of every layer and query head, (L, H, n, dv), float64."""

    def values(prompt: Prompt) -> Tensor:
        calls = Calls()
        token = ACTIVE.set(calls)
        try:
            with torch.no_grad():
                smollm2.model(**prompt.inputs)
        finally:
            ACTIVE.reset(token)
        H = calls.calls[0].query.shape[1]
        stacked = torch.stack([call.value[0] for call in calls.calls]).double()
        return stacked.repeat_interleave(H // stacked.shape[1], 1)

    return values


@pytest.fixture(scope="session")
def word_tokenizer() -> Any:
    """One token per word, no chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {w: i for i, w in enumerate(WORDS, 4)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def tiny(word_tokenizer: Any) -> Callable[[str], LoadedModel]:
    """A tiny model of a family of transformers, with random weights, by name."""
    import transformers as tf

    size = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    gemma = {**size, "head_dim": 8, "query_pre_attn_scalar": 13, "sliding_window": 4}
    gpt2 = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 4}
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    makers: dict[str, Callable[[], tuple[Any, Any]]] = {
        "llama": lambda: (tf.LlamaForCausalLM, tf.LlamaConfig(**size)),
        "gpt2": lambda: (tf.GPT2LMHeadModel, tf.GPT2Config(**gpt2, scale_attn_by_inverse_layer_idx=True)),
        "gemma2": lambda: (tf.Gemma2ForCausalLM, tf.Gemma2Config(**gemma, attn_logit_softcapping=2.0)),
        "gemma3": lambda: (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig(**gemma, **kinds)),
        "gpt-oss": lambda: (tf.GptOssForCausalLM, tf.GptOssConfig(**size, **experts, **kinds)),
        "bert": lambda: (tf.BertForMaskedLM, tf.BertConfig(**{**size, "num_key_value_heads": 4})),
        "albert": lambda: (tf.AlbertModel, tf.AlbertConfig(**size, embedding_size=16)),
        "vit": lambda: (
            tf.ViTModel,
            tf.ViTConfig(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=16,
                patch_size=4,
            ),
        ),
        "t5": lambda: (
            tf.T5ForConditionalGeneration,
            tf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        ),
    }

    def make(name: str) -> LoadedModel:
        cls, config = makers[name]()
        torch.manual_seed(0)
        model = cls._from_config(config, attn_implementation="clearhead").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
        return LoadedModel(model, word_tokenizer, name, "0")

    return make


@pytest.fixture(scope="session")
def small(smollm2: LoadedModel) -> LoadedModel:
    """SmolLM2's tokenizer and shape of heads before a tiny model of random weights, for what does not ask
    for trained ones: two layers, nine heads.
    """
    import transformers as tf

    config = tf.LlamaConfig(
        vocab_size=len(smollm2.tokenizer),
        hidden_size=36,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM._from_config(config, attn_implementation="clearhead").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return LoadedModel(model, smollm2.tokenizer, "small", "0")


@pytest.fixture(scope="session")
def small_weights(small: LoadedModel) -> Callable[[Prompt], Tensor]:
    """The eager weights of `small`, (L, H, n, n), float64."""
    model = copy.deepcopy(small.model)
    model.set_attn_implementation("eager")

    def weights(prompt: Prompt) -> Tensor:
        with torch.no_grad():
            out = model(**prompt.inputs, output_attentions=True)
        return torch.stack([layer[0] for layer in out.attentions]).double()

    return weights
