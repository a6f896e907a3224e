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
from clearhead.guard.readout import Readout

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
            if own != other:
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
        if path.stat().st_size > LARGEST:
            raise GuardError(f"{path} is no calibration: it has more than {LARGEST:,} bytes")
        return parse_calibration(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise GuardError(f"{path} cannot be read: {error}") from error


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
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
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
            k: {p: Thresholds(**t) for p, t in presets.items()}
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


def _check_numbers(found: Calibration, name: str) -> None:
    arrays = [a for r in found.readouts.values() for a in (r.weights, r.bias)]
    arrays += [found.baseline.intercept, found.baseline.slope, found.baseline.spread]
    arrays += [found.domain.centres, found.domain.spread]
    if not found.readouts or not all(np.isfinite(a).all() for a in arrays):
        raise GuardError(f"{name} is no calibration: its numbers are missing or not finite")
    for key, readout in found.readouts.items():
        if readout.weights.ndim != 2 or readout.weights.shape[1] != 2 or readout.bias.shape != (2,):
            raise GuardError(f"{name} is no calibration: readout {key!r} has the wrong shape")
        if key not in found.thresholds or not set(PRESETS) <= found.thresholds[key].keys():
            raise GuardError(f"{name} is no calibration: readout {key!r} lacks thresholds")


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
