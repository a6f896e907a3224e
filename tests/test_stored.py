"""Stored keys and values: what attention makes of them is what it makes of the same numbers written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import Entropy, Int8Rows, KeyMass, Mask, Pages, SegmentOutput, TopKeys, attention, errors
from clearhead.backends import registry

BACKENDS = registry.names()


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def paged(rows: Tensor, lengths: list[int], page: int, *, seed: int = 0, bytes_: bool = False) -> Pages:
    """The same rows (B, H, L, d) in the pages of a pool, in a random order, with rubbish in between."""
    B, H, L, d = rows.shape
    count = -(-L // page)
    blocks = B * count + 3
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))[: B * count].view(B, count)
    pool = torch.full((blocks, H, page, d), torch.nan)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, count * page - L), value=float("nan"))
    pool[order] = padded.view(B, H, count, page, d).transpose(1, 2)
    table = order.to(torch.int32)
    for b, length in enumerate(lengths):
        table[b, -(-length // page) :] = -7  # not looked at
    if bytes_:
        return Pages(Int8Rows.quantised(pool.nan_to_num(3.0)), table, lengths)
    return Pages(pool.to(rows.dtype), table, torch.tensor(lengths))


def test_the_error_of_bytes_is_half_a_step() -> None:
    rows = normal(2, 3, 50, 32)
    rows[0, 0, 0] = 0
    stored = Int8Rows.quantised(rows)
    assert stored.values.dtype == torch.int8
    assert stored.values.abs().amax(-1)[0, 0, 1:].eq(127).all()
    error = (stored.dense() - rows).abs()
    assert (error <= stored.scales[..., None] / 2 * 1.0001).all()
    assert (stored.dense()[0, 0, 0] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("Lq", [1, 3, 90])
def test_attention_over_bytes_is_attention_over_what_they_stand_for(
    backend: str, dtype: torch.dtype, Lq: int
) -> None:
    q = normal(2, 6, Lq, 64).to(dtype)
    k, v = (Int8Rows.quantised(normal(2, 2, 300, 64, seed=i)) for i in (1, 2))
    asked = [Entropy(), KeyMass(), SegmentOutput(torch.arange(300) // 100, rows="last")]
    mask = Mask(causal=True, window=200)
    out, lse, seen = attention(q, k, v, mask=mask, observe=asked, return_lse=True, backend=backend)
    want, want_lse, truth = attention(
        q.double(), k.dense().double(), v.dense().double(), mask=mask, observe=asked, return_lse=True,
        backend="reference",
    )  # fmt: skip
    assert out.dtype == dtype
    # in bfloat16 the core keeps bytes and queries apart: both stay exact, the output is rounded once
    assert torch.allclose(out.double(), want, atol=1e-5 if dtype == torch.float32 else 4e-3)
    assert torch.allclose(lse.double(), want_lse, atol=1e-4)
    for got, true in zip(seen, truth, strict=True):
        assert torch.allclose(got.double(), true, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [16, 48])
@pytest.mark.parametrize("bytes_", [False, True], ids=["floats", "bytes"])
@pytest.mark.parametrize("Lq", [1, 2, 70])
@pytest.mark.parametrize(
    "fields", [{}, {"causal": True}, {"causal": True, "window": 40, "sinks": 3}], ids=str
)
def test_attention_over_pages_is_attention_row_by_row(
    backend: str, page: int, bytes_: bool, Lq: int, fields: dict[str, Any]
) -> None:
    lengths = [301, 70, 128]
    q, (k, v) = normal(3, 4, Lq, 32), (normal(3, 2, 301, 32, seed=i) for i in (1, 2))
    pages = [paged(rows, lengths, page, bytes_=bytes_) for rows in (k, v)]
    asked = [Entropy(), KeyMass(), TopKeys(2, rows="last")]
    out, lse, seen = attention(
        q, *pages, mask=Mask(**fields), observe=asked, return_lse=True, backend=backend
    )
    assert seen[1].shape == (3, 4, 301)
    for b, length in enumerate(lengths):
        alone = [p.dense()[b : b + 1, :, :length] for p in pages]
        want, want_lse, truth = attention(
            q[b : b + 1], *alone, mask=Mask(**fields), observe=asked, return_lse=True, backend="reference"
        )
        assert torch.allclose(out[b], want[0], atol=1e-5)
        assert torch.allclose(lse[b], want_lse[0], atol=1e-4)
        assert torch.allclose(seen[0][b], truth[0][0], atol=1e-4)
        assert torch.allclose(seen[1][b, :, :length], truth[1][0], atol=1e-4)
        assert (seen[1][b, :, length:] == 0).all()
        assert torch.allclose(seen[2].weights[b], truth[2].weights[0], atol=1e-4)


def test_what_is_written_out_is_what_was_stored() -> None:
    rows = normal(2, 2, 100, 16)
    dense = paged(rows, [100, 33], 16).dense()
    assert torch.equal(dense[0], rows[0])
    assert torch.equal(dense[1, :, :33], rows[1, :, :33])
    assert (dense[1, :, 33:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_the_query_goes_through_stored_keys(backend: str) -> None:
    k, v = normal(2, 2, 50, 16, seed=1), normal(2, 2, 50, 16, seed=2)
    pages = [paged(rows, [50, 20], 16) for rows in (k, v)]
    grads = []
    for way in (pages, [p.dense() for p in pages]):
        q = normal(2, 4, 2, 16).requires_grad_()
        mask = Mask(causal=True)
        if way is not pages:
            mask = Mask(causal=True, padding=[50, 20], offset=torch.tensor([48, 18]))
        attention(q, *way, mask=mask, backend=backend).square().sum().backward()
        grads.append(q.grad)
    assert torch.allclose(grads[0], grads[1], atol=1e-5)


def test_lengths_and_tables_may_change_between_calls_and_are_looked_at_again() -> None:
    rows = normal(2, 2, 100, 16)
    pages, q = paged(rows, [100, 33], 16), normal(2, 2, 1, 16)
    mask = Mask(causal=True)
    before = attention(q, pages, pages, mask=mask)
    pages.lengths[0] = 40
    after = attention(q, pages, pages, mask=mask)
    assert torch.equal(before[1], after[1])
    alone = rows[:1, :, :40]
    assert torch.allclose(after[:1], attention(q[:1], alone, alone), atol=1e-5)
    pages.table[1, 1] = 99
    with pytest.raises(errors.ArgumentError, match="table holds block 99"):
        attention(q, pages, pages, mask=mask)


POOL, TABLE = torch.randn(5, 2, 16, 8), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
Q = torch.randn(2, 4, 1, 8)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Int8Rows(POOL, POOL[..., 0]), errors.DTypeError, "values has dtype torch.float32, allowed are int8"),
        (lambda: Int8Rows(POOL.to(torch.int8), POOL), errors.ShapeError, "scales must have shape (B, Hkv, L), got (5, 2, 16, 8)"),
        (lambda: Int8Rows(POOL.to(torch.int8), POOL[:, :, :3, 0]), errors.ShapeError, "one per row of values, got (5, 2, 3)"),
        (lambda: Pages(POOL[:, :, :10], TABLE, [1, 1]), errors.ShapeError, "pages of 10 rows, allowed are multiples of 16 up to 256"),
        (lambda: Pages(POOL, TABLE.long(), [1, 1]), errors.DTypeError, "table has dtype torch.int64, allowed are int32"),
        (lambda: Pages(POOL, TABLE, [1.0, 1.0]), errors.DTypeError, "lengths has dtype torch.float32, allowed are int32, int64"),
        (lambda: Pages(POOL, TABLE, [1]), errors.ShapeError, "table has 2 rows and lengths 1"),
        (lambda: Pages(POOL, TABLE, [33, 1]), errors.ArgumentError, "lengths run from 1 to 33: allowed are 0 to 32"),
        (lambda: Pages(POOL, TABLE, [-1, 1]), errors.ArgumentError, "lengths run from -1 to 1"),
        (lambda: Pages(POOL, TABLE + 3, [1, 17]), errors.ArgumentError, "table holds block 6, allowed are 0..4"),
        (lambda: attention(Q, Pages(POOL, TABLE, [9, 8]), POOL), errors.DTypeError, "k is Pages and v Tensor"),
        (lambda: attention(Q, POOL, Pages(POOL, TABLE, [9, 8])), errors.DTypeError, "v must be a tensor, got Pages"),
        (lambda: attention(Q, Pages(POOL, TABLE, [9, 8]), Pages(POOL, TABLE, [8, 9])), errors.ArgumentError, "k and v have different lengths"),
        (lambda: attention(Q.bfloat16(), *[Pages(POOL, TABLE, [9, 8])] * 2), errors.DTypeError, "q has dtype torch.bfloat16 and k torch.float32"),
        (lambda: attention(Q[:1], *[Pages(POOL, TABLE, [9, 8])] * 2), errors.ShapeError, "q, k and v have batches of 1, 2 and 2"),
        (lambda: attention(Q, *[Int8Rows.quantised(POOL)] * 2), errors.ShapeError, "q, k and v have batches of 2, 5 and 5"),
        (lambda: attention([1], *[Int8Rows.quantised(POOL)] * 2), errors.DTypeError, "q must be a tensor, got list"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert says in str(caught.value)
