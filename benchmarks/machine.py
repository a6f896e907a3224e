"""What a figure depends on: the processor's abilities, the versions, and ceilings measured on the spot.

    python benchmarks/machine.py

Nothing that names a person's machine: no host, no path, no model name.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve")
SIDE = 2048  # of the matrices: 3 × 16 MB, 17 GFLOP
READ_BYTES = 2**30


def describe(*, ceilings: bool = True) -> dict[str, Any]:
    """Return processor, versions and threads, and unless told otherwise the measured ceilings (2 s).

    load_before: how many processes wanted to run in the minute before; above 0, timings are disturbed.
    """
    about: dict[str, Any] = {
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in instruction_flags()],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "transformers": _version("transformers"),
        "load_before": round(os.getloadavg()[0], 2),
    }
    if ceilings:
        about["sgemm_gflops_1_thread"] = round(sgemm(1), 1)
        about["sgemm_gflops_all_threads"] = round(sgemm(torch.get_num_threads()), 1)
        about["memory_read_gb_per_s"] = round(read_rate(), 1)
    return about


def sgemm(threads: int) -> float:
    """GFLOP/s of a float32 matrix product, best of five."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
        out = torch.empty(SIDE, SIDE)
        return 2 * SIDE**3 / best(lambda: torch.mm(a, b, out=out)) / 1e9
    finally:
        torch.set_num_threads(before)


def read_rate() -> float:
    """GB/s at which all threads together read 1 GiB that they sum up, best of five."""
    block = torch.ones(READ_BYTES // 4)
    return READ_BYTES / best(block.sum) / 1e9


def best(run: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of some runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def instruction_flags() -> set[str]:
    """What the processor says it has, in the system's words; nothing where it does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    found: set[str] = set()
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                found |= set(value.split())
    return found


def processor() -> str:
    """The processor's name, for a screen: results do not keep it."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    family = "/".join(named[name] for name in ("cpu family", "model") if name in named)
    name = named.get("model name", platform.processor() or platform.machine())
    return f"{name} (family/model {family})" if family else name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    for name, value in describe().items():
        print(f"{name:>26}  {value}")
