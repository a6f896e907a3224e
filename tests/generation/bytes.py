"""A tokenizer with a token for every byte, and tiny models that speak it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from clearhead.models.hook import install
from clearhead.models.loading import LoadedModel

install()
END = 256
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@cache
def tokenizer() -> Any:
    """Return a tokenizer whose tokens are bytes, in the order of the alphabet of byte-level BPE, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE({c: i for i, c in enumerate(alphabet)} | {"<end>": END}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    fast.chat_template = TEMPLATE
    return fast


def loaded(seed: int = 0, **settings: Any) -> LoadedModel:
    """Return a tiny Llama with random weights that speaks bytes. settings: of its configuration."""
    size = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    rest = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = LlamaConfig(**(size | rest | {"bos_token_id": None, "eos_token_id": END} | settings))
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(config, attn_implementation="clearhead").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.25)
    return LoadedModel(model, tokenizer(), "bytes", "0")
