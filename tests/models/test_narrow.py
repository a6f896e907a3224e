"""What a head may not see it cannot use, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.mask import Mask
from clearhead.models.active import Call
from clearhead.models.narrow import RULE, Rule, narrowed

from .families import BY_NAME, N, numbers

IDS = numbers(7, 1, N)


def run(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS).logits
    return logits


def hide(keys: list[int], *, heads: list[int] | None = None, module: nn.Module | None = None) -> Rule:
    """A rule that hides these keys from the queries after them, in some heads of some module."""

    def rule(call: Call) -> Mask | None:
        if module is not None and call.module is not module:
            return None
        Hq, Lq, Lk = call.query.shape[1], call.query.shape[2], call.key.shape[2]
        dense = torch.ones(1, Hq, Lq, Lk, dtype=torch.bool)
        for head in range(Hq) if heads is None else heads:
            for key in keys:
                dense[:, head, key + 1 :, key] = False
        return Mask(dense=dense)

    return rule


@pytest.fixture
def model() -> Any:
    return BY_NAME["llama"].build("clearhead")


@pytest.fixture
def eager() -> Any:
    return BY_NAME["llama"].build("eager")


def outputs_of_heads(model: Any, layer: int, work: Callable[[], Any]) -> Tensor:
    """What the heads of a layer hand to the output projection, (n, H, d)."""
    seen: list[Tensor] = []
    projection = model.model.layers[layer].self_attn.o_proj
    hook = projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    try:
        work()
    finally:
        hook.remove()
    return seen[0][0].unflatten(-1, (4, -1))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt-oss", "bert"])
def test_a_rule_that_says_nothing_changes_no_bit(family: str) -> None:
    model = BY_NAME[family].build("clearhead")
    calls: list[Call] = []
    before = run(model)
    with narrowed(lambda call: calls.append(call)):
        during = run(model)
    assert torch.equal(before, during)
    assert torch.equal(before, run(model))
    assert len(calls) == 2, "each layer is asked once"


def test_only_the_chosen_head_changes(model: Any) -> None:
    first = model.model.layers[0].self_attn
    before = outputs_of_heads(model, 0, lambda: run(model))
    with narrowed(hide([3], heads=[2], module=first)):
        after = outputs_of_heads(model, 0, lambda: run(model))
    assert torch.allclose(before[: 3 + 1], after[: 3 + 1], atol=1e-6), (
        "queries up to the key see what they saw"
    )
    others = [0, 1, 3]  # up to rounding: the kernel for a dense mask is another one
    assert torch.allclose(before[:, others], after[:, others], atol=1e-6)
    assert ((before[4:, 2] - after[4:, 2]).abs().amax(-1) > 1e-4).all()


def masked_eager(eager: Any, hidden: Tensor, layer: int | None) -> Tensor:
    """Eager logits with an additive mask of its own, (1, H, n, n) booleans, in one layer or in all."""
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    own = torch.zeros(1, 4, N, N).masked_fill(hidden | ~causal, torch.finfo().min)

    def swap(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": own}

    layers = eager.model.layers if layer is None else [eager.model.layers[layer]]
    hooks = [one.self_attn.register_forward_pre_hook(swap, with_kwargs=True) for one in layers]
    try:
        return run(eager)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("heads", [[0], [1, 3], None])
@pytest.mark.parametrize("layer", [0, 1, None])
def test_it_is_what_eager_code_with_a_dense_mask_gives(
    model: Any, eager: Any, heads: list[int] | None, layer: int | None
) -> None:
    hidden = torch.zeros(1, 4, N, N, dtype=torch.bool)
    for key in (2, 5):
        hidden[:, slice(None) if heads is None else heads, key + 1 :, key] = True
    module = None if layer is None else model.model.layers[layer].self_attn
    with narrowed(hide([2, 5], heads=heads, module=module)):
        got = run(model)
    assert torch.allclose(got, masked_eager(eager, hidden, layer), atol=1e-5)
    assert not torch.allclose(got, run(model), atol=1e-3)


def test_contexts_nest_and_both_rules_hold(model: Any) -> None:
    with narrowed(hide([2, 5], heads=[1])):
        wanted = run(model)
    with narrowed(hide([2], heads=[1])):
        outer = run(model)
        with narrowed(hide([5], heads=[1])):
            both = run(model)
        with narrowed(lambda call: None):
            assert torch.equal(run(model), outer)
        assert torch.equal(run(model), outer)
    assert torch.equal(both, wanted)
    assert not torch.equal(outer, wanted)


def test_an_error_inside_ends_the_narrowing_all_the_same(model: Any) -> None:
    before = run(model)

    def broken(call: Call) -> Mask | None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), narrowed(hide([1])), narrowed(broken):
        run(model)
    assert RULE.get() is None
    assert torch.equal(run(model), before)


def test_a_key_mask_of_one_row_for_all_queries_is_enough(model: Any) -> None:
    """As the documentation says: (1, Hq, 1, Lk)."""

    def rule(call: Call) -> Mask:
        dense = torch.ones(1, 4, 1, N, dtype=torch.bool)
        dense[:, 1, :, 0] = False
        return Mask(dense=dense)

    def same(call: Call) -> Mask:
        dense = torch.ones(1, 4, N, N, dtype=torch.bool)
        dense[:, 1, :, 0] = False
        return Mask(dense=dense)

    with narrowed(rule):
        short = run(model)
    with narrowed(same):
        long = run(model)
    assert torch.equal(short, long)
    assert short.isfinite().all(), "the first token sees nothing in that head, and that is no NaN"


def test_it_holds_while_a_cache_is_used(model: Any) -> None:
    """The answer is generated token by token; what is hidden stays hidden."""

    def rule(call: Call) -> Mask:
        dense = torch.ones(1, 1, 1, call.key.shape[2], dtype=torch.bool)
        dense[..., 3] = False
        return Mask(dense=dense)

    with narrowed(rule), torch.no_grad():
        whole = model(input_ids=IDS).logits[:, -1]
        cache = model(input_ids=IDS[:, :-1], use_cache=True).cache
        last = model(input_ids=IDS[:, -1:], cache=cache).logits[:, -1]
    assert torch.allclose(whole, last, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "t5"])
def test_a_rule_is_told_how_the_scores_are_made(family: str) -> None:
    model: Any = BY_NAME[family].build("clearhead")
    calls: list[Call] = []
    with narrowed(lambda call: calls.append(call)), torch.no_grad():
        model(**BY_NAME[family].inputs(None))
    call = calls[0]
    if family == "gemma2":
        assert (call.scale, call.softcap) == (pytest.approx(13**-0.5), 2.0)
    elif family == "gpt-oss":
        assert call.sink_logits is not None
        assert call.sink_logits.shape == (4,)
    else:
        assert call.scale == 1.0
        assert call.bias is not None
        assert call.bias.shape[1:] == (4, N, N)
