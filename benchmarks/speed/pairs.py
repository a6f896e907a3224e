"""Time several ways to do the same work against each other, in turns, in one process.

In each round every form runs once, in an order that rotates and turns round, one call that is not counted
right before the counted one. So a form never owes its time to its place, to caches that another one filled or
to threads that fell asleep, and what the machine does besides falls on all of them. A ratio is the median
over rounds of the ratio within a round. Wall time: with several threads the process's own time counts workers
that only wait. Knows nothing of attention.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

SHORT = 5e-4  # a counted stretch repeats a call until it takes about this long, in seconds
LONG = 0.25  # a call longer than this warms itself up

Forms = Mapping[str, Callable[[], object]]


class Spread(NamedTuple):
    """Lower quartile, median and upper quartile."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Budget:
    """How many rounds: as many as fit into `seconds`, but at least `least` and at most `most`.

    Where one round takes longer than `seconds`, three have to do.
    """

    seconds: float
    least: int = 5
    most: int = 400


@dataclass(frozen=True)
class Times:
    """Seconds of one call of each form, one entry per round."""

    seconds: dict[str, list[float]]

    @property
    def rounds(self) -> int:
        """How many."""
        return len(next(iter(self.seconds.values())))

    def median(self, name: str) -> float:
        """Seconds of a form, the median of its rounds."""
        return statistics.median(self.seconds[name])

    def ratio(self, over: str, under: str) -> Spread:
        """Time of one form over that of another, round by round."""
        return spread([a / b for a, b in zip(self.seconds[over], self.seconds[under], strict=True)])


def spread(values: list[float]) -> Spread:
    """The quartiles; of one value that value."""
    if len(values) == 1:
        return Spread(*values * 3)
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def measure(forms: Forms, budget: Budget) -> Times:
    """Run the forms in rounds."""
    once = {name: _time(run, 1) for name, run in forms.items()}  # with whatever a first call builds
    once |= {name: _time(forms[name], 1) for name, seconds in once.items() if seconds < LONG}
    repeats = {name: max(1, min(200, int(SHORT / seconds))) for name, seconds in once.items()}
    cost = sum(once[name] * (repeats[name] + (once[name] < LONG)) for name in forms)
    least = budget.least if cost < budget.seconds else min(3, budget.least)
    count = max(least, min(budget.most, int(budget.seconds / cost)))
    names = list(forms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(count):
            for name in order(names, number):
                if once[name] < LONG:
                    forms[name]()
                seconds[name].append(_time(forms[name], repeats[name]))
    finally:
        if collecting:
            gc.enable()
    return Times(seconds)


def order(names: list[str], number: int) -> list[str]:
    """The order of a round: every name has every place, before and after every neighbour."""
    start = number % len(names)
    turned = names[start:] + names[:start]
    return turned[::-1] if number // len(names) % 2 else turned


def _time(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats
