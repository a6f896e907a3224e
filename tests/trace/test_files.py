"""A trace on disk comes back bit by bit, and a file that no run wrote is refused and never run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hostile import traces

from clearhead.errors import ClearheadError, MissingExtraError, TraceError
from clearhead.trace.data import Stream, TraceData
from clearhead.trace.trace import Trace


def example() -> TraceData:
    """A padded batch of two with two layers, four heads and nine tokens."""
    generator = torch.Generator().manual_seed(2)
    mass = torch.rand(2, 2, 4, 9, 3, generator=generator)
    queries = torch.tensor([[*range(9)], [-1, -1, *range(7)]])
    values = {
        "mass": mass,
        "key_mass": torch.rand(2, 2, 4, 9, generator=generator),
        "top_keys.weights": torch.rand(2, 2, 4, 9, 1, generator=generator),
        "top_keys.indices": torch.randint(-1, 9, (2, 2, 4, 9, 1), generator=generator),
    }
    axes = {
        "mass": ("layer", "batch", "head", "query", "segment"),
        "key_mass": ("layer", "batch", "head", "key"),
        "top_keys": ("layer", "batch", "head", "query", "rank"),
    }
    both = {"mass": queries, "top_keys": queries.clone()}
    stream = Stream(axes, values, (0, 3), (0, 1, 2, 3), both, queries >= 0)
    return TraceData("tiny", ("system", "user", "output"), {"self": stream})


def sound(folder: Path) -> bytes:
    path = folder / "sound.trace"
    Trace(example()).save(path)
    return path.read_bytes()


def same(a: TraceData, b: TraceData) -> None:
    """Bit by bit."""
    assert (a.model, a.segments, list(a.streams)) == (b.model, b.segments, list(b.streams))
    for name, s in a.streams.items():
        t = b.streams[name]
        assert (s.axes, s.layers, s.heads, list(s.values)) == (t.axes, t.layers, t.heads, list(t.values))
        assert list(s.queries) == list(t.queries)
        for x, y in zip([*s.values.values(), *s.queries.values()], [*t.values.values(), *t.queries.values()], strict=True):  # fmt: skip
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert bits(x) == bits(y)
        assert (s.real is None) == (t.real is None)
        assert s.real is None or torch.equal(s.real, t.real)  # type: ignore[arg-type]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


# ---------------------------------------------------------------------- the round trip


def test_a_trace_comes_back_bit_by_bit(tmp_path: Path) -> None:
    before = sound(tmp_path)
    loaded = Trace.load(tmp_path / "sound.trace")
    same(loaded.data, example())
    loaded.save(str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == before, "the same trace is the same file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "sound.trace"], (
        "no half-written file is left"
    )


NAMES = st.text(st.characters(exclude_characters="\x1f", exclude_categories=["Cs"]), min_size=1, max_size=12)


@st.composite
def datas(draw: st.DrawFn) -> TraceData:
    """Any trace, with any names and any bits."""
    segments = draw(st.lists(NAMES, max_size=3, unique=True))
    streams = {}
    for label in draw(st.lists(NAMES, max_size=2, unique=True)):
        layers, heads = (
            draw(st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True)) for _ in "ab"
        )
        B, R, K, S = draw(st.integers(1, 2)), draw(st.integers(0, 3)), draw(st.integers(0, 3)), len(segments)
        sizes = {"layer": len(layers), "batch": B, "head": len(heads), "query": R, "key": K, "segment": S or 2, "x": 2}  # fmt: skip
        stream = Stream(layers=tuple(layers), heads=tuple(heads))
        for name in draw(st.lists(NAMES.filter(lambda n: "." not in n), min_size=1, max_size=3, unique=True)):
            rest = draw(st.lists(st.sampled_from(["head", "query", "key", "segment", "x"]), unique=True))
            axes = ("layer", "batch", *rest)
            stream.axes[name] = axes
            if "query" in axes:
                stream.queries[name] = torch.randint(-1, 9, (B, R))
            for part in draw(st.sampled_from([[name], [f"{name}.a", f"{name}.b.c"]])):
                dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8]))
                shape = [sizes[axis] for axis in axes]
                count = int(np.prod(shape)) * dtype.itemsize
                raw = np.frombuffer(np.random.default_rng(draw(st.integers(0, 9))).bytes(count), np.uint8)
                flat = torch.from_numpy(raw.copy())
                stream.values[part] = (
                    flat.view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)
                )
        if draw(st.booleans()):
            stream.real = torch.rand(B, K) < 0.5
        streams[label] = stream
    return TraceData(
        draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)), tuple(segments), streams
    )


@given(data=datas())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_trace_comes_back_bit_by_bit(data: TraceData, tmp_path: Path) -> None:
    Trace(data).save(tmp_path / "any")
    same(Trace.load(tmp_path / "any").data, data)


def test_an_empty_trace_comes_back_empty(tmp_path: Path) -> None:
    Trace(TraceData("m", (), {})).save(tmp_path / "empty")
    assert Trace.load(tmp_path / "empty").streams == ()


def test_a_loaded_trace_does_not_hang_on_its_file(tmp_path: Path) -> None:
    sound(tmp_path)
    loaded = Trace.load(tmp_path / "sound.trace")
    os.truncate(tmp_path / "sound.trace", 0)
    same(loaded.data, example())


def test_numbers_that_are_not_finite_come_back_as_they_are(tmp_path: Path) -> None:
    data = example()
    data.streams["self"].values["mass"][0, 0, 0, 0] = torch.tensor(
        [float("nan"), float("inf"), -float("inf")]
    )
    Trace(data).save(tmp_path / "nan")
    loaded = Trace.load(tmp_path / "nan")
    same(loaded.data, data)
    plain = json.dumps(loaded.to_dict(), allow_nan=False)
    assert json.loads(plain)["streams"]["self"][0]["values"]["mass"]["data"][0][0][0] == [None, None, None]


def test_a_file_that_is_replaced_is_whole_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sound(tmp_path)
    import safetensors.torch

    def half(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(before[:50])
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(TraceError, match="no space left"):
        Trace(example()).save(tmp_path / "sound.trace")
    assert (tmp_path / "sound.trace").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["sound.trace"]


# ---------------------------------------------------------------------- files that no run wrote


@pytest.mark.parametrize("story", traces.BUILDERS)
def test_a_hostile_file_is_refused_with_a_trace_error(story: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(traces.BUILDERS[story](sound(tmp_path)))
    with pytest.raises(TraceError, match=r"hostile\.safetensors") as caught:
        Trace.load(path)
    text = str(caught.value)
    assert len(text) < 2_000
    assert text.replace("\n", " ").isprintable(), "no control characters reach the terminal"


def test_the_hostile_files_are_built_from_one_that_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "rebuilt"
    path.write_bytes(traces.closed(*traces.opened(sound(tmp_path))))
    same(Trace.load(path).data, example())


def test_a_file_that_was_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = sound(tmp_path)
    head = 8 + int.from_bytes(whole[:8], "little")
    lengths = {0, 1, 7, 8, 9, head // 2, head - 1, head, head + 1, len(whole) // 2, len(whole) - 1}
    path = tmp_path / "cut"
    for length in sorted(lengths | set(range(0, len(whole), 97))):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match="no trace file, or a truncated one"):
            Trace.load(path)


@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_changed_byte_gives_a_trace_or_a_trace_error(place: int, byte: int, tmp_path: Path) -> None:
    path = tmp_path / "changed"
    changed = bytearray(sound(tmp_path))
    head = 8 + int.from_bytes(changed[:8], "little")
    changed[place % head] = byte
    path.write_bytes(bytes(changed))
    try:
        trace = Trace.load(path)
    except TraceError:
        return
    repr(trace)
    json.dumps(trace.to_dict())


def test_a_pickle_with_another_name_is_refused_and_not_run(tmp_path: Path) -> None:
    target, path = tmp_path / "written", tmp_path / "model.safetensors"
    path.write_bytes(traces.pickled(str(target)))
    with pytest.raises(TraceError, match="no trace file"):
        Trace.load(path)
    torch.save({"mass": torch.zeros(2), "harm": traces.Harmful(str(target))}, path)
    with pytest.raises(TraceError, match="no trace file"):
        Trace.load(path)
    assert not target.exists()


def test_names_are_only_ever_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names like paths and control sequences load as names: nothing is written, nothing reaches a terminal."""
    data = example()
    evil = "../../evil\x1b[2J\u202e"
    stream = data.streams.pop("self")
    for part in ("axes", "values", "queries"):
        kept = getattr(stream, part)
        kept[evil.replace(".", "")] = kept.pop("mass")
    data = TraceData(evil, (evil, "/etc/passwd", "\x00"), {evil: stream})
    Trace(data).save(tmp_path / "names")
    monkeypatch.chdir(tmp_path)
    loaded = Trace.load(tmp_path / "names")
    same(loaded.data, data)
    view = loaded.stream(item=0)
    assert repr(loaded).isprintable()
    assert repr(view).isprintable()
    with pytest.raises(TraceError) as caught:
        view.value("nothing")
    assert str(caught.value).isprintable()
    with pytest.raises(TraceError) as caught:
        loaded.stream("nothing")
    assert str(caught.value).isprintable()
    assert [p.name for p in tmp_path.iterdir()] == ["names"]


@pytest.mark.parametrize("name", ["missing", "", "folder", "a\x00b", "x" * 5000])
def test_what_is_no_file_cannot_be_loaded(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError):
        Trace.load(tmp_path / name)


@pytest.mark.parametrize("name", ["missing/below", "folder", "a\x00b", "x" * 5000, "."])
def test_what_cannot_be_written_is_a_trace_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match="cannot write a trace to"):
        Trace(example()).save(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    assert not list((tmp_path / "folder").iterdir())


def test_without_safetensors_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match="pip install safetensors"):
        Trace.load(tmp_path / "sound.trace")
    with pytest.raises(MissingExtraError, match="pip install safetensors"):
        Trace(example()).save(tmp_path / "other")


def test_a_trace_error_is_a_clearhead_error() -> None:
    assert issubclass(TraceError, ClearheadError)
    assert issubclass(TraceError, ValueError)
