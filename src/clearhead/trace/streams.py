"""Which attention modules of a model belong together, and what to call them.

A stream is a stack of layers that attend in the same way over the same tokens: the decoder's self-attention,
its cross-attention, the encoder, a vision tower. Modules are sorted into streams by their path, since layer
numbers alone repeat between encoder, decoder and cross-attention.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import nn

_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
_VISION = re.compile(r"vision|visual|image|patch|perceiver", re.IGNORECASE)


class Place(NamedTuple):
    """Where an attention module stands: its stream's pattern and its path."""

    pattern: str  # the path with numbers replaced: "model.layers.*.self_attn"
    path: str


def places(model: nn.Module) -> dict[int, Place]:
    """Return the place of every module of the model, by id(module)."""
    return {
        id(module): Place(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), name)
        for name, module in model.named_modules()
        if name
    }


def label(pattern: str, model: nn.Module, taken: dict[str, str]) -> str:
    """Return a short name for a stream: self, cross, encoder, vision, or the pattern itself.

    taken: the labels in use already, with their patterns; a pattern that would share a label keeps its own
    name.
    """
    config = getattr(model, "config", None)
    two_sided = bool(getattr(config, "is_encoder_decoder", False))
    if _CROSS.search(pattern):
        name = "cross"
    elif _VISION.search(pattern):
        name = "vision"
    elif two_sided and re.search(r"(^|\.)encoder\.", pattern):
        name = "encoder"
    else:
        name = "self"
    return name if taken.get(name, pattern) == pattern else pattern
