"""Tell somebody how far a long piece of work has come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, float], None]
"""Called with what is being done now and the share of the whole that is done, 0.0 to 1.0."""


def silent(step: str, done: float) -> None:
    """Show nothing: for `progress=silent`."""


@contextmanager
def shown(title: str, progress: Progress | None = None) -> Iterator[Progress]:
    """Yield a `Progress`: the one given, or else a bar on standard error (plain lines without rich)."""
    if progress is not None:
        yield progress
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars
    except ImportError:
        yield lambda step, done: print(f"{title}: {done:4.0%} {step}", file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=1.0)
        yield lambda step, done: bars.update(task, completed=done, description=f"{title}: {step}")
