"""`clearhead demo`: two forms of one page side by side, and two reports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.models.loading import LoadedModel


def small_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer weights for the reports: what they hold is tested elsewhere."""
    import clearhead.look.looking as module

    whole = module.look
    monkeypatch.setattr(module, "look", lambda *a, **k: whole(*a, **(k | {"map_weights": 300_000})))


@pytest.mark.model
def test_both_tables_stand_side_by_side_and_both_reports_are_written(
    cli: Callable[..., Any], smollm2: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.models.loading.load", lambda name, progress=None: smollm2)
    small_maps(monkeypatch)
    out = tmp_path / "deep" / "demo"
    done = cli("demo", "--out", str(out))
    assert (done.code, done.err) == (0, "")
    heading = next(line for line in done.out.splitlines() if "plain page" in line)
    assert "planted page" in heading
    rows = {line.split("  ")[0].strip(): line for line in done.out.splitlines()}
    assert rows["web page (untrusted)"].count("%") == 2
    assert rows["planted text (untrusted)"].count("%") == 1
    assert rows["planted text (untrusted)"].count("–") == 1
    for form, file in (("plain page", "plain.html"), ("planted page", "planted.html")):
        assert f"{form}: report in {out / file}" in done.out.replace("\n", "") or (out / file).exists()
        assert (out / file).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "evidence: " in done.out
    end = " ".join(done.out.partition("evidence: ")[2].split())
    plain, planted = end.partition("plain page: ")[2].split("planted page: ")
    assert plain.startswith("allow, score ")
    assert "pulled:" not in plain
    assert planted.startswith(("block, score ", "flag, score "))
    named = (
        planted.partition("pulled: planted text:")[2].partition("attention ")[2].partition("per token: ")[2]
    )
    assert any(named.startswith(sentence) for sentence in ("Ignore all", "Do not answer", "Instead, write"))
    assert "false alarms" in planted
    assert "pulled: web page" not in planted
    assert "calibration " in planted


@pytest.mark.model
def test_a_model_without_a_calibration_ends_with_the_reason(
    cli: Callable[..., Any], tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.cli.demo.files", lambda package: tmp_path)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "museum.txt").write_text("the road .")
    done = cli("demo", "--out", str(tmp_path / "out"), "--model", "other")
    assert done.code == 0
    end = " ".join(done.out.partition("evidence: ")[2].split())
    assert (
        end.count("no verdict of the guard: no calibration comes with the package for the model 'other'") == 2
    )


@pytest.mark.usefixtures("no_model")
def test_a_folder_that_cannot_be_made_is_an_error_before_the_work(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("nul\0l")):
        done = cli("demo", "--out", str(out))
        assert (done.code, done.out) == (2, "")
        assert "--out" in done.err


@pytest.mark.usefixtures("no_model")
def test_a_report_that_cannot_be_written_is_an_error_before_the_work(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "planted.html").mkdir()
    done = cli("demo", "--out", str(tmp_path))
    assert done.code == 2
    assert "--out: " in done.err
    assert "planted.html is a folder" in done.err


@pytest.mark.model
def test_the_real_model_in_a_process_of_its_own_piped_to_a_reader_who_leaves(tmp_path: Path) -> None:
    """The one run of everything as a user has it."""
    page = tmp_path / "page.txt"
    page.write_text("The museum opens at ten.")
    command = f"{sys.executable} -m clearhead look --user 'When does it open?' --data @{page} --html {tmp_path}/x.html"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert (done.returncode, done.stderr) == (0, f"report: {tmp_path}/x.html\n")
    assert done.stdout.startswith("smollm2, ")
    assert (tmp_path / "x.html").exists()
