"""Rows that grow, shrink and slide in place: what is there is copied once per doubling, not per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: A buffer that is not bounded starts with room for so many rows.
_LEAST = 64


class Growing:
    """Rows (B, H, n, …) in a buffer that is longer than they are.

    keep: None: the buffer doubles when it is full, so that each row is copied at most twice in all; what is
        reserved and was never written takes addresses and no memory. A number: about so many rows stay, since
        the first ones are dropped; the buffer has 1/32 more, and the rows move to its front when it is full.
    lead: free rows in front of the first one, for the owner to write.

    Gradients do not go through it: it holds numbers.
    """

    def __init__(self, *, keep: int | None = None, lead: int = 0) -> None:
        self.keep, self.lead = keep, lead
        self.buffer: Tensor | None = None
        self.first = self.end = lead
        #: How many rows were copied within the buffer or to a larger one, so far.
        self.moved = 0

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are held, the lead among them."""
        return 0 if self.buffer is None else _bytes(self.buffer, len(self) + self.lead)

    @property
    def reserved(self) -> int:
        """Bytes of the buffer."""
        return 0 if self.buffer is None else _bytes(self.buffer, self.buffer.shape[2])

    def view(self, lead: int = 0) -> Tensor:
        """The rows, (B, H, lead + n, …), a view; with the last `lead` rows in front of them."""
        assert self.buffer is not None
        return self.buffer[:, :, self.first - lead : self.end]

    def append(self, new: Tensor) -> None:
        """Write rows (B, H, q, …) behind the last one."""
        count = new.shape[2]
        self._make_room(count, new)
        assert self.buffer is not None
        self.buffer[:, :, self.end : self.end + count].copy_(new.detach())
        self.end += count

    def drop_first(self, count: int) -> None:
        """Let go of the first `count` rows."""
        self.first += count

    def crop(self, count: int) -> None:
        """Let go of the last `count` rows."""
        self.end = max(self.end - count, self.first)

    def clear(self) -> None:
        """Let go of everything, the buffer too."""
        self.buffer = None
        self.first = self.end = self.lead

    def select(self, rows: Sequence[int]) -> None:
        """Keep these items of the batch, in this order, some perhaps several times."""
        if self.buffer is None or list(rows) == list(range(self.buffer.shape[0])):
            return
        old, keep = self.buffer, slice(self.first - self.lead, self.end)
        self.buffer = _empty(old, (len(rows), *old.shape[1:]))
        for at, row in enumerate(rows):
            self.buffer[at, :, keep].copy_(old[row, :, keep])

    def _make_room(self, count: int, like: Tensor) -> None:
        old, rows = self.buffer, len(self)
        if old is not None and self.end + count <= old.shape[2]:
            return
        needed = self.lead + rows + count
        if self.keep is None:
            capacity = max(_LEAST, needed if old is None else 2 * old.shape[2], needed)
            capacity = capacity if old is not None else max(_LEAST, 2 * needed)
        else:
            most = max(needed, self.lead + self.keep)
            capacity = most + max(8, most // 32)
        if old is not None and self.keep is not None and capacity <= old.shape[2]:
            held = old[:, :, self.first : self.end].clone()  # they may overlap with where they go
            old[:, :, self.lead : self.lead + rows].copy_(held)
        else:
            self.buffer = _empty(like, (*like.shape[:2], capacity, *like.shape[3:]))
            if old is not None and rows:
                self.buffer[:, :, self.lead : self.lead + rows].copy_(old[:, :, self.first : self.end])
        self.moved += rows
        self.first, self.end = self.lead, self.lead + rows


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory that may be written in any mode: not an inference tensor, whoever asks first."""
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def _bytes(buffer: Tensor, rows: int) -> int:
    per_row = buffer.numel() // buffer.shape[2]
    return per_row * rows * buffer.element_size()
