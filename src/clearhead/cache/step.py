"""The cache that transformers is given for one step of many sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from clearhead.cache.ragged import Ragged, Step


class StepCache(Cache):  # type: ignore[misc]
    """The cache of one step: `model(row, position_ids=…, cache=StepCache(step))`."""

    def __init__(self, step: Step) -> None:
        self.step = step
        super().__init__(layers=[_StepLayer(self, number) for number in range(len(step.pool.layers))])


class _StepLayer(CacheLayerMixin):  # type: ignore[misc]
    is_sliding = False
    is_initialized = True
    supports_early_init = False

    def __init__(self, cache: StepCache, number: int) -> None:
        self.step, self.number = cache.step, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Ragged, Ragged]:
        step = self.step
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        step.pool.write(self.number, step.rows(self.number), keys, values)
        ragged = Ragged(step, self.number)
        return ragged, ragged

    def get_seq_length(self) -> int:
        return 0  # the row of a step begins anew each time; positions are given token by token

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1
