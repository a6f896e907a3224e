"""The options that the generating commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from clearhead.cli.look import SOURCE

Chat = Annotated[
    str | None,
    typer.Argument(
        metavar="CHAT", help='A JSON chat file, [{"role": …, "content": …}], or - for standard input.'
    ),
]
System = Annotated[str | None, typer.Option(metavar=SOURCE, help="The system prompt.")]
User = Annotated[str | None, typer.Option(metavar=SOURCE, help="What the user says.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar=SOURCE, help="Text from elsewhere, not to be trusted: a web page, a file. Can be repeated."
    ),
]
Most = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=1, help="At most so many new tokens.")
]
CacheName = Annotated[
    str, typer.Option("--cache", metavar="NAME", help="dynamic, sliding, sink, int8, heavy or paged.")
]
Window = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="How many tokens the caches sliding, sink and heavy keep [1024]."),
]
Sinks = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="How many first tokens the cache sink keeps besides [4]."),
]
Temperature = Annotated[
    float | None,
    typer.Option(metavar="T", help="Draw tokens at random, the logits divided by T. 0: the likeliest."),
]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="Draw from the K likeliest only.")]
TopP = Annotated[
    float | None, typer.Option("--top-p", metavar="P", help="Draw from the likeliest that together have P.")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Where the random numbers start.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text. Can be repeated.")
]
Plain = Annotated[
    bool, typer.Option("--no-look", help="Show the text alone, and ask no head what it looked at.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a line of JSON per token, and one at the end.")]


def cache_options(name: str, window: int | None, sinks: int | None) -> dict[str, Any]:
    """Return the keywords of `make_cache`. Raises ArgumentError for what the cache does not take."""
    from clearhead.errors import ArgumentError
    from clearhead.generation.caches import BOUNDED, NAMES

    if name not in NAMES:
        raise ArgumentError(f"--cache must be one of {', '.join(NAMES)}, got {name[:100]!r}")
    if window is not None and name not in BOUNDED:
        raise ArgumentError(f"--window is for the caches {', '.join(BOUNDED)}; {name} keeps all tokens")
    if sinks is not None and name != "sink":
        raise ArgumentError(f"--sinks is for --cache sink, got --cache {name}")
    return {k: v for k, v in (("window", window), ("sinks", sinks)) if v is not None}
