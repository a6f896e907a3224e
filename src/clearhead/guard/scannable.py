"""What a scan takes: an instruction and texts, checked before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clearhead.errors import ArgumentError, GuardError
from clearhead.models.prompt import Segment

LARGEST = 5_000_000
"""Characters of all sources together that one scan takes; more is an error, not a cut."""

NO_INSTRUCTION = "Answer the user's question about this text."
"""What the texts are laid out with where nobody said what they are for."""

Sources = str | Mapping[str, str] | Sequence[Segment]


def checked(instruction: str | None, sources: Sources) -> tuple[str, list[tuple[str, str]]]:
    """Return the instruction, and (name, text) of every source that is to be scanned.

    Raises ArgumentError for other types and for two segments of one name, GuardError for an empty
    instruction, more than `LARGEST` characters and half characters.
    """
    if instruction is None:
        instruction = NO_INSTRUCTION
    if not isinstance(instruction, str):
        raise ArgumentError(f"instruction must be a str or None, got {type(instruction).__name__}")
    if not instruction.strip():
        raise GuardError(
            "instruction must say what the text is for, got an empty text; None stands for "
            f"{NO_INSTRUCTION!r}"
        )
    if isinstance(sources, str):
        named = [("text", sources)]
    elif isinstance(sources, Mapping):
        named = list(sources.items())
    elif isinstance(sources, Sequence) and all(isinstance(s, Segment) for s in sources):
        segments = [s for s in sources if isinstance(s, Segment)]
        named = [(s.name, s.text) for s in segments if not s.trusted]
    else:
        raise ArgumentError(
            f"sources must be a str, a mapping of names to texts, or segments, got {type(sources).__name__}"
        )
    for name, text in named:
        if not isinstance(name, str) or not isinstance(text, str):
            raise ArgumentError(
                f"sources must map str to str, got {type(name).__name__} to {type(text).__name__}"
            )
    names = {name for name, _ in named}
    if len(names) < len(named):
        raise ArgumentError(f"sources must have different names, got {len(named)} with {len(names)} names")
    size = sum(len(text) for _, text in named)
    if size > LARGEST:
        raise GuardError(
            f"sources have {size:,} characters together, at most {LARGEST:,} are scanned at once: scan parts"
        )
    broken = next((name for name, text in named if any("\ud800" <= c <= "\udfff" for c in text)), None)
    if broken is not None:
        raise GuardError(
            f"source {broken!r} holds half a character (a lone surrogate), which no tokenizer reads"
        )
    return instruction, named
