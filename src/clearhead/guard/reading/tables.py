"""A table of values with commas between them: its cells, with row and column."""

from __future__ import annotations

import re

from clearhead.guard.origin import Edit, Origin, edited
from clearhead.guard.reading.document import Builder, Document

_QUOTES = re.compile('""')


def read_table(text: str, name: str, delimiter: str | None = None) -> Document:
    """Return a CSV file (RFC 4180, any of , ; tab | between cells) as one part, a row per line.

    Labels are "row 3, column 2 (comment)", rows from 1 including the header, whose words are given. A quote
    that is never closed reads to the end of the file, as spreadsheets do.
    """
    delimiter = delimiter or _guess(text)
    cell = re.compile(rf'"((?:[^"]|"")*)("|\Z)|[^{re.escape(delimiter)}\r\n]*')
    after = re.compile(rf"[^{re.escape(delimiter)}\r\n]+")
    builder = Builder(text)
    header: list[str] = []
    at, row, column = 0, 1, 1
    while at <= len(text):
        match = cell.match(text, at)
        assert match is not None  # an empty cell matches everywhere
        start, end = match.span() if match.group(2) is None else match.span(1)
        plain, origin = text[start:end], Origin.verbatim(start, end - start)
        if '""' in plain and match.group(2) is not None:
            plain, origin = edited(plain, origin, [Edit(*m.span(), '"') for m in _QUOTES.finditer(plain)])
        if row == 1:
            header.append(plain.strip()[:40])
        if plain.strip():
            before = len(builder)
            builder.add(plain, origin)
            title = header[column - 1] if row > 1 and column <= len(header) else ""
            builder.label(before, f"row {row}, column {column}" + (f" ({title})" if title else ""))
        at = match.end()
        rest = after.match(text, at)
        if rest is not None:  # characters after a closing quote: kept
            builder.slice(*rest.span())
            at = rest.end()
        if text.startswith(delimiter, at):
            builder.gap(f" {delimiter} " if delimiter != "\t" else "\t")
            at, column = at + 1, column + 1
        else:
            builder.gap("\n")
            at += 2 if text.startswith("\r\n", at) else 1
            row, column = row + 1, 1
    return Document(name, "csv", text, (builder.part("cells"),) if len(builder) else ())


def _guess(text: str) -> str:
    first = re.sub(r'"[^"]*"', "", text[:10_000]).split("\n", 1)[0]
    return max(",;\t|", key=first.count)
