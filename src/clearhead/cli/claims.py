"""`clearhead claims`: what is claimed, where that was measured, and measuring it here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from types import ModuleType

claims = typer.Typer(
    help="The claims of docs/claims.md: list them, or measure them on this machine. Needs a checkout.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Checkout = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="The folder that holds benchmarks/ [where the package lies]."),
]


@claims.command("list", short_help="Every claim, and when and where it was measured.")
def list_claims(checkout: Checkout = None) -> None:
    """List the benchmarks behind the claims: by which name to run them, and where the figures are from."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.tables import console
    from clearhead.cli.terminal import cell, visible

    folder = _benchmarks(checkout)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("name", "claims", "what is measured", "measured"):
        table.add_column(heading)
    for name, run in _rows(folder).RUNS.items():
        found = _status(folder / "results" / f"{run.benchmark}.json")
        status = Text("not yet", style="yellow") if found is None else Text(visible(found, newline=" "))
        table.add_row(cell(name), ", ".join(run.claims), visible(run.measures, newline=" "), status)
    console().print(table)


@claims.command(
    "run",
    short_help="Measure claims on this machine and write them into docs/claims.md.",
    epilog="Example: clearhead claims run sinks",
)
def run_claims(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Names as `claims list` shows them, or claims: M7.")
    ],
    checkout: Checkout = None,
    quick: Annotated[bool, typer.Option(help="Small sizes: does it run. Nothing is written.")] = False,
) -> None:
    """Run the benchmark behind each name, and write docs/claims.md anew from all results.

    A benchmark takes minutes, some of them longer; each says on its page in benchmarks/ what it does. Ends
    with 1 if one fails, after the others have run.
    """
    import subprocess

    folder = _benchmarks(checkout)
    chosen = _chosen(names, _rows(folder).RUNS)
    failed = []
    for name, run in chosen.items():
        print(f"======== {name}: {run.measures}", file=sys.stderr)
        command = [sys.executable, str(folder / f"{run.benchmark}.py"), *(["--quick"] if quick else [])]
        if subprocess.run(command, check=False, cwd=folder.parent).returncode:
            failed.append(name)
    if not quick:
        command = [sys.executable, str(folder / "claims.py")]
        if subprocess.run(command, check=False, cwd=folder.parent).returncode:
            failed.append("docs/claims.md")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


def _benchmarks(checkout: Path | None) -> Path:
    """The folder with the benchmarks. Raises ArgumentError where there is none."""
    import clearhead
    from clearhead.errors import ArgumentError

    root = Path(clearhead.__file__).resolve().parents[2] if checkout is None else checkout
    folder = root / "benchmarks"
    if not (folder / "claim_rows.py").is_file():
        where = "beside the installed package" if checkout is None else f"in {checkout}"
        raise ArgumentError(
            f"--checkout: there is no benchmarks/claim_rows.py {where}; the claims are measured by the "
            "project's source tree: name the folder where you have it, --checkout PATH"
        )
    return folder.resolve()


def _rows(folder: Path) -> ModuleType:
    """The checkout's own list of what there is to run."""
    from importlib.util import module_from_spec, spec_from_file_location

    from clearhead.errors import ArgumentError

    spec = spec_from_file_location("clearhead_claim_rows", folder / "claim_rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "RUNS"):
        raise ArgumentError(f"--checkout: {folder / 'claim_rows.py'} is of another version: it has no RUNS")
    return module


def _status(path: Path) -> str | None:
    """When and on what a result was made; None if there is none."""
    import json

    from clearhead.errors import ClearheadError

    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        about = result["machine"]
        return (
            f"{result['date']}, {about['architecture']}, {about['cores']} cores, torch {about['torch']}, "
            f"transformers {about['transformers']}"
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClearheadError(
            f"{path} is no result of a benchmark: {type(error).__name__}: {error}"
        ) from error


def _chosen(names: list[str], runs: dict[str, Any]) -> dict[str, Any]:
    """The runs of these names or claims, each once. Raises ArgumentError for an unknown one."""
    from clearhead.errors import ArgumentError

    known = {claim for run in runs.values() for claim in run.claims}
    found: dict[str, Any] = {}
    for name in names:
        if name in runs:
            found[name] = runs[name]
        elif name.upper() in known:
            found |= {key: run for key, run in runs.items() if name.upper() in run.claims}
        else:
            raise ArgumentError(
                f"NAME must be one of {', '.join(runs)}, or a claim ({', '.join(sorted(known))}), "
                f"got {name[:60]!r}"
            )
    return found
