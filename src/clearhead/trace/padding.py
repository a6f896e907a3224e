"""Which tokens of the rows of a batch are real, as far as a run has shown it."""

from __future__ import annotations

import torch
from torch import Tensor


class Padding:
    """Real and padding tokens of (B, length) positions; grows as calls come in."""

    def __init__(self) -> None:
        self.length = 0
        self._real: Tensor | None = None  # (B, length), None as long as all are real
        self._numbers: Tensor | None = None

    def extend(self, length: int, start: int, real: Tensor | None) -> None:
        """Learn about positions up to `length`; real: (B, n) booleans of positions start.., None: all real.

        What is known already stays; positions that `real` does not reach are real.
        """
        fresh = length - self.length
        if fresh <= 0:
            return
        new = None if real is None else real[:, max(0, self.length - start) : max(0, length - start)]
        if new is not None and not bool(new.all()) and self._real is None:
            self._real = torch.ones(len(new), self.length, dtype=torch.bool)
        if self._real is not None:
            tail = torch.ones(len(self._real), fresh, dtype=torch.bool)
            if new is not None:
                at = max(0, start - self.length)
                tail[:, at : at + new.shape[1]] = new.cpu()
            self._real = torch.cat([self._real, tail], dim=1)
        self.length, self._numbers = length, None

    def real(self, length: int) -> Tensor | None:
        """(B, length) booleans, or None if all these positions are real."""
        if self._real is None or bool(self._real[:, :length].all()):
            return None
        later = torch.ones(len(self._real), max(0, length - self.length), dtype=torch.bool)
        return torch.cat([self._real[:, :length], later], dim=1)

    def numbers(self, start: int, stop: int) -> Tensor:
        """(B | 1, stop - start) the number of each position among its item's real ones, -1 for padding."""
        if self._real is None:
            return torch.arange(start, stop)[None]
        if self._numbers is None or self._numbers.shape[1] < stop:
            real = self.real(max(stop, self.length))
            if real is None:
                return torch.arange(start, stop)[None]
            self._numbers = torch.where(real, real.long().cumsum(1) - 1, -1)
        return self._numbers[:, start:stop]

    def before(self, position: int) -> list[int]:
        """How many real tokens each item has before this position; one number if all are real."""
        if self._real is None:
            return [position]
        real = self.real(max(position, self.length))
        return [position] if real is None else [int(n) for n in real[:, :position].sum(1)]

    def cut(self, length: int) -> None:
        """Forget positions from `length` on."""
        if length < self.length:
            self.length, self._numbers = length, None
            self._real = None if self._real is None else self._real[:, :length]
