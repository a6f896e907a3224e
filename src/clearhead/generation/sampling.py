"""Which token comes next: the likeliest, or one drawn at random, repeatably."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from clearhead.errors import ArgumentError

#: torch takes seeds below this.
SEEDS = 2**63


class Sampler:
    """Chooses tokens from logits.

    temperature: the logits are divided by it; 0 is greedy, whatever else is given. top_k: only so many of the
    likeliest tokens, and those that tie with the last of them. top_p: only the likeliest tokens that together
    have this probability. seed: where the random numbers start; None takes one and keeps it in `seed`.

    Greedy if nothing is given; what is given without a temperature has temperature 1. In this order:
    temperature, top_k, top_p, as transformers has it, with torch's own random numbers: the same seed gives
    what `torch.manual_seed(seed)` and `model.generate(do_sample=True, …)` give.

    Raises ArgumentError for a temperature below 0 or not finite, a top_k below 1, a top_p outside (0, 1], or
    a seed outside 0..2**63 - 1.

    Source: nucleus sampling is Holtzman et al. 2020, section 3.1; top-k is Fan et al. 2018, section 3.
    """

    def __init__(
        self,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        given = any(value is not None for value in (temperature, top_k, top_p, seed))
        self.temperature = (1.0 if given else 0.0) if temperature is None else _temperature(temperature)
        if top_k is not None and (not _whole(top_k) or top_k < 1):
            raise ArgumentError(f"top_k must be a whole number of at least 1, got {top_k!r}")
        if top_p is not None and not (_number(top_p) and 0 < top_p <= 1):
            raise ArgumentError(f"top_p must be above 0 and at most 1, got {top_p!r}")
        if seed is not None and (not _whole(seed) or not 0 <= seed < SEEDS):
            raise ArgumentError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
        self.top_k, self.top_p = top_k, top_p
        self.seed: int | None = None
        self._random: torch.Generator | None = None
        if self.temperature > 0:
            self.seed = random.SystemRandom().randrange(2**32) if seed is None else seed
            self._random = torch.Generator(device).manual_seed(self.seed)

    def choose(self, logits: Tensor) -> int:
        """Return the number of the next token. logits: (V,), float32."""
        if self._random is None:
            return int(logits.argmax())
        scores = logits / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, len(scores))).values[-1]
            scores = scores.masked_fill(scores < least, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            ascending, order = scores.sort()
            unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            unlikely[-1] = False
            scores = scores.masked_fill(unlikely.scatter(0, order, unlikely), -math.inf)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._random))


def _temperature(value: float) -> float:
    if not _number(value) or not 0 <= value < math.inf:
        raise ArgumentError(f"temperature must be a finite number of at least 0, got {value!r}")
    return float(value)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
