"""`clearhead steps`: the mechanism on one head of a real model, with live numbers."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.look import Model

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clearhead.look.steps import Steps, WordLook


def steps(
    text: Annotated[str, typer.Argument(help="A sentence.")],
    token: Annotated[str, typer.Option(help="A word of it: whose attention?")],
    on: Annotated[
        list[str] | None, typer.Option(help="A word to ask about. Can be repeated. Default: all it can see.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="The layer to walk through.")] = None,
    head: Annotated[int | None, typer.Option(help="The head to walk through.")] = None,
    model: Model = "smollm2",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Walk the mechanism on a real head: q, k, v, scores, softmax, values, and what a word matters."""
    from clearhead.cli.run import load_model
    from clearhead.look.steps import steps as walk

    found = walk(load_model(model), text, token=token, on=on or (), layer=layer, head=head)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), ensure_ascii=True, indent=1) + "\n")
        return
    from clearhead.cli.tables import console

    out = console()
    for part in _view(found, named=len(on) if on else 1):
        out.print(part)


def _numbers(values: tuple[float, ...]) -> str:
    shown = ", ".join(f"{v:+.2f}" for v in values[:4])
    length = sum(v * v for v in values) ** 0.5
    return f"[{shown}{', …' if len(values) > 4 else ''}]  {len(values)} numbers, length {length:.2f}"


def _view(s: Steps, named: int) -> list[RenderableType]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.tables import evidence_line, percent
    from clearhead.cli.terminal import visible

    def line(text: str, style: str = "") -> Text:
        return Text(text, style=style)

    word = visible(s.token)
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("word", "left"), ("q·k", "right"), ("÷ √d", "right"), ("weight", "right")):
        rows.add_column(name, justify=justify)  # type: ignore[arg-type]
    rows.add_column("without ÷ √d", justify="right")
    rows.add_column("|v|", justify="right")
    rows.add_column("|weight · v|", justify="right")
    for row in s.rows:
        rows.add_row(
            line(visible(row.word)),
            f"{row.score:.2f}",
            f"{row.scaled:.2f}",
            Text(percent(row.weight), style="bold"),
            percent(row.unscaled_weight),
            f"{row.value:.2f}",
            f"{row.part:.2f}",
        )
    root = f"√{s.d} = {s.d**0.5:g}"
    divisor = root if abs(s.scale - s.d**-0.5) < 1e-12 else f"1/{s.scale:g}"
    parts: list[RenderableType] = [
        line(f"{s.model}, layer {s.layer}, head {s.head}, the token {word!r}", "bold"),
        line(f"1. its vector      x = {_numbers(s.x)}"),
        line(f"   projected to    q = {_numbers(s.q)}  what it looks for"),
        line(f"                   k = {_numbers(s.k)}  what it can be found by (key head {s.key_head})"),
        line(f"                   v = {_numbers(s.v)}  what it hands on"),
        line(f"2. scores q·k with every visible key, divided by {divisor}; 3. softmax; 4. weighted values:"),
        rows,
        line(
            f"   the weights add up to {s.total:.6f}; entropy {s.entropy:.2f} nats, "
            f"and {s.unscaled_entropy:.2f} without the division"
        ),
        line(f"   output          Σ weight · v = {_numbers(s.out)}"),
        line(f"   the engine's weights in the model's own pass differ by at most {s.error:.1e}", "dim"),
        _words_table(s),
    ]
    for look in s.words[:named]:
        parts += [line(text) for text in _said(look, word)]
    parts += [line(f"note: {visible(note)}", "yellow") for note in s.notes]
    parts.append(evidence_line(s.evidence, s.evidence_url))
    return parts


def _words_table(s: Steps) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.tables import percent
    from clearhead.cli.terminal import visible

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=Text(f"where {visible(s.token)!r} looks, over all heads"),
        title_justify="left",
    )
    table.add_column("word")
    table.add_column("strongest head")
    table.add_column("there", justify="right")
    table.add_column("mean", justify="right")
    table.add_column(f"{s.layer}.{s.head}", justify="right")
    table.add_column("deleted there", justify="right")
    table.add_column("deleted everywhere", justify="right")
    for look in s.words:
        moved = [percent(d.moved_at_token) if d else "–" for d in (look.one_head, look.every_head)]
        table.add_row(
            Text(visible(look.word)),
            f"layer {look.layer} head {look.head}",
            Text(percent(look.weight), style="bold"),
            percent(look.mean),
            percent(look.here),
            *moved,
        )
    if s.words and s.words[0].one_head:
        table.caption = Text(
            f"deleted: how much of the probability of the token after {visible(s.token)!r} moves when the "
            "word is hidden from that head, or from every head"
        )
        table.caption_justify = "left"
    return table


def _said(look: WordLook, word: str) -> list[str]:
    """In sentences: which head puts most of the token on a word, and what hiding the word does."""
    from clearhead.cli.tables import percent
    from clearhead.cli.terminal import token, visible

    others = ", ".join(f"{visible(name)} {percent(weight)}" for name, weight in look.others.items())
    lines = [
        f"layer {look.layer} head {look.head} puts {percent(look.weight)} of {word!r} on "
        f"{visible(look.word)!r}" + (f"; on the others: {others}" if others else "")
    ]
    for deletion in (look.one_head, look.every_head):
        if deletion is None:
            continue
        tokens = ", ".join(
            f"{token(t.text)} {t.before * 100:.1f}→{t.after * 100:.1f}%" for t in deletion.next_at_token
        )
        lines.append(
            f"{visible(look.word)!r} hidden from {deletion.where}: {percent(deletion.moved_at_token)} of the "
            f"probability of the token after {word!r} moves ({tokens}), "
            f"{percent(deletion.moved_at_end)} of that after the last token"
        )
    return lines
