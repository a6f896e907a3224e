"""Test data of PIShield and TaskTracker: JSON lists of texts that may hold an injected task."""

from __future__ import annotations

import random
from pathlib import Path

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.loaders.files import Record, read_json, read_list, text_of
from clearhead.guard.evaluate.loaders.options import Options, generic
from clearhead.guard.samples import Sample

LOOKS_FOR = (
    'PIShield: TestData/SET_{clean,malicious}/…/data.json with "data_prompt", label.json beside it or not; '
    'TaskTracker: a JSON list of {"user_prompt", "text", "label"}'
)
_TEXT = ("data_prompt", "text")
_INSTRUCTION = ("user_prompt", "instruction_prompt", "target_instruction", "instruction", "system_prompt")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".json" and _fits(path) else []
    folder = path / "TestData" if (path / "TestData").is_dir() else path
    found = sorted(folder.rglob("data.json")) or [path / "quick_start" / "mock_data.json"]
    return [file for file in found if file.is_file() and _fits(file)]


def _fits(file: Path) -> bool:
    try:
        found = read_list(file)
    except ArgumentError:
        return False
    first = found[0] if found else {}
    return "data_prompt" in first or {"user_prompt", "text", "label"} <= first.keys()


def recognised(path: Path) -> bool:
    """Whether such files lie there."""
    return bool(_files(path))


def load(path: Path, options: Options) -> list[Sample]:
    """Return the texts. Where the attack stands in them is not said, so they don't count for localisation.

    PIShield: labels from label.json, or from the folder's name; place and attack from the folders below
    "malicious"; a context is a record's number in its set, so that a clean text and its attacked twins stay
    together. TaskTracker: a context is a user prompt.
    """
    root = path if path.is_dir() else path.parent
    out: list[Sample] = []
    for file in _files(path):
        records = read_list(file)
        labels = _labels(file, records)
        if options.most is not None and len(records) > options.most:
            kept = sorted(random.Random(options.seed).sample(range(len(records)), options.most))
            records, labels = [records[i] for i in kept], [labels[i] for i in kept]
        rng = random.Random(f"{options.seed} {file.relative_to(root)}")
        for number, (record, attacked) in enumerate(zip(records, labels, strict=True)):
            out.append(_sample(file, number, record, attacked, rng))
    return out


def _sample(file: Path, number: int, record: Record, attacked: bool, rng: random.Random) -> Sample:
    text = text_of(record, *_TEXT, path=file)
    given = next((record[name] for name in _INSTRUCTION if isinstance(record.get(name), str)), "")
    family, position = ("plain", "none")
    if "data_prompt" in record:
        source, name = "PIShield", file.parent.name.split("_")[0]
        context = f"PIShield {name} {number}"
        if attacked:
            folders = [*file.parts][-4:-2]  # …/end/combine/boolq_boolq/data.json
            position = folders[0] if folders[0] in ("start", "middle", "end") else "none"
            family = f"PIShield {folders[1]}"
    else:
        source, context = "TaskTracker", f"TaskTracker {given}"
        family = "TaskTracker" if attacked else "plain"
    return Sample(
        given or generic(rng), text, "attack" if attacked else "none", kind="web", position=position,
        family=family, context=context, source=source,
    )  # fmt: skip


def _labels(file: Path, records: list[Record]) -> list[bool]:
    beside = file.with_name("label.json")
    if "label" in records[0]:
        found: object = [record.get("label") for record in records]
    elif beside.is_file():
        found = read_json(beside)
    else:
        attacked = any("malicious" in part for part in file.parts)
        if not attacked and not any("clean" in part for part in file.parts):
            raise ArgumentError(f"{file} has no labels: label.json, or clean or malicious in a folder's name")
        return [attacked] * len(records)
    if not isinstance(found, list) or len(found) != len(records) or set(map(str, found)) - set(_LABELS):
        raise ArgumentError(f"{file}: a label 0 or 1 is needed for each of the {len(records)} texts")
    return [_LABELS[str(label)] for label in found]


_LABELS = {"0": False, "1": True, "False": False, "True": True}
