"""The command line: one file per command, nothing heavy loaded before a command runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

from clearhead.errors import ClearheadError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `clearhead`. Exits with 0, with 2 for bad usage or bad input, with 130 when stopped by Ctrl-C.

    A reader who closes the pipe early (`| head`) is no error.
    """
    try:
        sys.exit(_run(arguments))
    except KeyboardInterrupt:
        _say("stopped")
        sys.exit(130)


def _run(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):  # a terminal without × and √ shows them as escapes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        import typer

        from clearhead.cli.app import app
    except ImportError as error:
        _say(f"error: the command line needs {error.name or 'a package'}: pip install 'clearhead[report]'")
        return 2
    usage_error = typer.BadParameter.__mro__[2]  # click's ClickException, which typer brings along
    try:
        code: Any = app(
            args=None if arguments is None else list(arguments), prog_name="clearhead", standalone_mode=False
        )
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # while typer printed the help
            return 0
        raise
    except ClearheadError as error:
        _say(f"error: {error}")
        return 2
    except Exception as error:
        if not isinstance(error, usage_error):
            raise
        shown = io.StringIO()
        error.show(file=shown)  # type: ignore[attr-defined]
        _say(shown.getvalue().rstrip())
        return 2
    if code == 130:  # what typer makes of Ctrl-C
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _say(message: str) -> None:
    from clearhead.cli.terminal import visible

    if sys.stderr is not None:
        print(visible(message), file=sys.stderr)
