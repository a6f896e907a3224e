"""What may be asked of an engine: a request, checked before anything is done for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from clearhead.cache.pool import BlockPool
from clearhead.errors import ArgumentError, ClearheadError, PoolFullError
from clearhead.generation.engine_request import Asked
from clearhead.generation.pieces import Pieces
from clearhead.generation.sampling import Sampler
from clearhead.models.prompt import Prompt
from clearhead.segments import Segments


class Limits(NamedTuple):
    """What the model and the pool can take."""

    vocabulary: int
    positions: int | None  # tokens of a sequence
    capacity: int  # tokens in the pool
    stop_tokens: frozenset[int]

    @classmethod
    def of(cls, model: Any, pool: BlockPool) -> Limits:
        """Read them from a model."""
        config = model.config.get_text_config(decoder=True)
        own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        own = [] if own is None else [own] if isinstance(own, int) else own
        positions = getattr(config, "max_position_embeddings", None)
        return cls(
            model.get_input_embeddings().num_embeddings,
            positions if isinstance(positions, int) else None,
            pool.capacity,
            frozenset(int(token) for token in own),
        )


def checked(
    prompt: Any,
    most: Any,
    sampler: Sampler,
    stop: Any,
    stop_tokens: Any,
    segments: Any,
    tokenizer: Any,
    limits: Limits,
) -> Asked:
    """Return what a request wants.

    Raises ArgumentError or PoolFullError, which name what came and what is allowed.
    """
    ids = _ids(prompt, tokenizer, limits.vocabulary)
    positive("max_new_tokens", most)
    total = len(ids) + most
    if limits.positions is not None and total > limits.positions:
        raise ArgumentError(
            f"the prompt has {len(ids)} tokens, with max_new_tokens={most} that is {total}: the model takes "
            f"{limits.positions}"
        )
    if total - 1 > limits.capacity:  # the last token is never looked at
        raise PoolFullError(
            f"the prompt has {len(ids)} tokens, with max_new_tokens={most} they need room for {total - 1}: "
            f"the pool has room for {limits.capacity}; give the engine more cache_bytes"
        )
    return Asked(
        ids,
        most,
        sampler,
        Pieces(tokenizer, ids, stop),
        limits.stop_tokens if stop_tokens is None else _stop_tokens(stop_tokens),
        None if segments is None else _segments(segments, len(ids)),
    )


def positive(name: str, value: Any) -> None:
    """Raise ArgumentError for anything but an integer of at least 1."""
    if not _integer(value) or value < 1:
        raise ArgumentError(f"{name} must be an integer of at least 1, got {value!r}")


def _ids(prompt: Any, tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    if isinstance(prompt, Prompt):
        prompt = prompt.input_ids
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ArgumentError("prompt is text, but the engine has no tokenizer: give one, or token ids")
        prompt = tokenizer(prompt)["input_ids"]
    if isinstance(prompt, torch.Tensor):
        whole = not prompt.is_floating_point() and prompt.dtype != torch.bool
        if not whole or prompt.ndim not in (1, 2) or (prompt.ndim == 2 and len(prompt) != 1):
            raise ArgumentError(
                f"prompt must be token ids of one sequence, (n,) or (1, n) integers, got {prompt.dtype} "
                f"{tuple(prompt.shape)}"
            )
        prompt = prompt.flatten().tolist()
    if not isinstance(prompt, Sequence) or not all(_integer(token) for token in prompt):
        raise ArgumentError(f"prompt must be text, a clearhead.Prompt or token ids, got {prompt!r:.60}")
    if not prompt:
        raise ArgumentError("prompt is empty: there is nothing to go on from")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise ArgumentError(
            f"prompt holds tokens {min(prompt)} to {max(prompt)}, the model has 0 to {vocabulary - 1}"
        )
    return tuple(prompt)


def _stop_tokens(tokens: Any) -> frozenset[int]:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence | set | frozenset):
        raise ArgumentError(f"stop_tokens must be a list of token ids or None, got {tokens!r:.60}")
    if not all(_integer(token) and token >= 0 for token in tokens):
        raise ArgumentError(f"stop_tokens must be integers of at least 0, got {tokens!r:.60}")
    return frozenset(tokens)


def _segments(given: Any, length: int) -> Segments:
    segments = given if isinstance(given, Segments) else _numbered(given)
    if tuple(segments.ids.shape) != (length,):
        raise ArgumentError(
            f"segments must name each of the {length} tokens of the prompt, got {tuple(segments.ids.shape)}"
        )
    if segments.output is None:
        raise ArgumentError("segments must have an output: the segment that new tokens belong to")
    return segments


def _numbered(given: Any) -> Segments:
    try:
        ids = torch.as_tensor(given)
        count = int(ids.max()) + 1
        return Segments(ids, [*map(str, range(count)), "output"], output=count)
    except (ClearheadError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"segments must be Segments, or a number for each token: {error}") from error


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
