"""The compiled core where compiled code goes wrong: every instruction set, thread count, odd size and layout."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases import LAYOUTS, laid_out
from torch import Tensor

from clearhead import (
    Entropy,
    KeyMass,
    Mask,
    MaxWeight,
    MeanDistance,
    PooledMap,
    SegmentMass,
    SegmentOutput,
    TopKeys,
    Weights,
    attention,
)
from clearhead.backends import native

pytestmark = pytest.mark.skipif(native.core() is None, reason=native.why_not() or "no core")

ISAS = [isa.name for isa in native.isas() if isa.built and isa.runs_here]
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)
SIZES = (1, 7, 17, 63, 65, 127, 129, 1023)
CAUSAL = Mask(causal=True)


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run on the kernels of this instruction set."""
    core = native.core()
    assert core is not None
    before = core.isa()
    native.choose_isa(request.param)
    yield request.param
    native.choose_isa(before)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


every_isa = pytest.mark.parametrize("isa", ISAS, indirect=True)


def no_further_than_twice_torch(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> None:
    """out and lse against float64, beside plain torch in the inputs' dtype."""
    out, lse = attention(q, k, v, mask=mask, backend="cpu", return_lse=True, **options)
    truth, truth_lse = attention(
        q.double(), k.double(), v.double(), mask=mask, backend="reference", return_lse=True, **options
    )
    group = q.shape[1] // k.shape[1]
    seen = mask.to_dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1])
    fit = q @ k.repeat_interleave(group, 1).transpose(2, 3) * options.get("scale", q.shape[3] ** -0.5)
    weights = fit.masked_fill(~seen, -torch.inf).softmax(-1)
    eager = weights.masked_fill(weights.isnan(), 0.0) @ v.repeat_interleave(group, 1)
    error, theirs = (out.double() - truth).abs().max(), (eager.double() - truth).abs().max()
    rounding = torch.finfo(q.dtype).eps * (1 + truth.abs().max())
    assert error <= 2 * theirs + 4 * rounding, (error.item(), theirs.item())
    assert torch.equal(lse.isinf(), truth_lse.isinf())
    gap = (lse.double() - truth_lse).masked_fill(truth_lse.isinf(), 0.0).abs()
    assert (gap <= 1e-5 * (1 + truth_lse.abs().masked_fill(truth_lse.isinf(), 0.0))).all(), gap.max().item()


@every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_odd_lengths(isa: str, dtype: torch.dtype, n: int) -> None:
    m = 65 if n == 1023 else n  # keep the squares small
    for Lq, Lk in {(n, m), (m, n), (1, n), (3, n)}:
        q, k, v = (normal(1, 3, L, 40, seed=i, dtype=dtype) for i, L in enumerate((Lq, Lk, Lk)))
        no_further_than_twice_torch(q, k[:, :1], v[:, :1], Mask())
        no_further_than_twice_torch(q, k, v, Mask(causal=True, window=19, sinks=2))
        no_further_than_twice_torch(q, k, v, CAUSAL)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1), (2, 3), (16, 16), (32, 32), (33, 31), (64, 64), (80, 80), (96, 48), (100, 7), (128, 128), (250, 255), (256, 256), (300, 20)],
)  # fmt: skip
def test_head_sizes(isa: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    d, dv = sizes
    for Lq in (70, 2):
        q, k, v = (normal(2, 4, Lq, d, dtype=dtype), normal(2, 2, 70, d, seed=1, dtype=dtype), normal(2, 2, 70, dv, seed=2, dtype=dtype))  # fmt: skip
        no_further_than_twice_torch(q, k, v, CAUSAL)


@every_isa
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 2), (9, 3), (32, 1), (71, 1)])
@pytest.mark.parametrize("Lq", [1, 5, 40])
def test_grouped_heads(isa: str, heads: tuple[int, int], Lq: int) -> None:
    Hq, Hkv = heads
    q, k, v = normal(2, Hq, Lq, 32), normal(2, Hkv, 200, 32, seed=1), normal(2, Hkv, 200, 32, seed=2)
    no_further_than_twice_torch(q, k, v, Mask(causal=True, padding=[200, 130]))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("Lq", [1, 90])
def test_scores_as_far_as_ten_thousand(isa: str, dtype: torch.dtype, Lq: int) -> None:
    q, k, v = (normal(1, 2, n, 64, seed=i) for i, n in enumerate((Lq, 90, 90)))
    q = q * (1e4 / (q @ k.transpose(2, 3)).abs().max()).sqrt()
    k = k * (1e4 / (q @ k.transpose(2, 3)).abs().max())
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    for mask in (Mask(), CAUSAL):
        out, lse = attention(q, k, v, mask=mask, scale=1.0, backend="cpu", return_lse=True)
        want, want_lse = attention(
            q.double(), k.double(), v.double(), mask=mask, scale=1.0, backend="reference", return_lse=True
        )
        assert out.isfinite().all()
        assert torch.allclose(lse.double(), want_lse, rtol=1e-6, atol=1e-3)
        # a score of 1e4 is known to 1e-3 in float32, and so is a weight
        assert (out.double() - want).abs().max() <= 1e-2 + 4 * torch.finfo(dtype).eps


@every_isa
def test_a_row_that_sees_one_key_is_that_keys_value(isa: str) -> None:
    for Lq in (1, 100):
        q, k, v = normal(1, 2, Lq, 16), normal(1, 2, 100, 16, seed=1), normal(1, 2, 100, 16, seed=2)
        seen = torch.zeros(Lq, 100, dtype=torch.bool)
        seen[:, 37] = True
        for mask in (
            Mask(dense=seen),
            Mask(padding=seen[:1]),
            Mask(documents=(seen[:, 37].long(), seen[0].long())),
        ):
            out, lse = attention(q, k, v, mask=mask, backend="cpu", return_lse=True)
            # p · v / p may be one unit in the last place off
            assert torch.allclose(out, v[:, :, 37:38].expand_as(out), rtol=3e-7, atol=0)
            score = (q * k[:, :, 37:38]).sum(-1) / 4
            assert torch.allclose(lse, score, atol=1e-5)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("Lq", [1, 33])
def test_rows_that_see_nothing_are_zero(isa: str, dtype: torch.dtype, Lq: int) -> None:
    q, k = normal(2, 2, Lq, 16, dtype=dtype), normal(2, 2, 33, 16, dtype=dtype, seed=1)
    mask = Mask(padding=[0, 33])
    asked = [Entropy(), TopKeys(2), KeyMass(), MeanDistance(), MaxWeight(), Weights(rows="all")]
    out, lse, seen = attention(q, k, k, mask=mask, observe=asked, return_lse=True, backend="cpu")
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert lse[1].isfinite().all()
    assert (seen[1].indices[0] == -1).all()
    for answer in (seen[0], seen[1].weights, *seen[2:]):
        assert (answer[0] == 0).all()
        assert answer.isfinite().all()


@every_isa
@pytest.mark.parametrize("Lq", [1, 4, 40])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_and_infinity_do_what_they_do_in_torchs_formula(
    isa: str, Lq: int, value: float, where: str
) -> None:
    tensors = {
        "q": normal(1, 2, Lq, 16),
        "k": normal(1, 2, 50, 16, seed=1),
        "v": normal(1, 2, 50, 16, seed=2),
    }
    row = {"q": 0, "k": 20, "v": 20}[where]
    tensors[where][0, 1, row, 3] = value
    q, k, v = tensors.values()
    want = (q @ k.transpose(2, 3) / 4).softmax(-1) @ v
    out = attention(q, k, v, backend="cpu")
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.isinf(), want.isinf())
    kept = want.isfinite()
    assert torch.allclose(out[kept], want[kept], atol=1e-5)


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("Lq", [2, 70])
def test_every_layout_gives_the_numbers_of_contiguous_memory(
    isa: str, dtype: torch.dtype, layout: str, Lq: int
) -> None:
    q, k, v = (normal(2, 4, n, 32, seed=i, dtype=dtype) for i, n in enumerate((Lq, 70, 70)))
    if layout == "expanded batch":
        q, k, v = (t[:1].repeat(2, 1, 1, 1) for t in (q, k, v))
    want = attention(q, k, v, mask=CAUSAL, backend="cpu")
    other = [laid_out(t, layout) for t in (q, k, v)]
    assert torch.allclose(attention(*other, mask=CAUSAL, backend="cpu").float(), want.float(), atol=1e-6)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("Lq", [1, 70])
def test_memory_that_is_aligned_to_nothing(isa: str, dtype: torch.dtype, Lq: int) -> None:
    def shifted(tensor: Tensor, by: int) -> Tensor:
        place = torch.full((tensor.numel() + 8,), torch.nan, dtype=dtype)[by : by + tensor.numel()]
        return place.view(tensor.shape).copy_(tensor)

    q, k, v = (normal(1, 2, n, 48, seed=i, dtype=dtype) for i, n in enumerate((Lq, 70, 70)))
    want = attention(q, k, v, mask=CAUSAL, backend="cpu")
    for by in (1, 3, 7):
        got = attention(*(shifted(t, by) for t in (q, k, v)), mask=CAUSAL, backend="cpu")
        assert torch.equal(got, want)


@every_isa
def test_memory_that_cannot_be_written_to(isa: str) -> None:
    arrays = [normal(1, 2, n, 32, seed=i).numpy() for i, n in enumerate((70, 70, 70))]
    want = attention(*(torch.from_numpy(a) for a in arrays), mask=CAUSAL, backend="cpu")
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(a.tobytes() for a in arrays))
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            whole = np.frombuffer(pages, dtype=np.float32).reshape(3, 1, 2, 70, 32)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, that such memory must not be written to
                tensors = [torch.from_numpy(part) for part in whole]
            out, seen = attention(*tensors, mask=CAUSAL, observe=[KeyMass(), TopKeys(3)], backend="cpu")
            few = attention(tensors[0][:, :, -1:], *tensors[1:], backend="cpu")
            del tensors, whole
    assert torch.equal(out, want)
    assert torch.allclose(few, want[:, :, -1:], atol=1e-6)
    assert seen[0].isfinite().all()


@every_isa
@pytest.mark.parametrize("Lq", [1, 70])
def test_axes_that_do_not_move(isa: str, Lq: int) -> None:
    one = normal(1, 1, 1, 32)
    q, k, v = (
        one.expand(2, 4, Lq, 32),
        one.expand(2, 2, 70, 32),
        normal(1, 2, 1, 32, seed=1).expand(2, 2, 70, 32),
    )
    want = attention(*(t.contiguous() for t in (q, k, v)), mask=CAUSAL, backend="cpu")
    assert torch.equal(attention(q, k, v, mask=CAUSAL, backend="cpu"), want)
    assert torch.allclose(want, v[:, :, :1].repeat_interleave(2, 1), atol=1e-6)
    number = torch.tensor(0.5).expand(2, 2, 70, 32)
    assert torch.allclose(
        attention(number[:, :, :Lq], number, number, backend="cpu"), number[:, :, :Lq], atol=1e-6
    )


@every_isa
def test_strides_beyond_two_thousand_million(isa: str) -> None:
    """Rows so far apart that offsets in 32 bits would wrap; the memory is only touched where rows are."""
    count, step = 3, 2**30 + 12_345
    with tempfile.TemporaryFile() as file:
        file.truncate((count - 1) * step * 2 + 64 * 2)  # a hole: takes no room
        flat = torch.from_file(
            f"/proc/self/fd/{file.fileno()}", shared=True, size=(count - 1) * step + 64, dtype=torch.bfloat16
        )
        far = flat.as_strided((1, 1, count, 64), (0, 0, step, 1))
        near = normal(1, 1, count, 64, dtype=torch.bfloat16)
        far.copy_(near)
        for Lq in (1, 3):
            q = normal(1, 2, Lq, 64, seed=1, dtype=torch.bfloat16)
            got, seen = attention(q, far, far, mask=CAUSAL, observe=KeyMass(), backend="cpu")
            want, true = attention(q, near, near, mask=CAUSAL, observe=KeyMass(), backend="cpu")
            assert torch.equal(got, want)
            assert torch.equal(seen[0], true[0])


# ---------------------------------------------------------------------- threads


def everything(n: int) -> list[Any]:
    ids = torch.arange(n) // 50 % 5
    return [
        SegmentMass(ids),
        SegmentMass(torch.arange(n) // 100),
        Entropy(rows=slice(3, None)),
        MaxWeight(),
        MeanDistance(),
        TopKeys(3),
        KeyMass(),
        KeyMass(rows="last"),
        PooledMap(5, 7),
        PooledMap(5, 7, "max"),
        SegmentOutput(ids, rows="last"),
        SegmentOutput(ids, norms=True, rows=[5, 2, 2, -1] if n > 5 else "all"),
        Weights(),
    ]


def flat(answers: Any) -> list[Tensor]:
    return [part for a in answers for part in (a if isinstance(a, tuple) else (a,))]


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("Lq", [1, 6, 300])
def test_outputs_and_answers_are_the_same_bits_at_any_number_of_threads(
    isa: str, dtype: torch.dtype, Lq: int
) -> None:
    q, k, v = (
        normal(2, h, n, 64, seed=i, dtype=dtype) for i, (h, n) in enumerate(((6, Lq), (2, 2100), (2, 2100)))
    )
    mask, before, found = Mask(causal=True, window=1900, sinks=4), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            asked = everything(2100) if Lq > 6 else [a for a in everything(2100) if a.rows in ("all", "last")]
            out, lse, seen = attention(q, k, v, mask=mask, observe=asked, return_lse=True, backend="cpu")
            bare = attention(q, k, v, mask=mask, backend="cpu")
            assert torch.equal(out, bare), "observing must not change the output"
            found.append([out, lse, *flat(seen)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for mine, one in zip(other, found[0], strict=True):
            assert torch.equal(mine, one)


@every_isa
@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
def test_gradients_are_those_of_float64(isa: str, threads: int) -> None:
    for Lq, mask in (
        (200, Mask(causal=True, window=90)),
        (200, Mask(padding=[200, 77])),
        (3, CAUSAL),
        (64, Mask()),
    ):
        inputs = [normal(2, h, n, 48, seed=i) for i, (h, n) in enumerate(((6, Lq), (2, 200), (2, 200)))]
        pulls = normal(2, 6, Lq, 48, seed=7), normal(2, 6, Lq, seed=8)
        grads = []
        for dtype, backend in ((torch.float32, "cpu"), (torch.float64, "reference")):
            leaves = [t.to(dtype).requires_grad_() for t in inputs]
            out, lse = attention(*leaves, mask=mask, softcap=4.0, backend=backend, return_lse=True)
            loss = (out * pulls[0]).sum() + (lse.masked_fill(lse.detach().isinf(), 0.0) * pulls[1]).sum()
            grads.append(torch.autograd.grad(loss, leaves))
        for mine, true in zip(*grads, strict=True):
            assert torch.allclose(mine.double(), true, atol=2e-5, rtol=1e-4)


@every_isa
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_in_half_precision(isa: str, dtype: torch.dtype) -> None:
    inputs = [normal(1, h, 130, 64, seed=i, dtype=dtype) for i, h in enumerate((4, 2, 2))]
    grads = []
    for kind, backend in ((dtype, "cpu"), (torch.float64, "reference"), (dtype, "sdpa")):
        leaves = [t.detach().to(kind).requires_grad_() for t in inputs]
        out = attention(*leaves, mask=CAUSAL, backend=backend)
        grads.append(torch.autograd.grad((out.double() * normal(*out.shape, seed=5)).sum(), leaves))
    for mine, true, theirs in zip(*grads, strict=True):
        assert mine.dtype == dtype
        rounding = torch.finfo(dtype).eps * (1 + true.abs().max())
        assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max() + 4 * rounding


def test_eight_threads_of_python_do_not_disturb_each_other() -> None:
    sizes = [(1, 5), (2, 700), (1, 64), (1, 1), (2, 129), (1, 1000), (1, 300), (2, 17)]
    calls = [tuple(normal(B, 4, n, 32, seed=10 * i + j) for j in range(3)) for i, (B, n) in enumerate(sizes)]
    asked = [Entropy(), KeyMass()]
    want = [attention(*call, mask=CAUSAL, observe=asked, backend="cpu") for call in calls]
    wrong: list[Any] = []

    def work(i: int) -> None:
        try:
            for _ in range(12):
                out, seen = attention(*calls[i], mask=CAUSAL, observe=asked, backend="cpu")
                same = torch.equal(out, want[i][0]) and all(map(torch.equal, seen, want[i][1]))
                if not same:
                    wrong.append(i)
        except Exception as error:
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize("what", ["forward", "observed", "backward"])
def test_a_long_call_can_be_interrupted(what: str) -> None:
    call = {
        "forward": "ch.attention(q, k, k)",
        "observed": "ch.attention(q, k, k, observe=[ch.Entropy(), ch.TopKeys(5)])",
        "backward": "torch.autograd.grad(out, leaf, one)",
    }[what]
    code = f"""
import torch, clearhead as ch
q, k = torch.randn(1, 16, 24_000, 128), torch.randn(1, 16, 24_000, 128)
leaf = q[:, :, :2000].clone().requires_grad_()
out = ch.attention(leaf, k, k) if {what == "backward"} else None
one = torch.ones(())
print("ready", flush=True)
try:
    while True:
        {call.replace("(out, leaf, one)", "(out.sum(), leaf, one, retain_graph=True)")}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.4)
        os.kill(process.pid, signal.SIGINT)
        start = time.monotonic()
        said, _ = process.communicate(timeout=30)
        assert said == "interrupted\n"
        assert time.monotonic() - start < 3  # two seconds, and one for the interpreter's own end
    finally:
        process.kill()
