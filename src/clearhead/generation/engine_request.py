"""One request to an engine: what was asked, how far it has come, and the handle that its owner holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

from clearhead.cache.rows import BlockRow
from clearhead.errors import EngineError
from clearhead.generation.engine_prefixes import chain
from clearhead.generation.pieces import Pieces
from clearhead.generation.result import Result, Token
from clearhead.generation.sampling import Sampler
from clearhead.segments import Segments

if TYPE_CHECKING:
    from clearhead.generation.engine import Engine

Reason = Literal["end", "stop string", "length", "stopped"]


class Asked(NamedTuple):
    """What a request wants, checked."""

    prompt: tuple[int, ...]
    most: int  # new tokens
    sampler: Sampler
    pieces: Pieces
    stop_tokens: frozenset[int]
    segments: Segments | None


class Request:
    """What the engine knows of a request. Changed only inside a step, but for `cancelled`."""

    def __init__(self, number: int, asked: Asked) -> None:
        self.number, self.asked = number, asked
        self.tokens = list(asked.prompt)
        self.row: BlockRow | None = None  # while it runs
        self.computed = 0  # tokens whose keys are in the pool
        self.names: list[bytes] = []  # of its full blocks
        self.given: list[Token] = []
        self.made = time.perf_counter()
        self.seconds: list[float] = []  # when each new token came, since then
        self.cancelled = False
        self.reason: Reason | None = None
        self.error: BaseException | None = None

    @property
    def todo(self) -> int:
        """How many tokens must be computed before the next one can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.reason is not None or self.error is not None

    def block_names(self, page: int) -> list[bytes]:
        """The names of its full blocks (`prefixes.chain`)."""
        if len(self.names) < len(self.tokens) // page:
            self.names = chain(self.tokens, page, self.names)
        return self.names

    def take(self, logits: Tensor, logsum: float, mass: Tensor | None) -> Reason | None:
        """Choose the next token from logits (V,), float32; return why it is the last one, or None."""
        asked = self.asked
        token = asked.sampler.choose(logits)
        logprob = float(logits[token]) - logsum
        text = asked.pieces.add(token)
        reason: Reason | None = None
        if asked.pieces.stopped_by is not None:
            reason = "stop string"
        elif token in asked.stop_tokens:
            reason = "end"
        elif len(self.given) + 1 >= asked.most:
            reason = "length"
        if reason is not None:
            text += asked.pieces.rest()
        self.tokens.append(token)
        self.seconds.append(time.perf_counter() - self.made)
        self.given.append(
            Token(id=token, text=text, logprob=logprob, seen={} if mass is None else {"mass": mass})
        )
        return reason

    def result(self, page: int, block_bytes: int) -> Result:
        """What came of it."""
        times, asked = self.seconds, self.asked
        return Result(
            text="".join(token.text for token in self.given),
            tokens=tuple(self.given),
            stopped=str(self.reason),
            sources=() if asked.segments is None else asked.segments.names,
            seed=asked.sampler.seed,
            prompt_tokens=len(asked.prompt),
            count=len(self.given),
            first_token_s=times[0] if times else None,
            tokens_per_s=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
            cache_bytes=-(-(len(self.tokens) - 1) // page) * block_bytes,
        )


class Handle:
    """A request that was submitted. Iterate for `Token` after `Token`, or wait for the whole `Answer`.

    From any thread. Without the engine's background thread, whoever waits runs the engine's steps, and so all
    other requests get on too.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request

    def __iter__(self) -> Iterator[Token]:
        """Yield tokens from the first on, as they come. Raises, after them, what the request failed with.

        `Token.mass` is (layers, heads, segments) if the request names segments.
        """
        given = self._request.given
        for at in count():
            self._wait(partial(self._has, at + 1))
            if len(given) > at:
                yield given[at]
            elif self._request.error is not None:
                raise self._request.error
            else:
                return

    def _has(self, tokens: int) -> bool:
        return len(self._request.given) >= tokens or self.done

    def result(self, timeout: float | None = None) -> Result:
        """Return all of it when it is there; of a cancelled request what came before ("stopped").

        timeout: seconds. Raises TimeoutError after it, or the error that the request failed with.
        """
        self._wait(lambda: self.done, timeout)
        if self._request.error is not None:
            raise self._request.error
        return self._engine._result(self._request)

    def cancel(self) -> None:
        """End the request at the next step; its blocks are free then. No error if it has ended already."""
        self._engine._cancel(self._request)

    @property
    def done(self) -> bool:
        """Whether it has ended: finished, cancelled or failed."""
        return self._request.done

    @property
    def seconds(self) -> tuple[float, ...]:
        """When each token came, in seconds since the request was made."""
        return tuple(self._request.seconds)

    @property
    def error(self) -> BaseException | None:
        """What it failed with, None if it did not."""
        return self._request.error

    def _wait(self, there: Callable[[], bool], timeout: float | None = None) -> None:
        end = None if timeout is None else time.perf_counter() + timeout
        while not there():
            left = None if end is None else end - time.perf_counter()
            if left is not None and left <= 0:
                raise TimeoutError(f"request {self._request.number} did not end within {timeout} seconds")
            if not self._engine._advance(there, left):
                raise EngineError(f"request {self._request.number} was forgotten by its engine")

    def __repr__(self) -> str:
        state = self._request.reason or ("failed" if self._request.error else "running or waiting")
        return f"Handle({self._request.number}: {len(self._request.given)} tokens, {state})"
