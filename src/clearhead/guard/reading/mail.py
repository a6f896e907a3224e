"""A mail: headers, text and HTML parts, names and texts of attachments, decoded with their places kept."""

from __future__ import annotations

import email
import email.header
import email.policy
import re
from dataclasses import replace
from email.message import Message

import numpy as np

from clearhead.errors import ClearheadError, ReadingError
from clearhead.guard.hidden import Trick
from clearhead.guard.origin import Origin
from clearhead.guard.reading.document import Builder, Document, Part
from clearhead.guard.reading.html import read_html
from clearhead.guard.reading.tables import read_table

_HEADERS = ("subject", "from", "to", "cc", "reply-to", "list-unsubscribe", "comments", "keywords")
_SOFT_BREAK = re.compile(r"=(?:([0-9A-Fa-f]{2})|[ \t]*\r?\n)")
_MOST_PARTS = 200


def read_mail(text: str, name: str) -> Document:
    """Return a mail (RFC 5322, MIME) as a document.

    Parts: headers; "text", "text 2" …; those of each HTML part ("html: text", "html: hidden text"); and
    "attachment NAME" for attachments of text. Other attachments are named in the headers' part and in the
    notes, and not read. Raises ReadingError for mails of more than 200 MIME parts, or nested too deep.
    """
    try:
        mail = email.message_from_string(text, policy=email.policy.compat32)
        leaves = [m for m in mail.walk() if not m.is_multipart()]
    except RecursionError as error:
        raise ReadingError(f"{name} is a mail nested too deep to be read") from error
    if len(leaves) > _MOST_PARTS:
        raise ReadingError(f"{name} has {len(leaves)} MIME parts, more than the {_MOST_PARTS} that are read")
    reader = _Reader(text, name)
    reader.headers(mail)
    for leaf in leaves:
        reader.leaf(leaf)
    return reader.document()


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name
        self._top = Builder(text)
        self._parts: list[Part] = []
        self._tricks: list[Trick] = []
        self._notes: list[str] = []
        self._taken: dict[str, int] = {}
        self._at = 0

    def document(self) -> Document:
        """Return what was read."""
        head = (self._top.part("headers"),) if len(self._top) else ()
        tricks = tuple(sorted(self._tricks, key=lambda t: t.start))
        return Document(
            self._name, "mail", self._text, (*head, *self._parts), tricks, notes=tuple(self._notes)
        )

    def headers(self, mail: Message) -> None:
        """Read the headers that people read."""
        end = re.search(r"\r?\n\r?\n", self._text)
        self._at = end.end() if end else len(self._text)
        for name, value in mail.items():
            if name.lower() in _HEADERS or name.lower().startswith("x-summary"):
                self._header(name, str(value), 0, self._at)

    def _header(self, name: str, value: str, start: int, end: int) -> None:
        at = self._text.find(value, start, end)
        if at < 0 or not value.strip():
            return
        self._top.gap("\n")
        before = len(self._top)
        plain = _words(value)
        exact = plain == value
        self._top.add(plain, Origin.verbatim(at, len(value)) if exact else _block(at, value, plain))
        self._top.label(before, name)

    def leaf(self, leaf: Message) -> None:
        """Read one MIME part that holds no others."""
        payload = leaf.get_payload(decode=False)
        if not isinstance(payload, str):
            return
        at = self._text.find(payload, self._at)
        if at < 0:
            self._notes.append(
                f"a part of type {leaf.get_content_type()} was not found in the mail, and not read"
            )
            return
        filename = _words(leaf.get_filename() or "")
        attached = bool(filename) or leaf.get_content_disposition() == "attachment"
        if filename:
            raw = leaf.get_filename() or ""
            self._header("attachment", raw, self._at, at)
        self._at = at + len(payload)
        kind = leaf.get_content_type()
        title = f"attachment {filename or kind}" if attached else "html" if kind == "text/html" else "text"
        if not kind.startswith("text/") and kind not in ("application/json", "message/rfc822"):
            self._notes.append(f"not read: {title if attached else kind}, which is no text")
            return
        try:
            plain, origin = _decoded(leaf, payload, at)
        except (LookupError, ValueError) as error:
            self._notes.append(f"not read: {title}: {error}")
            return
        if plain.strip():
            self._add(title, kind, plain, origin)

    def _add(self, title: str, kind: str, plain: str, origin: Origin) -> None:
        title = self._free(title)
        try:
            if kind == "text/html":
                inner = read_html(plain, title)
            elif kind == "text/csv":
                inner = read_table(plain, title)
            else:
                self._parts.append(Part(title, plain, origin))
                return
        except ClearheadError as error:
            self._notes.append(f"{title} read as plain text: {error}")
            self._parts.append(Part(title, plain, origin))
            return
        for part in inner.parts:
            self._parts.append(
                replace(part, name=f"{title}: {part.name}", origin=part.origin.through(origin))
            )
        for trick in inner.tricks:
            start, end = origin.span(trick.start, trick.end)
            self._tricks.append(replace(trick, start=start, end=end))

    def _free(self, title: str) -> str:
        self._taken[title] = self._taken.get(title, 0) + 1
        return title if self._taken[title] == 1 else f"{title} {self._taken[title]}"


def _words(value: str) -> str:
    """A header with its encoded words (RFC 2047) decoded."""
    try:
        return str(email.header.make_header(email.header.decode_header(value)))
    except (LookupError, ValueError, UnicodeError):
        return value


def _block(at: int, raw: str, plain: str) -> Origin:
    return Origin.block(at, at + len(raw), len(plain))


def _decoded(leaf: Message, payload: str, at: int) -> tuple[str, Origin]:
    """The text of a part, and for each character the characters of the file that encode it."""
    how = str(leaf.get("content-transfer-encoding", "7bit")).strip().lower()
    charset = leaf.get_content_charset("utf-8")
    if how == "base64":
        data, starts, ends = _base64(payload, at)
    elif how == "quoted-printable":
        data, starts, ends = _quoted(payload, at)
    else:
        return payload, Origin.verbatim(at, len(payload))
    text = data.decode(charset, "replace")
    if len(text) == len(data):
        return text, Origin(starts, ends)
    sizes = [len(c.encode(charset, "replace")) for c in text]
    edges = np.minimum(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), max(len(data) - 1, 0))
    return text, Origin(starts[edges[:-1]], ends[np.maximum(edges[1:] - 1, edges[:-1])])


def _base64(payload: str, at: int) -> tuple[bytes, np.ndarray, np.ndarray]:
    import base64

    places = np.array([m.start() for m in re.finditer(r"[A-Za-z0-9+/]", payload)], dtype=np.int64)
    signs = "".join(re.findall(r"[A-Za-z0-9+/]", payload))
    signs = signs[: len(signs) - (len(signs) % 4 == 1)]
    data = base64.b64decode(signs + "=" * (-len(signs) % 4))
    first = np.arange(len(data), dtype=np.int64) * 8 // 6
    last = (np.arange(len(data), dtype=np.int64) * 8 + 7) // 6
    return data, at + places[first], at + places[last] + 1


def _quoted(payload: str, at: int) -> tuple[bytes, np.ndarray, np.ndarray]:
    data = bytearray()
    starts: list[int] = []
    ends: list[int] = []

    def plain(start: int, end: int) -> None:
        for number in range(start, end):
            raw = payload[number].encode("utf-8", "replace")
            data.extend(raw)
            starts.extend([at + number] * len(raw))
            ends.extend([at + number + 1] * len(raw))

    done = 0
    for match in _SOFT_BREAK.finditer(payload):
        plain(done, match.start())
        if match.group(1):
            data.append(int(match.group(1), 16))
            starts.append(at + match.start())
            ends.append(at + match.end())
        done = match.end()
    plain(done, len(payload))
    return bytes(data), np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
