"""What this machine can do at best, measured in the same run: multiply-add in registers, reading memory.

The loops are in ceilings.cpp and are compiled when they are first needed, into build/, with the compiler that
$CXX names, or g++, or c++. Without a compiler there are no ceilings (`load` returns None), and the tables say
so. Knows nothing of attention.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("ceilings.cpp")
BUILD = Path(__file__).resolve().parents[2] / "build" / "bench"
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
SPIN_MS = 2.0  # how long a multiply loop runs: short enough for every round, long enough to wake up
READ_MB = (4, 16, 64, 256)


class Kind(NamedTuple):
    """One loop: its name, its place in ceilings.cpp, and the processor flags that it needs."""

    name: str
    place: int
    flags: frozenset[str]


KINDS = (
    Kind("base", 0, frozenset()),  # SSE2 on x86-64, NEON on ARM
    Kind("avx2", 1, frozenset({"avx2", "fma"})),
    Kind("avx512", 2, frozenset({"avx512f"})),
    Kind("bf16", 3, frozenset({"avx512f", "avx512_bf16"})),  # VDPBF16PS: bfloat16 products, float32 sums
    Kind("amx", 4, frozenset({"avx512f", "amx_tile", "amx_bf16"})),  # the tile unit, likewise
)


class Ceilings:
    """The compiled loops that this processor can run."""

    def __init__(self, library: ctypes.CDLL, flags: set[str]) -> None:
        self._library = library
        library.operations.restype = ctypes.c_double
        library.operations.argtypes = (ctypes.c_int, ctypes.c_int64)
        library.multiply.restype = None
        library.multiply.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int)
        library.read_all.restype = ctypes.c_uint64
        library.allowed.restype = ctypes.c_bool
        library.allowed.argtypes = (ctypes.c_int,)
        able = [kind for kind in KINDS if kind.flags <= flags]
        self.kinds = {kind.name: kind for kind in able if library.allowed(kind.place)}
        self._counts: dict[str, int] = {}

    def spin(self, kind: str, threads: int) -> tuple[Callable[[], object], float]:
        """Return a multiply loop that takes about SPIN_MS, and its operations on all threads together."""
        place = self.kinds[kind].place
        if kind not in self._counts:
            count = 10_000
            self._library.multiply(place, count, 1)
            seconds = fastest(lambda: self._library.multiply(place, count, 1), 20)
            self._counts[kind] = max(1, int(count * SPIN_MS / 1e3 / seconds))
        count = self._counts[kind]
        operations = self._library.operations(place, count) * threads
        return lambda: self._library.multiply(place, count, threads), operations

    def reader(
        self, tensors: list[Tensor], threads: int, kind: str = ""
    ) -> tuple[Callable[[], object], float]:
        """Return a loop that reads the memory of contiguous tensors once, and its bytes."""
        wide = kind or ("avx512" if "avx512" in self.kinds else "avx2" if "avx2" in self.kinds else "base")
        for tensor in tensors:
            assert tensor.is_contiguous(), "a read loop reads what is stored, in one stretch"
        parts = len(tensors)
        starts = (ctypes.c_void_p * parts)(*(t.data_ptr() for t in tensors))
        sizes = [t.numel() * t.element_size() for t in tensors]
        bytes_of = (ctypes.c_int64 * parts)(*sizes)
        place = self.kinds[wide].place

        def run(keep: object = tensors) -> object:  # the tensors live as long as the loop
            return self._library.read_all(place, starts, bytes_of, parts, threads)

        return run, float(sum(sizes))


def load(flags: set[str]) -> Ceilings | None:
    """Compile the loops if need be and return them; None, with a line printed, if that is not possible."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        print("no ceilings: no C++ compiler found ($CXX, g++, c++)")
        return None
    mark = hashlib.sha256(SOURCE.read_bytes() + compiler.encode()).hexdigest()[:12]
    target = BUILD / f"ceilings-{mark}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        command = [*compiler.split(), *FLAGS, "-o", str(target), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"no ceilings: {compiler} failed\n{done.stderr[-1000:]}")
            return None
    return Ceilings(ctypes.CDLL(str(target)), flags)


def label(kind: str) -> str:
    """The name of a multiply loop's rate in what `measure` returns."""
    return f"multiply-add, {kind}, GF/s"


def measure(ceilings: Ceilings, threads: int) -> dict[str, dict[str, float]]:
    """Return GF/s of each multiply loop and GB/s of each read, on one thread and on all."""
    found: dict[str, dict[str, float]] = {}
    for name in ceilings.kinds:
        row = found[label(name)] = {}
        for count in sorted({1, threads}):
            run, operations = ceilings.spin(name, count)
            row[f"{count} threads"] = operations / fastest(run, 40) / 1e9
    for size in READ_MB:
        block = torch.ones(size * 2**20 // 4)
        repeats = max(5, 512 // size)
        row = found[f"read loop, {size} MB, GB/s"] = {}
        for count in sorted({1, threads}):
            run, read = ceilings.reader([block], count)
            row[f"{count} threads"] = read / fastest(run, repeats) / 1e9
        summed = found[f"torch.sum, {size} MB, GB/s"] = {}
        summed[f"{threads} threads"] = size * 2**20 / fastest(block.sum, repeats) / 1e9
    return found


def fastest(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some runs, after one that is not counted."""
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
