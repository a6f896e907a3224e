"""A trace: what one model run looked at, with named axes, item by item.

    trace.mass[layer, head, query, segment]

A trace of one prompt is used as it stands; of a batch, `trace[b]` is the item, without its padding. A model
with several streams (encoder, decoder, cross-attention) keeps them apart: `trace.stream("cross")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.errors import MissingExtraError, TraceError
from clearhead.observables import Top
from clearhead.trace.data import Stream, TraceData

if TYPE_CHECKING:
    import pandas
    import xarray


class View:
    """One item of one stream, without padding. Answers are attributes: `view.mass`, `view.entropy` …

    Each is a tensor with the axes `view.axes[name]`, the first of which is "layer"; TopKeys is a `Top` of
    two. Queries and keys are counted from the item's first real token.
    """

    def __init__(self, data: TraceData, stream: str, item: int) -> None:
        self._data, self._name, self._item = data, stream, item
        self._stream: Stream = data.streams[stream]

    def __repr__(self) -> str:
        shown = ", ".join(f"{n} {tuple(self.value(n).shape)}" for n in self.values)
        return f"<{self._name} attention of item {self._item}: {shown}>"

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
        """The position of each query of an answer, counted from the item's first real token: (R,)."""
        self._check(name, self._stream.axes)
        chosen = self._chosen_queries(name)
        if chosen is None:
            raise TraceError(f"{name} has no query axis, its axes are {self.axes[name]}")
        return self._renumbered(self._stream.queries[name][chosen])

    def value(self, name: str) -> Tensor:
        """Return one answer (or one part of it) by name. Raises TraceError listing the names there are."""
        self._check(name, self._stream.values)
        base = name.split(".")[0]
        tensor = self._stream.values[name].select(1, self._item)
        axes = self.axes[base]
        chosen = self._chosen_queries(base)
        if chosen is not None:
            tensor = tensor.index_select(axes.index("query"), chosen)
        real = self._real_keys()
        if real is not None and "key" in axes:
            tensor = tensor.index_select(axes.index("key"), real)
        if name == "top_keys.indices":
            tensor = torch.where(tensor < 0, tensor, self._renumbered(tensor.clamp(min=0)))
        return tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        parts = [n for n in self._stream.values if n.split(".")[0] == name]
        if not parts:
            raise AttributeError(f"this trace holds {self._names()}, not {name!r}")
        if name == "top_keys":
            return Top(self.value("top_keys.weights"), self.value("top_keys.indices"))
        if len(parts) > 1:
            return tuple(self.value(part) for part in parts)
        return self.value(name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, ready for JSON."""
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
                    "data": self.value(name).tolist(),
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
            raise TraceError(f"this trace holds {self._names()}, not {name!r}")

    def _names(self) -> str:
        return ", ".join(self._stream.values) or "nothing"

    # ------------------------------------------------------------------ padding

    def _real_keys(self) -> Tensor | None:
        real = self._stream.real
        return None if real is None else real[self._item].nonzero()[:, 0]

    def _real_queries(self) -> Tensor | None:
        """Positions of the item's real tokens on the query side, or None if all are."""
        if self._stream.own_queries:
            return self._real_keys()
        mate = self._data.streams.get("self")
        return None if mate is None or mate.real is None else mate.real[self._item].nonzero()[:, 0]

    def _chosen_queries(self, name: str) -> Tensor | None:
        """Which entries of the query axis belong to this item."""
        queries = self._stream.queries.get(name)
        if queries is None:
            return None
        everything = torch.arange(len(queries))
        real = self._real_queries()
        if real is None:
            return everything
        kept = everything[torch.isin(queries, real)]
        if name in self._stream.last and len(kept):
            prompt = queries[kept] < self._stream.prompt
            before = kept[prompt]  # of the prompt only the item's own last token; then every generated one
            kept = torch.cat([before[-1:], kept[~prompt]])
        return kept

    def _renumbered(self, positions: Tensor) -> Tensor:
        """Count positions from the item's first real token, padding left out."""
        real = self._real_queries()
        if real is None or not len(real):
            return positions
        return torch.searchsorted(real, positions.contiguous())


class Trace:
    """What one model run looked at. Made by `clearhead.observe`, saved by `save`, loaded by `Trace.load`.

    With one item, answers of the main stream are attributes: `trace.mass`, `trace.entropy`, …
    With several, `trace[b]` is the item (a `View`), and `len(trace)` their number.
    """

    def __init__(self, source: TraceData | Callable[[], TraceData]) -> None:
        self._source = source

    @property
    def data(self) -> TraceData:
        """The plain tensors."""
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
        """Return the number of items in the batch."""
        return self.data.batch

    def __iter__(self) -> Iterator[View]:
        return (self[b] for b in range(len(self)))

    def __getitem__(self, item: int) -> View:
        """Return one item of the main stream. Raises TraceError or IndexError."""
        return self.stream(item=item)

    def stream(self, name: str | None = None, *, item: int | None = None) -> View:
        """Return a stream by name (default: "self" if there is one, else the only one), for one item.

        Raises TraceError for an unknown stream, an empty trace, or a batch of which no item was chosen.
        """
        data = self.data
        if not data.streams:
            raise TraceError(
                "the trace is empty: no attention call was observed (did the model run inside it?)"
            )
        if name is None:
            names = list(data.streams)
            if "self" not in names and len(names) > 1:
                raise TraceError(f"the trace holds the streams {', '.join(names)}: name one, stream(name)")
            name = "self" if "self" in names else names[0]
        if name not in data.streams:
            raise TraceError(f"the trace holds the streams {', '.join(data.streams)}, not {name!r}")
        if item is None:
            if data.batch != 1:
                raise TraceError(f"the trace holds {data.batch} items: choose one, as in trace[0]")
            item = 0
        if not -data.batch <= item < data.batch:
            raise IndexError(f"item {item} is out of range: the trace holds {data.batch}")
        return View(data, name, item % data.batch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.stream(), name)

    def __repr__(self) -> str:
        data = self.data
        shown = "; ".join(f"{n}: {', '.join(s.values)}" for n, s in data.streams.items()) or "empty"
        return f"<Trace of {data.model}, {data.batch} item{'s' * (data.batch != 1)}: {shown}>"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, ready for JSON: streams, then items."""
        data = self.data
        return {
            "model": data.model,
            "streams": {
                name: [View(data, name, b).to_dict() for b in range(data.batch)] for name in data.streams
            },
        }

    def save(self, path: str | Path) -> None:
        """Write the trace as safetensors with a JSON header. Raises TraceError if the path cannot be written.

        The file holds numbers and names only; loading it runs nothing.
        """
        from clearhead.trace.files import save

        save(self.data, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace that `save` wrote. Raises TraceError for anything else, truncated files included."""
        from clearhead.trace.files import load

        return cls(load(Path(path)))
