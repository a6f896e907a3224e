"""Plain JSON lines, one sample each, as `write_samples` writes them: the form for sets of one's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from clearhead.guard.evaluate.loaders.options import Options
from clearhead.guard.samples import Sample, read_samples

LOOKS_FOR = 'a .jsonl file of {"instruction", "text", "label"} and, where known, start, end, kind, family …'


def recognised(path: Path) -> bool:
    """Whether the first line has the fields of a sample."""
    if not path.is_file() or path.suffix not in (".jsonl", ".ndjson"):
        return False
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(next(line for line in file if line.strip()))
    except (OSError, ValueError, StopIteration, RecursionError):
        return False
    return isinstance(first, dict) and {"instruction", "text", "label"} <= first.keys()


def load(path: Path, options: Options) -> list[Sample]:
    """Return the samples; those without a set or a context get the file's name, and one of their own."""
    return [
        replace(s, source=s.source or path.stem, context=s.context or f"{path.stem} {number}")
        for number, s in enumerate(read_samples(path))
    ]
