"""The docs are output: generated pages are what would be generated, and every Python block runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def blocks(page: Path) -> str:
    return "\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PLAIN = [p for p in PAGES if blocks(p) and "ch.load(" not in blocks(p)]
WITH_MODEL = [p for p in PAGES if "ch.load(" in blocks(p)]


@pytest.mark.parametrize("page", PLAIN, ids=name)
def test_the_code_of_a_page_runs(page: Path) -> None:
    exec(compile(blocks(page), str(page), "exec"), {"__name__": "docs"})


@pytest.mark.model
@pytest.mark.parametrize("page", WITH_MODEL, ids=name)
def test_the_code_of_a_page_runs_on_the_real_model(
    page: Path, smollm2: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearhead, "load", lambda name: smollm2)  # loaded once for all tests
    exec(compile(blocks(page), str(page), "exec"), {"__name__": "docs"})


def test_the_pages_that_should_have_code_have_it() -> None:
    assert {name(p) for p in PLAIN} == {
        "docs/attention.md",
        "docs/extend/backend.md",
        "docs/extend/observable.md",
        "docs/guard_eval.md",
        "docs/layers.md",
        "docs/observables.md",
        "docs/scan.md",
    }
    assert {name(p) for p in WITH_MODEL} == {
        "README.md",
        "docs/batching.md",
        "docs/caches.md",
        "docs/generation.md",
        "docs/guard.md",
        "docs/integrations.md",
        "docs/models.md",
    }


def test_generated_pages_are_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "build.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_every_remark_of_the_tree_says_something() -> None:
    rows = re.findall(
        r"^\| `(.+?)` \| (.*) \|$", (ROOT / "docs" / "tree.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) > 80
    silent = [path for path, said in rows if not said and path.endswith((".py", ".md"))]
    assert not silent
