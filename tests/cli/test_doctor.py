"""`clearhead doctor` says what attention runs on, why not on something faster, and what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from clearhead.backends import native, registry
from clearhead.backends.base import Request
from clearhead.cli.doctor import NEEDS, examine

WHY = "clearhead is installed without its C++ core: no working C++ compiler was found"


def without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", lambda: (None, WHY))


def row(shown: str, name: str) -> list[str]:
    return next(line.split() for line in shown.splitlines() if line.split()[:1] == [name])


def test_every_backend_and_every_instruction_set_has_a_row(cli: Callable[..., Any]) -> None:
    done = cli("doctor")
    assert (done.code, done.err) == (0, "")
    for name in registry.names():
        assert row(done.out, name)[1] == "yes"
    assert sum(line.endswith("default") for line in map(str.strip, done.out.splitlines())) == 1
    for isa in native.isas():
        assert isa.name in NEEDS
        assert row(done.out, isa.name)
    if (core := native.core()) is not None:
        assert row(done.out, core.isa())[-3:] == ["yes", "yes", "chosen"]
        assert f"compiled by {core.compiler}, runs {core.isa()}" in done.out


def test_json_is_all_that_is_printed_and_all_that_was_found(cli: Callable[..., Any]) -> None:
    done = cli("doctor", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert found == examine()
    assert set(found["versions"]) == {"clearhead", "python", "torch", "numpy", "transformers"}
    assert [backend["name"] for backend in found["backends"]] == list(registry.names())


def test_without_a_core_it_says_why_and_what_runs_instead(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_core(monkeypatch)
    done = cli("doctor")
    assert (done.code, done.err) == (0, "")
    assert row(done.out, "cpu")[1] == "no"
    assert WHY in done.out
    assert row(done.out, "sdpa") == ["sdpa", "yes", "default"]
    assert f"problem: {WHY}; attention runs through torch alone, slower" in " ".join(done.out.split())
    assert "instruction set" not in done.out
    assert json.loads(cli("doctor", "--json").out)["core"]["why_not"] == WHY


def test_a_strangers_backend_is_listed_and_cannot_speak_to_the_terminal(cli: Callable[..., Any]) -> None:
    class Stranger:
        name = "\x1b]0;owned\x07"

        def supports(self, request: Request) -> str:
            return "not on a \x1b[2J Tuesday"

    registry.register(Stranger())  # type: ignore[arg-type]
    try:
        done = cli("doctor")
    finally:
        registry.unregister(Stranger.name)
    assert "not on a <U+001B>[2J Tuesday" in done.out
    assert "\x1b" not in done.out


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        (
            "_openmp",
            ["lib/libgomp.so.1", "torch/lib/libgomp.so.1"],
            "2 OpenMP runtimes are loaded, whose threads get in each other's way",
        ),
        ("_cores", 0, "threads share 0 cores; set OMP_NUM_THREADS"),
    ],
)
def test_what_is_wrong_is_said(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, part: str, value: Any, problem: str
) -> None:
    monkeypatch.setattr(
        "clearhead.cli.doctor._openmp", lambda: ["torch/lib/libgomp.so.1"]
    )  # tests bring more
    assert problem not in cli("doctor").out
    monkeypatch.setattr(f"clearhead.cli.doctor.{part}", lambda: value)
    done = cli("doctor")
    assert done.code == 0
    assert problem in done.out
    assert "no problems found" not in done.out


def elsewhere(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )


@pytest.mark.skipif(native.core() is None, reason="the C++ core is not built")
def test_the_instruction_set_can_be_chosen_and_a_wrong_one_is_refused() -> None:
    done = elsewhere("-m", "clearhead", "doctor", "--json", CLEARHEAD_ISA="portable")
    found = json.loads(done.stdout)
    assert found["core"]["isa"] == "portable"
    assert [isa["name"] for isa in found["core"]["isas"] if isa["chosen"]] == ["portable"]
    assert "CLEARHEAD_ISA is set: the core runs portable whatever the processor can do" in found["problems"]
    done = elsewhere("-m", "clearhead", "doctor", CLEARHEAD_ISA="v99")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: instruction set (CLEARHEAD_ISA) must be one of portable")
    assert done.stderr.endswith("got 'v99'\n")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says what is loaded")
def test_the_core_shares_torchs_openmp_runtime() -> None:
    code = (
        "from clearhead.backends import native\nnative.core()\n"
        "from clearhead.cli.doctor import examine\nprint(*examine()['openmp'])"
    )
    done = elsewhere("-c", code)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 1, done.stdout
    assert done.stdout.startswith("torch")
