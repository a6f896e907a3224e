"""Run tests on another build of the C++ core than the installed one: `make sanitize` uses it.

    python tests/with_core.py FOLDER [PYTEST ARGUMENTS]

FOLDER is the CMake folder that holds the module.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def put_in_place(folder: Path) -> None:
    """Load the module in this folder as `clearhead._core`. Raises SystemExit if there is not exactly one."""
    modules = sorted(folder.glob("_core.*"))
    if len(modules) != 1:
        raise SystemExit(f"{folder} must hold one module _core, found {[path.name for path in modules]}")
    import torch  # noqa: F401, before the core: both then share its OpenMP runtime

    spec = importlib.util.spec_from_file_location("clearhead._core", modules[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["clearhead._core"] = module
    print(f"the C++ core: {modules[0]}, sanitizers: {module.sanitize or 'none'}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    put_in_place(Path(sys.argv[1]))
    sys.exit(pytest.main(sys.argv[2:]))
