"""Which token belongs to which named source.

`Segments` is what observables take: a segment number per token and a name per number. Where the numbers
come from (a chat template, a user's own list) is not this file's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.errors import ArgumentError, DTypeError, ShapeError


@dataclass(frozen=True, eq=False)
class Segments:
    """A segment number for every token, and a name for every number.

    ids: (L,) or (B, L), integers from 0 to len(names) - 1.
    names: one per segment number; they must differ.
    output: the number that tokens past the end of `ids` get, None if such tokens are an error. This is
        how tokens that are generated later find a place.

    Raises DTypeError, ShapeError or ArgumentError for ids that are not integers, have another rank, or lie
    outside the names.
    """

    ids: Tensor
    names: tuple[str, ...]
    output: int | None = None

    def __init__(self, ids: Tensor | Sequence[int], names: Sequence[str], output: int | None = None) -> None:
        ids = torch.as_tensor(ids)
        names = tuple(names)
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise DTypeError(f"segment ids must be integers, got {ids.dtype}")
        if ids.ndim not in (1, 2):
            raise ShapeError(f"segment ids must have shape (L,) or (B, L), got {tuple(ids.shape)}")
        if len(set(names)) != len(names):
            raise ArgumentError(f"segment names must differ, got {list(names)}")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= len(names)):
            raise ArgumentError(
                f"segment ids must lie in 0..{len(names) - 1} (there are {len(names)} names), "
                f"got {int(ids.min())}..{int(ids.max())}"
            )
        if output is not None and not 0 <= output < len(names):
            raise ArgumentError(f"output must be a segment number in 0..{len(names) - 1}, got {output}")
        object.__setattr__(self, "ids", ids.detach().long().clone())  # the caller may change theirs
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "output", output)

    def __len__(self) -> int:
        """Return the number of segments (not of tokens)."""
        return len(self.names)

    def cover(self, start: int, length: int) -> Segments:
        """Return the segments of `length` tokens from position `start` on.

        Positions past the end of `ids` get the number `output`; without one they raise ShapeError.
        """
        have = self.ids.shape[-1]
        missing = start + length - have
        if missing > 0 and self.output is None:
            raise ShapeError(f"segment ids cover {have} tokens, but {start + length} are attended to")
        ids = self.ids
        if missing > 0:
            assert self.output is not None
            tail = ids.new_full((*ids.shape[:-1], missing), self.output)
            ids = torch.cat([ids, tail], dim=-1)
        return Segments(ids[..., start : start + length], self.names, self.output)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segments):
            return NotImplemented
        return self.names == other.names and self.output == other.output and torch.equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash((self.names, self.output, tuple(self.ids.shape)))
