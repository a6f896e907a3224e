"""NotInject (Li and Liu 2024): benign prompts with one, two or three words that trigger filters."""

from __future__ import annotations

import random
from pathlib import Path

from clearhead.guard.evaluate.loaders.files import Record, lines, read_list, read_table, text_of
from clearhead.guard.evaluate.loaders.options import Options, generic
from clearhead.guard.samples import Sample

LOOKS_FOR = (
    "NotInject_{one,two,three}.json, in the folder itself, in datasets/ (PIGuard's repository) or as "
    "Parquet, CSV or JSONL files of that name, also in data/ (the hub)"
)
_ENDINGS = (".json", ".jsonl", ".csv", ".parquet")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.name.startswith("NotInject") and path.suffix in _ENDINGS else []
    found = [
        file
        for folder in (path, path / "datasets", path / "data")
        for file in sorted(folder.glob("NotInject_*"))
        if file.suffix in _ENDINGS
    ]
    seen: dict[str, Path] = {}
    for file in found:  # the same part in two forms counts once
        seen.setdefault(_part(file), file)
    return list(seen.values())


def _part(file: Path) -> str:
    return file.name.removeprefix("NotInject_").split(".")[0].split("-")[0]


def recognised(path: Path) -> bool:
    """Whether NotInject lies there."""
    return bool(_files(path))


def load(path: Path, options: Options) -> list[Sample]:
    """Return the prompts, all benign. A family is the number of trigger words, a kind is "prompt"."""
    out: list[Sample] = []
    for file in _files(path):
        rng = random.Random(f"{options.seed} notinject {_part(file)}")
        records = _records(file)[: options.most]
        out += [
            Sample(
                generic(rng), text_of(record, "prompt", "text", path=file), "none", kind="prompt",
                position="whole", family=f"trigger words: {_part(file)}",
                language=_language(record), context=f"NotInject {_part(file)} {number}", source="NotInject",
            )
            for number, record in enumerate(records)
        ]  # fmt: skip
    return out


def _language(record: Record) -> str:
    return "mul" if str(record.get("category", "")).lower().startswith("multi") else "en"


def _records(file: Path) -> list[Record]:
    if file.suffix == ".json":
        return read_list(file)
    return list(lines(file)) if file.suffix == ".jsonl" else read_table(file)
