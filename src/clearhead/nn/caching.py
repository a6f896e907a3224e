"""One way to speak to whatever keeps keys and values: a layer of a cache, or a whole one of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead.errors import ArgumentError, ShapeError
from clearhead.stored import Held, Stored


class Kept:
    """What one layer of attention has in a cache.

    cache: one layer (`transformers.cache_utils.CacheLayerMixin`: `update`, `get_seq_length`,
        `get_mask_sizes`), a whole cache of transformers, of which layer `layer_idx` is meant, or an
        `EncoderDecoderCache`, of which the half for `cross` is meant.
    Raises ArgumentError for anything else.
    """

    def __init__(self, cache: Any, layer_idx: int, *, cross: bool) -> None:
        if hasattr(cache, "cross_attention_cache"):
            cache = cache.cross_attention_cache if cross else cache.self_attention_cache
        for name in ("update", "get_seq_length", "get_mask_sizes"):
            if not callable(getattr(cache, name, None)):
                raise ArgumentError(
                    "cache must be a layer of a cache or a whole one, with update, get_seq_length and "
                    f"get_mask_sizes as transformers has them; got {type(cache).__name__}, without {name}"
                )
        self._cache = cache
        #: Further arguments: which layer of a whole cache.
        self._which: tuple[int, ...] = (layer_idx,) if hasattr(cache, "layers") else ()

    @property
    def layer(self) -> Any:
        """The one layer; None where a whole cache has not made it yet."""
        if not self._which:
            return self._cache
        layers = self._cache.layers
        return layers[self._which[0]] if self._which[0] < len(layers) else None

    @property
    def turns(self) -> bool:
        """Whether it may be given turned keys: it leaves them as they are, or knows how they turn."""
        return bool(getattr(self._cache, "turns", True))

    @property
    def seen(self) -> int:
        """How many tokens it was given so far."""
        return int(self._cache.get_seq_length(*self._which))

    def sizes(self, new: int) -> tuple[int, int]:
        """How many keys it will hand back when it is given `new` ones, and the position of the first."""
        length, first = self._cache.get_mask_sizes(new, *self._which)
        return int(length), int(first)

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor | Stored | Held, Tensor | Stored]:
        """Give it new keys and values (B, Hkv, L, d); return those to attend to.

        Raises ShapeError, before anything is stored, if what it holds is not of this layer's shape, and if it
        hands back another number of keys than it said it would.
        """
        plain = getattr(self.layer, "__dict__", {})  # layers that work their keys out check by themselves
        for name, new in (("keys", k), ("values", v)):
            kept = plain.get(name)
            if isinstance(kept, Tensor) and kept.ndim == 4 and _fixed(kept) != _fixed(new):
                raise ShapeError(
                    f"cache holds {name} (B, Hkv, d) = {_fixed(kept)} and this layer has {_fixed(new)}: it "
                    "belongs to another layer or batch"
                )
        length, _ = self.sizes(k.shape[2])
        keys, values = self._cache.update(k, v, *self._which)
        if keys.shape[2] != length:
            raise ShapeError(f"cache said that it would hold {length} keys and handed back {keys.shape[2]}")
        return keys, values

    def stored(self) -> tuple[Tensor | Stored | Held, Tensor | Stored]:
        """What it has, as it lies."""
        layer = self.layer
        return layer.keys, layer.values


def _fixed(tensor: Tensor) -> tuple[int, int, int]:
    """What does not change while a cache grows."""
    return tensor.shape[0], tensor.shape[1], tensor.shape[3]
