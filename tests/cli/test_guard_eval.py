"""`clearhead guard eval`: sets in, a report out; mistakes are found before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent.parent / "guard" / "data"


def test_a_set_is_judged_by_the_baselines_without_a_model(
    cli: Callable[..., Any], no_model: None, tmp_path: Path
) -> None:
    done = cli(
        "guard", "eval", "--set", str(DATA / "bipia"), "--method", "none", "--limit", "60",
        "--out", str(tmp_path), "--format", "json",
    )  # fmt: skip
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert {one["name"] for one in report["sets"]} == {"BIPIA train", "BIPIA test"}
    assert {row["judge"] for row in report["sets_left_out"]} == {"length", "TF-IDF word", "TF-IDF char"}
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert "# Guard evaluation" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "roc.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to judge"),
        (("--set", "nowhere"), "nowhere does not exist"),
        (("--set", str(DATA / "README.md")), "is no set that is known"),
        (("--set", f"bipia={DATA / 'piguard'}"), "does not look like bipia"),
        (("--generator", "--method", "magic"), "--method must be one of readout, focus, none"),
        (("--generator", "--format", "pdf"), "--format must be one of md, json"),
        (("--generator", "--split", "dev"), "--split must be one of train, test"),
        (("--set", str(DATA / "bipia"), "--inserts", "none.json"), "none.json cannot be read"),
    ],
)
def test_a_mistake_is_named_before_a_model_is_loaded(
    cli: Callable[..., Any], no_model: None, arguments: tuple[str, ...], said: str
) -> None:
    done = cli("guard", "eval", *arguments)
    assert done.code == 2
    assert said in done.err
