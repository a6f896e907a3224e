"""`clearhead scan` with the real detector, and what CI is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from clearhead.cli import scan_work
from clearhead.cli.demo import PLANTED

ROOT = Path(__file__).parents[2]
PAGE = files("clearhead.cli").joinpath("pages", "museum.txt").read_text(encoding="utf-8")


@pytest.mark.model
def test_a_planted_file_is_named_with_its_sentence_and_the_clean_one_passes(
    cli: Callable[..., Any], smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead.guard.detector import InjectionDetector

    detector = InjectionDetector.load(smollm2)
    monkeypatch.setattr(scan_work, "load_detector", lambda **_: detector)
    clean, planted = tmp_path / "clean.txt", tmp_path / "planted.html"
    clean.write_text(PAGE, encoding="utf-8")
    lines = PAGE.strip().splitlines()
    middle = len(lines) // 2
    hidden = f"<div style='display:none'>{PLANTED}</div>"
    body = (
        "\n".join(f"<p>{line}</p>" for line in lines[:middle]),
        "\n".join(f"<p>{line}</p>" for line in lines[middle:]),
    )
    planted.write_text(f"{body[0]}\n{hidden}\n{body[1]}\n", encoding="utf-8")
    assert cli("scan", str(clean)).code == 0
    done = cli("scan", str(planted), "--json")
    assert done.code == 1
    (file,) = json.loads(done.out)["files"]
    strongest = file["hits"][0]
    assert strongest["rule"] == "injection"
    assert strongest["text"] in PLANTED
    assert strongest["line"] == middle + 1
    assert strongest["label"] == "display: none"


def test_the_hook_and_the_action_call_the_command_that_there_is(cli: Callable[..., Any]) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert hook["entry"] == "clearhead scan"
    action = yaml.safe_load((ROOT / "examples" / "github_action.yml").read_text(encoding="utf-8"))
    steps = action["jobs"]["scan"]["steps"]
    (command,) = [s["run"] for s in steps if s.get("id") == "scan"]
    usage = cli("scan", "--help").out
    assert all(word in usage for word in command.split() if word.startswith("--"))
    assert any(s.get("with", {}).get("sarif_file") in command.split() for s in steps)
