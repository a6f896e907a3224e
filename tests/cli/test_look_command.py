"""`clearhead look` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("tiny")
SOURCES = ["--system", "the road .", "--user", "was it tired", "--data", "the animal didn't cross"]


def test_the_table_has_a_row_per_source_and_the_first_token_apart(cli: Callable[..., Any]) -> None:
    done = cli("look", *SOURCES)
    assert done.code == 0
    assert done.err == ""
    lines = [line.split() for line in done.out.splitlines()]
    first = [line[0] for line in lines if line]
    order = [first.index(name) for name in ("source", "system", "user", "data", "template", "first")]
    assert order == sorted(order)
    assert "data (untrusted)" in done.out
    assert "smollm2, 16 tokens; attention from the last token, average over 2 layers × 4 heads" in done.out
    assert "evidence: shows where the head looked; not shown to be why the model answered" in done.out
    rows = {
        line[0]: line for line in lines if line and line[0] in ("system", "user", "data", "template", "first")
    }
    shares = [float(next(w for w in row if w.endswith("%"))[:-1]) for row in rows.values()]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_json_is_all_there_is_on_standard_output(cli: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "look.html"
    done = cli("look", *SOURCES, "--json", "--html", str(report), "--query", "all", "--layers", "1")
    assert done.code == 0
    found = json.loads(done.out)
    assert done.out.isascii()
    assert found["query"] == "all 16 tokens"
    assert found["layers"] == [1]
    assert sum(source["mass"] for source in found["sources"]) == pytest.approx(1, abs=1e-5)
    assert found["command"].startswith("clearhead look --system 'the road .'")
    assert done.err == f"report: {report}\n"
    assert report.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_chat_from_a_file_or_a_pipe_gives_the_same(cli: Callable[..., Any], tmp_path: Path) -> None:
    chat = json.dumps(
        [{"role": "system", "content": "the road ."}, {"role": "user", "content": "was it tired"}]
    )
    (tmp_path / "chat.json").write_text(chat)
    typed = cli("look", "--system", "the road .", "--user", "was it tired")
    assert cli("look", str(tmp_path / "chat.json")) == typed
    assert cli("look", "-", stdin=chat.encode()) == typed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--query", "zebra"],
            "query must be 'last', 'all' or a text of the prompt; 'zebra' is not in the prompt",
        ),
        (["--layers", "1,2"], "layers holds 2, this model has self: 0..1"),
        (
            ["--data", "the " * 300],
            "the prompt is too long: it has 316 tokens, and the model has 256 positions",
        ),
    ],
)
def test_what_only_the_model_can_know_is_an_error_too(
    cli: Callable[..., Any], arguments: list[str], message: str
) -> None:
    done = cli("look", *SOURCES, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert message in done.err


def test_notes_are_shown(cli: Callable[..., Any]) -> None:
    done = cli("look", *SOURCES, "--data", "")
    assert "note: segment 'data 2' is empty" in done.out


def test_long_prompts_show_a_bar_on_standard_error_only(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.cli.run.LONG", 1)
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = cli("look", *SOURCES, "--json")
    assert "looking at 16 tokens" in done.err
    json.loads(done.out)


def test_the_report_is_written_before_a_reader_can_leave(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(text: str) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("clearhead.cli.terminal.write", gone)
    assert cli("look", *SOURCES, "--json", "--html", str(tmp_path / "look.html")).code == 0
    assert (tmp_path / "look.html").exists()


def test_a_model_that_is_not_there_is_named(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    done = cli("look", "--user", "x", "--model", "./no-such-folder")
    assert (done.code, done.out) == (2, "")
    assert "model './no-such-folder' cannot be found" in done.err


class FakeGuard:
    """A detector that blocks whatever it is given, and names all of it."""

    def scan_moves(self, instruction: str, sources: dict[str, str]) -> tuple[Any, Any]:
        import numpy as np

        from clearhead.guard.finding import Finding, HeadMove, HeadMoves, SourceFinding, Span, Thresholds

        (name, text), *_ = sources.items()
        limits = Thresholds(0.5, 0.8, 0.048, 0.009, 412, "a set of fakes")
        finding = Finding(
            0.93, "block", {}, limits, "fpr_5", (Span(name, 0, len(text), 1, 1, text, 0.91, 2.3),),
            (HeadMove(1, 2, 4.5, 0.1, 0.4),), (SourceFinding(name, 0.93, "block", 5, len(text), 1.0, 0.314, 0.221),),
            20, 1, 0.1, "fake-1", notes=("a note of the guard",),
        )  # fmt: skip
        before = np.zeros((2, 4), np.float32)
        before[1, 2] = 4.5
        return finding, HeadMoves(before, before / 3)


@pytest.fixture
def fake_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.guard.detector.InjectionDetector.load", lambda *a, **k: FakeGuard())


@pytest.mark.usefixtures("fake_guard")
def test_the_verdict_names_source_sentence_heads_and_false_alarms(cli: Callable[..., Any]) -> None:
    done = cli("look", *SOURCES)
    assert (done.code, done.err) == (0, "")
    said = " ".join(done.out.split())
    assert "guard: block, score 0.93" in said
    assert "data 5 100% 31.4% 22.1% 0.93 block" in said
    assert "pulled: data:1:1 pull 0.91, attention 2.3× per token: the animal didn't cross" in said
    assert "1.2 +4.5 → +1.5" in said
    assert (
        "flag from 0.50 (4.8% false alarms), block from 0.80 (0.9%), measured on 412 benign texts (a set of fakes)"
        in said
    )
    assert "calibration fake-1" in said
    assert "note: a note of the guard" in said


@pytest.mark.usefixtures("fake_guard")
def test_json_and_report_hold_the_verdict(cli: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "look.html"
    found = json.loads(cli("look", *SOURCES, "--json", "--html", str(report)).out)
    guard = found["guard"]
    assert (guard["verdict"], guard["thresholds"]["flag_fpr"]) == ("block", 0.048)
    tokens = guard["spans"][0]["tokens"]
    assert [found["tokens"][t].strip() for t in tokens] == ["the", "animal", "didn't", "cross"]
    assert guard["moves_before"][1][2] == 4.5
    assert guard["moves_after"][1][2] == 1.5
    assert '"verdict":"block"' in report.read_text(encoding="utf-8")


@pytest.mark.usefixtures("fake_guard")
def test_no_guard_leaves_it_out_without_a_word(cli: Callable[..., Any]) -> None:
    done = cli("look", *SOURCES, "--no-guard")
    assert "guard" not in done.out
    assert json.loads(cli("look", *SOURCES, "--no-guard", "--json").out)["guard"] is None


def test_where_there_is_no_verdict_a_note_says_why(cli: Callable[..., Any]) -> None:
    """The tiny model is called smollm2, but its weights are others: the calibration does not fit."""
    notes = json.loads(cli("look", *SOURCES, "--json").out)["notes"]
    assert "no verdict of the guard: " in notes[-1]
    assert "clearhead guard calibrate" in notes[-1]
    notes = json.loads(cli("look", *SOURCES[:4], "--json").out)["notes"]
    assert notes[-1] == "no verdict of the guard: the prompt has no untrusted text to judge"
    notes = json.loads(cli("look", *SOURCES, "--model", "other", "--json").out)["notes"]
    assert "no calibration comes with the package for the model 'other'" in notes[-1]


@pytest.mark.usefixtures("fake_guard")
def test_texts_without_an_instruction_have_no_verdict(cli: Callable[..., Any]) -> None:
    notes = json.loads(cli("look", *SOURCES[4:], "--json").out)["notes"]
    assert "no instruction to judge its texts by" in notes[-1]
    done = cli("look", *SOURCES[4:], "--guard")
    assert (done.code, done.out) == (2, "")
    assert "no instruction" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SOURCES, "--guard"], "clearhead guard calibrate"),
        ([*SOURCES[:4], "--guard"], "no untrusted text"),
        ([*SOURCES, "--no-guard", "--calibration", "x"], "--calibration is for the guard"),
        ([*SOURCES, "--calibration", "no-such-file"], "no-such-file cannot be read"),
    ],
)
def test_a_guard_that_is_asked_for_and_cannot_be_is_an_error(
    cli: Callable[..., Any], arguments: list[str], message: str
) -> None:
    done = cli("look", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err.replace("\n", " ")


def test_a_prompt_that_only_the_guard_cannot_read_is_looked_at_all_the_same(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a very long instruction there may be no room for the window in which the guard reads texts."""
    from clearhead.errors import PromptError

    class Full:
        def scan_moves(self, instruction: str, sources: dict[str, str]) -> Any:
            raise PromptError("the prompt is too long")

    monkeypatch.setattr("clearhead.guard.detector.InjectionDetector.load", lambda *a, **k: Full())
    done = cli("look", *SOURCES)
    assert done.code == 0
    assert "note: no verdict of the guard: the prompt is too long" in done.out
