"""A variable of the running context that torch.compile can look past while nobody has set it.

A compiled graph cannot ask a `ContextVar`. So it is only asked while somebody has set it: how often that is
the case is a plain number that a compiled model guards on. When somebody starts to watch, it is compiled
anew, with a break for the question.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class ContextSlot(Generic[T]):
    """A `ContextVar` whose default is None; `set` and `reset` come in pairs."""

    def __init__(self, name: str) -> None:
        self._variable: ContextVar[T | None] = ContextVar(name, default=None)
        self._set = 0

    def get(self) -> T | None:
        """The value of this context, or None."""
        if torch.compiler.is_compiling() and self._set == 0:
            return None
        return self._variable.get()

    def set(self, value: T) -> Token[T | None]:
        """Set the value of this context; the token undoes it."""
        token = self._variable.set(value)
        self._set += 1
        return token

    def reset(self, token: Token[T | None]) -> None:
        """Undo a `set`. Raises ValueError in another context than that of `set`."""
        self._variable.reset(token)
        self._set -= 1
