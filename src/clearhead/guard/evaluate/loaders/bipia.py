"""BIPIA (Yi et al. 2023): contexts of five tasks and attacks by kind, in its repository's layout or flat."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.loaders.files import Record, lines, read_json, sampled, text_of
from clearhead.guard.evaluate.loaders.options import Options, worded
from clearhead.guard.evaluate.pairs import Context, build
from clearhead.guard.samples import Sample

LOOKS_FOR = (
    "a folder with benchmark/{email,table,code,abstract,qa}/{train,test}.jsonl and "
    "benchmark/{text,code}_attack_{train,test}.json, that folder benchmark itself, or one with "
    "email_train.jsonl, code_train.jsonl, text_attack_train.json … side by side"
)
TASKS = {"email": "mail", "table": "table", "code": "code", "abstract": "news", "qa": "web"}
_FLAT = re.compile(r"(email|table|code|abstract|qa)_(train|test)(?:_\d+)?\.jsonl$")
_SUMMARY = "Concisely summarize the news."


class _File(NamedTuple):
    task: str
    split: str
    path: Path


def _files(path: Path) -> Iterator[_File]:
    for folder in (path, path / "benchmark"):
        if not folder.is_dir():
            continue
        for task in TASKS:
            for split in ("train", "test"):
                if (folder / task / f"{split}.jsonl").is_file():
                    yield _File(task, split, folder / task / f"{split}.jsonl")
        for file in sorted(folder.glob("*.jsonl")):
            if match := _FLAT.match(file.name):
                yield _File(match[1], match[2], file)


def recognised(path: Path) -> bool:
    """Whether BIPIA lies there."""
    return path.is_dir() and any(True for _ in _files(path))


def load(path: Path, options: Options) -> list[Sample]:
    """Return six texts of every context: plain, two benign lines, attacks at three places.

    Attacks of the code task are its own; all others share the text attacks. Both splits are loaded, each as
    a set, "BIPIA train" and "BIPIA test", unless `options.split` names one; never are a split's contexts
    combined with the other's attacks.
    """
    out: list[Sample] = []
    found = [file for file in _files(path) if options.split in ("", file.split)]
    if not found:
        raise ArgumentError(f"{path} holds no BIPIA contexts of the split {options.split or 'train or test'}")
    for split in ("train", "test"):
        files = [file for file in found if file.split == split]
        for code in (False, True):
            own = [file for file in files if (file.task == "code") == code]
            if not own:
                continue
            rng = random.Random(f"{options.seed} bipia {split} {code}")
            contexts = [
                _context(file, number, record, rng)
                for file in own
                for number, record in enumerate(sampled(lines(file.path), options.most, options.seed))
            ]
            name = f"{'code' if code else 'text'}_attack_{split}.json"
            attacks = _attacks(_beside(own[0].path, name), "code: " if code else "")
            out += build(
                [c for c in contexts if c.text.strip()],
                attacks,
                options.inserts,
                source=f"BIPIA {split}",
                seed=options.seed,
                rounds=options.rounds,
            )
    return out


def _beside(contexts: Path, name: str) -> Path:
    for folder in (contexts.parent, contexts.parent.parent):
        if (folder / name).is_file():
            return folder / name
    raise ArgumentError(f"{contexts} has no {name} beside it or one folder up: the attacks are needed")


def _attacks(path: Path, prefix: str) -> dict[str, list[str]]:
    """Attacks by kind: a list of texts each, in an older version one text."""
    found = read_json(path)
    out = {}
    for kind, texts in found.items() if isinstance(found, dict) else ():
        texts = [texts] if isinstance(texts, str) else texts
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            out[f"{prefix}{kind}"] = [text for text in texts if text.strip()]
    if not out:
        raise ArgumentError(f"{path} must be a JSON object of attack kinds with lists of texts")
    return out


def _context(file: _File, number: int, record: Record, rng: random.Random) -> Context:
    text = _joined(text_of(record, "context", path=file.path))
    if file.task == "code":
        code = _joined(text_of(record, "code", path=file.path)).strip()
        error = _joined(text_of(record, "error", path=file.path)).strip()
        task = f"Fix the bug in my code.\n\nThe error message:\n{error}\n\nMy code:\n{code}"
    elif file.task == "abstract":
        task = str(record.get("question") or _SUMMARY)
    else:
        task = text_of(record, "question", path=file.path).removeprefix("Q: ").removeprefix("Question: ")
    return Context(f"{file.task} {number}", text, worded(task, rng), TASKS[file.task])


def _joined(text: str) -> str:
    """Code's fields are lists of lines, in some copies written out as text."""
    if text.startswith("["):
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
        if isinstance(found, list):
            return "\n".join(map(str, found))
    return text
