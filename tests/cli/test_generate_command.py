"""`clearhead generate` as a user types it: plain text in a pipe, strips in a terminal, JSON lines."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len
from tests.generation.bytes import loaded

from clearhead.cli.strip import Group, Painter

SOURCES = ["--system", "the road .", "--user", "was it tired", "--data", "the animal didn't cross"]
LENGTH = ["--max-new-tokens", "6"]
ENDLESS = ["--cache", "sliding", "--max-new-tokens", "99999999", "--seed", "1"]


@pytest.mark.usefixtures("tiny")
def test_a_pipe_gets_the_text_and_a_table(cli: Callable[..., Any]) -> None:
    done = cli("generate", *SOURCES, *LENGTH)
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    text, _, table = done.out.partition("\n\n")
    assert text
    names = [line.split()[0] for line in table.splitlines() if "%" in line]
    assert names == ["system", "user", "data", "template", "output", "first"]
    assert "data (untrusted)" in table
    assert "what the 6 new tokens looked at while they were chosen, average over layers and heads" in table
    assert sum(float(s) for s in re.findall(r"([\d.]+)%", table)) == pytest.approx(100, abs=0.4)
    assert re.fullmatch(
        r"6 tokens \(length\), first token after [\d.]+ s \(16 read\), then [\d.]+ tokens/s, cache 0.0 MB\n",
        done.err,
    )


@pytest.mark.usefixtures("tiny")
def test_text_alone_is_the_same_text(cli: Callable[..., Any]) -> None:
    whole = cli("generate", *SOURCES, *LENGTH).out
    alone = cli("generate", *SOURCES, *LENGTH, "--no-look").out
    assert alone == whole.partition("\n\n")[0] + "\n"


@pytest.mark.usefixtures("tiny")
def test_json_is_a_line_per_token_and_one_for_the_end(cli: Callable[..., Any]) -> None:
    done = cli("generate", *SOURCES, *LENGTH, "--json", "--seed", "7")
    *tokens, end = [json.loads(line) for line in done.out.splitlines()]
    assert done.out.isascii()
    assert len(tokens) == end["tokens"] <= 6
    assert "".join(token["text"] for token in tokens) == end["text"]
    assert (end["seed"], end["model"], end["prompt_tokens"]) == (7, "smollm2", 16)
    for token in [*tokens, end]:
        assert sum(token["looked_at"].values()) == pytest.approx(1, abs=1e-4)
    assert set(end["looked_at"]) == {"system", "user", "data", "template", "output", "first token"}
    again = cli("generate", *SOURCES, *LENGTH, "--json", "--seed", "7")
    assert again.out.splitlines()[:-1] == done.out.splitlines()[:-1]


@pytest.mark.usefixtures("tiny")
def test_it_stops_before_a_text(cli: Callable[..., Any]) -> None:
    whole = json.loads(cli("generate", *SOURCES, *LENGTH, "--json").out.splitlines()[-1])["text"]
    stop = whole[3:7]
    done = json.loads(cli("generate", *SOURCES, *LENGTH, "--json", "--stop", stop).out.splitlines()[-1])
    assert done["text"] == whole[: whole.index(stop)]
    assert done["stopped"] == "stop string"


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to answer: give --user"),
        (["--user", ""], "nothing to answer: all texts are empty"),
        (["--user", "x", "--cache", "big"], "--cache must be one of dynamic, sliding, sink, int8, heavy, paged, got 'big'"),
        (["--user", "x", "--window", "9"], "--window is for the caches sliding, sink, heavy; dynamic keeps all tokens"),
        (["--user", "x", "--cache", "sliding", "--sinks", "2"], "--sinks is for --cache sink, got --cache sliding"),
        (["--user", "x", "--temperature", "-1"], "temperature must be a finite number of at least 0, got -1.0"),
        (["--user", "x", "--top-p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
        (["--user", "x", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_found_before_a_model_is_loaded(
    cli: Callable[..., Any], arguments: list[str], message: str
) -> None:
    done = cli("generate", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


@pytest.mark.usefixtures("tiny")
def test_a_prompt_that_is_too_long_is_an_error_and_no_answer(cli: Callable[..., Any]) -> None:
    done = cli("generate", "--user", "road " * 300)
    assert (done.code, done.out) == (2, "")
    assert "the prompt is too long" in done.err


# ---------------------------------------------------------------------- in a terminal

PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import clearhead.models.loading as loading
from tests.generation.bytes import loaded
loading.load = lambda name, progress=None: loaded()
from clearhead.cli import main
main({arguments!r})
"""
ROOT = os.getcwd()


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        code = PROGRAM.format(root=ROOT, arguments=list(arguments))
        self.master, slave = pty.openpty()
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
        env = kept | {"TERM": "xterm", "OMP_NUM_THREADS": "1"} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True,
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(slave)
        self.out = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # nothing where it has ended
        self.process.wait()
        os.close(self.master)

    def read(self, until: str | None = None, most: float = 120) -> str:
        """Read to the end, or until a pattern has come."""
        end = time.monotonic() + most
        while time.monotonic() < end:
            if until is not None and re.search(until, self.out):
                return self.out
            if not select.select([self.master], [], [], 0.2)[0]:
                continue
            try:
                got = os.read(self.master, 65536)
            except OSError:  # the program has closed it
                break
            if not got:
                break
            self.out += got.decode(errors="replace")
        return self.out

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def end(self) -> int:
        self.read()
        return self.process.wait(timeout=60)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def screen(written: str) -> list[str]:
    """What a terminal shows after this was written: lines without colours."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for part in re.findall(r"\x1b\[[\d;?]*[a-zA-Z]|[^\x1b]|\x1b", written):
        if part == "\n":
            row += 1
        elif part == "\r":
            column = 0
        elif part.startswith("\x1b[") and part[-1] == "A":
            row -= int(part[2:-1] or 1)
        elif part.startswith("\x1b[") and part[-1] == "C":
            column += int(part[2:-1] or 1)
        elif not part.startswith("\x1b"):
            while len(lines) <= row:
                lines.append([])
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            lines[row][column] = part
            column += 1
        assert row >= 0
    return ["".join(line).rstrip() for line in lines]


def test_in_a_terminal_every_line_has_a_strip_of_its_own_width_below(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", "--user", "hi", "--max-new-tokens", "150", "--seed", "1"]
    with Terminal(*arguments) as terminal:
        assert terminal.end() == 0
    monkeypatch.setattr("clearhead.models.loading.load", lambda name, progress=None: loaded())
    plain = cli(*arguments).out
    shown = screen(terminal.out.rpartition("\x1b[2K")[2])  # after the bar of loading
    end = next(i for i, line in enumerate(shown) if line.startswith("what the 150 new tokens looked at"))
    strips = [i for i, line in enumerate(shown[:end]) if line and set(line) == {"▀"}]
    assert len(strips) > 1
    assert all(len(line) < 80 for i in strips for line in shown[i - 1 : i + 1])
    assert all(len(shown[i]) >= len(shown[i - 1]) for i in strips)
    joined = "".join(shown[i - 1] for i in strips)
    assert joined.replace(" ", "") == "".join(plain.split("what the 150")[0].split())
    assert "not in the strips" in terminal.out


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_without_colours_there_are_no_strips(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from clearhead.cli import streaming, tables

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(tables, "console", lambda: Console(force_terminal=True))
    groups = [Group("user", 36, (0,), 3)]
    assert isinstance(streaming.screen(groups, as_json=False, model="m"), streaming._Strips)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert isinstance(streaming.screen(groups, as_json=False, model="m"), streaming._Plain)


def test_untrusted_text_cannot_speak_to_the_terminal() -> None:
    painter = Painter([Group("user", 36, (0,), 3)], 40)
    written = painter.add("a\x1b]0;owned\x07b\x9b2J", [1.0]) + painter.end()
    assert "\x1b]" not in written
    assert "\x9b" not in written
    assert "a<U+001B>]0;owned<U+0007>b" in written


def test_wide_characters_and_long_words_stay_inside_the_terminal() -> None:
    painter = Painter([Group("user", 36, (0,), 3), Group("page", 33, (1,), 3)], 20)
    words = ["漢字" * 8, " word", "x" * 50, "\n\n", " end"]
    written = "".join(painter.add(word, [0.25, 0.75]) for word in words) + painter.end()
    for line in re.sub(r"\x1b\[[\d;]*m", "", written).split("\n"):
        assert cell_len(re.split(r"\x1b\[[AC\d]+|\r", line)[-1]) < 20
    assert sum(part.count("▀") for part in re.findall(r"\x1b\[33m(▀+)", written)) > 0


def test_over_many_tokens_every_source_has_the_cells_of_its_share() -> None:
    painter = Painter(
        [Group("a", 1, (0,), 3), Group("b", 2, (1,), 3), Group("first", 0, (2,), 1, resting=True)], 99
    )
    cells = [colour for _ in range(300) for colour in painter._colours(3, [0.07, 0.43, 0.5])]
    assert cells.count(1) == pytest.approx(900 * 0.14, abs=1)
    assert 0 not in cells


def test_ctrl_c_leaves_the_text_so_far_and_ends_with_130() -> None:
    with Terminal("generate", "--user", "hi", *ENDLESS) as terminal:
        terminal.read(until="▀{5}")
        terminal.type(b"\x03")
        assert terminal.end() == 130
    assert "(stopped), first token after" in terminal.out
    assert terminal.out.rstrip().endswith("stopped")
    assert "looked at while they were chosen" in terminal.out
    assert "Traceback" not in terminal.out


def test_ctrl_c_in_a_pipe_leaves_the_text_so_far() -> None:
    import signal

    arguments = ["generate", "--user", "hi", *ENDLESS, "--json"]
    code = PROGRAM.format(root=ROOT, arguments=arguments)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    *tokens, end = [json.loads(line) for line in [first, *out.splitlines()]]
    assert end["stopped"] == "stopped"
    assert end["text"].startswith("".join(token["text"] for token in tokens))
    assert err.rstrip().endswith("stopped")
    assert "Traceback" not in err
