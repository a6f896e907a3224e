"""The sizes of a layer of attention, checked when it is made."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from clearhead.errors import ArgumentError
from clearhead.mask import Mask, Window


def whole(name: str, number: Any, *, least: int = 1) -> int:
    """An integer of at least `least`. Raises ArgumentError."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ArgumentError(f"{name} must be an integer of at least {least}, got {number!r}")
    return number


def heads(
    embed_dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int, int]:
    """(num_heads, num_kv_heads, head_dim), worked out. Raises ArgumentError for what does not divide."""
    whole("embed_dim", embed_dim)
    whole("num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else whole("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ArgumentError(
            f"num_heads is {num_heads} and num_kv_heads {num_kv_heads}: each key/value head serves the same "
            "number of query heads, so it must divide them"
        )
    if head_dim is None:
        if embed_dim % num_heads:
            raise ArgumentError(
                f"embed_dim is {embed_dim} and num_heads {num_heads}: it must be divisible, or give head_dim="
            )
        head_dim = embed_dim // num_heads
    return num_heads, num_kv_heads, whole("head_dim", head_dim)


@lru_cache(maxsize=64, typed=True)
def window_and_sinks(window: Window | None, sinks: int, causal: bool) -> Mask:
    """The mask that a layer always has; layers that are alike share it. Raises MaskError (an ArgumentError).

    Sinks as many as the window is long, or more, are an error: they would be most of what is seen.
    """
    made = Mask(causal=causal, window=window, sinks=sinks)
    left = None if made.window is None else made.window[0]
    if left is not None and sinks > left:
        raise ArgumentError(f"sinks is {sinks} and window {left + 1}: there must be fewer sinks than window")
    return made


def number(name: str, given: Any, *, above: float = -math.inf, below: float = math.inf) -> float | None:
    """A finite number strictly between two others, or None. Raises ArgumentError."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not above < given < below:
        limits = [f"above {above:g}"] * (above > -math.inf) + [f"below {below:g}"] * (below < math.inf)
        raise ArgumentError(f"{name} must be a finite number {' and '.join(limits)}, got {given!r}")
    return float(given)
