"""A GGUF file as a folder that transformers loads in a moment.

transformers reads GGUF, but takes some twenty seconds for it every time. Here that happens once: the result
is kept in the user's cache folder under the hash of the GGUF file, written to a temporary folder and
renamed, so that nobody ever sees half of it. Every later use compares every file with its hash (a third of
a second for 538 MB); a cache that is cut short or changed is made again, not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from clearhead.errors import MissingExtraError, ModelError
from clearhead.models.progress import Progress, shown

T = TypeVar("T")

MANIFEST = "clearhead.json"
FORMAT = 1
"""Raised by one when the same GGUF file is to give other files than before."""


class Converted(NamedTuple):
    """A folder that `from_pretrained` loads, and the sha256 of its weights."""

    folder: Path
    hash: str


def default_cache_dir() -> Path:
    """Return the folder for clearhead's caches: where the platform wants them.

    `$XDG_CACHE_HOME/clearhead` if that is set; else `~/.cache/clearhead`, on macOS
    `~/Library/Caches/clearhead`, on Windows `%LOCALAPPDATA%\\clearhead\\Cache`.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():  # the XDG specification: a relative path is to be ignored
        return Path(base) / "clearhead"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "clearhead"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "clearhead" / "Cache"
    return Path.home() / ".cache" / "clearhead"


def sha256(path: Path) -> str:
    """Return the sha256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert_once(gguf: Path, cache_dir: Path, progress: Progress | None = None) -> Converted:
    """Return the folder made from a GGUF file, making it if it is not there or not as it was written.

    gguf: the file; a decoder model that transformers can read. cache_dir: the folder under which results
    are kept. progress: told the steps; None shows a bar on standard error when there is work to do.

    Safe to call from several processes at once: one converts, the others wait for it. Raises
    MissingExtraError without the packages that read GGUF, ModelError if the file cannot be read or the
    result not be written.
    """
    try:
        digest = sha256(gguf)
    except OSError as error:
        raise ModelError(f"{gguf} cannot be read: {error.strerror or error}") from error
    folder = cache_dir / "models" / f"{gguf.stem}-{digest[:16]}"
    weights = _verified(folder, digest)
    if weights is not None:
        return Converted(folder, weights)
    for package in ("transformers", "gguf", "accelerate", "safetensors"):
        if find_spec(package) is None:
            raise MissingExtraError(f"reading {gguf.name} needs {package}: pip install 'clearhead[models]'")
    with shown("preparing the model, once", progress) as tell:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _alone(folder, tell):
                weights = _verified(folder, digest)  # somebody else may have made it meanwhile
                if weights is None:
                    weights = _convert(gguf, digest, folder, tell)
        except OSError as error:
            raise ModelError(
                f"the model cannot be kept in {folder.parent}: {error.strerror or error}; it needs some "
                f"{6 * gguf.stat().st_size / 1e9:.1f} GB there; another folder can be given as cache_dir"
            ) from error
    return Converted(folder, weights)


@contextmanager
def _alone(folder: Path, tell: Progress) -> Iterator[None]:
    """Let one process at a time work on a folder, and remove what a killed one left behind."""
    from filelock import FileLock, Timeout  # torch depends on it

    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell("waiting for another process that is doing it", 0.0)
        lock.acquire()
    try:
        for left in folder.parent.glob(f".{folder.name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        lock.release()


def _verified(folder: Path, digest: str) -> str | None:
    """Return the hash of the weights if the folder holds what was written from this GGUF file, else None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, str] = manifest["files"]
        if manifest["format"] != FORMAT or manifest["source"] != digest:
            return None
        if any(sha256(folder / name) != known for name, known in files.items()):
            return None
        return files["model.safetensors"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _convert(gguf: Path, digest: str, folder: Path, tell: Progress) -> str:
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        _write(gguf, temporary, tell)
        tell("checking", 0.95)
        files = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
        manifest = {"format": FORMAT, "source": digest, "source_name": gguf.name, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if folder.exists():  # there, but not sound
            aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
            folder.rename(aside / "unsound")
            shutil.rmtree(aside, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    tell("done", 1.0)
    return files["model.safetensors"]


def _write(gguf: Path, folder: Path, tell: Progress) -> None:
    """Read a GGUF file by transformers and write what `from_pretrained` needs into a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with without_bars(), _counted(tell):
        try:
            tell("reading the tokenizer", 0.05)
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
            tell("reading the weights", 0.25)
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
            )
        except Exception as error:
            raise ModelError(f"{gguf} cannot be read as GGUF: {type(error).__name__}: {error}") from error
        tell("writing", 0.9)
        del model.config.quantization_config  # with either of these two save_pretrained refuses
        model.hf_quantizer = None
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))


@contextmanager
def _counted(tell: Progress) -> Iterator[None]:
    """Report each tensor that transformers reads from a GGUF file, in place of the bar it would show."""
    from transformers import modeling_gguf_pytorch_utils as reading

    usual = getattr(reading, "tqdm", None)
    if usual is None:  # another version: no bar to replace
        yield
        return

    def counted(tensors: Sequence[T], **_: object) -> Iterator[T]:
        for number, tensor in enumerate(tensors):
            tell("reading the weights", 0.25 + 0.65 * number / len(tensors))
            yield tensor

    reading.tqdm = counted
    try:
        yield
    finally:
        reading.tqdm = usual


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers' own progress bars off the screen."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
