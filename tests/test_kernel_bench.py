"""The benchmark of the kernels cannot give a figure for a wrong result, nor call a missed target reached."""

from __future__ import annotations

import importlib
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of benchmarks/speed."""
    names = (
        "case",
        "curve",
        "decode",
        "lines",
        "looking",
        "oracle",
        "pairs",
        "prefill",
        "show",
        "small",
        "training",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield SimpleNamespace(**{name: importlib.import_module(f"speed.{name}") for name in names})
    for name in [name for name in sys.modules if name.split(".")[0] == "speed"]:
        del sys.modules[name]


@pytest.fixture
def setup(bench: SimpleNamespace) -> SimpleNamespace:
    """Small and without ceilings, by a backend that is always there."""
    return bench.case.Setup("sdpa", True, 1)


@pytest.fixture
def case(bench: SimpleNamespace, setup: SimpleNamespace) -> SimpleNamespace:
    """One that is right."""
    return bench.prefill.plain(setup, bench.prefill.Shape(1, 4, 2, 40, 16), torch.float32, True)


def test_every_form_has_every_place_and_both_neighbours(bench: SimpleNamespace) -> None:
    names = ["a", "b", "c"]
    orders = [bench.pairs.order(names, number) for number in range(6)]
    for place in range(3):
        assert Counter(order[place] for order in orders) == dict.fromkeys(names, 2)
    assert {tuple(order) for order in orders} >= {("a", "b", "c"), ("c", "b", "a")}


def test_a_ratio_is_that_of_rounds_and_not_of_medians(bench: SimpleNamespace) -> None:
    times = bench.pairs.Times({"ours": [1.0, 10.0, 100.0], "peer": [2.0, 20.0, 50.0]})
    assert times.ratio("peer", "ours").middle == 2.0
    assert times.median("peer") / times.median("ours") == 2.0
    slow_hour = bench.pairs.Times({"ours": [1.0, 1.0, 9.0, 9.0], "peer": [3.0, 3.0, 27.0, 27.0]})
    assert tuple(slow_hour.ratio("peer", "ours")) == (3.0, 3.0, 3.0)


def test_a_call_is_warm_when_it_is_counted(bench: SimpleNamespace) -> None:
    calls: list[str] = []
    forms = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    bench.pairs.measure(forms, bench.pairs.Budget(0.0, least=2))
    first_of_rounds = calls[4:]  # two of each came first, to see how long they take
    changes = [i for i in range(1, len(first_of_rounds)) if first_of_rounds[i] != first_of_rounds[i - 1]]
    stretches = [b - a for a, b in zip([0, *changes], [*changes, len(first_of_rounds)], strict=True)]
    assert min(stretches) >= 2


def test_a_right_result_gets_its_lines(
    bench: SimpleNamespace, setup: SimpleNamespace, case: SimpleNamespace
) -> None:
    (line,) = bench.lines.run(lambda: case, setup, bench.pairs.Budget(0.01, least=3), "avx2")
    assert line["peer"] == "SDPA"
    assert line["ratio"]["middle"] > 0
    assert line["reached"] == (line["ratio"]["middle"] >= 1.65)
    assert line["errors"]["ours"]["largest"] < 1e-5


@pytest.mark.parametrize(
    "spoil", [lambda out: out * 1.001, lambda out: out.masked_fill(out == out[0, 0, -1, 0], torch.nan)]
)
def test_a_wrong_result_has_no_figure(
    bench: SimpleNamespace, setup: SimpleNamespace, case: SimpleNamespace, spoil: object
) -> None:
    inputs = bench.prefill.Shape(1, 4, 2, 40, 16).inputs()
    wrong = {"ours": lambda: spoil(case.ours())}  # type: ignore[operator]
    check = bench.oracle.checked(wrong, inputs, bench.oracle.causal, 2e-5)
    (line,) = bench.lines.run(lambda: replace(case, check=check), setup, bench.pairs.Budget(0.01), "avx2")
    assert line["wrong"]
    assert line["why"].startswith("WRONG: ours")
    assert not {"ours ms", "ratio", "GF/s"} & set(line)
    assert line["why"] in bench.show.text(line)


def test_a_peer_that_computes_something_else_is_found(bench: SimpleNamespace, case: SimpleNamespace) -> None:
    inputs = bench.prefill.Shape(1, 4, 2, 40, 16).inputs()
    check = bench.oracle.checked({"peer": case.ours}, inputs, bench.oracle.everything, 2e-5)
    with pytest.raises(bench.case.WrongResultError, match="peer: off by"):
        check()


def test_what_is_not_there_is_said(
    bench: SimpleNamespace, setup: SimpleNamespace, case: SimpleNamespace
) -> None:
    refused = replace(setup, backend="nobody")
    shape = bench.prefill.Shape(1, 4, 2, 40, 16)
    make = lambda: bench.prefill.plain(refused, shape, torch.float32, True)  # noqa: E731
    (line,) = bench.lines.run(make, refused, bench.pairs.Budget(0.01), "avx2")
    assert "nobody" in line["why"]
    assert not line["wrong"]


def test_a_target_is_judged_by_the_kind_of_machine(bench: SimpleNamespace) -> None:
    goal = bench.case.Goal(1.5, 3.0)
    assert (goal.on("avx2"), goal.on("avx512"), goal.on(None)) == (1.5, 3.0, None)


def test_one_missed_part_of_a_target_is_a_miss(
    bench: SimpleNamespace, setup: SimpleNamespace, case: SimpleNamespace
) -> None:
    judged = replace(case, ratios={"SDPA": bench.case.Goal(1e-6, 1e6)})
    run = bench.lines.run
    (low,), (high,) = (
        run(lambda: judged, setup, bench.pairs.Budget(0.01), kind) for kind in ("avx2", "avx512")
    )
    assert (low["reached"], high["reached"]) == (True, False)
    assert "1 of 2 lines" in bench.show.summary([low, high])
    assert "missed: prefill fp32, causal" in bench.show.summary([low, high])


def test_added_time_is_shown_as_a_percentage(bench: SimpleNamespace) -> None:
    line = {"work": "w", "shape": "s", "ours ms": 1.0, "peer": "without", "peer ms": 0.8, "added": True}
    line |= {"ratio": {"low": 0.7, "middle": 0.8, "high": 0.9}, "target": "≤ +4%", "reached": False}
    shown = bench.show.cells(line)
    assert (shown["ratio"], shown["reached"]) == ("+25.0%", "NO")
    assert bench.looking.most(0.04, 0.04).on("avx2") == pytest.approx(1 / 1.04)


@pytest.mark.parametrize("part", ["prefill", "decode", "training", "looking", "small"])
def test_the_quick_part_is_a_part_of_the_full_one(
    bench: SimpleNamespace, setup: SimpleNamespace, part: str
) -> None:
    cases = getattr(bench, part).cases
    quick, full = list(cases(setup)), list(cases(replace(setup, quick=False)))
    assert 0 < len(quick) <= len(full)


def test_the_plot_is_sound_and_names_every_line(bench: SimpleNamespace) -> None:
    points = {"clearhead": [(256, 0.2), (512, 0.7), (1024, 2.0)], "torch SDPA": [(256, 0.5), (1024, 5.0)]}
    root = ElementTree.fromstring(bench.curve.drawing(points, "a title"))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a title", "clearhead", "torch SDPA", "256", "1024", "0.1 ms", "10 ms"} <= set(words)
