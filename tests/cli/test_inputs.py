"""What is typed becomes a prompt, or an error that names the option before any model is loaded."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.cli.inputs import Texts, numbers, segments
from clearhead.errors import ArgumentError, PromptError

pytestmark = pytest.mark.usefixtures("no_model")


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_text_file_stdin_and_double_at_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.txt"
    page.write_bytes("\ufeffGrüße\r\n".encode())
    stdin(monkeypatch, "from a pipe ✓".encode())
    found = segments(None, "be kind", "@@home", [f"@{page}", "-", "plain"])
    assert [(s.name, s.role, s.text, s.trusted) for s in found] == [
        ("system", "system", "be kind", True),
        ("user", "user", "@home", True),
        ("page.txt", "data", "Grüße\r\n", False),
        ("stdin", "data", "from a pipe ✓", False),
        ("data", "data", "plain", False),
    ]


def test_sources_of_the_same_name_get_numbers_and_names_with_a_meaning_are_kept_free(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "template").write_text("x")
    files = [f"@{tmp_path / folder / 'template'}" for folder in ("a", "b")]
    names = [s.name for s in segments(None, None, "u", [*files, "x", "y"])]
    assert names == ["user", "template 2", "template 3", "data", "data 2"]


def test_a_file_name_that_is_not_utf8_is_shown_by_its_bytes(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")
    Path(path).write_text("x")
    assert segments(None, None, None, [f"@{path}"])[0].name == "\\udcff.txt"


def test_a_chat_is_taken_as_it_is_and_options_add_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "go"},
    ]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(chat))
    wanted = [("user 1", "hi"), ("assistant", "yes?"), ("user 2", "go")]
    assert [(s.name, s.text) for s in segments(str(file), None, None, [])] == wanted
    stdin(monkeypatch, json.dumps(chat).encode())
    assert [(s.name, s.text) for s in segments("-", None, None, [])] == wanted
    found = segments(str(file), "rules", "more", ["page"])
    assert [s.name for s in found] == ["system", "user 1", "assistant", "user 2", "user", "data"]


def test_the_files_that_are_read_are_known(tmp_path: Path) -> None:
    for name in ("chat.json", "page.txt"):
        (tmp_path / name).write_text('[{"role": "user", "content": "hi"}]')
    texts = Texts()
    segments(str(tmp_path / "chat.json"), None, None, [f"@{tmp_path / 'page.txt'}", "typed"], texts)
    assert texts.files == [tmp_path / "chat.json", tmp_path / "page.txt"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "role.json").write_text('[{"role": "\\u001b[31mwizard", "content": "x"}]')
    (tmp_path / "system.json").write_text('[{"role": "system", "content": "x"}]')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    return tmp_path


BAD = {
    "nothing": ([], "nothing to look at: give --user, --data, --system, or a chat file"),
    "all empty": (["--user", "", "--data", ""], "nothing to look at: all texts are empty"),
    "no file name": (["--data", "@"], "--data: a file name must follow the @"),
    "missing file": (["--data", "@{}/no.txt"], "--data: {}/no.txt cannot be read: No such file or directory"),
    "dead link": (["--user", "@{}/dead"], "--user: {}/dead cannot be read: No such file"),
    "not UTF-8": (["--system", "@{}/latin.txt"], "--system: {}/latin.txt is not UTF-8 text: byte 3 is 0xe9"),
    "folder": (["--data", "@{}/folder"], "{}/folder is a folder: a text file is needed"),
    "chat folder": (["{}/folder"], "{}/folder is a folder: a text file is needed"),
    "chat missing": (["What is this?"], "CHAT must be a JSON chat file or -, got 'What is this?'"),
    "chat empty": (["{}/empty.json"], "CHAT: {}/empty.json is not JSON: Expecting value at line 1"),
    "chat object": (["{}/object.json"], "CHAT: {}/object.json must be a JSON list of messages"),
    "chat of none": (["{}/list.json"], "CHAT: {}/list.json must hold at least one message"),
    "unknown role": (
        ["{}/role.json"],
        "message 0: role must be one of system, user, assistant, tool, data, got",
    ),
    "too deep": (["{}/deep.json"], "CHAT: {}/deep.json is"),
    "two systems": (["{}/system.json", "--system", "x"], "--system: the chat has a system message already"),
    "stdin twice": (["-", "--user", "-"], "--user: standard input is read by CHAT already"),
    "layers of words": (
        ["--user", "x", "--layers", "all"],
        "--layers must be numbers such as 3,5-8, got 'all'",
    ),
    "layers backwards": (
        ["--user", "x", "--layers", "8-5"],
        "--layers must be numbers such as 3,5-8, got '8-5', which runs backwards",
    ),
    "report in a missing folder": (
        ["--user", "x", "--html", "{}/no/x.html"],
        "--html: there is no folder {}/no; make it first",
    ),
    "report is a folder": (
        ["--user", "x", "--html", "{}/folder"],
        "--html: {}/folder is a folder; name a file in it",
    ),
    "report to a dash": (["--user", "x", "--html", "-"], "--html must be the name of a file, got '-'"),
    "report over its input": (
        ["--user", "@{}/list.json", "--html", "{}/list.json"],
        "--html: {}/list.json is one of the files that are read; name another",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_ends_with_2(
    name: str, files: Path, cli: Callable[..., SimpleNamespace]
) -> None:
    arguments, message = BAD[name]
    done = cli(
        "look", *(a.replace("{}", str(files)) for a in arguments), stdin=b'[{"role": "user", "content": "x"}]'
    )
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert message.replace("{}", str(files)) in done.err
    assert "\x1b" not in done.err


def test_standard_input_that_is_not_utf8_or_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, b"\xff")
    with pytest.raises(PromptError, match="--user: standard input is not UTF-8 text: byte 0 is 0xff"):
        segments(None, None, "-", [])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ArgumentError, match="--user: standard input is closed"):
        segments(None, None, "-", [])


def test_too_much_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.cli.inputs.LARGEST_FILE", 10)
    stdin(monkeypatch, b"x" * 11)
    with pytest.raises(PromptError, match="standard input is too large: at most 10 bytes"):
        Texts().read("--user", "-")


def test_somebody_at_a_keyboard_is_told_how_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard = SimpleNamespace(isatty=lambda: True, buffer=io.BytesIO(b"typed"))
    monkeypatch.setattr(sys, "stdin", keyboard)
    assert Texts().read("--data", "-") == ("typed", "stdin")
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "reading --data from the keyboard; end with Ctrl-D on a line of its own\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("3", [3]), ("3,5-8", [3, 5, 6, 7, 8]), (" 1 , 2 - 3 ", [1, 2, 3]), ("2,1,2", [2, 1]), ("0-0", [0])],
)
def test_numbers_are_read_in_their_order_and_once(text: str, wanted: list[int]) -> None:
    assert numbers("--layers", text) == wanted


@pytest.mark.parametrize(
    "text", ["", ",", "1,", "-1", "1-", "1-2-3", "a", "1.5", "٣", "²", "9" * 5000, "0-999999"]
)
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="--layers must be numbers such as 3,5-8, got"):
        numbers("--layers", text)


@given(st.text())
def test_no_text_breaks_the_reading_of_numbers(text: str) -> None:
    try:
        found = numbers("--layers", text)
    except ArgumentError:
        return
    assert found
