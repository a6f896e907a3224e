"""For which models a look makes sense, and what there is to see in them."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from clearhead.errors import ModelError


class Size(NamedTuple):
    """How many layers and query heads a model's text part has, by its configuration."""

    layers: int
    heads: int


def size(model: Any) -> Size:
    """Return the size of the part that reads text."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return Size(int(config.num_hidden_layers), int(config.num_attention_heads))


def check_one_sided(model: Any, what: str) -> None:
    """Raise ModelError for an encoder-decoder, whose prompt and answer are two texts. what: who asks."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(
            f"{what} takes a model that reads one text (a decoder such as Llama or GPT-2, an encoder such as "
            f"BERT); {type(model).__name__} is an encoder-decoder: use clearhead.observe, which keeps its "
            'streams "encoder", "self" and "cross" apart'
        )


def continues(model: Any) -> bool:
    """Whether the model has a distribution of the next token."""
    return bool(model.can_generate()) if hasattr(model, "can_generate") else False


def frugal(model: Any, **wanted: Any) -> dict[str, Any]:
    """Return those of the keywords that the model's forward takes, and that it is to keep no cache."""
    takes = inspect.signature(model.forward).parameters
    return {name: value for name, value in ({"use_cache": False} | wanted).items() if name in takes}
