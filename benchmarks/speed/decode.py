"""One query per row against a long cache: float32, bfloat16, int8, one key head for all, pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import clearhead as ch
from speed import onnx
from speed.case import Case, Cases, Error, Goal, Run, Setup
from speed.oracle import checked, compare, everything, outputs
from speed.prefill import Shape

MAIN = Shape(1, 32, 8, 8192, 128)
MQA = Shape(1, 32, 1, 8192, 128)
MORE = (
    Shape(8, 32, 8, 4096, 128),
    Shape(8, 9, 3, 4096, 64),
    Shape(8, 12, 12, 2048, 64),
    Shape(1, 32, 8, 1000, 128),
)
PAGE = 64
INT8_TOLERANCE = 3e-2  # of rounding keys and values to 8 bits, parts of the largest number
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
READ = Goal(0.80, 0.85)


def cases(setup: Setup) -> Cases:
    """Everything that reads a cache once."""
    for shape in (MAIN,) if setup.quick else (MAIN, *MORE):
        yield partial(plain, setup, shape, torch.float32)
        yield partial(plain, setup, shape, torch.bfloat16)
        yield partial(int8, setup, shape)
    yield partial(plain, setup, MQA, torch.float32)
    if not setup.quick:
        yield partial(plain, setup, MQA, torch.bfloat16)
    yield partial(paged, setup, MAIN, torch.float32)
    if not setup.quick:
        yield partial(paged, setup, MAIN, torch.bfloat16)
        yield partial(paged, setup, MORE[1], torch.float32)


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """One random query per row, and a cache of n keys and values."""
    q, k, v = shape.inputs(dtype)
    return q[:, :, -1:].contiguous(), k, v


def plain(setup: Setup, shape: Shape, dtype: torch.dtype) -> Case:
    """A contiguous cache, against torch in the two ways in which one can ask it."""
    q, k, v = inputs(shape, dtype)
    half, mqa = dtype == torch.bfloat16, shape.Hkv == 1
    ours: Run = lambda: setup.attention(q, k, v)  # noqa: E731
    peers: dict[str, Run] = {}
    grouped = shape.Hq != shape.Hkv
    peers["SDPA enable_gqa" if grouped else "SDPA"] = lambda: sdpa(q, k, v, enable_gqa=grouped)
    if grouped:
        view = q.view(shape.B, shape.Hkv, -1, shape.d)
        peers["SDPA packed view"] = lambda: sdpa(view, k, v)
    if not half and not mqa:
        peers |= onnx.decode(q, k, v, setup.threads)
    check = checked({"ours": ours, **peers}, (q, k, v), everything, TOLERANCE[dtype])
    if half:
        wide = tuple(t.float() for t in (q, k, v))
        peers["ours fp32"] = lambda: setup.attention(*wide)
    ratios: dict[str, Goal] = {}
    shares = {"read": Goal(None, 0.80) if half else READ}
    if mqa:
        shares = {"read": READ, "multiply": Goal(0.70, 0.85)} if not half else {}
    elif shape != MAIN:
        shares = {"read": Goal()}
    elif half:
        ratios = {
            "SDPA enable_gqa": Goal(18, 40),
            "SDPA packed view": Goal(None, 6),
            "ours fp32": Goal(1.9, None),
        }
    else:
        ratios = {"SDPA enable_gqa": Goal(5, 6), "SDPA packed view": Goal(2, 2.5)}
    return Case(
        f"{'MQA ' if mqa else ''}decode {'bf16' if half else 'fp32'}",
        str(shape),
        ours,
        peers,
        check,
        operations=shape.operations(shape.n),
        stored=(k, v),
        bf16=half,
        ratios=ratios,
        shares=shares,
        key=f"decode {shape} {'bf16' if half else 'fp32'}",
    )


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Eight bits and one factor per row: (B, H, L, d) int8 and (B, H, L) float32."""
    scale = rows.abs().amax(-1).clamp(min=1e-12) / 127
    return (rows / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def int8(setup: Setup, shape: Shape) -> Case:
    """A cache of eight bits, against our own float32; the error is that of rounding the cache."""
    q, k, v = inputs(shape, torch.float32)
    small_k, small_v = (ch.Int8Rows(*quantised(t)) for t in (k, v))
    stored = [quantised(t)[0] for t in (k, v)]
    ours: Run = lambda: setup.attention(q, small_k, small_v)  # noqa: E731
    peer: Run = lambda: setup.attention(q, k, v)  # noqa: E731

    def check() -> dict[str, Error]:
        same = [whole[0].double() * whole[1][..., None].double() for whole in (quantised(k), quantised(v))]
        row, result = torch.tensor([0]), setup.attention(q, small_k, small_v)
        compare("ours, on the rounded cache", result, outputs(q, *same, row, everything), 2e-3)
        return {"ours": compare("ours", result, outputs(q, k, v, row, everything), INT8_TOLERANCE)}

    return Case(
        "decode int8",
        str(shape),
        ours,
        {"ours fp32": peer},
        check,
        operations=shape.operations(shape.n),
        stored=stored,
        ratios={"ours fp32": Goal(3, 3)} if shape == MAIN else {},
        shares={"read": Goal()},
    )


def paged(setup: Setup, shape: Shape, dtype: torch.dtype) -> Case:
    """The same cache in blocks of 64 rows that lie anywhere, against the contiguous one."""
    q, k, v = inputs(shape, dtype)
    count = shape.B * shape.n // PAGE
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    table = order.view(shape.B, -1).to(torch.int32)

    def scattered(whole: Tensor) -> Tensor:
        blocks = torch.empty(count, shape.Hkv, PAGE, shape.d, dtype=dtype)
        parts = whole.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)  # (B · blocks, Hkv, PAGE, d)
        blocks[order] = parts
        return blocks

    lengths = torch.full((shape.B,), shape.n)
    pages: tuple[Any, Any] = tuple(ch.Pages(scattered(t), table, lengths) for t in (k, v))
    ours: Run = lambda: setup.attention(q, *pages)  # noqa: E731
    peer: Run = lambda: setup.attention(q, k, v)  # noqa: E731
    name = "contiguous"
    # No loop over the contiguous bytes in between: it would leave them in a cache that two copies do not fit.
    return Case(
        f"paged decode {'bf16' if dtype == torch.bfloat16 else 'fp32'}",
        str(shape),
        ours,
        {name: peer},
        checked({"ours": ours, name: peer}, (q, k, v), everything, TOLERANCE[dtype]),
        operations=shape.operations(shape.n),
        bf16=dtype == torch.bfloat16,
        ratios={name: Goal(1 / 1.05, 1 / 1.05)},
    )
