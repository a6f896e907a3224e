"""The backward pass alone, against torch's; forward and backward, against attention written down."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import clearhead as ch
from speed.case import Case, Cases, Error, Goal, Run, Setup
from speed.oracle import compare
from speed.prefill import Shape

QUICK = (Shape(1, 12, 12, 1024, 64),)
FULL = (*QUICK, Shape(1, 9, 3, 2048, 64), Shape(1, 16, 16, 1024, 128))
GPT2 = Shape(1, 12, 12, 1024, 64)
TOLERANCE = 1e-4  # parts of the largest gradient
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def cases(setup: Setup) -> Cases:
    """Both masks; GPT-2's shape at 1024 tokens."""
    for shape in QUICK if setup.quick else FULL:
        for is_causal in (False, True):
            yield partial(backward, setup, shape, is_causal)
    yield partial(both, setup, GPT2)


def backward(setup: Setup, shape: Shape, is_causal: bool) -> Case:
    """dq, dk and dv from a gradient of the output; the forward ran before the clock."""
    q, k, v = shape.inputs()
    incoming = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))
    mask = ch.Mask(causal=is_causal)
    fused: Attention = lambda *qkv: sdpa(*qkv, is_causal=is_causal, enable_gqa=shape.Hq != shape.Hkv)  # noqa: E731
    ours = _gradients(lambda *qkv: setup.attention(*qkv, mask=mask), (q, k, v), incoming)
    peer = _gradients(fused, (q, k, v), incoming)

    def check() -> dict[str, Error]:
        exact = _gradients(lambda *qkv: written_down(*qkv, is_causal), (q, k, v), incoming, torch.float64)()
        found = {}
        for name, run in (("ours", ours), ("SDPA", peer)):
            each = [compare(name, got, want, TOLERANCE) for got, want in zip(run(), exact, strict=True)]
            found[name] = Error(max(e.largest for e in each), max(e.mean for e in each))
        return found

    pairs = shape.n * (shape.n + 1) // 2 if is_causal else shape.n**2
    runs: dict[str, Run] = {"SDPA": peer}
    return Case(
        f"backward, {'causal' if is_causal else 'full'}",
        str(shape),
        ours,
        runs,
        check,
        operations=2.5 * shape.operations(pairs),  # five products where the forward has two
        ratios={"SDPA": Goal(1.4, 2.6) if is_causal else Goal(1.2, 2.0)},
        shares={"multiply": Goal()},
        key=f"backward {shape} {'causal' if is_causal else 'full'}",
    )


def both(setup: Setup, shape: Shape) -> Case:
    """A layer's attention in training, causal: forward and backward."""
    leaves = [t.requires_grad_() for t in shape.inputs()]
    incoming = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(7))
    mask = ch.Mask(causal=True)

    def run(attend: Attention) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, incoming)

    ours = run(lambda *qkv: setup.attention(*qkv, mask=mask))
    peers: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "SDPA": run(lambda *qkv: sdpa(*qkv, is_causal=True)),
        "written down": run(lambda *qkv: written_down(*qkv, True)),
    }

    def check() -> dict[str, Error]:
        wanted = peers["written down"]()
        each = [
            compare("ours", got, want.double(), TOLERANCE) for got, want in zip(ours(), wanted, strict=True)
        ]
        return {"ours": Error(max(e.largest for e in each), max(e.mean for e in each))}

    return Case(
        "forward + backward, causal",
        str(shape),
        ours,
        peers,
        check,
        operations=3.5 * shape.operations(shape.n * (shape.n + 1) // 2),
        shares={"multiply": Goal()},
        key="gpt2 layer",
        note="3× on GPT-2 at 1K tokens (Dao et al. 2022) is against attention written down, on a GPU",
    )


def written_down(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * q.shape[3] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1)


def _gradients(
    attend: Attention,
    qkv: tuple[Tensor, Tensor, Tensor],
    incoming: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [t.to(dtype, copy=True).requires_grad_() for t in qkv]
    with torch.enable_grad():
        out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, incoming.to(dtype), retain_graph=True)
