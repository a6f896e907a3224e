"""Trace files that no run wrote: damaged, lying, or meant to do harm. Each says what it is.

A builder takes the bytes of a sound trace and returns those of the hostile one.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from typing import Any

Builder = Callable[[bytes], bytes]
Header = dict[str, Any]

SEPARATOR = "\x1f"


def opened(sound: bytes) -> tuple[Header, Header, bytes]:
    """The safetensors header, the trace's own header inside it, and the payload."""
    (size,) = struct.unpack("<Q", sound[:8])
    outer = json.loads(sound[8 : 8 + size])
    return outer, json.loads(outer["__metadata__"]["clearhead"]), sound[8 + size :]


def closed(outer: Header, inner: Any, payload: bytes) -> bytes:
    """Put a file together again; `inner` may be a text that is no JSON."""
    text = inner if isinstance(inner, str) else json.dumps(inner)
    outer = {**outer, "__metadata__": {"clearhead": text}}
    head = json.dumps(outer).encode()
    return struct.pack("<Q", len(head)) + head + payload


def _inner(change: Callable[[Header], Any]) -> Builder:
    """Change the trace's own header; what `change` returns, if anything, replaces it."""

    def build(sound: bytes) -> bytes:
        outer, inner, payload = opened(sound)
        changed = change(inner)
        return closed(outer, inner if changed is None else changed, payload)

    return build


def _outer(change: Callable[[Header], None]) -> Builder:
    """Change the safetensors header."""

    def build(sound: bytes) -> bytes:
        outer, inner, payload = opened(sound)
        change(outer)
        return closed(outer, inner, payload)

    return build


def _stream(name: str, value: Any) -> Builder:
    return _inner(lambda header: header["streams"]["self"].__setitem__(name, value))


def _tensor(outer: Header, kind: str, name: str = "mass") -> Header:
    found: Header = outer[SEPARATOR.join(("self", kind, name))]
    return found


def _reshaped(kind: str, change: Callable[[list[int]], list[int]], name: str = "mass") -> Builder:
    def turn(outer: Header) -> None:
        entry = _tensor(outer, kind, name)
        entry["shape"] = change(entry["shape"])

    return _outer(turn)


class Harmful:
    """A pickle of this writes a file when it is loaded by something that loads pickles."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return open, (self.path, "w")


def pickled(path: str) -> bytes:
    """A pickle that creates `path`."""
    return pickle.dumps(Harmful(path))


def _renamed(outer: Header) -> None:
    outer["../../etc/passwd"] = outer.pop(SEPARATOR.join(("self", "value", "mass")))


def _another(sound: bytes) -> bytes:
    outer, inner, payload = opened(sound)
    outer["more"] = {"dtype": "U8", "shape": [4], "data_offsets": [len(payload), len(payload) + 4]}
    return closed(outer, inner, payload + bytes(4))


def _fewer_real_keys(sound: bytes) -> bytes:
    outer, inner, payload = opened(sound)
    entry = _tensor(outer, "real", "")
    (batch, keys), (start, end) = entry["shape"], entry["data_offsets"]
    assert end == len(payload), "booleans come last"
    entry.update(shape=[batch, keys - 1], data_offsets=[start, end - batch])
    return closed(outer, inner, payload[:-batch])


def _dtype(name: str) -> Builder:
    """Another dtype of eight bytes for the indices."""
    return _outer(lambda outer: _tensor(outer, "value", "top_keys.indices").update(dtype=name))


def _ragged(sound: bytes) -> bytes:
    outer, inner, payload = opened(sound)
    entry = _tensor(outer, "queries")
    start, end = entry["data_offsets"]
    entry["shape"] = [entry["shape"][0] * entry["shape"][1]]
    assert end - start == 8 * entry["shape"][0]
    return closed(outer, inner, payload)


#: Story -> how to build it. All must be refused.
BUILDERS: dict[str, Builder] = {
    "an empty file": lambda sound: b"",
    "a text file": lambda sound: b"# Report\nnothing to see here\n" * 9,
    "zeros": lambda sound: bytes(256),
    "a header that is said to be longer than any memory": lambda sound: struct.pack("<Q", 2**63) + sound[8:],
    "a header that is said to end before it does": lambda sound: struct.pack("<Q", 5) + sound[8:],
    "a header that is no UTF-8": lambda sound: sound[:8] + b"\xff\xfe" + sound[10:],
    "bytes after the end": lambda sound: sound + b"more",
    "no trace header at all": lambda sound: (
        lambda outer, payload: struct.pack("<Q", len(outer)) + outer + payload
    )(json.dumps({k: v for k, v in opened(sound)[0].items() if k != "__metadata__"}).encode(), opened(sound)[2]),
    "a trace header that is no JSON": _inner(lambda header: "{'format': 'clearhead-trace-1'}"),
    "a trace header cut in the middle": _inner(lambda header: json.dumps(header)[:-9]),
    "a header nested a hundred thousand deep": _inner(lambda header: "[" * 100_000),
    "a header with an integer of five thousand digits": _inner(lambda header: "9" * 5_000),
    "a header that is a list": _inner(lambda header: [1, 2]),
    "a header that is null": _inner(lambda header: "null"),
    "another format": _inner(lambda header: header.update(format="clearhead-trace-2")),
    "a format that is a list": _inner(lambda header: header.update(format=["clearhead-trace-1"])),
    "no format": _inner(lambda header: header.pop("format") and None),
    "no model": _inner(lambda header: header.pop("model") and None),
    "a model that is a number": _inner(lambda header: header.update(model=7)),
    "no streams": _inner(lambda header: header.pop("streams") and None),
    "streams that are a list": _inner(lambda header: header.update(streams=["self"])),
    "a stream that is a word": _inner(lambda header: header["streams"].update(self="all")),
    "a stream without a name": _inner(lambda header: header["streams"].update({"": {}})),
    "a stream with the separator in its name": _inner(lambda header: header["streams"].update({"a\x1fb": {}})),
    "segments that are numbers": _inner(lambda header: header.update(segments=[1, 2, 3])),
    "segments of equal names": _inner(lambda header: header.update(segments=["a", "a", "b"])),
    "one segment more than there are": _inner(lambda header: header["segments"].append("more")),
    "no layers": _inner(lambda header: header["streams"]["self"].pop("layers") and None),
    "one layer more than there are": _stream("layers", [0, 1, 2]),
    "layers of equal number": _stream("layers", [1, 1]),
    "layers that are true": _stream("layers", [True, False]),
    "layers that are numbers with a point": _stream("layers", [0.0, 1.0]),
    "layers beyond any memory": _stream("layers", [0, 2**70]),
    "layers below zero": _stream("layers", [-1, 0]),
    "one head less than there are": _stream("heads", [0, 1, 2]),
    "heads that are words": _stream("heads", ["a", "b", "c", "d"]),
    "axes that are missing": _inner(lambda header: header["streams"]["self"]["axes"].pop("mass") and None),
    "axes that are a word": _inner(lambda header: header["streams"]["self"]["axes"].update(mass="layer")),
    "axes of another number": _inner(lambda header: header["streams"]["self"]["axes"]["mass"].pop() and None),
    "axes of equal name": _inner(lambda header: header["streams"]["self"]["axes"]["mass"].__setitem__(4, "head")),
    "axes in another order": _inner(lambda header: header["streams"]["self"]["axes"]["mass"].reverse()),
    "axes of an answer that is not there": _inner(
        lambda header: header["streams"]["self"]["axes"].update(more=["layer", "batch"])
    ),
    "a value that is not there": _inner(lambda header: header["streams"]["self"]["values"].append("more")),
    "a value named twice": _inner(lambda header: header["streams"]["self"]["values"].append("mass")),
    "a value with the separator in its name": _inner(
        lambda header: header["streams"]["self"]["values"].append("mass\x1f")
    ),
    "values that are numbers": _stream("values", [1]),
    "a tensor that the header does not name": _another,
    "a tensor named like a path": _outer(_renamed),
    "a tensor of more numbers than the file has": _reshaped("value", lambda shape: [*shape[:-1], 2**40]),
    "a tensor whose size overflows": _reshaped("value", lambda shape: [2**63, 2**63, 2, 2, 2]),
    "a tensor of no numbers and a huge shape": _reshaped("value", lambda shape: [0, 2**62, 4, 2**62, 3]),
    "a tensor of another shape": _reshaped("value", lambda shape: [shape[1], shape[0], *shape[4:1:-1]]),
    "a tensor below zero": _reshaped("value", lambda shape: [-1, *shape[1:]]),
    "a tensor that starts before the payload": _outer(
        lambda outer: _tensor(outer, "value").update(data_offsets=[-8, 8])
    ),
    "a tensor that ends before it starts": _outer(lambda outer: _tensor(outer, "value").update(data_offsets=[8, 0])),
    "a tensor of an unknown dtype": _outer(lambda outer: _tensor(outer, "value").update(dtype="F7")),
    "a tensor of eight-bit floats": _outer(lambda outer: _tensor(outer, "value").update(dtype="F8_E4M3")),
    "queries that are floats": _outer(lambda outer: _tensor(outer, "queries").update(dtype="F64")),
    "queries of one axis": _ragged,
    "queries of another batch": _reshaped("queries", lambda shape: shape[::-1]),
    "real keys that are bytes": _outer(lambda outer: _tensor(outer, "real", "").update(dtype="U8")),
    "indices of a dtype that no answer has": _dtype("U64"),
    "indices that are complex": _dtype("C64"),
    "fewer real keys than keys": _fewer_real_keys,
    "real keys of another batch": _reshaped("real", lambda shape: shape[::-1], ""),
}  # fmt: skip
