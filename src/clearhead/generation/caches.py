"""Caches by name, and what generation must know of any cache."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from clearhead.errors import ArgumentError
from clearhead.models.active import Call

#: Name -> the class in `clearhead.cache`.
NAMES = {
    "dynamic": "DynamicCache",
    "sliding": "SlidingCache",
    "sink": "SinkCache",
    "int8": "Int8Cache",
    "heavy": "HeavyHitterCache",
    "paged": "PagedCache",
}
#: Those that let go of what is old.
BOUNDED = ("sliding", "sink", "heavy")
#: What "sliding", "sink" and "heavy" keep: so many of the newest (or heaviest) tokens, and sinks besides.
WINDOW, SINKS = 1024, 4


def make_cache(cache: Any, model: Any, *, tokens: int = 0, window: int = WINDOW, sinks: int = SINKS) -> Any:
    """Return a cache for one text: a new one of this name, or the given one.

    cache: a name of NAMES, None for "dynamic", or a cache, which is returned as it is. tokens: how many it is
    to hold, for those that must know before. window, sinks: for those that keep so many.
    Raises ArgumentError for an unknown name.
    """
    if cache is None:
        cache = "dynamic"
    if not isinstance(cache, str):
        if not hasattr(cache, "get_seq_length"):
            raise ArgumentError(
                f"cache must be a name or a cache of transformers, got {type(cache).__name__}"
            )
        return cache
    if cache not in NAMES:
        raise ArgumentError(f"cache must be one of {', '.join(NAMES)} or a cache, got {cache[:100]!r}")
    if cache == "paged":
        from clearhead.cache.paged import PagedCache

        return PagedCache(
            model.config, cache_bytes=_room(model, tokens), dtype=model.dtype, device=model.device
        )
    made = getattr(import_module("clearhead.cache"), NAMES[cache], None)
    if made is None:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    if cache == "sink":
        return made(model.config, sinks=sinks, window=window)
    if cache in BOUNDED:
        return made(model.config, window=window)
    return made(model.config)


def endless(cache: Any, model: Any) -> bool:
    """Whether a text may go on past the model's positions and any length, with this cache."""
    bounded = (
        cache in BOUNDED if isinstance(cache, str) else type(cache).__name__ in {NAMES[b] for b in BOUNDED}
    )
    return bounded and _positions_have_no_end(model.config)


def cache_bytes(cache: Any) -> int:
    """What the cache holds, in bytes."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def places_of(cache: Any) -> Callable[[int, Call], Tensor | None] | None:
    """How to find where the keys of a layer's call sit; None where they are one stretch up to the newest."""
    return None


def _positions_have_no_end(config: Any) -> bool:
    """Whether positions are turns of queries and keys, of which only differences matter."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "rope_parameters", None) is not None


def _room(model: Any, tokens: int) -> int:
    """Bytes of a pool in whole blocks that hold so many tokens."""
    from clearhead.cache.sizes import layer_sizes

    page = 16
    per_token = sum(size.heads * (size.d + size.dv) for size in layer_sizes(model.config))
    size = int(model.dtype.itemsize)
    return per_token * size * page * (-(-tokens // page) + 1)
