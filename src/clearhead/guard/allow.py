"""What is never scanned: sources by name, texts by their SHA-256."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from clearhead.errors import ArgumentError

_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest(text: str) -> str:
    """Return the SHA-256 of a text (UTF-8, lone surrogates kept) as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class AllowList:
    """Sources and texts that pass unscanned.

    sources: names, compared exactly. A name that the author of a text can choose must not stand here.
    texts: SHA-256 of whole texts, as `digest` gives it: a text with one more blank is another text.
    Raises ArgumentError for a str in place of a list, and for a digest that is none.
    """

    def __init__(self, *, sources: Iterable[str] = (), texts: Iterable[str] = ()) -> None:
        for name, given in (("sources", sources), ("texts", texts)):
            if isinstance(given, str):
                raise ArgumentError(f"{name} must be a list of str, got the str {given!r}")
        self.sources = frozenset(sources)
        self.texts = frozenset(texts)
        for name, found in (("sources", self.sources), ("texts", self.texts)):
            for item in found:
                if not isinstance(item, str):
                    raise ArgumentError(f"{name} must hold str, got {type(item).__name__}")
        for item in self.texts:
            if not _DIGEST.fullmatch(item):
                raise ArgumentError(
                    "texts must hold SHA-256 digests of 64 lower-case hexadecimal digits (guard.allow.digest "
                    f"makes them), got one of {len(item)} characters"
                )

    def why(self, source: str, text: str) -> str:
        """Return why a text of a source passes unscanned, or "" if it does not."""
        if source in self.sources:
            return "its source is on the allow-list"
        if self.texts and digest(text) in self.texts:
            return "its text is on the allow-list"
        return ""
