"""JSON, JSON lines and tables from a user's path, with the place named where one is not what it should be."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clearhead.errors import ArgumentError, MissingExtraError

Record = dict[str, Any]


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises ArgumentError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} cannot be read as JSON: {error}") from error


def read_list(path: Path) -> list[Record]:
    """Return a JSON file's list of objects, also one that stands under the only key of an object."""
    found = read_json(path)
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        found = lists[0] if len(lists) == 1 else found
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ArgumentError(f"{path} must hold a JSON list of objects")
    return found


def lines(path: Path) -> Iterator[Record]:
    """Yield a file's JSON lines, one object each. Raises ArgumentError, with the line, for anything else."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ArgumentError(f"{path}, line {number}: not JSON: {error}") from error
                if not isinstance(found, dict):
                    raise ArgumentError(f"{path}, line {number}: an object is needed")
                yield found
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from error


def sampled(records: Iterator[Record], most: int | None, seed: int) -> list[Record]:
    """Return at most so many records, each equally likely, in their order, holding no more than those.

    Algorithm R (Vitter 1985): files of gigabytes pass by line by line.
    """
    if most is None:
        return list(records)
    rng = random.Random(seed)
    kept: list[tuple[int, Record]] = []
    for number, record in enumerate(records):
        if len(kept) < most:
            kept.append((number, record))
        elif (place := rng.randrange(number + 1)) < most:
            kept[place] = (number, record)
    return [record for _, record in sorted(kept, key=lambda pair: pair[0])]


def read_table(path: Path) -> list[Record]:
    """Return the rows of a CSV, TSV or Parquet file.

    Raises MissingExtraError for Parquet where neither pyarrow nor fastparquet is installed with pandas.
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"{path} cannot be read as a table: {error}") from error


def _parquet(path: Path) -> list[Record]:
    try:
        import pandas

        rows: list[Record] = pandas.read_parquet(path).to_dict("records")
    except ImportError as error:
        raise MissingExtraError(
            f"{path} is Parquet, which needs pandas with pyarrow: pip install pandas pyarrow, or export it "
            "as CSV"
        ) from error
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read as Parquet: {error}") from error
    return rows


def text_of(record: Record, *names: str, path: Path) -> str:
    """Return the first of the named fields that is there, as text; lists of lines are joined.

    Raises ArgumentError where none is.
    """
    for name in names:
        value = record.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return "\n".join(str(line) for line in value)
    raise ArgumentError(
        f"{path}: a text is needed under {' or '.join(names)}; the fields are {', '.join(map(str, record))}"
    )
