"""`clearhead look`: how much of the attention each source gets."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

#: How a text is given: typed, from a file, from standard input; @@x is the text "@x".
SOURCE = "TEXT|@FILE|-"

Query = Annotated[
    str,
    typer.Option(
        metavar="last|all|TEXT",
        help="Whose attention: last (the token the answer starts from), all, or a text of the prompt.",
    ),
]
Model = Annotated[
    str, typer.Option(metavar="NAME", help="A hub id, a local folder, or smollm2, which is embedded.")
]


def look(
    chat: Annotated[
        str | None,
        typer.Argument(
            metavar="CHAT", help='A JSON chat file, [{"role": …, "content": …}], or - for standard input.'
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar=SOURCE, help="The system prompt.")] = None,
    user: Annotated[str | None, typer.Option(metavar=SOURCE, help="What the user says.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar=SOURCE,
            help="Text from elsewhere, not to be trusted: a web page, a file. Can be repeated.",
        ),
    ] = None,
    model: Model = "smollm2",
    query: Query = "last",
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Layers to look at, such as 3,5-8. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a report, one page that needs no network.")
    ] = None,
    guard: Annotated[
        bool | None,
        typer.Option(
            "--guard/--no-guard",
            help="Judge the untrusted texts too. Default: where the model has a calibration.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The guard's calibration, from `clearhead guard calibrate`."),
    ] = None,
) -> None:
    """Show how much attention each source of a prompt gets, in a real model, exactly.

    With untrusted texts (--data, tool results) and an instruction, the guard says which sentence pulls the
    heads away from it. A text is typed, read from a file (@FILE) or from standard input (-); @@x is the text
    "@x".
    """
    from clearhead.cli.inputs import Texts, numbers, segments
    from clearhead.cli.run import find_guard, load_model, run_look
    from clearhead.cli.terminal import visible, write
    from clearhead.errors import ArgumentError, GuardError
    from clearhead.guard.calibration import read_calibration

    if guard is False and calibration is not None:
        raise ArgumentError("--calibration is for the guard, which --no-guard leaves out")

    texts = Texts()
    sources = segments(chat, system, user, data or [], texts)
    if html is not None:
        check_writable("--html", html, texts.files)
    chosen = numbers("--layers", layers)
    if calibration is not None:
        read_calibration(calibration)  # an error before the long work
    if guard and all(s.trusted for s in sources):
        raise GuardError("--guard: the prompt has no untrusted text to judge: give one with --data")
    loaded = load_model(model)
    judge = None if guard is False else find_guard(loaded, sources, calibration, must=bool(guard))
    found = run_look(
        loaded, sources, query=query, layers=chosen, maps=html is not None, command=_command(), guard=judge
    )
    if guard and found.guard is None:
        raise GuardError(f"--guard: {found.notes[-1]}")
    if html is not None:  # before anything is printed: the reader of a pipe may leave
        from clearhead.report import write as write_report

        write_report(found, html)
        typer.echo(f"report: {visible(str(html))}", err=True)
    if as_json:
        write(json.dumps(found.to_dict(), ensure_ascii=True, allow_nan=False, indent=1) + "\n")
    else:
        from clearhead.cli.pull_table import pull_view
        from clearhead.cli.tables import console, look_view

        screen = console()
        screen.print(look_view(found))
        if found.guard is not None:
            screen.print(pull_view(found.guard))


def check_writable(option: str, path: Path, read: Sequence[Path] = ()) -> None:
    """Raise ArgumentError, before the long work, for a file that cannot be written or that is being read."""
    import os

    from clearhead.errors import ArgumentError

    folder = path.parent
    if str(path) in ("-", "."):
        raise ArgumentError(f"{option} must be the name of a file, got {str(path)!r}")
    if os.path.isdir(path):
        raise ArgumentError(f"{option}: {path} is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise ArgumentError(f"{option}: there is no folder {folder}; make it first")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ArgumentError(f"{option}: {path} cannot be written: permission denied")
    if any(os.path.exists(path) and path.samefile(file) for file in read):
        raise ArgumentError(f"{option}: {path} is one of the files that are read; name another")


def _command() -> str:
    import shlex

    return shlex.join(["clearhead", *sys.argv[1:]])
