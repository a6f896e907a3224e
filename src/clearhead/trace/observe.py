"""`observe(model, …)`: a context in which what a model looks at is recorded, in the pass that runs anyway."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from clearhead.errors import ClearheadError, ObserveError
from clearhead.models.active import ACTIVE, Call, Recorder
from clearhead.observables import Entropy, Observable, Rows, SegmentMass, SegmentOutput
from clearhead.segments import Segments
from clearhead.trace.recording import Recording, Wanted
from clearhead.trace.rows import checked
from clearhead.trace.streams import Stacks
from clearhead.trace.trace import Trace

if TYPE_CHECKING:
    from torch import Tensor, nn

Asked = Observable | type[Observable]


@contextmanager
def observe(
    model: nn.Module,
    segments: Segments | Tensor | Sequence[int] | None = None,
    observe: Sequence[Asked] | Asked | None = None,
    *,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[int] | int | None = None,
    rows: Rows | None = None,
    streams: Sequence[str] | str | None = None,
) -> Iterator[Trace]:
    """Record what a model's heads look at, around one forward or one `generate`.

    model: a transformers model with attn_implementation="clearhead".
    segments: whose token is whose: `prompt.segments`, or a number for every token of the prompt, (L,) or
        (B, L), as in `input_ids` with its padding; of a batch `Prompt.batch(prompts).segments`. Tokens that
        are generated later are the segment "output".
        They name the text that the model is given: of an encoder-decoder the encoder's input (streams
        "encoder" and "cross"), of other models the stream "self". If `streams` is a single one, they name
        the tokens that it looks at, whatever these are: the decoder's own, image patches, …
    observe: observables, or classes: `SegmentMass` and `SegmentOutput` given as classes get `segments`.
        Default: SegmentMass and Entropy, or Entropy alone without segments. MeanDistance is not asked of
        cross-attention, as tokens of two texts have no distance.
    layers: which layers, numbered as in the model's own lists (3 is model.layers[3]), in every stream that
        has them. heads: which heads. Default: all.
    rows: which queries, for all observables, counted from 0 in each item's own tokens, padding left out;
        generated tokens count on. "last" is each item's last token, and then every generated one.
    streams: which stacks of layers to observe: "self", "cross", "encoder", "vision". Default: all there are.

    Yields a `Trace`, which fills while the model runs; after the context it holds what was asked for and
    nothing else. The logits are bit-equal with and without it. Contexts can be nested: each records the model
    that it was opened for. In beam search an item is a beam's row as it ran; hypotheses change rows. In
    assisted decoding the drafts of the last step stay in the trace, also those that were not accepted.
    Answers without a query axis are summed over the calls of a run along "key", and otherwise get an axis
    "call" if there were several.

    Raises ModelError if the model does not attend through clearhead, ObserveError for arguments that do not
    fit the model or the run (at the end of the context, if only the end can tell), TraceError if a second run
    starts in the same context. After an error the trace holds what was complete.
    """
    from clearhead.models.probe import ensure_supported

    coverage = ensure_supported(model)
    root = _transformers_model(model)
    stacks = Stacks(root, (*coverage.ours, *coverage.unseen))
    named = _segments(segments)
    asked = _instances(observe, named, rows)
    wanted = Wanted(
        tuple(asked),
        _names(named, asked),
        exact=not isinstance(segments, Segments),
        layers=_layers(layers, stacks, chosen := _streams(streams, stacks)),
        heads=_numbers("heads", heads),
        streams=chosen,
    )
    recording = Recording(root, stacks, wanted)
    outer = ACTIVE.get()
    trace = Trace(recording.joined)
    hook = root.register_forward_pre_hook(recording.note_inputs, with_kwargs=True)
    token = ACTIVE.set(recording if outer is None else _Both(recording, outer))
    try:
        yield trace
        recording.check_complete()
    finally:
        hook.remove()
        trace._close(_finished(recording))
        ACTIVE.reset(token)  # last: it raises where the context was entered in another one


class _Both:
    """A recorder that asks for two."""

    def __init__(self, inner: Recorder, outer: Recorder) -> None:
        self.inner, self.outer = inner, outer
        self.count = 0

    def observables(self, call: Call) -> Sequence[Observable]:
        mine = self.inner.observables(call)
        self.count = len(mine)
        return [*mine, *self.outer.observables(call)]

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        n = self.count
        if n:
            self.inner.record(call, observables[:n], seen[:n])
        if len(observables) > n:
            self.outer.record(call, observables[n:], seen[n:])


def _finished(recording: Recording) -> Any:
    """What the trace holds from now on: the data, or the error that kept it from being put together."""
    try:
        return recording.joined(release=True)
    except ClearheadError as problem:
        return problem


def _transformers_model(model: nn.Module) -> nn.Module:
    """The transformers model that `model` is or wraps; `ensure_supported` has seen that there is one."""
    from transformers import PreTrainedModel

    found: nn.Module = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    return found


# ---------------------------------------------------------------------- arguments


def _segments(segments: Segments | Tensor | Sequence[int] | None) -> Segments | None:
    if segments is None or isinstance(segments, Segments):
        return segments
    if isinstance(segments, list | tuple) and any(isinstance(part, Segments) for part in segments):
        raise ObserveError(
            "segments must be one Segments: of several prompts it is Prompt.batch(prompts).segments"
        )
    try:
        ids = torch.as_tensor(segments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObserveError(
            f"segments must be prompt.segments or numbers per token, got {type(segments).__name__}: {error}"
        ) from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ObserveError(f"segments must be integers, got {ids.dtype}")
    if ids.ndim not in (1, 2) or not ids.numel():
        raise ObserveError(f"segments must have shape (L,) or (B, L), not empty, got {tuple(ids.shape)}")
    if int(ids.min()) < 0:
        raise ObserveError(f"segments must be at least 0, got {int(ids.min())}")
    count = int(ids.max()) + 1
    return Segments(ids, [*(str(n) for n in range(count)), "output"], output=count)


def _instances(observe: Any, segments: Segments | None, rows: Rows | None) -> list[Observable]:
    if observe is None:
        observe = [Entropy()] if segments is None else [SegmentMass, Entropy()]
    if isinstance(observe, Observable | type):
        observe = [observe]
    out: list[Observable] = []
    for item in observe if isinstance(observe, Sequence) else list(observe):
        if isinstance(item, type) and issubclass(item, SegmentMass | SegmentOutput):
            if segments is None:
                raise ObserveError(f"{item.__name__} needs segments: observe(model, prompt.segments, …)")
            item = item(segments)
        elif isinstance(item, type) and issubclass(item, Observable):
            try:
                item = item()
            except TypeError as error:
                name = item.__name__
                raise ObserveError(f"{name} needs arguments, give it as {name}(…): {error}") from error
        if not isinstance(item, Observable):
            raise ObserveError(f"observe must hold observables such as Entropy(), got {item!r}")
        item = copy.copy(item)
        object.__setattr__(item, "rows", checked(item.rows if rows is None else rows))
        out.append(item)
    if not out:
        raise ObserveError("observe must hold at least one observable, got none")
    names = [item.name for item in out]
    for name in names:
        if names.count(name) > 1:
            raise ObserveError(f"observe holds two observables named {name!r}: open one trace for each")
        if not isinstance(name, str) or not name or "." in name or not name.isprintable():
            raise ObserveError(f"an observable's name must be a printable word without a dot, got {name!r}")
    return out


def _names(segments: Segments | None, asked: Sequence[Observable]) -> tuple[str, ...]:
    """The names of the segment axis; all observables must agree on it."""
    names = None if segments is None else segments.names
    for item in asked:
        if isinstance(item, SegmentMass | SegmentOutput):
            own = item.membership.segments.names
            if names is None:
                names = own
            elif len(own) != len(names):
                raise ObserveError(
                    f"{item.name} has {len(own)} segments and the others {len(names)}: give all the same, or "
                    "open one trace for each"
                )
    return names or ()


def _numbers(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    numbers = tuple(value) if isinstance(value, Sequence | range) else (value,)
    plain = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    if not numbers or not plain or len(set(numbers)) != len(numbers):
        raise ObserveError(f"{name} must be different integers of at least 0, got {value!r}")
    return tuple(numbers)


def _streams(value: Sequence[str] | str | None, stacks: Stacks) -> frozenset[str] | None:
    if value is None:
        return None
    names = (value,) if isinstance(value, str) else tuple(value)
    unknown = [name for name in names if name not in stacks.labels]
    if unknown or not names:
        raise ObserveError(f"streams must be out of {', '.join(stacks.labels)}, got {value!r}")
    return frozenset(names)


def _layers(
    value: Sequence[int] | int | None, stacks: Stacks, streams: frozenset[str] | None
) -> frozenset[int] | None:
    numbers = _numbers("layers", value)
    if numbers is None:
        return None
    chosen = [stack for stack in stacks if streams is None or stack.label in streams]
    there = {n for stack in chosen for n in stack.numbers.values()}
    beyond = [n for n in numbers if n not in there]
    if beyond:
        has = "; ".join(f"{stack.label}: {_ranges(stack.numbers.values())}" for stack in chosen)
        raise ObserveError(f"layers holds {beyond[0]}, this model has {has}")
    return frozenset(numbers)


def _ranges(numbers: Any) -> str:
    """0, 1, 2, 5 as "0..2, 5"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{low}..{high}" if high > low else str(low) for low, high in runs)
