"""Long work with its progress shown: loading a model, looking at a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.look.result import Look
    from clearhead.models.loading import LoadedModel
    from clearhead.models.prompt import Segment


def load_model(name: str) -> LoadedModel:
    """Load a model by name; the bar is on standard error."""
    from clearhead.models.loading import load

    return load(name)


def run_look(
    loaded: LoadedModel,
    sources: Sequence[Segment],
    *,
    query: str = "last",
    layers: Sequence[int] | None = None,
    maps: bool = False,
    command: str = "",
) -> Look:
    """Look at a prompt; the bar is on standard error, and only for long prompts."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from clearhead.look.looking import look
    from clearhead.models.prompt import Prompt

    prompt = Prompt(sources, loaded.tokenizer)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=len(prompt) < 1000,
    ) as bars:
        count = len(layers) if layers is not None else loaded.model.config.num_hidden_layers
        task = bars.add_task(f"looking at {len(prompt)} tokens", total=count)
        return look(
            loaded,
            prompt,
            query=query,
            layers=layers,
            map_weights=_room(len(prompt)) if maps else 0,
            progress=lambda done: bars.update(task, completed=done),
            command=command,
        )


def _room(tokens: int) -> int:
    """How many weights a report keeps: some 5 MB of them, or 14 MB where that is only a few queries."""
    return 6_000_000 if tokens < 3000 else 16_000_000
