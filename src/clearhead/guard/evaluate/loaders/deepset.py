"""deepset/prompt-injections and tables like it: a text and a label, 1 for an injection."""

from __future__ import annotations

import random
from pathlib import Path

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.loaders.files import Record, read_table
from clearhead.guard.evaluate.loaders.options import Options, generic
from clearhead.guard.samples import Sample

LOOKS_FOR = (
    "a CSV, TSV or Parquet file with the columns text (or prompt) and label (0 and 1, benign and injection), "
    "or a folder of such files"
)
_ENDINGS = (".csv", ".tsv", ".parquet")
_TEXT = ("text", "prompt")
_ATTACKED = {"1", "true", "injection", "attack", "malicious", "1.0"}
_BENIGN = {"0", "false", "benign", "legit", "legitimate", "safe", "none", "0.0"}


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in _ENDINGS else []
    return [
        file for folder in (path, path / "data") for file in sorted(folder.glob("*"))
        if file.suffix in _ENDINGS
    ]  # fmt: skip


def recognised(path: Path) -> bool:
    """Whether there are such tables; of a table that can be read only the header is asked."""
    files = _files(path)
    for file in files:
        if file.suffix == ".parquet":
            continue
        try:
            with file.open(encoding="utf-8-sig") as table:
                head = table.readline().lower()
        except (OSError, UnicodeDecodeError):
            return False
        names = {name.strip().strip('"') for name in head.replace("\t", ",").split(",")}
        if "label" not in names or not names & set(_TEXT):
            return False
    return bool(files)


def load(path: Path, options: Options) -> list[Sample]:
    """Return the texts; attacks are whole messages. Rows of train and test files are told apart by context.

    Raises ArgumentError, with the row, for a label that is none and for a row without text.
    """
    out: list[Sample] = []
    source = "deepset" if "deepset" in str(path).lower() else path.stem
    for file in _files(path):
        if options.split and options.split not in file.stem:
            continue
        rng = random.Random(f"{options.seed} deepset {file.name}")
        rows = read_table(file)
        if options.most is not None and len(rows) > options.most:
            rows = random.Random(options.seed).sample(rows, options.most)
        for number, row in enumerate(rows, 2):
            text, attacked = _read(row, file, number)
            out.append(
                Sample(
                    generic(rng), text, "attack" if attacked else "none", 0 if attacked else None,
                    len(text) if attacked else None, kind="prompt", position="whole",
                    family="direct" if attacked else "prompt", language="mul",
                    context=f"{source} {file.stem} {number}", source=source,
                )
            )  # fmt: skip
    return out


def _read(row: Record, file: Path, number: int) -> tuple[str, bool]:
    fields = {str(name).strip().lower(): value for name, value in row.items()}
    text = next((fields[name] for name in _TEXT if fields.get(name)), None)
    label = str(fields.get("label", "")).strip().lower()
    if not isinstance(text, str) or not text.strip():
        raise ArgumentError(f"{file}, row {number}: there is no text under {' or '.join(_TEXT)}")
    if label not in _ATTACKED | _BENIGN:
        raise ArgumentError(f"{file}, row {number}: label must be 0 or 1, got {label[:40]!r}")
    return text, label in _ATTACKED
