"""How fast is attention here, against whom, and how far from what this machine can do?

    python benchmarks/kernels.py [--quick] [--only PART ...] [--isa NAME] [--backend NAME] [--seconds N]

Every line is some work at some shape: checked against float64 first (a wrong result is an error, not a
figure), then timed in turns with others that do the same and with loops that do nothing but multiply and add,
or read the same bytes (speed/pairs.py says how). "ratio" is a peer's time over ours, or what looking adds;
"of ceiling" our rate over that of such a loop; operations are the useful ones (hidden pairs do not count).

Prints the table and writes results/kernels.json with a plot of time against length, kernels.svg; with --quick
(under 3 minutes) both go to build/bench/. --isa v3 forces an instruction set, as CLEARHEAD_ISA does, and
writes kernels_v3.json. --only alone writes nothing. Ends with 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import clearhead
from clearhead.backends import native, registry
from machine import instruction_flags, processor
from record import RESULTS, arguments, save, table
from speed import ceilings, curve, decode, lines, looking, models, onnx, peaks, prefill, show, small, training
from speed.case import Cases, Setup
from speed.pairs import Budget

PARTS: dict[str, Callable[[Setup], Cases]] = {
    "prefill": prefill.cases,
    "windows": prefill.sparse_cases,
    "decode": decode.cases,
    "training": training.cases,
    "looking": looking.cases,
    "small": small.cases,
    "models": models.cases,
}
AFTER = ("curve", "memory")
#: Instruction set of our core -> (column of the targets, loops that can bound it: float32 by the first,
#: bfloat16 by the fastest, as widening is always possible).
CLASSES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "portable": (None, ("base",)),
    "v3": ("avx2", ("avx2",)),
    "v4": ("avx512", ("avx512",)),
    "v4bf16": ("avx512", ("avx512", "bf16")),
    "v4amx": ("avx512", ("avx512", "bf16", "amx")),
}
CURVE = (256, 512, 1024, 2048, 4096, 8192, 16384)


def core_isa() -> str | None:
    """The instruction set that our compiled core runs here; None where there is no core."""
    core = native.core()
    return None if core is None else str(core.isa())


def set_up(options: argparse.Namespace) -> tuple[Setup, str | None, dict[str, Any]]:
    """What is measured, the column of targets that holds here, and what the machine can do."""
    names = registry.names()
    backend = options.backend or ("cpu" if "cpu" in names else "sdpa")
    if backend not in names:
        sys.exit(f"--backend must be one of {', '.join(names)}, got {backend!r}")
    isa, threads = core_isa(), torch.get_num_threads()
    machine, kinds = CLASSES.get(isa or "", (None, ()))
    loops = ceilings.load(instruction_flags())
    rates = ceilings.measure(loops, threads) if loops else {}
    able = [kind for kind in kinds if loops and kind in loops.kinds]
    half = max(able, key=lambda kind: rates[ceilings.label(kind)][f"{threads} threads"], default="")
    setup = Setup(backend, options.quick, threads, loops, able[0] if able else "", half)
    about = {
        "backend": backend,
        "isa": isa,
        "targets": machine,
        "multiply ceiling": setup.multiply,
        "multiply ceiling, bf16": setup.multiply_bf16,
        "ceilings": rates,
        "torch.mm 2048, GF/s": {
            str(t).removeprefix("torch."): _mm(t) for t in (torch.float32, torch.bfloat16)
        },
    }
    return setup, machine, about


def _mm(dtype: torch.dtype, side: int = 2048) -> float:
    a, b, out = (torch.rand(side, side).to(dtype) for _ in range(3))
    return 2 * side**3 / ceilings.fastest(lambda: torch.mm(a, b, out=out), 5) / 1e9


def say(setup: Setup, about: dict[str, Any]) -> None:
    """Processor, versions and ceilings."""
    print(f"processor: {processor()}, {setup.threads} threads; {', '.join(sorted(_notable()))}")
    print(f"clearhead {clearhead.__version__}, torch {torch.__version__}, ", end="")
    print(f"backend {setup.backend}, instruction set {about['isa'] or 'of torch'}, ", end="")
    print(f"targets of {about['targets'] or 'no column'}")
    if setup.backend != "cpu":
        print(f"NOTE: 'ours' is the backend {setup.backend}, not the compiled core")
    if not onnx.installed():
        print("left out: onnxruntime's GroupQueryAttention (onnxruntime and onnx are not installed)")
    found = [{"ceiling": name, **rates} for name, rates in about["ceilings"].items()]
    table(found, "what the machine can do")
    print("torch.mm 2048:", ", ".join(f"{k} {v:.0f} GF/s" for k, v in about["torch.mm 2048, GF/s"].items()))


def _notable() -> set[str]:
    wanted = (
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512_bf16",
        "avx512_vnni",
        "avx512_fp16",
        "amx_bf16",
        "asimd",
    )
    return instruction_flags() & {*wanted, "sve", "bf16"}


def timed(setup: Setup, machine: str | None, parts: list[str], seconds: float) -> list[lines.Line]:
    """Print the table while it is measured; return its lines."""
    least = 5 if setup.quick else 9
    found: list[lines.Line] = []
    print("\n" + show.head())
    for part in parts:
        if part not in PARTS:
            continue
        for make in PARTS[part](setup):
            for line in lines.run(make, setup, Budget(seconds, least=least), machine):
                print(show.text(line, found[-1] if found else None), flush=True)
                found.append(line | {"part": part})
    return found


def main() -> None:
    """Print the table, write the JSON and the plot."""
    parser = arguments(__doc__)
    names = [*PARTS, *AFTER]
    parser.add_argument(
        "--only", nargs="+", metavar="PART", choices=names, help=f"some of {', '.join(names)}"
    )
    parser.add_argument("--isa", help="instruction set to force, as CLEARHEAD_ISA does")
    parser.add_argument("--backend", help="which backend is 'ours' (default: cpu where it is there)")
    parser.add_argument("--seconds", type=float, help="for each line (default: 4; with --quick 0.7)")
    parser.add_argument(
        "--peak", nargs=3, metavar=("FORM", "BACKEND", "N"), help="one point (used by itself)"
    )
    options = parser.parse_args()
    if options.isa and os.environ.get("CLEARHEAD_ISA") != options.isa:
        again = [sys.executable, *sys.argv]
        sys.exit(
            subprocess.run(again, env=os.environ | {"CLEARHEAD_ISA": options.isa}, check=False).returncode
        )
    if options.peak:
        print(json.dumps(peaks.point(options.peak[0], options.peak[1], int(options.peak[2]))))
        return
    begin = time.perf_counter()
    setup, machine, about = set_up(options)
    say(setup, about)
    left_out = {"memory"} if options.quick else set()
    parts = options.only or [name for name in names if name not in left_out]
    found = timed(setup, machine, parts, options.seconds or (0.7 if options.quick else 4))
    print(f"\n{show.summary(found)}", flush=True)
    more: dict[str, Any] = {"about": about, "lines": found}
    name = "kernels" + (f"_{options.isa}" if options.isa else "")
    whole = not options.only or options.isa is not None
    target = options.out or ((RESULTS if whole and not options.quick else ceilings.BUILD) / f"{name}.json")
    if "curve" in parts:
        sizes = CURVE[:5] if options.quick else CURVE
        more["curve"] = curve.measured(setup, sizes, 0.5 if options.quick else 4)
        draw(target.with_suffix(".svg"), more["curve"], about)
    if "memory" in parts:
        more["memory"] = peaks.curve(setup.backend)
        table([{"form": form, **_growth(row)} for form, row in more["memory"].items()], "peak extra memory")
    print(f"\n{time.perf_counter() - begin:.0f} s")
    if whole or options.out:
        options.out = target
        save(name, options, figures(found, more), script="kernels", **more)
    if any(line.get("wrong") for line in found):
        sys.exit("a result was wrong")


def draw(target: Path, points: curve.Points, about: dict[str, Any]) -> None:
    """Write the plot."""
    isa = about["isa"] or f"backend {about['backend']}"
    title = f"Causal attention of one layer (9 heads, 3 key heads, d = 64, float32, {isa})"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(curve.drawing(points, title), encoding="utf-8")
    table(
        [{"form": form} | {str(n): ms for n, ms in line} for form, line in points.items()],
        "milliseconds by tokens",
    )


def _growth(row: dict[str, Any]) -> dict[str, Any]:
    sizes = {str(n): peak / 2**20 for n, peak in zip(row["tokens"], row["bytes"], strict=True)}
    return {"exponent": row["exponent"], **{f"{n} MB": value for n, value in sizes.items()}}


def figures(found: list[lines.Line], more: dict[str, Any]) -> dict[str, Any]:
    """What docs/claims.md is written from."""
    judged = [line for line in found if line["reached"] is not None]

    def ratio(key: str, peer: str) -> float | None:
        at = [line for line in found if line.get("key") == key and line.get("peer") == peer]
        return at[0]["ratio"]["middle"] if at else None

    return {
        "judged": len(judged),
        "reached": sum(line["reached"] for line in judged),
        "wrong": sum(bool(line.get("wrong")) for line in found),
        "gpt2_step_eager": ratio("gpt2 1024", "transformers eager"),
        "gpt2_step_sdpa": ratio("gpt2 1024", "transformers sdpa"),
        "gpt2_layer_written_down": ratio("gpt2 layer", "written down"),
        "gpt2_layer_sdpa": ratio("gpt2 layer", "SDPA"),
        "memory": {form: row["exponent"] for form, row in more.get("memory", {}).items()},
        "memory_tokens": more["memory"]["forward"]["tokens"] if more.get("memory") else [],
    }


if __name__ == "__main__":
    main()
