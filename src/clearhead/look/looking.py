"""Run a model once on a prompt and say how much of the attention each source gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ArgumentError
from clearhead.evidence import grade
from clearhead.look.result import Look, Source, TopToken
from clearhead.look.words import tokens_holding
from clearhead.models.active import ACTIVE, Call, Recorder
from clearhead.models.fit import check_one_sided, continues, read, size
from clearhead.models.loading import LoadedModel
from clearhead.models.prompt import TEMPLATE, Prompt, check_length
from clearhead.observables import Entropy, KeyMass, Observable, SegmentMass, SegmentOutput, Weights
from clearhead.segments import Segments
from clearhead.trace.observe import observe
from clearhead.trace.trace import View

#: What the first token is called: heads rest much of their weight there, whatever it says (Xiao et al. 2023).
SINK = "first token"
#: How many heads are named per source, and how many tokens in the list of the most looked-at.
HEADS, TOP = 5, 12
#: A run of template text with this many words is more than the names of roles.
WORDY = 8


class _Sourced(NamedTuple):
    """The prompt's tokens sorted into the rows of the table."""

    ids: Tensor  # (n,)
    names: tuple[str, ...]
    roles: tuple[str, ...]
    trusted: tuple[bool, ...]


def look(
    loaded: LoadedModel,
    prompt: Prompt,
    *,
    query: str = "last",
    layers: Sequence[int] | None = None,
    map_weights: int = 16_000_000,
    progress: Callable[[int], None] | None = None,
    notes: Sequence[str] = (),
    command: str = "",
) -> Look:
    """Run the model once on the prompt and return what its heads looked at.

    query: "last" (the token from which the answer begins), "all", or a text: the tokens of every place where
        it stands in the prompt, also those that hold only a part of it.
    layers: numbers of the layers to look at; default all.
    map_weights: at most this many weights are kept for maps (a map is layers · heads · tokens of them); the
        chosen queries come first, then the ends of the sources, then the tokens from the last one back. 0:
        no maps.
    progress: called with the number of layers that are done.
    notes: what a reader should know beside the prompt's own notes.

    Memory is linear in the number of tokens. Raises PromptError if the prompt is longer than the model's
    positions, ArgumentError for a query text that is not in the prompt or unknown layers, ModelError if the
    model does not attend through clearhead or is an encoder-decoder.
    """
    model = loaded.model
    check_one_sided(model, "look")
    n = len(prompt)
    check_length(n, model.config)
    sourced = _sourced(prompt)
    chosen, words = _queries(prompt, query)
    segments = Segments(sourced.ids, sourced.names)
    whole = size(model)
    shown = whole.layers if layers is None else len(layers)
    kept = _map_queries(sourced.ids, chosen, map_weights // max(1, shown * whole.heads * n))
    rows: Any = "all" if len(chosen) == n else chosen
    asked: list[Observable] = [
        SegmentMass(segments, rows=rows),
        SegmentOutput(segments, norms=True, rows=rows),
        KeyMass(rows=rows),
        Entropy(rows=rows),
    ]
    if kept:
        asked.append(Weights(rows=kept))
    with torch.inference_mode(), observe(model, segments, asked, layers=layers) as trace:
        recorder = ACTIVE.get()
        token = ACTIVE.set(_Counting(recorder, progress)) if recorder is not None and progress else None
        try:
            read(model, prompt, logits_to_keep=1)
        finally:
            if token is not None:
                ACTIVE.reset(token)
    view = trace.stream()
    notes = (*notes, *_template_note(prompt))
    if query == "last" and not continues(model):
        notes = (
            *notes,
            "this model writes no answer: its last token only ends the text; see also --query all",
        )
    return _summed(loaded, prompt, sourced, view, words, kept, notes, command)


# ---------------------------------------------------------------------- before the run


def _sourced(prompt: Prompt) -> _Sourced:
    """Give the first token a row of its own, and leave out the rows that no prompt token can be in."""
    ids = prompt.segments.ids.clone()
    names = [s.name for s in prompt.sources] + [TEMPLATE]
    roles = [s.role for s in prompt.sources] + ["template"]
    trusted = [s.trusted for s in prompt.sources] + [True]
    name = SINK
    while name in names:
        name += "'"
    ids[0] = len(names)
    return _Sourced(ids, (*names, name), (*roles, "sink"), (*trusted, True))


def _queries(prompt: Prompt, query: str) -> tuple[list[int], str]:
    """The positions of the chosen queries, and the choice in words."""
    n = len(prompt)
    if query == "last":
        return [n - 1], "the last token"
    if query == "all":
        return list(range(n)), f"all {n} tokens"
    if not query:
        raise ArgumentError("query must be 'last', 'all' or a text of the prompt, got an empty text")
    marked = bytearray(len(prompt.text))  # characters of any place where the query stands
    at = prompt.text.find(query)
    while at >= 0:
        marked[at : at + len(query)] = b"\1" * len(query)
        at = prompt.text.find(query, at + 1)
    found = tokens_holding(prompt.tokens, marked)
    if not found:
        raise ArgumentError(
            f"query must be 'last', 'all' or a text of the prompt; {query!r} is not in the prompt"
        )
    plural = "token" if len(found) == 1 else "tokens"
    return found, f"{len(found)} {plural} of {query!r}"


def _template_note(prompt: Prompt) -> tuple[str, ...]:
    """Say it if the chat template writes more than roles: a system prompt that nobody asked for."""
    longest = max(prompt.spans.get(TEMPLATE, ()), key=lambda run: run[1] - run[0], default=(0, 0))
    text = " ".join("".join(prompt.tokens[slice(*longest)]).split())
    if any(s.role == "system" for s in prompt.sources) or len(text.split()) < WORDY:
        return ()
    return (f"the chat template adds words of its own: {text if len(text) <= 200 else text[:199] + '…'}",)


def _map_queries(ids: Tensor, chosen: Sequence[int], room: int) -> list[int]:
    """Which queries keep their map: at most `room`, sorted."""
    n = len(ids)
    ends = [int((ids == s).nonzero()[-1]) for s in torch.unique(ids).tolist()]
    wanted = dict.fromkeys([*reversed(chosen), *sorted(ends, reverse=True), *reversed(range(n))])
    return sorted(list(wanted)[:room])


class _Counting:
    """A recorder that also says how many layers are done."""

    def __init__(self, inner: Recorder, progress: Callable[[int], None]) -> None:
        self._inner, self._progress, self._done = inner, progress, 0

    def observables(self, call: Call) -> Sequence[Observable]:
        return self._inner.observables(call)

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        self._inner.record(call, observables, seen)
        self._done += 1
        self._progress(self._done)


# ---------------------------------------------------------------------- after the run


def _summed(
    loaded: LoadedModel,
    prompt: Prompt,
    sourced: _Sourced,
    view: View,
    words: str,
    kept: Sequence[int],
    notes: Sequence[str],
    command: str,
) -> Look:
    n, S = len(prompt), len(sourced.names)
    mass = view.mass.double().mean(2)  # (L, H, S)
    norms = view.segment_output.double()
    total = norms.sum(-1, keepdim=True)
    output = (norms / total.masked_fill(total == 0, 1.0)).mean((0, 1, 2))
    received = view.key_mass.double().mean((0, 1)) / view.mass.shape[2]  # (n,)
    share = mass.mean((0, 1))
    count = torch.bincount(sourced.ids, minlength=S)
    average = (share.sum() - share[-1]) / max(1, n - 1)
    unseen = 1 - float(share.sum())
    if unseen > 1e-3:
        notes = (
            *notes,
            f"{unseen:.1%} of the attention goes to the model's learned sinks, which are no tokens",
        )
    sources = tuple(
        Source(
            sourced.names[s],
            sourced.roles[s],
            sourced.trusted[s],
            int(count[s]),
            float(share[s]),
            float(share[s] / count[s] / average) if count[s] and average > 0 else 0.0,
            float(output[s]),
            _strongest(mass[:, :, s], view) if count[s] else (),
        )
        for s in range(S)
    )
    order = [i for i in received.argsort(descending=True).tolist() if i != 0][:TOP]
    top = tuple(
        TopToken(i, prompt.tokens[i], int(sourced.ids[i]), float(received[i]))
        for i in order
        if received[i] > 0
    )
    L, H = mass.shape[:2]
    maps = view.weights if kept else torch.zeros(L, H, 0, n)
    return Look(
        model=loaded.name,
        model_hash=loaded.hash,
        query=words,
        tokens=prompt.tokens,
        ids=sourced.ids.numpy(),
        sources=sources,
        layers=view.layers,
        mass=mass.float().numpy(),
        entropy=view.entropy.double().mean(2).float().numpy(),
        top_tokens=top,
        map_queries=tuple(kept),
        maps=maps.float().numpy(),
        evidence=grade.UNTESTED,
        evidence_url=grade.DOCS,
        notes=(*prompt.notes, *notes),
        command=command,
    )


def _strongest(mass: Tensor, view: View) -> tuple[tuple[int, int, float], ...]:
    best = mass.flatten().topk(min(HEADS, mass.numel()))
    H = mass.shape[1]
    return tuple(
        (view.layers[i // H], view.heads[i % H], float(w))
        for w, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
