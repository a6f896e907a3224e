"""`clearhead chat`: a line is a message, and two commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .test_generate_command import ENDLESS, Terminal

pytestmark = pytest.mark.usefixtures("tiny")
SHORT = ["--max-new-tokens", "4"]


def test_every_line_gets_an_answer_until_the_end(cli: Callable[..., Any]) -> None:
    done = cli("chat", *SHORT, "--no-look", stdin=b"the road\n\n  was it tired  \n")
    assert done.code == 0
    assert len(done.out.splitlines()) == 2
    assert done.err.count("first token after") == 2


def test_quit_ends_it_and_reset_forgets(cli: Callable[..., Any]) -> None:
    lines = b"the road\nit was\n/reset\nthe road\n/quit\nnever said\n"
    done = cli("chat", *SHORT, "--json", "--system", "the animal", stdin=lines)
    ends = [json.loads(line) for line in done.out.splitlines() if "stopped" in line]
    assert len(ends) == 3
    assert ends[0]["text"] == ends[2]["text"]
    assert ends[0]["prompt_tokens"] == ends[2]["prompt_tokens"] < ends[1]["prompt_tokens"]
    assert "forgotten" in done.err


def test_earlier_turns_are_one_source_per_role(cli: Callable[..., Any]) -> None:
    done = cli("chat", *SHORT, "--json", stdin=b"the road\nit was\nthe animal\n")
    ends = [json.loads(line) for line in done.out.splitlines() if "stopped" in line]
    assert list(ends[-1]["looked_at"]) == ["user", "assistant", "template", "output", "first token"]


def test_an_unknown_command_is_not_said_to_the_model(cli: Callable[..., Any]) -> None:
    done = cli("chat", *SHORT, stdin=b"/dance\n")
    assert done.out == ""
    assert "there is no such command; /reset forgets the conversation, /quit (or Ctrl-D) ends it" in done.err


def test_a_message_that_is_too_long_does_not_end_the_chat(cli: Callable[..., Any]) -> None:
    done = cli("chat", *SHORT, "--no-look", stdin=b"road " * 300 + b"\nthe road\n")
    assert done.code == 0
    assert "error: the prompt is too long" in done.err
    assert len(done.out.splitlines()) == 1


def test_bytes_that_are_no_text_are_an_error(cli: Callable[..., Any]) -> None:
    done = cli("chat", *SHORT, stdin=b"\xff\xfe\n")
    assert done.code == 2
    assert "standard input is not UTF-8 text" in done.err


def test_a_paged_cache_is_refused(cli: Callable[..., Any]) -> None:
    done = cli("chat", "--cache", "paged", stdin=b"")
    assert (done.code, done.out) == (2, "")
    assert "paged is for generate" in done.err


def test_in_a_terminal_ctrl_c_ends_the_answer_and_then_the_chat() -> None:
    with Terminal("chat", *ENDLESS) as terminal:
        terminal.read(until="> ")
        terminal.type(b"hello\n")
        terminal.read(until="▀{5}")
        terminal.type(b"\x03")
        terminal.read(until=r"\nstopped\r\n> ")
        assert "(stopped), first token after" in terminal.out
        terminal.type(b"\x03")
        assert terminal.end() == 130
    assert "Traceback" not in terminal.out
