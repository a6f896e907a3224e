"""How every benchmark here speaks: its arguments, its table, its JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import describe

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def arguments(about: str | None, *, text: bool = False) -> argparse.ArgumentParser:
    """Return a parser with --quick and --out, and with --text where a benchmark reads one."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run, not how well")
    parser.add_argument(
        "--out", type=Path, help="JSON file (default: results/NAME.json beside this file; none with --quick)"
    )
    if text:
        parser.add_argument("--text", type=Path, help="text file to read (default: this project's LICENSE)")
    return parser


def save(
    name: str, options: argparse.Namespace, figures: dict[str, Any], *, script: str = "", **more: Any
) -> None:
    """Write a benchmark's JSON; with --quick only where --out says so.

    script: the program's name, where the JSON has another.
    """
    target = options.out or (None if options.quick else RESULTS / f"{name}.json")
    if target is None:
        print("\n--quick: nothing written")
        return
    results = {
        "benchmark": name,
        "command": command(script or name, options),
        "date": datetime.date.today().isoformat(),
        "machine": describe(),
        "figures": figures,
        **more,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {target.name}")


def command(name: str, options: argparse.Namespace) -> str:
    """The command as one types it in the project's folder; of a text only its name is told."""
    words = [f"python benchmarks/{name}.py"]
    for given in ("threads", "seconds", "isa"):
        if getattr(options, given, None):
            words.append(f"--{given} {getattr(options, given)}")
    if getattr(options, "text", None):
        words.append(f"--text {options.text.name}")
    words += ["--only", *options.only] if getattr(options, "only", None) else []
    return " ".join(words + (["--quick"] if options.quick else []))


def table(rows: Sequence[dict[str, Any]], title: str = "") -> None:
    """Print rows of equal keys, one line each."""
    if title:
        print(f"\n{title}")
    if not rows:
        return
    head = list(rows[0])
    cells = [[_shown(row.get(name)) for name in head] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(head)]
    for line in [head, *cells]:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))
    sys.stdout.flush()


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope b of the line log value = a + b log size (least squares)."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def pairs(sizes: Sequence[float], values: Sequence[float]) -> list[float]:
    """The exponent between each size and the next."""
    return [exponent(sizes[i : i + 2], values[i : i + 2]) for i in range(len(sizes) - 1)]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if value and (abs(value) < 0.1 or abs(value) >= 1e5) else f"{value:.3f}"
    return str(value)
