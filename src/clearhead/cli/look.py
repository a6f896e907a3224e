"""`clearhead look`: how much of the attention each source gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

Query = Annotated[
    str,
    typer.Option(
        help="Whose attention: last (the token the answer starts from), all, or a text of the prompt."
    ),
]
Model = Annotated[str, typer.Option(help="A hub id, a local folder, or smollm2, which is embedded.")]


def look(
    chat: Annotated[
        str | None, typer.Argument(help='A JSON chat file, [{"role": …, "content": …}], or - for stdin.')
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt: TEXT, @FILE, or - for stdin.")] = None,
    user: Annotated[str | None, typer.Option(help="What the user says: TEXT, @FILE, or -.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text from elsewhere, not to be trusted: TEXT, @FILE, or -. Can be repeated."),
    ] = None,
    model: Model = "smollm2",
    query: Query = "last",
    layers: Annotated[
        str | None, typer.Option(help="Layers to look at, such as 3,5-8. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write a report, one file that needs no network.")
    ] = None,
) -> None:
    """Show how much attention each source of a prompt gets, in a real model, exactly."""
    from clearhead.cli.inputs import numbers, segments
    from clearhead.cli.run import load_model, run_look

    sources = segments(chat, system, user, data or [])
    chosen = numbers("--layers", layers)
    loaded = load_model(model)
    found = run_look(loaded, sources, query=query, layers=chosen, maps=html is not None, command=_command())
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), ensure_ascii=True, indent=1) + "\n")
    else:
        from clearhead.cli.tables import console, look_view

        console().print(look_view(found))
    if html is not None:
        from clearhead.report import write

        write(found, html)
        typer.echo(f"report: {html}", err=True)


def _command() -> str:
    import shlex

    return shlex.join(["clearhead", *sys.argv[1:]])
