"""Gathers the answers of attention calls while a model runs, and joins them into a trace.

A run may be many calls per layer: a prefill and then one per generated token. Answers are joined along the
query axis; keys that came later, or that a cache has let go of, are placed by their position.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ObserveError, TraceError
from clearhead.models.active import Call
from clearhead.observables import Observable, Rows
from clearhead.trace.data import Stream, TraceData
from clearhead.trace.streams import Place, label, places


@dataclass
class _Answer:
    """One answer of one call: its parts by name, where its queries and keys start."""

    parts: dict[str, Tensor]
    queries: Tensor | None
    key_offset: int


@dataclass
class _Layer:
    """What one attention module has answered so far."""

    seen: int = 0  # queries so far, also those that were not chosen
    answers: dict[str, list[_Answer]] = field(default_factory=dict)


class Recording:
    """A recorder (see `clearhead.models.active`) for one model.

    layers, heads: numbers to keep, None for all. Layers are counted within each stream. Slices and indices
    in the observables' `rows` are positions in the (padded) row of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        observables: Sequence[Observable],
        segments: tuple[str, ...],
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> None:
        names = [o.name for o in observables]
        for name in names:
            if names.count(name) > 1:
                raise ObserveError(f"observe holds two observables named {name!r}: open one trace for each")
        self.asked = tuple(observables)
        self._model = model
        self._name = _model_name(model)
        self._segments = segments
        self._keep_layers = None if layers is None else frozenset(layers)
        self._keep_heads = None if heads is None else tuple(heads)
        self._places = places(model)
        self._streams: dict[str, dict[str, _Layer]] = {}  # pattern -> path -> layer
        self._labels: dict[str, str] = {}  # label -> pattern
        self._real: dict[str, Tensor | None] = {}
        self._numbers: dict[str, int] = {}  # path -> layer number
        self._own: dict[str, bool] = {}
        self._prompt: dict[str, int] = {}  # pattern -> tokens up to the end of the first call
        self._heads: dict[str, int] = {}
        self._batch = 0
        self._chosen: dict[object, Observable] = {}
        self._joined: TraceData | None = None

    # ------------------------------------------------------------------ the recorder protocol

    def observables(self, call: Call) -> Sequence[Observable]:
        """What is asked of this call: nothing of layers that were not chosen or of other models."""
        place = self._places.get(id(call.module))
        if place is None:
            return ()
        number = self._layer_number(place)
        if self._keep_layers is not None and number not in self._keep_layers:
            return ()
        first = self._first_query(place, call)
        asked = (self._with_rows(o, call, first) for o in self.asked)
        return [o for o in asked if o is not None]

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        """Take the answers of one call."""
        place = self._places[id(call.module)]
        layer = self._layer(place)
        first = self._first_query(place, call)
        Lq = call.query.shape[2]
        self._joined = None
        self._batch = call.query.shape[0]
        self._own[place.pattern] = not _is_cross(place, self._labels_of(place))
        if self._keep_heads is not None and max(self._keep_heads) >= call.query.shape[1]:
            raise ObserveError(
                f"heads holds {max(self._keep_heads)}, but {place.path} has {call.query.shape[1]} heads"
            )
        self._heads[place.pattern] = call.query.shape[1]
        self._prompt.setdefault(place.pattern, first + Lq)
        self._remember_padding(place, call)
        for observable, answer in zip(observables, seen, strict=True):
            queries = None
            if "query" in observable.axes:
                queries = first + _row_index(observable.rows, Lq)
            parts = {n: self._kept_heads(t) for n, t in _parts(observable.name, answer).items()}
            if f"{observable.name}.indices" in parts:  # key numbers become positions
                index = parts[f"{observable.name}.indices"]
                parts[f"{observable.name}.indices"] = torch.where(
                    index < 0, index, index + call.mask.key_offset
                )
            layer.answers.setdefault(observable.name, []).append(
                _Answer(parts, queries, call.mask.key_offset)
            )
        layer.seen = first + Lq

    # ------------------------------------------------------------------ where a call stands

    def _layer_number(self, place: Place) -> int:
        if place.path not in self._numbers:
            same = [p for p in self._places.values() if p.pattern == place.pattern]
            self._numbers.update({p.path: n for n, p in enumerate(same)})
        return self._numbers[place.path]

    def _labels_of(self, place: Place) -> str:
        for name, pattern in self._labels.items():
            if pattern == place.pattern:
                return name
        name = label(place.pattern, self._model, self._labels)
        self._labels[name] = place.pattern
        return name

    def _layer(self, place: Place) -> _Layer:
        return self._streams.setdefault(place.pattern, {}).setdefault(place.path, _Layer())

    def _first_query(self, place: Place, call: Call) -> int:
        """The position of the call's first query in the run."""
        layer = self._layer(place)
        if _is_cross(place, self._labels_of(place)):
            return layer.seen  # the mask speaks of the other side's positions
        offset = call.offset
        first = int(offset.min()) if isinstance(offset, Tensor) else offset
        if first < layer.seen:
            if first == 0:
                raise TraceError(
                    f"{place.path} starts again at token 0, but the trace holds {layer.seen} tokens already: "
                    "open a new observe() for each run (and keep use_cache=True in generate)"
                )
            _rolled_back(layer, first)
        return first

    def _with_rows(self, observable: Observable, call: Call, first: int) -> Observable | None:
        """The observable with its choice of queries in terms of this call; None if it has none here."""
        rows: Rows = observable.rows
        Lq = call.query.shape[2]
        if isinstance(rows, str):
            if rows != "last" or Lq == 1 or call.mask.padding is None:
                return observable
            ends = _last_real(call, Lq)
            return observable if ends is None else self._copy(observable, tuple(ends))
        if isinstance(rows, slice):
            start, stop, step = rows.start or 0, rows.stop, rows.step or 1
            if start < 0 or (stop is not None and stop < 0) or step < 1:
                raise ObserveError(f"rows={rows}: in a trace bounds are positions of tokens, from 0 on")
            end = first + Lq if stop is None else min(stop, first + Lq)
            here = tuple(range(start + max(0, -(-(first - start) // step)) * step - first, end - first, step))
        else:
            index = [int(i) for i in rows]
            if min(index, default=0) < 0:
                raise ObserveError(
                    f"rows holds {min(index)}: in a trace rows are positions of tokens, from 0 on"
                )
            if first == 0 and Lq > 1 and max(index, default=0) >= Lq and call.mask.causal is False:
                raise ObserveError(f"rows holds {max(index)}, but there are {Lq} queries")
            here = tuple(i - first for i in index if first <= i < first + Lq)
        return self._copy(observable, here) if here else None

    def _copy(self, observable: Observable, rows: tuple[int, ...]) -> Observable:
        key = (id(observable), rows)
        if key not in self._chosen:
            if len(self._chosen) > 64:
                self._chosen.clear()
            chosen = copy.copy(observable)
            object.__setattr__(chosen, "rows", list(rows))
            self._chosen[key] = chosen
        return self._chosen[key]

    def _kept_heads(self, answer: Tensor) -> Tensor:
        if self._keep_heads is not None:
            answer = answer[:, list(self._keep_heads)]
        return answer.detach().cpu()

    def _remember_padding(self, place: Place, call: Call) -> None:
        padding = call.mask.padding
        if padding is None or padding.ndim != 2:
            return
        before = call.mask.key_offset
        if before == 0:
            self._real[place.pattern] = padding.detach().cpu()

    # ------------------------------------------------------------------ joining

    def joined(self) -> TraceData:
        """Return everything recorded so far as plain tensors."""
        if self._joined is None:
            streams = {
                name: self._stream(pattern)
                for name, pattern in self._labels.items()
                if any(layer.answers for layer in self._streams.get(pattern, {}).values())
            }
            self._joined = TraceData(self._name, self._batch, self._segments, streams)
        return self._joined

    def _stream(self, pattern: str) -> Stream:
        layers = {p: layer for p, layer in self._streams[pattern].items() if layer.answers}
        paths = sorted(layers, key=lambda path: self._numbers[path])
        heads = self._keep_heads or tuple(range(self._heads[pattern]))
        own = self._own[pattern]
        seen = max(layer.seen for layer in layers.values())
        keys = max(
            _last_key(a, o) for o in self.asked for p in paths for a in layers[p].answers.get(o.name, ())
        )
        keys = min(keys, seen) if own else keys  # a static cache has room that nothing was written to
        stream = Stream(
            layers=tuple(self._numbers[path] for path in paths),
            heads=heads,
            real=_real(self._real.get(pattern), seen if own else keys),
            own_queries=own,
            prompt=self._prompt[pattern],
            last=frozenset(o.name for o in self.asked if isinstance(o.rows, str) and o.rows == "last"),
        )
        keys = max(
            _last_key(a, o) for o in self.asked for p in paths for a in layers[p].answers.get(o.name, ())
        )
        for observable in self.asked:
            per_layer = [layers[path].answers.get(observable.name, []) for path in paths]
            if not all(per_layer):
                continue
            joined = [_joined(answers, observable.axes, keys) for answers in per_layer]
            axes = ("layer", *joined[0][1])
            for part in joined[0][0]:
                stream.values[part] = torch.stack([values[part] for values, _ in joined])
            stream.axes[observable.name] = axes
            if "query" in axes:
                stream.queries[observable.name] = torch.cat(
                    [a.queries for a in per_layer[0] if a.queries is not None]
                )
        return stream


def _last_key(answer: _Answer, observable: Observable) -> int:
    if "key" not in observable.axes:
        return 0
    axis = observable.axes.index("key")
    return answer.key_offset + max(t.shape[axis] for t in answer.parts.values())


def _joined(
    answers: Sequence[_Answer], axes: tuple[str, ...], keys: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Join the answers of several calls of one layer; also the names of the result's axes, batch first."""
    out = {}
    names = axes
    for part in answers[0].parts:
        tensors = [answer.parts[part] for answer in answers]
        if "key" in axes:
            axis = axes.index("key")
            tensors = [
                _placed(t, axis, answer.key_offset, keys) for t, answer in zip(tensors, answers, strict=True)
            ]
        if "query" in axes:
            out[part] = torch.cat(tensors, dim=axes.index("query"))
        elif "key" in axes:
            out[part] = torch.stack(tensors).sum(0)
        elif len(tensors) == 1:
            out[part] = tensors[0]
        else:
            names = (axes[0], "call", *axes[1:])
            out[part] = torch.stack(tensors, dim=1)
    return out, names


def _placed(tensor: Tensor, axis: int, offset: int, length: int) -> Tensor:
    """The tensor with its keys at offset.., zeros elsewhere, `length` keys in all."""
    if offset == 0 and tensor.shape[axis] == length:
        return tensor
    size = list(tensor.shape)
    size[axis] = length
    out = tensor.new_zeros(size)
    count = min(tensor.shape[axis], length - offset)
    out.narrow(axis, offset, count).copy_(tensor.narrow(axis, 0, count))
    return out


def _real(padding: Tensor | None, length: int) -> Tensor | None:
    """The padding mask over `length` tokens, generated ones included; None if all are real."""
    if padding is None or bool(padding[:, :length].all()):
        return None
    later = padding.new_ones(padding.shape[0], max(0, length - padding.shape[1]))
    return torch.cat([padding[:, :length], later], dim=1)


def _rolled_back(layer: _Layer, length: int) -> None:
    """Forget the queries from position `length` on (a cache that was cropped)."""
    for name, answers in layer.answers.items():
        kept = []
        for answer in answers:
            if answer.queries is None:
                raise TraceError(f"{name} has no query axis and cannot follow a cache that was cropped")
            if int(answer.queries[-1]) < length:
                kept.append(answer)
            elif int(answer.queries[0]) < length:
                raise TraceError("a cache was cropped in the middle of a call; observe fewer rows")
        layer.answers[name] = kept


def _parts(name: str, answer: Any) -> dict[str, Tensor]:
    if isinstance(answer, Tensor):
        return {name: answer}
    if isinstance(answer, tuple) and hasattr(answer, "_fields"):
        return {f"{name}.{field}": getattr(answer, field) for field in answer._fields}
    raise ObserveError(
        f"{name} must answer with a tensor or a named tuple of tensors, got {type(answer).__name__}"
    )


def _row_index(rows: Rows, Lq: int) -> Tensor:
    if isinstance(rows, str):
        return torch.arange(Lq) if rows == "all" else torch.tensor([Lq - 1])
    return torch.as_tensor(rows)


def _last_real(call: Call, Lq: int) -> list[int] | None:
    """Rows of the last real token of each item, sorted; None if that is the last row for all."""
    padding = call.mask.padding
    if padding is None or padding.ndim != 2 or padding.shape[1] != Lq:
        return None
    ends = torch.where(padding, torch.arange(Lq, device=padding.device), 0).amax(1)
    found = sorted(set(ends.tolist()))
    return None if found == [Lq - 1] else found


def _is_cross(place: Place, name: str) -> bool:
    return name == "cross" or "cross" in place.pattern


def _model_name(model: nn.Module) -> str:
    """The hub id, or the last part of a local path: a trace carries no path of the machine it was made on."""
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    return (Path(name).name if Path(name).exists() else name) or type(model).__name__
