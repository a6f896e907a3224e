"""`clearhead generate`: an answer as it comes, and what each of its tokens looked at."""

from __future__ import annotations

from clearhead.cli import options as o
from clearhead.cli.look import Model


def generate(
    chat: o.Chat = None,
    system: o.System = None,
    user: o.User = None,
    data: o.Data = None,
    model: Model = "smollm2",
    most: o.Most = 256,
    cache: o.CacheName = "dynamic",
    window: o.Window = None,
    sinks: o.Sinks = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    plain: o.Plain = False,
    as_json: o.AsJson = False,
) -> None:
    """Answer a prompt, token by token, and show what each new token looked at.

    In a terminal with colours every token has a strip below it: which source its attention went to. Elsewhere
    there is the text and a table. Greedy, unless --temperature, --top-k, --top-p or --seed is given. Speed
    goes to standard error. Ctrl-C leaves the text so far.
    """
    from clearhead.cli.inputs import Texts, segments
    from clearhead.cli.run import load_model
    from clearhead.cli.streaming import groups_of, screen, show
    from clearhead.generation.caches import make_cache
    from clearhead.generation.generating import generate as start
    from clearhead.generation.sampling import Sampler
    from clearhead.models.layout import lay_out
    from clearhead.observables import SegmentMass

    sources = segments(chat, system, user, data or [], Texts(), purpose="answer")
    keywords = o.cache_options(cache, window, sinks)
    Sampler(temperature, top_k, top_p, seed)  # says what is wrong before the model is loaded
    loaded = load_model(model)
    prompt, _ = lay_out(sources, loaded.tokenizer)
    generation = start(
        loaded,
        prompt,
        max_new_tokens=most,
        cache=make_cache(cache, loaded.model, tokens=len(prompt) + most, **keywords),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        observe=None if plain else SegmentMass,
    )
    groups = [] if plain else groups_of(prompt, generation.sources)
    show(generation, screen(groups, as_json=as_json, model=loaded.name))
