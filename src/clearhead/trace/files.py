"""A trace on disk: safetensors, with a JSON header that says what each tensor is.

A trace file may come from anybody: every field is checked, nothing in it is run, and no name in it is used
as a path.

The metadata entry "clearhead" of the safetensors header is JSON:

    {"format": "clearhead-trace-1", "model": name, "segments": [name, …], "streams": {stream:
        {"axes": {answer: [axis, …]}, "values": [answer or answer.part, …], "layers": […], "heads": […]}}}

Tensors are named stream, kind and answer, with a unit separator (U+001F) between them. Kind "value": the
answer. "queries": (B, R) integers, the number of each query among its item's real tokens, -1 for none.
"real" (no answer): (B, K) booleans, False where a key is padding.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import MissingExtraError, TraceError
from clearhead.trace.data import Stream, TraceData
from clearhead.trace.printing import printable

#: Written into every file; a later, incompatible layout gets another number.
FORMAT = "clearhead-trace-1"
_SEPARATOR = "\x1f"  # no name may hold it

_VALUE_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip

#: What reading a stranger's file may raise in safetensors and torch, all of it meaning "no trace file".
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, MemoryError)


def save(data: TraceData, path: Path) -> None:
    """Write `data` to `path`, whole or not at all. Raises TraceError, MissingExtraError without safetensors.

    The same data give the same bytes.
    """
    safetensors = _safetensors()
    header: dict[str, Any] = {
        "format": FORMAT,
        "model": data.model,
        "segments": list(data.segments),
        "streams": {},
    }
    tensors: dict[str, Tensor] = {}
    for label, stream in data.streams.items():
        header["streams"][label] = {
            "axes": {name: list(axes) for name, axes in stream.axes.items()},
            "values": list(stream.values),
            "layers": list(stream.layers),
            "heads": list(stream.heads),
        }
        for name, tensor in stream.values.items():
            tensors[_key(label, "value", name)] = tensor.contiguous()
        for name, tensor in stream.queries.items():
            tensors[_key(label, "queries", name)] = tensor.contiguous()
        if stream.real is not None:
            tensors[_key(label, "real", "")] = stream.real.contiguous()
    part = path.parent / f"{path.name}.{os.getpid()}.part"
    try:
        safetensors.save_file(tensors, str(part), metadata={"clearhead": json.dumps(header)})
        part.replace(path)
    except (*_UNREADABLE, safetensors.SafetensorError) as error:
        raise TraceError(f"cannot write a trace to {_path(path)}: {printable(str(error))}") from error
    finally:
        with contextlib.suppress(OSError, ValueError):  # the error that is on its way says more
            part.unlink(missing_ok=True)


def load(path: Path) -> TraceData:
    """Read what `save` wrote. Raises TraceError, or MissingExtraError without safetensors."""
    safetensors = _safetensors()
    try:
        if not path.is_file():
            raise TraceError(f"there is no trace file {_path(path)}")
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: a tensor that is a window on the file would change or vanish with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, not a dict
    except TraceError:
        raise
    except (*_UNREADABLE, safetensors.SafetensorError) as error:
        reason = printable(str(error))
        raise TraceError(f"{_path(path)} is no trace file, or a truncated one: {reason}") from error
    if "clearhead" not in metadata:
        raise TraceError(f"{_path(path)} is a safetensors file without a trace's header")
    try:
        header = json.loads(metadata["clearhead"])
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{_path(path)} has a header that is not JSON: {printable(str(error))}") from error
    try:
        return _Reader(header, tensors).trace()
    except TraceError as error:
        raise TraceError(f"{_path(path)} is no sound trace file: {error}") from error


class _Reader:
    """Takes a header and tensors apart, believing nothing."""

    def __init__(self, header: Any, tensors: dict[str, Tensor]) -> None:
        self.header, self.tensors = header, dict(tensors)

    def trace(self) -> TraceData:
        found = self.header.get("format") if isinstance(self.header, dict) else None
        if found != FORMAT:
            raise TraceError(f"its format is {_shown(found)}, this version reads {FORMAT!r}")
        segments = _list(self.header, "segments", str)
        streams = {
            _name(label, "a stream"): self.stream(label, part, len(segments))
            for label, part in _field(self.header, "streams", dict).items()
        }
        if self.tensors:
            raise TraceError(f"it has tensors that the header does not name: {_shown(min(self.tensors))}")
        return TraceData(_field(self.header, "model", str), tuple(segments), streams)

    def stream(self, label: str, part: Any, segments: int) -> Stream:
        if not isinstance(part, dict):
            raise TraceError(f"stream {_shown(label)} must be an object, got {type(part).__name__}")
        layers, heads = (tuple(_numbers(part, name)) for name in ("layers", "heads"))
        axes = {_name(n, "an answer"): _axes(n, names) for n, names in _field(part, "axes", dict).items()}
        stream = Stream(axes, {}, layers, heads, {}, self.take(label, "real", ""))
        sizes = {"layer": len(layers), "head": len(heads)} | ({"segment": segments} if segments else {})
        for name in _list(part, "values", str):
            base = _name(name, "an answer").split(".")[0]
            value = self.take(label, "value", name)
            if value is None or base not in axes:
                raise TraceError(f"the {'values' if value is None else 'axes'} of {_shown(name)} are missing")
            if value.dtype not in _VALUE_DTYPES:
                raise TraceError(f"{_shown(name)} has dtype {value.dtype}")
            if value.ndim != len(axes[base]):
                raise TraceError(
                    f"{_shown(name)} has shape {tuple(value.shape)} for {len(axes[base])} named axes"
                )
            sizes.setdefault("batch", value.shape[1])
            here = dict(sizes)
            if "query" in axes[base]:
                if base not in stream.queries:
                    stream.queries[base] = self.queries(label, base)
                here["query"] = stream.queries[base].shape[1]
                self.agree("the queries of " + base, stream.queries[base], ("batch", "query"), here)
            if "key" in axes[base] and stream.real is not None:
                here["key"] = stream.real.shape[-1]
            self.agree(name, value, axes[base], here)
            stream.values[name] = value
        unused = set(axes) - {name.split(".")[0] for name in stream.values}
        if unused:
            raise TraceError(f"{_shown(min(unused))} has axes and no values")
        if stream.real is not None:
            if stream.real.dtype != torch.bool or stream.real.ndim != 2:
                raise TraceError(f"the real keys must be (B, K) booleans, got {_kind(stream.real)}")
            self.agree("the real keys", stream.real, ("batch", "key"), sizes)
        return stream

    def queries(self, label: str, name: str) -> Tensor:
        found = self.take(label, "queries", name)
        if found is None or found.dtype != torch.int64 or found.ndim != 2:
            kind = "nothing" if found is None else _kind(found)
            raise TraceError(f"the queries of {_shown(name)} must be (B, R) integers, got {kind}")
        return found

    def take(self, label: str, kind: str, name: str) -> Tensor | None:
        return self.tensors.pop(_key(label, kind, name), None)

    def agree(self, name: str, value: Tensor, axes: tuple[str, ...], sizes: dict[str, int]) -> None:
        for axis, size in zip(axes, value.shape, strict=True):
            if sizes.get(axis, size) != size:
                raise TraceError(
                    f"{_shown(name)} has {size} along {_shown(axis)}, the rest of the file says {sizes[axis]}"
                )


def _key(label: str, kind: str, name: str) -> str:
    return _SEPARATOR.join((label, kind, name))


def _name(name: str, what: str) -> str:
    if not name or _SEPARATOR in name:
        raise TraceError(f"{what} has the name {_shown(name)}")
    return name


def _axes(name: str, axes: Any) -> tuple[str, ...]:
    plain = isinstance(axes, list) and all(isinstance(a, str) for a in axes)
    if not plain or axes[:2] != ["layer", "batch"] or len(set(axes)) != len(axes):
        raise TraceError(
            f'the axes of {_shown(name)} must be different names, "layer" and "batch" first: {_shown(axes)}'
        )
    return tuple(axes)


def _field(header: dict[str, Any], name: str, kind: type) -> Any:
    value = header.get(name)
    if not isinstance(value, kind):
        raise TraceError(f"the header's {name!r} must be {kind.__name__}, got {_shown(value)}")
    return value


def _list(header: dict[str, Any], name: str, kind: type) -> list[Any]:
    values: list[Any] = _field(header, name, list)
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TraceError(f"the header's {name!r} must hold {kind.__name__}, got {_shown(value)}")
    if len(set(values)) != len(values):
        raise TraceError(f"the header's {name!r} must differ, got {_shown(values)}")
    return values


def _numbers(header: dict[str, Any], name: str) -> list[int]:
    values = _list(header, name, int)
    if any(not 0 <= value < 2**31 for value in values):
        raise TraceError(f"the header's {name!r} must be numbers from 0 on, got {_shown(values)}")
    return values


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _shown(value: Any) -> str:
    """Something out of a stranger's file, as Python writes it, but not at any length."""
    try:
        return printable(repr(value), 80)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__}"


def _path(path: Path) -> str:
    return printable(repr(str(path)), 400)


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
