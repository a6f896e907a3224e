"""Write the measured part of docs/performance.md from results/kernels.json and results/kernels_v3.json.

    python benchmarks/performance.py            write it
    python benchmarks/performance.py --check    say so and end with 1 if it is not what would be written

It stands between two marks; what is around it is written by hand and left alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from speed.show import cells, number

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "performance.md"
BEGIN = "<!-- measured: begin; made by `python benchmarks/performance.py`, do not edit -->"
END = "<!-- measured: end -->"
FILES = ("kernels", "kernels_v3")
Result = dict[str, Any]


def read(folder: Path = RESULTS) -> list[Result]:
    """The results that there are; ends the program without the first."""
    if not (folder / f"{FILES[0]}.json").exists():
        sys.exit(f"benchmarks/results/{FILES[0]}.json is missing: run python benchmarks/{FILES[0]}.py")
    paths = (folder / f"{name}.json" for name in FILES)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def render(results: list[Result]) -> str:
    """The part between the marks, marks included."""
    first = results[0]
    parts = [BEGIN, "", *how(results), "", *ceilings(results), "", *lines(results), ""]
    parts += [*remarks(first), "", "![Time against length](../benchmarks/results/kernels.svg)", ""]
    parts += [*memory(first["memory"]), "", END]
    return "\n".join(parts)


def how(results: list[Result]) -> list[str]:
    """Where and how it was measured."""
    about = results[0]["machine"]
    said = [
        f"{about['cores']} cores ({', '.join(about['instruction_sets'])}), torch {about['torch']} with "
        f"{about['torch_threads']} threads, Python {about['python']}, {results[0]['date']}. "
        "`python benchmarks/kernels.py` measures and explains; `make bench` prints a short version in under "
        "3 minutes. Sizes are B, Hq, Hkv, n, d. “Ratio” is the peer's time over ours (median over rounds of "
        "pairs), or what looking adds; “of ceiling” is our rate of useful operations or bytes over that of a "
        "loop that only multiplies and adds in registers, or only reads the same bytes, in the same rounds.",
    ]
    for result in results[1:]:
        said.append(f"The columns {column(result)} are of the same machine, forced: `{result['command']}`.")
    return said


def column(result: Result) -> str:
    """The name of a result's columns: the instruction set."""
    return str(result["about"]["isa"] or result["about"]["backend"])


def ceilings(results: list[Result]) -> list[str]:
    """What the machine can do at best."""
    rates = results[0]["about"]["ceilings"]
    counts = list(dict.fromkeys(count for row in rates.values() for count in row))
    table = [f"| measured ceiling | {' | '.join(counts)} |", "|---|" + "---|" * len(counts)]
    for name, row in rates.items():
        shown = (f"{row[count]:.0f}" if count in row else "" for count in counts)
        table.append(f"| {name} | {' | '.join(shown)} |")
    for name, rate in results[0]["about"]["torch.mm 2048, GF/s"].items():
        table.append(
            f"| torch.mm, 2048 × 2048, {name}, GF/s | {' | '.join([''] * (len(counts) - 1))} | {rate:.0f} |"
        )
    return table


def lines(results: list[Result]) -> list[str]:
    """The table: one row per work, shape and peer, a group of columns per instruction set."""
    names = [column(result) for result in results]
    found: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for name, result in zip(names, results, strict=True):
        for line in result["lines"]:
            found.setdefault((line["work"], line["shape"], line.get("peer", "")), {})[name] = line
    head = ["work", "shape", "against"]
    for name in names:
        head += [f"{name}: ms", "ratio", "of ceiling", "target"]
    table = [f"| {' | '.join(head)} |", "|---|---|---|" + "---|---|---|---|" * len(names)]
    for (work, shape, peer), by_name in found.items():
        row = [work, shape, peer]
        for name in names:
            row += group(by_name[name]) if name in by_name else [""] * 4
        table.append(f"| {' | '.join(row)} |")
    return table


def group(line: dict[str, Any]) -> list[str]:
    """The four cells of one instruction set."""
    if "why" in line:
        return [line["why"], "", "", ""]
    shown = cells(line)
    target = shown["target"]
    if line["reached"] is not None:
        target += f": {'yes' if line['reached'] else '**no**'}"
    bound = line.get("ratio at the ceiling")
    if line["reached"] is False and line["goal"] and bound is not None and bound < line["goal"]:
        target += f" (the ceiling itself: {bound:.2f}×)"
    return [number(line["ours ms"]), shown.get("ratio", ""), shown["of ceiling"], target]


def remarks(result: Result) -> list[str]:
    """What one must know to read the table."""
    said = [f"{count(result)} with a target reach it."]
    if "amx_bf16" in result["machine"]["instruction_sets"]:
        said.append(
            "This processor has a tile unit (AMX), on which torch computes bfloat16; the targets for it were "
            "set on one without it, where torch's SDPA is about four times slower."
        )
    said += sorted({f"{line['work']}: {line['note']}." for line in result["lines"] if line.get("note")})
    return [" ".join(said)]


def count(result: Result) -> str:
    """How many of how many."""
    return f"{result['figures']['reached']} of {result['figures']['judged']} lines"


def memory(curve: dict[str, Any]) -> list[str]:
    """Peak extra bytes of one layer."""
    sizes = sorted({n for row in curve.values() for n in row["tokens"]})
    table = [f"| peak MB beyond the inputs | {' | '.join(map(str, sizes))} | exponent |"]
    table.append("|---|" + "---|" * (len(sizes) + 1))
    for form, row in curve.items():
        at = dict(zip(row["tokens"], row["bytes"], strict=True))
        shown = (f"{at[n] / 2**20:.0f}" if n in at else "" for n in sizes)
        table.append(f"| {form} | {' | '.join(shown)} | {row['exponent']:.2f} |")
    return table


def placed(page: str, part: str) -> str:
    """The page with the part in its place; at its end where there are no marks yet."""
    if BEGIN not in page or END not in page:
        return page.rstrip("\n") + "\n\n" + part + "\n"
    before, rest = page.split(BEGIN, 1)
    return before + part + rest.split(END, 1)[1]


def main() -> None:
    """Write the part or check it."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 on a difference")
    options = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# How fast, and why\n"
    new = placed(old, render(read()))
    if not options.check:
        PAGE.write_text(new, encoding="utf-8")
    elif new != old or not PAGE.exists():
        sys.exit("docs/performance.md is not what the results say: run python benchmarks/performance.py")


if __name__ == "__main__":
    main()
