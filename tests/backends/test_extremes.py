"""Inputs at the edge of what floats can hold, and calls in unusual surroundings: found by trying to break it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead import Entropy, KeyMass, Mask, SegmentMass, TopKeys, attention
from clearhead.backends import registry
from clearhead.errors import BackendError

BACKENDS = registry.names()


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", ["all", "last"])
def test_autocast_does_not_lower_the_precision_of_what_is_computed(backend: str, rows: str) -> None:
    q, k, v = normal(1, 2, 300, 64) * 4, normal(1, 2, 300, 64, seed=1) * 4, normal(1, 2, 300, 64, seed=2)
    mask, asked = (
        Mask(causal=True, window=100),
        [SegmentMass(torch.zeros(300).long(), rows=rows), Entropy(rows=rows)],
    )
    plain, plain_seen = attention(q, k, v, mask=mask, observe=asked, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, seen = attention(q, k, v, mask=mask, observe=asked, backend=backend)
    assert torch.equal(out, plain)
    assert all(torch.equal(a, b) for a, b in zip(seen, plain_seen, strict=True))


def test_second_derivatives_are_refused_and_not_dropped() -> None:
    x = normal(1, 1, 20, 8).requires_grad_()
    out = attention(x, x.detach(), x.detach(), mask=Mask(causal=True)).sum()
    with pytest.raises(BackendError, match="second derivatives are not supported"):
        torch.autograd.grad(out, x, create_graph=True)
    exact = attention(x, x.detach(), x.detach(), backend="reference").sum()
    (slope,) = torch.autograd.grad(exact, x, create_graph=True)
    slope.square().sum().backward()
    assert x.grad is not None


def test_dropout_does_not_depend_on_the_number_of_threads() -> None:
    q = normal(1, 4, 1500, 8).requires_grad_()
    threads = torch.get_num_threads()
    found = []
    try:
        for before, after in ((2, 2), (2, 1), (1, 2)):
            torch.set_num_threads(before)
            torch.manual_seed(1)
            out = attention(q, q, q, mask=Mask(causal=True), dropout=0.3)
            torch.set_num_threads(after)
            found.append((out, torch.autograd.grad(out.square().sum(), q)[0]))
    finally:
        torch.set_num_threads(threads)
    for out, grad in found[1:]:
        assert torch.allclose(out, found[0][0], atol=1e-5)
        assert torch.allclose(grad, found[0][1], atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth", [-1e6, -1e9, torch.finfo(torch.float32).min / 4])
def test_a_row_that_sees_only_very_low_scores_still_adds_up_to_one(backend: str, depth: float) -> None:
    q = normal(1, 1, 64, 16)
    mask = torch.zeros(1, 1, 64, 64)
    mask[..., 10, :] = depth
    _, (mass, received) = attention(
        q, q, q, mask=mask, observe=[SegmentMass(torch.zeros(64).long()), KeyMass()], backend=backend
    )
    assert torch.allclose(mass, torch.ones(1, 1, 64, 1), atol=1e-4)
    assert abs(received.sum().item() - 64) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hidden", [1e30, torch.inf, torch.nan])
def test_hidden_keys_may_hold_anything(backend: str, hidden: float) -> None:
    q, k, v = (normal(1, 2, 300, 64, seed=i) for i in range(3))
    bad = k.clone()
    bad[:, :, 260:] = hidden
    for mask in (Mask(dense=(torch.arange(300) < 250)[None]), Mask(padding=[250])):
        asked = [Entropy(), KeyMass(rows="last"), TopKeys(3, rows=slice(0, 20))]
        want, want_seen = attention(q, k, v, mask=mask, observe=asked, backend=backend)
        out, seen = attention(q, bad, v, mask=mask, observe=asked, backend=backend)
        assert torch.allclose(out, want, atol=1e-5)
        for got, true in zip(
            (*seen[:2], seen[2].weights), (*want_seen[:2], want_seen[2].weights), strict=True
        ):
            assert torch.allclose(got, true, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_top_keys_lists_no_key_that_is_hidden_by_a_low_number(backend: str) -> None:
    q = normal(1, 1, 15, 8)
    low = torch.zeros(15, 15).masked_fill(~torch.ones(15, 15).tril().bool(), -1e9)
    _, (top,) = attention(q, q, q, mask=low, observe=[TopKeys(3)], backend=backend)
    assert top.indices[0, 0, 0].tolist() == [0, -1, -1]
    assert (top.indices[0, 0, 1] >= 0).sum() == 2


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_top_keys_go_far_down_in_float64(backend: str) -> None:
    scores = -2.0 * torch.arange(300, dtype=torch.float64)
    q, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), scores.view(1, 1, 300, 1)
    _, (top,) = attention(q, k, k, scale=1.0, observe=[TopKeys(60)], backend=backend)
    assert top.indices[0, 0, 0].tolist() == list(range(60))


def test_a_broadcast_bias_keeps_its_size_in_the_backward() -> None:
    q, bias = normal(1, 2, 50, 8), normal(1, 1, 1, 50).requires_grad_()
    wide = bias.detach().double().requires_grad_()
    attention(q, q, q, bias=bias.expand(1, 2, 50, 50), mask=Mask(causal=True)).square().sum().backward()
    attention(
        q.double(), q.double(), q.double(), bias=wide, mask=Mask(causal=True), backend="reference"
    ).square().sum().backward()
    assert bias.grad is not None
    assert wide.grad is not None
    assert torch.allclose(bias.grad.double(), wide.grad, atol=1e-4)


def test_a_dense_mask_that_changes_before_the_backward_is_noticed() -> None:
    q = normal(1, 1, 30, 8).requires_grad_()
    dense = torch.ones(30, 30).tril().bool()
    out = attention(q, q, q, mask=dense)
    dense[:] = True
    with pytest.raises(BackendError, match="changed in place between forward and backward"):
        out.sum().backward()


def test_ids_may_change_after_the_observable_was_made() -> None:
    q, ids = normal(1, 1, 10, 4), torch.zeros(10).long()
    ids[5:] = 1
    mass = SegmentMass(ids)
    before = attention(q, q, q, observe=[mass])[1][0].clone()
    ids[:] = 0
    assert torch.equal(attention(q, q, q, observe=[mass])[1][0], before)
