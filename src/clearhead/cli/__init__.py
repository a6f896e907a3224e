"""The command line: one file per command, nothing heavy loaded before a command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from clearhead.errors import ClearheadError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `clearhead`. Exits with 0, with 2 for bad usage or bad input, with 130 when stopped by Ctrl-C."""
    try:
        import typer

        from clearhead.cli.app import app
    except ImportError as error:
        name = error.name or "a package"
        print(f"error: the command line needs {name}: pip install 'clearhead[report]'", file=sys.stderr)
        sys.exit(2)
    usage_error = typer.BadParameter.__mro__[2]  # click's ClickException, which typer brings along
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except ClearheadError as error:
        from clearhead.cli.terminal import visible

        print(f"error: {visible(str(error))}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if not isinstance(error, usage_error):
            raise
        error.show()  # type: ignore[attr-defined]
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)
