"""From bytes to text: which encoding, and a clear word where it is none."""

from __future__ import annotations

import codecs

from clearhead.errors import ReadingError

LARGEST = 5_000_000
"""Bytes of a file that are read unless asked for more: some 1.2 million tokens, minutes of scanning."""

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
#: How files begin that hold no text, and what they are.
_MAGIC = (
    (b"\x89PNG", "a PNG picture"), (b"\xff\xd8\xff", "a JPEG picture"), (b"GIF8", "a GIF picture"),
    (b"PK\x03\x04", "a zip archive (docx, xlsx, jar are such)"), (b"\x1f\x8b", "gzip-compressed"),
    (b"\x7fELF", "a program"), (b"MZ\x90", "a program"), (b"%PDF", "a PDF; name it .pdf"),
    (b"\xd0\xcf\x11\xe0", "an old Office file"), (b"SQLite format 3", "a database"),
    (b"7z\xbc\xaf", "a 7z archive"),
)  # fmt: skip


class NotTextError(ReadingError):
    """The file is of a kind that holds no text: a picture, an archive, a program."""


def decode(data: bytes, name: str, encoding: str | None = None, *, declared: str | None = None) -> str:
    """Return the text that the bytes are.

    encoding: as asked for. declared: as the file itself says, used where it is not UTF-8. Without either a
    byte-order mark decides, else UTF-8. Raises ReadingError for binary files, for bytes that are not of the
    encoding (naming the first), and for unknown encodings.
    """
    for mark, known in _MARKS:
        if encoding is None and data.startswith(mark):
            encoding = known
            break
    if encoding is None:
        for magic, said in _MAGIC:
            if data.startswith(magic):
                raise NotTextError(f"{name} is not a text: it is {said}")
    tried = encoding or "utf-8"
    try:
        text = data.decode(tried)
    except (LookupError, AssertionError) as error:
        raise ReadingError(f"encoding must be one that Python knows, got {tried[:40]!r}") from error
    except UnicodeDecodeError as error:
        if encoding is None and declared is not None and declared.lower() not in ("utf-8", "utf8"):
            return decode(data, name, declared)
        raise ReadingError(
            f"{name} is not {tried} text: byte {error.start} is 0x{data[error.start]:02x} ({error.reason}); "
            "convert it, or name its encoding"
        ) from None
    except UnicodeError as error:
        raise ReadingError(f"{name} is not {tried} text: {error}") from None
    if "\x00" in text:
        raise NotTextError(f"{name} is not a text: it holds null characters (character {text.index(chr(0))})")
    return text.removeprefix("\ufeff")
