"""Host mode: the guard reads the prefill that the user's own model does anyway.

No second model and no second pass: while the model reads its prompt, the masses of its last tokens and the
states of two layers are kept, and the verdict is there before the first token of the answer.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from clearhead.errors import GuardError
from clearhead.guard.detector import InjectionDetector
from clearhead.guard.features import Watched
from clearhead.guard.finding import Finding
from clearhead.guard.judging import judge
from clearhead.guard.layout import DATA, Laid, SourceSpan, Texts
from clearhead.guard.readout import ROWS
from clearhead.guard.spans import spans
from clearhead.models.prompt import Prompt


class InjectionBlockedError(GuardError):
    """Raised out of the model's call by `watch(…, block=True)`; `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        named = "; ".join(repr(span.text[:80]) for span in finding.spans[:1])
        super().__init__(f"blocked with a score of {finding.score:.3f}: {named}")
        self.finding = finding


class Watch:
    """What a watched run has come to. finding: None until the prompt has been read. seconds: what it took."""

    def __init__(self) -> None:
        self.finding: Finding | None = None
        self.seconds = 0.0


@contextmanager
def watch(
    detector: InjectionDetector,
    prompt: Prompt,
    *,
    block: bool = False,
    on_finding: Callable[[Finding], None] | None = None,
) -> Iterator[Watch]:
    """Judge a prompt's untrusted segments while the detector's model reads it, around a call or `generate`.

    detector: of the host's model, calibrated for it (`InjectionDetector.load(loaded, calibration=…)`).
    prompt: what the model is given, `model.generate(**prompt.inputs)`; its trusted segments of the roles
    system and user are the instruction (but for one that only says "Data:", as the calibration lays texts
    out), those that are not trusted are judged. block: raise
    `InjectionBlockedError` before the first answer token if the verdict is "block". on_finding: called with
    the finding at that moment; what it raises ends the run.

    Yields a `Watch`, whose `finding` is there as soon as the prompt has been read. Characters are judged as
    the model reads them: hidden ones are not made plain. A prompt longer than the calibration's window counts
    as several windows.

    Raises GuardError for a prompt without an instruction or without untrusted text, for batches, for other
    tokens than the prompt's, and for a run that ends before the prompt has been read.
    """
    texts, laid = _laid(prompt)
    result = Watch()
    model = detector.loaded.model
    watched = Watched(model, laid, rows=ROWS, layers=detector.calibration.layers)
    inputs = prompt.input_ids

    def check(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        given = keywords.get("input_ids", arguments[0] if arguments else None)
        if result.finding is not None or not isinstance(given, torch.Tensor):
            return
        if given.shape[0] != 1:
            raise GuardError(f"one prompt is watched at a time, got a batch of {given.shape[0]}")
        at = watched.read
        own = inputs[:, at : at + given.shape[1]]
        if not torch.equal(given[:, : own.shape[1]].cpu(), own):
            raise GuardError(
                f"the run inside the context reads other tokens than the prompt's, from token {at} on"
            )

    def judged(module: Any, arguments: Any, output: Any) -> None:
        if result.finding is not None or not watched.complete:
            return
        start = time.perf_counter()
        reading = watched.reading()
        watched.close()
        finding = judge(detector, texts, [(laid.spans, reading)]).finding
        result.seconds = time.perf_counter() - start
        result.finding = replace(finding, seconds=result.seconds)
        if on_finding is not None:
            on_finding(result.finding)
        if block and result.finding.verdict == "block":
            raise InjectionBlockedError(result.finding)

    with ExitStack() as stack:
        stack.enter_context(watched)  # this may try the model out, before anybody listens
        stack.callback(model.register_forward_pre_hook(check, with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(judged).remove)
        yield result
    if result.finding is None:
        raise GuardError(
            f"the run inside the context has not read the whole prompt of {inputs.shape[1]} tokens"
        )


def _laid(prompt: Prompt) -> tuple[Texts, Laid]:
    """Return the untrusted segments cut into spans, and where these lie in the prompt."""
    trusted = tuple(
        s.name
        for s in prompt.sources
        if s.trusted and s.role in ("system", "user") and s.text.strip() not in ("", DATA)
    )
    doubted = [s for s in prompt.sources if not s.trusted and s.text.strip()]
    if not trusted:
        raise GuardError("prompt must hold a trusted segment of the role system or user: the instruction")
    if not doubted:
        raise GuardError("prompt must hold a segment that is not trusted: there is nothing to judge")
    found: list[SourceSpan] = []
    characters: list[tuple[int, int]] = []
    for number, segment in enumerate(doubted):
        for start, end in prompt.characters[segment.name][:1]:
            piece = prompt.text[start:end]
            offset = max(0, segment.text.find(piece))  # a template may strip white space
            for place in spans(piece):
                found.append(SourceSpan(number, place.start + offset, place.end + offset))
                characters.append((place.start + start, place.end + start))
    if not found:
        raise GuardError(
            "the chat template drops every segment that is not trusted: there is nothing to judge"
        )
    texts = Texts(
        tuple(s.name for s in doubted),
        tuple(s.text for s in doubted),
        tuple(found),
        tuple(_tokens(prompt, characters)),
    )
    return texts, Laid(prompt, tuple(range(len(found))), tuple(characters), trusted)


def _tokens(prompt: Prompt, characters: Sequence[tuple[int, int]]) -> list[int]:
    """How many tokens begin in each span."""
    starts: list[int] = []
    at = 0
    for token in prompt.tokens:
        starts.append(at)
        at += len(token)
    return [bisect_left(starts, b) - bisect_left(starts, a) for a, b in characters]
