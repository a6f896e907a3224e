"""What the benchmarks read: a real text of any length, as tokens of SmolLM2, and made-up tensors."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LICENSE = Path(__file__).parent.parent / "LICENSE"  # 11 KB of real English that every copy has
HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64  # of one SmolLM2-135M layer


def token_ids(tokenizer: Any, count: int, text: Path | None = None) -> Tensor:
    """Return the first `count` tokens of a text file (.gz too), repeated if it is too short: (1, count)."""
    path = LICENSE if text is None else text
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content = raw[: 16 * count].decode("utf-8", errors="ignore")  # a token is rarely as long
    ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    times = -(-count // len(ids))
    return torch.tensor([(ids * times)[:count]])


def even_segments(count: int, segments: int) -> Tensor:
    """Segment numbers of `count` tokens in `segments` contiguous parts, (count,)."""
    return torch.arange(count) * segments // count


def layer_inputs(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (1, 9, n, 64), k and v (1, 3, n, 64) of one SmolLM2-shaped layer."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(1, heads, n, HEAD_SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
