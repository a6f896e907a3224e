"""`observe(model, …)`: a context in which what a model looks at is recorded, in the pass that runs anyway."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from clearhead.errors import ObserveError
from clearhead.models.active import ACTIVE
from clearhead.observables import Entropy, Observable, Rows, SegmentMass, SegmentOutput
from clearhead.segments import Segments
from clearhead.trace.recording import Recording
from clearhead.trace.trace import Trace

if TYPE_CHECKING:
    from torch import Tensor, nn

Asked = Observable | type[Observable]


@contextmanager
def observe(
    model: nn.Module,
    segments: Segments | Tensor | None = None,
    observe: Sequence[Asked] | Asked | None = None,
    *,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[int] | int | None = None,
    rows: Rows | None = None,
) -> Iterator[Trace]:
    """Record what a model's heads look at, around a forward or `generate`.

    model: a transformers model with attn_implementation="clearhead".
    segments: whose token is whose, `prompt.segments` or numbers (L,) or (B, L), for the observables that need
        it. Tokens that are generated later are the segment "output".
    observe: observables, or classes: `SegmentMass` and `SegmentOutput` given as classes get `segments`.
        Default: SegmentMass and Entropy, or Entropy alone without segments.
    layers, heads: which to keep, as numbers; layers are counted within each stream. Default: all.
    rows: which queries, for all observables; slices and indices are positions of tokens in the run. "last"
        is each item's last real token, and then every generated one.

    Yields a `Trace`, which fills while the model runs. The logits are bit-equal with and without it.

    Raises ModelError if the model does not attend through clearhead, ObserveError for arguments that do not
    fit, TraceError if a second run starts in the same context.
    """
    from clearhead.models.probe import ensure_supported

    ensure_supported(model)
    named = _segments(segments)
    asked = _instances(observe, named, rows)
    recording = Recording(
        model,
        asked,
        named.names if named is not None else (),
        layers=_numbers("layers", layers),
        heads=_numbers("heads", heads),
    )
    token = ACTIVE.set(recording)
    try:
        yield Trace(recording.joined)
    finally:
        ACTIVE.reset(token)


def _segments(segments: Segments | Tensor | None) -> Segments | None:
    if segments is None or isinstance(segments, Segments):
        return segments
    ids = torch.as_tensor(segments)
    if ids.is_floating_point() or (ids.numel() and int(ids.min()) < 0):
        raise ObserveError("segments must be a Segments (prompt.segments) or integer numbers of at least 0")
    count = int(ids.max()) + 1 if ids.numel() else 0
    return Segments(ids, [*(str(n) for n in range(count)), "output"], output=count)


def _instances(observe: Any, segments: Segments | None, rows: Rows | None) -> list[Observable]:
    if observe is None:
        observe = [Entropy()] if segments is None else [SegmentMass, Entropy()]
    if isinstance(observe, Observable | type):
        observe = [observe]
    out = []
    for item in observe:
        if item in (SegmentMass, SegmentOutput):
            if segments is None:
                raise ObserveError(f"{item.__name__} needs segments: observe(model, prompt.segments, …)")
            item = item(segments)
        elif isinstance(item, type) and issubclass(item, Observable):
            item = item()
        if not isinstance(item, Observable):
            raise ObserveError(f"observe must hold observables such as Entropy(), got {item!r}")
        if rows is not None:
            item = copy.copy(item)
            object.__setattr__(item, "rows", rows)
        out.append(item)
    if not out:
        raise ObserveError("observe must hold at least one observable, got none")
    return out


def _numbers(name: str, value: Sequence[int] | int | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    numbers = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not numbers or min(numbers) < 0 or len(set(numbers)) != len(numbers):
        raise ObserveError(f"{name} must be different numbers of at least 0, got {value!r}")
    return numbers
