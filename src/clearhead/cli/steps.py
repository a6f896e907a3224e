"""`clearhead steps`: the mechanism on one head of a real model, with live numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.look import Model

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clearhead.look.steps import Steps, WordLook


def steps(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="A sentence.")],
    token: Annotated[str, typer.Option(metavar="WORD", help="A word of it: whose attention?")],
    on: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="A word to ask about. Can be repeated. Default: all it can see."),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="The layer to walk through. Default: the strongest head's."),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", help="The head to walk through. Default: the one that looks most at the word."
        ),
    ] = None,
    model: Model = "smollm2",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Walk the mechanism on a real head: q, k, v, scores, softmax, values, and what a word matters."""
    from clearhead.cli.run import load_model
    from clearhead.cli.terminal import write
    from clearhead.look.steps import steps as walk

    found = walk(load_model(model), text, token=token, on=on or (), layer=layer, head=head)
    if as_json:
        write(json.dumps(found.to_dict(), ensure_ascii=True, allow_nan=False, indent=1) + "\n")
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
    from rich.text import Text

    from clearhead.cli.tables import evidence_line
    from clearhead.cli.terminal import cell, visible

    def line(text: str, style: str = "") -> Text:
        return Text(text, style=style)

    word = cell(s.token)
    sink = f" and the head's learned sink, which is no token, gets {s.sink:.6f}" if s.sink else ""
    parts: list[RenderableType] = [
        line(f"{cell(s.model, 80)}, layer {s.layer}, head {s.head}, the token {word!r}", "bold"),
        line(f"1. its vector      x = {_numbers(s.x)}"),
        line(f"   projected to    q = {_numbers(s.q)}  what it looks for"),
        line(f"                   k = {_numbers(s.k)}  what it can be found by (key head {s.key_head})"),
        line(f"                   v = {_numbers(s.v)}  what it hands on"),
        line(f"2. scores q·k with every visible key, {_fitted(s)}; 3. softmax; 4. weighted values:"),
        _rows_table(s),
        line(
            f"   the weights add up to {s.total:.6f}{sink}; entropy {s.entropy:.2f} nats"
            + (f", and {s.unscaled_entropy:.2f} without the division" if s.scale != 1 else "")
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


def _fitted(s: Steps) -> str:
    """What is done to the scores before the softmax, in words."""
    if abs(s.scale - s.d**-0.5) < 1e-9:
        done = f"divided by √{s.d} = {s.d**0.5:.4g}"
    else:
        done = "not divided by anything" if s.scale == 1 else f"divided by {1 / s.scale:.4g}"
    if s.softcap is not None:
        done += f", capped to {s.softcap:g} · tanh(score / {s.softcap:g})"
    return done + (", plus the model's bias" if s.biased else "")


def _rows_table(s: Steps) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.tables import percent
    from clearhead.cli.terminal import cell

    plain = abs(s.scale - s.d**-0.5) < 1e-9 and s.softcap is None and not s.biased
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("word")
    for name in ("q·k", "÷ √d" if plain else "to softmax", "weight"):
        rows.add_column(name, justify="right")
    if s.scale != 1:
        rows.add_column("without ÷ √d" if plain else "undivided", justify="right")
    rows.add_column("|v|", justify="right")
    rows.add_column("|weight · v|", justify="right")
    for row in s.rows:
        rows.add_row(
            Text(cell(row.word)),
            f"{row.score:.2f}",
            f"{row.scaled:.2f}",
            Text(percent(row.weight), style="bold"),
            *([percent(row.unscaled_weight)] if s.scale != 1 else []),
            f"{row.value:.2f}",
            f"{row.part:.2f}",
        )
    return rows


def _words_table(s: Steps) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.tables import percent
    from clearhead.cli.terminal import cell

    deletion = any(look.one_head for look in s.words)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=Text(f"where {cell(s.token)!r} looks, over all heads"),
        title_justify="left",
    )
    table.add_column("word")
    table.add_column("strongest head")
    table.add_column("there", justify="right")
    table.add_column("mean", justify="right")
    table.add_column(f"in {s.layer}.{s.head}", justify="right")
    if deletion:
        table.add_column("deleted there", justify="right")
        table.add_column("deleted everywhere", justify="right")
    for look in s.words:
        moved = [percent(d.moved_at_token) if d else "–" for d in (look.one_head, look.every_head)]
        table.add_row(
            Text(cell(look.word)),
            f"layer {look.layer} head {look.head}",
            Text(percent(look.weight), style="bold"),
            percent(look.mean),
            percent(look.here),
            *(moved if deletion else []),
        )
    if deletion:
        table.caption = Text(
            f"deleted: how much of the probability of what comes after {cell(s.token)!r} moves to other "
            "tokens when the word is hidden from all later tokens in that head, or in every head; the first "
            "word, where heads rest, and the word just before come last"
        )
        table.caption_justify = "left"
    return table


def _said(look: WordLook, word: str) -> list[str]:
    """In sentences: which head puts most of the token on a word, and what hiding the word does."""
    from clearhead.cli.tables import percent
    from clearhead.cli.terminal import cell, token

    others = ", ".join(f"{cell(other.word)} {percent(other.weight)}" for other in look.others[:10])
    lines = [
        f"layer {look.layer} head {look.head} puts {percent(look.weight)} of {word!r} on {cell(look.word)!r}"
        + (f"; on the others: {others}" if others else "")
    ]
    for deletion in (look.one_head, look.every_head):
        if deletion is None:
            continue
        tokens = ", ".join(
            f"{token(t.text)} {t.before * 100:.1f}→{t.after * 100:.1f}%" for t in deletion.next_at_token
        )
        lines.append(
            f"{cell(look.word)!r} hidden in {deletion.where}: {percent(deletion.moved_at_token)} of the "
            f"probability of the token after {word!r} moves ({tokens}), "
            f"{percent(deletion.moved_at_end)} of that after the last token"
        )
    return lines
