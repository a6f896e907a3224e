"""`clearhead doctor`: what attention runs on here, and why not on something faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

#: What a processor must have for the kernels of each instruction set.
NEEDS = {
    "portable": "nothing special",
    "v3": "AVX2 and FMA (x86-64-v3)",
    "v4": "AVX-512 (x86-64-v4)",
    "v4bf16": "AVX-512 with products of bfloat16",
    "v4amx": "AVX-512 with the tile unit (AMX)",
}
PACKAGES = ("torch", "numpy", "transformers")
#: The flags of a processor that attention can use, as the system names them.
FLAGS = {
    "x86_64": (
        *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
        *("avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
    ),
    "aarch64": ("asimd", "asimdhp", "bf16", "sve"),
}
FLAGS["AMD64"], FLAGS["arm64"] = FLAGS["x86_64"], FLAGS["aarch64"]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show what attention runs on here: backends, instruction sets, threads and versions, and what is wrong.

    CLEARHEAD_ISA in the environment chooses the instruction set of the C++ core.
    """
    import json

    from clearhead.cli.terminal import write

    found = examine()
    if as_json:
        write(json.dumps(found, ensure_ascii=True, indent=1) + "\n")
    else:
        from clearhead.cli.tables import console

        console().print(_view(found))


def examine() -> dict[str, Any]:
    """Return everything that `--json` prints.

    backends: name, usable (for a plain float32 call on the CPU), why_not, default (the one that such a call
    gets). core: the C++ core. processor: flags is None where the system does not tell. openmp: the libraries
    that are loaded, None where the system does not tell. problems: sentences.
    """
    import os
    import platform

    import torch

    found = {
        "versions": _versions(),
        "backends": _backends(),
        "core": _core(),
        "processor": _processor(),
        "threads": {
            "used": torch.get_num_threads(),
            "cores": _cores(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
        "openmp": _openmp(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    found["problems"] = _problems(found)
    return found


# ---------------------------------------------------------------------- what there is


def _versions() -> dict[str, str | None]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import clearhead

    found: dict[str, str | None] = {"clearhead": clearhead.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _backends() -> list[dict[str, Any]]:
    import torch

    from clearhead.backends import registry
    from clearhead.backends.base import Request
    from clearhead.mask import Mask
    from clearhead.shapes import check_qkv
    from clearhead.visibility import Visibility

    q = torch.zeros(1, 2, 128, 64)
    shape = check_qkv(q, q, q)
    seen = Visibility.of(Mask(causal=True), shape.B, shape.Hq, shape.Lq, shape.Lk, q.device)
    request = Request(q, q, q, shape, seen, scale=0.125)
    default = registry.choose(request).name
    found = []
    for name in registry.names():
        why_not = registry.get(name).supports(request)
        found.append(
            {"name": name, "usable": why_not is None, "why_not": why_not, "default": name == default}
        )
    return found


def _core() -> dict[str, Any]:
    import os

    from clearhead.backends import native

    module = native.core()
    runs = None if module is None else module.isa()
    return {
        "loaded": module is not None,
        "why_not": native.why_not() or None,
        "compiler": getattr(module, "compiler", None),
        "sanitizers": getattr(module, "sanitize", None) or None,
        "isa": runs,
        "isas": [isa._asdict() | {"chosen": isa.name == runs} for isa in native.isas()],
        "CLEARHEAD_ISA": os.environ.get("CLEARHEAD_ISA"),
    }


def _processor() -> dict[str, Any]:
    import platform
    from pathlib import Path

    architecture = platform.machine()
    flags = None
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            there = set(value.split())
            flags = {flag: flag in there for flag in FLAGS.get(architecture, ())}
            break
    return {"architecture": architecture, "flags": flags}


def _cores() -> int | None:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _openmp() -> list[str] | None:
    """The OpenMP runtimes in this process, each by the end of its path."""
    import re
    from pathlib import Path

    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    runtimes = [Path(path) for path in paths if re.match(r"lib(gomp|iomp5|omp)[-.]", Path(path).name)]
    return sorted("/".join(path.parts[-3:]) for path in runtimes)


def _problems(found: dict[str, Any]) -> list[str]:
    problems = []
    core, threads, openmp = found["core"], found["threads"], found["openmp"]
    if not core["loaded"]:
        problems.append(f"{core['why_not']}; attention runs through torch alone, slower")
    if core["sanitizers"]:
        problems.append(f"the C++ core was built with {core['sanitizers']}, for tests: it is slow")
    missing = [isa["name"] for isa in core["isas"] if isa["runs_here"] and not isa["built"]]
    if missing:
        problems.append(f"the C++ core was built without {', '.join(missing)}, which runs here")
    if core["CLEARHEAD_ISA"]:
        problems.append(f"CLEARHEAD_ISA is set: the core runs {core['isa']} whatever the processor can do")
    if openmp is not None and len(openmp) > 1:
        problems.append(f"{len(openmp)} OpenMP runtimes are loaded, whose threads get in each other's way")
    if threads["cores"] is not None and threads["used"] > threads["cores"]:
        problems.append(f"{threads['used']} threads share {threads['cores']} cores; set OMP_NUM_THREADS")
    return problems


# ---------------------------------------------------------------------- how it is shown


def _view(found: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from clearhead.cli.terminal import visible

    core, threads, openmp = found["core"], found["threads"], found["openmp"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    lines = [f"{versions}; {found['system']}"]
    if core["loaded"]:
        lines.append(f"C++ core: compiled by {core['compiler']}, runs {core['isa']}")
    flags = found["processor"]["flags"]
    if flags is not None:
        has = ", ".join(flag for flag, there in flags.items() if there) or "none of the flags that matter"
        lacks = ", ".join(flag for flag, there in flags.items() if not there)
        lines.append(f"processor: {has}" + (f"; without {lacks}" if lacks else ""))
    asked = threads["OMP_NUM_THREADS"]
    cores = "" if threads["cores"] is None else f" on {threads['cores']} cores"
    lines.append(f"threads: {threads['used']}{cores}, OMP_NUM_THREADS {asked or 'not set'}")
    if openmp is not None:
        lines.append(f"OpenMP: {', '.join(openmp) or 'no runtime is loaded'}")
    problems = [Text(f"problem: {visible(p, newline=' ')}", style="yellow") for p in found["problems"]]
    tables = [_backend_table(found), *([_isa_table(found)] if core["isas"] else [])]
    rest = [Text(visible(line, newline=" ")) for line in lines]
    return Group(rest[0], *tables, *rest[1:], *(problems or [Text("no problems found", style="green")]))


def _backend_table(found: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    from clearhead.cli.terminal import cell

    table = Table("backend", "usable", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for backend in found["backends"]:
        said = "default" if backend["default"] else backend["why_not"] or ""
        table.add_row(cell(backend["name"]), _yes(backend["usable"]), cell(said, 200))
    return table


def _isa_table(found: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table("instruction set", "needs", "built", "runs here", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for isa in found["core"]["isas"]:
        chosen = "chosen" if isa["chosen"] else ""
        table.add_row(
            isa["name"], NEEDS.get(isa["name"], ""), _yes(isa["built"]), _yes(isa["runs_here"]), chosen
        )
    return table


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
