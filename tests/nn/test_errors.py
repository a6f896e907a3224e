"""Bad input to a layer: each error names the argument, what came and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import clearhead as ch
from clearhead.errors import ArgumentError, ClearheadError, DTypeError, MaskError, ShapeError
from clearhead.nn import Block, Decoder, MultiHeadAttention, RelativePositions, Rotary

MAKING: list[tuple[dict[str, Any], type[ClearheadError], str]] = [
    ({"embed_dim": 0}, ArgumentError, "embed_dim must be an integer of at least 1, got 0"),
    ({"num_heads": 2.0}, ArgumentError, r"num_heads must be an integer of at least 1, got 2\.0"),
    ({"num_heads": 3}, ArgumentError, "embed_dim is 16 and num_heads 3: it must be divisible"),
    ({"num_kv_heads": 3}, ArgumentError, "num_heads is 4 and num_kv_heads 3"),
    ({"num_kv_heads": 8}, ArgumentError, "num_heads is 4 and num_kv_heads 8"),
    ({"head_dim": 0}, ArgumentError, "head_dim must be an integer of at least 1, got 0"),
    ({"kdim": True}, ArgumentError, "kdim must be an integer of at least 1, got True"),
    ({"vdim": -1}, ArgumentError, "vdim must be an integer of at least 1, got -1"),
    ({"window": 0}, MaskError, r"window must be at least 1 \(a query sees itself\), got 0"),
    ({"window": True}, MaskError, "window must be .* got True"),
    (
        {"window": 4, "sinks": 4},
        ArgumentError,
        "sinks is 4 and window 4: there must be fewer sinks than window",
    ),
    ({"window": [3, -1]}, MaskError, r"window=.* got \(3, -1\)"),
    ({"sinks": 2}, MaskError, "sinks=2 .* needs window="),
    ({"window": 4, "sinks": -1}, MaskError, "sinks must be an integer of at least 0, got -1"),
    ({"softcap": 0.0}, ArgumentError, r"softcap must be a finite number above 0, got 0\.0"),
    ({"scale": float("nan")}, ArgumentError, "scale must be a finite number .*got nan"),
    ({"dropout": 1.0}, ArgumentError, r"dropout must lie in 0 <= p < 1, got 1\.0"),
    ({"layer_idx": -1}, ArgumentError, "layer_idx must be an integer of at least 0, got -1"),
    ({"positions": "learned"}, ArgumentError, "positions must be 'rotary', .* got 'learned'"),
    ({"positions": "rotary", "head_dim": 5}, ArgumentError, "head_dim is 5, which is odd"),
    ({"positions": Rotary(8)}, ShapeError, "positions turns 8 features, and a head has 4"),
    ({"positions": ch.ALiBi.for_heads(8)}, ShapeError, "slopes for 8 heads, the layer 4"),
    ({"positions": RelativePositions(2)}, ShapeError, "a table for 2 heads, the layer 4"),
]


@pytest.mark.parametrize(("wrong", "kind", "text"), MAKING, ids=lambda x: str(x)[:40])
def test_a_layer_that_cannot_be(wrong: dict[str, Any], kind: type[ClearheadError], text: str) -> None:
    with pytest.raises(kind, match=text):
        MultiHeadAttention(**{"embed_dim": 16, "num_heads": 4, "causal": True} | wrong)


X = torch.randn(2, 5, 16)
CALLS: list[tuple[dict[str, Any], dict[str, Any], type[ClearheadError], str]] = [
    (
        {},
        {"query": X[0, 0]},
        ShapeError,
        r"query must have shape \(B, L, features\) or \(L, features\), got \(16,\)",
    ),
    ({"batch_first": False}, {"query": X[None]}, ShapeError, r"\(L, B, features\)"),
    ({}, {"query": X[..., :8]}, ShapeError, r"query must have 16 features, got \(2, 5, 8\)"),
    ({}, {"query": X[:, :0]}, ShapeError, "query is empty"),
    ({"kdim": 8}, {"query": X}, ArgumentError, "key must be given: this layer takes keys of 8"),
    ({}, {"query": X, "value": X}, ArgumentError, "value was given without key"),
    (
        {"kdim": 8},
        {"query": X, "key": X[..., :8]},
        ShapeError,
        r"value must have 16 features, got \(2, 5, 8\) \(the key, as no value was given\)",
    ),
    ({}, {"query": X, "key": X[0]}, ShapeError, "query has 3 axes and key 2"),
    ({}, {"query": X, "key": X[:1]}, ShapeError, "batches of 2, 1 and 1"),
    ({}, {"query": X, "key": X, "value": X[:, :2]}, ShapeError, "key has length 5 and value 2"),
    (
        {},
        {"query": X, "positions": torch.arange(5)},
        ArgumentError,
        "positions and key_positions are for rotary layers",
    ),
    ({"positions": "alibi"}, {"query": X, "positions": torch.arange(5)}, ArgumentError, "for rotary layers"),
    (
        {"positions": "rotary"},
        {"query": X, "positions": torch.arange(4)},
        ShapeError,
        r"positions must have shape \(5,\) or \(2, 5\), got \(4,\)",
    ),
    (
        {"positions": "rotary"},
        {"query": X, "positions": torch.ones(3, 5).long()},
        ShapeError,
        r"got \(3, 5\)",
    ),
    (
        {"positions": "rotary"},
        {"query": X, "positions": torch.ones(5)},
        DTypeError,
        r"positions must be integers, got torch\.float32",
    ),
    (
        {"positions": "rotary"},
        {"query": X, "positions": [0, 1]},
        DTypeError,
        "positions must be a tensor of integers, got list",
    ),
    (
        {"positions": "rotary"},
        {"query": X, "key_positions": torch.arange(5)},
        ArgumentError,
        "key_positions is for cross-attention",
    ),
    (
        {"positions": "rotary"},
        {"query": X, "key": X, "key_positions": torch.arange(2)},
        ShapeError,
        "key_positions must have shape",
    ),
    (
        {"positions": "alibi"},
        {"query": X, "mask": torch.randn(5, 5)},
        ArgumentError,
        "mask holds additive floats, and this layer has a bias by distance",
    ),
]


@pytest.mark.parametrize(
    ("form", "call", "kind", "text"), CALLS, ids=lambda x: str(x)[:40] if isinstance(x, str) else ""
)
def test_a_call_that_cannot_be(
    form: dict[str, Any], call: dict[str, Any], kind: type[ClearheadError], text: str
) -> None:
    layer = MultiHeadAttention(16, 4, **form)
    with pytest.raises(kind, match=text):
        layer(**call)


def test_positions_that_cannot_be() -> None:
    for dim in (0, 3, 2.0, True):
        with pytest.raises(ArgumentError, match="Rotary dim must be an even integer of at least 2"):
            Rotary(dim)
    for base in (0, -1.0, float("inf"), "10000"):
        with pytest.raises(ArgumentError, match="Rotary base must be a positive number"):
            Rotary(4, base=base)
    with pytest.raises(ArgumentError, match="num_heads must be an integer of at least 1"):
        RelativePositions(0)
    with pytest.raises(ArgumentError, match="needs at least 4 buckets"):
        RelativePositions(2, buckets=3)


def test_a_decoder_that_cannot_be_or_is_asked_wrongly() -> None:
    with pytest.raises(ArgumentError, match="num_layers must be an integer of at least 1, got 0"):
        Decoder(10, 8, 0, 2)
    with pytest.raises(ArgumentError, match="hidden_dim must be an integer of at least 1"):
        Block(8, 2, hidden_dim=0)
    model = Decoder(10, 8, 1, 2)
    with pytest.raises(DTypeError, match=r"ids must be a tensor of integers .* got torch\.float32"):
        model(torch.zeros(1, 2))
    with pytest.raises(ShapeError, match=r"ids must have shape \(B, L\), got \(3,\)"):
        model(torch.zeros(3, dtype=torch.int64))
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="last must be an integer of at least 1, got 0"):
        model(ids, last=0)
    with pytest.raises(ArgumentError, match="cache must be a whole cache with layers, got dict"):
        model(ids, cache={})
    with pytest.raises(ArgumentError, match="temperature must be 0 or more"):
        next(model.generate(ids, 1, cache=DynamicCache(), temperature=-1.0))
    with pytest.raises(ArgumentError, match="cache must be given"):
        next(model.generate(ids, 1, cache=None))
