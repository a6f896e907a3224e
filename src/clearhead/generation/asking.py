"""What somebody asks to be continued, as tokens with their sources."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ArgumentError, ModelError, ShapeError
from clearhead.models.chat import read_chat
from clearhead.models.layout import lay_out
from clearhead.models.prompt import OUTPUT, Prompt, Segment
from clearhead.segments import Segments

#: A prompt, a text, a chat as messages or as segments, or tokens.
Given = Prompt | str | Sequence[Segment] | Sequence[Mapping[str, Any]] | Tensor


class Ask(NamedTuple):
    """A prompt ready to be read. ids: (n,) int64. segments: whose token is whose."""

    ids: Tensor
    segments: Segments
    tokenizer: Any


def ask(prompt: Given, tokenizer: Any) -> Ask:
    """Return the tokens of a prompt, a text as it stands (source "text"), a chat, or tokens.

    A chat is a list of `Segment`, or of messages {"role": …, "content": …}; it is laid out by the chat
    template. Tokens are (n,) or (1, n) integers. Raises PromptError for what cannot be laid out,
    ArgumentError for other kinds, ShapeError for tokens of more than one row.
    """
    if isinstance(prompt, Tensor):
        return _tokens(prompt, tokenizer)
    if isinstance(prompt, Prompt):
        return Ask(prompt.input_ids[0], prompt.segments, tokenizer or prompt.tokenizer)
    if tokenizer is None:
        raise ArgumentError(
            "a text or a chat needs a tokenizer: give what clearhead.load returned, or tokenizer="
        )
    if isinstance(prompt, str):
        found = Prompt.plain([Segment("text", "user", prompt)], tokenizer)
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(part, Segment) for part in prompt):
        found, _ = lay_out([part for part in prompt if isinstance(part, Segment)], tokenizer)
    elif isinstance(prompt, Sequence) and all(isinstance(part, Mapping) for part in prompt):
        found, _ = lay_out(read_chat(json.dumps(list(prompt))), tokenizer)
    else:
        raise ArgumentError(
            "prompt must be a Prompt, a text, a chat (segments, or messages with role and content) or a "
            f"tensor of tokens, got {type(prompt).__name__}"
        )
    return Ask(found.input_ids[0], found.segments, tokenizer)


def _tokens(ids: Tensor, tokenizer: Any) -> Ask:
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ArgumentError(f"tokens must be integers, got {ids.dtype}")
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or not len(ids):
        raise ShapeError(f"tokens must have shape (n,) or (1, n), n at least 1, got {tuple(ids.shape)}")
    return Ask(ids.long(), Segments(torch.zeros(len(ids)).long(), ("text", OUTPUT), output=1), tokenizer)


def check_decoder(model: Any) -> None:
    """Raise ModelError for a model that does not continue one text."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(
            f"generate continues one text; {type(model).__name__} is an encoder-decoder: use model.generate, "
            "with clearhead.observe around it"
        )
    if not (hasattr(model, "can_generate") and model.can_generate()):
        raise ModelError(f"{type(model).__name__} has no next token: it is no language model that writes")


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has a keyword of this name."""
    return name in inspect.signature(model.forward).parameters
