"""Join the answers of many calls into one stream: queries one after the other, keys by their position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.errors import TraceError
from clearhead.observables import Observable
from clearhead.trace.data import Stream


@dataclass
class Answer:
    """One answer of one call: its parts by name.

    queries: (B | 1, R) the number of each query among its item's real tokens, -1 for none; None without a
    query axis. key_offset: the position of the first key.
    """

    parts: dict[str, Tensor]
    queries: Tensor | None
    key_offset: int


@dataclass
class Layer:
    """What one attention module has answered so far."""

    seen: int = 0  # queries so far, also those that were not chosen
    calls: int = 0
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def cut(self, length: int, own: Sequence[int], axis: Mapping[str, int]) -> None:
        """Forget the queries from position `length` on (a cache was cropped).

        own: that position, counted in each item's real tokens (one number if all are alike). axis: where the
        query axis of each answer is.
        """
        limit = torch.tensor(list(own))[:, None]
        for name, answers in self.answers.items():
            kept = (_before(name, answer, limit, axis.get(name, 0)) for answer in answers)
            self.answers[name] = [answer for answer in kept if answer is not None]
        self.seen = length


def _before(name: str, answer: Answer, limit: Tensor, axis: int) -> Answer | None:
    """The part of an answer that is about queries below `limit`, None if there is none."""
    if answer.queries is None:
        raise TraceError(f"{name} has no query axis and cannot follow a cache that was cropped")
    stay = (answer.queries >= 0) & (answer.queries < limit)
    index = stay.any(0).nonzero()[:, 0]
    if len(index) == answer.queries.shape[1]:
        return answer
    if not len(index):
        return None
    parts = {n: t.index_select(axis, index) for n, t in answer.parts.items()}
    return Answer(parts, torch.where(stay, answer.queries, -1)[:, index], answer.key_offset)


def join(
    layers: Mapping[int, Layer],
    observables: Sequence[Observable],
    heads: tuple[int, ...],
    *,
    keys: int,
    real: Tensor | None,
    release: bool,
) -> Stream:
    """Return the stream of these layers (number -> layer), `keys` positions wide.

    release: let go of the layers' answers on the way, so that nothing is held twice for long.
    Raises TraceError if layers do not go together: other numbers of heads, a run that broke off.
    """
    numbers = sorted(layers)
    stream = Stream(layers=tuple(numbers), heads=heads, real=real)
    for observable in observables:
        name = observable.name
        per_layer = [layers[n].answers.get(name, []) for n in numbers]
        if not any(per_layer):
            continue
        joined = [_joined(name, answers, observable.axes, keys) for answers in per_layer]
        shapes = [{part: tuple(t.shape) for part, t in values.items()} for values, _ in joined]
        for number, shape in zip(numbers, shapes, strict=True):
            if shape != shapes[0]:
                raise TraceError(
                    f"{name} has shape {shapes[0].get(name, shapes[0])} in layer {numbers[0]} and "
                    f"{shape.get(name, shape)} in layer {number}: the run broke off, or these layers differ "
                    "(observe them one by one, with layers=)"
                )
        stream.axes[name] = ("layer", *joined[0][1])
        if "query" in observable.axes:
            stream.queries[name] = _queries(per_layer[0], batch=next(iter(joined[0][0].values())).shape[0])
        if release:
            for number in numbers:
                layers[number].answers.pop(name, None)
        for part in shapes[0]:
            stream.values[part] = torch.stack([values.pop(part) for values, _ in joined])
    return stream


def _queries(answers: Sequence[Answer], batch: int) -> Tensor:
    found = [answer.queries for answer in answers if answer.queries is not None]
    return torch.cat([queries.expand(batch, -1) for queries in found], dim=1).clone()


def _joined(
    name: str, answers: Sequence[Answer], axes: tuple[str, ...], keys: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Join the answers of several calls of one layer; also the names of the result's axes, batch first."""
    out: dict[str, Tensor] = {}
    names = axes
    for part in answers[0].parts if answers else ():
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
            if len({t.shape for t in tensors}) > 1:
                raise TraceError(
                    f"{name} has answers of the shapes {sorted({tuple(t.shape) for t in tensors})}: an axis "
                    'that grows with the run must be called "query" or "key"'
                )
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
