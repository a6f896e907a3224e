"""The face is pinned, light, and typed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import clearhead

ROOT = Path(__file__).resolve().parent.parent

NAMES = [
    "ALiBi",
    "ClearheadError",
    "Conversation",
    "Engine",
    "Entropy",
    "Int8Rows",
    "KeyMass",
    "LinearObservable",
    "Mask",
    "MaxWeight",
    "MeanDistance",
    "Observable",
    "Pages",
    "PooledMap",
    "Prompt",
    "RelativeBias",
    "Segment",
    "SegmentMass",
    "SegmentOutput",
    "Segments",
    "TopKeys",
    "Trace",
    "Weights",
    "__version__",
    "attention",
    "generate",
    "load",
    "observe",
]


def fresh(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_the_public_names_are_these_and_all_can_be_had() -> None:
    assert sorted(clearhead.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(clearhead))
    for name in NAMES:
        assert getattr(clearhead, name) is not None
        assert getattr(clearhead, name).__doc__


def test_rooms_can_be_entered_without_importing_them() -> None:
    code = "import clearhead as ch; print(ch.nn.MultiHeadAttention.__name__, ch.cache.__name__)"
    assert fresh(code) == "MultiHeadAttention clearhead.cache"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(clearhead, "attend")


def test_attention_is_the_function_whoever_imports_what_first() -> None:
    code = "import clearhead.front_door, clearhead; print(callable(clearhead.attention), callable(clearhead.observe))"
    assert fresh(code) == "True True"


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, clearhead; print([m for m in ('torch', 'transformers', 'rich', 'typer') if m in sys.modules])"
    assert fresh(code) == "[]"


def test_attention_needs_no_transformers() -> None:
    code = "import sys, clearhead as ch; ch.attention; ch.observe; ch.Trace; print('transformers' in sys.modules)"
    assert fresh(code) == "False"


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert clearhead.__version__ == project["version"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_core_needs_torch_and_numpy_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [d.split(">")[0] for d in project["dependencies"]] == ["torch", "numpy"]
