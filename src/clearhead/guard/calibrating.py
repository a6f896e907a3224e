"""Make a calibration: read labelled texts with a model, fit the read-outs, fix the thresholds."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from clearhead.errors import GuardError
from clearhead.guard import domain
from clearhead.guard.calibration import PRESETS, Baseline, Calibration, template_hash
from clearhead.guard.features import check_causal, decoder_blocks, read_window
from clearhead.guard.layout import cut, lay, windows
from clearhead.guard.learning import (
    Example,
    check_enough,
    columns,
    example,
    reliability,
    thresholds,
    train,
)
from clearhead.guard.plain import made_plain
from clearhead.guard.readout import ROWS, VIEWS
from clearhead.guard.samples import Sample
from clearhead.models.loading import LoadedModel

WINDOW, OVERLAP = 640, 48
"""Tokens of a window, and tokens at least that the next one repeats."""

CHOICES = (("attention",), ("attention", "hidden"))
"""The views that a calibration has read-outs for."""


def default_layers(model: Any) -> tuple[int, ...]:
    """Return the layers whose states are read: at two and at seven tenths of the depth that the model has."""
    count = len(decoder_blocks(model))
    return tuple(sorted({min(round(share * count), count - 1) for share in (0.4, 0.7)}))


def read_sample(loaded: LoadedModel, sample: Sample, layers: Sequence[int]) -> Example:
    """Read one labelled text as `InjectionDetector.scan` reads it."""
    plain = made_plain([("text", sample.text)])
    texts = cut(plain.texts, loaded.tokenizer)
    if not texts.spans:
        raise GuardError(f"pairs must hold texts with words, got an empty one (context {sample.context!r})")
    origin = plain.read[0].origin
    readings = []
    for window in windows(texts, WINDOW, OVERLAP):
        laid = lay(sample.instruction, texts, window, loaded.tokenizer)
        places = [origin.span(texts.spans[n].start, texts.spans[n].end) for n in laid.spans]
        readings.append((places, read_window(loaded.model, laid, rows=ROWS, layers=layers)))
    return example(sample, readings, VIEWS)


def read_or_kept(loaded: LoadedModel, sample: Sample, layers: Sequence[int], folder: Path) -> Example:
    """Return `read_sample`, from the folder if it was read before by this model and layout."""
    told = (loaded.hash, loaded.tokenizer.chat_template, tuple(layers), WINDOW, OVERLAP, ROWS, VIEWS, sample)
    path = folder / f"{hashlib.sha256(repr(told).encode()).hexdigest()[:32]}.npz"
    kept = _kept(path, sample)
    if kept is not None:
        return kept
    found = read_sample(loaded, sample, layers)
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {f"features{n}": window for n, window in enumerate(found.windows)}
    arrays |= {f"allowed{n}": allowed for n, allowed in enumerate(found.allowed)}
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(
            file,
            windows=np.array(len(found.windows)),
            head_odds=found.head_odds,
            tokens=np.array(found.tokens),
            mass=np.array(found.mass),
            place=found.place,
            **arrays,
        )
    part.replace(path)
    return found


def _kept(path: Path, sample: Sample) -> Example | None:
    """Return what was kept of a text, None where there is nothing or the file is not whole."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            count = int(kept["windows"])
            return Example(
                sample,
                tuple(kept[f"features{n}"] for n in range(count)),
                tuple(kept[f"allowed{n}"] for n in range(count)),
                kept["head_odds"],
                float(kept["tokens"]),
                float(kept["mass"]),
                kept["place"],
            )
    except (OSError, EOFError, ValueError, KeyError, BadZipFile):
        return None


def calibrate(
    loaded: LoadedModel,
    pairs: Iterable[Sample],
    *,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Return a calibration of a model on labelled texts.

    loaded: a causal model with a chat template. pairs: texts with and without attacks, best several of every
    context (`generator.generate`). layers: whose hidden states are read; None: `default_layers`. folder:
    where what was read is kept, so that a calibration that was broken off goes on; several processes may fill
    one. progress: called with (texts read, of how many).

    A text takes one prefill; about 4,000 texts of SmolLM2 take half an hour on two cores. The same texts,
    model and seed give the same calibration.

    Raises GuardError for a model without a chat template or without a hash, and for too few texts; ModelError
    for a model that is not causal.
    """
    check_causal(loaded.model)
    if not loaded.tokenizer.chat_template:
        raise GuardError(f"model {loaded.name!r} must have a chat template to be calibrated for the guard")
    if not loaded.hash:
        raise GuardError(
            f"model {loaded.name!r} must have a hash (of its weights, or a commit) to be calibrated for "
            "the guard: no file could say which model it is for"
        )
    kept = default_layers(loaded.model) if layers is None else tuple(layers)
    samples = list(pairs)
    check_enough(samples)
    examples = []
    for number, sample in enumerate(samples):
        if folder is None:
            examples.append(read_sample(loaded, sample, kept))
        else:
            examples.append(read_or_kept(loaded, sample, kept, folder))
        if progress is not None:
            progress(number + 1, len(samples))
    return learned(loaded, examples, kept, seed=seed)


def learned(
    loaded: LoadedModel, examples: Sequence[Example], layers: tuple[int, ...], *, seed: int = 0
) -> Calibration:
    """Return the calibration of texts that were read. Raises GuardError for too few."""
    import clearhead

    heads = len(examples[0].head_odds) if examples else 0
    hidden = len(examples[0].place) if examples else 0
    samples = [e.sample for e in examples]
    sets = dict.fromkeys(s.source or "unnamed" for s in samples)
    fixed_on = f"benign texts of {' + '.join(sets)}, families weighted alike, contexts unseen"
    readouts, limits, curve = {}, {}, {}
    for views in CHOICES:
        key = "+".join(views)
        found = train(examples, views, columns(views, heads, hidden, len(layers)), seed=seed)
        attacked = np.array([samples[n].attacked for n in found.tested])
        readouts[key] = found.readout
        families = [samples[n].family for n in found.tested[~attacked]]
        limits[key] = {
            preset: thresholds(found.odds[~attacked], families, shares, fixed_on)
            for preset, shares in PRESETS.items()
        }
        curve[key] = reliability(found.odds, attacked)
    mix: dict[str, Counter[str]] = {name: Counter() for name in sets}
    for s in samples:
        mix[s.source or "unnamed"][s.label] += 1
    return Calibration(
        model=loaded.hash,
        template=template_hash(loaded.tokenizer.chat_template),
        name=loaded.name,
        layers=layers,
        window=WINDOW,
        overlap=OVERLAP,
        readouts=readouts,
        thresholds=limits,
        reliability=curve,
        baseline=baseline(examples),
        domain=domain.learn(
            np.stack([e.place for e in examples]), np.array([s.context for s in samples]), seed=seed
        ),
        mix={name: dict(count) for name, count in mix.items()},
        version=clearhead.__version__,
        made=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def baseline(examples: Sequence[Example]) -> Baseline:
    """Return what heads do on the benign texts, by length: least squares on the logarithm of the tokens."""
    benign = [e for e in examples if not e.sample.attacked]
    x = np.log(np.array([e.tokens for e in benign]))
    odds = np.stack([e.head_odds for e in benign])
    mass = np.log(np.array([e.mass for e in benign]) + 1e-8)
    a = np.stack([np.ones_like(x), x], 1)
    both, *_ = np.linalg.lstsq(a, np.concatenate([odds, mass[:, None]], 1), rcond=None)
    rest = odds - a @ both[:, :-1]
    return Baseline(
        both[0, :-1].astype(np.float32),
        both[1, :-1].astype(np.float32),
        (rest.std(0) + 1e-3).astype(np.float32),
        (float(both[0, -1]), float(both[1, -1])),
    )
