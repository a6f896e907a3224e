"""A scan as one page: each file's text with the spans marked. No script; text from files is text only."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise
from string import Template

from clearhead.guard.file_scan import FileResult, Hit
from clearhead.guard.hidden import KINDS
from clearhead.report.html import policy

WHOLE = 60_000
"""Characters up to which a file's text is shown whole; of longer ones the lines around the hits."""
_AROUND = 5
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def render(results: Sequence[FileResult], *, notes: bool = False) -> str:
    """Return the page. notes: mark hidden text of honest kinds too.

    The page holds no script, and its policy forbids everything but its own style. Characters that are not to
    be seen are shown by their code.
    """
    page = files("clearhead.report").joinpath("page")
    style = page.joinpath("scan.css").read_text(encoding="utf-8")
    frame = page.joinpath("scan.html").read_text(encoding="utf-8")
    order = {"block": 0, "flag": 1, "unread": 3, "unjudged": 3, "allow": 4, "skipped": 5}
    ranked = sorted(results, key=lambda r: (not r.found, order.get(r.verdict, 2), -(r.score or 0)))
    shown = [r for r in ranked if r.found or (notes and r.hits)]
    return Template(frame).substitute(
        policy=policy(style, ""),
        style=style,
        head=_head(results),
        rows="\n".join(_row(r, number) for number, r in enumerate(ranked)),
        files="\n".join(_file(r, ranked.index(r), notes) for r in shown),
    )


def _head(results: Sequence[FileResult]) -> str:
    finding = next((r.finding for r in results if r.finding is not None), None)
    found = sum(r.found for r in results)
    said = [f"<p>{len(results)} files, {found} with something found.</p>"]
    if finding is not None:
        limits = finding.thresholds
        said.append(
            f"<p class=dim>Preset {escape(finding.preset)}: flag from {limits.flag:.2f} "
            f"({limits.flag_fpr:.1%} false alarms), block from {limits.block:.2f} ({limits.block_fpr:.1%}), "
            f"measured on {limits.benign:,} benign texts ({escape(limits.fixed_on)}). Calibration "
            f"{escape(finding.calibration)}. Pull: the share of such spans of the calibration that were "
            "attacks.</p>"
        )
    return "\n".join(said)


def _row(result: FileResult, number: int) -> str:
    name = _text(result.name)
    link = f'<a href="#file-{number}">{name}</a>' if result.found else name
    score = "–" if result.score is None else f"{result.score:.2f}"
    said = _text(result.error or "; ".join(result.notes))
    return (
        f'<tr><td><span class="verdict {result.verdict}">{result.verdict}</span></td>'
        f"<td class=number>{score}</td><td>{link}</td><td class=dim>{said}</td></tr>"
    )


def _file(result: FileResult, number: int, notes: bool) -> str:
    hits = [hit for hit in result.hits if notes or hit.level != "note" or hit.rule == "injection"]
    items = "\n".join(f"<li>{_hit(hit)}</li>" for hit in hits)
    return (
        f'<section id="file-{number}"><h2><span class="verdict {result.verdict}">{result.verdict}</span> '
        f"{_text(result.name)}</h2>\n<ol>{items}</ol>\n{_marked(result, hits)}</section>"
    )


def _hit(hit: Hit) -> str:
    what = (
        f"pull {hit.pull:.2f}, attention {hit.attention:.1f}× per token"
        if hit.pull is not None and hit.attention is not None
        else KINDS[hit.rule]
    )
    where = ", ".join(_text(w) for w in (hit.part, hit.label) if w)
    return (
        f'<b>line {hit.line}, column {hit.column}</b> <span class="{hit.level}">{what}</span> '
        f"<span class=dim>{where}</span><br><q>{_text(' '.join(hit.said.split())[:400])}</q>"
    )


def _marked(result: FileResult, hits: Sequence[Hit]) -> str:
    document = result.document
    if document is None:
        return ""
    text = document.text
    last = document.place(len(text))[0]
    if len(text) <= WHOLE:
        ranges = [(1, last)]
    else:
        ranges = []
        for hit in sorted(hits, key=lambda h: h.line):
            first, end = max(1, hit.line - _AROUND), min(last, hit.end_line + _AROUND)
            if ranges and first <= ranges[-1][1] + 1:
                ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
            else:
                ranges.append((first, end))
    level = {"note": 1, "warning": 2, "error": 3}
    blocks = []
    for first, end in ranges:
        start, stop = document.line(first)[0], document.line(end)[1]
        inside = [h for h in hits if h.end > start and h.start < stop]
        edges = sorted({start, stop, *(min(max(e, start), stop) for h in inside for e in (h.start, h.end))})
        pieces = []
        for a, b in pairwise(edges):
            over = [h for h in inside if h.start <= a and h.end >= b]
            body = _text(text[a : min(b, a + WHOLE)])
            if over:
                strongest = max(over, key=lambda h: level[h.level])
                pieces.append(f'<mark class="{strongest.level}">{body}</mark>')
            else:
                pieces.append(body)
        blocks.append(f"<p class=dim>lines {first}–{end}</p><pre>{''.join(pieces)}</pre>")
    return "\n".join(blocks)


def _text(text: str) -> str:
    """Text as HTML shows it, with what is not to be seen as its code."""
    out = []
    for c in text:
        if c in "\n\t" or (unicodedata.category(c) not in _HIDDEN and not 0xFE00 <= ord(c) <= 0xFE0F
                           and not 0xE0100 <= ord(c) <= 0xE01EF):  # fmt: skip
            out.append(escape(c))
        elif c != "\r":
            out.append(f"<i>U+{ord(c):04X}</i>")
    return "".join(out)
