"""For which models a look makes sense, and what there is to see in them."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from clearhead.errors import ClearheadError, ModelError
from clearhead.models.prompt import Prompt


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


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has a keyword of this name."""
    return name in inspect.signature(model.forward).parameters


def read(model: Any, prompt: Prompt, **wanted: Any) -> Any:
    """Run the model once on a prompt, without a cache, and return its output.

    wanted: keywords that are passed on if the model's forward takes them. Raises ModelError for a model that
    cannot read a text alone (it wants an image too, or nothing but images).
    """
    extra = {n: value for n, value in ({"use_cache": False} | wanted).items() if takes(model, n)}
    inputs = {name: tensor.to(model.device) for name, tensor in prompt.inputs.items()}
    try:
        return model(**inputs, **extra)
    except ClearheadError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot read a text alone ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}); look and steps take language models"
        ) from error
