"""Twenty-eight tiny models with random weights: every way in which transformers' models ask for attention.

Each family is built twice from the same seed, once with the model's own eager code and once with clearhead.
Weights are 0.25 · randn, as the default initialisation is too small to show an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from clearhead.models.hook import install

install()

V = 64
TOKENS = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLM = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ENCODER = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
SEQ2SEQ = {
    "vocab_size": V,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
GPT2 = {**TOKENS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
LAYER_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

Inputs = dict[str, Tensor]
N = 12  # tokens per row


def numbers(seed: int, *shape: int) -> Tensor:
    """Random token ids without special ones."""
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(seed))


def floats(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padded(side: str | None, length: int = N, pads: int = 4) -> Tensor | None:
    """A (2, length) attention mask whose second row has pads on this side."""
    if side is None:
        return None
    mask = torch.ones(2, length, dtype=torch.long)
    if side == "left":
        mask[1, :pads] = 0
    else:
        mask[1, length - pads :] = 0
    return mask


def text(side: str | None) -> Inputs:
    """Ids (2, 12) and their attention mask."""
    mask = padded(side)
    return {"input_ids": numbers(1, 2, N)} | ({} if mask is None else {"attention_mask": mask})


def text_pair(side: str | None) -> Inputs:
    """Inputs of an encoder-decoder; the encoder's are padded."""
    return text(side) | {"decoder_input_ids": numbers(2, 2, 7)}


def images(side: str | None) -> Inputs:
    """Pixels (2, 3, 16, 16)."""
    return {"pixel_values": floats(3, 2, 3, 16, 16)}


def text_and_images(side: str | None) -> Inputs:
    """Both, for contrastive models."""
    return text(side) | images(side)


def cross(side: str | None) -> Inputs:
    """Decoder ids with encoder states; the encoder's mask is padded, the decoder's is not."""
    mask = padded(side, 9)
    states = {"input_ids": numbers(1, 2, N), "encoder_hidden_states": floats(4, 2, 9, 32)}
    return states | ({} if mask is None else {"encoder_attention_mask": mask})


def sound(side: str | None) -> Inputs:
    """Spectrogram (2, 8, 20) and decoder ids."""
    return {"input_features": floats(5, 2, 8, 20), "decoder_input_ids": numbers(2, 2, 7)}


def llava(side: str | None) -> Inputs:
    """Text with four image tokens (id 60) in each row, and the images."""
    inputs = text(side)
    inputs["input_ids"][:, 5:9] = 60
    if side == "right":  # keep the image tokens real
        inputs["input_ids"] = inputs["input_ids"].roll(-3, 1)
    return inputs | images(side)


def idefics(side: str | None) -> Inputs:
    """Text that attends to two images; the second row's later tokens see only the second."""
    seen = torch.ones(2, N, 2, dtype=torch.long)
    seen[1, 6:, 0] = 0
    pixels = floats(3, 2, 2, 3, 16, 16)
    return text(side) | {"pixel_values": pixels, "image_attention_mask": seen}


def mllama(side: str | None) -> Inputs:
    """Text that attends to one image of one or two tiles, from the third token on."""
    seen = torch.ones(2, N, 1, 2, dtype=torch.long)
    seen[:, :2] = 0
    seen[0, :, :, 1] = 0
    return text(side) | {
        "pixel_values": floats(3, 2, 1, 2, 3, 16, 16),
        "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "cross_attention_mask": seen,
    }


@dataclass(frozen=True)
class Family:
    """One configuration: how to build it and what to feed it."""

    name: str
    model: str  # class in transformers
    config: Callable[[], Any]
    inputs: Callable[[str | None], Inputs] = text
    kind: str = "decoder"  # decoder, encoder, seq2seq, vision
    sides: tuple[str | None, ...] = (None, "left", "right")
    tags: frozenset[str] = field(default=frozenset())

    def __str__(self) -> str:
        return self.name

    def build(self, implementation: str) -> nn.Module:
        """Return the model with this attention implementation; kept, do not change it in place."""
        return _built(self.name, implementation)

    def fresh(self, implementation: str) -> nn.Module:
        """Return a model of one's own."""
        return make(getattr(tf, self.model), self.config(), implementation)


def make(cls: Any, config: Any, implementation: str) -> nn.Module:
    """Build `cls` from `config`, every parameter 0.25 · randn, in eval mode."""
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    return model.eval()


@cache
def _built(name: str, implementation: str) -> nn.Module:
    return BY_NAME[name].fresh(implementation)


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in names}


def _llava() -> Any:
    vision = tf.CLIPVisionConfig(**{**VISION, "patch_size": 8})
    return tf.LlavaConfig(
        text_config=tf.LlamaConfig(**LLM),
        vision_config=vision,
        image_token_index=60,
        vision_feature_layer=-1,
        image_seq_length=4,
    )


def _idefics() -> Any:
    return tf.IdeficsConfig(
        **_without(LLM, "num_key_value_heads"),
        additional_vocab_size=0,
        cross_layer_interval=1,
        use_resampler=False,
        alpha_initializer="ones",
        vision_config={
            "embed_dim": 32,
            "image_size": 16,
            "patch_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
        },
    )


def _mllama() -> Any:
    vision = {
        "hidden_size": 32,
        "attention_heads": 4,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "intermediate_size": 48,
        "max_num_tiles": 2,
        "image_size": 16,
        "patch_size": 8,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1], [1, 2]],
    }
    language = {
        **LLM,
        "cross_attention_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return tf.MllamaConfig(vision_config=vision, text_config=language, image_token_index=60)


_GEMMA = {**LLM, "head_dim": 8, "query_pre_attn_scalar": 13, "sliding_window": 4}
_LLAMA4 = {
    **LLM,
    **EXPERTS,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "attention_chunk_size": 4,
    "no_rope_layers": [1, 0],
    "interleave_moe_layer_step": 1,
}
_T5 = {
    **TOKENS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    **SEQ2SEQ,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_WHISPER = {
    **SEQ2SEQ,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 32,
    "decoder_start_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}

_LM = "ForCausalLM"
_SIDES_OF_IMAGES: tuple[str | None, ...] = (None,)
_PACKED, _TRAINED = frozenset({"packed", "trained"}), frozenset({"trained"})

FAMILIES = [
    Family("llama", f"Llama{_LM}", lambda: tf.LlamaConfig(**LLM), tags=_PACKED),
    Family(
        "llama-mqa",
        f"Llama{_LM}",
        lambda: tf.LlamaConfig(**{**LLM, "num_key_value_heads": 1, "head_dim": 24}),
    ),
    Family(
        "qwen2",
        f"Qwen2{_LM}",
        lambda: tf.Qwen2Config(**LLM, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    Family("qwen3", f"Qwen3{_LM}", lambda: tf.Qwen3Config(**LLM, head_dim=16)),
    Family("mistral", f"Mistral{_LM}", lambda: tf.MistralConfig(**LLM, sliding_window=4)),
    Family("phi3", f"Phi3{_LM}", lambda: tf.Phi3Config(**LLM, sliding_window=4)),
    Family("gemma2", f"Gemma2{_LM}", lambda: tf.Gemma2Config(**_GEMMA, attn_logit_softcapping=2.0)),
    Family("gemma3", f"Gemma3{_LM}", lambda: tf.Gemma3TextConfig(**_GEMMA, **LAYER_KINDS), tags=_PACKED),
    Family(
        "gpt-oss",
        f"GptOss{_LM}",
        lambda: tf.GptOssConfig(**LLM, **EXPERTS, **LAYER_KINDS, head_dim=8, sliding_window=4),
    ),
    Family("llama4", f"Llama4{_LM}", lambda: tf.Llama4TextConfig(**_LLAMA4), tags=frozenset({"packed"})),
    Family(
        "gpt-neox",
        f"GPTNeoX{_LM}",
        lambda: tf.GPTNeoXConfig(**_without(LLM, "num_key_value_heads"), rotary_pct=0.5),
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        lambda: tf.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
        tags=_TRAINED,
    ),
    Family(
        "gpt2-cross", "GPT2LMHeadModel", lambda: tf.GPT2Config(**GPT2, add_cross_attention=True), inputs=cross
    ),
    Family("gpt2-upcast", "GPT2LMHeadModel", lambda: tf.GPT2Config(**GPT2, reorder_and_upcast_attn=True)),
    Family("bert", "BertForMaskedLM", lambda: tf.BertConfig(**ENCODER), kind="encoder", tags=_TRAINED),
    Family(
        "roberta",
        "RobertaForMaskedLM",
        lambda: tf.RobertaConfig(**ENCODER, pad_token_id=1),
        kind="encoder",
    ),
    Family(
        "bert-cross",
        "BertLMHeadModel",
        lambda: tf.BertConfig(**ENCODER, is_decoder=True, add_cross_attention=True),
        inputs=cross,
    ),
    Family(
        "modernbert",
        "ModernBertForMaskedLM",
        lambda: tf.ModernBertConfig(
            **{**ENCODER, **TOKENS},
            global_attn_every_n_layers=2,
            local_attention=4,
            cls_token_id=1,
            sep_token_id=2,
        ),
        kind="encoder",
    ),
    Family(
        "t5",
        "T5ForConditionalGeneration",
        lambda: tf.T5Config(**_T5),
        inputs=text_pair,
        kind="seq2seq",
        tags=_TRAINED,
    ),
    Family(
        "bart",
        "BartForConditionalGeneration",
        lambda: tf.BartConfig(**_BART),
        inputs=text_pair,
        kind="seq2seq",
    ),
    Family("marian", "MarianMTModel", lambda: tf.MarianConfig(**_BART), inputs=text_pair, kind="seq2seq"),
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        lambda: tf.WhisperConfig(**_WHISPER),
        inputs=sound,
        kind="seq2seq",
        sides=_SIDES_OF_IMAGES,
    ),
    Family(
        "vit",
        "ViTModel",
        lambda: tf.ViTConfig(**VISION),
        inputs=images,
        kind="vision",
        sides=_SIDES_OF_IMAGES,
    ),
    Family(
        "clip",
        "CLIPModel",
        lambda: tf.CLIPConfig(
            text_config={**ENCODER, **TOKENS, "projection_dim": 32},
            vision_config={**VISION, "projection_dim": 32},
            projection_dim=32,
        ),
        inputs=text_and_images,
        kind="vision",
        sides=(None, "right"),
    ),
    Family(
        "siglip",
        "SiglipModel",
        lambda: tf.SiglipConfig(
            text_config={**ENCODER, **TOKENS, "projection_size": 32}, vision_config=dict(VISION)
        ),
        inputs=text_and_images,
        kind="vision",
        sides=(None, "right"),
    ),
    Family("llava", "LlavaForConditionalGeneration", _llava, inputs=llava),
    Family("idefics", "IdeficsForVisionText2Text", _idefics, inputs=idefics),
    Family("mllama", "MllamaForConditionalGeneration", _mllama, inputs=mllama),
]

BY_NAME = {family.name: family for family in FAMILIES}
assert len(FAMILIES) == len(BY_NAME) == 28

#: Families whose attention is their own code: class and a tiny configuration.
OWN_CODE: dict[str, tuple[str, Callable[[], Any]]] = {
    "bloom": (
        "BloomForCausalLM",
        lambda: tf.BloomConfig(**TOKENS, hidden_size=32, n_layer=2, n_head=4),
    ),
    "falcon": (
        "FalconForCausalLM",
        lambda: tf.FalconConfig(**TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    ),
    "mpt": (
        "MptForCausalLM",
        lambda: tf.MptConfig(**TOKENS, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    ),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        lambda: tf.GPTNeoConfig(
            **TOKENS, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
        ),
    ),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        lambda: tf.DebertaV2Config(**ENCODER, type_vocab_size=0, relative_attention=True),
    ),
}
