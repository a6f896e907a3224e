"""Tokens to text while they come: no half character is shown, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.errors import ArgumentError

#: What a tokenizer writes for bytes that are no character, or not yet one.
UNFINISHED = "\ufffd"
#: So many tokens of the prompt are decoded beside the first new one, so that it keeps its leading space.
BEFORE = 4
#: Bytes of the longest character, and how many tokens may wait for one.
LONGEST, PATIENCE = 4, 32


class Pieces:
    """Turns token after token into the text that it adds.

    tokenizer: None gives no text at all. before: the prompt's tokens. stop: strings at which the text ends;
    they may begin in one token and end in a later one.

    A character whose bytes come in several tokens is given out with the last of them; so is text that may
    still become a stop string. All pieces and `rest()` together are `tokenizer.decode` of all tokens without
    special tokens, up to the first stop string, and without a character that was never completed.

    Raises ArgumentError for stop strings that are empty or not text, and for any without a tokenizer.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int], stop: Sequence[str] | str = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = _checked(stop, tokenizer)
        self._ids = list(before[-BEFORE:])
        self._read = len(self._ids)  # tokens whose text was given out
        self._held = ""  # text that may become a stop string
        self.stopped_by: str | None = None

    def add(self, token: int) -> str:
        """Return the text that has become certain with this token."""
        if self._tokenizer is None or self.stopped_by is not None:
            return ""
        self._ids.append(token)
        before, now = self._decoded(self._ids[: self._read]), self._decoded(self._ids)
        if now == before:  # a control token: it has no text and is not decoded again
            self._ids.pop()
            return ""
        if len(now) <= len(before) or now.endswith(UNFINISHED):
            return self._given_up(before, now) if len(self._ids) - self._read > PATIENCE else ""
        last = self._read
        self._ids, self._read = self._ids[last:] if last else self._ids, len(self._ids) - last
        return self._until_stop(now[len(before) :])

    def rest(self) -> str:
        """Return the text that was held back; after it nothing more is to come."""
        if self._tokenizer is None or self.stopped_by is not None:
            return ""
        unread = self._decoded(self._ids)[len(self._decoded(self._ids[: self._read])) :]
        self._ids, self._read = [], 0
        given = self._until_stop(unread.rstrip(UNFINISHED))
        if self.stopped_by is None:
            given, self._held = given + self._held, ""
        return given

    def _given_up(self, before: str, now: str) -> str:
        """Bytes that are no text and will be none: all but the last ones, which may begin a character."""
        for cut in range(len(self._ids) - LONGEST, len(self._ids) - 2 * LONGEST, -1):
            head = self._decoded(self._ids[:cut])
            if head + self._decoded(self._ids[cut:]) == now:
                self._ids, self._read = self._ids[cut:], 0
                return self._until_stop(head[len(before) :])
        return ""

    def _decoded(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _until_stop(self, text: str) -> str:
        text = self._held + text
        found = min(((text.find(s), -len(s), s) for s in self._stop if s in text), default=None)
        if found is not None:
            at, _, self.stopped_by = found
            self._held = ""
            return text[:at]
        longest = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text begin the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _checked(stop: Sequence[str] | str, tokenizer: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise ArgumentError(f"stop must be a string or a list of strings, got {stop!r:.100}")
    if not all(strings):
        raise ArgumentError("stop holds an empty string, which stands everywhere; leave it out")
    if strings and tokenizer is None:
        raise ArgumentError("stop needs a tokenizer: without one there is no text to stop at")
    return tuple(strings)
