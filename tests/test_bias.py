"""Biases as descriptions say what the models' own code says, at every backend, without an n × n matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import ALiBi, Entropy, Mask, RelativeBias, attention, errors
from clearhead.backends import registry
from clearhead.bias import RelativePosition

BACKENDS = registry.names()


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def slopes_of_the_paper(Hq: int) -> list[float]:
    """Press et al.'s own function (fairseq, models/transformer.py), written out again."""

    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(n.bit_length() - 1 - 3)))
        return [start ** (i + 1) for i in range(n)]

    if Hq & (Hq - 1) == 0:
        return of_power(Hq)
    below = 2 ** (Hq.bit_length() - 1)
    return of_power(below) + slopes_of_the_paper(2 * below)[0::2][: Hq - below]


@pytest.mark.parametrize("Hq", [1, 2, 3, 8, 12, 16, 25, 40])
def test_the_slopes_are_those_of_the_paper_of_bloom_and_of_mpt(Hq: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    slopes = ALiBi.for_heads(Hq).slopes
    assert torch.allclose(slopes, torch.tensor(slopes_of_the_paper(Hq)))
    bloom = build_alibi_tensor(torch.ones(1, 2).long(), Hq, torch.float32)  # slope times position of the key
    assert torch.allclose(slopes, bloom[:, 0, 1])
    assert torch.allclose(slopes, -build_mpt_alibi_tensor(Hq, 2)[:, 0, 0])


def test_under_a_causal_mask_alibi_gives_what_bloom_and_mpt_give() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    q, mask = normal(2, 6, 40, 8), Mask(causal=True)
    out = attention(q, q, q, mask=mask, bias=ALiBi.for_heads(6))
    bloom = build_alibi_tensor(torch.ones(1, 40).long(), 6, torch.float32).view(1, 6, 1, 40)
    mpt = build_mpt_alibi_tensor(6, 40)[None]
    for theirs in (bloom, mpt):
        assert torch.allclose(out, attention(q, q, q, mask=mask, bias=theirs), atol=1e-5)


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 20), (20, 64)])
def test_t5_bias_is_bit_equal_to_transformers(decoder: bool, buckets: int, far: int) -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        num_heads=3,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=far,
        is_decoder=decoder,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    mine = RelativeBias(theirs.relative_attention_bias.weight, bidirectional=not decoder, max_distance=far)
    with torch.no_grad():
        assert torch.equal(mine.to_dense(300), theirs.compute_bias(300, 300))
        assert torch.equal(mine.to_dense(5, 900), theirs.compute_bias(5, 900, past_seen_tokens=895))


def described(kind: str, dtype: torch.dtype) -> RelativePosition:
    if kind == "alibi":
        return ALiBi(ALiBi.for_heads(4).slopes.to(dtype))
    return RelativeBias(normal(12, 4, dtype=dtype), bidirectional=kind == "t5 both ways", max_distance=40)


MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": 30, "sinks": 2},
    {"offset": torch.tensor([3, 50]), "causal": True},
    {"key_offset": 7, "padding": torch.tensor([150, 90]), "padding_side": "left"},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["alibi", "t5 both ways", "t5 backwards"])
@pytest.mark.parametrize("fields", MASKS, ids=str)
@pytest.mark.parametrize("Lq", [150, 2])
def test_a_description_is_its_matrix(backend: str, kind: str, fields: dict[str, Any], Lq: int) -> None:
    q, k, v = normal(2, 4, Lq, 16), normal(2, 2, 150, 16, seed=1), normal(2, 2, 150, 16, seed=2)
    bias, mask = described(kind, torch.float32), Mask(**fields)
    first = mask.key_offset + 150 - Lq if mask.offset is None else mask.offset
    queries = torch.as_tensor(first).reshape(-1, 1) + torch.arange(Lq)
    distance = queries[:, :, None] - (mask.key_offset + torch.arange(150))
    matrix = bias.by_distance(-2000, 2000)[:, distance + 2000].transpose(0, 1)
    out, lse, (entropy,) = attention(
        q, k, v, mask=mask, bias=bias, return_lse=True, observe=Entropy(), backend=backend
    )
    want, want_lse, (want_entropy,) = attention(
        q, k, v, mask=mask, bias=matrix, return_lse=True, observe=Entropy(), backend="reference"
    )
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(lse, want_lse, atol=1e-5)
    assert torch.allclose(entropy, want_entropy, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("offset", [None, torch.tensor([1, 40])])
def test_the_gradient_of_a_table_is_that_of_the_matrix(
    backend: str, softcap: float | None, offset: Tensor | None
) -> None:
    mask, grads = Mask(causal=True, offset=offset), []
    for way in ("description", "matrix"):
        q = normal(2, 4, 70, 16).requires_grad_()
        table = normal(12, 4, seed=1).requires_grad_()
        bias: Any = RelativeBias(table, bidirectional=False, max_distance=40)
        where = backend
        if way == "matrix":
            first = torch.zeros(1, 1).long() if offset is None else offset[:, None]
            distance = (first + torch.arange(70))[:, :, None] - torch.arange(70)
            bias, where = bias.by_distance(-200, 200)[:, distance + 200].transpose(0, 1), "reference"
        out, lse = attention(q, q, q, mask=mask, bias=bias, softcap=softcap, return_lse=True, backend=where)
        loss = (out * normal(2, 4, 70, 16, seed=2)).sum() + (lse * normal(2, 4, 70, seed=3)).sum()
        grads.append(torch.autograd.grad(loss, [q, table]))
    for mine, true in zip(*grads, strict=True):
        assert torch.allclose(mine, true, atol=1e-4)


def test_a_matrix_and_an_additive_mask_are_added_to_a_description() -> None:
    q, low = normal(1, 4, 20, 8), normal(20, 20, seed=5)
    bias = ALiBi.for_heads(4)
    out = attention(q, q, q, mask=low, bias=bias)
    assert torch.allclose(out, attention(q, q, q, bias=bias.to_dense(20) + low), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: ALiBi([1, 2]), errors.DTypeError, "slopes must be floating-point numbers, got torch.int64"),
        (lambda: ALiBi(torch.ones(2, 2)), errors.ShapeError, "slopes must have shape (Hq,), got (2, 2)"),
        (lambda: ALiBi([1.0, float("inf")]), errors.ArgumentError, "slopes must be finite numbers, got [1.0, inf]"),
        (lambda: ALiBi.for_heads(0), errors.ArgumentError, "number of heads of at least 1, got 0"),
        (lambda: RelativeBias(torch.ones(4).long()), errors.DTypeError, "got torch.int64"),
        (lambda: RelativeBias(torch.ones(4)), errors.ShapeError, "shape (buckets, Hq), got (4,)"),
        (lambda: RelativeBias(torch.ones(3, 2)), errors.ArgumentError, "at least 4 buckets, got a table of 3"),
        (lambda: RelativeBias(torch.ones(8, 2), max_distance=2), errors.ArgumentError, "above 2 (the distances"),
        (lambda: RelativeBias(torch.ones(8, 2), bidirectional=1), errors.ArgumentError, "must be True or False, got 1"),
        (lambda: attention(normal(1, 4, 3, 8), *[normal(1, 2, 3, 8)] * 2, bias=ALiBi.for_heads(3)), errors.ShapeError, "ALiBi(3 heads) as bias: q has 4 heads"),
        (lambda: attention(*[normal(2, 1, 3, 8)] * 3, bias=ALiBi([1.0]), mask=Mask(offset=torch.tensor([0, 2**40]))), errors.SizeError, "distances run from -2 to"),
        (lambda: attention(*[normal(2, 1, 3, 8)] * 3, bias=RelativeBias(torch.full((4, 1), torch.nan))), errors.ArgumentError, "holds NaN or +inf"),
    ],
)  # fmt: skip
def test_what_makes_no_bias_is_refused(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert says in str(caught.value)
