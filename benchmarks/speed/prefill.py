"""Long inputs at once: full, causal, bfloat16; and where most pairs are hidden: windows, packed documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import clearhead as ch
from speed import onnx
from speed.case import NO_GOAL, Case, Cases, Goal, Run, Setup
from speed.oracle import causal, checked, everything

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}  # parts of the largest number


class Shape(NamedTuple):
    """Sizes of one call on n queries and keys."""

    B: int
    Hq: int
    Hkv: int
    n: int
    d: int

    def __str__(self) -> str:
        return f"{self.B},{self.Hq},{self.Hkv},{self.n},{self.d}"

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v."""
        generator = torch.Generator().manual_seed(self.n)
        heads = (self.Hq, self.Hkv, self.Hkv)
        q, k, v = (torch.randn(self.B, h, self.n, self.d, generator=generator).to(dtype) for h in heads)
        return q, k, v

    def operations(self, pairs: int) -> float:
        """Of both products, over this many visible pairs of one head."""
        return 4.0 * self.B * self.Hq * self.d * pairs


QUICK = (Shape(1, 12, 12, 1024, 64), Shape(1, 9, 3, 4096, 64), Shape(1, 16, 16, 1024, 128))
FULL = (
    *QUICK,
    Shape(1, 9, 3, 1024, 64),
    Shape(1, 9, 3, 2048, 64),
    Shape(1, 9, 3, 8192, 64),
    Shape(1, 32, 8, 4096, 128),
)
PLAIN_GOALS = {
    # (bfloat16, causal): of the ratio to SDPA, of the share of the multiply ceiling
    (False, False): (Goal(1.35, 2.6), Goal(0.80, 0.85)),
    (False, True): (Goal(1.65, 3.2), Goal(0.75, 0.80)),
    (True, False): (Goal(1.5, 4.8), NO_GOAL),
    (True, True): (Goal(1.5, 6.0), NO_GOAL),
}


def cases(setup: Setup) -> Cases:
    """Full and causal."""
    for dtype in (torch.float32, torch.bfloat16):
        for is_causal in (False, True):
            for shape in QUICK if setup.quick else FULL:
                yield partial(plain, setup, shape, dtype, is_causal)


def sparse_cases(setup: Setup) -> Cases:
    """Windows and documents."""
    yield partial(window, setup, Shape(1, 9, 3, 16384, 64), 1024)
    yield partial(window, setup, Shape(1, 9, 3, 16384, 64), 256)
    if not setup.quick:
        yield partial(window, setup, Shape(1, 9, 3, 4096, 64), 1024)
    yield partial(packed, setup, Shape(1, 9, 3, 16384, 64), 16)


def plain(setup: Setup, shape: Shape, dtype: torch.dtype, is_causal: bool) -> Case:
    """Nothing hidden, or the future."""
    q, k, v = shape.inputs(dtype)
    mask = ch.Mask(causal=True) if is_causal else None
    ours: Run = lambda: setup.attention(q, k, v, mask=mask)  # noqa: E731
    peers: dict[str, Run] = {
        "SDPA": lambda: sdpa(q, k, v, is_causal=is_causal, enable_gqa=shape.Hq != shape.Hkv)
    }
    half = dtype == torch.bfloat16
    if is_causal and not half and shape.n <= 4096:
        peers |= onnx.prefill(q, k, v, setup.threads)
    ratio, share = PLAIN_GOALS[half, is_causal]
    sees = causal if is_causal else everything
    pairs = shape.n * (shape.n + 1) // 2 if is_causal else shape.n**2
    return Case(
        f"prefill {'bf16' if half else 'fp32'}, {'causal' if is_causal else 'full'}",
        str(shape),
        ours,
        peers,
        checked({"ours": ours, **peers}, (q, k, v), sees, TOLERANCE[dtype]),
        operations=shape.operations(pairs),
        bf16=half,
        ratios={"SDPA": ratio},
        shares={"multiply": share},
        error_of="SDPA" if half else "",
        key=f"prefill {shape} {'bf16' if half else 'fp32'} {'causal' if is_causal else 'full'}",
    )


def window(setup: Setup, shape: Shape, size: int, sinks: int = 4) -> Case:
    """A causal window and the first keys, against a mask written down and against FlexAttention."""
    q, k, v = shape.inputs()
    mask = ch.Mask(causal=True, window=size, sinks=sinks)
    ours: Run = lambda: setup.attention(q, k, v, mask=mask)  # noqa: E731

    def sees(i: Any, j: Any) -> Any:
        return (j <= i) & ((i - j < size) | (j < sinks))

    peers: dict[str, Run] = {}
    if size == 1024 or not setup.quick:
        place = torch.arange(shape.n)
        dense = sees(place[:, None], place[None])
        peers["SDPA with a mask"] = lambda: sdpa(q, k, v, attn_mask=dense, enable_gqa=True)
        if not setup.quick:  # it takes half a minute to compile
            peers["FlexAttention"] = flex(shape, sees, (q, k, v))
    pairs = sum(min(i + 1, size + min(sinks, max(0, i + 1 - size))) for i in range(shape.n))
    wide = size == 1024 and shape.n == 16384
    return Case(
        f"window {size} + {sinks} sinks",
        str(shape),
        ours,
        peers,
        checked({"ours": ours, **peers}, (q, k, v), sees, TOLERANCE[q.dtype]),
        operations=shape.operations(pairs),
        ratios={"SDPA with a mask": Goal(30, 50), "FlexAttention": Goal(4.5, 6)} if wide else {},
        shares={"multiply": Goal(0.65, 0.60) if size == 256 else NO_GOAL},
    )


def packed(setup: Setup, shape: Shape, documents: int) -> Case:
    """Several documents in one row, against as many calls."""
    q, k, v = shape.inputs()
    length = shape.n // documents
    ids = torch.arange(shape.n) // length
    mask = ch.Mask(causal=True, documents=ids)
    alone = ch.Mask(causal=True)
    ours: Run = lambda: setup.attention(q, k, v, mask=mask)  # noqa: E731

    def calls() -> Tensor:
        parts = (
            tuple(t[:, :, start : start + length] for t in (q, k, v)) for start in range(0, shape.n, length)
        )
        return torch.cat([setup.attention(*part, mask=alone) for part in parts], 2)

    def separate() -> object:
        for start in range(0, shape.n, length):
            setup.attention(*(t[:, :, start : start + length] for t in (q, k, v)), mask=alone)
        return None

    def sees(i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i // length == j // length)

    name = f"{documents} calls"
    return Case(
        "packed documents",
        f"{shape}, {documents} documents",
        ours,
        {name: separate},
        checked({"ours": ours, name: calls}, (q, k, v), sees, TOLERANCE[q.dtype]),
        operations=shape.operations(documents * length * (length + 1) // 2),
        ratios={name: Goal(1 / 1.1, 1 / 1.1)},
        shares={"multiply": NO_GOAL},
    )


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(shape: Shape, sees: Callable[[Any, Any], Any], inputs: tuple[Tensor, Tensor, Tensor]) -> Run:
    """torch's FlexAttention, compiled, with the same mask in blocks. The first call takes half a minute."""
    from torch.nn.attention.flex_attention import create_block_mask

    def modifier(b: Any, h: Any, i: Any, j: Any) -> Any:
        return sees(i, j)

    blocks = create_block_mask(modifier, None, None, shape.n, shape.n, device="cpu")
    run = _compiled_flex()
    q, k, v = inputs
    return lambda: run(q, k, v, block_mask=blocks, enable_gqa=shape.Hq != shape.Hkv)
