"""Sets of labelled texts from a path that the user has: which set it is, and its samples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.loaders import (
    activations,
    bipia,
    deepset,
    injecagent,
    llmail,
    notinject,
    plain,
)  # fmt: skip
from clearhead.guard.evaluate.loaders.options import Options
from clearhead.guard.samples import Sample

__all__ = ["KINDS", "Options", "load_set", "thinned"]

#: By name, in the order in which a path is asked whose it is.
KINDS: dict[str, ModuleType] = {
    "plain": plain,
    "bipia": bipia,
    "notinject": notinject,
    "llmail": llmail,
    "injecagent": injecagent,
    "pishield": activations,
    "tasktracker": activations,
    "deepset": deepset,
}


def load_set(path: str | Path, kind: str | None = None, options: Options | None = None) -> list[Sample]:
    """Return the samples of a set that lies at a path, a file or a folder.

    kind: one of `KINDS`, or None to recognise it.

    Raises ArgumentError where nothing lies there, where it is none of the known sets (the message says what
    each was looked for by), where it is broken, and where it holds no text.
    """
    place = Path(path).expanduser()
    if kind is not None and kind not in KINDS:
        raise ArgumentError(f"kind must be one of {', '.join(KINDS)}, got {kind[:60]!r}")
    if not place.exists():
        raise ArgumentError(f"{place} does not exist: a set is read from a file or folder that you have")
    name = kind or next((name for name, loader in KINDS.items() if loader.recognised(place)), None)
    if name is None:
        looked = "".join(f"\n  {name}: {text}" for name, text in _looked().items())
        raise ArgumentError(f"{place} is no set that is known here; looked for:{looked}")
    if kind is not None and not KINDS[kind].recognised(place):
        raise ArgumentError(f"{place} does not look like {kind}: {KINDS[kind].LOOKS_FOR}")
    samples: list[Sample] = KINDS[name].load(place, options or Options())
    if not samples:
        raise ArgumentError(f"{place} holds no text")
    return samples


def _looked() -> dict[str, str]:
    out: dict[str, str] = {}
    for name, loader in KINDS.items():
        if loader.LOOKS_FOR not in out.values():
            out[name] = loader.LOOKS_FOR
    return out


def thinned(samples: Sequence[Sample], limit: int | None, seed: int = 0) -> list[Sample]:
    """Return at most about `limit` samples: whole contexts, drawn at random, in their order.

    At least one context is kept.
    """
    if limit is None or len(samples) <= limit:
        return list(samples)
    by_context: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        by_context.setdefault(sample.context, []).append(number)
    contexts = list(by_context)
    random.Random(seed).shuffle(contexts)
    kept: list[int] = []
    for context in contexts:
        if kept and len(kept) + len(by_context[context]) > limit:
            continue
        kept += by_context[context]
    return [samples[number] for number in sorted(kept)]
