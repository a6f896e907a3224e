"""Which files a scan reads: those named, and those in the folders named."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from clearhead.errors import ArgumentError, ReadingError

#: Folders of version control: their files are other files, compressed.
PASSED_OVER = frozenset({".git", ".hg", ".svn", ".jj"})


class Target(NamedTuple):
    """A file to read. walked: it was found in a folder, not named. error: a folder that cannot be listed."""

    path: str
    walked: bool = False
    error: str = ""


def targets(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> Iterator[Target]:
    """Yield files in the order named, those of a folder by name; "-" is standard input.

    include, exclude: globs for the files of folders, held against the path in the folder and against the
    name alone. Links to folders are not followed, so no loop is; links to files are read. What .gitignore
    names is read like everything else: a planted text can lie there. Raises ArgumentError for a name that
    does not exist.
    """
    for name in names:
        if name == "-":
            yield Target("-")
        elif "\x00" in name or not os.path.lexists(name):
            raise ArgumentError(f"FILE must be a file, a folder or -, got {name[:200]!r}: there is none")
        elif os.path.isdir(name):
            yield from _walk(Path(name), include, exclude)
        else:
            yield Target(name)


def _walk(root: Path, include: Sequence[str], exclude: Sequence[str]) -> Iterator[Target]:
    failed: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=failed.append):
        folders[:] = sorted(
            f for f in folders if f not in PASSED_OVER and not _matches(Path(folder, f), root, exclude)
        )
        for name in sorted(files):
            path = Path(folder, name)
            if include and not _matches(path, root, include):
                continue
            if not _matches(path, root, exclude):
                yield Target(str(path), walked=True)
        while failed:
            error = failed.pop()
            yield Target(str(error.filename), walked=True, error=f"cannot be listed: {error.strerror}")
    for error in failed:
        yield Target(str(error.filename), walked=True, error=f"cannot be listed: {error.strerror}")


def _matches(path: Path, root: Path, globs: Sequence[str]) -> bool:
    inside = path.relative_to(root).as_posix()
    return any(fnmatch(inside, glob) or fnmatch(path.name, glob) for glob in globs)


def standard_input(most: int) -> bytes:
    """Return what comes on standard input, at most one byte more than `most`. Raises ReadingError."""
    if sys.stdin is None:
        raise ReadingError("FILE: standard input is closed")
    try:
        return sys.stdin.buffer.read(most + 1)
    except OSError as error:  # a folder, a terminal that went away
        raise ReadingError(f"FILE: standard input cannot be read: {error.strerror}") from error
