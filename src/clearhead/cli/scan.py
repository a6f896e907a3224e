"""`clearhead scan`: files with text that pulls the heads, or that hides from its readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.look import Model

if TYPE_CHECKING:
    from clearhead.guard.file_scan import FileResult


def scan(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…|DIR…|-", help="Files, folders, or - for standard input.", show_default=False
        ),
    ],
    instruction: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|@FILE",
            help="What the model is asked to do with the text. Default: a chat's own messages, else "
            '"Answer the user\'s question about this text."',
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    sarif: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Also write SARIF 2.1.0; - prints that and nothing else."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page with the spans marked in the text.")
    ] = None,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Thresholds by their false-alarm rate: fpr_5, fpr_1.")
    ] = "fpr_5",
    confirm: Annotated[
        bool,
        typer.Option("--confirm", help="Hide the strongest span of alarmed texts, and show what changes."),
    ] = False,
    on_error: Annotated[
        str,
        typer.Option(
            "--on-error",
            metavar="closed|open",
            help="Whether a file that cannot be read or judged makes the exit code 2 (closed) or not (open).",
        ),
    ] = "closed",
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Of folders, only such files. Can be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Of folders, not such files. Can be repeated.")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Processes; each loads the model.")] = 1,
    most: Annotated[
        int, typer.Option("--max-bytes", metavar="N", min=1, help="Larger files are not read.")
    ] = 5_000_000,
    encoding: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of texts that are not UTF-8 and do not say what they are."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="text, markdown, html, mail, json, jsonl, csv or pdf, whatever the names say.",
        ),
    ] = None,
    scripts: Annotated[bool, typer.Option("--scripts", help="Scan scripts and styles of pages too.")] = False,
    notes: Annotated[
        bool,
        typer.Option("--notes", help="Show hidden text of honest kinds too: comments, preheaders, base64."),
    ] = False,
    model: Model = "smollm2",
) -> None:
    """Scan files for text that pulls a model's heads away from its task, and for text hidden from readers.

    Exit codes: 0 nothing found, 1 something found, 2 nothing found but a file could not be read or judged.
    """
    from clearhead import __version__
    from clearhead.cli.inputs import Texts
    from clearhead.cli.look import check_writable
    from clearhead.cli.scan_files import standard_input, targets
    from clearhead.cli.scan_table import file_view, summary
    from clearhead.cli.scan_work import Settings, load_detector, scan_all
    from clearhead.cli.tables import console
    from clearhead.cli.terminal import visible, write
    from clearhead.errors import ArgumentError
    from clearhead.guard.reading import KINDS
    from clearhead.report.sarif import to_sarif
    from clearhead.report.scan_html import render

    if on_error not in ("closed", "open"):
        raise ArgumentError(f"--on-error must be closed or open, got {on_error[:100]!r}")
    if kind is not None and kind not in ("text", *KINDS):
        raise ArgumentError(f"--kind must be text, {', '.join(KINDS)}, got {kind[:100]!r}")
    if as_json and sarif == "-":
        raise ArgumentError("--json and --sarif - both print to standard output; give --sarif a file")
    if files.count("-") + (instruction == "-") > 1:
        raise ArgumentError("standard input can be read once; - was given twice")
    texts = Texts()
    asked = None if instruction is None else texts.read("--instruction", instruction)[0]
    chosen = list(targets(files, include or [], exclude or []))
    read = [*texts.files, *(Path(t.path) for t in chosen if t.path != "-")]
    for option, path in (("--sarif", None if sarif in (None, "-") else Path(sarif)), ("--html", html)):
        if path is not None:
            check_writable(option, path, read)
    given = standard_input(most) if "-" in files else None
    settings = Settings(
        load_detector, {"model": model, "preset": preset},
        asked, confirm, most, encoding, kind, scripts,
    )  # fmt: skip
    quiet = as_json or sarif == "-"
    screen = console()
    kept: list[FileResult] = []
    with _progress(len(chosen)) as tell:
        for result in scan_all(chosen, settings, jobs, given):
            if not quiet and result.verdict != "skipped":
                screen.print(file_view(result, notes=notes), soft_wrap=True)
            tell(result.name)
            kept.append(result if html and result.hits else replace(result, document=None))
    failed = any(result.failed for result in kept) and on_error == "closed"
    code = 1 if any(result.found for result in kept) else 2 if failed else 0
    if sarif is not None:
        _write_sarif(sarif, to_sarif(kept, exit_code=code, notes=notes))
    if html is not None:
        html.write_text(render(kept, notes=notes), encoding="utf-8", newline="\n")
        typer.echo(f"report: {visible(str(html))}", err=True)
    if as_json:
        found = {"clearhead": __version__, "exit_code": code, "files": [r.to_dict() for r in kept]}
        write(json.dumps(found, ensure_ascii=True, allow_nan=False, indent=1) + "\n")
    elif not quiet:
        screen.print(summary(kept), soft_wrap=True)
    raise typer.Exit(code)


def _write_sarif(where: str, log: dict[str, Any]) -> None:
    from clearhead.cli.terminal import write

    text = json.dumps(log, ensure_ascii=True, allow_nan=False, indent=1) + "\n"
    if where == "-":
        write(text)
    else:
        Path(where).write_text(text, encoding="ascii")


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on a terminal's standard error, for several files."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from clearhead.cli.terminal import cell

    screen = Console(stderr=True)
    columns = (
        TextColumn("scanning", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    hidden = total < 2 or not screen.is_terminal
    with Progress(*columns, console=screen, transient=True, disable=hidden) as bars:
        task = bars.add_task("", total=total)
        yield lambda name: bars.update(task, advance=1, description=cell(name))
