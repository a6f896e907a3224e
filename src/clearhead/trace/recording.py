"""Gathers the answers of attention calls while a model runs.

A run may be many calls per layer: a prefill and then one per generated token. Which tokens are whose is
followed item by item, so that each item of a padded batch is recorded as it would be alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.errors import ObserveError, TraceError
from clearhead.mask import Mask
from clearhead.models.active import Call
from clearhead.observables import MeanDistance, Observable, Rows, SegmentMass, SegmentOutput
from clearhead.trace.data import TraceData
from clearhead.trace.items import Item, PerItem, parts
from clearhead.trace.joining import Answer, Layer, join
from clearhead.trace.padding import Padding
from clearhead.trace.rows import Choice, choose, first_missing
from clearhead.trace.streams import Stack, Stacks


class Wanted(NamedTuple):
    """What a recording keeps; None for all."""

    observables: tuple[Observable, ...]  # their rows as `rows.checked` gives them
    segments: tuple[str, ...]
    exact: bool  # whether the segments name all tokens of the prompt, no more and no fewer
    layers: frozenset[int] | None = None
    heads: tuple[int, ...] | None = None
    streams: frozenset[str] | None = None


class _Running:
    """One stack while the model runs."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.layers: dict[int, Layer] = {}
        self.own: bool | None = None  # whether queries and keys are the same tokens
        self.keys = Padding()
        self.heads = 0
        self.batch = 0
        self.latest = (-1, 0)  # first query and their number of the latest call
        self.now = (-1, 0, 0, 0)  # the calls that the choices below are for
        self.choices: dict[int, tuple[Observable, Choice] | None] = {}

    def seen(self) -> int:
        """How many queries there were."""
        return max((layer.seen for layer in self.layers.values()), default=0)


class _Frame(NamedTuple):
    """Where one call stands."""

    running: _Running
    layer: Layer
    first: int  # position of its first query in the row
    Lq: int
    queries: Padding  # of the row that the queries are in


class Recording:
    """A recorder (see `clearhead.models.active`) for one model.

    stacks: the model's attention modules. Layers are numbered as in the model's own lists, rows are counted
    in each item's own real tokens.
    """

    def __init__(self, model: nn.Module, stacks: Stacks, wanted: Wanted) -> None:
        self._name = _model_name(model)
        self._forward = signature(model.forward)
        self._stacks, self._wanted = stacks, wanted
        self._running: dict[str, _Running] = {}  # pattern -> stack
        self._given: dict[str, Tensor] = {}  # label -> the 2-D mask that the model was called with
        self._given_padding: dict[int, Padding] = {}
        self._rows: dict[tuple[int, object], Observable] = {}
        self._frame: _Frame | None = None
        self._joined: TraceData | None = None
        self._named = self._named_streams()

    def _named_streams(self) -> frozenset[str]:
        """The streams whose keys are the tokens that segments name."""
        labels = self._stacks.labels
        if self._wanted.streams is not None and len(self._wanted.streams) == 1:
            return self._wanted.streams
        if self._stacks.two_sided:
            return frozenset({"encoder", "cross"})
        return frozenset({"self"} if "self" in labels or len(labels) != 1 else labels)

    # ------------------------------------------------------------------ the recorder protocol

    def note_inputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of the model: see which tokens are real, for calls whose masks do not say."""
        try:
            given = self._forward.bind_partial(*args, **kwargs).arguments
        except TypeError:  # the model itself will complain
            return
        given = {**given, **given.get("kwargs", {})}
        sides = {"self": "decoder_attention_mask", "encoder": "attention_mask"}
        for label, name in (sides if self._stacks.two_sided else {"self": "attention_mask"}).items():
            mask = given.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                self._given[label] = mask.detach().bool()

    def observables(self, call: Call) -> Sequence[Observable]:
        """What is asked of this call: nothing of layers that were not chosen or of other models."""
        found = self._stacks.of(call.module)
        if found is None:
            return ()
        stack, path = found
        running = self._running.setdefault(stack.pattern, _Running(stack))
        number = stack.numbers[path]
        layer = running.layers.setdefault(number, Layer())
        frame = self._frame = self._placed(running, layer, call)
        layer.seen, layer.calls = frame.first + frame.Lq, layer.calls + 1
        if not self._chosen(stack) or (self._wanted.layers is not None and number not in self._wanted.layers):
            return ()
        running.heads, running.batch = call.query.shape[1], call.query.shape[0]
        if self._wanted.heads is not None and max(self._wanted.heads) >= running.heads:
            raise ObserveError(
                f"heads holds {max(self._wanted.heads)}, allowed are 0..{running.heads - 1}: {stack.label} "
                f"attention ({path}) has {running.heads} heads"
            )
        asked = []
        for observable in self._wanted.observables:
            if not self._fits(observable, running):
                continue
            if isinstance(observable, SegmentMass | SegmentOutput):
                self._check_segments(observable, frame, call)
            choice = self._choice(observable, frame, call)
            if choice is not None:
                asked.append(choice[0])
        return asked

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        """Take the answers of one call."""
        assert self._frame is not None
        running, layer = self._frame.running, self._frame.layer
        self._joined = None
        for observable, answer in zip(observables, seen, strict=True):
            _, choice = next(c for c in running.choices.values() if c is not None and c[0] is observable)
            axes = observable.axes
            if axes[:2] != ("batch", "head") or len(set(axes)) != len(axes):
                raise ObserveError(
                    f'the axes of {observable.name} must differ and start with "batch", "head", got {axes}'
                )
            kept = {}
            for name, value in parts(observable.name, answer).items():
                if value.ndim != len(axes):
                    raise ObserveError(f"{name} has shape {tuple(value.shape)} for the axes {axes}")
                if name.endswith(".indices"):
                    value = _own_numbers(value, running.keys, call)
                kept[name] = self._kept(value, choice, axes)
            queries = choice.queries.cpu() if "query" in axes else None
            layer.answers.setdefault(observable.name, []).append(Answer(kept, queries, call.mask.key_offset))

    # ------------------------------------------------------------------ where a call stands

    def _chosen(self, stack: Stack) -> bool:
        return self._wanted.streams is None or stack.label in self._wanted.streams

    def _placed(self, running: _Running, layer: Layer, call: Call) -> _Frame:
        mask, (B, _, Lq, _), Lk = call.mask, call.query.shape, call.key.shape[2]
        if running.own is None:
            running.own = not running.stack.cross and (mask.offset is not None or Lq == Lk)
        if running.batch not in (0, B):
            raise TraceError(
                f"{running.stack.label} attention had a batch of {running.batch} and now has {B}: open a new "
                "observe() for each run"
            )
        if not running.own:
            real = _padding(mask)
            if real is None and mask.dense is not None and running.stack.label == "cross":
                real = self._input_mask("encoder", B, Lk)
            running.keys.extend(mask.key_offset + Lk, mask.key_offset, real)
            first = layer.seen
            for other in self._running.values():
                if other.stack.label == "self" and other.own and other.latest[1] == Lq:
                    first = max(first, other.latest[0])  # a cache that was filled before
            return _Frame(running, layer, first, Lq, self._queries_of_cross(first + Lq, B))
        first = int(call.offset.min()) if isinstance(call.offset, Tensor) else call.offset
        if first < layer.seen:
            if first == 0 and (self._chosen(running.stack) or running.stack.label == "self"):
                raise TraceError(
                    f"{running.stack.label} attention starts again at token 0, but the trace holds "
                    f"{layer.seen} tokens already: open a new observe() for each run, and leave use_cache on "
                    "in generate (models whose layers share their weights cannot be observed)"
                )
            axis = {o.name: o.axes.index("query") for o in self._wanted.observables if "query" in o.axes}
            layer.cut(first, running.keys.before(first), axis)
            running.keys.cut(max(first, 0))
            running.now = (-1, 0, 0, 0)
            self._joined = None
        end = first + Lq
        real, start = _padding(mask), mask.key_offset
        if real is None and (mask.dense is not None or mask.also):  # a dense mask holds its padding within
            real, start = self._input_mask(running.stack.label, B, end), 0
        running.keys.extend(end, start, real)
        running.latest = (first, Lq)
        return _Frame(running, layer, first, Lq, running.keys)

    def _input_mask(self, label: str, B: int, length: int) -> Tensor | None:
        given = self._given.get(label)
        return None if given is None or given.shape[0] != B or given.shape[1] < length else given

    def _queries_of_cross(self, length: int, B: int) -> Padding:
        """The row that looks across: as the self-attention knows it, or else the model's own input."""
        for running in self._running.values():
            if running.stack.label == "self" and running.own and running.keys.length >= length:
                return running.keys
        padding = Padding()
        padding.extend(length, 0, self._input_mask("self", B, length))
        return padding

    # ------------------------------------------------------------------ what a call is asked

    def _choice(self, observable: Observable, frame: _Frame, call: Call) -> tuple[Observable, Choice] | None:
        """The observable in terms of this call; the layers of a stack share it."""
        running, Lk = frame.running, call.key.shape[2]
        now = (frame.first, frame.Lq, Lk, call.mask.key_offset)
        if running.now != now:
            running.now, running.choices = now, {}
        if id(observable) not in running.choices:
            stop = frame.first + frame.Lq
            choice = choose(observable.rows, frame.queries.numbers(frame.first, stop))
            asked = None if choice is None else (self._asked(observable, frame, call, choice), choice)
            running.choices[id(observable)] = asked
        return running.choices[id(observable)]

    def _asked(self, observable: Observable, frame: _Frame, call: Call, choice: Choice) -> Observable:
        if "query" not in observable.axes:
            items = _items(frame, call, observable.rows)
            if items is not None:
                device = call.query.device
                for item in items:
                    item.queries, item.keys, item.wanted = (
                        t.to(device) for t in (item.queries, item.keys, item.wanted)
                    )
                return PerItem(observable, items, choice.rows)
        rows = choice.rows
        key = (id(observable), (rows.start, rows.stop) if isinstance(rows, slice) else rows)
        if key not in self._rows:
            if len(self._rows) > 64:
                self._rows.clear()
            chosen = copy.copy(observable)
            object.__setattr__(chosen, "rows", list(rows) if isinstance(rows, tuple) else rows)
            self._rows[key] = chosen
        return self._rows[key]

    def _kept(self, value: Tensor, choice: Choice, axes: tuple[str, ...]) -> Tensor:
        """What was asked for and nothing else: no gradient, no view of something larger."""
        value = value.detach()
        if self._wanted.heads is not None:
            value = value[:, list(self._wanted.heads)]
        if choice.pick is not None and "query" in axes:
            axis = axes.index("query")
            shape = [1] * value.ndim
            shape[0], shape[axis] = choice.pick.shape
            size = [*value.shape]
            size[axis] = choice.pick.shape[1]
            value = value.gather(axis, choice.pick.to(value.device).view(shape).expand(size))
        value = value.cpu()
        exact = value.untyped_storage().nbytes() == value.numel() * value.itemsize
        return value if exact and value.is_contiguous() else value.contiguous().clone()

    # ------------------------------------------------------------------ checks

    def _check_segments(self, observable: SegmentMass | SegmentOutput, frame: _Frame, call: Call) -> None:
        membership = observable.membership
        if not membership.by_position:
            return
        covered = membership.segments.ids.shape[-1]
        running = frame.running
        if membership.segments.ids.ndim == 1 and running.keys.real(running.keys.length) is not None:
            raise ObserveError(
                "segments are those of one prompt, but the run is a padded batch: give numbers for every "
                "row, (B, L), as Prompt.batch(prompts).segments does"
            )
        tokens = frame.first + frame.Lq if running.own else call.mask.key_offset + call.key.shape[2]
        grows = running.own and running.stack.label == "self"  # generated tokens become keys
        if frame.layer.calls == 1 and covered < tokens and (self._wanted.exact or not grows):
            raise ObserveError(
                f"segments has {covered} numbers, but {running.stack.label} attention has {tokens} tokens"
            )
        if frame.layer.calls == 2 and grows and frame.Lq == 1 and covered > frame.first:
            raise ObserveError(
                f"segments has {covered} numbers, but the prompt in the run has {frame.first} tokens (if it "
                "comes in several calls, fill the cache before observe())"
            )

    def check_complete(self) -> None:
        """Raise ObserveError if the run did not have what was asked about."""
        ran = [r for r in self._running.values() if r.heads and self._chosen(r.stack)]
        for observable in self._wanted.observables if ran else ():
            asked = [running for running in ran if self._fits(observable, running)]
            if not asked:
                streams = ", ".join(running.stack.label for running in ran)
                raise ObserveError(
                    f"{observable.name} has no meaning in {streams} attention: {self._why_not(observable)}"
                )
            if isinstance(observable, SegmentMass | SegmentOutput) and observable.membership.by_position:
                covered = observable.membership.segments.ids.shape[-1]
                for running in asked:
                    if covered > running.keys.length:
                        raise ObserveError(
                            f"segments has {covered} numbers, but {running.stack.label} attention has "
                            f"{running.keys.length} tokens"
                        )
            longest = max(asked, key=_Running.seen)
            missing = first_missing(observable.rows, longest.seen())
            if missing is not None:
                raise ObserveError(f"{observable.name}: {missing} in {longest.stack.label} attention")

    def _fits(self, observable: Observable, running: _Running) -> bool:
        """Whether the question has a meaning in this stream."""
        if isinstance(observable, SegmentMass | SegmentOutput):
            return running.stack.label in self._named
        return bool(running.own) or not isinstance(observable, MeanDistance)

    def _why_not(self, observable: Observable) -> str:
        if isinstance(observable, MeanDistance):
            return "its queries and keys are no tokens of the same text"
        return f"segments name the tokens that {' and '.join(sorted(self._named))} attention looks at"

    # ------------------------------------------------------------------ the result

    def joined(self, *, release: bool = False) -> TraceData:
        """Return everything recorded so far as plain tensors; release: and let go of the single answers."""
        if self._joined is None:
            streams = {}
            order = {pattern: n for n, pattern in enumerate(stack.pattern for stack in self._stacks)}
            for pattern in sorted(self._running, key=lambda pattern: order[pattern]):
                running = self._running[pattern]
                layers = {n: layer for n, layer in running.layers.items() if any(layer.answers.values())}
                if not layers:
                    continue
                length = running.keys.length
                streams[running.stack.label] = join(
                    layers,
                    self._wanted.observables,
                    self._wanted.heads or tuple(range(running.heads)),
                    keys=length,
                    real=running.keys.real(length),
                    release=release,
                )
            self._joined = TraceData(self._name, self._wanted.segments, streams)
        return self._joined


def _padding(mask: Mask) -> Tensor | None:
    """Which keys the mask says are real, (B, Lk); None if it does not say."""
    return mask.padding if mask.padding is not None and mask.padding.ndim == 2 else None


def _own_numbers(index: Tensor, keys: Padding, call: Call) -> Tensor:
    """Key numbers of a call as each item's own numbers of its real tokens; -1 stays."""
    start = call.mask.key_offset
    numbers = keys.numbers(start, start + call.key.shape[2]).to(index.device)
    flat = index.flatten(1)
    table = numbers.expand(flat.shape[0], -1)
    return torch.where(flat < 0, flat, table.gather(1, flat.clamp(min=0))).view_as(index)


def _items(frame: _Frame, call: Call, rows: Rows) -> list[Item] | None:
    """Each item's real part of the call; None if all of it is real for all of them."""
    start, Lk, B = call.mask.key_offset, call.key.shape[2], call.query.shape[0]
    stop = frame.first + frame.Lq
    keys = frame.running.keys
    held = min(start + Lk, keys.length)  # a static cache has room that nothing was written to
    of_queries = frame.queries.numbers(frame.first, stop)
    of_keys = keys.numbers(start, held)
    if len(of_queries) == len(of_keys) == 1 and held == start + Lk:
        return None
    first_query, first_key = frame.queries.before(frame.first), keys.before(start)
    items = []
    for b in range(B):
        numbers = of_queries[b % len(of_queries)]
        choice = choose(rows, numbers[None])
        real = (numbers >= 0).nonzero()[:, 0]
        wanted = torch.isin(numbers, choice.queries[0]) & (numbers >= 0) if choice else numbers < -1
        items.append(
            Item(
                real,
                (of_keys[b % len(of_keys)] >= 0).nonzero()[:, 0],
                wanted.nonzero()[:, 0],
                first_query[b % len(first_query)],
                first_key[b % len(first_key)],
            )
        )
    return items


def _model_name(model: nn.Module) -> str:
    """The hub id, or the last part of a local path: a trace carries no path of the machine it was made on."""
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    return (Path(name).name if Path(name).exists() else name) or type(model).__name__
