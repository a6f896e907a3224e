"""`clearhead guard`: judge the injection guard, on the user's own sets too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.guard_calibrate import calibrate_guard

if TYPE_CHECKING:
    from clearhead.guard.evaluate.loaders import Options
    from clearhead.guard.samples import Sample
    from clearhead.models.loading import LoadedModel

guard = typer.Typer(
    help="The guard against injected instructions: how good it is, measured.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

guard.command(
    "calibrate",
    short_help="Make a calibration for a model of your own.",
    epilog="Example: clearhead guard calibrate --model ./my-model --pairs own.jsonl --out my-model.json",
)(calibrate_guard)

METHODS = ("readout", "focus", "none")
FORMATS = ("md", "json")

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="[KIND=]PATH",
        help="A set that you have: BIPIA, NotInject, LLMail, deepset CSV, PIShield, TaskTracker, InjecAgent "
        "or JSON lines; recognised, or named (bipia=PATH). Can be repeated.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        help="readout [the default], focus (the Attention Tracker recipe), or none: baselines only. "
        "Can be repeated.",
    ),
]
Classifiers = Annotated[
    list[str] | None,
    typer.Option(
        "--classifier",
        metavar="NAME",
        help="A text classifier to compare with: a name on the hub or a folder. Can be repeated.",
    ),
]


@guard.command(
    "eval",
    short_help="Judge the guard and the baselines beside it on labelled sets.",
    epilog="Example: clearhead guard eval --set BIPIA/benchmark --set datasets/ --out eval --plot",
)
def evaluate_guard(
    sets: Sets = None,
    generator: Annotated[
        bool, typer.Option("--generator", help="Also judge the package's own generated texts.")
    ] = False,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="smollm2, a folder, a file, or a name on the hub.")
    ] = "smollm2",
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The calibration [the one in the package].")
    ] = None,
    method: Methods = None,
    classifier: Classifiers = None,
    refit: Annotated[
        bool, typer.Option(help="Fit the read-out anew for the sets and families left out (reads all texts).")
    ] = True,
    split: Annotated[
        str, typer.Option(metavar="SPLIT", help="train or test, where a set has both [both].")
    ] = "",
    inserts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Own benign lines to insert: JSON, {"imperatives", "statements"}.'),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="At most about N texts of a set, whole contexts, at random."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of every draw.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write report.md, report.json and roc.svg there, and the cache."),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="What is printed: md or json.")
    ] = "md",
    plot: Annotated[
        bool,
        typer.Option("--plot", help="Draw the ROC at low false-alarm rates: roc.svg, in --out or here."),
    ] = False,
) -> None:
    """Judge the guard on sets that you have, with baselines beside it and every figure with its count.

    For each set: AUROC, attacks found at 5% and 1% false alarms, false alarms at the carried-over thresholds,
    localisation, calibration error and time, beside the text's length, a list of patterns, TF-IDF and, if
    named, text classifiers. What learns is also judged on sets and attack families it has not seen.
    A run that was stopped goes on where it was.
    """
    import json

    from clearhead.cli.progress import bar
    from clearhead.cli.terminal import write
    from clearhead.errors import ArgumentError
    from clearhead.guard.evaluate.evaluation import evaluate
    from clearhead.guard.evaluate.report import markdown

    methods = list(dict.fromkeys(method or ["readout"]))
    for name, given, allowed in (
        ("--method", methods, METHODS),
        ("--format", [form], FORMATS),
        ("--split", [split], ("", "train", "test")),
    ):
        for value in given:
            if value not in allowed:
                listed = ", ".join(word for word in allowed if word)
                raise ArgumentError(f"{name} must be one of {listed}, got {value[:60]!r}")
    if not sets and not generator:
        raise ArgumentError("nothing to judge: name a set that you have, --set PATH, or take --generator")
    options = _options(seed, split, inserts)
    judged = {name: _thin(part, limit, seed) for name, part in _sets(sets or [], options).items()}
    languages = {s.language for part in judged.values() for s in part}
    own = _generated(languages, seed)
    if generator:
        judged["generator"] = _thin(own, limit, seed)
    wanted = [name for name in methods if name != "none"]
    with bar() as tell:
        loaded = _loaded(model, tell) if wanted else None
        judges: dict[str, Any] = {}
        for name in wanted:
            assert loaded is not None
            judges[name] = _detector(loaded, name, calibration)
        for name in classifier or []:
            from clearhead.guard.evaluate.classifier import Classifier

            judges[name] = Classifier(name)
        cache = _cache(out)
        found = evaluate(
            judged,
            judges,
            learn_from=_thin(own, limit, seed),
            refit=_refit(loaded, cache) if loaded is not None and refit and "readout" in wanted else None,
            cache=cache,
            seed=seed,
            tell=tell,
        )
    text = markdown(found.report)
    as_json = json.dumps(found.report, ensure_ascii=False, indent=1) + "\n"
    files = {"report.md": text, "report.json": as_json} if out is not None else {}
    if (plot or out is not None) and found.svg is not None:
        files["roc.svg"] = found.svg
    _save(out or Path(), files)
    if plot and found.svg is None:
        print("no plot: no set has both attacked and benign texts", file=sys.stderr)
    write(as_json if form == "json" else _visible(text))


def _options(seed: int, split: str, inserts: Path | None) -> Options:
    from clearhead.guard.evaluate.loaders import Options
    from clearhead.guard.evaluate.pairs import Inserts

    lines = Inserts.packaged() if inserts is None else Inserts.read(inserts)
    return Options(seed=seed, split=split, inserts=lines)


def _sets(paths: Sequence[str], options: Options) -> dict[str, list[Sample]]:
    """The sets by name: one path may hold several, two paths of one name are one set."""
    from clearhead.guard.evaluate.loaders import KINDS, load_set

    out: dict[str, list[Sample]] = {}
    for given in paths:
        kind, equals, path = given.partition("=")
        named = bool(equals) and kind in KINDS
        for sample in load_set(path if named else given, kind if named else None, options):
            out.setdefault(sample.source, []).append(sample)
    return out


def _thin(samples: Sequence[Sample], limit: int | None, seed: int) -> list[Sample]:
    from clearhead.guard.evaluate.loaders import thinned

    return thinned(samples, limit, seed)


def _generated(languages: set[str], seed: int) -> list[Sample]:
    """The package's own texts, in English and in the languages that are judged."""
    from clearhead.guard.generator import generate
    from clearhead.guard.material import LANGUAGES

    wanted = [name for name in LANGUAGES if name == "en" or name in languages or "mul" in languages]
    return generate(wanted, seed=seed)


def _loaded(name: str, tell: Callable[[str, float], None]) -> LoadedModel:
    from clearhead.models.loading import load

    return load(name, progress=lambda step, done: tell(f"loading {name}: {step}", done))


def _detector(loaded: LoadedModel, method: str, calibration: Path | None) -> Any:
    from clearhead.guard.detector import InjectionDetector

    if method == "readout":
        return InjectionDetector.load(loaded, calibration=calibration)
    from clearhead.guard.focus import FocusDetector

    return FocusDetector(loaded)


def _refit(loaded: LoadedModel, cache: Path) -> Any:
    """The read-out, with attention alone and with hidden states, to be fitted anew."""
    from clearhead.guard.evaluate.refitting import read_all, refitted

    def make(samples: Sequence[Sample], tell: Any) -> list[Any]:
        usable = [s for s in samples if s.text.strip()]
        if len(usable) < len(samples):
            from clearhead.errors import ArgumentError

            raise ArgumentError(f"{len(samples) - len(usable)} of the texts are empty: leave them out")
        examples = read_all(loaded, samples, cache=cache, tell=tell)
        views = (("attention",), ("attention", "hidden"))
        return [refitted(samples, examples, loaded, chosen) for chosen in views]

    return make


def _cache(out: Path | None) -> Path:
    """Where scans and features are kept: in --out, else in the user's cache."""
    from clearhead.models.conversion import default_cache_dir

    return (default_cache_dir() / "guard-eval") if out is None else out / "cache"


def _save(folder: Path, files: dict[str, str]) -> None:
    from clearhead.errors import ArgumentError

    try:
        for name, content in files.items():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content, encoding="utf-8")
            print(f"written: {folder / name}", file=sys.stderr)
    except OSError as error:
        raise ArgumentError(f"--out {folder}: cannot be written: {error}") from error


def _visible(text: str) -> str:
    from clearhead.cli.terminal import visible

    return visible(text)
