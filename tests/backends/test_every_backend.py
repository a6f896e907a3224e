"""One suite over every registered backend: outputs, lse, gradients and observables against the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import Case, cases
from torch import Tensor

from clearhead import (
    Entropy,
    KeyMass,
    MaxWeight,
    MeanDistance,
    Observable,
    PooledMap,
    SegmentMass,
    SegmentOutput,
    TopKeys,
    Weights,
    attention,
)
from clearhead.backends import registry
from clearhead.backends.reference import weighted_sum
from clearhead.errors import BackendError
from clearhead.mask import Mask, as_mask

BACKENDS = registry.names()
# torch's fused kernel computes the lse of half types less exactly than float32 allows (4e-5 seen, torch 2.13).
HALF_SLACK = {torch.float64: 1.0, torch.float32: 1.0, torch.bfloat16: 10.0, torch.float16: 10.0}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def computes(backend: str, dtype: torch.dtype, **options: Any) -> bool:
    """Whether a backend takes this dtype and these options."""
    q = torch.zeros(1, 1, 1, 1, dtype=dtype)
    try:
        attention(q, q, q, backend=backend, **options)
    except BackendError:
        return False
    return True


PAIRS = [(backend, dtype) for backend in BACKENDS for dtype in DTYPES if computes(backend, dtype)]
WIDEST = {
    backend: torch.float64 if (backend, torch.float64) in PAIRS else torch.float32 for backend in BACKENDS
}


def run(case: Case, backend: str, **more: Any) -> Any:
    return attention(case.q, case.k, case.v, **case.options, backend=backend, **more)


def plain(case: Case) -> tuple[Tensor, Tensor]:
    """Attention as anyone would write it in PyTorch, in the inputs' dtype: out and weights (B, Hq, Lq, Lk).

    Written apart from the library, mask table included, so that a shared mistake would show.
    """
    B, Hq, Lq, d = case.q.shape
    group = Hq // case.k.shape[1]
    k, v = case.k.repeat_interleave(group, 1), case.v.repeat_interleave(group, 1)
    fit = case.q @ k.transpose(-1, -2) * case.options.get("scale", d**-0.5)
    if "softcap" in case.options:
        fit = case.options["softcap"] * (fit / case.options["softcap"]).tanh()
    if "bias" in case.options:
        fit = fit + case.options["bias"]
    mask = case.options.get("mask")
    if isinstance(mask, Mask):
        dense = mask.to_dense(Lq, k.shape[2], batch=B, heads=Hq)
        fit = fit.masked_fill(~dense, -torch.inf)
    elif mask is not None:
        fit = fit + mask
    if "sink_logits" in case.options:
        sink = case.options["sink_logits"][:, None, None].expand(B, Hq, Lq, 1)
        weights = torch.cat([fit, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = fit.softmax(-1)
    weights = weights.masked_fill(weights.isnan(), 0.0)  # a fully masked row
    return weights @ v, weights


def close(got: Tensor, want: Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    got, want = got.double(), want.double()
    assert got.shape == want.shape
    assert torch.equal(got.isinf(), want.isinf())
    error = (got - want).masked_fill(want.isinf(), 0.0).abs()
    assert not error.isnan().any()
    limit = slack * tolerance * (1 + want.masked_fill(want.isinf(), 0.0).abs())
    assert (error <= limit).all(), (error.max().item(), limit.max().item())


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_the_result_is_the_formula(backend: str, case: Case) -> None:
    case = case.to(WIDEST[backend])
    out, lse = run(case, backend, return_lse=True)
    want, _ = plain(case.to(torch.float64))
    close(out, want, WIDEST[backend])
    assert out.shape == (*case.q.shape[:3], case.v.shape[3])
    assert lse.shape == case.q.shape[:3]
    assert torch.equal(run(case, backend), out), "asking for lse must not change the output"


@pytest.mark.parametrize(("backend", "dtype"), PAIRS, ids=str)
@settings(max_examples=60, deadline=None)
@given(case=cases(longest=20))
def test_no_further_from_the_truth_than_twice_plain_torch(
    backend: str, dtype: torch.dtype, case: Case
) -> None:
    case = case.to(dtype)
    truth_out, truth_lse = run(case.to(torch.float64), "reference", return_lse=True)
    out, lse = run(case, backend, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.isfinite().all()
    eager = (plain(case)[0].double() - truth_out).abs().max()
    rounding = torch.finfo(dtype).eps * (1 + truth_out.abs().max())
    assert (out.double() - truth_out).abs().max() <= 2 * eager + 4 * rounding
    close(lse, truth_lse, torch.float64 if dtype == torch.float64 else torch.float32, slack=HALF_SLACK[dtype])


def leaves(case: Case) -> dict[str, Tensor]:
    named = {"q": case.q, "k": case.k, "v": case.v}
    named |= {name: case.options[name] for name in ("bias", "sink_logits") if name in case.options}
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in named.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(case=cases(gradients=True), through=st.sampled_from(["out", "lse", "both"]), data=st.data())
def test_gradients_are_those_of_the_formula(
    backend: str, case: Case, through: str, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    case, found = case.to(WIDEST[backend]), []
    for name in (backend, "formula"):
        case = case if name == backend else case.to(torch.float64)
        inputs = leaves(case)
        options = case.options | {n: t for n, t in inputs.items() if n not in "qkv"}
        if name == "formula":
            out, lse = differentiable(inputs, options, case)
        else:
            out, lse = attention(
                inputs["q"], inputs["k"], inputs["v"], **options, backend=name, return_lse=True
            )
        generator.manual_seed(0)
        pull = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
        pull_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse.dtype)
        loss = out.new_zeros(())
        if through in ("out", "both"):
            loss = loss + (out * pull).sum()
        if through in ("lse", "both"):
            seen = lse.detach().isfinite()
            loss = loss + (torch.where(seen, lse, 0.0) * pull_lse).sum()
        found.append(torch.autograd.grad(loss, list(inputs.values()), allow_unused=True))
        names = list(inputs)
    for name, got, want in zip(names, *found, strict=True):
        if want is None or got is None:  # the input does not matter here
            assert all(grad is None or not grad.any() for grad in (got, want)), name
            continue
        assert not got.isnan().any(), name
        close(got, want, WIDEST[backend], slack=100 if WIDEST[backend] == torch.float64 else 10)


def differentiable(inputs: dict[str, Tensor], options: dict[str, Any], case: Case) -> tuple[Tensor, Tensor]:
    """The formula again, with fully masked rows cut out of the graph (where softmax alone gives NaN)."""
    B, Hq, Lq, d = case.q.shape
    group = Hq // case.k.shape[1]
    k, v = inputs["k"].repeat_interleave(group, 1), inputs["v"].repeat_interleave(group, 1)
    fit = inputs["q"] @ k.transpose(-1, -2) * options.get("scale", d**-0.5)
    if "softcap" in options:
        fit = options["softcap"] * (fit / options["softcap"]).tanh()
    if "bias" in options:
        fit = fit + options["bias"]
    mask, extra = as_mask(options.get("mask"), torch.float64)
    if extra is not None:
        fit = fit + extra
    fit = fit.masked_fill(~mask.to_dense(Lq, k.shape[2], batch=B, heads=Hq), -torch.inf)
    if "sink_logits" in options:
        fit = torch.cat([fit, options["sink_logits"][:, None, None].expand(B, Hq, Lq, 1)], -1)
    dead = fit.detach().isneginf().all(-1)
    lse = torch.where(dead, -torch.inf, fit.masked_fill(dead[..., None], 0.0).logsumexp(-1))
    weights = (fit - lse.masked_fill(dead, 0.0)[..., None]).exp()[..., : k.shape[2]]
    return weights @ v, lse


# ---------------------------------------------------------------------- observables


@st.composite
def rows_of(draw: st.DrawFn, Lq: int) -> Any:
    kind = draw(st.sampled_from(["all", "last", "slice", "step", "index", "negative"]))
    if kind in ("all", "last"):
        return kind
    start = draw(st.integers(0, Lq - 1))
    if kind == "slice":
        return slice(start, draw(st.integers(start + 1, Lq)))
    if kind == "step":
        return slice(start, None, 2)
    if kind == "negative":
        return [-draw(st.integers(1, Lq))]
    return torch.tensor(draw(st.lists(st.integers(0, Lq - 1), min_size=1, max_size=5)))


def truth(
    kind: str, P: Tensor, v: Tensor, ids: Tensor, S: int, positions: tuple[Tensor, Tensor], size: Any
) -> Any:
    """Every built-in observable by a formula of its own, from full weights P (B, Hq, R, Lk)."""
    one_hot = torch.nn.functional.one_hot(ids, S).double()  # (B, Lk, S)
    if kind == "mass":
        return torch.einsum("bhij,bjs->bhis", P, one_hot)
    if kind == "entropy":
        return torch.special.entr(P).sum(-1)
    if kind == "key_mass":
        return P.sum(-2)
    if kind == "max_weight":
        return P.max(-1).values
    if kind == "mean_distance":
        q, k = positions
        return torch.einsum(
            "bhij,bij->bhi", P, (q[:, :, None] - k[None, None]).abs().double().expand(P.shape[0], -1, -1)
        )
    if kind == "weights":
        return P
    if kind in ("segment_output", "segment_norms"):
        vectors = torch.einsum("bhij,bjs,bhjd->bhisd", P, one_hot, v)
        return vectors if kind == "segment_output" else vectors.square().sum(-1).sqrt()
    rows, cols, how = size
    R, Lk = P.shape[-2:]
    map_ = torch.zeros(*P.shape[:2], rows, cols, dtype=torch.float64)
    count = torch.zeros(rows, cols)
    for i in range(R):
        for j in range(Lk):
            r = max(b for b in range(rows) if b * R // rows <= i)
            c = max(b for b in range(cols) if b * Lk // cols <= j)
            count[r, c] += 1
            if how == "mean":
                map_[:, :, r, c] += P[:, :, i, j]
            else:
                map_[:, :, r, c] = torch.maximum(map_[:, :, r, c], P[:, :, i, j])
    return map_ / count.clamp(min=1) if how == "mean" else map_


@pytest.mark.parametrize(("backend", "dtype"), [(b, d) for b, d in PAIRS if d != torch.float16], ids=str)
@settings(max_examples=60, deadline=None)
@given(case=cases(), data=st.data())
def test_every_observable_is_exact(backend: str, dtype: torch.dtype, case: Case, data: st.DataObject) -> None:
    case = case.to(dtype)
    wide = case.to(torch.float64)
    B, Hq, Lq, _ = case.q.shape
    Lk = case.k.shape[2]
    S = data.draw(st.integers(1, 4))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, S - 1), min_size=B * Lk, max_size=B * Lk))).reshape(
        B, Lk
    )
    if data.draw(st.booleans()):
        ids = ids.sort(-1).values
    if data.draw(st.booleans()):
        ids = ids[:1].expand(B, Lk)
    given_ids = ids[0] if bool((ids == ids[0]).all()) and data.draw(st.booleans()) else ids
    S = int(ids.max()) + 1
    rows = data.draw(rows_of(Lq))
    size = (
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 5)),
        data.draw(st.sampled_from(["mean", "max"])),
    )
    k = data.draw(st.integers(1, Lk + 2))
    observables: dict[str, Observable] = {
        "mass": SegmentMass(given_ids, rows=rows),
        "entropy": Entropy(rows=rows),
        "key_mass": KeyMass(rows=rows),
        "max_weight": MaxWeight(rows=rows),
        "mean_distance": MeanDistance(rows=rows),
        "segment_output": SegmentOutput(given_ids, rows=rows),
        "segment_norms": SegmentOutput(given_ids, norms=True, rows=rows),
        "weights": Weights(rows=rows),
        "pooled_map": PooledMap(*size, queries=rows),
    }
    out, seen = run(case, backend, observe=[*observables.values(), TopKeys(k, rows=rows)])
    assert torch.equal(out, run(case, backend)), "observing must not change the output"

    index = torch.arange(Lq)[-1:] if isinstance(rows, str) and rows == "last" else torch.arange(Lq)
    index = index if isinstance(rows, str) else index[rows]
    P = plain(wide)[1][:, :, index]
    v = wide.v.repeat_interleave(Hq // case.k.shape[1], 1)
    mask = case.options.get("mask")
    mask = mask if isinstance(mask, Mask) else Mask()
    offset = mask.offset if mask.offset is not None else mask.key_offset + Lk - Lq
    offset = offset[:, None] if isinstance(offset, Tensor) else offset
    positions = (index[None] + offset, torch.arange(Lk) + mask.key_offset)
    loose = torch.float64 if dtype == torch.float64 else torch.float32
    for (name, _), answer in zip(observables.items(), seen[:-1], strict=True):
        assert answer.dtype == loose, name
        close(answer, truth(name, P, v, ids, S, positions, size), loose, slack=2 * HALF_SLACK[dtype])
    top = seen[-1]
    assert top.weights.shape == top.indices.shape == (B, Hq, len(index), k)
    want = torch.nn.functional.pad(P, (0, k)).sort(-1, descending=True).values[..., :k]
    close(top.weights, want, loose, slack=2 * HALF_SLACK[dtype])
    assert torch.equal(top.indices < 0, top.weights <= 0)
    picked = P.gather(-1, top.indices.clamp(min=0)).masked_fill(top.indices < 0, 0.0)
    close(top.weights, picked, loose, slack=2 * HALF_SLACK[dtype])
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in top.indices.shape[:3])).tolist():
        used = top.indices[b, h, i][top.indices[b, h, i] >= 0].tolist()
        assert len(set(used)) == len(used)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "mask",
    [
        Mask(),
        Mask(causal=True),
        Mask(causal=True, window=200, sinks=4),
        Mask(causal=True, padding=[701, 333], padding_side="left"),
        Mask(documents=torch.arange(701) // 190),
        Mask(causal=True, chunk=256),
        Mask(causal=True, prefix=150),
    ],
    ids=repr,
)
def test_lengths_of_many_tiles(backend: str, mask: Mask) -> None:
    """Small random cases fit into one tile; here rows and keys are cut several times, at odd places."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 701, 16), torch.randn(2, 2, 701, 16), torch.randn(2, 2, 701, 24)
    ids = torch.arange(701) // 100
    asked = [
        SegmentMass(ids),
        Entropy(),
        TopKeys(3),
        KeyMass(),
        PooledMap(7, 9, "max"),
        SegmentOutput(ids, norms=True),
    ]
    wide = [t.double() for t in (q, k, v)]
    want, want_lse, truths = attention(*wide, mask=mask, backend="reference", observe=asked, return_lse=True)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse, seen = attention(*inputs, mask=mask, backend=backend, observe=asked, return_lse=True)
    close(out, want, torch.float32)
    close(lse, want_lse, torch.float32)
    for got, true in zip(seen, truths, strict=True):
        got, true = (got.weights, true.weights) if isinstance(got, tuple) else (got, true)
        close(got, true, torch.float32, slack=2)
    wide = [t.requires_grad_() for t in wide]
    attention(*wide, mask=mask, backend="reference").square().sum().backward()
    out.square().sum().backward()
    for mine, true in zip(inputs, wide, strict=True):
        assert mine.grad is not None
        assert true.grad is not None
        close(mine.grad, true.grad, torch.float32, slack=10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fully_masked_row_gives_zeros_and_minus_infinity(backend: str) -> None:
    q, k, v = (torch.randn(2, 2, 4, 8, requires_grad=True) for _ in range(3))
    mask = Mask(causal=True, padding=torch.tensor([[False] * 4, [False, False, True, True]]))
    out, lse, (entropy, weights, top) = attention(
        q,
        k,
        v,
        mask=mask,
        backend=backend,
        return_lse=True,
        observe=[Entropy(), Weights(rows="all"), TopKeys(2)],
    )
    dead = torch.tensor([[True] * 4, [True, True, False, False]])
    for b, i in dead.nonzero().tolist():
        assert (out[b, :, i] == 0).all()
        assert (lse[b, :, i] == -torch.inf).all()
        assert (entropy[b, :, i] == 0).all()
        assert (weights[b, :, i] == 0).all()
        assert (top.indices[b, :, i] == -1).all()
    assert lse[~dead[:, None].expand_as(lse)].isfinite().all()
    out.sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert (q.grad[0] == 0).all()
    assert (v.grad[1, :, :2] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_scores_do_not_overflow(backend: str) -> None:
    q = torch.full((1, 1, 3, 4), 200.0)
    out, lse = attention(q, q, q, mask=Mask(causal=True), backend=backend, return_lse=True)
    assert torch.equal(out, q)
    close(lse[0, 0], 80_000 + torch.tensor([1.0, 2.0, 3.0]).log(), torch.float32)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if computes(b, torch.float32, dropout=0.5)])
def test_dropout_keeps_the_mean_and_repeats_with_the_seed(backend: str) -> None:
    q, k = torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8)
    v = torch.ones(1, 2, 300, 4, requires_grad=True)

    def once(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return attention(q, k, v, dropout=0.4, backend=backend)

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))
    out = once(3)
    assert out.std() > 0.01
    assert abs(out.mean().item() - 1) < 0.02
    # the backward must use the same zeros: out is linear in v, so its gradient gives it back
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert torch.allclose((grad * v).sum(), out.sum(), rtol=1e-4)
    _, (entropy,) = attention(q, k, v, dropout=0.4, backend=backend, observe=[Entropy()])
    assert torch.allclose(entropy, attention(q, k, v, observe=[Entropy()], backend=backend)[1][0])


def test_weights_add_up_to_one_and_the_root_keeps_the_softmax_awake() -> None:
    """M1: rows add up to 1; without the division by √d_k they collapse on one key (Vaswani et al. 2017, 3.2.1)."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 64, 256), torch.randn(1, 1, 64, 256)
    _, (weights, sharp) = attention(q, k, k, observe=[Weights(rows="all"), MaxWeight()])
    _, (saturated,) = attention(q, k, k, scale=1.0, observe=[MaxWeight()])
    assert torch.allclose(weights.sum(-1), torch.ones(1, 1, 64))
    assert sharp.mean() < 0.2
    assert saturated.mean() > 0.8
    assert torch.equal(weighted_sum(torch.eye(64)[None, None], k), k)


def test_scratch_memory_of_inference_mode_is_not_used_outside() -> None:
    q = torch.randn(1, 2, 200, 8, requires_grad=True)
    mask = Mask(causal=True, window=20)
    with torch.inference_mode():
        attention(q, q, q, mask=mask, observe=[Entropy()])
    attention(q, q, q, mask=mask, observe=[Entropy()])[0].sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


class NestedCall(Observable):
    """An observable that calls attention itself, while the outer call's tiles are in use."""

    name = "nested"

    @property
    def axes(self) -> tuple[str, ...]:
        return ("batch", "head", "query")

    def start(self, setting: Any) -> Any:
        class Account:
            total = setting.zeros(1, 2, 300)

            def add(self, tile: Any) -> None:
                x = torch.randn(1, 2, 300, 8)
                attention(x, x, x, observe=[Entropy()], mask=Mask(causal=True, window=50))
                self.total[:, :, tile.rows] += tile.weights.sum(-1)

            def result(self) -> Tensor:
                return self.total

        return Account()


def test_a_call_within_a_call_gets_memory_of_its_own() -> None:
    q = torch.randn(1, 2, 300, 8)
    _, (total,) = attention(q, q, q, observe=[NestedCall()])
    assert torch.allclose(total, torch.ones(1, 2, 300), atol=1e-5)
