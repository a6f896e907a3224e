"""torch.compile, torch.export and torch.library see one operator, which computes what eager mode computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import fields
from torch import Tensor

from clearhead import ALiBi, Entropy, Mask, RelativeBias, attention, errors, operator
from clearhead.backends import registry

BACKENDS = registry.names()


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


Q, K, V = normal(2, 4, 21, 16), normal(2, 2, 21, 16, seed=1), normal(2, 2, 21, 16, seed=2)
BIAS, TABLE, SINK = normal(1, 4, 21, 21, seed=5), normal(8, 4, seed=3), normal(4, seed=4)
REAL = torch.arange(21) < torch.tensor([[21], [13]])


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")  # as inductor, without a C++ compiler


CALLS: dict[str, Callable[..., Any]] = {
    "plain": lambda q, k, v: attention(q, k, v),
    "window": lambda q, k, v: attention(q, k, v, mask=Mask(causal=True, window=7, sinks=2)),
    "padding": lambda q, k, v: attention(q, k, v, mask=Mask(causal=True) & Mask(padding=REAL)),
    "lengths": lambda q, k, v: attention(q, k, v, mask=Mask(padding=torch.tensor([21, 13]))),
    "documents": lambda q, k, v: attention(q, k, v, mask=Mask(documents=torch.arange(21) // 6)),
    "booleans": lambda q, k, v: attention(q, k, v, mask=REAL[:, None, None]),
    "additive": lambda q, k, v: attention(q, k, v, mask=torch.zeros(21, 21).masked_fill(~REAL[:1], -3.4028234663852886e38)),
    "bias": lambda q, k, v: attention(q, k, v, bias=BIAS, softcap=3.0, scale=0.3),
    "alibi": lambda q, k, v: attention(q, k, v, bias=ALiBi.for_heads(4), mask=Mask(causal=True)),
    "t5": lambda q, k, v: attention(q, k, v, bias=RelativeBias(TABLE, max_distance=9)),
    "sinks": lambda q, k, v: attention(q, k, v, sink_logits=SINK),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_compiled_call_is_one_operator_and_gives_what_eager_gives(call: str) -> None:
    leaves = [[t.clone().requires_grad_() for t in (Q, K, V)] for _ in range(2)]
    outs = [compiled(CALLS[call])(*leaves[0]), CALLS[call](*leaves[1])]
    assert torch.allclose(*outs, atol=1e-6)
    for out in outs:
        (out * normal(*out.shape, seed=9)).sum().backward()
    for mine, eager in zip(*leaves, strict=True):
        assert mine.grad is not None
        assert eager.grad is not None
        assert torch.allclose(mine.grad, eager.grad, atol=1e-5)


def test_sizes_may_change_without_compiling_for_each() -> None:
    counted = torch._dynamo.testing.CompileCounter()
    call = torch.compile(CALLS["window"], fullgraph=True, backend=counted, dynamic=True)
    counts = []
    for n in (21, 18, 5, 9):
        part = [t[:, :, :n].contiguous() for t in (Q, K, V)]
        assert torch.allclose(call(*part), CALLS["window"](*part), atol=1e-6)
        counts.append(counted.frame_count)
    assert counts[1:] == counts[1:2] * 3, counts


def test_gradients_reach_a_compiled_table_bias_and_sink() -> None:
    def call(table: Tensor, bias: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        low = torch.zeros(21, 21).masked_fill(~torch.ones(21, 21).tril().bool(), -torch.inf)
        both = attention(Q, K, V, mask=low, bias=RelativeBias(table), return_lse=True)
        return both[0] + attention(Q, K, V, bias=bias, sink_logits=sink), both[1]

    leaves = [
        [t.clone().requires_grad_() for t in (normal(8, 4), normal(1, 1, 21, 21), normal(4))]
        for _ in range(2)
    ]
    for run, inputs in zip((compiled(call), call), leaves, strict=True):
        out, lse = run(*inputs)
        (out.square().sum() + lse.sum()).backward()
    for mine, eager in zip(*leaves, strict=True):
        assert mine.grad is not None
        assert mine.grad.abs().sum() > 0
        assert torch.allclose(mine.grad, eager.grad, atol=1e-4)


def test_what_the_operator_cannot_say_leaves_the_graph_and_is_right() -> None:
    def call(q: Tensor) -> Any:
        out, (entropy,) = attention(q * 2, K, V, observe=Entropy())
        return out + 1, entropy

    got, want = torch.compile(call, backend="aot_eager")(Q), call(Q)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_errors_of_shapes_are_the_same_while_compiling() -> None:
    with pytest.raises(Exception, match="q has 3 heads and k 2"):
        compiled(CALLS["plain"])(Q[:, :3], K, V)


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = CALLS["window"](q, k, v)
        return out


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_layer_holds_the_operator(strict: bool) -> None:
    n = torch.export.Dim("n", min=2, max=4096)
    shapes = ({2: n}, {2: n}, {2: n})
    program = torch.export.export(Layer(), (Q, K, V), dynamic_shapes=shapes, strict=strict)
    called = [node.target for node in program.graph.nodes if "clearhead" in str(node.target)]
    assert called == [torch.ops.clearhead.attention.default]
    part = [t[:, :, :9] for t in (Q, K, V)]
    assert torch.allclose(program.module()(*part), CALLS["window"](*part), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operators_pass_torchs_own_checks(backend: str, dtype: torch.dtype) -> None:
    def leaf(*size: int, seed: int) -> Tensor:
        return normal(*size, seed=seed).to(dtype).requires_grad_()

    numbers, tensors = operator.packed(Mask(causal=True, window=5) & Mask(padding=torch.tensor([9, 6])))
    q = normal(2, 9, 4, 8).to(dtype).transpose(1, 2).requires_grad_()  # heads inside tokens
    k, v = leaf(2, 2, 9, 8, seed=1), leaf(2, 2, 9, 6, seed=2)
    bias, sink, values = leaf(1, 4, 1, 9, seed=3), leaf(4, seed=4), normal(4, 17, seed=5).requires_grad_()
    rest = (tensors, numbers, -8, 0.3, 2.0, backend)
    full, bare = (q, k, v, bias, sink, values, *rest), (q, k, v, None, None, None, *rest)
    for arguments in (full, bare):
        torch.library.opcheck(torch.ops.clearhead.attention, arguments)
        out, lse = (t.detach() for t in torch.ops.clearhead.attention(*arguments))
        detached = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
        for wanted in ([True, False, True], [False] * 3):
            torch.library.opcheck(
                torch.ops.clearhead.attention_backward,
                (torch.ones_like(out), None, out, lse, *detached, wanted),
                test_utils=("test_schema", "test_faketensor"),
            )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_mask_comes_back_from_numbers_and_tensors_as_it_was(data: st.DataObject) -> None:
    one, two = (Mask(**data.draw(fields(2, 2, 6, 6, frame=False))) for _ in range(2))
    numbers, tensors = operator.packed(one & two)
    assert all(isinstance(number, int) for number in numbers)
    assert operator.unpacked(numbers, tensors) == one & two


def test_fake_tensors_go_through_the_operator() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 4, 300, 16, dtype=torch.bfloat16)
        out, lse = attention(q, q, q, mask=Mask(causal=True), return_lse=True)
    assert out.shape == (2, 4, 300, 16)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_transformers_model_keeps_its_graph(padded: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="clearhead",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 50, (1, 11))
    real = torch.tensor([[0] * 3 + [1] * 8]) if padded else None
    with torch.no_grad():
        want = model(tokens, attention_mask=real).logits
        got = compiled(model)(tokens, attention_mask=real, use_cache=False).logits
    assert torch.allclose(got, want, atol=1e-5)


def test_second_derivatives_of_the_operator_are_refused() -> None:
    q = Q.clone().requires_grad_()
    out = torch.ops.clearhead.attention(
        q, K, V, None, None, None, [], operator.packed(Mask())[0], 0, 0.25, 0.0, ""
    )
    with pytest.raises((RuntimeError, errors.BackendError)):
        torch.autograd.grad(torch.autograd.grad(out[0].sum(), q, create_graph=True)[0].sum(), q)
