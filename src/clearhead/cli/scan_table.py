"""A scan in the terminal: the offending lines in their place, the span marked, and what the figures mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from clearhead.cli.tables import percent
from clearhead.cli.terminal import visible
from clearhead.guard.file_scan import FileResult, Hit
from clearhead.guard.finding import Thresholds
from clearhead.guard.hidden import KINDS

_COLOURS = {"block": "bold red", "flag": "bold yellow", "allow": "green"}
_LEVELS = {"error": "red", "warning": "yellow", "note": "dim"}
_WHOLE, _WIDE = 160, 100
"""Characters up to which a line is shown whole; of a longer one so many, around the span."""
_LINES = 4


def file_view(result: FileResult, *, notes: bool = False) -> Text:
    """One file: its verdict, then each hit with its line."""
    out = Text()
    out.append(f"{result.verdict:<9}", style=_COLOURS.get(result.verdict, "bold magenta"))
    out.append("  –   " if result.score is None else f" {result.score:.2f} ")
    out.append(f" {visible(result.name, newline='↵')}")
    if result.finding is not None and result.finding.windows > 1:
        out.append(f"  ({result.finding.tokens:,} tokens in {result.finding.windows} windows)", style="dim")
    shown = [hit for hit in result.hits if notes or hit.level != "note" or hit.rule == "injection"]
    for hit in shown:
        out.append("\n")
        out.append_text(hit_view(result, hit))
    left = len(result.hits) - len(shown)
    confirmed = result.finding.confirmation if result.finding is not None else None
    if confirmed is not None:
        out.append(
            f"\n  with the strongest span hidden: the instruction's mass {confirmed.instruction_mass:+.3f}, "
            f"next token {'changes' if confirmed.changed else 'stays'}, "
            f"divergence {confirmed.divergence:.3f} nats"
        )
    if result.error:
        out.append(f"\n  {visible(result.error, newline=' ', most=400)}", style="magenta")
    for note in result.notes:
        out.append(f"\n  note: {visible(note, newline=' ', most=300)}", style="dim")
    if left and result.found:
        out.append(
            f"\n  {left} more place{'s' * (left > 1)} of hidden text, of honest kinds (--notes)", style="dim"
        )
    return out


def hit_view(result: FileResult, hit: Hit) -> Text:
    """A hit: file:line:column and what it is, its lines, and marks below the span."""
    out = Text("  ")
    out.append(f"{visible(result.name, newline='↵')}:{hit.line}:{hit.column}", style="bold")
    if hit.rule == "injection":
        out.append(f"  pulls the heads: pull {hit.pull:.2f}, attention {hit.attention:.1f}× per token")
    else:
        out.append(f"  {KINDS[hit.rule]}", style=_LEVELS[hit.level])
    where = ", ".join(
        visible(w, newline="↵", most=60) for w in (hit.part, hit.label) if w not in ("", "text")
    )
    if where:
        out.append(f"  [{where}]", style="yellow")
    document = result.document
    if document is None:
        return out
    last = min(hit.end_line, hit.line + _LINES - 1)
    for number in range(hit.line, last + 1):
        start, end = document.line(number)
        first, stop = max(start, hit.start), min(end, hit.end)
        left, right = start, end
        if end - start > _WHOLE:
            left = max(start, first - _WIDE // 4)
            right = min(end, max(stop, first) + _WIDE // 4, first + _WIDE)
        stop = min(stop, right)
        before = ("…" if left > start else "") + _plain(document.text[left:first])
        marked = _plain(document.text[first:stop])
        after = _plain(document.text[stop:right]) + ("…" if right < end else "")
        gutter = f"{number:>7} │ "
        out.append(f"\n{gutter}", style="dim")
        out.append(before)
        out.append(marked, style=f"bold {_LEVELS[hit.level]}")
        out.append(after)
        if marked:
            out.append(f"\n{'':>7} │ {' ' * cell_len(before)}", style="dim")
            out.append("^" * cell_len(marked), style=_LEVELS[hit.level])
    if hit.end_line > last:
        out.append(f"\n{'':>7} │ … {hit.end_line - last} more lines", style="dim")
    said = " ".join(hit.said.split())
    if said and said != " ".join(hit.text.split()):
        out.append(f"\n{'':>7} │ reads: ", style="dim")
        out.append(visible(said, newline=" ", most=300), style=_LEVELS[hit.level])
    return out


def _plain(text: str) -> str:
    return visible(text.replace("\r", "").replace("\t", "    "), newline="↵")


def summary(results: Sequence[FileResult]) -> Text:
    """How many files came to what, and at which thresholds."""
    counts = Counter(result.verdict for result in results)
    said = [
        f"{counts[v]} {v}"
        for v in ("block", "flag", "allow", "unjudged", "unread", "skipped")
        if counts.get(v)
    ]
    out = Text(f"{len(results)} file{'s' * (len(results) != 1)}: {', '.join(said) or 'none'}")
    if counts.get("skipped"):
        out.append(" (skipped: no text; --json names them)", style="dim")
    finding = next((r.finding for r in results if r.finding is not None), None)
    if finding is not None:
        out.append(f"\n{thresholds(finding.thresholds, finding.preset)}", style="dim")
        out.append(f"\ncalibration {visible(finding.calibration, newline=' ', most=100)}", style="dim")
    return out


def thresholds(found: Thresholds, preset: str) -> str:
    """The thresholds in words."""
    return visible(
        f"preset {preset}: flag from {found.flag:.2f} ({percent(found.flag_fpr)} false alarms), block from "
        f"{found.block:.2f} ({percent(found.block_fpr)}), measured on {found.benign:,} benign texts "
        f"({found.fixed_on})",
        newline=" ",
    )
