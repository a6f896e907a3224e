"""Bad input to the front door: each error names the argument, what came and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead import errors
from clearhead.backends import registry

Q, K = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)


def call(q: Any = Q, k: Any = K, v: Any = K, **more: Any) -> Any:
    return ch.attention(q, k, v, **more)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: call(q=Q[0]), errors.ShapeError, "q must have shape (B, H, L, d), got (4, 6, 8)"),
        (lambda: call(q=[1]), errors.DTypeError, "q must be a tensor, got list"),
        (
            lambda: call(k=K.int()),
            errors.DTypeError,
            "k has dtype torch.int32, allowed are float32, float64, bfloat16, float16",
        ),
        (
            lambda: call(k=K.double(), v=K.double()),
            errors.DTypeError,
            "q has dtype torch.float32 and k torch.float64",
        ),
        (lambda: call(v=K.to("meta")), errors.DeviceError, "q is on cpu and v on meta"),
        (
            lambda: call(q=torch.randn(1, 3, 6, 8)),
            errors.ShapeError,
            "q has 3 heads and k 2: query heads must be a multiple",
        ),
        (lambda: call(q=torch.randn(2, 4, 6, 8)), errors.ShapeError, "q, k and v have batches of 2, 1 and 1"),
        (lambda: call(q=torch.randn(1, 4, 6, 7)), errors.ShapeError, "q has head size 7 and k 8"),
        (
            lambda: call(v=torch.randn(1, 2, 5, 8)),
            errors.ShapeError,
            "k and v must have the same heads and length (k is (1, 2, 6, 8), v (1, 2, 5, 8))",
        ),
        (lambda: call(q=Q[:, :, :0]), errors.ShapeError, "q is empty, shape (1, 4, 0, 8)"),
        (lambda: call(k=K[:, :, :0], v=K[:, :, :0]), errors.ShapeError, "k is empty, shape (1, 2, 0, 8)"),
        (lambda: call(mask="causal"), errors.ArgumentError, "mask must be a Mask, a tensor or None, got str"),
        (
            lambda: call(mask=torch.full((6, 6), torch.nan)),
            errors.MaskError,
            "mask holds NaN or +inf in 36 of 36 places",
        ),
        (lambda: call(mask=torch.ones(5, 6).bool()), errors.ShapeError, "axis 2 is 5, allowed are 1 and 6"),
        (
            lambda: call(mask=ch.Mask(padding=[7])),
            errors.MaskError,
            "padding has a length of 7, but there are 6 keys",
        ),
        (
            lambda: call(bias=torch.ones(6, 6).bool()),
            errors.DTypeError,
            "bias must be a floating-point tensor, got torch.bool",
        ),
        (
            lambda: call(bias=torch.zeros(3, 6, 6)),
            errors.ShapeError,
            "bias must broadcast to (B, Hq, Lq, Lk) = (1, 4, 6, 6)",
        ),
        (lambda: call(bias=torch.full((6, 6), torch.nan)), errors.ArgumentError, "bias holds NaN or +inf"),
        (
            lambda: call(sink_logits=torch.zeros(3)),
            errors.ShapeError,
            "sink_logits must have shape (4,), got (3,)",
        ),
        (
            lambda: call(sink_logits=torch.zeros(4).int()),
            errors.DTypeError,
            "sink_logits must be a floating-point tensor",
        ),
        (
            lambda: call(scale=float("nan")),
            errors.ArgumentError,
            "scale must be a finite number (of torch.float32), got nan",
        ),
        (
            lambda: call(softcap=0.0),
            errors.ArgumentError,
            "softcap must be a positive number or None, got 0.0",
        ),
        (lambda: call(dropout=1.0), errors.ArgumentError, "dropout must lie in 0 <= p < 1, got 1.0"),
        (
            lambda: call(backend="flash"),
            errors.ArgumentError,
            "backend must be one of cpu, sdpa, reference or None, got 'flash'",
        ),
        (
            lambda: call(observe=[ch.Entropy]),
            errors.ArgumentError,
            "observe must hold observables such as Entropy()",
        ),
        (
            lambda: call(observe=[ch.SegmentMass(torch.zeros(5).long())]),
            errors.ShapeError,
            "segment ids cover 5 keys, but there are 6",
        ),
        (
            lambda: ch.SegmentMass(torch.tensor([0, -1])),
            errors.ObserveError,
            "segment ids must be at least 0, got -1",
        ),
        (
            lambda: ch.SegmentMass(torch.zeros(6)),
            errors.DTypeError,
            "segment ids must be integers, got torch.float32",
        ),
        (
            lambda: call(
                observe=[ch.SegmentMass(torch.zeros(3, 6).long()), ch.Entropy()],
                q=Q.expand(2, -1, -1, -1),
                k=K.expand(2, -1, -1, -1),
                v=K.expand(2, -1, -1, -1),
            ),
            errors.ShapeError,
            "segment ids have 3 rows, but the batch has 2",
        ),
        (lambda: call(bias=torch.full((6, 6), torch.inf)), errors.ArgumentError, "bias holds NaN or +inf"),
        (
            lambda: call(sink_logits=torch.full((4,), torch.inf)),
            errors.ArgumentError,
            "sink_logits must be numbers or -inf",
        ),
        (
            lambda: call(scale=10**400),
            errors.ArgumentError,
            "scale must be a finite number (of torch.float32)",
        ),
        (lambda: call(scale=1e300), errors.ArgumentError, "scale must be a finite number (of torch.float32)"),
        (
            lambda: call(observe=None),
            errors.ArgumentError,
            "observe must hold observables such as Entropy(), got None",
        ),
        (
            lambda: call(observe=[ch.Entropy(rows=None)]),
            errors.ObserveError,
            "rows must be 'all', 'last', a slice or indices, got None",
        ),
        (
            lambda: call(observe=[ch.Entropy(rows=slice("a", None))]),
            errors.ObserveError,
            "must have integers as bounds",
        ),
        (
            lambda: call(observe=[ch.Entropy(rows=slice(None, None, 0))]),
            errors.ObserveError,
            "a step that is not 0",
        ),
        (
            lambda: ch.SegmentMass("ab"),
            errors.ObserveError,
            "segment ids must be a tensor or a list of integers",
        ),
        (
            lambda: call(mask=torch.eye(6).to_sparse()),
            errors.DTypeError,
            "mask must be a dense tensor, got layout torch.sparse_coo",
        ),
        (lambda: ch.TopKeys(0), errors.ObserveError, "TopKeys needs k of at least 1, got 0"),
        (lambda: ch.PooledMap(0, 3), errors.ObserveError, "PooledMap needs rows of at least 1, got 0"),
        (lambda: ch.PooledMap(3, 3, "sum"), errors.ObserveError, "reduce must be 'mean' or 'max', got 'sum'"),
        (
            lambda: call(observe=[ch.Entropy(rows="first")]),
            errors.ObserveError,
            "rows must be 'all', 'last', a slice or indices",
        ),
        (
            lambda: call(observe=[ch.Entropy(rows=[6])]),
            errors.ObserveError,
            "rows holds 6, allowed are -6..5",
        ),
        (
            lambda: call(observe=[ch.Entropy(rows=slice(4, 9))]),
            errors.ObserveError,
            "out of range: there are 6 queries",
        ),
        (
            lambda: call(observe=[ch.Entropy(rows=slice(3, 3))]),
            errors.ObserveError,
            "chooses none of the 6 queries",
        ),
        (lambda: ch.Segments([0, 2], ["a", "b"]), errors.ArgumentError, "segment ids must lie in 0..1"),
        (lambda: ch.Segments([0], ["a", "a"]), errors.ArgumentError, "segment names must differ"),
        (
            lambda: ch.Segments([0], ["a"], output=1),
            errors.ArgumentError,
            "output must be a segment number in 0..0, got 1",
        ),
    ],
)
def test_bad_input_is_named(make: Any, error: type[errors.ClearheadError], says: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert says in str(caught.value)


def test_too_many_weights_are_refused_before_they_are_made() -> None:
    q = torch.randn(1, 1, 40_000, 1)
    with pytest.raises(errors.SizeError, match="choose fewer rows"):
        ch.attention(q, q, q, observe=[ch.Weights(rows="all")], mask=ch.Mask(causal=True, window=1))
    with pytest.raises(errors.SizeError, match="use another backend"):
        ch.attention(q, q, q, backend="reference")


def test_a_top_k_beyond_the_keys_is_filled_up() -> None:
    _, (top,) = call(observe=[ch.TopKeys(8)])
    assert (top.weights[..., 6:] == 0).all()
    assert (top.indices[..., 6:] == -1).all()


class Picky:
    name = "picky"

    def supports(self, request: Any) -> str | None:
        return "only on Tuesdays"

    def forward(self, request: Any) -> Any:
        raise AssertionError

    def observe(self, request: Any, result: Any, observables: Any) -> Any:
        raise AssertionError


def test_a_backend_refuses_with_its_reason_and_the_next_one_is_asked() -> None:
    registry.register(Picky(), first=True)
    try:
        assert call().shape == Q.shape
        with pytest.raises(errors.BackendError, match="picky: only on Tuesdays"):
            call(backend="picky")
        with pytest.raises(errors.ArgumentError, match="a backend named 'picky' is registered already"):
            registry.register(Picky())
    finally:
        registry.unregister("picky")
    assert registry.names() == ("cpu", "sdpa", "reference")


def test_every_error_is_a_clearhead_error_and_says_when_it_happens() -> None:
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(kinds) >= 12
    for kind in kinds:
        assert issubclass(kind, errors.ClearheadError)
        assert kind.__doc__
        assert kind.__name__ in (errors.__doc__ or "")
