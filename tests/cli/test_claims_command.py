"""`clearhead claims` lists what was measured and where, and runs what is behind a name."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = """
from typing import NamedTuple
class Run(NamedTuple):
    benchmark: str
    claims: tuple
    measures: str
RUNS = {"one": Run("first", ("M1", "M2"), "the first"), "two": Run("second", ("M2",), "the second")}
"""
SCRIPT = "import sys, pathlib; pathlib.Path('ran').open('a').write(' '.join([pathlib.Path(__file__).stem, *sys.argv[1:]]) + '\\n')\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks"
    (folder / "results").mkdir(parents=True)
    (folder / "claim_rows.py").write_text(ROWS)
    for name in ("first", "second", "claims"):
        (folder / f"{name}.py").write_text(SCRIPT)
    about = {"architecture": "z80", "cores": 1, "torch": "2", "transformers": "5"}
    result = {"date": "1976-07-01", "machine": about, "figures": {}}
    (folder / "results" / "first.json").write_text(json.dumps(result))
    return tmp_path


def ran(checkout: Path) -> list[str]:
    path = checkout / "ran"
    return path.read_text().splitlines() if path.exists() else []


def test_the_list_says_where_each_was_measured_or_that_it_was_not(
    cli: Callable[..., Any], checkout: Path
) -> None:
    done = cli("claims", "list", "--checkout", str(checkout))
    assert done.code == 0
    one, two = (line for line in done.out.splitlines() if line.strip().startswith(("one", "two")))
    assert "M1, M2" in one
    assert "1976-07-01, z80, 1 cores, torch 2, transformers 5" in one
    assert two.rstrip().endswith("not yet")


@pytest.mark.parametrize(
    ("names", "scripts"),
    [
        (["one"], ["first", "claims"]),
        (["M2"], ["first", "second", "claims"]),
        (["m1", "one", "two"], ["first", "second", "claims"]),
        (["two", "--quick"], ["second --quick"]),
    ],
    ids=str,
)
def test_run_measures_each_once_and_writes_the_page(
    cli: Callable[..., Any], checkout: Path, names: list[str], scripts: list[str]
) -> None:
    done = cli("claims", "run", *names, "--checkout", str(checkout))
    assert done.code == 0
    assert ran(checkout) == scripts


def test_what_fails_is_named_and_the_others_run(cli: Callable[..., Any], checkout: Path) -> None:
    (checkout / "benchmarks" / "first.py").write_text("raise SystemExit(3)")
    done = cli("claims", "run", "one", "two", "--checkout", str(checkout))
    assert done.code == 1
    assert done.err.endswith("failed: one\n")
    assert ran(checkout) == ["second", "claims"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "three"], "NAME must be one of one, two, or a claim (M1, M2), got 'three'"),
        (["run"], "Missing argument 'NAME...'"),
    ],
    ids=str,
)
def test_unknown_names_are_refused(
    cli: Callable[..., Any], checkout: Path, arguments: list[str], message: str
) -> None:
    done = cli("claims", *arguments, "--checkout", str(checkout))
    assert done.code == 2
    assert message in done.err
    assert ran(checkout) == []


def test_without_a_checkout_it_says_what_is_missing(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import clearhead

    done = cli("claims", "list", "--checkout", str(tmp_path))
    assert done.code == 2
    assert f"there is no benchmarks/claim_rows.py in {tmp_path}" in done.err
    monkeypatch.setattr(clearhead, "__file__", str(tmp_path / "lib" / "clearhead" / "__init__.py"))
    done = cli("claims", "list")
    assert done.code == 2
    assert "beside the installed package; the claims are measured by the project's source tree" in done.err


def test_a_result_that_is_none_is_named(cli: Callable[..., Any], checkout: Path) -> None:
    (checkout / "benchmarks" / "results" / "first.json").write_text("{}")
    done = cli("claims", "list", "--checkout", str(checkout))
    assert done.code == 2
    assert "first.json is no result of a benchmark: KeyError" in done.err


def test_every_claim_of_this_checkout_can_be_run_by_a_name_and_every_script_is_there() -> None:
    spec = importlib.util.spec_from_file_location("rows", ROOT / "benchmarks" / "claim_rows.py")
    assert spec is not None
    assert spec.loader is not None
    rows = importlib.util.module_from_spec(spec)
    sys.modules["rows"] = rows
    spec.loader.exec_module(rows)
    behind = {(claim, run.benchmark) for run in rows.RUNS.values() for claim in run.claims}
    assert {(claim.name, claim.benchmark) for claim in rows.CLAIMS} <= behind
    for run in rows.RUNS.values():
        assert (ROOT / "benchmarks" / f"{run.benchmark}.py").is_file()


def test_this_checkout_is_found(cli: Callable[..., Any]) -> None:
    done = cli("claims", "list")
    assert done.code == 0
    for name in ("sinks", "caches", "batching", "gqa", "kernels"):
        assert re.search(rf"^ ?{name} ", done.out, re.MULTILINE)
