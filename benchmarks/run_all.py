"""Run every benchmark in order, then write docs/claims.md and the measured part of docs/performance.md.

    python benchmarks/run_all.py [--quick] [NAME ...]

With --quick nothing is written. The kernels are measured twice where the processor has AVX-512, the second
time as if it had AVX2 only. Ends with 1 if one of them fails, after having run the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from machine import instruction_flags

HERE = Path(__file__).parent
NAMES = (
    "mechanism",
    "parity",
    "animal",
    "exactness",
    "memory",
    "cost_of_looking",
    "kernels",
    "caching",
    "caches",
    "gqa",
    "guard_cost",
    "sinks",
    "batching",
)  # timing comes last
#: Without whole models and memory, which say nothing about an instruction set.
AS_AVX2 = ("--isa", "v3", "--only", "prefill", "windows", "decode", "training", "looking", "small", "curve")


def ran(name: str, arguments: list[str]) -> bool:
    """Run a benchmark; whether it went well."""
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    return subprocess.run(command, check=False).returncode == 0


def has_avx512() -> bool:
    """Whether there is a narrower instruction set to compare with."""
    return "avx512f" in instruction_flags()


def main() -> None:
    """Run them."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: {', '.join(NAMES)})")
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    options = parser.parse_args()
    for name in options.names:
        if name not in NAMES:
            parser.error(f"NAME must be one of {', '.join(NAMES)}, got {name!r}")
    failed = []
    for name in options.names or NAMES:
        print(f"\n======== {name}", flush=True)
        start = time.perf_counter()
        if not ran(name, ["--quick"] if options.quick else []):
            failed.append(name)
        if name == "kernels" and not options.quick and has_avx512() and not ran(name, [*AS_AVX2]):
            failed.append(f"{name} {' '.join(AS_AVX2)}")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    if not options.quick:
        for name in ("claims", "performance"):
            subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
