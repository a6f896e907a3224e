"""`generate(model, prompt, …)`: text as it comes, and what each new token looked at."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ArgumentError
from clearhead.generation.asking import Ask, Given, ask, check_decoder, takes
from clearhead.generation.caches import cache_bytes, endless, make_cache, places_of
from clearhead.generation.pieces import Pieces
from clearhead.generation.result import Result, Token
from clearhead.generation.sampling import Sampler
from clearhead.generation.watching import AXES, Asked, Watcher
from clearhead.models.loading import LoadedModel
from clearhead.models.prompt import check_length
from clearhead.observables import SegmentMass


def generate(
    model: Any,
    prompt: Given,
    *,
    max_new_tokens: int | None = 256,
    cache: Any = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] | str = (),
    observe: Sequence[Asked] | Asked | None = SegmentMass,
    average: Sequence[str] | str = AXES,
    tokenizer: Any = None,
    ignore_end: bool = False,
    prefill_chunk: int | None = None,
    keep: bool = True,
) -> Generation:
    """Continue a prompt, token by token.

    model: what `clearhead.load` returned, or a transformers decoder; then a text needs `tokenizer`.
    prompt: a `Prompt`; a text, continued as it stands; a chat, as segments or as messages with role and
        content; or tokens, (n,) or (1, n).
    max_new_tokens: None goes on without end, which takes a cache that lets go of what is old.
    cache: "dynamic" (the default), "sliding", "sink", "int8", "heavy", "paged", or a cache. One that holds
        tokens already holds the beginning of the prompt, as in `model.generate`.
    temperature, top_k, top_p, seed: as in `Sampler`; greedy if none is given.
    stop: strings at which the text ends; they are not part of it. It also ends with the model's own end
        token, unless `ignore_end`.
    observe: observables or classes, answered for the query that each token is chosen from, inside the same
        pass; None for none. SegmentMass is the attention per source: `Token.mass`, its last axis named by
        `Generation.sources`. average: over which of "layer" and "head" the answers are averaged.
    prefill_chunk: read the prompt in pieces of so many tokens; None: at once.
    keep: False forgets tokens and text once they are handed out, for texts without end.

    Greedy tokens are those of `model.generate(do_sample=False)`, sampled ones those of
    `torch.manual_seed(seed)` and `model.generate(do_sample=True, …)` with the same numbers and nothing
    else in the generation config.

    Raises ArgumentError for arguments out of their range, PromptError for a prompt that cannot be laid out or
    is longer than the model's positions, ModelError for a model that does not continue text, or, if anything
    is observed, does not attend through clearhead, ObserveError for questions that cannot be asked.
    """
    if isinstance(model, LoadedModel):
        model, tokenizer = model.model, tokenizer or model.tokenizer
    check_decoder(model)
    asked = ask(prompt, tokenizer)
    sampler = Sampler(temperature, top_k, top_p, seed, model.device)
    pieces = Pieces(asked.tokenizer, asked.ids.tolist(), stop)
    for name, number in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ArgumentError(f"{name} must be a whole number of at least 1, or None, got {number!r}")
    watcher = None
    if observe is not None and observe != ():
        from clearhead.models.probe import ensure_supported

        ensure_supported(model)
        watcher = Watcher(asked.segments, observe, average)
    n = len(asked.ids)
    if max_new_tokens is None and not endless(cache, model):
        raise ArgumentError(
            "max_new_tokens=None goes on without end, which takes a cache that lets go of what is old and a "
            'model whose positions have no end: cache="sink" or "sliding" and a rotary model'
        )
    if not endless(cache, model):
        check_length(n, model.config, new_tokens=max_new_tokens or 0)
    held = make_cache(cache, model, tokens=n + (max_new_tokens or 0))
    if held.get_seq_length() >= n:
        raise ArgumentError(
            f"cache holds {held.get_seq_length()} tokens, the prompt has {n}: at least the last must be new"
        )
    if watcher is not None:
        watcher.places = places_of(held)
    ends = frozenset() if ignore_end else _end_tokens(model)
    return Generation(model, asked, held, sampler, pieces, watcher, max_new_tokens, ends, prefill_chunk, keep)


class Generation(Iterator[Token]):
    """A text that is being generated: an iterator of tokens, and a result at the end.

    Made by `generate`. cache: the cache, which holds all but the newest token. sources: names of the last
    axis of `Token.mass`. Nothing is computed before the first token is asked for, nor ahead of it.
    """

    def __init__(
        self,
        model: Any,
        asked: Ask,
        cache: Any,
        sampler: Sampler,
        pieces: Pieces,
        watcher: Watcher | None,
        max_new_tokens: int | None,
        ends: frozenset[int],
        prefill_chunk: int | None,
        keep: bool,
    ) -> None:
        self.cache = cache
        self.sources: tuple[str, ...] = () if watcher is None else watcher.sources
        self._model, self._asked, self._sampler, self._pieces = model, asked, sampler, pieces
        self._watcher, self._most, self._ends, self._keep = watcher, max_new_tokens, ends, keep
        self._chunk = prefill_chunk
        self._extra = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
        self._next: Tensor = asked.ids[cache.get_seq_length() :]  # what the model has not read yet
        self._ids = array("q")
        self._tokens: list[Token] = []
        self._text: list[str] = []
        self._stopped: str | None = None
        #: False while a pass runs and after one that failed: the layers of the cache may differ in length.
        self.sound = True
        self._count = 0
        self._first: float | None = None
        self._later = 0.0  # seconds for the tokens after the first

    def __next__(self) -> Token:
        """Return the next token. Raises StopIteration when the text has ended; see `result`."""
        if self._stopped is not None:
            raise StopIteration
        start = time.perf_counter()
        logits = self._read(self._next)
        number = self._sampler.choose(logits)
        logprob = float(logits[number] - logits.logsumexp(0))
        seen = {} if self._watcher is None else self._watcher.seen()
        self._next = torch.tensor([number])
        self._count += 1
        text = self._pieces.add(number)
        if self._pieces.stopped_by is not None:
            self._stopped = "stop string"
        elif number in self._ends:
            self._stopped = "end"
        elif self._count == self._most:
            self._stopped = "length"
        if self._stopped is not None:
            text += self._rest()
        token = Token(number, text, logprob, seen)
        if self._keep:
            self._ids.append(number)
            self._tokens.append(token)
            self._text.append(text)
        spent = time.perf_counter() - start
        if self._first is None:
            self._first = spent
        else:
            self._later += spent
        return token

    def stop(self) -> str:
        """End the text here and return what was held back of it; it is in the result's text too."""
        if self._stopped is not None:
            return ""
        self._stopped = "stopped"
        text = self._rest()
        self._text.append(text)
        return text

    def result(self) -> Result:
        """Generate what is left, and return what came out."""
        for _ in self:
            pass
        return self.so_far()

    def so_far(self) -> Result:
        """Return what has come out until now, and generate nothing; `stopped` is "" while more may come."""
        later = self._count - 1
        return Result(
            text="".join(self._text),
            tokens=tuple(self._tokens),
            stopped=self._stopped or "",
            sources=self.sources,
            seed=self._sampler.seed,
            prompt_tokens=len(self._asked.ids),
            count=self._count,
            first_token_s=self._first,
            tokens_per_s=later / self._later if later > 0 and self._later > 0 else None,
            cache_bytes=cache_bytes(self.cache),
        )

    @property
    def ids(self) -> list[int]:
        """The prompt's tokens and the new ones, as far as they are kept."""
        return [*self._asked.ids.tolist(), *self._ids]

    def _rest(self) -> str:
        text = self._pieces.rest()
        if self._pieces.stopped_by is not None:  # it was complete only now
            self._stopped = "stop string"
        return text

    def _read(self, ids: Tensor) -> Tensor:
        """Run the model on the next tokens; return the logits of the last one, (V,) in float32."""
        size = self._chunk or len(ids)
        self.sound = False
        for start in range(0, len(ids), size):
            piece = ids[start : start + size][None].to(self._model.device)
            last = start + size >= len(ids)
            watching = self._watcher.watching() if self._watcher is not None and last else nullcontext()
            with torch.inference_mode(), watching:
                out = self._model(input_ids=piece, cache=self.cache, use_cache=True, **self._extra)
        self.sound = True
        logits: Tensor = out.logits[0, -1].float()
        return logits


def _end_tokens(model: Any) -> frozenset[int]:
    """What ends a text, by the model's generation config."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)
