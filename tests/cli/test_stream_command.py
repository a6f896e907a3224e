"""`clearhead stream`: on and on from a text longer than the model's positions, in memory that is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("tiny")
SMALL = ["--window", "32", "--max-new-tokens", "40", "--seed", "1"]


@pytest.fixture
def novel(tmp_path: Path) -> str:
    path = tmp_path / "novel.txt"
    path.write_text(
        "the animal didn't cross the road because it was too tired . " * 40
    )  # 480 tokens, 256 positions
    return str(path)


@pytest.mark.parametrize("cache", [["--cache", "sliding"], ["--cache", "sink"], ["--sinks", "2"]], ids=str)
def test_it_goes_on_past_the_models_positions_and_says_what_it_takes(
    cli: Callable[..., Any], novel: str, cache: list[str]
) -> None:
    done = cli("stream", novel, *SMALL, *cache, "--every", "10", "--no-look")
    assert done.code == 0
    lines = done.err.splitlines()
    told = [re.fullmatch(r"\[(\d+) tokens, [\d.]+ tokens/s, cache ([\d.]+ MB), process [\d.]+ [MG]B\]", line)
            for line in lines[:-1]]  # fmt: skip
    assert [one and one[1] for one in told] == ["10", "20", "30", "40"]
    assert lines[-1].startswith("40 tokens (length), first token after")
    assert "(480 read)" in lines[-1]


def test_a_pipe_is_read_and_the_end_token_ends_nothing(
    cli: Callable[..., Any], novel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli("stream", "-", *SMALL, "--json", stdin=Path(novel).read_bytes())
    *tokens, end = [json.loads(line) for line in done.out.splitlines()]
    assert len(tokens) == end["tokens"] == 40
    assert end["stopped"] == "length"
    assert {"text", "output", "first token"} <= set(end["looked_at"])
    assert end["looked_at"]["first token"] > 0


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no such file"], "FILE: no such file cannot be read"),
        (
            ["x", "--cache", "dynamic"],
            "--cache must be sink or sliding, got 'dynamic': others grow without end",
        ),
        (["x", "--cache", "sliding", "--sinks", "3"], "--sinks is for --cache sink"),
        (["x", "--window", "0"], "Invalid value for '--window'"),
        ([], "Missing argument 'FILE'"),
    ],
    ids=str,
)
def test_mistakes_are_found_before_a_model_is_loaded(
    cli: Callable[..., Any], arguments: list[str], message: str
) -> None:
    done = cli("stream", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_sinks_must_be_fewer_than_the_window(cli: Callable[..., Any], novel: str) -> None:
    done = cli("stream", novel, "--window", "4")
    assert (done.code, done.out) == (2, "")
    assert "sinks must be fewer than the window" in done.err


def test_an_empty_text_is_nothing_to_go_on_from(cli: Callable[..., Any]) -> None:
    done = cli("stream", "-", stdin=b"")
    assert (done.code, done.out) == (2, "")
    assert "the text is empty" in done.err
