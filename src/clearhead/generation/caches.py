"""Caches by name, and what generation must know of any cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ArgumentError
from clearhead.models.active import Call

NAMES = ("dynamic", "sliding", "sink", "int8", "heavy", "paged")
#: Those that let go of tokens.
BOUNDED = ("sliding", "sink", "heavy")
#: What those keep by default: so many tokens, and with "sink" so many of the first besides.
WINDOW, SINKS = 1024, 4


def make_cache(cache: Any, model: Any, *, tokens: int = 0, window: int = WINDOW, sinks: int = SINKS) -> Any:
    """Return a cache for one text: a new one of this name, or the given one.

    cache: a name of NAMES, None for "dynamic", or a cache, which is returned as it is. tokens: how many it is
    to hold, for "paged", which reserves its room. window, sinks: how many tokens "sliding", "sink" and
    "heavy" (whose budget is the window) keep.
    Raises ArgumentError for an unknown name, and as the cache does.
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
    from clearhead import cache as room

    config = model.config
    match cache:
        case "dynamic":
            return room.DynamicCache(config)
        case "sliding":
            return room.SlidingCache(config, window=window)
        case "sink":
            return room.SinkCache(model, sinks=sinks, window=window)
        case "int8":
            return room.Int8Cache(config)
        case "heavy":
            return room.HeavyHitterCache(config, budget=window)
    dtype = model.dtype
    return room.PagedCache(config, cache_bytes=_room(model, tokens), dtype=dtype, device=model.device)


def endless(cache: Any, model: Any) -> bool:
    """Whether a text may go on past the model's positions and any length, with this cache."""
    if isinstance(cache, str) or cache is None:
        bounded = cache in BOUNDED
    else:
        from clearhead.cache import HeavyHitterCache, SinkCache, SlidingCache

        bounded = isinstance(cache, SlidingCache | SinkCache | HeavyHitterCache)
    return bounded and _positions_have_no_end(model.config)


def cache_bytes(cache: Any) -> int:
    """What the cache holds, in bytes."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def places_of(cache: Any) -> Callable[[int, Call], Tensor | None] | None:
    """How to find which tokens the keys of a layer's call are; None where they are all up to the newest.

    Called with the number of the layer: (Lk,) or, where heads keep tokens of their own, (Hkv, Lk) integers.
    """
    from clearhead.cache import HeavyHitterCache, SinkCache

    if isinstance(cache, SinkCache):
        return partial(_sinks_and_window, cache)
    if isinstance(cache, HeavyHitterCache):
        return partial(_heavy, cache)
    return None


def _sinks_and_window(cache: Any, number: int, call: Call) -> Tensor | None:
    """The first tokens, and then the newest."""
    seen, keys = cache.layers[number].seen, call.key.shape[2]
    if keys == seen:
        return None
    sinks = cache.layers[number].sinks
    return torch.cat([torch.arange(sinks), torch.arange(seen - (keys - sinks), seen)])


def _heavy(cache: Any, number: int, call: Call) -> Tensor:
    positions: Tensor = cache.layers[number].positions[0]
    return positions.long()


def _positions_have_no_end(config: Any) -> bool:
    """Whether positions are turns of queries and keys, of which only differences matter."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "rope_parameters", None) is not None


def _room(model: Any, tokens: int) -> int:
    """Bytes of a pool in whole blocks that hold so many tokens."""
    from clearhead.cache.sizes import layer_sizes

    page = 16
    per_token = sum(size.heads * (size.d + size.dv) for size in layer_sizes(model.config))
    return per_token * int(model.dtype.itemsize) * page * (-(-tokens // page) + 1)
