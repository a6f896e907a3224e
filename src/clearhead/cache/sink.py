"""A cache of the first tokens and the last ones, with positions inside the cache: a stream without an end.

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", section 3.2: what is kept is
numbered by its place in the cache. Rotary scores depend on differences alone, so it is the few sinks that are
turned, to the places right before the window, and everything else stays as it came.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.cache.base import KeptLayer, WholeCache, whole
from clearhead.cache.growing import Growing
from clearhead.cache.turning import Turner, turners
from clearhead.errors import ArgumentError, ModelError
from clearhead.mask import Mask
from clearhead.stored import Held

#: From this position on a model's own float32 angles are replaced by exact ones at lower places.
REBASE = 2**14


class SinkLayer(KeptLayer):
    """One layer: the first `sinks` keys as they were before they were turned, and the last window - 1.

    turner: how the model turns keys, None if it does not.
    """

    def __init__(
        self, sinks: int, window: int, turner: Turner | None = None, *, rebase: int = REBASE
    ) -> None:
        super().__init__()
        check_sinks(sinks, window)
        self.sinks, self.window, self.turner, self.rebase = sinks, window, turner, rebase
        self.base = 0  # window keys are turned to position - base
        self._raw: Tensor | None = None  # (B, Hkv, sinks so far, d), never turned; float64 if they are turned
        self._sink_values: Tensor | None = None
        self._keys = Growing(keep=window, lead=sinks)
        self._values = Growing(keep=window, lead=sinks)

    @property
    def turns(self) -> bool:
        """Whether it knows how the model turns its keys."""
        return self.turner is not None

    @property
    def keys(self) -> Tensor | None:
        """The keys that are kept, (B, Hkv, n, d): sinks at their latest places, then the window."""
        return self._keys.view(self._resting) if self._fixed else None

    @property
    def values(self) -> Tensor | None:
        """The values that are kept, (B, Hkv, n, dv)."""
        return self._values.view(self._resting) if self._fixed else None

    @property
    def _resting(self) -> int:
        return min(self.seen, self.sinks)

    @property
    def held(self) -> int:
        """How many tokens of each row are kept for the next."""
        return min(self.seen, self.sinks + self.window - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept, with the sinks' untouched copies; the buffers have room for 1/32 more."""
        more = (t.numel() * t.element_size() for t in (self._raw, self._sink_values) if t is not None)
        return self._keys.nbytes + self._values.nbytes + sum(more)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Held, Tensor]:
        """Take keys (B, Hkv, q, d) and values (B, Hkv, q, dv), turned to their positions in the text.

        Returns sinks, window and the new ones, in this order, for the queries of the same positions. In a
        call of several tokens the sinks lie where they belong for the first of them, and a mask gives each
        its own window.
        """
        self._check(key_states, value_states)
        new, resting = key_states.shape[2], self._resting
        self._trim()
        self._rebase(new)
        turn = None
        own, turner, base = key_states, self.turner, self.base
        if turner is not None and base:
            turn = partial(turner.moved, first=self.seen, to=self.seen - base)
            key_states = turn(key_states)
        fresh = min(self.sinks - resting, new)  # how many of the new ones are sinks
        first = self.seen - self.held + resting  # position of the first key of the window
        mask = None
        if new == 1 and not fresh:
            self._keys.append(key_states)
            self._values.append(value_states)
            self._place_sinks(self.seen + 1 - len(self._keys))
            keys, values = self._keys.view(resting), self._values.view(resting)
        else:
            keys, values = key_states, value_states
            if self.seen:
                self._place_sinks(first)
                keys = torch.cat((self._keys.view(resting), keys), dim=2)
                values = torch.cat((self._values.view(resting), values), dim=2)
            self._keep_sinks(own[:, :, :fresh], value_states[:, :, :fresh])
            self._refill(self._keys, keys)
            self._refill(self._values, values)
            if keys.shape[2] > self.sinks + self.window:
                start = first - resting
                mask = Mask(
                    causal=True,
                    window=self.window,
                    sinks=self.sinks,
                    offset=self.seen,
                    key_offset=start,
                    start=start,
                )
        self.seen += new
        return Held(keys, mask=mask, turn=turn, gapless=True), values

    def _refill(self, rows: Growing, all_rows: Tensor) -> None:
        """Keep the last of all rows that are no sinks, the window, and leave room for the sinks before it."""
        rows.clear()
        sinks = min(self.sinks, all_rows.shape[2])
        window = all_rows[:, :, sinks:]
        rows.append(window[:, :, max(window.shape[2] - self.window, 0) :])
        if rows.buffer is not None and sinks:
            rows.buffer[:, :, rows.first - sinks : rows.first] = all_rows[:, :, :sinks]

    def _trim(self) -> None:
        """Down to what the next token sees of the window. What was handed out before is not written over."""
        too_many = max(len(self._keys) - (self.window - 1), 0)
        self._keys.drop_first(too_many)
        self._values.drop_first(too_many)

    def _keep_sinks(self, keys: Tensor, values: Tensor) -> None:
        """Keep sinks as they were before the model turned them."""
        if not keys.shape[2]:
            return
        keys, values = keys.detach(), values.detach()
        raw = keys.clone() if self.turner is None else self.turner.turned_back(keys, self.seen)
        self._raw = raw if self._raw is None else torch.cat((self._raw, raw), dim=2)
        self._sink_values = (
            values.clone() if self._sink_values is None else torch.cat((self._sink_values, values), dim=2)
        )

    def _place_sinks(self, first: int) -> None:
        """Write the sinks before the window, whose first key sits at `first`, turned to the places there."""
        if self._raw is None or self._sink_values is None:
            return
        count = self._raw.shape[2]
        turner, raw = self.turner, self._raw
        placed = raw if turner is None else turner.turned(raw, first - count - self.base)
        for rows, what in ((self._keys, placed), (self._values, self._sink_values)):
            assert rows.buffer is not None
            rows.buffer[:, :, rows.first - count : rows.first].copy_(what)

    def _rebase(self, new: int) -> None:
        """Bring places down when they have grown: one common angle off every key of the window."""
        if self.turner is None or self.seen + new - self.base <= max(self.rebase, 2 * self.held + new):
            return
        base = self.seen - self.held
        if self._keys.buffer is not None and len(self._keys):
            window = self._keys.view()
            window.copy_(self.turner.shifted(window, self.base - base))
        self.base = base

    def _select(self, rows: list[int]) -> None:
        self._keys.select(rows)
        self._values.select(rows)
        if self._raw is not None and self._sink_values is not None:
            self._raw, self._sink_values = self._raw[rows], self._sink_values[rows]

    def _clear(self) -> None:
        self._keys.clear()
        self._values.clear()
        self._raw = self._sink_values = None
        self.base = 0


class SinkCache(WholeCache):
    """The first `sinks` tokens and the last `window`, numbered by their places in the cache (StreamingLLM).

    model: the model (or its configuration) that the cache is for: its rotary embedding says how keys are
        turned. For `clearhead.nn` the model or a layer of it, or its `Rotary`; None where keys are not turned
        (ALiBi, or no positions).
    sinks: 0 or more, below window. window: the last tokens, the query's own among them.

    Memory and time per token stay the same however long the stream is. Positions in the text may go on
    without end: from 16,384 on queries and keys are turned anew by exact angles at low places, as float32
    angles of the model drift (by 0.14 in a score of size 8 at position 4,000,000).

    In a call of several tokens each has its own window, and the sinks lie where they belong for the first
    of them; the others see them up to q - 1 places farther off than in the cache. One token a call is exact.

    Raises ArgumentError for a window below 1, sinks of a window or more, and a model that turns its keys
    without saying how; ModelError for learned positions, for rotations that depend on the length (dynamic,
    longrope) or turn interleaved pairs, for an attention that is not clearhead's, and for crop; MaskError for
    rows with padding, whose pads would be the sinks; ShapeError for keys of another model or batch.
    """

    def __init__(self, model: Any = None, *, sinks: int = 4, window: int) -> None:
        check_sinks(sinks, window)
        self.sinks, self.window = sinks, window
        self._turners = turners(model)
        config = getattr(model, "config", model)
        super().__init__(config if hasattr(config, "get_text_config") else None)

    @property
    def turns(self) -> bool:
        """Whether it knows how the model turns its keys."""
        return self._turners.rotary is not None

    @property
    def capacity(self) -> int:
        """How many keys a query has at most: sinks + window."""
        return self.sinks + self.window

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take keys and values of a layer; return those to attend to (`SinkLayer.update`)."""
        told = kwargs.get("kwargs") or {}
        if told and not self.turns:
            raise ArgumentError(
                "SinkCache must know how the model turns its keys: SinkCache(model, window=…)"
            )
        if layer_idx == 0:
            _check_positions(told.get("position_ids"), self.get_seq_length())
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _layer(self, number: int) -> SinkLayer:
        return SinkLayer(self.sinks, self.window, self._turners.layer(number))


def check_sinks(sinks: int, window: int) -> None:
    """Raise ArgumentError for a window below 1 and for sinks of a window or more."""
    whole("window", window, 1)
    whole("sinks", sinks, 0)
    if sinks >= window:
        raise ArgumentError(f"sinks must be fewer than the window: sinks={sinks}, window={window}")


def _check_positions(position_ids: Any, seen: int) -> None:
    """The model must have turned the new tokens to the positions seen, seen + 1, …"""
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        return
    first = position_ids[:, 0]
    if bool((first != seen).any()):
        raise ModelError(
            f"SinkCache has seen {seen} tokens and the model turned the next one to position "
            f"{first.tolist()}: rows with padding are not possible, and positions must count all tokens"
        )
