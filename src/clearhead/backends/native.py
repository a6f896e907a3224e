"""The one place that loads the compiled core, `clearhead._core`, and says why where it is not there.

`CLEARHEAD_ISA` in the environment chooses the instruction set when the core is first used.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch  # noqa: F401, before the core: both then share torch's OpenMP runtime

from clearhead.errors import ArgumentError

#: Written by the build where the core could not be compiled; says why.
_MISSING = Path(__file__).parent.parent / "_core_missing.txt"


class Isa(NamedTuple):
    """An instruction set that the core knows kernels for."""

    name: str
    built: bool
    runs_here: bool


@cache
def _loaded() -> tuple[ModuleType | None, str]:
    try:
        _core = import_module("clearhead._core")
    except ModuleNotFoundError:
        why = _MISSING.read_text(encoding="utf-8").strip() if _MISSING.exists() else "it was not built"
        return None, f"clearhead is installed without its C++ core: {why}"
    except ImportError as error:  # it is there, but made for another machine or another Python
        return None, f"the C++ core cannot be loaded: {error}"
    wanted = os.environ.get("CLEARHEAD_ISA")
    if wanted:
        _choose(_core, wanted)
    return _core, ""


def core() -> ModuleType | None:
    """The compiled core, or None. Raises ArgumentError if CLEARHEAD_ISA names nothing that runs here."""
    return _loaded()[0]


def why_not() -> str:
    """Why there is no core; empty where there is."""
    return _loaded()[1]


def isas() -> list[Isa]:
    """The instruction sets, slowest first; empty without a core."""
    module = core()
    return [] if module is None else [Isa(*entry) for entry in module.isas()]


def choose_isa(name: str) -> None:
    """Run the kernels of this instruction set from now on.

    Raises ArgumentError if it is unknown, was not built, or cannot run on this processor.
    """
    module = core()
    if module is None:
        raise ArgumentError(f"instruction set {name!r} cannot be chosen: {why_not()}")
    _choose(module, name)


def _choose(module: ModuleType, name: str) -> None:
    if not module.choose_isa(name):
        allowed = [isa for isa, built, runs in module.isas() if built and runs]
        raise ArgumentError(
            f"instruction set (CLEARHEAD_ISA) must be one of {', '.join(allowed)}, got {name!r}"
        )
