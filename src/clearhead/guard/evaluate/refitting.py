"""The detector's own read-out, fitted anew without what is judged; what was read is kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from clearhead.errors import ArgumentError
from clearhead.guard.calibrating import WINDOW, default_layers, read_sample
from clearhead.guard.evaluate.baselines import Fitted
from clearhead.guard.evaluate.scanning import Tell
from clearhead.guard.judging import sigmoid
from clearhead.guard.learning import Example, columns
from clearhead.guard.learning import fit_examples as fit_readout
from clearhead.guard.learning import odds_of as text_odds
from clearhead.guard.readout import check_views
from clearhead.guard.samples import Sample
from clearhead.models.loading import LoadedModel


def read_all(
    loaded: LoadedModel,
    samples: Sequence[Sample],
    *,
    layers: Sequence[int] | None = None,
    cache: Path | None = None,
    tell: Tell | None = None,
) -> list[Example]:
    """Read every sample with a model, one prefill each.

    cache: a folder of one file per text, by hash of model, template, layers and sample; what is there is not
    read again. No text is written into it.

    Raises ArgumentError where the folder cannot be written.
    """
    kept = default_layers(loaded.model) if layers is None else tuple(layers)
    out = []
    for number, sample in enumerate(samples):
        path = None if cache is None else cache / "features" / f"{_key(loaded, sample, kept)}.npz"
        found = None if path is None else _read(path, sample)
        if found is None:
            found = read_sample(loaded, sample, kept)
            if path is not None:
                _write(path, found)
        out.append(found)
        if tell is not None:
            tell(f"reading: {number + 1} of {len(samples)} texts", (number + 1) / len(samples))
    return out


def refitted(
    samples: Sequence[Sample], examples: Sequence[Example], loaded: LoadedModel, views: Sequence[str]
) -> Fitted:
    """Return the read-out as something that can be fitted to some of the samples.

    Scores are not calibrated anew: the sigmoid of a text's log odds.
    """
    chosen_views = check_views(views)
    heads = len(examples[0].head_odds)
    width = len(examples[0].place)
    layers = (examples[0].windows[0].shape[1] - 3 * heads - 1) // (width + 2)
    chosen = columns(chosen_views, heads, width, layers)

    def fit(some: Sequence[Example], _: Sequence[Sample]) -> Callable[[Example], float]:
        model = fit_readout(some, chosen)
        return lambda item: sigmoid(text_odds(model, item, chosen))

    name = f"read-out ({' + '.join(chosen_views)})"
    return Fitted(name, f"the guard's read-out on {loaded.name}, fitted anew", samples, examples, fit)


def _key(loaded: LoadedModel, sample: Sample, layers: Sequence[int]) -> str:
    from clearhead import __version__
    from clearhead.guard.calibration import template_hash

    template = template_hash(loaded.tokenizer.chat_template)
    told: list[Any] = [__version__, loaded.hash or loaded.name, template, WINDOW, *layers]
    told += [sample.instruction, sample.text, sample.label, sample.start, sample.end, sample.family]
    return hashlib.sha256("\0".join(map(str, told)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _write(path: Path, example: Example) -> None:
    arrays: dict[str, Any] = {
        "head_odds": example.head_odds,
        "place": example.place,
        "numbers": np.array([example.tokens, example.mass]),
    }
    for number, (window, allowed) in enumerate(zip(example.windows, example.allowed, strict=True)):
        arrays[f"window_{number}"], arrays[f"allowed_{number}"] = window, allowed
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **arrays)
        part.replace(path)  # a run that is killed leaves no half file
    except OSError as error:
        raise ArgumentError(f"the cache {path.parent} cannot be used: {error}") from error


def _read(path: Path, sample: Sample) -> Example | None:
    """What was kept, or None where there is nothing that can be used."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            count = sum(name.startswith("window_") for name in found.files)
            return Example(
                sample,
                tuple(found[f"window_{n}"] for n in range(count)),
                tuple(found[f"allowed_{n}"] for n in range(count)),
                found["head_odds"],
                float(found["numbers"][0]),
                float(found["numbers"][1]),
                found["place"],
            )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
