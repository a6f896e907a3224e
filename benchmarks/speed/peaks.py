"""How much memory one layer takes beyond its inputs, as its length grows; each point a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import clearhead as ch
from memory import resident
from record import exponent, pairs
from speed.prefill import Shape
from speed.training import written_down

SCRIPT = Path(__file__).parents[1] / "kernels.py"
SIZES = (2048, 4096, 8192, 16384, 32768)
LARGEST_WRITTEN_DOWN = 8192  # (9, n, n) float32: 2.4 GB, and as much again for its softmax
SEGMENTS = 16


def _forward(backend: str, n: int) -> Callable[[], object]:
    q, k, v = Shape(1, 9, 3, n, 64).inputs()
    return lambda: ch.attention(q, k, v, mask=ch.Mask(causal=True), backend=backend)


def _observed(backend: str, n: int) -> Callable[[], object]:
    q, k, v = Shape(1, 9, 3, n, 64).inputs()
    asked = [ch.SegmentMass(torch.arange(n) * SEGMENTS // n), ch.Entropy(), ch.TopKeys(8)]
    return lambda: ch.attention(q, k, v, mask=ch.Mask(causal=True), observe=asked, backend=backend)


def _trained(backend: str, n: int) -> Callable[[], object]:
    leaves = [t.requires_grad_() for t in Shape(1, 9, 3, n, 64).inputs()]

    def run() -> object:
        with torch.enable_grad():
            out = ch.attention(*leaves, mask=ch.Mask(causal=True), backend=backend)
        return torch.autograd.grad(out, leaves, out.detach())

    return run


def _written_down(backend: str, n: int) -> Callable[[], object]:
    q, k, v = Shape(1, 9, 3, n, 64).inputs()
    return lambda: written_down(q, k, v, True)


FORMS = {
    "forward": _forward,
    "forward, observed": _observed,
    "forward + backward": _trained,
    "written down": _written_down,
}


def point(form: str, backend: str, n: int) -> int:
    """Peak extra bytes of one call. In a fresh process."""
    FORMS[form](backend, 64)()
    run = FORMS[form](backend, n)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present size
    answer = run()
    peak = resident("VmHWM") - before
    del answer
    return peak


def curve(backend: str, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """Bytes of every form at every length, and how they grow; {} where the system does not tell."""
    if not Path("/proc/self/clear_refs").exists():
        return {}
    found: dict[str, Any] = {}
    for form in FORMS:
        some = [n for n in sizes if form != "written down" or n <= LARGEST_WRITTEN_DOWN]
        peaks = [_fresh(form, backend, n) for n in some]
        found[form] = {
            "tokens": some,
            "bytes": peaks,
            "exponent": exponent(some, peaks),
            "steps": pairs(some, peaks),
            "bytes per token": peaks[-1] / some[-1],
        }
    return found


def _fresh(form: str, backend: str, n: int) -> int:
    command = [sys.executable, str(SCRIPT), "--peak", form, backend, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{form} at {n} tokens ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return int(json.loads(done.stdout.splitlines()[-1]))
