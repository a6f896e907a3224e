"""Short inputs, where a call costs more than its arithmetic: sentences, the first steps of decoding."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import clearhead as ch
from speed.case import Case, Cases, Goal, Run, Setup
from speed.oracle import causal, checked, everything
from speed.prefill import Shape

GOAL = Goal(0.95, 2.0)
BERT = [Shape(1, 12, 12, n, 64) for n in (16, 64, 128, 256)] + [Shape(8, 12, 12, 128, 64)]
CACHES = [Shape(1, 9, 3, n, 64) for n in (128, 256)] + [Shape(1, 32, 8, n, 128) for n in (128, 256)]
TOLERANCE = 2e-5


def cases(setup: Setup) -> Cases:
    """Encoders, a causal one, a padded batch, and decoding."""
    for shape in BERT[::2] if setup.quick else BERT:
        yield partial(short, setup, shape, shape.n, False)
    yield partial(short, setup, BERT[1], BERT[1].n, True)
    yield partial(padded, setup, BERT[-1])
    for shape in CACHES[::2] if setup.quick else CACHES:
        yield partial(short, setup, shape, 1, False)


def short(setup: Setup, shape: Shape, queries: int, is_causal: bool) -> Case:
    """`clearhead.attention` as one calls it, checks and choice included, against torch's function."""
    q, k, v = shape.inputs()
    q = q[:, :, -queries:].contiguous()
    mask = ch.Mask(causal=is_causal)
    grouped = shape.Hq != shape.Hkv
    ours: Run = lambda: setup.attention(q, k, v, mask=mask)  # noqa: E731
    peers: dict[str, Run] = {"SDPA": lambda: sdpa(q, k, v, is_causal=is_causal, enable_gqa=grouped)}
    if queries == 1:
        view = q.view(shape.B, shape.Hkv, -1, shape.d)
        peers["SDPA packed view"] = lambda: sdpa(view, k, v)
    what = "one query" if queries == 1 else "causal" if is_causal else "full"
    return Case(
        "small calls",
        f"{shape}, {what}",
        ours,
        peers,
        checked({"ours": ours, **peers}, (q, k, v), causal if is_causal else everything, TOLERANCE),
        operations=4.0 * shape.B * shape.Hq * shape.d * queries * shape.n,
        ratios={"SDPA": GOAL},
    )


def padded(setup: Setup, shape: Shape) -> Case:
    """A batch of sentences of unequal length, against SDPA with the mask that a model would make of them."""
    q, k, v = shape.inputs()
    real = torch.arange(shape.n)[None] < torch.linspace(shape.n // 4, shape.n, shape.B).long()[:, None]
    mask = ch.Mask(padding=real)
    dense = real[:, None, None].expand(-1, 1, shape.n, -1)
    ours: Run = lambda: setup.attention(q, k, v, mask=mask)  # noqa: E731
    peer: Run = lambda: sdpa(q, k, v, attn_mask=dense)  # noqa: E731
    one = slice(0, 1)
    length = int(real[0].sum())
    check = checked(
        {
            "ours": lambda: setup.attention(q, k, v, mask=mask)[one],
            "SDPA": lambda: sdpa(q, k, v, attn_mask=dense)[one],
        },
        (q[one], k[one], v[one]),
        lambda i, j: (j < length).expand(len(i), -1),
        TOLERANCE,
    )
    return Case(
        "small calls",
        f"{shape}, padded",
        ours,
        {"SDPA": peer},
        check,
        ratios={"SDPA": GOAL},
    )
