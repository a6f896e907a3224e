"""How much a model's layers keep of a token, read from its configuration."""

from __future__ import annotations

from typing import Any

from clearhead.cache.pool import LayerSize
from clearhead.errors import ArgumentError, ModelError


def layer_sizes(config: Any) -> tuple[LayerSize, ...]:
    """Return the sizes of each layer of a decoder (of an encoder-decoder: of its own self-attention).

    config: a transformers configuration. Raises ArgumentError where it does not say them, ModelError if it is
    set to an attention that cannot read a paged cache.
    """
    check_attention(config)
    config = _decoder(config)
    if getattr(config, "num_kv_shared_layers", None):
        raise ModelError(
            f"{type(config).__name__}: layers that share keys with others are not supported in pages"
        )
    count = _first(config, "num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers")
    heads = _first(config, "num_attention_heads", "n_head", "num_heads")
    hidden = _first(config, "hidden_size", "d_model", "n_embd")
    if hidden is None or count is None or heads is None:
        raise ArgumentError(f"{type(config).__name__} does not say how many layers and heads the model has")
    per_layer = list(getattr(config, "per_layer_config", None) or ())
    out = []
    for layer in per_layer if len(per_layer) == count else [config] * count:
        d = _first(layer, "head_dim", "d_kv") or hidden // heads
        kv = _first(layer, "num_key_value_heads") or _first(layer, "num_attention_heads") or heads
        out.append(LayerSize(kv, d, d))
    return tuple(out)


def check_attention(config: Any) -> None:
    """Raise ModelError for a configuration whose attention does not go through clearhead."""
    name = getattr(_decoder(config), "_attn_implementation", None)
    if name not in (None, "clearhead"):
        raise ModelError(
            f"a paged cache is read through its block table, which attn_implementation={name!r} cannot "
            'do; load the model with attn_implementation="clearhead"'
        )


def _decoder(config: Any) -> Any:
    """The part of a configuration that is about the text decoder."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _first(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None
