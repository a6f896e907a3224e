"""A cache of the keys that were looked at most: heavy hitters, found while the model looks.

Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
section 4: of the keys, those with the largest sum of attention received so far are kept, and the newest ones.
The sums are column sums of the weights, which a fused kernel throws away; here they are measured in the very
pass (`clearhead.KeyMass`), per layer and key head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.cache.base import KeptLayer, WholeCache, whole
from clearhead.cache.growing import Growing
from clearhead.errors import ArgumentError, ModelError
from clearhead.stored import Held


class HeavyHitterLayer(KeptLayer):
    """One layer: per key head up to `budget` keys, the `recent` newest among them.

    Rows of a head lie in any order; `positions` says which tokens they are.
    """

    def __init__(self, budget: int, recent: int) -> None:
        super().__init__()
        check_budget(budget, recent)
        self.budget, self.recent = budget, recent
        self._keys, self._values = Growing(keep=budget + 1), Growing(keep=budget + 1)
        self._positions, self._received = Growing(keep=budget + 1), Growing(keep=budget + 1)
        self._free: Tensor | None = None  # (B, Hkv) the row that the next token takes, where there is one
        self._waiting = False  # whether the attention of the last call has yet to be told

    @property
    def _all(self) -> tuple[Growing, ...]:
        return self._keys, self._values, self._positions, self._received

    @property
    def keys(self) -> Tensor | None:
        """The keys of the last call, (B, Hkv, n, d), a view; None before the first."""
        return self._keys.view() if self._fixed else None

    @property
    def values(self) -> Tensor | None:
        """The values of the last call, (B, Hkv, n, dv), a view; None before the first."""
        return self._values.view() if self._fixed else None

    @property
    def positions(self) -> Tensor:
        """Which token each row of the last call is, (B, Hkv, n) int32: as many rows as `keys` has."""
        return self._positions.view()

    @property
    def received(self) -> Tensor:
        """How much attention each row of the last call has received in all, (B, Hkv, n) float64."""
        return self._received.view()

    def kept(self) -> Tensor:
        """The tokens that are kept, (B, Hkv, held), in order."""
        positions = self.positions
        if self._free is None:
            return positions.sort(dim=-1).values
        gone = torch.zeros_like(positions, dtype=torch.bool).scatter_(2, self._free[..., None], True)
        return positions[~gone].view(*positions.shape[:2], -1).sort(dim=-1).values

    @property
    def held(self) -> int:
        """How many tokens of each row are kept for the next."""
        return min(self.seen, self.budget)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, sums of attention and positions."""
        return sum(part.nbytes for part in self._all)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Held, Tensor]:
        """Take keys (B, Hkv, q, d) and values (B, Hkv, q, dv); return what is kept, and them.

        The attention function tells what each key received, whereupon the lightest are let go of.
        """
        if self._waiting:
            raise ModelError(
                "the attention of the call before was never told to this cache: that call failed, or does "
                "not go through clearhead's attention; reset() the cache"
            )
        self._check(key_states, value_states)
        (B, H, new), device = key_states.shape[:3], key_states.device
        places = torch.arange(self.seen, self.seen + new, dtype=torch.int32, device=device).expand(B, H, new)
        nothing = torch.zeros(B, H, new, dtype=torch.float64, device=device)
        parts = zip(self._all, (key_states, value_states, places, nothing), strict=True)
        if new == 1 and self._free is not None:
            for rows, fresh in parts:
                _put(rows.view(), self._free, fresh.detach())
        else:
            if self._free is not None:
                self._compact()
            for rows, fresh in parts:
                rows.append(fresh)
        self._free, self._waiting = None, True
        self.seen += new
        return Held(self._keys.view(), account=self.told, scattered=True, gapless=True), self._values.view()

    def told(self, received: Tensor) -> None:
        """Take what each key received, (B, Hq, n), and let go of the lightest beyond the budget."""
        sums = self._received.view()
        B, H, n = sums.shape
        sums += received.detach().double().view(B, H, -1, n).sum(2)
        self._waiting = False
        if n <= self.budget:
            return
        heavy = sums.masked_fill(self._positions.view() >= self.seen - self.recent, torch.inf)
        if n == self.budget + 1:
            self._free = heavy.argmin(dim=-1)
            return
        kept = heavy.topk(self.budget, dim=-1).indices
        self._take(kept.gather(2, self._positions.view().gather(2, kept).argsort(dim=-1)))

    def _compact(self) -> None:
        """Close the gap of the row that is free, and put the rest in the order of the text."""
        assert self._free is not None
        places = self._positions.view().clone()
        places.scatter_(2, self._free[..., None], torch.iinfo(torch.int32).max)
        self._take(places.argsort(dim=-1)[..., :-1])
        self._free = None

    def _take(self, rows: Tensor) -> None:
        """Keep these rows (B, Hkv, n) of each head, in this order."""
        for part in self._all:
            view = part.view()
            index = rows if view.ndim == 3 else rows[..., None].expand(-1, -1, -1, view.shape[3])
            taken = view.gather(2, index)
            part.clear()
            part.append(taken)

    def _select(self, rows: list[int]) -> None:
        for part in self._all:
            part.select(rows)
        self._free = None if self._free is None else self._free[rows]

    def _clear(self) -> None:
        for part in self._all:
            part.clear()
        self._free, self._waiting = None, False


class HeavyHitterCache(WholeCache):
    """The `budget` keys of each key head that received most attention so far, the newest among them (H2O).

    config: the model's configuration (`model.config`), or None for `clearhead.nn`. budget: keys that are kept
    per head; a query sees these and its own. recent: so many of the newest are kept whatever they received;
    default half of the budget, at least 1.

    After each call every key's sum grows by the attention that it received from all queries of the call and
    all query heads that share it; beyond the budget the smallest sums go. Each head keeps tokens of its own
    (`layers[i].kept()`); keys keep the positions that they came with. A query head's sums are exact: no
    sampling, no second pass.

    Raises ArgumentError for a budget below 1 or a recent outside 1..budget; MaskError for models with windows
    or biases by distance and for rows with padding; ModelError for an attention that is not clearhead's, for
    crop, and if the call before failed; ShapeError for keys of another model or batch.
    """

    def __init__(self, config: Any = None, *, budget: int, recent: int | None = None) -> None:
        whole("budget", budget, 1)
        self.budget, self.recent = budget, max(budget // 2, 1) if recent is None else recent
        check_budget(self.budget, self.recent)
        super().__init__(config)

    @property
    def capacity(self) -> int:
        """How many keys of a head are kept."""
        return self.budget

    def _layer(self, number: int) -> HeavyHitterLayer:
        return HeavyHitterLayer(self.budget, self.recent)


def check_budget(budget: int, recent: int) -> None:
    """Raise ArgumentError for a budget below 1 and a recent outside 1..budget."""
    whole("budget", budget, 1)
    whole("recent", recent, 1)
    if recent > budget:
        raise ArgumentError(f"recent must be at most the budget: recent={recent}, budget={budget}")


def _put(rows: Tensor, at: Tensor, new: Tensor) -> None:
    """Write new (B, H, 1, …) into row at[b, h] of rows (B, H, n, …)."""
    index = at[..., None] if rows.ndim == 3 else at[..., None, None].expand(-1, -1, -1, rows.shape[3])
    rows.scatter_(2, index, new.to(rows.dtype))
