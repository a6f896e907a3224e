"""What the newest query looks at, asked inside the pass that computes it.

A trace keeps every answer of a run. Here each step's answers are handed out with its token and forgotten, so
that an endless text takes no more memory for having been watched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ArgumentError, ObserveError
from clearhead.models.active import ACTIVE, Call, Recorder
from clearhead.observables import LinearObservable, Observable, Rows, SegmentMass, SegmentOutput, Setting
from clearhead.segments import Segments
from clearhead.trace.items import parts

Asked = Observable | type[Observable]
#: Which tokens the keys of a layer's call are: called with the number of the layer and the call; (Lk,)
#: integers, or (Hkv, Lk) where each key head keeps tokens of its own.
Places = Callable[[int, Call], Tensor | None]

#: What the first token is called: heads rest much of their weight there, whatever it says (Xiao et al. 2023).
FIRST = "first token"
AXES = ("layer", "head")


class Watcher:
    """A recorder for one text that grows at its end, one row, any cache.

    segments: whose token is whose; the first token becomes a source of its own, FIRST. observe: observables,
    or their classes; always of the last query. average: over which of "layer" and "head" to take the mean.
    places: tells where keys sit for caches that do not keep a gapless stretch of them.

    Raises ObserveError for anything else, and for two observables of the same name.
    """

    def __init__(
        self,
        segments: Segments,
        observe: Sequence[Asked] | Asked,
        average: Sequence[str] | str = AXES,
        places: Places | None = None,
    ) -> None:
        average = (average,) if isinstance(average, str) else tuple(average)
        if not set(average) <= set(AXES):
            raise ArgumentError(f'average must be out of "layer" and "head", got {average!r}')
        self._average, self.places = average, places
        self._asked = _instances(observe)
        self.sources, self._ids = _with_first(segments)
        self._output = segments.output
        self._layer = 0  # of the running forward
        self._now: Tensor | None = None  # the places of the call that is running
        self._shared: dict[
            tuple[int, int], list[Observable]
        ] = {}  # layers with the same keys share a question
        self._answers: dict[str, list[Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around one forward. Whoever watches already goes on watching."""
        self._layer, self._answers = 0, {}
        self._shared.clear()
        outer = ACTIVE.get()
        token = ACTIVE.set(self if outer is None else _Beside(self, outer))
        try:
            yield
        finally:
            ACTIVE.reset(token)

    def seen(self) -> dict[str, Tensor]:
        """The answers of the latest forward, averaged as asked.

        Raises ObserveError where the layers' answers have different sizes, or if no layer was reached.
        """
        if not self._answers:
            raise ObserveError(
                "no attention call of the model reached clearhead: there is nothing to observe"
            )
        found = {}
        for name, layers in self._answers.items():
            if any(value.shape != layers[0].shape for value in layers):
                raise ObserveError(
                    f"{name} has answers of different sizes in different layers (these keep different "
                    "numbers of keys); ask it with clearhead.observe(model, layers=…)"
                )
            value = torch.stack(layers)  # (L, H, …)
            if "." in name:  # the heads' best keys are different keys: they have no average
                found[name] = value.cpu()
                continue
            axes = tuple(i for i, axis in enumerate(AXES) if axis in self._average)
            found[name] = (value.mean(axes) if axes else value).cpu()
        return found

    # ------------------------------------------------------------------ the recorder protocol

    def observables(self, call: Call) -> Sequence[Observable]:
        """All of them, of the last query."""
        number, self._layer = self._layer, self._layer + 1
        places = self._now = None if self.places is None else self.places(number, call)
        if places is not None:
            return self._questions(self._of_places(places))
        key = (call.mask.key_offset, call.key.shape[2])
        if key not in self._shared:
            self._shared[key] = self._questions(self._of_stretch(*key))
        return self._shared[key]

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        """Take the answers of one layer."""
        for observable, answer in zip(observables, seen, strict=True):
            for name, value in parts(observable.name, answer).items():
                value = value.detach()[0]  # (H, …)
                if "query" in observable.axes:
                    value = value.squeeze(observable.axes.index("query") - 1)
                if "segment" in observable.axes:
                    value = self._all_sources(observable, value)
                if name.endswith(".indices"):
                    value = torch.where(value < 0, value, self._numbers(value, call))
                self._answers.setdefault(name, []).append(value)

    def _questions(self, ids: Tensor) -> list[Observable]:
        asked: list[Observable] = []
        for item in self._asked:
            if isinstance(item, SegmentMass) and ids.ndim == 2:
                asked.append(_MassByHead(ids, len(self.sources), rows="last"))
            elif isinstance(item, SegmentMass):
                asked.append(SegmentMass(ids, rows="last"))
            elif isinstance(item, SegmentOutput) and ids.ndim == 2:
                raise ObserveError("SegmentOutput cannot be asked where each head keeps tokens of its own")
            elif isinstance(item, SegmentOutput):
                asked.append(SegmentOutput(ids, norms=item.norms, rows="last"))
            else:
                asked.append(item)
        return asked

    def _all_sources(self, observable: Observable, value: Tensor) -> Tensor:
        """Sources behind the last one that has keys are not in an answer yet: 0."""
        missing = len(self.sources) - value.shape[axis := observable.axes.index("segment") - 2]
        if not missing:
            return value
        size = [*value.shape]
        size[axis] = missing
        return torch.cat([value, value.new_zeros(size)], axis)

    def _of_stretch(self, start: int, length: int) -> Tensor:
        n = len(self._ids)
        if start + length <= n:
            return self._ids[start : start + length]
        tail = self._ids.new_full((start + length - max(start, n),), self._new)
        return torch.cat([self._ids[start:], tail]) if start < n else tail

    def _of_places(self, places: Tensor) -> Tensor:
        n = len(self._ids)
        given = self._ids[places.clamp(max=n - 1)]
        return torch.where(places < n, given, given.new_full((), self._new))

    def _numbers(self, rows: Tensor, call: Call) -> Tensor:
        """Which tokens these keys of the call are. rows: (H, k), counted in the call."""
        if self._now is None:
            return rows + call.mask.key_offset
        if self._now.ndim == 1:
            return self._now[rows]
        heads = self._now.repeat_interleave(rows.shape[0] // self._now.shape[0], 0)
        return heads.gather(1, rows.clamp(min=0))

    @property
    def _new(self) -> int:
        if self._output is None:
            raise ObserveError(
                "segments has no output: Segments(ids, names, output=…) says whose new tokens are"
            )
        return self._output


class _MassByHead(LinearObservable):
    """SegmentMass where each key head has its own keys. ids: (Hkv, Lk) source numbers, count: of sources."""

    name = "mass"
    axes = ("batch", "head", "query", "segment")

    def __init__(self, ids: Tensor, count: int, *, rows: Rows) -> None:
        object.__setattr__(self, "_ids", ids)
        object.__setattr__(self, "_count", count)
        object.__setattr__(self, "rows", rows)

    def values(self, setting: Setting) -> Tensor:
        """One-hot source numbers, (1, Hkv, Lk, S)."""
        ids: Tensor = self._ids  # type: ignore[attr-defined]
        one_hot = setting.zeros(1, *ids.shape, self._count)  # type: ignore[attr-defined]
        return one_hot.scatter_(-1, ids[None, ..., None], 1.0)


class _Beside:
    """A recorder that asks for two."""

    def __init__(self, inner: Recorder, outer: Recorder) -> None:
        self.inner, self.outer, self.count = inner, outer, 0

    def observables(self, call: Call) -> Sequence[Observable]:
        mine = self.inner.observables(call)
        self.count = len(mine)
        return [*mine, *self.outer.observables(call)]

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        self.inner.record(call, observables[: self.count], seen[: self.count])
        if len(observables) > self.count:
            self.outer.record(call, observables[self.count :], seen[self.count :])


def _with_first(segments: Segments) -> tuple[tuple[str, ...], Tensor]:
    """The names with FIRST behind them, and the numbers with the first token's changed."""
    if segments.ids.ndim != 1:
        raise ObserveError(f"segments must be those of one text, (L,), got {tuple(segments.ids.shape)}")
    name = FIRST
    while name in segments.names:
        name += "'"
    ids = segments.ids.clone()
    ids[0] = len(segments.names)
    return (*segments.names, name), ids


def _instances(observe: Sequence[Asked] | Asked) -> list[Observable]:
    items = [observe] if isinstance(observe, Observable | type) else list(observe)
    asked: list[Observable] = []
    for item in items:
        if isinstance(item, type) and issubclass(item, SegmentMass | SegmentOutput):
            item = item(torch.zeros(1).long())  # a stand-in: the numbers are made anew for each step
        elif isinstance(item, SegmentMass | SegmentOutput):
            raise ObserveError(f"give {type(item).__name__} as a class: the sources are those of the prompt")
        elif isinstance(item, type) and issubclass(item, Observable):
            kind = item.__name__
            try:
                item = item()
            except TypeError as error:
                raise ObserveError(f"{kind} needs arguments, give it as {kind}(…)") from error
        if not isinstance(item, Observable):
            raise ObserveError(f"observe must hold observables such as Entropy(), got {item!r:.100}")
        item = copy.copy(item)
        object.__setattr__(item, "rows", "last")
        asked.append(item)
    names = [item.name for item in asked]
    for name in names:
        if names.count(name) > 1:
            raise ObserveError(f"observe holds two observables named {name!r}")
    return asked
