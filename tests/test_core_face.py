"""The C++ core as Python sees it: what it refuses, how it is interrupted, and every kind of memory that it reads."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.backends import flatten, native
from clearhead.errors import ArgumentError

core = native.core()
needs_core = pytest.mark.skipif(core is None, reason="the C++ core is not built")
STUB = Path(native.__file__).parent.parent / "_core.pyi"
NO_LIMIT = flatten.NO_LIMIT
MASK = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NO_LIMIT, NO_LIMIT, *[0] * 16, None)


def forward(q: Tensor, k: Any, v: Any, /, *, Lk: int, threads: int = 1, **other: Any) -> Tensor:
    """One call of `_core.forward`; k and v are tuples or tensors, `other` replaces arguments by name."""
    rows = [flatten.rows(x) if isinstance(x, Tensor) else x for x in (q, k, v)]
    B, Hq, Lq, d = q.shape
    out = torch.empty(B, Hq, Lq, d)
    arguments = {
        "sizes": (B, Hq, other.pop("Hkv", Hq), Lq, Lk, d, d),
        **dict(zip("qkv", rows, strict=True)),
        "mask": None,
        "scale": d**-0.5,
        "softcap": 0.0,
        "bias": None,
        "relative": None,
        "sink": 0,
        "out": (out.data_ptr(), 0, *out.stride()[:3]),
        "lse": 0,
        "questions": None,
        "threads": threads,
    }
    assert core is not None
    core.forward(**arguments | other)
    return out


@needs_core
def test_the_stub_names_what_the_module_has() -> None:
    assert core is not None
    written: dict[str, list[str] | None] = {}
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            written[node.name] = [argument.arg for argument in node.args.args]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is None:
            written[node.target.id] = None
    there: dict[str, list[str] | None] = {}
    for name, value in vars(core).items():
        if not name.startswith("__"):
            found = re.match(rf"{name}\((.*)\) ->", value.__doc__ or "") if callable(value) else None
            there[name] = re.findall(r"(\w+): ", found.group(1)) if found else None
    assert written == there
    assert core.NO_LIMIT == NO_LIMIT


@needs_core
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("sizes", (1, 1), "sizes must have 7 items, got 2"),
        ("sizes", (1, 1, 1, 0, 1, 4, 4), "sizes must be at least 1, got (1, 1, 1, 0, 1, 4, 4)"),
        ("sizes", (1, 3, 2, 1, 1, 4, 4), "sizes: Hq must be a multiple of Hkv, got (1, 3, 2, 1, 1, 4, 4)"),
        ("q", (0, 0, 0, 0, 0), "q must have 6, 10 or 13 items, got 5"),
        ("k", (0, 9, 0, 0, 0, 1), "k: a type must be one of 0 to 3, got 9"),
        ("v", (0, 3, 0, 0, 0, 1), "v: int8 needs the address of its scales, got 0"),
        ("k", (0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 8, 0, 0), "k: the rows of a page must be at least 1, got 0"),
        ("k", (0, 0, 0, 0, 0, 2**64), f"k: item 5 must be an int of 64 bits, got {2**64}"),
        ("mask", MASK[:-1], "mask must have 29 items, got 28"),
        ("mask", (*MASK[:-1], MASK[1:]), "mask must have 29 items, got 28"),
        ("mask", ("causal", *MASK[1:]), "mask: item 0 must be an int of 64 bits, got 'causal'"),
        ("bias", (0, 0, 0, 0, 0), "bias must have 6 items, got 5"),
        ("relative", (0, 0), "relative must have 3 items, got 2"),
        ("out", (0,), "out must have 5 items, got 1"),
        ("questions", ((0, 0),), "question must have 11 items, got 2"),
        ("questions", ((11, *[0] * 10),), "question: a kind must be one of 0 to 10, got 11"),
        ("threads", 0, "threads must be at least 1, got 0"),
    ],
)
def test_a_tuple_that_is_not_laid_out_right_is_named(argument: str, value: Any, message: str) -> None:
    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ValueError, match=re.escape(message)):
        forward(q, q, q, Lk=1, **{argument: value})


@needs_core
def test_masks_are_joined_up_to_a_limit() -> None:
    q = torch.randn(1, 1, 3, 4)
    joined = MASK
    for _ in range(40):
        joined = (*MASK[:-1], joined)
    assert torch.equal(forward(q, q, q, Lk=3, mask=joined), forward(q, q, q, Lk=3))
    for _ in range(40):
        joined = (*MASK[:-1], joined)
    with pytest.raises(ValueError, match="mask: at most 64 masks can be joined"):
        forward(q, q, q, Lk=3, mask=joined)


@needs_core
@pytest.mark.parametrize("Lq", [1, 40])
def test_int8_rows_are_their_numbers_times_their_scale(Lq: int) -> None:
    torch.manual_seed(0)
    B, Hq, Hkv, Lk, d = 2, 4, 2, 300, 24
    q = torch.randn(B, Hq, Lq, d)
    whole = torch.randint(-127, 128, (2, B, Lk, Hkv, d), dtype=torch.int8).transpose(2, 3)
    scales = torch.rand(2, B, Hkv, Lk) / 64
    k, v = whole.float() * scales[..., None]
    rows = [
        (*flatten.rows(x), scale.data_ptr(), *scale.stride()) for x, scale in zip(whole, scales, strict=True)
    ]
    assert torch.allclose(
        forward(q, *rows, Lk=Lk, Hkv=Hkv), forward(q, k, v, Lk=Lk, Hkv=Hkv), rtol=1e-5, atol=1e-6
    )


@needs_core
@pytest.mark.parametrize("Lq", [1, 40])
def test_pages_in_any_order_give_the_bits_of_one_piece(Lq: int) -> None:
    torch.manual_seed(0)
    B, Hq, Hkv, Lk, d, page = 2, 4, 2, 150, 24, 16
    q, k, v = torch.randn(B, Hq, Lq, d), torch.randn(B, Hkv, Lk, d), torch.randn(B, Hkv, Lk, d)
    blocks = -(-Lk // page)
    table = torch.randperm(B * blocks).reshape(B, blocks).int()
    pools = []
    for whole in (k, v):
        pool = torch.full((B * blocks, Hkv, page, d), torch.nan)
        for b in range(B):
            for j in range(Lk):
                pool[table[b, j // page], :, j % page] = whole[b, :, j]
        pools.append(pool)
    rows = [(*flatten.rows(pool), 0, 0, 0, 0, table.data_ptr(), table.stride(0), page) for pool in pools]
    assert torch.equal(forward(q, *rows, Lk=Lk, Hkv=Hkv), forward(q, k, v, Lk=Lk, Hkv=Hkv))


@needs_core
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_gradients_come_through_out_and_through_lse(through: str) -> None:
    torch.manual_seed(0)
    Lq, Lk, d = 30, 50, 16
    q, k, v = (torch.randn(1, 2, n, d) for n in (Lq, Lk, Lk))
    lse = torch.empty(1, 2, Lq)
    out = forward(q, k, v, Lk=Lk, lse=lse.data_ptr())
    grad_out = torch.randn_like(out) if through != "lse" else None
    grad_lse = torch.randn_like(lse) if through != "out" else None
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * d**-0.5
    results = (scores.softmax(-1) @ leaves[2], scores.logsumexp(-1))
    asked = [(r, g.double()) for r, g in zip(results, (grad_out, grad_lse), strict=True) if g is not None]
    outputs, incoming = zip(*asked, strict=True)
    want = torch.autograd.grad(outputs, leaves, incoming, allow_unused=True)
    got = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    assert core is not None
    core.backward(
        (1, 2, 2, Lq, Lk, d, d),
        *map(flatten.rows, (q, k, v)),
        None,
        d**-0.5,
        0.0,
        None,
        None,
        0,
        flatten.rows(out),
        None if grad_out is None else flatten.rows(grad_out),
        lse.data_ptr(),
        0 if grad_lse is None else grad_lse.data_ptr(),
        tuple(x.data_ptr() for x in got),
        2,
    )
    for mine, true in zip(got, want, strict=True):
        assert torch.allclose(mine, torch.zeros_like(mine) if true is None else true.float(), atol=1e-5)


@needs_core
def test_eight_python_threads_at_once_get_the_right_bits() -> None:
    torch.manual_seed(0)
    calls = [torch.randn(1, 2, 50 + 37 * i, 32) for i in range(8)]
    want = [forward(q, q, q, Lk=q.shape[2]) for q in calls]
    wrong: list[int] = []

    def work(i: int) -> None:
        q = calls[i]
        for _ in range(20):
            if not torch.equal(forward(q, q, q, Lk=q.shape[2], threads=2), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_core
def test_other_python_threads_go_on_meanwhile() -> None:
    q = torch.randn(1, 8, 2048, 64)
    done = threading.Event()

    def work() -> None:
        forward(q, q, q, Lk=2048)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    steps = 0
    while not done.is_set():
        time.sleep(0.001)
        steps += 1
    thread.join()
    assert steps > 3, "the call held the GIL"


LONG = """
import signal, sys, threading, time
import torch
from clearhead import attention
q = torch.randn(1, 1, 1, 64).expand(1, 64, 1 << 17, 64)
print("ready", flush=True)
try:
    attention(q, q, q, backend="cpu")
except KeyboardInterrupt:
    sys.exit(7)
"""


@needs_core
def test_ctrl_c_ends_a_long_call_within_two_seconds() -> None:
    with subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        assert process.poll() is None
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 7
    assert time.monotonic() - start < 2


FULL = """
import resource
import torch
from clearhead.backends import native
core, d = native.core(), 1 << 21
x = torch.zeros(1, 1, 1, d)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
rows = (x.data_ptr(), 0, 0, 0, 0, 1)
try:
    core.forward((1, 1, 1, 64, 1, d, d), rows, rows, rows, None, 1.0, 0.0, None, None, 0,
                 (x.data_ptr(), 0, 0, 0, 0), 0, None, 1)
except MemoryError as error:
    print(error or "MemoryError")
"""


@needs_core
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says what a process uses")
def test_no_room_for_scratch_is_a_memory_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "attention: not enough memory for the scratch space of the threads\n"


# ---------------------------------------------------------------------- which core, and why none


@needs_core
def test_an_instruction_set_that_cannot_run_is_refused_with_those_that_can() -> None:
    assert core is not None
    before = core.isa()
    runs = ", ".join(isa.name for isa in native.isas() if isa.built and isa.runs_here)
    with pytest.raises(
        ArgumentError, match=rf"instruction set \(CLEARHEAD_ISA\) must be one of {runs}, got 'v5'"
    ):
        native.choose_isa("v5")
    assert core.isa() == before
    try:
        native.choose_isa("portable")
        assert core.isa() == "portable"
    finally:
        native.choose_isa(before)


@pytest.mark.parametrize("said", [None, "no working C++ compiler was found\n"])
def test_a_core_that_was_not_built_is_explained(
    said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "missing.txt"
    if said is not None:
        missing.write_text(said)
    monkeypatch.setattr(native, "_MISSING", missing)
    monkeypatch.setitem(sys.modules, "clearhead._core", None)
    module, why = native._loaded.__wrapped__()
    assert module is None
    assert why == f"clearhead is installed without its C++ core: {(said or 'it was not built').strip()}"


def test_a_core_that_cannot_be_loaded_says_what_the_loader_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("wrong ELF class")

    monkeypatch.setattr(native, "import_module", fail)
    assert native._loaded.__wrapped__() == (None, "the C++ core cannot be loaded: wrong ELF class")


def test_without_a_core_there_is_no_instruction_set_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", lambda: (None, "it was left at home"))
    assert native.isas() == []
    with pytest.raises(ArgumentError, match="'v3' cannot be chosen: it was left at home"):
        native.choose_isa("v3")
