"""Which attention modules of a model belong together, what to call them, and how their layers are numbered.

A stack is all attention modules that attend in the same way over the same tokens: the decoder's
self-attention, its cross-attention, the encoder, a vision tower. Modules are sorted by their path, since
layer numbers alone repeat between encoder, decoder and cross-attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
_VISION = re.compile(r"vision|visual|image|patch|perceiver", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


@dataclass(frozen=True)
class Stack:
    """The attention modules of one stream.

    label: "self", "cross", "encoder", "vision", or the pattern where two stacks would share a name.
    pattern: the modules' path with its numbers replaced: "model.layers.*.self_attn".
    numbers: path -> number of the layer, as in the model's own list: model.layers[3] is 3.
    """

    label: str
    pattern: str
    numbers: dict[str, int]

    @property
    def cross(self) -> bool:
        """Whether keys belong to other tokens than queries, going by the name."""
        return _CROSS.search(self.pattern) is not None


class Stacks:
    """The stacks of one model. names: the modules that attend, as far as a probe could tell."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._two_sided = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._paths = {id(module): name for name, module in model.named_modules() if name}
        wanted = set(names)
        self._all: dict[str, Stack] = {}  # pattern -> stack
        self._found: dict[int, tuple[Stack, str] | None] = {}
        for path in self._paths.values():
            if path in wanted and _pattern(path) not in self._all:
                self._open(_pattern(path), [p for p in self._paths.values() if p in wanted])

    def of(self, module: nn.Module) -> tuple[Stack, str] | None:
        """The stack that a calling module belongs to, and its path in it; None for other models' modules."""
        key = id(module)
        if key not in self._found:
            path = self._paths.get(key)
            self._found[key] = None if path is None else self._place(path)
        return self._found[key]

    def __iter__(self) -> Iterator[Stack]:
        return iter(tuple(self._all.values()))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the streams that can be expected."""
        return tuple(stack.label for stack in self._all.values())

    @property
    def two_sided(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return self._two_sided

    def _place(self, path: str) -> tuple[Stack, str]:
        for stack in self._all.values():
            if path in stack.numbers:
                return stack, path
        for stack in self._all.values():  # the caller stands right around or inside the module that was named
            for known in stack.numbers:
                if known.startswith(f"{path}.") or path.startswith(f"{known}."):
                    return stack, known
        return self._open(_pattern(path), list(self._paths.values())), path

    def _open(self, pattern: str, paths: list[str]) -> Stack:
        label = _label(pattern, self._two_sided)
        if label in self.labels:
            label = pattern
        stack = Stack(label, pattern, _numbers([p for p in paths if _pattern(p) == pattern]))
        self._all[pattern] = stack
        return stack


def _pattern(path: str) -> str:
    return _NUMBER.sub("*", path)


def _label(pattern: str, two_sided: bool) -> str:
    if _CROSS.search(pattern):
        return "cross"
    if _VISION.search(pattern):
        return "vision"
    if two_sided and re.search(r"(^|\.)encoder\.", pattern):
        return "encoder"
    return "self"


def _numbers(paths: list[str]) -> dict[str, int]:
    """The number of each layer: the one number in the paths that tells them apart, else their order."""
    found = [[int(n) for n in _NUMBER.findall(path)] for path in paths]
    columns = list(zip(*found, strict=True))
    telling = [c for c in columns if len(set(c)) == len(paths)]
    if len(telling) == 1 or (len(paths) == 1 and telling):
        return dict(zip(paths, telling[0], strict=True))
    return {path: n for n, path in enumerate(paths)}
