"""`clearhead stream`: text without end from a long text, in a cache that does not grow."""

from __future__ import annotations

from typing import Annotated

import typer

from clearhead.cli import options as o
from clearhead.cli.look import Model


def stream(
    text: Annotated[
        str, typer.Argument(metavar="FILE", help="The text to go on from, or - for standard input.")
    ],
    model: Model = "smollm2",
    most: Annotated[
        int | None, typer.Option("--max-new-tokens", metavar="N", min=1, help="Stop after so many [never].")
    ] = None,
    cache: Annotated[str, typer.Option("--cache", metavar="NAME", help="sink or sliding.")] = "sink",
    window: o.Window = None,
    sinks: o.Sinks = None,
    temperature: o.Temperature = 0.8,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Say after so many tokens how fast and how large it is.")
    ] = 500,
    plain: o.Plain = False,
    as_json: o.AsJson = False,
) -> None:
    """Go on from a long text without end, in bounded memory (Xiao et al. 2023).

    The text is read in pieces and may be longer than the model's positions. Of it and of what is written the
    cache keeps the newest tokens, and with sink the first few, where heads rest. The model's end token ends
    nothing here. Memory and tokens/s go to standard error; Ctrl-C leaves the text so far.
    """
    from clearhead.cli.inputs import Texts
    from clearhead.cli.run import load_model
    from clearhead.cli.streaming import groups_of, screen, show
    from clearhead.errors import ArgumentError
    from clearhead.generation.caches import WINDOW, make_cache
    from clearhead.generation.generating import generate
    from clearhead.generation.sampling import Sampler
    from clearhead.models.prompt import Prompt, Segment
    from clearhead.observables import SegmentMass

    if cache not in ("sink", "sliding"):
        raise ArgumentError(f"--cache must be sink or sliding, got {cache[:100]!r}: others grow without end")
    keywords = o.cache_options(cache, window, sinks)
    Sampler(temperature, top_k, top_p, seed)  # says what is wrong before the model is loaded
    read, _ = Texts().read("FILE", "-" if text == "-" else f"@{text}")
    if not read:
        raise ArgumentError("FILE: the text is empty, there is nothing to go on from")
    loaded = load_model(model)
    prompt = Prompt.plain([Segment("text", "user", read)], loaded.tokenizer)
    generation = generate(
        loaded,
        prompt,
        max_new_tokens=most,
        cache=make_cache(cache, loaded.model, **keywords),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        observe=None if plain else SegmentMass,
        ignore_end=True,
        prefill_chunk=max(1, (window or WINDOW) // 2),
        keep=False,
    )
    groups = [] if plain else groups_of(prompt, generation.sources)
    show(generation, screen(groups, as_json=as_json, model=loaded.name), every=every)
