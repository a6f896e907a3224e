"""Code for one instruction set does not leak into another: proved on the objects that the build left behind.

The units of the kernels are compiled for processors that this one need not be. If such a unit held a function that
the linker may share between units (a weak symbol: any inline function or template of a header), the linker might keep
the copy for AVX-512 and call it on a processor that lacks it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from clearhead.backends import native

BUILD = Path(__file__).resolve().parent.parent / "build" / "core"
UNITS = {
    path.parts[len(BUILD.parts) + 1]: path for path in BUILD.glob("CMakeFiles/kernels_*.dir/**/unit.cpp.o")
}
NAMES = sorted(UNITS)

#: What a kernel unit may ask of others: copying memory, the core's own functions, what sanitizers add, and the
#: compiler's own support library (counting bits, for processors without an instruction for it).
ALLOWED = re.compile(
    r"__popcount[ds]i2|mem(cpy|set|move|cmp)|clearhead::.*|_GLOBAL_OFFSET_TABLE_|__stack_chk_fail|.*([at]|ub)san.*"
)

needs_units = pytest.mark.skipif(not UNITS, reason="no build folder (build/core): the objects are not there")


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


def symbols(path: Path) -> list[tuple[str, str]]:
    """Type (a letter of nm) and name of every symbol that other units can see or must give."""
    run = subprocess.run(["nm", "-C", "--format=posix", path], capture_output=True, text=True, check=True)
    rows = [re.fullmatch(r"(.+) ([A-Za-z])( [0-9a-f ]*)?", line) for line in run.stdout.splitlines()]
    assert rows
    assert all(rows)
    return [(row[2], row[1]) for row in rows if row and (row[2].isupper() or row[2] in "uvw")]


@needs_units
@needs("nm")
@pytest.mark.parametrize("unit", NAMES)
def test_a_kernel_unit_shares_no_code_with_others(unit: str) -> None:
    name = unit.removeprefix("kernels_").removesuffix(".dir")
    seen = symbols(UNITS[unit])
    weak = [symbol for kind, symbol in seen if kind in "VWuvw"]
    assert not weak, "weak symbols: the linker may use this copy for other units"
    given = [symbol for kind, symbol in seen if kind in "BCDGRST"]
    assert given == [f"clearhead::kernels_{name}()"]


@needs_units
@needs("nm")
@pytest.mark.parametrize("unit", NAMES)
def test_a_kernel_unit_needs_no_standard_library(unit: str) -> None:
    needed = [symbol for kind, symbol in symbols(UNITS[unit]) if kind == "U"]
    assert [symbol for symbol in needed if not ALLOWED.fullmatch(symbol)] == []


@needs_units
@needs("objdump")
@pytest.mark.parametrize("unit", NAMES)
def test_wide_registers_appear_only_where_the_processor_was_asked_for_them(unit: str) -> None:
    run = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", UNITS[unit]], capture_output=True, text=True, check=True
    )
    code = run.stdout
    if "x86-64" not in code:
        pytest.skip("no x86-64 code")
    assert ("%zmm" in code) == unit.startswith("kernels_v4"), "AVX-512"
    assert ("%ymm" in code) == (unit != "kernels_portable.dir"), "AVX2"
    assert ("%tmm" in code) == (unit == "kernels_v4amx.dir"), "the tile unit"


@needs_units
@needs("objdump")
def test_everything_else_runs_on_any_processor() -> None:
    others = [path for path in BUILD.glob("CMakeFiles/*.dir/csrc/**/*.o") if "unit.cpp" not in path.name]
    assert any(path.name.startswith("dispatch") for path in others)
    for path in others:
        run = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True)
        assert not re.search(r"%[yzt]mm", run.stdout), path.name


@needs("nm")
def test_the_module_gives_other_libraries_nothing_but_itself() -> None:
    core = native.core()
    if core is None:
        pytest.skip("the C++ core is not built")
    run = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", str(core.__file__)],
        capture_output=True,
        text=True,
        check=True,
    )
    functions = [line.split()[0] for line in run.stdout.splitlines() if line.split()[1] in "TW"]
    assert functions == ["PyInit__core"]
