"""The report as Markdown: every figure with its interval, its count and its set beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from clearhead.guard.evaluate.figures import FEW, Figure

LOWEST_CELLS = 12
"""How many of the cells are shown, the lowest first; all are in the JSON."""

NOTE = (
    "Brackets: 95% interval, contexts drawn with replacement; n: attacked + benign texts. "
    "TPR at 5% / 1% FPR: threshold set on these very texts. At a preset: threshold carried over unchanged. "
    "hit@1: the strongest span shares at least half the characters of the shorter of it and the attack."
)


def markdown(report: dict[str, Any]) -> str:
    """Return the whole report. Text of the sets' names is shown with what Markdown would read taken out."""
    parts = ["# Guard evaluation", "", f"{report['date']}, seed {report['seed']}. {NOTE}", ""]
    parts += _sets(report["sets"])
    parts += _judges(report["judges"])
    parts += ["## As it is", ""]
    if any(row["calibrated_on_it"] for row in report["by_set"]):
        parts += ["*: calibrated on this set: flattering. See the sets left out below.", ""]
    parts += _scores([*report["by_set"], *({**row, "set": "all"} for row in report["pooled"])])
    parts += _alarms([*report["by_set"], *({**row, "set": "all"} for row in report["pooled"])])
    parts += _cells(report["cells"])
    parts += _left_out(report)
    return "\n".join(parts).rstrip() + "\n"


def _sets(sets: Sequence[Figure]) -> list[str]:
    rows = []
    for one in sets:
        cut = one["shortcuts"]
        count = one["labels"]
        rows.append(
            [
                one["name"], one["n"], *(count.get(label, 0) for label in ("attack", "imperative", "none")),
                one["contexts"], f"{one['attack_texts']} / {one['families']}",
                *(_plain(cut[k]) for k in ("length", "insert_length", "position", "instruction")),
            ]
        )  # fmt: skip
    head = "set|texts|attacks|imperatives|none|contexts|attack texts / families|length|insert's length|place|"
    head += "instruction"
    return [
        "## Sets", "",
        "The last four columns: the AUROC that this alone reaches (.5: nothing; place and insert's length: "
        "among texts with something inserted).", "",
        *_table(head.split("|"), rows), "",
    ]  # fmt: skip


def _judges(judges: Sequence[Figure]) -> list[str]:
    rows = [
        [
            one["name"],
            one["about"],
            ", ".join(f"{preset} {value:.3f}" for preset, value in one["thresholds"].items()) or "–",
            ", ".join(one["calibrated_on"]) or "–",
        ]
        for one in judges
    ]
    return ["## Judges", "", *_table(["judge", "what", "thresholds", "calibrated on"], rows), ""]


def _scores(rows: Sequence[Figure]) -> list[str]:
    out = []
    for row in rows:
        times = "–"
        if "seconds_per_1k_p50" in row:
            times = f"{row['seconds_per_1k_p50']:.2f} / {row['seconds_per_1k_p95']:.2f}"
        out.append(
            [
                _set_name(row), row["judge"], _figure(row["auroc"]), _figure(row["tpr_5"]),
                _figure(row["tpr_1"]), _figure(row.get("hit_1")), _figure(row.get("hit_2"), count=False),
                _plain(row.get("ece")), times, _count(row),
            ]
        )  # fmt: skip
    head = ["set", "judge", "AUROC", "TPR at 5% FPR", "TPR at 1% FPR", "hit@1", "top two", "ECE"]
    return [*_table([*head, "s per 1K tokens p50 / p95", "n"], out), "", *_reasons(rows)]


def _alarms(rows: Sequence[Figure]) -> list[str]:
    out = []
    for row in rows:
        for preset, found in row["presets"].items():
            families = ", ".join(f"{name} {_figure(value)}" for name, value in found["fpr_by_family"].items())
            fpr = found["fpr"]
            accuracy = 1 - fpr["value"] if "value" in fpr and not row["attacked"] else None
            out.append(
                [
                    _set_name(row), row["judge"], f"{preset} ({found['threshold']:.3f})",
                    _figure(found["tpr"]), _figure(fpr), families or "–", _plain(accuracy),
                    f"{row['unjudged']} of {row['n']}",
                ]
            )  # fmt: skip
    if not out:
        return []
    head = "set|judge|preset|TPR|FPR|FPR by family|accuracy (benign only)|unjudged"
    return [
        "### At the carried-over thresholds", "",
        "An unjudged text counts by its score; how many there are stands in the last column.", "",
        *_table(head.split("|"), out), "",
    ]  # fmt: skip


def _cells(judged: Sequence[Figure]) -> list[str]:
    parts: list[str] = []
    for one in judged:
        parts += [f"## Cells: {_clean(one['judge'])}", ""]
        for key, what in (("lowest_coarse", "set × kind × place"), ("lowest", "… × attack family")):
            found = one[key]
            if found is None:
                parts.append(f"- {what}: no cell has {FEW} attacked texts.")
            else:
                where = ", ".join(str(v) for k, v in found.items() if k != "auroc")
                parts.append(f"- lowest {what}: {_clean(where)}: {_figure(found['auroc'])}")
        cells = sorted(
            (c for c in one["coarse"] if "value" in c["auroc"]), key=lambda c: float(c["auroc"]["value"])
        )
        rows = [
            [c["set"], c["kind"], c["position"], _figure(c["auroc"])] for c in cells[:LOWEST_CELLS]
        ]  # fmt: skip
        parts += ["", *_table(["set", "kind", "place", "AUROC"], rows), ""]
        if len(cells) > LOWEST_CELLS:
            parts += [f"The lowest {LOWEST_CELLS} of {len(cells)}; all are in the JSON.", ""]
    return parts


def _left_out(report: dict[str, Any]) -> list[str]:
    parts = [
        "## What nothing was learned from", "",
        "Fitted anew each time. Contexts and inserted texts are never on both sides, nor are instruction "
        "wordings unless the last column says so. Thresholds: fixed on the learning side's benign texts.", "",
        "### Leave one set out", "",
    ]  # fmt: skip
    done = [row for row in report["sets_left_out"] if "reason" not in row]
    rows = []
    for row in done:
        carried = "; ".join(
            f"{preset}: {_short(found['tpr'])} at {_short(found['fpr'])}"
            for preset, found in row["presets"].items()
        )
        rows.append(
            [
                row["set"], row["judge"], _figure(row["auroc"]), _figure(row["tpr_5"]),
                _figure(row["tpr_1"]), carried or "–", row["learned_from"], ", ".join(row["shared"]) or "–",
            ]
        )  # fmt: skip
    head = "set|learner|AUROC|TPR at 5% FPR|TPR at 1% FPR|carried over: TPR at FPR|learned from|shared"
    parts += [*_table(head.split("|"), rows), ""]
    for row in report["sets_left_out"]:
        if "reason" in row:
            parts += [f"- {_clean(row['set'])}: {_clean(row['reason'])}"]
    parts += ["", "### Leave one attack family out, and what flatters", ""]
    known = {row["judge"]: row for row in report["attacks_known"]}
    rows = []
    for row in report["families_left_out"]:
        flat = known.get(row["judge"])
        rows.append(
            [
                row["judge"], _figure(row["auroc"]), _figure(row["tpr_5"]), _figure(row["tpr_1"]),
                len(row["families"]), _figure(flat["auroc"] if flat else None), row["learned_from"],
                ", ".join(row["shared"]) or "–",
            ]
        )  # fmt: skip
    head = "learner|AUROC, family unseen|TPR at 5% FPR|TPR at 1% FPR|families|AUROC, attack texts known|"
    parts += [
        *_table((head + "learned from|shared").split("|"), rows), "",
        "A benign text counts with its mean score over its context's families. “Attack texts known”: five "
        "folds by context alone, as is often reported; the same attack texts stand on both sides.", "",
    ]  # fmt: skip
    return parts


def _set_name(row: Figure) -> str:
    return f"{row['set']}{'*' if row.get('calibrated_on_it') else ''}"


def _count(row: Figure) -> str:
    return f"{row['attacked']} + {row['n'] - row['attacked']}"


def _reasons(rows: Sequence[Figure]) -> list[str]:
    found = dict.fromkeys(
        f"- {_clean(row['set'])}: {_clean(row[key]['reason'])}"
        for row in rows
        for key in ("auroc", "tpr_5", "tpr_1")
        if "reason" in row[key]
    )
    return [*found, ""] if found else []


def _figure(found: Figure | None, *, count: bool = True) -> str:
    if found is None or "value" not in found:
        return "–"
    text = _plain(found["value"])
    if found["low"] is not None:
        text += f" [{_plain(found['low'])}, {_plain(found['high'])}]"
    return f"{text} (n {found['n']})" if count else text


def _short(found: Figure) -> str:
    return _plain(found.get("value"))


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}".replace("0.", ".", 1) if 0 <= value < 1 else f"{value:.3f}"


def _clean(text: object) -> str:
    """One line of text without what Markdown or HTML would read."""
    kept = "".join(c if c.isprintable() else " " for c in str(text))
    for sign, instead in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        kept = kept.replace(sign, instead)
    return "".join(f"\\{c}" if c in "|`[]!#" else c for c in kept)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [_cell(cell) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(cell: object) -> str:
    text = _clean(cell)
    return text.replace("\\[", "[").replace("\\]", "]")
