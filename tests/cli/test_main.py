"""The program around the commands: exit codes, usage errors, interrupts, closed pipes, quick help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = [sys.executable, "-m", "clearhead"]


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m clearhead` as somebody else's process."""
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False, **options
    )


@pytest.mark.parametrize(
    "arguments", [["--help"], ["look", "--help"], ["steps", "--help"], ["demo", "--help"]]
)
def test_help_is_shown_and_is_no_error(cli: Callable[..., Any], arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.code == 0
    assert "Usage: " in done.out
    assert done.err == ""


def test_version(cli: Callable[..., Any]) -> None:
    import clearhead

    assert cli("--version") == (0, f"clearhead {clearhead.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Usage: "),
        (["dance"], "No such command 'dance'"),
        (["look", "--dance"], "No such option: --dance"),
        (["look", "--user"], "Option '--user' requires an argument"),
        (["look", "a", "b"], "unexpected extra argument"),
        (["steps", "x"], "Missing option '--token'"),
        (["steps"], "TEXT"),
        (["steps", "x", "--token", "x", "--layer", "two"], "Invalid value for '--layer'"),
    ],
)
def test_bad_usage_ends_with_2_and_says_what_was_wrong(
    cli: Callable[..., Any], arguments: list[str], message: str
) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert message in done.err
    assert done.out == ""


def test_an_option_cannot_speak_to_the_terminal(cli: Callable[..., Any]) -> None:
    for arguments in (
        ["look", "--\x1b]0;owned\x07"],
        ["\x1b[2J"],
        ["steps", "x", "--token", "x", "--head", "\x9b2J"],
    ):
        done = cli(*arguments)
        assert done.code == 2
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in done.err if c != "\n")


def test_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom clearhead.cli import main\n"
        "try:\n    main(['look', '--help'])\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'tokenizers'} & {name.split('.')[0] for name in sys.modules}\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--system" in done.stdout


def test_python_m_is_the_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "look" in done.stdout
    assert done.stderr == ""


def test_bad_input_leaves_no_traceback_in_a_process_of_its_own() -> None:
    done = run("look", "--data", "@/no/such/page.txt", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --data: /no/such/page.txt cannot be read: No such file or directory\n"


WAITING = """
import os, sys, time
import clearhead.models.loading as loading
def load(name, progress=None):
    os.write(2, b"ready\\n")
    time.sleep(60)
loading.load = load
from clearhead.cli import main
main(["look", "--user", "x"])
"""


def test_ctrl_c_ends_with_130_and_one_word() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err.strip()) == ("", "stopped")


@pytest.mark.parametrize("arguments", [["--help"], ["look", "--help"]])
def test_a_reader_who_leaves_is_no_error(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*PROGRAM, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "output", ["terminal.write('x' * 100)", "tables.console().print('x' * 100)"], ids=["json", "table"]
)
def test_a_reader_who_leaves_ends_every_kind_of_output_quietly(output: str) -> None:
    read, write = os.pipe()
    os.close(read)
    code = f"from clearhead.cli import tables, terminal\n{output}\nraise AssertionError('went on')"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_package_is_named_with_the_way_to_get_it() -> None:
    code = "import sys\nsys.modules['typer'] = None\nfrom clearhead.cli import main\nmain(['look'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: the command line needs typer: pip install 'clearhead[report]'\n"
