"""Write the generated pages: docs/cli.md from every --help, docs/tree.md from the files themselves.

    python docs/build.py [--check]

With --check nothing is written; the exit code is 1 if a page differs from what would be.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    *("", "look", "scan", "steps", "generate", "chat", "stream", "demo"),
    *("guard", "guard eval", "guard calibrate"),
    *("claims", "claims list", "claims run", "doctor"),
)
UNSAID = ("py.typed", "_core_missing.txt")
EXITS = """\
Exit codes: 0, 2 for bad usage or bad input (with a message that names it), 130 when stopped by Ctrl-C.
`clearhead scan` ends with 1 if it found something.

Progress and notes go to standard error, results to standard output. Text from anywhere is printed with
control characters made visible.
"""

FLOORS = """\
Each floor imports only from floors below; `make lint` proves it.

```
faces        cli/   report/  integrations/              what a person, or another framework, touches
instrument   look/                                      tables, steps
guard        guard/                                     which text pulls the heads from the instruction
evidence     evidence/                                  what a map is worth
generation   generation/                                tokens as they come, many requests in one batch
record       trace/                                     what one model run looked at, saved and loaded
models       models/                                    prompts, the transformers adapter, loading
blocks       nn/  cache/                                layers of attention, what is kept of a stream
front door   front_door.py                              attention(): checks, choice of a backend, observables
backends     backends/                                  cpu (C++ core), sdpa, tiles, reference (the oracle)
questions    observables/                               what can be asked of the weights
words        visibility.py mask.py bias.py segments.py shapes.py errors.py
```

Below lies the C++ core, csrc/: kernels/ is compiled once per instruction set, core/ cuts a call into tasks,
and bind/ makes it the Python module `clearhead._core`, which knows addresses and no tensors.
"""


def cli_page() -> str:
    """Every --help, as a user sees it."""
    parts = ["# The command line\n\n<!-- made by `make docs` from every --help; do not edit -->\n", EXITS]
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "TERMINAL_WIDTH": "100"}
    for command in COMMANDS:
        arguments = [*command.split(), "--help"]
        run = subprocess.run(
            [sys.executable, "-m", "clearhead", *arguments],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
            cwd=ROOT,
        )
        title = " ".join(["clearhead", *command.split()])
        text = run.stdout.replace("python -m clearhead", "clearhead")
        text = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
        parts.append(f"## {title}\n\n```\n{text}\n```\n")
    return "\n".join(parts)


def remark(path: Path) -> str:
    """What a file says of itself: the first line of its docstring, its first heading or comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".py", ".pyi"):
        doc = ast.get_docstring(ast.parse(text)) or ""
        return doc.split("\n\n")[0].replace("\n", " ")
    if path.suffix == ".md":
        return next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), "")
    if path.suffix in (".h", ".cpp"):  # the first sentence
        opening = re.match(r"(?://[^\n]*\n)*", text)
        words = " ".join(line.lstrip("/ ") for line in opening.group().splitlines()) if opening else ""
        return re.split(r"(?<=\.)\s(?=[A-Z])", words)[0]
    found = re.search(r"^\s*(?://|/\*+|<!--)\s*(.+?)\s*(?:\*/|-->)?$", text, re.MULTILINE)
    return found.group(1) if found and path.suffix in (".js", ".css", ".html") else ""


def tree_page() -> str:
    """Every file, one remark each."""
    lines = [
        "# Where everything is\n\n<!-- made by `make docs` from the files themselves; do not edit -->\n",
        FLOORS,
    ]
    for folder in ("src/clearhead", "csrc", "tests", "benchmarks", "examples", "docs"):
        lines.append(f"## {folder}/\n\n| file | what it is |\n|---|---|")
        for path in sorted((ROOT / folder).rglob("*"), key=lambda p: (p.parent.as_posix(), p.name)):
            ignored = any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)
            if path.is_dir() or ignored or path.suffix in (".json", ".pyc", ".so") or path.name in UNSAID:
                continue
            said = remark(path).replace("|", "\\|")
            lines.append(f"| `{path.relative_to(ROOT / folder).as_posix()}` | {said} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write or check both pages."""
    stale = []
    for name, page in (("cli.md", cli_page()), ("tree.md", tree_page())):
        path = ROOT / "docs" / name
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old != page:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(page, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"out of date: {', '.join(stale)}; run `make docs`")
        return 1
    print(f"written: {', '.join(stale)}" if stale else "up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
