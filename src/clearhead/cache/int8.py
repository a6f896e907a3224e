"""A cache of bytes: every key and value rounded to 255 steps of its own scale, read as it lies."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache as TheirDynamicCache

from clearhead.cache.base import KeptLayer, WholeCache, removed
from clearhead.cache.growing import Growing
from clearhead.stored import Int8Rows


class _Bytes:
    """Rows of bytes and their scales, growing together."""

    def __init__(self) -> None:
        self.parts = Growing(), Growing()

    def append(self, new: Tensor) -> Int8Rows:
        rows = Int8Rows.quantised(new)
        for part, tensor in zip(self.parts, (rows.values, rows.scales), strict=True):
            part.append(tensor)
        return self.view()

    def view(self) -> Int8Rows:
        return Int8Rows(*(part.view() for part in self.parts))


class Int8Layer(KeptLayer):
    """Keys and values of one layer, a byte per number and a float32 scale per row."""

    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self._keys, self._values = _Bytes(), _Bytes()

    @property
    def _parts(self) -> list[Growing]:
        return [*self._keys.parts, *self._values.parts]

    @property
    def keys(self) -> Int8Rows | None:
        """The keys so far, as they lie; None before the first."""
        return self._keys.view() if self._fixed else None

    @property
    def values(self) -> Int8Rows | None:
        """The values so far, as they lie; None before the first."""
        return self._values.view() if self._fixed else None

    @property
    def held(self) -> int:
        """How many tokens of each row are kept: all."""
        return len(self._keys.parts[0])

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return sum(part.nbytes for part in self._parts)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Int8Rows, Int8Rows]:
        """Write keys (B, Hkv, q, d) and values (B, Hkv, q, dv), rounded, behind the others; return all."""
        self._check(key_states, value_states)
        answer = self._keys.append(key_states), self._values.append(value_states)
        self.seen = self.held
        return answer

    def crop(self, tokens_to_remove: int) -> None:
        """Take away the last -tokens_to_remove tokens."""
        count = removed(tokens_to_remove)
        for part in self._parts:
            part.crop(count)
        self.seen = self.held

    def _select(self, rows: list[int]) -> None:
        for part in self._parts:
            part.select(rows)

    def _clear(self) -> None:
        for part in self._parts:
            part.clear()


class Int8Cache(WholeCache, TheirDynamicCache):  # type: ignore[misc]
    """All keys and values as bytes, with a scale per row: 4d / (d + 4) times smaller than float32.

    config: the model's configuration (`model.config`), or None for `clearhead.nn`. The error of a number is
    at most half a step, 1/254 of the largest in its row. Attention reads the bytes as they lie: nothing is
    written out. Keys of this very call are rounded too, so a text is computed alike in one piece or token by
    token.

    Raises ModelError for a model whose attention is not clearhead's, ShapeError for keys of another model or
    another batch than those in it.
    """

    def _layer(self, number: int) -> Int8Layer:
        return Int8Layer()
