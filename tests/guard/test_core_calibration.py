"""The calibration's file: a round trip, and an error that says what is wrong for everything else."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.errors import GuardError
from clearhead.guard.calibration import (
    LARGEST,
    PRESETS,
    SHIPPED,
    Calibration,
    parse_calibration,
    read_calibration,
    shipped,
)


def test_what_is_written_is_read_and_has_the_same_id(by_hand: Calibration, tmp_path: Path) -> None:
    by_hand.save(tmp_path / "a.json")
    found = read_calibration(tmp_path / "a.json")
    assert found.to_json() == by_hand.to_json()
    assert found.id == by_hand.id
    assert found.thresholds == by_hand.thresholds
    for key, readout in by_hand.readouts.items():
        np.testing.assert_array_equal(found.readouts[key].weights, readout.weights)
        assert found.readouts[key].views == readout.views


def test_another_number_is_another_id(by_hand: Calibration) -> None:
    assert replace(by_hand, window=by_hand.window + 1).id != by_hand.id


def test_a_calibration_is_for_one_model_and_one_template(by_hand: Calibration, tiny: Any) -> None:
    template = tiny.tokenizer.chat_template
    by_hand.check(tiny.hash, template)
    with pytest.raises(
        GuardError, match=r"is for the model 777777777777 \(tiny\), this model is 888888888888"
    ):
        by_hand.check("8" * 64, template)
    with pytest.raises(GuardError, match="is for the chat template"):
        by_hand.check(tiny.hash, template + " ")
    with pytest.raises(GuardError, match="this chat template is without a hash"):
        by_hand.check(tiny.hash, None)
    with pytest.raises(GuardError, match="this model is without a hash"):
        by_hand.check("", template)
    with pytest.raises(GuardError, match="is for the model without a hash"):
        replace(by_hand, model="").check("", template)


Change = Callable[[dict[str, Any]], Any]


def put(*path: str, value: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


ARRAY = {"shape": [2], "float32": "AAAAAAAAAAA="}
NAN = {"shape": [2], "float32": "AADAfwAAAAA="}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("format", value=2), "has format 2, this version reads 1"),
        (lambda c: c.pop("readouts"), "KeyError: 'readouts'"),
        (put("readouts", value={}), "no readout"),
        (put("readouts", "attention", "weights", value=ARRAY), r"readout 'attention' has the shape \(2,\), not \(37, 2\)"),
        (put("readouts", "attention", "bias", value=NAN), "not all finite"),
        (put("readouts", "attention", "weights", "shape", value=[37, 3]), "ValueError"),
        (put("readouts", "attention", "weights", "float32", value="AAA"), "Error"),
        (put("readouts", "attention", "weights", value="rm -rf"), "TypeError"),
        (put("readouts", "attention", "slope", value=float("nan")), "slope of nan"),
        (put("readouts", "attention", "slope", value=-1.0), "slope of -1"),
        (put("readouts", "attention", "offset", value=float("inf")), "not all finite"),
        (put("readouts", "attention", "views", value=["hidden"]), "readout 'attention' is of the views"),
        (put("thresholds", "attention", value={}), "readout 'attention' lacks thresholds"),
        (put("thresholds", "attention", "fpr_5", "flag", value=float("nan")), "0 <= flag <= block <= 1"),
        (put("thresholds", "attention", "fpr_5", "flag", value=1.5), "0 <= flag <= block <= 1"),
        (put("thresholds", "attention", "fpr_5", "flag", value=None), "TypeError"),
        (put("thresholds", "attention", "fpr_5", value={}), "KeyError: 'flag'"),
        (put("baseline", "spread", value=ARRAY), "baseline has the shapes"),
        (put("baseline", "mass", value=[1.0]), "IndexError"),
        (put("domain", "cutoff", value=float("nan")), "not all finite"),
        (put("domain", "spread", value=ARRAY), "domain has the shapes"),
        (put("domain", "centres", value={"shape": [0, 32], "float32": ""}), "no domain"),
        (put("window", value=0), "window 0"),
        (put("window", value=float("inf")), "OverflowError"),
        (put("overlap", value=160), "overlap 160"),
        (put("layers", value=[-1, 2]), "layers"),
        (put("mix", value=[1]), "AttributeError"),
    ],
)  # fmt: skip
def test_a_changed_file_is_refused_with_what_is_wrong(
    by_hand: Calibration, change: Change, said: str
) -> None:
    content = json.loads(by_hand.to_json())
    change(content)
    with pytest.raises(GuardError, match=f"^a file .*{said}"):
        parse_calibration(json.dumps(content), "a file")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "[" * 100_000, '{"format": 1}', "1e999"])
def test_text_that_is_no_calibration_is_refused(text: str) -> None:
    with pytest.raises(GuardError, match=r"^a file is no calibration"):
        parse_calibration(text, "a file")


def test_files_that_are_no_calibration_are_refused_with_their_path(
    by_hand: Calibration, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"

    def refused(said: str) -> None:
        with pytest.raises(GuardError, match=rf"a\.json .*{said}"):
            read_calibration(path)

    refused("cannot be read")
    path.write_bytes(pickle.dumps(by_hand.to_json()))
    refused("no text in UTF-8")
    path.write_text(by_hand.to_json()[:-200])
    refused("is no calibration")
    path.write_bytes(b" " * (LARGEST + 1))
    refused("more than 4,000,000 bytes")
    path.unlink()
    path.mkdir()
    refused("cannot be read")
    path.rmdir()
    path.symlink_to("/dev/zero")
    refused("more than 4,000,000 bytes")


def test_the_file_in_the_package_is_small_and_has_every_preset() -> None:
    data = files("clearhead.guard").joinpath("calibrations", SHIPPED["smollm2"]).read_bytes()
    assert len(data) < 100_000
    found = shipped("smollm2")
    assert found.to_json().encode() == data
    for presets in found.thresholds.values():
        flags = [presets[name].flag for name in PRESETS]
        assert flags == sorted(flags)
        for name, (flag, block) in PRESETS.items():
            assert presets[name].flag_fpr <= flag + 1e-9
            assert presets[name].block_fpr <= block + 1e-9


def test_other_models_have_none() -> None:
    with pytest.raises(
        GuardError, match=r"no calibration comes with the package for the model 'minilm' \(only for smollm2\)"
    ):
        shipped("minilm")
