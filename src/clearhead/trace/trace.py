"""A trace: what one model run looked at, with named axes, item by item.

    trace.mass[layer, head, query, segment]

A trace of one prompt is used as it stands; of a batch, `trace[b]` is the item, without its padding. A model
with several streams (encoder, decoder, cross-attention) keeps them apart: `trace.stream("cross")`. How it is
recorded is not this file's business, and neither is the file format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from clearhead.errors import ClearheadError, MissingExtraError, TraceError
from clearhead.observables import Top
from clearhead.trace.data import Stream, TraceData
from clearhead.trace.printing import printable

if TYPE_CHECKING:
    import pandas
    import xarray


class UnknownNameError(TraceError, AttributeError):
    """A trace has no answer of this name; also an AttributeError, so that `hasattr` works."""


class UnknownItemError(TraceError, IndexError):
    """A trace has no item of this number; also an IndexError, so that iteration ends."""


class View:
    """One item of one stream, without padding. Answers are attributes: `view.mass`, `view.entropy` …

    Each is a tensor with the axes `view.axes[name]`, the first of which is "layer"; TopKeys is a `Top` of
    two. Queries, keys and the indices of TopKeys are numbers of the item's own real tokens, from 0 on.
    """

    def __init__(self, data: TraceData, stream: str, item: int) -> None:
        self._data, self._name, self._item = data, stream, item
        self._stream: Stream = data.streams[stream]

    def __repr__(self) -> str:
        shown = ", ".join(f"{n} {tuple(self.value(n).shape)}" for n in self.values)
        return f"<{printable(self._name)} attention of item {self._item}: {printable(shown)}>"

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers, in the order of the layer axis."""
        return self._stream.layers

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers of the heads, in the order of the head axis."""
        return self._stream.heads

    @property
    def segments(self) -> tuple[str, ...]:
        """The names of the segments, in the order of the segment axis."""
        return self._data.segments

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The names of the axes of every answer."""
        return {n: tuple(a for a in axes if a != "batch") for n, axes in self._stream.axes.items()}

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the answers; an answer of several parts is listed part by part."""
        return tuple(self._stream.values)

    def queries(self, name: str) -> Tensor:
        """The number of each query of an answer among the item's real tokens: (R,).

        Raises TraceError for an unknown answer or one without a query axis.
        """
        self._check(name, self._stream.axes)
        chosen = self._chosen_queries(name)
        if chosen is None:
            raise TraceError(f"{name} has no query axis, its axes are {self.axes[name]}")
        return self._stream.queries[name][self._item][chosen]

    def value(self, name: str) -> Tensor:
        """Return one answer (or one part of it) by name. Raises TraceError listing the names there are."""
        self._check(name, self._stream.values)
        base = name.split(".")[0]
        tensor = self._stream.values[name].select(1, self._item)
        axes = self.axes[base]
        chosen = self._chosen_queries(base)
        if chosen is not None:
            tensor = _picked(tensor, axes.index("query"), chosen)
        if self._stream.real is not None and "key" in axes:
            tensor = _picked(tensor, axes.index("key"), self._stream.real[self._item].nonzero()[:, 0])
        return tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        parts = [n for n in self._stream.values if n.split(".")[0] == name]
        if not parts:
            raise UnknownNameError(self._unknown(name))
        if parts == ["top_keys.weights", "top_keys.indices"]:
            return Top(self.value(parts[0]), self.value(parts[1]))
        if parts != [name]:
            return tuple(self.value(part) for part in parts)
        return self.value(name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, ready for JSON; numbers that are not finite become None."""
        return {
            "layers": list(self.layers),
            "heads": list(self.heads),
            "segments": list(self.segments),
            "values": {
                name: {
                    "axes": list(self.axes[name.split(".")[0]]),
                    "queries": (
                        self.queries(name.split(".")[0]).tolist()
                        if name.split(".")[0] in self._stream.queries
                        else None
                    ),
                    "data": _plain(self.value(name)),
                }
                for name in self.values
            },
        }

    def to_xarray(self, name: str) -> xarray.DataArray:
        """Return one answer as an xarray.DataArray with named, labelled axes. Needs xarray."""
        try:
            import xarray
        except ImportError as error:
            raise MissingExtraError("to_xarray needs xarray: pip install xarray") from error
        base = name.split(".")[0]
        tensor = self.value(name)
        labels = self._labels(base, tensor)
        return xarray.DataArray(tensor.numpy(), dims=self.axes[base], coords=labels, name=name)

    def to_pandas(self, name: str) -> pandas.DataFrame:
        """Return one answer in long form, a column per axis and one for the value. Needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError("to_pandas needs pandas: pip install pandas") from error
        base = name.split(".")[0]
        tensor = self.value(name)
        labels = self._labels(base, tensor)
        index = pandas.MultiIndex.from_product(
            [labels.get(axis, range(size)) for axis, size in zip(self.axes[base], tensor.shape, strict=True)],
            names=self.axes[base],
        )
        return pandas.DataFrame({name: tensor.flatten().numpy()}, index=index).reset_index()

    def _labels(self, name: str, tensor: Tensor) -> dict[str, Any]:
        known: dict[str, Any] = {"layer": self.layers, "head": self.heads}
        if "segment" in self.axes[name] and self.segments:
            known["segment"] = self.segments
        if name in self._stream.queries:
            known["query"] = self.queries(name).tolist()
        sizes = dict(zip(self.axes[name], tensor.shape, strict=True))
        return {axis: list(labels) for axis, labels in known.items() if len(labels) == sizes.get(axis)}

    def _check(self, name: str, there: dict[str, Any]) -> None:
        if name not in there:
            raise TraceError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        mine = ", ".join(map(printable, self._stream.values)) or "nothing"
        text = f"the {printable(self._name)} attention of this trace holds {mine}, not {name!r}"
        if any(value.startswith(f"{name}.") for value in self._stream.values):
            return f"{text}: name one of its parts"
        others = [
            printable(label)
            for label, stream in self._data.streams.items()
            if name in stream.axes or name in stream.values
        ]
        return f"{text}; it is in trace.stream(name) for the streams {', '.join(others)}" if others else text

    def _chosen_queries(self, name: str) -> Tensor | None:
        """Which entries of the query axis belong to this item; None without a query axis."""
        queries = self._stream.queries.get(name)
        return None if queries is None else (queries[self._item] >= 0).nonzero()[:, 0]


class Trace:
    """What one model run looked at. Made by `clearhead.observe`, saved by `save`, loaded by `Trace.load`.

    With one item, answers of the main stream are attributes: `trace.mass`, `trace.entropy`, … With several,
    `trace[b]` is the item (a `View`), and `len(trace)` their number. The main stream is "self" if there is
    one, else the only one; the others are at `trace.stream(name)`.
    """

    def __init__(self, source: TraceData | Callable[[], TraceData]) -> None:
        self._source: TraceData | Callable[[], TraceData] | ClearheadError = source

    def _close(self, source: TraceData | ClearheadError) -> None:
        """The run is over: this is what the trace holds from now on."""
        self._source = source

    @property
    def data(self) -> TraceData:
        """The plain tensors. Raises TraceError if the run broke off in a way that left nothing whole."""
        if isinstance(self._source, ClearheadError):
            raise TraceError(f"the trace could not be put together: {self._source}") from self._source
        return self._source if isinstance(self._source, TraceData) else self._source()

    @property
    def model(self) -> str:
        """The name of the model that ran."""
        return self.data.model

    @property
    def segments(self) -> tuple[str, ...]:
        """The names of the segments."""
        return self.data.segments

    @property
    def streams(self) -> tuple[str, ...]:
        """The stacks of layers that were observed: "self", "cross", "encoder", "vision", or longer names."""
        return tuple(self.data.streams)

    def __len__(self) -> int:
        """Return the number of items of the main stream; 0 for an empty trace."""
        return self.data.streams[self._main()].batch if self.data.streams else 0

    def __bool__(self) -> bool:
        """True, also for an empty trace."""
        return True

    def __iter__(self) -> Iterator[View]:
        return (self[b] for b in range(len(self)))

    def __getitem__(self, item: int) -> View:
        """Return one item of the main stream. Raises TraceError, which is an IndexError beyond the last."""
        return self.stream(item=item)

    def stream(self, name: str | None = None, *, item: int | None = None) -> View:
        """Return a stream by name (default: the main one), for one item.

        Items are counted within the stream: a vision tower may have more of them than the text.
        Raises TraceError for an unknown stream, an empty trace, a batch of which no item was chosen, or an
        item that is not there.
        """
        data = self.data
        if name is None or not data.streams:
            name = self._main()
        if name not in data.streams:
            raise TraceError(f"the trace holds the streams {self._labels()}, not {name!r}")
        batch = data.streams[name].batch
        if item is None:
            if batch != 1:
                raise TraceError(
                    f"the {printable(name)} attention of this trace has {batch} items: choose one, as in "
                    "trace[0] or trace.stream(name, item=0)"
                )
            item = 0
        if not isinstance(item, int):
            raise TraceError(f"an item is chosen by its number, got {item!r}")
        if not -batch <= item < batch:
            raise UnknownItemError(f"item {item} is out of range: the trace holds {batch}")
        return View(data, name, item % batch)

    def _main(self) -> str:
        streams = self.data.streams
        if not streams:
            raise TraceError(
                "the trace is empty: no attention call was observed (did the model run inside the context?)"
            )
        if "self" in streams or len(streams) == 1:
            return "self" if "self" in streams else next(iter(streams))
        raise TraceError(f"the trace holds the streams {self._labels()}: name one, trace.stream(name)")

    def _labels(self) -> str:
        return ", ".join(map(printable, self.data.streams))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.stream(), name)

    def __repr__(self) -> str:
        if isinstance(self._source, ClearheadError):
            return "<Trace of a run that broke off>"
        data = self.data
        shown = "; ".join(
            f"{n} ({s.batch} item{'s' * (s.batch != 1)}): {', '.join(s.values)}"
            for n, s in data.streams.items()
        )
        return f"<Trace of {printable(data.model)}, {printable(shown or 'empty')}>"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, ready for JSON: streams, then items."""
        data = self.data
        return {
            "model": data.model,
            "streams": {
                name: [View(data, name, b).to_dict() for b in range(stream.batch)]
                for name, stream in data.streams.items()
            },
        }

    def save(self, path: str | Path) -> None:
        """Write the trace as safetensors with a JSON header, whole or not at all.

        The file holds numbers and names only; loading it runs nothing. Raises TraceError if the path cannot
        be written, MissingExtraError without safetensors.
        """
        from clearhead.trace.files import save

        save(self.data, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace that `save` wrote. Raises TraceError for anything else, truncated files included."""
        from clearhead.trace.files import load

        return cls(load(Path(path)))


def _picked(tensor: Tensor, axis: int, index: Tensor) -> Tensor:
    """These places along an axis; the tensor itself if that is all of them."""
    return tensor if len(index) == tensor.shape[axis] else tensor.index_select(axis, index)


def _plain(tensor: Tensor) -> Any:
    """The tensor as lists; JSON has no word for NaN and infinity."""
    if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
        return tensor.tolist()
    return (
        [_plain(part) for part in tensor] if tensor.ndim else (tensor.item() if tensor.isfinite() else None)
    )
