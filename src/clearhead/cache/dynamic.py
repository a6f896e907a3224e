"""A cache that keeps everything and never copies what is there for the sake of one more token."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache as TheirDynamicCache

from clearhead.cache.base import KeptLayer, WholeCache, removed
from clearhead.cache.growing import Growing


class DynamicLayer(KeptLayer):
    """Keys and values of one layer, all of them, in buffers that double."""

    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self._keys, self._values = Growing(), Growing()

    @property
    def keys(self) -> Tensor | None:
        """The keys so far, (B, Hkv, n, d), a view; None before the first."""
        return self._keys.view() if self._fixed else None

    @property
    def values(self) -> Tensor | None:
        """The values so far, (B, Hkv, n, dv), a view; None before the first."""
        return self._values.view() if self._fixed else None

    @property
    def held(self) -> int:
        """How many tokens of each row are kept: all."""
        return len(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values; the buffers reserve up to twice as many and touch no more."""
        return self._keys.nbytes + self._values.nbytes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys (B, Hkv, q, d) and values (B, Hkv, q, dv) behind the others; return all, as views."""
        self._check(key_states, value_states)
        self._keys.append(key_states)
        self._values.append(value_states)
        self.seen = len(self._keys)
        return self._keys.view(), self._values.view()

    def crop(self, tokens_to_remove: int) -> None:
        """Take away the last -tokens_to_remove tokens."""
        count = removed(tokens_to_remove)
        self._keys.crop(count)
        self._values.crop(count)
        self.seen = len(self._keys)

    def _select(self, rows: list[int]) -> None:
        self._keys.select(rows)
        self._values.select(rows)

    def _clear(self) -> None:
        self._keys.clear()
        self._values.clear()


class DynamicCache(WholeCache, TheirDynamicCache):  # type: ignore[misc]
    """All keys and values, in the model's dtype: exact, for any attention, as `cache=` of a model or of
    generate.

    config: the model's configuration, or None; nothing of it is needed. Where transformers' DynamicCache
    copies all it has for each token, here a token is written behind the others, and the buffer doubles when
    it is full. Layers with a window keep everything too; their mask hides it.

    nbytes is 2 · layers · B · Hkv · d · n · size. Gradients do not go through a cache.
    Raises ShapeError for keys of another model or another batch than those in it.
    """

    _needs_clearhead = False

    def _layer(self, number: int) -> DynamicLayer:
        return DynamicLayer()
