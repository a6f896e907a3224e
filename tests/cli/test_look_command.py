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
