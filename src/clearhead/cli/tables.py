"""A look and the steps as tables in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from clearhead.cli.terminal import cell, reader_gone, token, visible
from clearhead.look.result import Look, Source


def percent(share: float) -> str:
    """0.1234 -> "12.3%"."""
    return f"{share * 100:.1f}%"


def sources_table(look: Look, *, title: str = "") -> Table:
    """One row per source; the first token, where heads rest, is shown apart."""
    table = Table(
        box=box.SIMPLE_HEAD, title=Text(title) if title else None, title_justify="left", pad_edge=False
    )
    table.add_column("source")
    table.add_column("tokens", justify="right")
    table.add_column("attention", justify="right")
    table.add_column("per token", justify="right")
    table.add_column("head output", justify="right")
    table.add_column("heads that look most at it")
    ordinary = [s for s in look.sources if s.role != "sink"]
    for i, source in enumerate(ordinary):
        _add(table, source, end_section=i == len(ordinary) - 1)
    for source in look.sources:
        if source.role == "sink":
            _add(table, source)
    return table


def _add(table: Table, source: Source, *, end_section: bool = False) -> None:
    strongest = ", ".join(f"{layer}.{head} {percent(mass)}" for layer, head, mass in source.heads[:3])
    table.add_row(
        _name(source),
        str(source.tokens),
        Text(percent(source.mass), style="bold"),
        f"{source.per_token:.2f}×",
        percent(source.output),
        Text(strongest, style="dim"),
        end_section=end_section,
    )


def _name(source: Source) -> Text:
    name = Text(cell(source.name))
    if source.role == "sink":
        name.append(" (resting place)", style="dim")
    elif source.role == "template":
        name.append(" (chat template)", style="dim")
    elif not source.trusted:
        name.append(" (untrusted)", style="yellow")
    return name


def side_by_side(looks: dict[str, Look]) -> Table:
    """Several looks in one table, a row per source and a group of columns per look."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("source")
    for title in looks:
        for label in ("tokens", "attention", "per token"):
            heading = f"{title}\n{label}" if label == "attention" else f"\n{label}"
            table.add_column(heading, justify="right")
    rows: dict[str, Source] = {s.name: s for look in looks.values() for s in look.sources if s.role != "sink"}
    sinks = {s.name: s for look in looks.values() for s in look.sources if s.role == "sink"}
    for i, (name, source) in enumerate((rows | sinks).items()):
        cells: list[str | Text] = []
        for look in looks.values():
            mine = next((s for s in look.sources if s.name == name), None)
            if mine is None:
                cells += ["", "–", ""]
            else:
                cells += [str(mine.tokens), Text(percent(mine.mass), style="bold"), f"{mine.per_token:.2f}×"]
        table.add_row(_name(source), *cells, end_section=i == len(rows) - 1)
    return table


def tokens_line(look: Look) -> Text:
    """The most looked-at tokens, with their sources."""
    line = Text("most looked-at tokens: ")
    for i, top in enumerate(look.top_tokens):
        line.append(", " if i else "")
        line.append(token(top.text), style="bold")
        line.append(f" {percent(top.weight)}")
        line.append(f" (#{top.position}, {cell(look.sources[top.source].name)})", style="dim")
    return line


def legend_line(more: str = "") -> Text:
    """How to read the columns."""
    text = "per token: the source's attention by its tokens, 1× is the average over all tokens but the first"
    return Text(f"{text}; {more}" if more else text, style="dim")


def evidence_line(sentence: str, url: str) -> Text:
    """What the figures are worth as evidence."""
    return Text(f"evidence: {sentence} ({url})", style="italic")


def look_view(look: Look) -> RenderableType:
    """Everything `clearhead look` prints."""
    head = Text.assemble(
        (cell(look.model, 80), "bold"),
        f", {_counted(len(look.tokens), 'token')}; attention from {cell(look.query, 80)}, ",
    )
    L, H = look.mass.shape[:2]
    head.append(f"average over {_counted(L, 'layer')} × {_counted(H, 'head')}")
    notes = [Text(f"note: {visible(note)}", style="yellow") for note in look.notes]
    return Group(
        head,
        sources_table(look),
        tokens_line(look),
        legend_line(
            "attention and head output add up to 100%; heads are layer.head; #n is a token's position"
        ),
        *notes,
        evidence_line(look.evidence, look.evidence_url),
    )


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """The reader closed the pipe."""
        reader_gone()


def console() -> Console:
    """The terminal on standard output; wide enough for a table where it is a pipe."""
    plain = _Screen(highlight=False, markup=False, emoji=False)
    if not plain.is_terminal:
        plain.width = max(plain.width, 120)
    return plain
