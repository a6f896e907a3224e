"""Calls in unusual surroundings: transforms, modes, lazy views, other memory. Right, or an error; never silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from clearhead import Entropy, KeyMass, Mask, attention
from clearhead.backends import registry
from clearhead.errors import BackendError

BACKENDS = registry.names()


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


Q = normal(1, 2, 9, 8)
CAUSAL = Mask(causal=True, window=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazily_negated_views_are_what_they_say(backend: str) -> None:
    x = torch.complex(normal(1, 2, 9, 8), normal(1, 2, 9, 8, seed=1)).conj().imag
    assert x.is_neg()
    plain = x.clone()
    assert not plain.is_neg()
    bias = x[:, :1, :1, :1].expand(1, 1, 1, 9)
    got, want = (
        (t.clone().requires_grad_() if t is plain else t.detach().requires_grad_()) for t in (x, plain)
    )
    outs = [attention(t, t, t, mask=CAUSAL, bias=bias.detach(), backend=backend) for t in (got, want)]
    assert torch.allclose(*outs, atol=1e-6)
    for out in outs:
        out.square().sum().backward()
    assert got.grad is not None
    assert want.grad is not None
    assert torch.allclose(got.grad, want.grad, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_and_subclasses_are_tensors(backend: str) -> None:
    class Named(Tensor):
        pass

    want = attention(Q, Q, Q, mask=CAUSAL, backend=backend)
    parameter = torch.nn.Parameter(Q.clone())
    assert torch.equal(attention(parameter, Q, Q, mask=CAUSAL, backend=backend), want)
    assert torch.equal(
        attention(Q.as_subclass(Named), Q, Q, mask=CAUSAL, backend=backend).as_subclass(Tensor), want
    )


def test_a_vmapped_call_is_refused_and_not_wrong() -> None:
    x = normal(3, 1, 2, 9, 8)
    with pytest.raises(RuntimeError):
        torch.vmap(lambda t: attention(t, t, t))(x)


@pytest.mark.parametrize("backend", [None, "cpu", "sdpa"])
def test_forward_mode_derivatives_are_refused_and_not_dropped(backend: str | None) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(Q, Q)
        with pytest.raises((NotImplementedError, BackendError)):
            attention(dual, dual, dual, backend=backend)
        exact = attention(dual, dual, dual, backend="reference")
        assert forward_ad.unpack_dual(exact).tangent is not None


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_function_computes_when_it_is_run() -> None:
    traced = torch.jit.trace(lambda x: attention(x, x, x, mask=CAUSAL), Q, check_trace=False)
    other = normal(1, 2, 9, 8, seed=3)
    assert torch.allclose(traced(other), attention(other, other, other, mask=CAUSAL), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointed_calls_have_the_same_gradients(backend: str) -> None:
    grads = []
    for way in ("plain", "checkpointed"):
        x = Q.clone().requires_grad_()

        def call(t: Tensor) -> Any:
            return attention(t, t, t, mask=CAUSAL, backend=backend).square().sum()

        loss = call(x) if way == "plain" else checkpoint(call, x, use_reentrant=False)
        loss.backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode_gives_the_same(backend: str) -> None:
    asked = [Entropy(), KeyMass(rows=[3, 1])]
    want = attention(Q, Q, Q, mask=Mask(causal=True, padding=[7]), observe=asked, backend=backend)
    with torch.inference_mode():
        q = Q.clone()
        mask = Mask(causal=True, padding=torch.tensor([7]))
        out, seen = attention(q, q, q, mask=mask, observe=asked, backend=backend)
    assert torch.equal(out, want[0])
    assert all(map(torch.equal, seen, want[1]))
    again = attention(
        Q, Q, Q, mask=mask, observe=asked, backend=backend
    )  # what was kept is of use outside too
    assert torch.equal(again[0], want[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_result_is_no_view_of_an_input_and_has_dense_memory(backend: str) -> None:
    heads_inside = normal(2, 9, 4, 8).transpose(1, 2)
    for q in (heads_inside, normal(1, 1, 9, 8).expand(2, 4, 9, 8), normal(2, 4, 8, 9).transpose(2, 3)):
        out = attention(q, q, q, backend=backend)
        assert out.stride(3) == 1
        assert out.untyped_storage().nbytes() == out.numel() * 4
        out.fill_(0)
        assert q.abs().sum() > 0


def test_a_mask_in_use_by_other_sizes_is_bound_anew() -> None:
    mask = Mask(causal=True)
    for n in (9, 5, 9, 3):
        x = Q[:, :, :n]
        for Lq in (n, 1):
            got = attention(x[:, :, -Lq:], x, x, mask=mask)
            assert torch.allclose(got, attention(x, x, x, mask=Mask(causal=True))[:, :, -Lq:], atol=1e-6)
