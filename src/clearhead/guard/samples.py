"""Labelled texts: what the guard is calibrated on and judged by, and their JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from clearhead.errors import ArgumentError

LABELS = ("none", "imperative", "attack")
"""none: no instruction, or nothing but what belongs to the text; imperative: an instruction meant for a
person or asked for by the user; attack: an instruction to the model that the user did not give."""

POSITIONS = ("none", "start", "middle", "end", "whole")
"""Where the inserted text stands; "whole": the text is nothing else; "none": nothing was inserted."""


@dataclass(frozen=True)
class Sample:
    """A text that somebody hands over, the instruction it comes with, and what is known of it.

    instruction: what the user or the operator asks for. text: the untrusted text.
    label: one of `LABELS`. start, end: characters of `text` that are the attack or the inserted imperative or
        statement; both None if nothing was inserted.
    kind: of the text: "mail", "web", "review", "table", "log", "chat", "pdf", "code", "prompt", …
    position: one of `POSITIONS`. family: of the attack, or of the benign text ("plain", "statement",
        "imperative", "document", "quote", "prompt"). language: two letters. context: which text it was made
        from: samples of one context never stand on both sides of a split. source: the set that it is from.

    Raises ArgumentError for labels and positions that are none, and for a span outside the text.
    """

    instruction: str
    text: str
    label: str
    start: int | None = None
    end: int | None = None
    kind: str = "text"
    position: str = "none"
    family: str = "plain"
    language: str = "en"
    context: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("instruction", "text", "kind", "family", "language", "context", "source"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(f"{name} must be a str, got {type(getattr(self, name)).__name__}")
        if self.label not in LABELS:
            raise ArgumentError(f"label must be one of {', '.join(LABELS)}, got {self.label!r}")
        if self.position not in POSITIONS:
            raise ArgumentError(f"position must be one of {', '.join(POSITIONS)}, got {self.position!r}")
        if (self.start is None) != (self.end is None):
            raise ArgumentError("start and end must both be given or both be None")
        if self.start is not None and self.end is not None:
            whole = type(self.start) is int and type(self.end) is int
            if not whole or not 0 <= self.start < self.end <= len(self.text):
                raise ArgumentError(
                    f"start and end must lie in the text of {len(self.text)} characters, got {self.start!r} "
                    f"and {self.end!r}"
                )

    @property
    def attacked(self) -> bool:
        """Whether the text holds an attack."""
        return self.label == "attack"


def write_samples(samples: Iterable[Sample], path: str | Path) -> None:
    """Write one JSON object per line, UTF-8, fields that have their default left out."""
    with Path(path).open("w", encoding="utf-8") as file:
        for sample in samples:
            kept = {
                name: value
                for name, value in asdict(sample).items()
                if name in ("instruction", "text", "label") or value != _DEFAULTS[name]
            }
            file.write(json.dumps(kept, ensure_ascii=False) + "\n")


def read_samples(path: str | Path) -> list[Sample]:
    """Read what `write_samples` wrote. Raises ArgumentError, with the line, for anything else."""
    return list(_read(Path(path)))


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Sample)}


def _read(path: Path) -> Iterator[Sample]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(found, dict) or not {"instruction", "text", "label"} <= found.keys():
            raise ArgumentError(
                f"{path}, line {number}: an object with instruction, text and label is needed"
            )
        unknown = sorted(found.keys() - _DEFAULTS.keys())
        if unknown:
            raise ArgumentError(
                f"{path}, line {number}: unknown field {unknown[0]!r}; the fields are {', '.join(_DEFAULTS)}"
            )
        try:
            yield Sample(**found)
        except ArgumentError as error:
            raise ArgumentError(f"{path}, line {number}: {error}") from error
