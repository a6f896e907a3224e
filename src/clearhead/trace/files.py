"""A trace on disk: safetensors, with a JSON header that says what each tensor is.

A trace file may come from anybody: every field is checked, nothing in it is run, and no name in it is used
as a path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import MissingExtraError, TraceError
from clearhead.trace.data import Stream, TraceData

#: Written into every file; a later, incompatible layout gets another number.
FORMAT = "clearhead-trace-1"
_SEPARATOR = "\x1f"  # between stream and answer in a tensor's name; neither may hold it


def save(data: TraceData, path: Path) -> None:
    """Write `data` to `path`. Raises TraceError, or MissingExtraError without safetensors."""
    safetensors = _safetensors()
    header: dict[str, Any] = {
        "format": FORMAT,
        "model": data.model,
        "batch": data.batch,
        "segments": list(data.segments),
        "streams": {},
    }
    tensors: dict[str, Tensor] = {}
    for name, stream in data.streams.items():
        header["streams"][name] = {
            "axes": {n: list(axes) for n, axes in stream.axes.items()},
            "values": list(stream.values),
            "layers": list(stream.layers),
            "heads": list(stream.heads),
            "queries": {n: q.tolist() for n, q in stream.queries.items()},
            "last": sorted(stream.last),
            "own_queries": stream.own_queries,
            "prompt": stream.prompt,
        }
        for n, tensor in stream.values.items():
            tensors[f"{name}{_SEPARATOR}{n}"] = tensor.contiguous()
        if stream.real is not None:
            tensors[f"{name}{_SEPARATOR}real keys"] = stream.real.contiguous()
    try:
        safetensors.save_file(tensors, str(path), metadata={"clearhead": json.dumps(header)})
    except (OSError, safetensors.SafetensorError) as error:
        raise TraceError(f"cannot write a trace to {str(path)!r}: {error}") from error


def load(path: Path) -> TraceData:
    """Read what `save` wrote. Raises TraceError, or MissingExtraError without safetensors."""
    safetensors = _safetensors()
    if not path.is_file():
        raise TraceError(f"there is no trace file {str(path)!r}")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (OSError, safetensors.SafetensorError) as error:
        raise TraceError(f"{str(path)!r} is no trace file, or a truncated one: {error}") from error
    try:
        header = json.loads(metadata.get("clearhead", "null"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"{str(path)!r} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise TraceError(
            f"{str(path)!r} is no trace of this version: its format is {found!r}, not {FORMAT!r}"
        )
    try:
        return _checked(header, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, TraceError):
            raise TraceError(f"{str(path)!r}: {error}") from error
        raise TraceError(f"{str(path)!r} has a malformed header: {type(error).__name__} {error}") from error


def _checked(header: dict[str, Any], tensors: dict[str, Tensor]) -> TraceData:
    batch = _int(header["batch"])
    streams = {}
    used = set()
    for name, part in header["streams"].items():
        axes = {str(n): tuple(str(a) for a in names) for n, names in part["axes"].items()}
        layers, heads = tuple(map(_int, part["layers"])), tuple(map(_int, part["heads"]))
        queries = {str(n): torch.tensor([_int(i) for i in q]) for n, q in part["queries"].items()}
        values = {}
        for n in part["values"]:
            key = f"{name}{_SEPARATOR}{n}"
            if key not in tensors:
                raise TraceError(f"the values of {name} {n} are missing")
            tensor, names = tensors[key], axes[n.split(".")[0]]
            want = {"layer": len(layers), "batch": batch, "head": len(heads)}
            if "segment" in names and header["segments"]:
                want["segment"] = len(header["segments"])
            if "query" in names:
                want["query"] = len(queries[n.split(".")[0]])
            if names[:2] != ("layer", "batch") or tensor.ndim != len(names):
                raise TraceError(f"{name} {n} has shape {tuple(tensor.shape)} for the axes {names}")
            for axis, size in zip(names, tensor.shape, strict=True):
                if want.get(axis, size) != size:
                    raise TraceError(f"{name} {n} has {size} along {axis}, the header says {want[axis]}")
            values[str(n)] = tensor
            used.add(key)
        key = f"{name}{_SEPARATOR}real keys"
        real = tensors.get(key)
        if real is not None and (real.dtype != torch.bool or real.ndim != 2 or real.shape[0] != batch):
            raise TraceError(f"{name} has a padding mask of shape {tuple(real.shape)} and dtype {real.dtype}")
        used.add(key)
        last, own = frozenset(str(n) for n in part["last"]), bool(part["own_queries"])
        prompt = _int(part["prompt"])
        streams[str(name)] = Stream(axes, values, layers, heads, queries, last, real, own, prompt)
    if extra := set(tensors) - used:
        raise TraceError(f"tensors that the header does not name: {sorted(extra)[:3]}")
    return TraceData(str(header["model"]), batch, tuple(map(str, header["segments"])), streams)


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected an integer, got {value!r}")
    return value


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError(
            "saving and loading traces needs safetensors: pip install safetensors"
        ) from error

    class Both:
        safe_open = staticmethod(safetensors.safe_open)
        save_file = staticmethod(safetensors.torch.save_file)
        SafetensorError = safetensors.SafetensorError

    return Both
