"""What one line of the table is about: some work, who does it, what it must give, and what was aimed at.

A `Case` is made when its turn comes and forgotten afterwards. Knows nothing of how it is timed or printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

import clearhead as ch
from speed.ceilings import Ceilings

Run = Callable[[], object]


class Goal(NamedTuple):
    """The least ratio or share aimed at, by kind of machine; None: nothing was set."""

    avx2: float | None = None
    avx512: float | None = None

    def on(self, machine: str | None) -> float | None:
        """The one for this kind of machine; None for one without goals."""
        return {"avx2": self.avx2, "avx512": self.avx512}.get(machine or "")


NO_GOAL = Goal()


class Error(NamedTuple):
    """How far a result is from float64's on the same inputs."""

    largest: float
    mean: float


class WrongResultError(Exception):
    """What was to be timed does not compute what it says: there is no figure for it."""


@dataclass(frozen=True)
class Setup:
    """What all cases of a run share.

    backend: which of `clearhead.backends.registry.names()` is ours. quick: fewer shapes. multiply: the loop
    whose rate bounds float32 arithmetic of the instruction set in use, `multiply_bf16` that of bfloat16; ""
    without ceilings.
    """

    backend: str
    quick: bool
    threads: int
    ceilings: Ceilings | None = None
    multiply: str = ""
    multiply_bf16: str = ""

    def attention(self, *args: Any, **options: Any) -> Any:
        """`clearhead.attention` by the backend that is measured."""
        return ch.attention(*args, backend=self.backend, **options)


@dataclass(frozen=True)
class Case:
    """One piece of work.

    work: its row in the table of targets. shape: in words. ours: the call. peers: others that do the same.
    check: raises WrongResultError, or returns the error of each form that it looked at. operations: useful
    ones of a call (a product and a sum are two; hidden pairs do not count). stored: tensors whose bytes
    bound a call, if reading does. added: the peer is our own call without something, so the figure is what
    that adds. ratios: the least time of a peer over ours. shares: the least share of a ceiling, "multiply" or
    "read"; where both are there, the slower one binds. error_of: the peer that our mean error must not
    exceed. note: what the reader must know.
    """

    work: str
    shape: str
    ours: Run
    peers: Mapping[str, Run]
    check: Callable[[], dict[str, Error]]
    operations: float = 0.0
    stored: Sequence[Tensor] = ()
    bf16: bool = False
    added: bool = False
    ratios: Mapping[str, Goal] = field(default_factory=dict)
    shares: Mapping[str, Goal] = field(default_factory=dict)
    error_of: str = ""
    note: str = ""
    key: str = ""  # by which the figure is found again, where something else is written from it


Cases = Iterator[Callable[[], Case]]
