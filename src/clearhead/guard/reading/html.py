"""A web page: what a reader sees, what the style hides, comments, attributes and scripts, told apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser

from clearhead.errors import MissingExtraError
from clearhead.guard.hidden import Trick
from clearhead.guard.origin import Origin
from clearhead.guard.reading.document import Builder, Document
from clearhead.guard.reading.entities import collapsed, unescaped
from clearhead.guard.reading.style import Sheet, Shown, inside


def _names(said: str) -> frozenset[str]:
    return frozenset(said.split())


_VOID = _names("area base br col embed hr img input link meta param source track wbr")
_BLOCKS = _names(
    "address article aside blockquote body br dd details dialog div dl dt fieldset figcaption figure footer "
    "form h1 h2 h3 h4 h5 h6 header hr html legend li main nav ol option p pre section summary table tbody "
    "td tfoot th thead title tr ul"
)
#: A new one ends the open one: the end tag may be left out.
_ENDS = {
    "li": _names("li"),
    "dt": _names("dt dd"),
    "dd": _names("dt dd"),
    "td": _names("td th"),
    "th": _names("td th"),
    "tr": _names("tr td th"),
    "option": _names("option"),
}
_END_A_PARAGRAPH = _BLOCKS - _ENDS.keys() - _names("br tbody thead tfoot body html title")
_ASIDE = {
    "script": "scripts",
    "style": "styles",
    "noscript": "noscript",
    "template": "templates",
    "title": "title",
}
_ATTRIBUTES = _names("alt title aria-label aria-description placeholder summary label")
_ATTRIBUTE = re.compile(r"""([^\s=>"'/]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+))""")
_SHEET = re.compile(r"<style\b[^>]*>(.*?)</style", re.IGNORECASE | re.DOTALL)
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([\w-]{1,40})", re.IGNORECASE)
_ORDER = (
    "title",
    "text",
    "hidden text",
    "comments",
    "attributes",
    "noscript",
    "templates",
    "scripts",
    "styles",
)


def declared_charset(data: bytes) -> str | None:
    """Return the encoding that a page names in its first 2 KB, if it does."""
    match = _CHARSET.search(data[:2048])
    return match.group(1).decode("ascii") if match else None


def read_html(text: str, name: str) -> Document:
    """Return a page as a document. Parts: title, text, hidden text, comments, attributes, noscript,
    templates, and, not to be scanned unless asked for, scripts and styles; empty ones are left out.

    Text is hidden by display, visibility, opacity, a size of 2 px or less, the colour of its background, a
    place off the screen, a box of no size, or the attribute hidden, set inline, by attribute or by a simple
    rule of `<style>`. Rules for descendants, outside style sheets and scripts are not followed.

    Raises MissingExtraError without tinycss2.
    """
    try:
        import tinycss2  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("reading HTML needs tinycss2: pip install 'clearhead[report]'") from error
    reader = _Reader(text)
    end = _last_closed(text)
    reader.feed(text[:end])
    reader.close()
    reader.finish(end)
    parts = []
    for title in _ORDER:
        builder = reader.parts.get(title)
        if builder is not None and len(builder):
            seen = title in ("title", "text", "attributes", "noscript")
            part = builder.part(title, visible=seen, scanned=title not in ("scripts", "styles"))
            if part.text.strip():
                parts.append(part)
    return Document(name, "html", text, tuple(parts), tuple(reader.tricks))


def _last_closed(text: str) -> int:
    """Return from where on no tag, comment or marked section is closed (the parser would search for ever)."""
    end = text.rfind(">") + 1
    for opening, closing in (("<!--", "-->"), ("<![", "]>"), ("<?", ">")):
        closed = text.rfind(closing, 0, end)
        opened = text.find(opening, max(closed, 0), end)
        if opened >= 0 and closed < opened:
            end = opened
    return end


class _Reader(HTMLParser):
    """Sorts the page's texts into builders as the tags go by."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.parts: dict[str, Builder] = {}
        self.tricks: list[Trick] = []
        self._text = text
        self._rules = Sheet(m.group(1) for m in _SHEET.finditer(text))
        self._open: list[tuple[str, Shown, str]] = []  # tag, how shown, part that its text goes to
        self._line_starts = [0]
        for match in re.finditer("\n", text):
            self._line_starts.append(match.end())
        self._pending: tuple[int, int] | None = None  # characters of the file not yet given to a part
        self._hiding: tuple[int, int, str, list[str]] | None = None

    def _at(self) -> int:
        line, column = self.getpos()
        return self._line_starts[line - 1] + column

    def _part(self, name: str) -> Builder:
        return self.parts.setdefault(name, Builder(self._text))

    # ------------------------------------------------------------------ tags

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._flush()
        attributes = dict(attrs)
        self._end_implied(tag)
        around, aside = (self._open[-1][1], self._open[-1][2]) if self._open else (Shown(), "")
        shown = inside(around, tag, attributes, self._rules)
        self._read_attributes(tag, attributes, shown)
        if tag in _BLOCKS:
            self._break()
        if tag not in _VOID:
            self._open.append((tag, shown, aside or _ASIDE.get(tag, "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag in ("script", "style") and self._open and self._open[-1][0] == tag:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        self._flush()
        if tag in _BLOCKS:
            self._break()
        for number in range(len(self._open) - 1, max(-1, len(self._open) - 200), -1):
            if self._open[number][0] == tag:
                del self._open[number:]
                break

    def _end_implied(self, tag: str) -> None:
        ends = _names("p") if tag in _END_A_PARAGRAPH else _ENDS.get(tag, frozenset())
        for number in range(len(self._open) - 1, max(-1, len(self._open) - 20), -1):
            known = self._open[number][0]
            if known in ends:
                del self._open[number:]
                return
            if known in ("div", "table", "ul", "ol", "dl", "section", "article", "select", "td", "body"):
                return

    def _break(self) -> None:
        for name in ("text", "hidden text", "noscript", "templates"):
            if name in self.parts:
                self.parts[name].gap("\n")

    # ------------------------------------------------------------------ texts

    def handle_data(self, data: str) -> None:
        self._take(self._at(), len(data))

    def handle_entityref(self, name: str) -> None:
        self._take(self._at(), len(name) + 1, reference=True)

    def handle_charref(self, name: str) -> None:
        self._take(self._at(), len(name) + 2, reference=True)

    def unknown_decl(self, data: str) -> None:
        self._flush()
        self._comment(self._at(), "]]>")

    def handle_decl(self, decl: str) -> None:
        self._flush()

    def handle_pi(self, data: str) -> None:
        self._flush()
        self._comment(self._at(), ">")

    def handle_comment(self, data: str) -> None:
        self._flush()
        at = self._at()
        found = self._text.find(data, at) if data else -1
        if not data.strip() or found < 0 or found > at + 8:
            return
        self._add_comment(found, found + len(data))

    def _comment(self, at: int, closing: str) -> None:
        end = self._text.find(closing, at)
        self._add_comment(at, end + len(closing) if end >= 0 else len(self._text))

    def _add_comment(self, start: int, end: int) -> None:
        builder = self._part("comments")
        builder.gap("\n")
        builder.slice(start, end)
        said = " ".join(self._text[start:end].split())
        self.tricks.append(Trick("html-comment", start, end, said, "note"))

    def _take(self, start: int, length: int, *, reference: bool = False) -> None:
        if reference and self._text[start + length : start + length + 1] == ";":
            length += 1
        if self._pending is not None and self._pending[1] == start:
            self._pending = (self._pending[0], start + length)
        else:
            self._flush()
            self._pending = (start, start + length)

    def _flush(self) -> None:
        """Give what was read since the last tag to the part that it belongs to."""
        if self._pending is None:
            return
        start, end = self._pending
        self._pending = None
        shown, aside = (self._open[-1][1], self._open[-1][2]) if self._open else (Shown(), "")
        raw = self._text[start:end]
        if aside in ("scripts", "styles"):
            builder = self._part(aside)
            builder.gap("\n")
            builder.slice(start, end)
            return
        text, origin = unescaped(raw, start)
        if not any(tag == "pre" for tag, _, _ in self._open[-8:]):
            text, origin = collapsed(text, origin)
        reason = shown.reason
        if aside or not reason:
            self._part(aside or "text").add(text, origin)
            if text.strip():
                self._seen()
            return
        builder = self._part("hidden text")
        before = len(builder)
        builder.add(text, origin)
        builder.label(before, reason)
        if text.strip():
            self._hide(start, end, reason, text)

    def _hide(self, start: int, end: int, reason: str, text: str) -> None:
        if self._hiding is not None and self._hiding[2] == reason:
            self._hiding[3].append(text)
            self._hiding = (self._hiding[0], end, reason, self._hiding[3])
        else:
            self._seen()
            self._hiding = (start, end, reason, [text])

    def _seen(self) -> None:
        """What was hidden ends here."""
        if self._hiding is not None:
            start, end, reason, texts = self._hiding
            said = " ".join("".join(texts).split())
            self.tricks.append(Trick("hidden-html", start, end, f"{reason}: {said}", "note"))
            self._hiding = None

    def finish(self, end: int) -> None:
        """The page ends; from `end` on nothing is closed: a comment to browsers, or text without a tag."""
        self._flush()
        tail = self._text[end:]
        opened = re.search("<[!?/a-zA-Z]", tail)
        start = end + (opened.start() if opened else len(tail))
        self._take(end, start - end)
        self._flush()
        if self._text[start:].strip():
            self._add_comment(start, len(self._text))
        self._seen()
        self.tricks.sort(key=lambda t: t.start)

    # ------------------------------------------------------------------ attributes

    def _read_attributes(self, tag: str, attributes: Mapping[str, str | None], shown: Shown) -> None:
        wanted = {
            n for n in attributes if n in _ATTRIBUTES or (n.startswith("data-") and _prose(attributes[n]))
        }
        if tag == "meta" and not (attributes.get("http-equiv") or attributes.get("charset")):
            wanted.add("content")
        if tag == "input":
            wanted.add("value")
        if not wanted:
            return
        raw = self.get_starttag_text() or ""
        at = self._at()
        for match in _ATTRIBUTE.finditer(raw):
            name = match.group(1).lower()
            group = next((g for g in (2, 3, 4) if match.group(g)), None)
            if name not in wanted or group is None or not match.group(group).strip():
                continue
            unseen = name.startswith("data-") or (tag == "input" and attributes.get("type") == "hidden")
            hidden = bool(shown.reason) or unseen
            builder = self._part("hidden text" if hidden else "attributes")
            builder.gap("\n")
            before = len(builder)
            text, origin = unescaped(match.group(group), at + match.start(group))
            builder.add(text, origin)
            builder.label(before, f"<{tag} {name}>")
            if hidden and _prose(text):
                start, end = _ends(origin)
                self.tricks.append(Trick("hidden-html", start, end, f"<{tag} {name}>: {text}", "note"))


def _ends(origin: Origin) -> tuple[int, int]:
    return origin.span(0, len(origin))


def _prose(value: str | None) -> bool:
    """Whether a value is words and not a setting."""
    words = (value or "").split()
    return len(words) >= 4 and sum(word.strip(".,!?:;").isalpha() for word in words) >= 3
