"""Continuous batching: many requests share a model, each as if it were alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from clearhead.cache.pool import BlockPool
from clearhead.cache.sizes import layer_sizes
from clearhead.errors import ArgumentError, EngineError, ModelError
from clearhead.generation.engine_checks import Limits, checked, positive
from clearhead.generation.engine_forward import Chosen, Forward
from clearhead.generation.engine_request import Handle, Request
from clearhead.generation.result import Result
from clearhead.generation.sampling import Sampler
from clearhead.generation.scheduler import Counts, Scheduler, Work
from clearhead.models.prompt import Prompt
from clearhead.segments import Segments


class Engine:
    """Runs requests together: each step is one forward over the next tokens of all that run, without padding.

    model: a transformers decoder with attn_implementation="clearhead", in evaluation mode. tokenizer: for
        prompts as text and for text as answer; without one it is token ids in and out.
    cache_bytes: what the keys and values of all requests may take, allocated at once.
    max_batch: how many requests run at once; more wait. step_tokens: how many tokens go into a step at most:
        longer prompts are computed in chunks of that many, so that others do not wait for them.
    share_prefixes: common beginnings of prompts are computed once and their blocks shared.
    page: tokens of a block. dtype: what the cache holds, the model's type by default, or torch.int8.

    A request's greedy tokens are those that it would get alone. (Sums over more rows at once may round
    differently, as in any batch; that shows only where two tokens are equally likely to the last digits.)
    A pool that is full makes the youngest request wait, and go on later where it was. If the model raises,
    the step is repeated request by request: those that raise alone end with that error, the others go on.

    Steps run in `run()`, in whoever waits for a `Handle`, or, after `start()`, in a thread of the engine's
    own. submit and handles may be used from any thread. A context manager: leaving it closes the engine.

    Raises ModelError for a model that it cannot run, ArgumentError for numbers outside what is allowed,
    PoolFullError for cache_bytes below one block.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        cache_bytes: int = 1 << 30,
        max_batch: int = 16,
        step_tokens: int = 256,
        share_prefixes: bool = True,
        page: int = 32,
        dtype: torch.dtype | None = None,
    ) -> None:
        from clearhead.models.probe import ensure_supported

        positive("max_batch", max_batch)
        positive("step_tokens", step_tokens)
        if step_tokens < max_batch:
            raise ArgumentError(f"step_tokens={step_tokens} must be at least max_batch={max_batch}")
        if model.training:
            raise ModelError(
                "the model is in training mode, where dropout changes what it says: model.eval()"
            )
        if model.config.is_encoder_decoder or not model.can_generate():
            raise ModelError(f"{type(model).__name__} is not a decoder that generates text")
        ensure_supported(model)
        self.model, self.tokenizer = model, tokenizer
        pool = BlockPool(
            layer_sizes(model.config),
            cache_bytes=cache_bytes,
            page=page,
            dtype=dtype or model.dtype,
            device=model.device,
        )
        self._limits = Limits.of(model, pool)
        self._scheduler = Scheduler(pool, batch=max_batch, tokens=step_tokens, share=share_prefixes)
        self._forward = Forward(model, pool)
        self._stepping = threading.RLock()  # held during a step: the scheduler and the pool are its own
        self._changed = threading.Condition()  # guards the inbox; tells who waits that something came
        self._tokenizing = threading.Lock()  # fast tokenizers refuse to be used from two threads at once
        self._inbox: deque[Request] = deque()
        self._number = 0
        self._thread: threading.Thread | None = None
        self._closed: str | None = None

    # ------------------------------------------------------------------ asking

    def submit(
        self,
        prompt: str | Prompt | Tensor | Sequence[int],
        *,
        max_new_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        segments: Segments | Sequence[int] | Tensor | None = None,
    ) -> Handle:
        """Ask for a continuation; return at once.

        prompt: text (as the tokenizer takes it, no chat template), a `clearhead.Prompt`, or token ids.
        temperature, top_k, top_p, seed: as in `Sampler`; without them the likeliest token. stop: the text
        ends before any of these.
        stop_tokens: token ids that end it; None: the model's own. segments: whose token is whose, as
        `prompt.segments`: each new token then says what it looked at (`Token.mass`).

        Raises EngineError for a closed engine, ArgumentError for arguments outside what is allowed and for
        prompts that are too long for the model, PoolFullError for a request that the pool could never hold.
        """
        self._check_open()
        sampler = Sampler(temperature, top_k, top_p, seed, self.model.device)
        with self._tokenizing:
            asked = checked(
                prompt, max_new_tokens, sampler, stop, stop_tokens, segments, self.tokenizer, self._limits
            )
        with self._changed:
            self._check_open()
            self._number += 1
            request = Request(self._number, asked)
            self._inbox.append(request)
            self._changed.notify_all()
        return Handle(self, request)

    # ------------------------------------------------------------------ running

    def step(self) -> bool:
        """Do one step; return False if there was nothing to do. Raises EngineError for a closed engine."""
        with self._stepping:
            with self._changed:
                self._check_open()
                while self._inbox:
                    self._scheduler.waiting.append(self._inbox.popleft())
            for request in self._scheduler.requests:
                if request.cancelled:
                    self._end(request, "stopped")
            works = self._scheduler.plan()
            if works:
                self._scheduler.counts.steps += 1
                for work, outcome in zip(works, self._outcomes(works), strict=True):
                    self._settle(work, outcome)
            with self._changed:
                self._changed.notify_all()
            return bool(works)

    def run(self) -> None:
        """Step until no request is left."""
        while self.step():
            pass

    def start(self) -> Engine:
        """Run steps in a thread of the engine's own from now on; return the engine."""
        with self._changed:
            self._check_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="clearhead-engine", daemon=True)
                self._thread.start()
        return self

    def close(self) -> None:
        """End what still runs with EngineError and give the memory back. Closing twice is no error."""
        self._close("the engine is closed")
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @property
    def pool(self) -> BlockPool:
        """The blocks that all requests share. Raises EngineError for a closed engine."""
        self._check_open()
        return self._scheduler.pool

    @property
    def counts(self) -> Counts:
        """What has been computed, shared and preempted so far."""
        return self._scheduler.counts

    def forget_prefixes(self) -> None:
        """Let go of the blocks that are kept only for requests to come."""
        with self._stepping:
            self._check_open()
            if self._scheduler.prefixes is not None:
                self._scheduler.prefixes.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ one step

    def _outcomes(self, works: Sequence[Work]) -> Sequence[Chosen | Exception | None]:
        """Run the work together; if that raises, each piece alone, to find out whose it is."""
        try:
            return self._forward(works)
        except Exception as error:
            if len(works) == 1:
                return [error]
        outcomes: list[Chosen | Exception | None] = []
        for work in works:
            try:
                outcomes += self._forward([work])
            except Exception as error:
                outcomes.append(error)
        return outcomes

    def _settle(self, work: Work, outcome: Chosen | Exception | None) -> None:
        request = work.request
        if isinstance(outcome, Exception):
            self._end(request, outcome)
            return
        if outcome is not None and outcome.logsum.isnan():  # found out before others share its blocks
            self._end(request, EngineError(f"request {request.number}: the model's logits hold NaN"))
            return
        self._scheduler.advance(work)
        if outcome is None:
            return
        try:
            with self._tokenizing:
                reason = request.take(outcome.logits, float(outcome.logsum), outcome.mass)
        except Exception as error:  # a tokenizer that cannot decode, logits that cannot be drawn from
            self._end(request, error)
            return
        if reason is not None:
            self._end(request, reason)

    def _end(self, request: Request, how: Any) -> None:
        self._scheduler.remove(request)
        if isinstance(how, BaseException):
            request.error = how
        else:
            request.reason = how

    # ------------------------------------------------------------------ threads

    def _loop(self) -> None:
        try:
            while self._closed is None:
                if not self.step():
                    with self._changed:
                        if not self._inbox and self._closed is None:
                            self._changed.wait()
        except EngineError:
            pass  # closed while it was at work
        except BaseException as error:
            self._close(f"the engine's thread ended with {type(error).__name__}: {error}")
            raise

    def _advance(self, there: Callable[[], bool], timeout: float | None) -> bool:
        """Let time pass for who waits; return False if that is of no use."""
        with self._changed:
            if there():
                return True
            if self._thread is not None:
                self._changed.wait(timeout)
                return True
        return self.step() or there()

    def _cancel(self, request: Request) -> None:
        with self._changed:
            request.cancelled = True
            self._inbox_cancel(request)
            self._changed.notify_all()

    def _inbox_cancel(self, request: Request) -> None:
        if request in self._inbox:  # nobody has seen it yet
            self._inbox.remove(request)
            request.reason = "stopped"

    def _close(self, why: str) -> None:
        with self._stepping, self._changed:
            if self._closed is not None:
                return
            for request in [*self._inbox, *self._scheduler.requests]:
                self._end(request, EngineError(f"request {request.number} did not end: {why}"))
            self._inbox.clear()
            if self._scheduler.prefixes is not None:
                self._scheduler.prefixes.clear()
            self._closed = why
            self._scheduler.pool.close()
            self._changed.notify_all()

    def _result(self, request: Request) -> Result:
        pool = self._scheduler.pool
        return request.result(pool.page, pool.block_bytes)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EngineError(f"{self._closed}: it takes no requests and runs no steps")
