"""A question put to every item of a padded batch as if it were alone.

Answers without a query axis add up over queries or pool over keys, so padding cannot be cut out of them
afterwards. Here each item has its own account, which gets only the item's real queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ObserveError
from clearhead.mask import Mask
from clearhead.observables import Account, Observable, Rows, Setting, Tile
from clearhead.shapes import Shape
from clearhead.visibility import Visibility


class Item:
    """The real part of one item in one call.

    queries: which of the call's queries are real, keys: which of its keys. wanted: which of the queries are
    asked for, as places in the call. first_query, first_key: the item's own number of the first of each.
    """

    def __init__(
        self, queries: Tensor, keys: Tensor, wanted: Tensor, first_query: int, first_key: int
    ) -> None:
        self.queries, self.keys, self.wanted = queries, keys, wanted
        self.first_query, self.first_key = first_query, first_key

    def setting(self, whole: Setting, b: int) -> Setting:
        """The call as it would be for this item alone."""
        q = _picked(whole.q[b : b + 1], self.queries)
        k, v = _picked(whole.k[b : b + 1], self.keys), _picked(whole.v[b : b + 1], self.keys)
        (_, Hq, Lq, d), (Hkv, Lk), dv = q.shape, k.shape[1:3], v.shape[3]
        shape = Shape(1, Hq, Hkv, Lq, Lk, d, dv)
        mask = Mask(offset=self.first_query, key_offset=self.first_key)
        visibility = Visibility.of(mask, 1, Hq, Lq, Lk, q.device)
        return Setting(q, k, v, shape, visibility, torch.searchsorted(self.queries, self.wanted))


class PerItem(Observable):
    """`inner`, answered for each item by itself.

    Result: its tensors by name, (B, …); along "key" each item's real keys are at their places in the padded
    row, 0 elsewhere. rows: the queries that any item asks for.
    """

    def __init__(self, inner: Observable, items: Sequence[Item], rows: Rows) -> None:
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "items", tuple(items))
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "name", inner.name)

    inner: Observable
    items: tuple[Item, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of the question."""
        return self.inner.axes

    def start(self, setting: Setting) -> Account:
        """Open one account for each item."""
        return _Accounts(self, setting)


class _Accounts:
    def __init__(self, asked: PerItem, setting: Setting) -> None:
        self.asked, self.setting = asked, setting
        index = setting.query_index
        self.rows = [torch.isin(index, item.wanted).nonzero()[:, 0] for item in asked.items]
        self.accounts = [
            asked.inner.start(item.setting(setting, b)) if len(item.wanted) and len(item.keys) else None
            for b, item in enumerate(asked.items)
        ]

    def add(self, tile: Tile) -> None:
        for b, account in enumerate(self.accounts):
            if account is None:
                continue
            rows, low = _part(self.rows[b], tile.rows)
            cols, left = _part(self.asked.items[b].keys, tile.cols)
            if len(rows) and len(cols):
                weights = tile.weights[b : b + 1][:, :, rows][..., cols]
                logs = tile.log_weights[b : b + 1][:, :, rows][..., cols]
                to = slice(low, low + len(rows)), slice(left, left + len(cols))
                account.add(Tile(weights, logs, *to, torch.empty_like(weights)))

    def result(self) -> _Parts:
        found = {
            b: parts(self.asked.name, account.result())
            for b, account in enumerate(self.accounts)
            if account is not None
        }
        keys = self.asked.axes.index("key") if "key" in self.asked.axes else None
        out = _Parts()
        for b, answer in found.items():
            index = self.asked.items[b].keys
            for name, value in answer.items():
                if name.endswith(".indices"):  # numbers of the item's keys become numbers of the call's keys
                    value = torch.where(value < 0, value, index[value.clamp(min=0)])
                size = [len(self.accounts), *value.shape[1:]]
                if keys is not None:
                    size[keys] = self.setting.shape.Lk
                whole = out.setdefault(name, value.new_zeros(size))
                if keys is None:
                    whole[b : b + 1] = value
                else:
                    whole[b : b + 1].index_copy_(keys, index, value)
        return out


class _Parts(dict[str, Tensor]):
    """What `PerItem` answers with."""


def _part(index: Tensor, tile: slice) -> tuple[Tensor, int]:
    """Which of the ascending `index` lie in this tile, counted from its start, and how many lie before it."""
    low, high = torch.searchsorted(index, torch.tensor([tile.start, tile.stop], device=index.device)).tolist()
    return index[low:high] - tile.start, low


def _picked(tensor: Tensor, index: Tensor) -> Tensor:
    """These places of axis 2; a view if they follow one another."""
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return tensor[:, :, first : last + 1]
    return tensor[:, :, index]


def parts(name: str, answer: Any) -> dict[str, Tensor]:
    """The tensors of an answer: one under `name`, those of a named tuple under "name.field"."""
    if isinstance(answer, Tensor):
        return {name: answer}
    if isinstance(answer, _Parts):
        return answer
    if isinstance(answer, tuple) and hasattr(answer, "_fields"):
        found = {f"{name}.{field}": getattr(answer, field) for field in answer._fields}
        if all(isinstance(value, Tensor) for value in found.values()):
            return found
    raise ObserveError(
        f"{name} must answer with a tensor or a named tuple of tensors, got {type(answer).__name__}"
    )
