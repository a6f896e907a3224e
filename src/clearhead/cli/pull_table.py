"""What the guard says about a look, in the terminal: verdict, sources, what pulled, the heads that moved."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clearhead.cli.scan_table import thresholds
from clearhead.cli.tables import percent
from clearhead.cli.terminal import cell, visible
from clearhead.guard.finding import Finding
from clearhead.look.result import Pull, PulledSpan

_COLOURS = {"block": "bold red", "flag": "bold yellow", "allow": "green"}
_HEADS = 5
"""How many of the heads that moved are named."""


def pull_view(pull: Pull) -> RenderableType:
    """Everything `clearhead look` prints of the guard."""
    finding = pull.finding
    parts: list[RenderableType] = [Text.assemble("\nguard: ", _verdict(finding)), _sources(finding)]
    shown = [found for found in pull.spans if found.marked] or list(pull.spans[:1])
    for found in shown:
        parts.append(Text.assemble("pulled: " if found.marked else "strongest: ", _span(found)))
    if finding.heads and pull.before is not None:
        parts.append(_heads(pull))
    if finding.reason:
        parts.append(Text(f"not judged: {visible(finding.reason, newline=' ')}", style="magenta"))
    parts += [Text(f"note: {visible(note, newline=' ')}", style="yellow") for note in finding.notes]
    own = "; the guard reads the texts in a layout of its own, so its shares differ from those above"
    parts.append(_fixed(finding).append(own))
    return Group(*parts)


def verdict_lines(pulls: Mapping[str, Pull | str]) -> Text:
    """One line per look, by its title, with the spans that pulled; a text says why there is no verdict."""
    out = Text("\n")
    last = None
    for title, pull in pulls.items():
        out.append(f"{visible(title, newline=' ')}: ")
        if isinstance(pull, str):
            out.append(f"{visible(pull, newline=' ')}\n")
            continue
        last = pull.finding
        out.append_text(_verdict(pull.finding)).append("\n")
        for found in pull.spans:
            if found.marked:
                out.append("  pulled: ").append_text(_span(found)).append("\n")
        if pull.finding.reason:
            out.append(f"  {visible(pull.finding.reason, newline=' ')}\n")
    if last is not None:
        out.append_text(_fixed(last))
    return out


def _verdict(finding: Finding) -> Text:
    colour = _COLOURS.get(finding.verdict, "bold magenta")
    return Text.assemble((finding.verdict, colour), f", score {finding.score:.2f}")


def _sources(finding: Finding) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("untrusted source")
    for label in ("tokens", "read", "attention", "benign, as long", "score"):
        table.add_column(label, justify="right")
    table.add_column("verdict")
    for source in finding.sources:
        table.add_row(
            Text(cell(source.name)),
            str(source.tokens),
            f"{source.read:.0%}",
            Text(percent(source.mass), style="bold"),
            percent(source.baseline),
            f"{source.score:.2f}",
            Text(source.verdict, style=_COLOURS.get(source.verdict, "")),
        )
    return table


def _span(found: PulledSpan) -> Text:
    span = found.span
    return Text.assemble(
        (f"{cell(span.source)}:{span.line}:{span.column}", "bold"),
        f"  pull {span.pull:.2f}, attention {span.attention:.1f}× per token: ",
        (visible(" ".join(span.text.split()), newline=" ", most=160), "red" if found.marked else ""),
    )


def _heads(pull: Pull) -> Text:
    """The heads that moved most and the mean over all heads that moved, before and after."""
    before, after = pull.before, pull.after
    assert before is not None
    named = []
    for head in pull.finding.heads[:_HEADS]:
        then = "" if after is None else f" → {after[head.layer, head.head]:+.1f}"
        named.append(f"{head.layer}.{head.head} {head.moved:+.1f}{then}")
    line = f"heads that moved most from the instruction to the texts: {', '.join(named)}"
    if after is not None:
        line += f"; mean of all heads {np.mean(before):+.2f} → {np.mean(after):+.2f}"
    how = "" if after is None else "; → with the strongest sentence hidden"
    return Text.assemble(line, (f" (in standard deviations of benign texts{how})", "dim"))


def _fixed(finding: Finding) -> Text:
    return Text(
        f"{thresholds(finding.thresholds, finding.preset)}; calibration {visible(finding.calibration)}",
        style="dim",
    )
