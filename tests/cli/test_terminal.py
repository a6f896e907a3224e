"""Nothing that comes from outside reaches the terminal as anything but visible text."""

from __future__ import annotations

import os
import re
import runpy
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from clearhead.cli.terminal import ACCENTS, cell, token, visible

HOSTILE = runpy.run_path(str(Path(__file__).parents[1] / "hostile" / "texts.py"))["TEXTS"]
MORE = {
    "colour": "\x1b[38;5;201mpink\x1b[0m",
    "clipboard": "\x1b]52;c;b3duZWQ=\x07",
    "hyperlink": "\x1b]8;;http://clearhead.invalid\x1b\\click\x1b]8;;\x1b\\",
    "C1 controls": "\x9b2J\x9d0;owned\x9c\x84\x8d",
    "markup": "[bold red]x[/bold red] [link=http://clearhead.invalid]y[/link] [/] \\[",
    "emoji code": ":smile: :skull:",
    "title in a query": "\x1bPq\x1b\\",
}
TEXTS = {sample.name: sample.text for sample in HOSTILE} | MORE
STYLE = re.compile(r"\x1b\[[0-9;]*m")
BAR = re.compile(r"\x1b\[\?25[lh]|\r\x1b\[(1A\x1b\[)?2K")  # how rich draws a progress bar and takes it away


def assert_harmless(shown: str) -> None:
    for c in shown:
        assert c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn"), ascii(
            shown
        )


@pytest.mark.parametrize("name", TEXTS)
def test_visible_text_is_harmless_and_harmless_text_is_unchanged(name: str) -> None:
    shown = visible(TEXTS[name])
    assert_harmless(shown)
    assert visible(shown) == shown
    shown.encode()


@given(st.text())
def test_any_text_becomes_harmless(text: str) -> None:
    for shown in (visible(text), cell(text), token(text)):
        assert_harmless(shown)
        assert visible(shown) == shown
    assert "\n" not in cell(text)
    assert len(cell(text)) <= 40
    assert "\n" not in token(text)
    assert token(text)


@pytest.mark.parametrize(
    "text",
    [
        "Grüße, naïve façade",
        "שלום עולם",
        "مرحبا",
        "नमस्ते",
        "ภาษาไทย",
        "我喜欢猫",
        "👍🏽 ❤\ufe0f",
        "Việt Nam ế",
        "e\u0301\u0302",
        "½ × √2",
    ],
)
def test_honest_writing_is_shown_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_what_cannot_be_seen_is_written_out() -> None:
    assert visible("a\x1b[2J\u202eb\u200b\x00") == "a<U+001B>[2J<U+202E>b<U+200B><U+0000>"
    assert visible("x\U000e0101\ufe00") == "x<U+E0101><U+FE00>"
    assert visible("❤\ufe0f\ufe0f") == "❤\ufe0f<U+FE0F>"
    assert visible("Z" + "\u0301" * 6) == "Z" + "\u0301" * ACCENTS + "<U+0301>" * 2


def test_cells_are_one_short_line() -> None:
    assert cell("one\ntwo") == "one↵two"
    assert cell("x" * 100) == "x" * 39 + "…"
    assert cell("x" * 40) == "x" * 40
    assert cell("\x1b" * 40) == "<U+001B>" * 4 + "…", "cut by what is shown, never inside"
    assert token(" the\n") == "·the↵"
    assert token("") == "∅"


# ---------------------------------------------------------------------- whole commands


@pytest.fixture(params=["pipe", "terminal"])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Standard output as a pipe, and as a terminal with colours."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "terminal":
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("FORCE_COLOR", "1")
    return str(request.param)


def seen(done: Any, screen: str) -> str:
    """What a person sees: without rich's own styles, which exist only on a terminal, and harmless."""
    assert "Traceback" not in done.err
    assert "38;5;201" not in "".join(STYLE.findall(done.out + done.err)), "a colour of the text came through"
    assert "http://clearhead.invalid\x1b" not in done.out
    if screen == "terminal":
        assert done.code != 0 or STYLE.search(done.out), "the terminal was not taken for one"
    out = STYLE.sub("", done.out) if screen == "terminal" else done.out
    err = BAR.sub("", STYLE.sub("", done.err)) if screen == "terminal" else done.err
    for stream in (out, err):
        assert_harmless(stream)
    return out + err


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"lone surrogate", "empty", "long word"}))
def test_a_look_at_hostile_text_everywhere_shows_only_text(
    name: str, screen: str, cli: Callable[..., Any], tmp_path: Path
) -> None:
    text = TEXTS[name]
    file = tmp_path / (text.replace("/", "").replace("\x00", "")[:60] or "x")
    file.write_text(text)
    done = cli(
        "look", "--system", text, "--user", f"{text} was it", "--data", f"@{file}", "--data", text,
        "--query", text.strip(), "--model", text, "--layers", "0", "--html", str(tmp_path / f"{file.name}.html"),
    )  # fmt: skip
    assert done.code == 0, done.err
    shown = " ".join(seen(done, screen).split())
    assert "; attention from " in shown
    if name == "markup":
        assert "[bold red]" in shown
        assert "[/bold red]" in shown
    if name == "emoji code":
        assert ":smile:" in shown
    if name == "colour":
        assert "<U+001B>[38;5;201mpink<U+001B>[0m" in shown


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "name",
    [
        "colour",
        "hyperlink",
        "C1 controls",
        "markup",
        "override",
        "null",
        "zero width",
        "tags",
        "long word",
        "accents",
    ],
)
def test_the_steps_of_hostile_words_show_only_text(name: str, screen: str, cli: Callable[..., Any]) -> None:
    text = TEXTS[name]
    done = cli("steps", f"the {text} was tired", "--token", "tired", "--model", text)
    assert done.code == 0, done.err
    shown = seen(done, screen)
    assert "the weights add up to 1.000000" in shown
    assert max(map(cell_len, STYLE.sub("", done.out).splitlines())) <= 200
    done = cli("steps", f"the {text} was tired", "--token", f"no{text}", "--on", text, "--model", text)
    assert done.code == 2
    assert "token must be a word of the text, got" in seen(done, screen)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "name",
    [
        "colour",
        "hyperlink",
        "C1 controls",
        "markup",
        "override",
        "terminal title",
        "zero width",
        "carriage return",
    ],
)
def test_errors_about_hostile_input_show_only_text(
    name: str, screen: str, cli: Callable[..., Any], tmp_path: Path
) -> None:
    text = TEXTS[name]
    bad = tmp_path / text.replace("/", "")
    bad.write_bytes(b"\xff")
    for arguments in (
        ["look", text],
        ["look", str(bad)],
        ["look", "--data", f"@{text}"],
        ["look", "--data", f"@{bad}"],
        ["look", "--user", "x", "--layers", text],
        ["look", "--user", "x", "--query", f"no {text}"],
        ["look", "--user", "x", "--html", f"{tmp_path}/no/{bad.name}"],
        ["demo", "--out", str(bad)],
        ["steps", text, "--token", text, "--layer", text],
        [text],
        ["look", f"--{text}"],
    ):
        done = cli(*arguments)
        assert done.code == 2, arguments
        assert done.out == ""
        assert "rror" in seen(done, screen)


@pytest.mark.usefixtures("tiny")
def test_half_characters_are_refused_without_being_printed(cli: Callable[..., Any]) -> None:
    done = cli("look", "--user", TEXTS["lone surrogate"])
    assert done.code == 2
    assert "text holds half a character" in done.err
    done.err.encode()


@pytest.mark.usefixtures("tiny")
def test_a_terminal_of_few_signs_gets_escapes_instead_of_an_error(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli("look", "--user", "the road ✓").code == 0
    written = (tmp_path / "out").read_bytes()
    assert rb"\xd7" in written  # ×
    assert os.linesep.encode() in written
