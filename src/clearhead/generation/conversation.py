"""A conversation that keeps its cache: what was said before is not computed again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from clearhead.errors import ArgumentError
from clearhead.generation.caches import make_cache
from clearhead.generation.generating import Generation, generate
from clearhead.models.layout import lay_out
from clearhead.models.loading import LoadedModel
from clearhead.models.prompt import Prompt, Segment


class Conversation:
    """Turns of a user and a model, in one cache.

    loaded: what `clearhead.load` returned. system: the system prompt, or None. cache: a name, or a function
    that makes a new cache. options: keywords of `generate` for every answer, but for the cache.

    Each turn is laid out as one prompt. As far as its tokens are those that the cache holds they are not read
    again; from the first other one on the cache is cropped. A cache that cannot be cropped (it has let go of
    something) begins anew if the tokens differ.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        system: str | None = None,
        cache: str | Callable[[], Any] = "dynamic",
        **options: Any,
    ) -> None:
        if "cache" in options or "tokenizer" in options:
            raise ArgumentError("cache and tokenizer are the conversation's own")
        self._loaded, self._options = loaded, options
        if cache == "paged":
            raise ArgumentError("cache: a paged cache has a limit; give a function that makes it")
        self._new_cache: Callable[[], Any] = (
            partial(make_cache, cache, loaded.model) if isinstance(cache, str) else cache
        )
        self._system = [] if system is None else [Segment("system", "system", system)]
        self.segments: list[Segment] = list(self._system)
        self._cache: Any = None
        self._answer: Generation | None = None
        self.prompt: Prompt | None = None
        self.reused = 0  # tokens of the latest prompt that were not read again

    def say(self, text: str, *, data: str | None = None) -> Generation:
        """Say something and return the answer as it comes; the latest answer is taken as far as it has come.

        data: a text from elsewhere, not to be trusted. Raises as `generate`; then nothing was said.
        """
        self._take_answer()
        turn = sum(s.role == "user" for s in self.segments) + 1
        said = [*self.segments, Segment(f"user {turn}", "user", text)]
        if data is not None:
            said.append(Segment(f"data {turn}", "data", data))
        prompt, _ = lay_out(said, self._loaded.tokenizer)
        cache = self._fitting(prompt)
        answer = generate(self._loaded, prompt, cache=cache, **self._options)
        self.segments, self.prompt, self._answer, self._cache = said, prompt, answer, cache
        return answer

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.segments, self._cache, self._answer, self.prompt = list(self._system), None, None, None

    def _take_answer(self) -> None:
        if self._answer is None or self.segments[-1].role == "assistant":
            return
        self._answer.stop()
        turn = sum(s.role == "user" for s in self.segments)
        self.segments.append(Segment(f"assistant {turn}", "assistant", self._answer.so_far().text.strip()))

    def _fitting(self, prompt: Prompt) -> Any:
        """The cache with as much of the prompt in it as there is; at least the last token is left to read."""
        ids = prompt.input_ids[0]
        cache, self._cache, self.reused = self._cache, None, 0
        if cache is not None and self._answer is not None and self._answer.sound:
            held = torch.tensor(self._answer.ids[: cache.get_seq_length()])
            n = min(len(held), len(ids) - 1)
            differ = (held[:n] != ids[:n]).nonzero()
            same = int(differ[0]) if len(differ) else n
            if same == len(held) or _crop(cache, same - len(held)):
                self.reused = same
            else:
                cache = None
        else:
            cache = None
        return self._new_cache() if cache is None else cache


def _crop(cache: Any, change: int) -> bool:
    """Take away the last tokens; whether that could be done."""
    before = cache.get_seq_length()
    if not all(getattr(layer, "is_croppable", False) for layer in cache.layers):
        return False
    try:
        cache.crop(change)
    except (ValueError, RuntimeError):  # what was let go of cannot be brought back
        return False
    return bool(cache.get_seq_length() == before + change)
