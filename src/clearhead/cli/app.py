"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from clearhead import __version__
from clearhead.cli.chat import chat
from clearhead.cli.claims import claims
from clearhead.cli.demo import demo
from clearhead.cli.doctor import doctor
from clearhead.cli.generate import generate
from clearhead.cli.guard import guard
from clearhead.cli.look import look
from clearhead.cli.scan import scan
from clearhead.cli.steps import steps
from clearhead.cli.stream import stream

app = typer.Typer(
    name="clearhead",
    help="Attention you can see through: what the heads of a language model look at, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"clearhead {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command(
    short_help="How much attention each source of a prompt gets.",
    epilog="Example: clearhead look --system 'Be brief.' --user 'Who?' --data @page.txt --html look.html",
)(look)
app.command(
    short_help="Files with text that pulls the heads, or hides from readers.",
    epilog="Example: clearhead scan mails/ --exclude '*.png' --sarif scan.sarif",
)(scan)
app.command(
    short_help="The mechanism on a real head, step by step.",
    epilog='Example: clearhead steps "The animal slept because it was tired." --token it',
)(steps)
app.command(
    short_help="An answer as it comes, and what each token looked at.",
    epilog="Example: clearhead generate --user 'Who wrote this?' --data @page.txt --stop '.'",
)(generate)
app.command(short_help="A conversation that keeps its cache.")(chat)
app.command(
    short_help="Text without end from a long text, in bounded memory.",
    epilog="Example: clearhead stream novel.txt --window 512 --seed 1",
)(stream)
app.command(short_help="One web page, plain and with a planted instruction, side by side.")(demo)
app.add_typer(guard, name="guard")
app.add_typer(claims, name="claims")
app.command(short_help="What attention runs on here, and what is wrong with it.")(doctor)
