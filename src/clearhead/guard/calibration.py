"""A calibration: what was learned from labelled texts for one model, as a JSON file of numbers."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import GuardError
from clearhead.guard.domain import Domain
from clearhead.guard.finding import Thresholds
from clearhead.guard.readout import VIEWS, Readout

Floats = NDArray[np.float32]

FORMAT = 1
LARGEST = 4_000_000
"""Bytes. A file of a calibration is some tens of thousands."""

PRESETS = {"fpr_5": (0.05, 0.01), "fpr_1": (0.01, 0.002), "fpr_0.1": (0.001, 0.001)}
"""Name -> share of the calibration's benign texts (families weighted alike) that are flagged, and blocked."""

SHIPPED = {"smollm2": "smollm2.json"}
"""Calibrations inside the package, by the model's name."""


@dataclass(frozen=True)
class Baseline:
    """What heads do on benign texts, by length: for head h and n tokens of text, log(mass on the text / mass
    on the instruction) is about intercept[h] + slope[h] · log n, with standard deviation spread[h]. mass: the
    same two numbers for the logarithm of the text's mass, averaged over the heads.
    """

    intercept: Floats
    slope: Floats
    spread: Floats
    mass: tuple[float, float]


@dataclass(frozen=True)
class Calibration:
    """What was learned, and from what.

    model, template: sha256 of the weights and of the chat template that it is for. name: of the model.
    layers: whose hidden states it reads. window, overlap: tokens. readouts: by views ("attention",
    "attention+hidden"). thresholds: by views, then by preset. reliability: by views, rows of (mean score,
    share of attacks, texts). baseline, domain: see there. mix: set -> label -> texts. version: of clearhead.
    made: date.
    """

    model: str
    template: str
    name: str
    layers: tuple[int, ...]
    window: int
    overlap: int
    readouts: dict[str, Readout]
    thresholds: dict[str, dict[str, Thresholds]]
    reliability: dict[str, tuple[tuple[float, float, int], ...]]
    baseline: Baseline
    domain: Domain
    mix: dict[str, dict[str, int]]
    version: str
    made: str

    @cached_property
    def id(self) -> str:
        """The first 12 hexadecimal digits of the sha256 of the file's content."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Return the file's content; arrays as base64 of little-endian float32."""
        content = {"format": FORMAT} | {
            name: getattr(self, name) for name in ("model", "template", "name", "window", "overlap")
        }
        content |= {
            "layers": list(self.layers),
            "readouts": {k: _plain(asdict(v)) for k, v in self.readouts.items()},
            "thresholds": {
                k: {p: asdict(t) for p, t in presets.items()} for k, presets in self.thresholds.items()
            },
            "reliability": {k: [list(row) for row in rows] for k, rows in self.reliability.items()},
            "baseline": _plain(asdict(self.baseline)),
            "domain": _plain(asdict(self.domain)),
            "mix": self.mix,
            "version": self.version,
            "made": self.made,
        }
        return json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def check(self, model_hash: str, template: str) -> None:
        """Raise GuardError unless this is the calibration of that model and chat template."""
        for what, own, other in (
            ("model", self.model, model_hash),
            ("chat template", self.template, template_hash(template)),
        ):
            if own != other or not own:
                raise GuardError(
                    f"calibration {self.id} is for the {what} {own[:12] or 'without a hash'} ({self.name}), "
                    f"this {what} is {other[:12] or 'without a hash'}: make one for it with "
                    "`clearhead guard calibrate`"
                )


def template_hash(template: Any) -> str:
    """Return the sha256 of a chat template, "" without one."""
    if not template:
        return ""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def read_calibration(path: str | Path) -> Calibration:
    """Read what `Calibration.save` wrote. Raises GuardError, with the path, for anything else."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        raise GuardError(f"{path} cannot be read: {error}") from error
    if len(data) > LARGEST:
        raise GuardError(f"{path} is no calibration: it has more than {LARGEST:,} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GuardError(f"{path} is no calibration: it is no text in UTF-8 ({error.reason})") from error
    return parse_calibration(text, str(path))


def shipped(name: str) -> Calibration:
    """Return the calibration in the package for a model's name. Raises GuardError where there is none."""
    if name not in SHIPPED:
        raise GuardError(
            f"no calibration comes with the package for the model {name!r} (only for {', '.join(SHIPPED)}): "
            "make one with `clearhead guard calibrate --model NAME` and give its file as calibration"
        )
    found = files("clearhead.guard").joinpath("calibrations", SHIPPED[name])
    return parse_calibration(found.read_text(encoding="utf-8"), f"the calibration of {name}")


def parse_calibration(text: str, name: str) -> Calibration:
    """Return the calibration of a file's content. Raises GuardError naming what is wrong with it."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise GuardError(f"{name} has format {content['format']!r}, this version reads {FORMAT}")
        found = _built(content)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise GuardError(f"{name} is no calibration: {type(error).__name__}: {error}") from error
    _check_numbers(found, name)
    return found


def _built(content: dict[str, Any]) -> Calibration:
    readouts = {
        str(k): Readout(
            views=tuple(v["views"]),
            weights=_array(v["weights"]),
            bias=_array(v["bias"]),
            slope=float(v["slope"]),
            offset=float(v["offset"]),
        )
        for k, v in content["readouts"].items()
    }
    base = content["baseline"]
    return Calibration(
        model=str(content["model"]),
        template=str(content["template"]),
        name=str(content["name"]),
        layers=tuple(int(n) for n in content["layers"]),
        window=int(content["window"]),
        overlap=int(content["overlap"]),
        readouts=readouts,
        thresholds={
            str(k): {str(p): _limits(t) for p, t in presets.items()}
            for k, presets in content["thresholds"].items()
        },
        reliability={
            k: tuple((float(a), float(b), int(n)) for a, b, n in rows)
            for k, rows in content["reliability"].items()
        },
        baseline=Baseline(
            _array(base["intercept"]),
            _array(base["slope"]),
            _array(base["spread"]),
            (float(base["mass"][0]), float(base["mass"][1])),
        ),
        domain=Domain(
            _array(content["domain"]["centres"]),
            _array(content["domain"]["spread"]),
            float(content["domain"]["cutoff"]),
        ),
        mix={str(k): {str(a): int(b) for a, b in v.items()} for k, v in content["mix"].items()},
        version=str(content["version"]),
        made=str(content["made"]),
    )


def _limits(value: dict[str, Any]) -> Thresholds:
    return Thresholds(
        flag=float(value["flag"]),
        block=float(value["block"]),
        flag_fpr=float(value["flag_fpr"]),
        block_fpr=float(value["block_fpr"]),
        benign=int(value["benign"]),
        fixed_on=str(value["fixed_on"]),
    )


def _check_numbers(found: Calibration, name: str) -> None:
    """Raise GuardError for numbers with which some text would pass unseen: a NaN is above no threshold."""

    def wrong(what: str) -> GuardError:
        return GuardError(f"{name} is no calibration: {what}")

    base, domain = found.baseline, found.domain
    heads, places = base.intercept.shape, domain.spread.shape
    if len(heads) != 1 or base.slope.shape != heads or base.spread.shape != heads:
        raise wrong(f"baseline has the shapes {heads}, {base.slope.shape} and {base.spread.shape}")
    if len(places) != 1 or domain.centres.ndim != 2 or domain.centres.shape[1:] != places:
        raise wrong(f"domain has the shapes {domain.centres.shape} and {places}")
    numbers: list[Any] = [base.intercept, base.slope, base.spread, base.mass, domain.centres, domain.spread]
    numbers.append(domain.cutoff)
    if not found.readouts or not domain.centres.size:
        raise wrong("it has no readout or no domain")
    if not found.layers or min(found.layers) < 0 or not 0 <= found.overlap < found.window:
        raise wrong(f"layers {found.layers}, window {found.window} and overlap {found.overlap} do not fit")
    for key, readout in found.readouts.items():
        if not readout.views or key != "+".join(v for v in VIEWS if v in readout.views):
            raise wrong(f"readout {key!r} is of the views {readout.views}")
        size = 1 + (3 * heads[0] if "attention" in readout.views else 0)
        size += len(found.layers) * (places[0] + 2) if "hidden" in readout.views else 0
        if readout.weights.shape != (size, 2) or readout.bias.shape != (2,):
            raise wrong(f"readout {key!r} has the shape {readout.weights.shape}, not {(size, 2)}")
        if key not in found.thresholds or not set(PRESETS) <= found.thresholds[key].keys():
            raise wrong(f"readout {key!r} lacks thresholds")
        for preset, limit in found.thresholds[key].items():
            if not 0 <= limit.flag <= limit.block <= 1:
                raise wrong(f"thresholds {key!r}, {preset!r} must be 0 <= flag <= block <= 1")
            numbers += [limit.flag_fpr, limit.block_fpr]
        numbers += [readout.weights, readout.bias, readout.slope, readout.offset]
        if not readout.slope > 0:
            raise wrong(f"readout {key!r} has a slope of {readout.slope}")
    if not all(np.isfinite(number).all() for number in numbers):
        raise wrong("its numbers are not all finite")
    if not (base.spread > 0).all() or not (domain.spread > 0).all():
        raise wrong("a spread is not positive")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value, "<f4").tobytes()).decode()
        return {"shape": list(value.shape), "float32": data}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _array(value: dict[str, Any]) -> Floats:
    shape = [int(n) for n in value["shape"]]
    return np.frombuffer(base64.b64decode(value["float32"], validate=True), "<f4").reshape(shape).copy()
