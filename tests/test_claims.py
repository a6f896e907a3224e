"""docs/claims.md says what the benchmarks' results say, and nothing else."""

from __future__ import annotations

import copy
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.fixture(scope="module")
def claims() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("claims")


@pytest.fixture(scope="module")
def document() -> str:
    return (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


def rows(document: str) -> list[list[str]]:
    cells = [line.strip("|").split("|") for line in document.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in cells]


def test_the_document_is_what_the_generator_writes(claims: ModuleType, document: str) -> None:
    assert claims.render(claims.read()) == document, "run python benchmarks/claims.py"


def test_check_agrees() -> None:
    done = subprocess.run([sys.executable, "benchmarks/claims.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_the_first_rows_are_these(document: str) -> None:
    names = ["M1", "M2", "M3", "M4", "M4", "M5", "M6", "M7", "C1", "C2", "C3", "S1", "S6"]
    assert [row[0] for row in rows(document)[1:14]] == names
    for row in rows(document)[1:14]:
        assert len(row) == 4
        assert all(row)


def test_every_command_names_a_file_that_exists(document: str) -> None:
    commands = re.findall(r"`python ([^\s`]+)[^`]*`", document)
    assert len(commands) >= 15
    for path in commands:
        assert (ROOT / path).is_file(), path


def changed(value: Any, steps: list[int]) -> Any:
    """The same figures with every number moved a little."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float):
        steps.append(1)
        return value * 3 + 1
    if isinstance(value, dict):
        return {key: changed(item, steps) for key, item in value.items()}
    return [changed(item, steps) for item in value]


def test_every_row_follows_its_results(claims: ModuleType, document: str) -> None:
    results = claims.read()
    other = copy.deepcopy(results)
    for result in other.values():
        result["figures"] = changed(result["figures"], [])
    before, after = rows(document), rows(claims.render(other))
    assert len(before) == len(after)
    figures_of = {4: 2, 5: 2}  # columns of the row -> the one with our figure
    compared = 0
    for old, new in zip(before, after, strict=True):
        place = figures_of.get(len(old))
        if place is not None and old[place] not in ("our figure", "here"):
            assert old[place] != new[place], old[0]
            compared += 1
    assert compared == len(claims.CLAIMS) + len(claims.TARGETS)


def test_a_missed_target_is_called_missed(claims: ModuleType) -> None:
    results = claims.read()
    results["cost_of_looking"]["figures"]["all_worst"] = 9.0
    line = next(row for row in rows(claims.render(results)) if row[1:2] == ["≤ 2.5×"])
    assert line[3] == "**no**"


def test_a_missing_result_is_named(claims: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"mechanism\.json is missing: run python benchmarks/mechanism\.py"):
        claims.read(tmp_path)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_how_they_were_made_and_nothing_of_the_machine_s_folders(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    result = json.loads(text)
    assert result["machine"]["python"]
    assert (ROOT / result["command"].split()[1]).is_file()
    assert not re.search(r'"(/|~|[A-Za-z]:\\)[^"]*"|/(home|root|tmp|work|usr)/', text)
