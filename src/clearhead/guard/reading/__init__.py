"""Reading files for the guard: one module per kind of file, and the choice among them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from clearhead.errors import ReadingError
from clearhead.guard.hidden import Trick
from clearhead.guard.origin import Origin
from clearhead.guard.reading.decoding import LARGEST as LARGEST
from clearhead.guard.reading.decoding import decode
from clearhead.guard.reading.document import Document as Document
from clearhead.guard.reading.document import Part as Part

KINDS: dict[str, tuple[str, ...]] = {
    "html": (".html", ".htm", ".xhtml"),
    "mail": (".eml",),
    "json": (".json",),
    "jsonl": (".jsonl", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "pdf": (".pdf",),
    "markdown": (".md", ".markdown", ".mdx"),
}
"""Kinds and the endings of their files' names; every other name is a text."""

_COMMENT = re.compile(r"<!--(.*?)(?:-->|\Z)|^\[//\]:\s*#\s*(.*)$", re.DOTALL | re.MULTILINE)


def read_file(
    path: str | os.PathLike[str], *, most: int = LARGEST, encoding: str | None = None, kind: str | None = None
) -> Document:
    """Read a file by the ending of its name.

    most: bytes; a larger file is refused and not cut. encoding: of a text that says nothing of it and is not
    UTF-8. kind: one of `KINDS` or "text", where the name tells nothing or wrong.

    Raises ReadingError, with the path, for a file that is missing, unreadable, a folder, no regular file, too
    large, binary, or not what its name says; MissingExtraError for a PDF without pypdf.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ReadingError(f"{path} is a folder")
        if not path.is_file() and path.exists():
            raise ReadingError(f"{path} is not a regular file")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ReadingError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ReadingError(f"{path} cannot be read: {reason}") from error
    return read_bytes(data, str(path), most=most, encoding=encoding, kind=kind)


def read_bytes(
    data: bytes, name: str, *, most: int = LARGEST, encoding: str | None = None, kind: str | None = None
) -> Document:
    """Read the bytes of a file called `name`; see `read_file`."""
    if len(data) > most:
        raise ReadingError(
            f"{name} is too large: at most {most:,} bytes are read; raise the limit to read it"
        )
    if kind is not None and kind not in KINDS and kind != "text":
        raise ReadingError(f"kind must be text, {', '.join(KINDS)}, got {kind!r}")
    ending = Path(name).suffix.lower()
    kind = kind or next((k for k, endings in KINDS.items() if ending in endings), "text")
    if kind == "pdf":
        from clearhead.guard.reading.pdf import read_pdf

        return read_pdf(data, name)
    if kind == "html":
        from clearhead.guard.reading.html import declared_charset, read_html

        return read_html(decode(data, name, encoding, declared=declared_charset(data)), name)
    if kind == "mail":
        from clearhead.guard.reading.mail import read_mail

        # 8-bit mails name their encoding part by part; what is not UTF-8 is read byte by byte
        return read_mail(decode(data, name, encoding, declared="latin-1"), name)
    text = decode(data, name, encoding)
    if kind in ("json", "jsonl"):
        from clearhead.guard.reading.jsons import read_json

        return read_json(text, name, lines=kind == "jsonl")
    if kind == "csv":
        from clearhead.guard.reading.tables import read_table

        return read_table(text, name, "\t" if ending == ".tsv" else None)
    return _plain(text, name, markdown=kind == "markdown")


def _plain(text: str, name: str, *, markdown: bool) -> Document:
    parts = (Part("text", text, Origin.verbatim(0, len(text))),) if text else ()
    tricks = []
    if markdown:
        for match in _COMMENT.finditer(text):
            said = " ".join((match.group(1) or match.group(2) or "").split())
            if said:
                tricks.append(Trick("html-comment", *match.span(), said, "note"))
    return Document(name, "markdown" if markdown else "text", text, parts, tuple(tricks))
