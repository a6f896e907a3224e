"""The table, as it appears line by line on a terminal and as it stands on a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]
COLUMNS = (
    ("shape", 30),
    ("ours ms", 8),
    ("peer", 18),
    ("peer ms", 8),
    ("ratio", 8),
    ("spread", 15),
    ("rate", 9),
    ("of ceiling", 15),
    ("reached", 7),
    ("target", 0),
)
LEFT = ("shape", "peer", "target", "reached")


def head() -> str:
    """The names of the columns."""
    return "  " + _row({name: name for name, _ in COLUMNS})


def text(line: Line, before: Line | None = None) -> str:
    """One line, under the name of its work if that is not the one of the line before."""
    same = before is not None and before["work"] == line["work"]
    return ("" if same else f"{line['work']}\n") + "  " + _row(cells(line))


def cells(line: Line) -> dict[str, str]:
    """What stands in each column."""
    shown = {"work": line["work"], "shape": line["shape"]}
    if "why" in line:
        return shown | {"ours ms": line["why"]}
    shown["ours ms"] = number(line["ours ms"])
    if "peer" in line:
        shown |= {"peer": line["peer"], "peer ms": number(line["peer ms"])}
        low, middle, high = (line["ratio"][name] for name in ("low", "middle", "high"))
        if line["added"]:
            low, middle, high = (f"{1 / value - 1:+.1%}" for value in (high, middle, low))
        else:
            low, middle, high = (f"{value:.2f}" for value in (low, middle, high))
            middle += "×"
        shown |= {"ratio": middle, "spread": f"{low}–{high}"}
    shown["rate"] = rate(line)
    shown["of ceiling"] = ", ".join(
        f"{share['middle']:.0%} of {name}" for name, share in line.get("shares", {}).items()
    )
    shown["target"] = line["target"]
    shown["reached"] = verdict(line)
    return shown


def rate(line: Line) -> str:
    """Operations or bytes per second, whichever the line is about."""
    if "GB/s" in line and "multiply" not in line["shares"]:
        return f"{line['GB/s']:.0f} GB/s"
    return f"{line['GF/s']:.0f} GF/s" if "GF/s" in line else ""


def verdict(line: Line) -> str:
    """yes, no, or nothing where no target was set."""
    return {None: "", True: "yes", False: "NO"}[line["reached"]]


def number(value: float) -> str:
    """Milliseconds, three digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def summary(lines: Sequence[Line]) -> str:
    """How many targets were reached, and which were not."""
    judged = [line for line in lines if line["reached"] is not None]
    missed = [line for line in judged if not line["reached"]]
    said = f"{len(judged) - len(missed)} of {len(judged)} lines with a target reach it"
    for line in missed:
        row = cells(line)
        here = [row.get("ratio", ""), row.get("peer", ""), row["of ceiling"]]
        said += f"\n  missed: {row['work']}, {row['shape']}: {' '.join(filter(None, here))}"
        said += f"; wanted {row['target']}"
        if line.get("ratio at the ceiling", math.inf) < (line["goal"] or 0):
            said += f"; out of reach here: the ceiling itself is at {line['ratio at the ceiling']:.2f}×"
    return said


def _row(cells: dict[str, str]) -> str:
    parts = []
    for name, width in COLUMNS:
        cell = cells.get(name, "")
        parts.append(f"{cell:<{width}}" if name in LEFT else f"{cell:>{width}}")
    return "  ".join(parts).rstrip()
