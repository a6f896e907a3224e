"""Base64 and hexadecimal digits that decode to readable text."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator

Found = tuple[int, int, str, tuple[str, str, str] | None]

_BASE64 = re.compile(r"(?<![\w+/=-])[A-Za-z0-9+/_-]{20,}(?:\r?\n[A-Za-z0-9+/_-]{20,})*={0,2}(?![\w+/=])")
_HEX = re.compile(r"(?:\\x[0-9A-Fa-f]{2}){8,}|(?<!\w)(?:0x)?(?:[0-9A-Fa-f]{2}){16,}(?!\w)"
                  r"|(?<!\w)(?:[0-9A-Fa-f]{2}[ :]){15,}[0-9A-Fa-f]{2}(?!\w)")  # fmt: skip
_DEPTH = 3


def decoded(text: str) -> Iterator[Found]:
    """Blobs that decode to readable text, and that text; text within the text, three deep."""
    found: list[Found] = []
    for pattern, kind in ((_HEX, "hex"), (_BASE64, "base64")):
        for match in pattern.finditer(text):
            said = _decode(match.group(), kind, _DEPTH)
            if said is not None:
                found.append((*match.span(), f" {said} ", (kind, "note", said)))
    end = 0
    for item in sorted(found, key=lambda item: item[0]):
        if item[0] >= end:
            yield item
            end = item[1]


def _decode(blob: str, kind: str, depth: int) -> str | None:
    try:
        if kind == "hex":
            data = bytes.fromhex(re.sub(r"\\x|0x|[ :]", "", blob))
        else:
            plain = re.sub(r"\s|=", "", blob).translate(str.maketrans("-_", "+/"))
            data = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (ValueError, binascii.Error):
        return None
    try:
        said = data.decode("utf-8")
    except UnicodeDecodeError:
        try:
            said = data.decode("utf-16-le")  # as shells of Windows encode
        except UnicodeDecodeError:
            return None
        if not said.isascii():
            return None
    if readable(said):
        return said.strip()
    if depth > 1 and said.isascii():
        return _decode(said.strip(), "base64" if _BASE64.fullmatch(said.strip()) else "hex", depth - 1)
    return None


def readable(text: str) -> bool:
    """Whether a decoded text is one that somebody wrote: words and not a picture, a hash or a token."""
    if len(text) < 8 or "\x00" in text:
        return False
    letters = sum(c.isalpha() or c.isspace() for c in text)
    printable = all(c.isprintable() or c in "\t\r\n" for c in text)
    words = sum(len(word) > 1 for word in text.split())
    wide = sum(c > "\u2e80" for c in text) >= 6
    return printable and letters >= 0.75 * len(text) and (words >= 3 or wide)
