"""A mask's description, its algebra, and its tiles held to the plain definition of every field."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import fields

from clearhead.errors import ArgumentError, ClearheadError, DTypeError, MaskError, ShapeError, SizeError
from clearhead.mask import Mask, as_mask
from clearhead.visibility import Visibility

CPU = torch.device("cpu")


def visible(f: dict[str, Any], b: int, h: int, i: int, j: int, Lq: int, Lk: int) -> bool:
    """One entry of the mask straight from the documented meaning of the fields, without any tensors' help."""

    def row(value: Any) -> Any:
        return int(value[b % len(value)]) if isinstance(value, torch.Tensor) else value

    base = f.get("key_offset", 0)
    offset = row(f["offset"]) if f.get("offset") is not None else base + Lk - Lq
    q, k = offset + i, base + j
    padding = f.get("padding")
    real = [True] * Lk
    if padding is not None:
        if padding.dtype == torch.bool:
            real = padding[b % len(padding)].tolist()
        else:
            n = row(padding)
            left = f.get("padding_side") == "left"
            real = [(s >= Lk - n) if left else (s < n) for s in range(Lk)]
    documents = f.get("documents")
    doc = None if documents is None else documents[b % len(documents)] if documents.ndim == 2 else documents
    start = row(f["start"]) if f.get("start") is not None else None
    if doc is not None:
        same = [s for s in range(Lk) if int(doc[s]) == int(doc[j]) and real[s]]
        origin = base + (same[0] if same else Lk)
    elif start is not None:
        origin = start
    else:
        first = real.index(True) if any(real) else 0
        origin = base + first if first else 0
    if not real[j]:
        return False
    if doc is not None and int(doc[q - base]) != int(doc[j]):
        return False
    if f.get("causal"):
        ok = k <= q
        if f.get("prefix") is not None:
            ok = ok or 0 <= k - origin < row(f["prefix"])
        blocks = f.get("blocks")
        if blocks is not None:
            ok = ok or (int(blocks[j]) >= 0 and int(blocks[j]) == int(blocks[q - base]))
        if not ok:
            return False
    if f.get("window") is not None:
        left, right = f["window"] if isinstance(f["window"], tuple) else (f["window"] - 1, f["window"] - 1)
        near = (left is None or k >= q - left) and (right is None or k <= q + right)
        if not near and not (f.get("sinks") and 0 <= k - origin < f["sinks"]):
            return False
    if f.get("chunk") is not None and (q - origin) // f["chunk"] != (k - origin) // f["chunk"]:
        return False
    dense = f.get("dense")
    if dense is not None:
        full = dense.reshape((1,) * (4 - dense.ndim) + tuple(dense.shape))
        index = [x if size > 1 else 0 for x, size in zip((b, h, i, j), full.shape, strict=True)]
        if not bool(full[tuple(index)]):
            return False
    return True


def table(f: dict[str, Any], B: int, H: int, Lq: int, Lk: int) -> torch.Tensor:
    rows = [
        [[[visible(f, b, h, i, j, Lq, Lk) for j in range(Lk)] for i in range(Lq)] for h in range(H)]
        for b in range(B)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(B, H, Lq, Lk)


SIZES = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 7), st.integers(1, 7))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=SIZES)
def test_tiles_are_what_the_fields_mean(data: st.DataObject, sizes: tuple[int, int, int, int]) -> None:
    B, H, Lq, Lk = sizes
    f = data.draw(fields(B, H, Lq, Lk))
    truth = table(f, B, H, Lq, Lk)
    seen = Visibility(Mask(**f), B, H, Lq, Lk, CPU)
    whole = seen.tile(slice(0, Lq), slice(0, Lk))
    got = torch.ones(B, H, Lq, Lk, dtype=torch.bool) if whole is None else whole.expand(B, H, Lq, Lk)
    assert torch.equal(got, truth), f
    if seen.everything:
        assert truth.all()
    if seen.plain_causal:
        assert torch.equal(truth[0, 0], torch.ones(Lq, Lk).tril().bool())
    if seen.by_keys is not None:
        assert torch.equal(seen.by_keys[:, None, None].expand_as(truth), truth)
    # any part of it, by range or by index, is the same part
    r0 = data.draw(st.integers(0, Lq - 1))
    r1, c0 = data.draw(st.integers(r0 + 1, Lq)), data.draw(st.integers(0, Lk - 1))
    c1 = data.draw(st.integers(c0 + 1, Lk))
    picked = torch.tensor(data.draw(st.lists(st.integers(0, Lq - 1), min_size=1, max_size=4)))
    for rows in (slice(r0, r1), picked):
        part = seen.tile(rows, slice(c0, c1))
        want = truth[:, :, rows, c0:c1]
        assert torch.equal(torch.ones_like(want) if part is None else part.expand_as(want), want)
        # nothing outside the spans is visible, and the spans are sorted and apart
        spans = seen.spans(rows)
        outside = torch.ones(Lk, dtype=torch.bool)
        for low, high in spans:
            assert 0 <= low < high <= Lk
            outside[low:high] = False
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert not truth[:, :, rows][..., outside].any()


@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=SIZES)
def test_and_sees_what_both_see(data: st.DataObject, sizes: tuple[int, int, int, int]) -> None:
    B, H, Lq, Lk = sizes
    one, two, three = (Mask(**data.draw(fields(B, H, Lq, Lk, frame=False))) for _ in range(3))

    def dense(mask: Mask) -> torch.Tensor:
        return mask.to_dense(Lq, Lk, batch=B, heads=H).expand(B, H, Lq, Lk)

    both = one & two
    counts = one.padding is not None or two.padding is not None
    if counts and any(m.sinks or m.chunk or m.prefix is not None for m in (one, two)):
        return  # padding moves the start from which sinks, chunks and prefixes count: tested by hand below
    if any(m.documents is not None for m in (one, two)):
        return  # so do documents
    assert torch.equal(dense(both), dense(one) & dense(two))
    if three.padding is None and three.documents is None and not counts:
        assert torch.equal(dense(both & three), dense(one) & dense(two) & dense(three))
    assert both & both == both or both.also


def test_sinks_count_from_the_first_real_token_behind_left_padding() -> None:
    alone = Mask(causal=True, window=2, sinks=1).to_dense(4)[0, 0]
    padded = (Mask(causal=True, window=2, sinks=1) & Mask(padding=[4], padding_side="left")).to_dense(6)
    assert torch.equal(padded[0, 0, 2:, 2:], alone)
    assert not padded[0, 0, :, :2].any()


def test_packed_documents_are_masked_as_each_would_be_alone() -> None:
    for kind in (
        Mask(causal=True, window=2, sinks=1),
        Mask(causal=True, chunk=2),
        Mask(causal=True, prefix=2),
    ):
        packed = (kind & Mask(documents=[7, 7, 7, 3, 3, 3, 3, 3])).to_dense(8)[0, 0]
        assert torch.equal(packed[:3, :3], kind.to_dense(3)[0, 0])
        assert torch.equal(packed[3:, 3:], kind.to_dense(5)[0, 0])
        assert not packed[:3, 3:].any()
        assert not packed[3:, :3].any()


def test_a_window_of_w_is_the_last_w_keys() -> None:
    seen = Mask(causal=True, window=3).to_dense(6)[0, 0]
    assert seen.sum(1).tolist() == [1, 2, 3, 3, 3, 3]
    assert (
        Mask(causal=True, window=3) == Mask(causal=True, window=(2, None)) == Mask(causal=True, window=(2, 2))
    )
    assert Mask(window=3) == Mask(window=(2, 2)) != Mask(causal=True, window=3)


def test_conflicting_windows_with_sinks_are_kept_side_by_side() -> None:
    one, two = Mask(causal=True, window=2, sinks=1), Mask(causal=True, window=4, sinks=2)
    assert torch.equal((one & two).to_dense(7), one.to_dense(7) & two.to_dense(7))
    assert repr(one & two) == "Mask(causal=True, window=2, sinks=1) & Mask(causal=True, window=4, sinks=2)"


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Mask(), "Mask()"),
        (Mask(causal=True, window=1024, sinks=4), "Mask(causal=True, window=1024, sinks=4)"),
        (Mask(window=(3, None)), "Mask(window=(3, None))"),
        (Mask(window=4), "Mask(window=4)"),
        (Mask(padding=[1, 2], padding_side="left"), "Mask(padding=[1, 2], padding_side='left')"),
        (Mask(padding=torch.ones(2, 9, dtype=torch.bool)), "Mask(padding=<bool 2 x 9>)"),
        (Mask(documents=torch.zeros(2, 9, dtype=torch.long)), "Mask(documents=<int 2 x 9>)"),
        (Mask(causal=True, prefix=3, window=2), "Mask(causal=True, window=2, prefix=3)"),
    ],
)
def test_repr_reads_as_what_was_written(mask: Mask, text: str) -> None:
    assert repr(mask) == text
    if "<" not in text:
        assert eval(text) == mask  # our own words: what is printed can be typed


def test_a_mask_is_immutable_and_keeps_its_own_copies() -> None:
    lengths = torch.tensor([1, 2])
    mask = Mask(padding=lengths)
    lengths[0] = 2
    assert mask == Mask(padding=[1, 2])
    with pytest.raises(AttributeError):
        mask.causal = True  # type: ignore[misc]
    assert len({Mask(causal=True), Mask(causal=True), Mask(window=2)}) == 2


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Mask(window=0), MaskError, "window must be at least 1 (a query sees itself), got 0"),
        (lambda: Mask(window=(-1, 0)), MaskError, "window=(left, right) must be at least 0"),
        (lambda: Mask(window=(1, 2, 3)), MaskError, "window must be an int or a pair"),  # type: ignore[arg-type]
        (
            lambda: Mask(sinks=4),
            MaskError,
            "sinks=4 keeps keys visible outside a window, so it needs window=",
        ),
        (lambda: Mask(causal="no"), MaskError, "causal must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda: Mask(padding="ab"), MaskError, "padding must be a tensor or a list of numbers, got 'ab'"),
        (lambda: Mask(documents=[[0, 1], [2]]), MaskError, "documents must be a tensor or a list of numbers"),  # type: ignore[list-item]
        (lambda: Mask().to_dense(-1), MaskError, "Lq must be an integer of at least 1, got -1"),
        (lambda: Mask(sinks=-1, window=2), MaskError, "sinks must be an integer of at least 0, got -1"),
        (lambda: Mask(chunk=0), MaskError, "chunk must be an integer of at least 1, got 0"),
        (lambda: Mask(prefix=2), MaskError, "prefix lifts the causal rule, so it needs causal=True"),
        (lambda: Mask(padding=[-1]), MaskError, "padding lengths must be at least 0, got -1"),
        (lambda: Mask(padding=torch.ones(2, 3)), DTypeError, "padding must be integer lengths or booleans"),
        (
            lambda: Mask(padding=torch.ones(2, 3).long()),
            ShapeError,
            "a 0/1 mask becomes booleans with .bool()",
        ),
        (lambda: Mask(padding_side="middle"), MaskError, "padding_side must be 'right' or 'left'"),  # type: ignore[arg-type]
        (lambda: Mask(documents=torch.ones(3)), DTypeError, "documents must be integers, got torch.float32"),
        (lambda: Mask(dense=torch.zeros(3, 3)), DTypeError, "dense must be a boolean tensor"),
        (lambda: Mask(dense=torch.ones(3).bool()), ShapeError, "dense must broadcast to (B, Hq, Lq, Lk)"),
        (
            lambda: Mask(offset=True),
            MaskError,
            "offset must be an integer or a tensor of shape (B,), got True",
        ),
        (lambda: Mask(offset=1) & Mask(offset=2), MaskError, "different offset cannot be combined: 1 and 2"),
        (lambda: Mask(padding=[9]).to_dense(3), MaskError, "padding has a length of 9, but there are 3 keys"),
        (
            lambda: Mask(padding=[1, 2, 3]).to_dense(3, batch=2),
            ShapeError,
            "padding has 3 rows, but the batch has 2",
        ),
        (
            lambda: Mask(documents=[0, 1]).to_dense(3),
            ShapeError,
            "documents of the keys must have shape (3,)",
        ),
        (lambda: Mask(documents=[0, 1]).to_dense(3, 2), MaskError, "documents=(query numbers, key numbers)"),
        (
            lambda: Mask(dense=torch.ones(2, 3).bool()).to_dense(3),
            ShapeError,
            "axis 2 is 2, allowed are 1 and 3",
        ),
        (lambda: Mask(causal=True).to_dense(100_000), SizeError, "attention() takes the Mask itself"),
        (
            lambda: as_mask(torch.tensor([[0.0, float("nan")]]), torch.float32),
            MaskError,
            "NaN or +inf in 1 of 2 places",
        ),
        (lambda: as_mask(torch.zeros(2, 2).int(), torch.float32), DTypeError, "got torch.int32"),
        (
            lambda: as_mask(torch.zeros(2), torch.float32),
            ShapeError,
            "mask must broadcast to (B, Hq, Lq, Lk)",
        ),
        (
            lambda: as_mask("causal", torch.float32),
            ArgumentError,
            "mask must be a Mask, a tensor or None, got str",
        ),  # type: ignore[arg-type]
    ],
)
def test_bad_fields_are_refused_by_name(make: Any, error: type[ClearheadError], says: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert says in str(caught.value)


def test_an_additive_mask_splits_into_who_and_how_much() -> None:
    low = torch.finfo(torch.float32).min
    mask, bias = as_mask(torch.tensor([[0.0, -float("inf")], [low, 0.0]]), torch.float32)
    assert bias is None
    assert torch.equal(mask.to_dense(2)[0, 0], torch.tensor([[True, False], [False, True]]))
    mask, bias = as_mask(torch.tensor([[0.5, 0.0], [-2.0, -float("inf")]]), torch.float32)
    assert bias is not None
    assert bias.tolist() == [[0.5, 0.0], [-2.0, 0.0]]
    assert as_mask(torch.zeros(2, 2), torch.float32) == (Mask(), None)
