"""Long work with its progress shown on standard error: loading a model, looking at a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from clearhead.guard.detector import InjectionDetector
    from clearhead.look.result import Look
    from clearhead.models.loading import LoadedModel
    from clearhead.models.prompt import Segment

#: A shorter prompt is looked at before a bar could be read.
LONG = 1000


@contextmanager
def _bars(*, shown: bool = True) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    screen = Console(stderr=True)
    hidden = not shown or not screen.is_terminal  # a log file gets no empty lines
    with Progress(*columns, console=screen, transient=True, disable=hidden) as bars:
        yield bars


def load_model(name: str) -> LoadedModel:
    """Load a model by name."""
    from clearhead.cli.terminal import cell

    with _bars() as bars:
        title = f"loading {cell(name)}"
        task = bars.add_task(title, total=None)

        def tell(step: str, done: float) -> None:
            bars.update(task, description=f"{title}: {step}", total=1.0, completed=done)

        from clearhead.models.loading import load

        return load(name, progress=tell)


def run_look(
    loaded: LoadedModel,
    sources: Sequence[Segment],
    *,
    query: str = "last",
    layers: Sequence[int] | None = None,
    maps: bool = False,
    command: str = "",
    guard: InjectionDetector | str | None = None,
) -> Look:
    """Look at a prompt; the bar is shown only for long prompts.

    guard: judges the untrusted texts, where there are any and an instruction; a text: why it does not.
    """
    from dataclasses import replace

    from clearhead.errors import GuardError, PromptError
    from clearhead.look.looking import look
    from clearhead.look.pulling import pull
    from clearhead.models.fit import size
    from clearhead.models.layout import lay_out

    prompt, notes = lay_out(sources, loaded.tokenizer)
    with _bars(shown=len(prompt) >= LONG) as bars:
        count = len(layers) if layers is not None else size(loaded.model).layers
        task = bars.add_task(f"looking at {len(prompt)} tokens", total=count)
        found = look(
            loaded,
            prompt,
            query=query,
            layers=layers,
            map_weights=_room(len(prompt)) if maps else 0,
            progress=lambda done: bars.update(task, completed=done),
            notes=notes,
            command=command,
        )
        if guard is None:
            return found
        why = guard
        if not isinstance(guard, str):
            bars.reset(task, description="the guard reads the untrusted texts", total=None)
            try:
                return replace(found, guard=pull(guard, prompt))
            except (GuardError, PromptError) as error:  # an instruction that leaves no room for the texts
                why = str(error)
        return replace(found, notes=(*found.notes, f"no verdict of the guard: {why}"))


def find_guard(
    loaded: LoadedModel, sources: Sequence[Segment], calibration: Path | None = None, *, must: bool = False
) -> InjectionDetector | str:
    """Return a detector for the model, or why there is none.

    calibration: a file; None: the one in the package. must: raise GuardError or ModelError instead; a file
    that does not fit is an error in any case.
    """
    from clearhead.errors import GuardError, ModelError
    from clearhead.guard.detector import InjectionDetector

    if not must and calibration is None and all(s.trusted for s in sources):
        return "the prompt has no untrusted text to judge"
    try:
        return InjectionDetector.load(loaded, calibration=calibration)
    except (GuardError, ModelError) as error:
        if must or calibration is not None:
            raise
        return str(error)


def answer(loaded: LoadedModel, sources: Sequence[Segment], *, tokens: int = 24) -> str:
    """Return the beginning of the model's greedy answer; empty for a model that writes none."""
    import torch

    from clearhead.models.fit import continues
    from clearhead.models.layout import lay_out

    if not continues(loaded.model):
        return ""
    prompt, _ = lay_out(sources, loaded.tokenizer)
    inputs = {name: tensor.to(loaded.model.device) for name, tensor in prompt.inputs.items()}
    with torch.inference_mode():
        out = loaded.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(loaded.tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)).strip()


def _room(tokens: int) -> int:
    """How many weights a report keeps: some 5 MB of file at most, 14 MB where that is only a few queries."""
    return 3_000_000 if tokens < 3000 else 16_000_000
