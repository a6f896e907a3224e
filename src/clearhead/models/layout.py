"""Segments as a model is used to read them: by its chat template, or one after the other without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.models.prompt import Prompt, Segment


def lay_out(segments: Sequence[Segment], tokenizer: Any) -> tuple[Prompt, tuple[str, ...]]:
    """Return the segments as the model is used to read them, and what is to be said about that.

    By the tokenizer's chat template; without one (base models, encoders) one text after the other.
    """
    if getattr(tokenizer, "chat_template", None):
        return Prompt(segments, tokenizer), ()
    note = "the model has no chat template: it reads the texts one after the other, without their roles"
    return Prompt.plain(segments, tokenizer), (note,)
