"""`clearhead chat`: a conversation with a model, and what each token of its answers looked at."""

from __future__ import annotations

import sys

from clearhead.cli import options as o
from clearhead.cli.look import Model

#: What is not said to the model.
COMMANDS = "/reset forgets the conversation, /quit (or Ctrl-D) ends it"


def chat(
    system: o.System = None,
    model: Model = "smollm2",
    most: o.Most = 512,
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
    """Talk with a model; what was said before stays in its cache and is not computed again.

    One line is one message; /reset forgets the conversation, /quit or Ctrl-D ends it. Ctrl-C while the model
    answers ends that answer, at the prompt it ends the chat. The strips below the words show, as in generate,
    which source each token's attention went to; earlier turns are one source per role.
    """
    from clearhead.cli.inputs import Texts
    from clearhead.cli.run import load_model
    from clearhead.errors import ArgumentError
    from clearhead.generation.caches import make_cache
    from clearhead.generation.conversation import Conversation
    from clearhead.generation.sampling import Sampler
    from clearhead.observables import SegmentMass

    if sys.stdin is None:
        raise ArgumentError("standard input is closed: a chat reads what is said from it")
    said_by_system = None if system is None else Texts().read("--system", system)[0]
    keywords = o.cache_options(cache, window, sinks)
    if cache == "paged":
        raise ArgumentError("--cache: a chat has no length to reserve pages for; paged is for generate")
    Sampler(temperature, top_k, top_p, seed)  # says what is wrong before the model is loaded
    loaded = load_model(model)
    conversation = Conversation(
        loaded,
        system=said_by_system,
        cache=lambda: make_cache(cache, loaded.model, **keywords),
        max_new_tokens=most,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        observe=None if plain else SegmentMass,
    )
    interactive = sys.stdin.isatty()
    if interactive:
        print(COMMANDS, file=sys.stderr)
    while (line := _line(interactive)) is not None:
        if line == "/quit":
            break
        if line == "/reset":
            conversation.reset()
            print("forgotten", file=sys.stderr)
        elif line.startswith("/"):
            print(f"there is no such command; {COMMANDS}", file=sys.stderr)
        elif line:
            _answer(conversation, line, plain=plain, as_json=as_json, model=loaded.name)


def _line(interactive: bool) -> str | None:
    """The next line, without spaces around it; None at the end."""
    from clearhead.errors import PromptError

    if interactive:
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (a line that can be edited)
        try:
            return input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return None
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text: {error.reason}") from error
    return line.strip() if line else None


def _answer(conversation: object, line: str, *, plain: bool, as_json: bool, model: str) -> None:
    from clearhead.cli.streaming import groups_of, screen, show
    from clearhead.cli.terminal import visible
    from clearhead.errors import ClearheadError
    from clearhead.generation.conversation import Conversation

    assert isinstance(conversation, Conversation)
    try:
        answer = conversation.say(line)
    except ClearheadError as error:  # too long, say: the chat goes on, after /reset
        print(visible(f"error: {error}"), file=sys.stderr)
        return
    assert conversation.prompt is not None
    groups = [] if plain else groups_of(conversation.prompt, answer.sources, by_role=True)
    try:
        show(answer, screen(groups, as_json=as_json, model=model))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
