"""A cache of the last tokens alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.cache.base import KeptLayer, WholeCache, whole
from clearhead.cache.growing import Growing
from clearhead.mask import Mask
from clearhead.stored import Held


class SlidingLayer(KeptLayer):
    """The last window - 1 keys and values of one layer: with the query's own that makes `window`."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = whole("window", window, 1)
        self._keys, self._values = Growing(keep=window), Growing(keep=window)

    @property
    def keys(self) -> Tensor | None:
        """The keys that are kept, (B, Hkv, n, d), a view; None before the first."""
        return self._keys.view() if self._fixed else None

    @property
    def values(self) -> Tensor | None:
        """The values that are kept, (B, Hkv, n, dv), a view; None before the first."""
        return self._values.view() if self._fixed else None

    @property
    def held(self) -> int:
        """How many tokens of each row are kept for the next."""
        return min(self.seen, self.window - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept; the buffers have room for 1/32 more."""
        return self._keys.nbytes + self._values.nbytes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | Held, Tensor]:
        """Take keys (B, Hkv, q, d) and values (B, Hkv, q, dv); return the last window - 1, and them.

        More than one come with a mask: each query has a window of its own.
        """
        self._check(key_states, value_states)
        new, held = key_states.shape[2], self.held
        keys = _added(self._keys, key_states, self.window - 1)
        values = _added(self._values, value_states, self.window - 1)
        mask = None
        if new > 1 and held + new > self.window:
            mask = Mask(causal=True, window=self.window, offset=self.seen, key_offset=self.seen - held)
        self.seen += new
        return (keys if mask is None else Held(keys, mask=mask)), values

    def _select(self, rows: list[int]) -> None:
        self._keys.select(rows)
        self._values.select(rows)

    def _clear(self) -> None:
        self._keys.clear()
        self._values.clear()


class SlidingCache(WholeCache):
    """The last `window` tokens, each query's own among them; what is older is let go of.

    config: the model's configuration (`model.config`), or None for `clearhead.nn`. window: at least 1.
    A model whose layers all have this window loses nothing; any other computes what it would with that
    window. Keys keep the positions that they came with. Past the window of a model with full attention the
    text falls apart, where the first tokens were its heads' resting place: see `SinkCache`.

    Raises ArgumentError for a window below 1, ModelError for a model whose attention is not clearhead's and
    for crop, ShapeError for keys of another model or batch.
    """

    def __init__(self, config: Any = None, *, window: int) -> None:
        self.window = whole("window", window, 1)
        super().__init__(config)

    @property
    def capacity(self) -> int:
        """How many keys a query has at most: the window."""
        return self.window

    def _layer(self, number: int) -> SlidingLayer:
        return SlidingLayer(self.window)


def _added(rows: Growing, new: Tensor, most: int) -> Tensor:
    """The rows and the new ones behind them; afterwards `rows` keeps the last `most`."""
    if new.shape[2] == 1:
        rows.append(new)
        out = rows.view()
    else:
        out = torch.cat((rows.view(), new), dim=2) if len(rows) else new
        rows.drop_first(len(rows))
        rows.append(out[:, :, max(out.shape[2] - most, 0) :])
    rows.drop_first(max(len(rows) - most, 0))
    return out
