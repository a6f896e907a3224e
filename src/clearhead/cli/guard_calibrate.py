"""`clearhead guard calibrate`: make a calibration for a model of your own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def calibrate_guard(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")],
    model: Annotated[
        str, typer.Option(metavar="NAME", help="smollm2, a folder, a file, or a name on the hub.")
    ] = "smollm2",
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Labelled texts of your own, or a set that `guard eval` knows. Can be repeated.",
        ),
    ] = None,
    generator: Annotated[bool, typer.Option(help="Take the package's own texts.")] = True,
    language: Annotated[
        list[str] | None,
        typer.Option(metavar="LANG", help="Of the package's texts: en, de, es, zh [all]. Can be repeated."),
    ] = None,
    split: Annotated[str, typer.Option(metavar="SPLIT", help="Of sets that have both.")] = "train",
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="At most about N texts, whole contexts, at random.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep there what was read, so that a run can be broken off."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of every draw.")] = 0,
) -> None:
    """Read labelled texts with a model, and write what the guard needs to know of it.

    Every text takes one prefill of the model. The file holds numbers only, belongs to this model and its chat
    template, and says from what it was made. Give it to `clearhead guard eval --calibration`, to `clearhead
    scan --calibration`, or to InjectionDetector.load. Thresholds are fixed on texts and attack families that
    the read-out had not seen.
    """
    from clearhead.cli.progress import bar
    from clearhead.errors import ArgumentError
    from clearhead.guard.calibrating import calibrate
    from clearhead.guard.evaluate.loaders import Options, load_set, thinned
    from clearhead.guard.generator import crossed, generate
    from clearhead.guard.material import LANGUAGES
    from clearhead.guard.samples import Sample
    from clearhead.models.loading import load

    if not out.parent.is_dir():
        raise ArgumentError(f"--out {out}: there is no folder {out.parent}")
    unknown = [name for name in language or () if name not in LANGUAGES]
    if unknown:
        raise ArgumentError(f"--language must be one of {', '.join(LANGUAGES)}, got {unknown[0][:20]!r}")
    given: list[Sample] = []
    for path in pairs or ():
        given += load_set(path, options=Options(seed=seed, split=split))
    if not generator and not given:
        raise ArgumentError("nothing to learn from: give --pairs PATH, or leave --generator on")
    samples = list(given)
    if generator:
        samples += generate(language or LANGUAGES, seed=seed)
        samples += crossed(given, seed=seed + 1) if given else []
    samples = thinned(samples, limit, seed)
    with bar() as tell:
        loaded = load(model, progress=lambda step, done: tell(f"loading {model}: {step}", done))
        made = calibrate(
            loaded,
            samples,
            seed=seed,
            folder=keep,
            progress=lambda done, of: tell(f"{done} of {of} texts read", done / of),
        )
    try:
        made.save(out)
    except OSError as error:
        raise ArgumentError(f"--out {out}: cannot be written: {error}") from error
    print(f"calibration {made.id} for {made.name}, of {len(samples)} texts: {out}")
    for views, presets in made.thresholds.items():
        for name, found in presets.items():
            print(
                f"  {views}, {name}: flag from {found.flag:.3f} ({found.flag_fpr:.1%} of {found.benign} "
                f"benign texts), block from {found.block:.3f} ({found.block_fpr:.1%})"
            )
    sys.stdout.flush()
