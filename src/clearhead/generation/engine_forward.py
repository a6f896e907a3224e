"""One step through the model: the tokens of many requests as one row, and what comes out for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.cache.pool import BlockPool
from clearhead.cache.ragged import Group, Step
from clearhead.cache.step import StepCache
from clearhead.generation.engine_request import Request
from clearhead.generation.scheduler import Work
from clearhead.observables import SegmentMass
from clearhead.segments import Segments


class Chosen(NamedTuple):
    """What a request gets out of a step, from its last query."""

    logits: Tensor  # (V,), float32
    logsum: Tensor  # (), of their exponentials, the logarithm; NaN if one of them is
    mass: Tensor | None  # (layers, heads, segments)


class Forward:
    """Runs a model on the work of a step."""

    def __init__(self, model: Any, pool: BlockPool) -> None:
        self.model, self.pool = model, pool
        self._keeps = "logits_to_keep" in signature(model.forward).parameters

    @torch.no_grad()  # not inference_mode, whose tensors do not say when they change
    def __call__(self, works: Sequence[Work]) -> list[Chosen | None]:
        """Compute; the answer is in the order of the work, None where a prompt goes on."""
        single = [work for work in works if work.size == 1]
        longer = [work for work in works if work.size > 1]
        looks: dict[int, _Looks] = {}
        groups = []
        for members in ([single] if single else []) + [[work] for work in longer]:
            look = _Looks.of(members)
            if look is not None:
                looks.update({id(work): look for work in members})
            rows = [work.request.row for work in members]
            groups.append(
                Group(
                    [row for row in rows if row is not None],
                    [work.start for work in members],
                    members[0].size,
                    () if look is None else (look.asked,),
                    None if look is None else look.take,
                )
            )
        places, logits = self._run(Step.of(self.pool, groups), [*single, *longer])
        logsums = logits.logsumexp(-1)
        chosen: list[Chosen | None] = []
        for work in works:
            place, look = places.get(id(work)), looks.get(id(work))
            mass = None if look is None else look.of_one(work)
            chosen.append(None if place is None else Chosen(logits[place], logsums[place], mass))
        return chosen

    def _run(self, step: Step, works: Sequence[Work]) -> tuple[dict[int, int], Tensor]:
        """Logits (n, V) for the work that chooses a token, and the row of each piece of it, by its id."""
        ids: list[int] = []
        positions: list[int] = []
        keep: dict[int, int] = {}
        last = 0
        for work in works:
            ids += work.request.tokens[work.start : work.start + work.size]
            positions += range(work.start, work.start + work.size)
            last += work.size
            if work.chooses:
                keep[id(work)] = last - 1
        device = self.pool.keys[0].device
        rows = torch.tensor(list(keep.values()) or [last - 1], device=device)
        more: dict[str, Any] = {"logits_to_keep": rows} if self._keeps else {}
        out = self.model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            cache=StepCache(step),
            use_cache=True,
            **more,
        ).logits[0]
        if not self._keeps:
            out = out[rows]
        return {work: number for number, work in enumerate(keep)}, out.float()


class _Looks:
    """What the requests of one attention call look at: gathers a layer after the other."""

    def __init__(self, works: Sequence[Work], length: int, names: int) -> None:
        ids = torch.stack([_ids(work.request, length) for work in works])
        segments = Segments(ids, [str(number) for number in range(names)])
        self.asked = SegmentMass(segments, rows="last")
        self.place = {id(work): number for number, work in enumerate(works)}
        self.layers: dict[int, Tensor] = {}

    @classmethod
    def of(cls, works: Sequence[Work]) -> _Looks | None:
        """None if nobody among them wants to know, or will know more in a later step."""
        asking = [work.request.asked.segments for work in works if work.chooses]
        names = max((len(segments) for segments in asking if segments is not None), default=0)
        return cls(works, max(work.start + work.size for work in works), names) if names else None

    def take(self, layer: int, seen: Sequence[Any]) -> None:
        self.layers[layer] = seen[0]

    def of_one(self, work: Work) -> Tensor | None:
        """(layers, heads, segments) of one request."""
        segments = work.request.asked.segments
        if segments is None:
            return None
        number = self.place[id(work)]
        layers = [self.layers[layer][number, :, -1, : len(segments)] for layer in sorted(self.layers)]
        return torch.stack(layers)


def _ids(request: Request, length: int) -> Tensor:
    """The segment numbers of a request's tokens, (length,); zeros behind them, where nothing is seen."""
    ids = torch.zeros(length, dtype=torch.long)
    segments = request.asked.segments
    if segments is not None:
        have = min(len(request.tokens), length)
        ids[:have] = segments.cover(0, have).ids[:have]
    return ids
