"""A PDF, page by page: what is shown, and what is drawn invisibly, in white, tiny or off the page."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

from clearhead.errors import MissingExtraError, ReadingError
from clearhead.guard.hidden import Trick
from clearhead.guard.origin import Origin
from clearhead.guard.reading.document import Builder, Document

MOST_PAGES = 2000
TINY = 2.0
"""Points: text of that size or less cannot be read."""
_SHOWS = {b"Tj", b"TJ", b"'", b'"'}


def read_pdf(data: bytes, name: str) -> Document:
    """Return a PDF as a document. Parts: "pages", and "hidden text" for text in render mode 3, white, of
    2 points or less, or off the page. The document's text is that of the pages, one after the other: places
    are places in it; labels say the page.

    Text on pictures is not read (no OCR). Raises MissingExtraError without pypdf; ReadingError for a file
    that is no PDF, is broken, encrypted, or of more than `MOST_PAGES` pages.
    """
    try:
        import pypdf
        import pypdf.errors
    except ImportError as error:
        raise MissingExtraError("reading PDF needs pypdf: pip install 'clearhead[pdf]'") from error
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise ReadingError(f"{name} is encrypted: its text cannot be read without the password")
        if len(reader.pages) > MOST_PAGES:
            raise ReadingError(
                f"{name} has {len(reader.pages)} pages, more than the {MOST_PAGES} that are read"
            )
        pages = [_page(page) for page in reader.pages]
    except ReadingError:
        raise
    except (pypdf.errors.PyPdfError, *_BROKEN) as error:
        raise ReadingError(f"{name} is a PDF that cannot be read: {type(error).__name__}: {error}") from error
    return _document(name, pages)


#: What pypdf raises on damaged files besides its own errors.
_BROKEN = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, OSError, AssertionError,
    ZeroDivisionError, OverflowError, NotImplementedError, ImportError, MemoryError,
)  # fmt: skip


@dataclass
class _State:
    """What decides whether text is seen, as the operators of a page set it."""

    mode: int = 0
    white: bool = False
    size: float = 12.0
    kept: list[tuple[int, bool, float]] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)  # of the text shown since it was last handed over

    def operator(self, name: bytes, operands: Any, scale: float) -> None:
        """Take note of one operator."""
        if name == b"q":
            self.kept.append((self.mode, self.white, self.size))
        elif name == b"Q" and self.kept:
            self.mode, self.white, self.size = self.kept.pop()
        elif name == b"Tr" and operands:
            self.mode = int(operands[0])
        elif name == b"Tf" and len(operands) > 1:
            self.size = float(operands[1])
        elif name in (b"g", b"rg", b"sc", b"scn", b"k"):
            parts = [float(p) for p in operands if isinstance(p, (int, float))]
            if len(parts) == 4:
                self.white = all(p <= 0.03 for p in parts)
            else:
                self.white = bool(parts) and all(p >= 0.97 for p in parts)
        elif name in _SHOWS:
            self.reasons.add(self._reason(scale))

    def _reason(self, scale: float) -> str:
        if self.mode == 3:
            return "drawn invisibly (render mode 3)"
        if abs(self.size * scale) <= TINY:
            return f"{abs(self.size * scale):.1f} points high"
        return "drawn in white" if self.white else ""


def _page(page: Any) -> list[tuple[str, str]]:
    """Texts of a page with what hides each, empty where nothing does."""
    state = _State()
    out: list[tuple[str, str]] = []
    left, bottom, right, top = (float(v) for v in page.mediabox)

    def before(name: bytes, operands: Any, cm: Any, tm: Any) -> None:
        scale = (abs(tm[3]) or abs(tm[1]) or 1.0) * (abs(cm[3]) or abs(cm[1]) or 1.0)
        state.operator(name, operands, scale)

    def text(said: str, cm: Any, tm: Any, font: Any, size: float) -> None:
        reasons, state.reasons = state.reasons, set()
        if not said:
            return
        x, y = tm[4] * cm[0] + tm[5] * cm[2] + cm[4], tm[4] * cm[1] + tm[5] * cm[3] + cm[5]
        away = x < left - 50 or x > right + 50 or y < bottom - 50 or y > top + 50
        reason = "off the page" if away else next(iter(reasons)) if len(reasons) == 1 else ""
        if len(reasons) > 1:
            reason = f"partly {next(r for r in sorted(reasons) if r)}"
        out.append((said, reason))

    page.extract_text(visitor_operand_before=before, visitor_text=text)
    return out


def _document(name: str, pages: list[list[tuple[str, str]]]) -> Document:
    source = "\f".join("".join(text for text, _ in page) for page in pages)
    shown, hidden = Builder(source), Builder(source)
    tricks = []
    at = 0
    for number, page in enumerate(pages, 1):
        starts = len(shown), len(hidden)
        for text, reason in page:
            origin = Origin.verbatim(at, len(text))
            if not reason or reason.startswith("partly"):
                shown.add(text, origin)
            else:
                hidden.gap("\n")
                hidden.add(text, origin)
            if reason and text.strip():
                tricks.append(
                    Trick("hidden-pdf", at, at + len(text), f"{reason}: {' '.join(text.split())}", "note")
                )
            at += len(text)
        shown.label(starts[0], f"page {number}")
        hidden.label(starts[1], f"page {number}")
        shown.gap("\n")
        at += 1
    built = [(shown, "pages", True), (hidden, "hidden text", False)]
    parts = tuple(b.part(title, visible=seen) for b, title, seen in built if len(b))
    notes = [] if parts else ["no text in this PDF: pages that are pictures are not read"]
    return Document(name, "pdf", source, parts, tuple(tricks), notes=tuple(notes))
