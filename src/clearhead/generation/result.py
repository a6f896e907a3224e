"""What generation gives: tokens one by one, and a result at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Token:
    """One new token.

    id: its number. text: the text that became certain with it; "" where a character or a possible stop string
    is not complete yet, and for control tokens. logprob: the natural logarithm of the probability that the
    model gave it, before temperature, top_k and top_p.
    seen: what was asked of the heads while the token was chosen, by the names of the observables: of the
    query that the token was chosen from, which is the token before it. Averaged over the axes that were asked
    for; (layer, head, …) where none was.
    """

    id: int
    text: str
    logprob: float
    seen: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def mass(self) -> Tensor | None:
        """How much attention went to each source, (…, S), or None if that was not asked."""
        return self.seen.get("mass")


@dataclass(frozen=True, eq=False)
class Result:
    """What came out.

    text: without the stop string. tokens: all of them, with those that made up the stop string and with the
    end token. stopped: "end" (the model's end token), "stop string", "length", or "stopped" by the caller.
    sources: the names of the last axis of `Token.mass`. seed: of the random numbers, None if greedy.
    prompt_tokens: how many came before. count: how many came. first_token_s: seconds from the first request
    to the first token. tokens_per_s: of the tokens after the first, without the time that the caller took
    between them; None with fewer than two. cache_bytes: what the cache holds at the end.
    """

    text: str
    tokens: tuple[Token, ...]
    stopped: str
    sources: tuple[str, ...]
    seed: int | None
    prompt_tokens: int
    count: int
    first_token_s: float | None
    tokens_per_s: float | None
    cache_bytes: int

    @property
    def ids(self) -> list[int]:
        """The numbers of the new tokens."""
        return [token.id for token in self.tokens]
