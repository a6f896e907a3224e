"""Write docs/claims.md: every published fact with our own figure beside it, from benchmarks/results/*.json.

    python benchmarks/claims.py            write it
    python benchmarks/claims.py --check    say so and end with 1 if it is not what would be written

The rows are in claim_rows.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from claim_rows import CLAIMS, TARGETS, remarks

HERE = Path(__file__).parent
RESULTS, DOC = HERE / "results", HERE.parent / "docs" / "claims.md"


def read(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the JSON of every benchmark that a row needs, by name. Ends the program if one is missing."""
    found = {}
    for name in dict.fromkeys(row.benchmark for row in (*CLAIMS, *TARGETS)):
        path = folder / f"{name}.json"
        if not path.exists():
            sys.exit(f"benchmarks/results/{name}.json is missing: run python benchmarks/{name}.py")
        found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def render(results: dict[str, dict[str, Any]]) -> str:
    """Return the document."""
    figures = {name: result["figures"] for name, result in results.items()}
    lines = [
        "# What is known, and what we measured",
        "",
        "Written by `python benchmarks/claims.py` from the files in `benchmarks/results/`, which the "
        "commands in the last column make. Do not edit it by hand.",
        "",
        "| | published fact | our figure | command |",
        "|---|---|---|---|",
    ]
    for claim in CLAIMS:
        command = results[claim.benchmark]["command"]
        lines.append(f"| {claim.name} | {claim.published} | {claim.ours(figures)} | `{command}` |")
    lines += ["", "## Targets", "", "| figure | target | here | reached | command |", "|---|---|---|---|---|"]
    for goal in TARGETS:
        f = figures[goal.benchmark]
        reached = "yes" if goal.reached(f) else "**no**"
        command = results[goal.benchmark]["command"]
        lines.append(f"| {goal.what} | {goal.target} | {goal.ours(f)} | {reached} | `{command}` |")
    lines += ["", *remarks(figures), "", "## Machines", ""]
    lines += ["| benchmark | date | machine |", "|---|---|---|"]
    lines += [f"| {name} | {one['date']} | {machine(one['machine'])} |" for name, one in results.items()]
    return "\n".join(lines) + "\n"


def machine(about: dict[str, Any]) -> str:
    """One line on where a figure was made."""
    return (
        f"{about['architecture']} ({', '.join(about['instruction_sets'])}), {about['cores']} cores, "
        f"{about['memory_gb']} GB; torch {about['torch']} with torch_threads={about['torch_threads']}, "
        f"transformers {about['transformers']}, Python {about['python']}; sgemm "
        f"{about['sgemm_gflops_1_thread']} GFLOP/s on one thread, {about['sgemm_gflops_all_threads']} on "
        f"all; reads {about['memory_read_gb_per_s']} GB/s"
    )


def main() -> None:
    """Write the document or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 on a difference")
    options = parser.parse_args()
    text = render(read())
    if not options.check:
        DOC.parent.mkdir(exist_ok=True)
        DOC.write_text(text, encoding="utf-8")
    elif not DOC.exists() or DOC.read_text(encoding="utf-8") != text:
        sys.exit("docs/claims.md is not what the results say: run python benchmarks/claims.py")


if __name__ == "__main__":
    main()
