"""A `Trace` names its axes, cuts out padding, and says what it holds when asked for something else."""

from __future__ import annotations

import builtins
import copy
import json
from typing import Any

import pytest
import torch

from clearhead.errors import ClearheadError, MissingExtraError, ObserveError, TraceError
from clearhead.observables import Top
from clearhead.trace.data import Stream, TraceData
from clearhead.trace.printing import printable
from clearhead.trace.trace import Trace, View

AXES = {
    "mass": ("layer", "batch", "head", "query", "segment"),
    "key_mass": ("layer", "batch", "head", "key"),
    "top_keys": ("layer", "batch", "head", "query", "rank"),
    "pair": ("layer", "batch", "head"),
    "alone": ("layer", "batch"),
}


def stream(batch: int = 2, names: tuple[str, ...] = tuple(AXES)) -> Stream:
    """Two layers (1 and 5), three heads, six tokens; item 1 has two pads on the left."""
    real = torch.ones(batch, 6, dtype=torch.bool)
    real[1:, :2] = False
    queries = torch.where(real, real.long().cumsum(1) - 1, -1)
    parts = {"mass": ["mass"], "key_mass": ["key_mass"], "top_keys": ["top_keys.weights", "top_keys.indices"],
             "pair": ["pair.low", "pair.high"], "alone": ["alone.only"]}  # fmt: skip
    sizes = {"layer": 2, "batch": batch, "head": 3, "query": 6, "key": 6, "segment": 2, "rank": 2}
    values = {}
    for name in names:
        for part in parts[name]:
            shape = [sizes[axis] for axis in AXES[name]]
            values[part] = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
            if part.endswith("indices"):
                values[part] = values[part].long() % 4
    return Stream(
        {name: AXES[name] for name in names}, values, (1, 5), (0, 2, 7),
        {name: queries for name in names if "query" in AXES[name]}, real if batch > 1 else None,
    )  # fmt: skip


def trace(**streams: Stream) -> Trace:
    return Trace(TraceData("tiny", ("system", "user"), streams or {"self": stream()}))


# ---------------------------------------------------------------------- items and axes


def test_an_item_has_its_own_queries_and_keys_only() -> None:
    made = trace()
    data = made.data.streams["self"].values
    view = made[1]
    assert torch.equal(view.mass, data["mass"][:, 1, :, 2:])
    assert torch.equal(view.key_mass, data["key_mass"][:, 1, :, 2:])
    assert view.queries("mass").tolist() == [0, 1, 2, 3]
    assert torch.equal(made[0].mass, data["mass"][:, 0])
    assert torch.equal(made[-1].mass, view.mass)


def test_axes_have_names_and_numbers() -> None:
    view = trace()[0]
    assert view.axes["mass"] == ("layer", "head", "query", "segment")
    assert view.mass.shape == (2, 3, 6, 2)
    assert (view.layers, view.heads, view.segments) == ((1, 5), (0, 2, 7), ("system", "user"))
    assert view.values == (
        "mass", "key_mass", "top_keys.weights", "top_keys.indices", "pair.low", "pair.high", "alone.only",
    )  # fmt: skip


def test_answers_of_several_parts_come_as_tuples() -> None:
    view = trace()[1]
    assert isinstance(view.top_keys, Top)
    assert torch.equal(view.top_keys.indices, view.value("top_keys.indices"))
    assert view.top_keys.weights.shape == (2, 3, 4, 2)
    assert [t.shape for t in view.pair] == [(2, 3), (2, 3)]
    assert [t.shape for t in view.alone] == [(2,)]


def test_a_trace_of_one_item_is_used_as_it_stands() -> None:
    made = trace(self=stream(1))
    assert len(made) == 1
    assert torch.equal(made.mass, made[0].mass)
    assert made.layers == (1, 5)
    assert made.queries("mass").tolist() == [0, 1, 2, 3, 4, 5]


def test_a_trace_of_several_items_wants_one_chosen() -> None:
    made = trace()
    assert [view.queries("mass")[-1].item() for view in made] == [5, 3]
    with pytest.raises(TraceError, match=r"has 2 items: choose one, as in trace\[0\]"):
        _ = made.mass
    with pytest.raises(IndexError, match="item 2 is out of range: the trace holds 2") as caught:
        _ = made[2]
    assert isinstance(caught.value, ClearheadError)
    with pytest.raises(TraceError, match="an item is chosen by its number, got 'first'"):
        _ = made["first"]  # type: ignore[index]


def test_streams_are_kept_apart() -> None:
    both = trace(encoder=stream(1, ("mass",)), self=stream(2, ("key_mass",)), cross=stream(2, ("mass",)))
    assert both.streams == ("encoder", "self", "cross")
    assert len(both) == 2, "the main stream is the model's own text"
    assert both.stream("encoder").values == ("mass",)
    assert both[0].values == ("key_mass",)
    with pytest.raises(TraceError, match="the trace holds the streams encoder, self, cross, not 'vision'"):
        both.stream("vision")
    others = trace(encoder=stream(1), cross=stream(1))
    with pytest.raises(TraceError, match=r"the trace holds the streams encoder, cross: name one"):
        others.stream()
    assert trace(vision=stream(1)).mass.shape == (2, 3, 6, 2), "the only stream needs no name"


# ---------------------------------------------------------------------- unknown names


def test_an_unknown_answer_lists_those_there_are() -> None:
    view = trace()[0]
    with pytest.raises(AttributeError, match=r"holds mass, key_mass, .*, not 'entropy'") as caught:
        _ = view.entropy
    assert isinstance(caught.value, TraceError)
    for ask in (view.value, view.queries, view.to_pandas, view.to_xarray):
        with pytest.raises(TraceError, match="not 'entropy'"):
            ask("entropy")
    assert not hasattr(view, "entropy")
    assert hasattr(view, "mass")


def test_an_answer_in_another_stream_is_pointed_at() -> None:
    both = trace(self=stream(1, ("key_mass",)), cross=stream(1, ("mass",)), encoder=stream(1, ("mass",)))
    with pytest.raises(
        TraceError, match=r"self attention .* holds key_mass, not 'mass'; .* streams cross, encoder"
    ):
        _ = both.mass


def test_an_answer_without_queries_says_so() -> None:
    with pytest.raises(
        TraceError, match=r"key_mass has no query axis, its axes are \('layer', 'head', 'key'\)"
    ):
        trace()[0].queries("key_mass")


def test_an_empty_trace_says_what_may_be_wrong() -> None:
    empty = Trace(TraceData("tiny", (), {}))
    for ask in (lambda: empty[0], lambda: empty.mass, empty.stream, lambda: empty.stream("self")):
        with pytest.raises(TraceError, match="no attention call was observed"):
            ask()
    assert len(empty) == 0
    assert list(empty) == []
    assert empty, "an empty trace is still a trace"
    assert "empty" in repr(empty)


def test_a_trace_of_a_broken_run_raises_its_reason() -> None:
    broken = Trace(TraceData("tiny", (), {}))
    broken._close(ObserveError("layers differ"))
    with pytest.raises(TraceError, match="could not be put together: layers differ"):
        _ = broken.streams
    assert repr(broken) == "<Trace of a run that broke off>"


def test_private_names_are_plain_attribute_errors() -> None:
    for thing in (trace(), trace()[0]):
        assert not hasattr(thing, "_repr_html_")
        assert not hasattr(thing, "__array__")
        assert copy.copy(thing).__class__ is type(thing)
        copy.deepcopy(thing)


# ---------------------------------------------------------------------- other forms


def test_the_representation_tells_what_is_there() -> None:
    assert repr(trace(self=stream(1, ("mass",)))) == "<Trace of tiny, self (1 item): mass>"
    assert repr(trace(self=stream(2, ("mass",)))) == "<Trace of tiny, self (2 items): mass>"
    assert repr(trace(self=stream(2, ("mass",)))[1]) == "<self attention of item 1: mass (2, 3, 4, 2)>"


def test_as_plain_lists_it_goes_through_json() -> None:
    made = trace()
    plain: Any = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert plain["model"] == "tiny"
    item = plain["streams"]["self"][1]
    assert (item["layers"], item["heads"], item["segments"]) == ([1, 5], [0, 2, 7], ["system", "user"])
    assert item["values"]["mass"]["axes"] == ["layer", "head", "query", "segment"]
    assert item["values"]["mass"]["queries"] == [0, 1, 2, 3]
    assert item["values"]["key_mass"]["queries"] is None
    assert item["values"]["mass"]["data"] == made[1].mass.tolist()
    assert item["values"]["top_keys.indices"]["data"] == made[1].top_keys.indices.tolist()


def test_in_xarray_every_axis_has_its_labels() -> None:
    pytest.importorskip("xarray")
    view: View = trace()[1]
    array = view.to_xarray("mass")
    assert array.dims == ("layer", "head", "query", "segment")
    assert array.sel(layer=5, head=7, query=3, segment="user").item() == view.mass[1, 2, 3, 1].item()
    assert view.to_xarray("top_keys.indices").sel(layer=1, head=2, query=0).values.tolist() == view.top_keys.indices[0, 1, 0].tolist()  # fmt: skip


def test_in_pandas_every_number_has_a_row() -> None:
    pytest.importorskip("pandas")
    view = trace()[1]
    table = view.to_pandas("mass")
    assert list(table.columns) == ["layer", "head", "query", "segment", "mass"]
    assert len(table) == view.mass.numel()
    row = table[(table.layer == 5) & (table["head"] == 7) & (table["query"] == 3) & (table.segment == "user")]
    assert row["mass"].item() == view.mass[1, 2, 3, 1].item()
    assert list(view.to_pandas("key_mass").columns) == ["layer", "head", "key", "key_mass"]


@pytest.mark.parametrize("name", ["pandas", "xarray"])
def test_without_the_extra_the_error_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(module: str, *args: Any, **kwargs: Any) -> Any:
        if module == name:
            raise ImportError(f"No module named {name!r}")
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=f"to_{name} needs {name}: pip install {name}"):
        getattr(trace()[0], f"to_{name}")("mass")


def test_what_is_printed_has_no_control_characters_and_an_end() -> None:
    assert printable("a\x1b[2Jb\u202ec\n") == r"a\x1b[2Jb\u202ec\n"
    assert printable("é😀") == "é😀"
    assert len(printable("x" * 10_000)) == 200
