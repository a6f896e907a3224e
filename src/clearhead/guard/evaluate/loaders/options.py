"""What all loaders are told: the seed, how much is wanted, and the lines that are inserted beside attacks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.pairs import Inserts
from clearhead.guard.material import load


@dataclass(frozen=True)
class Options:
    """How a set is loaded.

    seed: of every draw. rounds: how often each context is used where samples are composed of contexts and
    attacks. most: of records of a file, or None for all of them. inserts: benign lines to insert, own ones
    where the user has any. split: "train" or "test", or "" for all there is.

    Raises ArgumentError for numbers below 1 and for another split.
    """

    seed: int = 0
    rounds: int = 1
    most: int | None = None
    inserts: Inserts = field(default_factory=Inserts.packaged)
    split: str = ""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ArgumentError(f"rounds must be at least 1, got {self.rounds}")
        if self.most is not None and self.most < 1:
            raise ArgumentError(f"most must be at least 1 or None, got {self.most}")
        if self.split not in ("", "train", "test"):
            raise ArgumentError(f"split must be train, test or empty, got {self.split!r}")


def worded(task: str, rng: random.Random) -> str:
    """Return a system prompt that asks for a task, in one of the package's wordings."""
    wording: str = rng.choice(load("en", "instructions")["system"])
    return wording.replace("{task}", task)


def generic(rng: random.Random) -> str:
    """Return a system prompt without a task of its own, for texts that are whole messages."""
    wording: str = rng.choice(load("en", "instructions")["generic"])
    return wording
