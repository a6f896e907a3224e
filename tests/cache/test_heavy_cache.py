"""Of the keys, those that received most attention stay: exactly those that n x n weights say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from tests.models.families import BY_NAME, LLM, make, numbers
from torch import Tensor

import clearhead as ch
from clearhead.cache import HeavyHitterCache
from clearhead.cache.heavy import HeavyHitterLayer
from clearhead.errors import MaskError, ModelError

BUDGET, RECENT = 12, 5
B, HQ, HKV, D = 2, 6, 2, 8


class Reference:
    """Heavy hitters as the paper has them, with booleans over the whole text and weights written down."""

    def __init__(self, n: int) -> None:
        self.kept = torch.zeros(B, HKV, n, dtype=torch.bool)
        self.received = torch.zeros(B, HKV, n, dtype=torch.float64)

    def step(self, q: Tensor, k: Tensor, v: Tensor, seen: int) -> Tensor:
        """Queries (B, Hq, new, d) of the tokens from `seen` on, keys and values of all the text so far."""
        new, n, group = q.shape[2], k.shape[2], HQ // HKV
        self.kept[..., seen:n] = True
        visible = self.kept[:, :, None, :n].expand(B, HKV, new, n) & (
            torch.arange(n) <= torch.arange(seen, n)[:, None]
        )
        fit = q.double() @ k.double().repeat_interleave(group, 1).mT * D**-0.5
        weights = fit.masked_fill(~visible.repeat_interleave(group, 1), -torch.inf).softmax(-1)
        self.received[..., :n] += weights.view(B, HKV, group * new, n).sum(2)
        for b in range(B):
            for h in range(HKV):
                old = [j for j in range(n - RECENT) if self.kept[b, h, j]]
                old.sort(key=lambda j: float(self.received[b, h, j]))
                for j in old[: max(int(self.kept[b, h].sum()) - BUDGET, 0)]:
                    self.kept[b, h, j] = False
        return weights @ v.double().repeat_interleave(group, 1)


@pytest.mark.parametrize(
    "pieces", [[1] * 60, [30] + [1] * 30, [9, 1, 1, 1, 1, 20, 1, 5, 1, 1, 13, 2, 1, 1, 2]]
)
def test_it_keeps_exactly_the_keys_that_n_by_n_weights_say(pieces: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (2 * torch.randn(B, h, 60, D, generator=generator) for h in (HQ, HKV, HKV))
    layer, reference, seen = HeavyHitterLayer(BUDGET, RECENT), Reference(60), 0
    for new in pieces:
        now = slice(seen, seen + new)
        want = reference.step(q[:, :, now], k[:, :, : seen + new], v[:, :, : seen + new], seen)
        keys, first = layer.get_mask_sizes(new)
        held, values = layer.update(k[:, :, now], v[:, :, now])
        assert held.shape[2] == keys
        mask = ch.Mask(causal=True, offset=seen, key_offset=first)
        out, (lengths,) = ch.attention(q[:, :, now], held, values, mask=mask, observe=[ch.Entropy()])
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
        assert lengths.shape == (B, HQ, new)
        seen += new
        for b in range(B):
            for h in range(HKV):
                assert layer.kept()[b, h].tolist() == reference.kept[b, h].nonzero()[:, 0].tolist()
        assert layer.held == min(seen, BUDGET)
        assert layer.evicted == seen - layer.held


def test_the_rows_of_a_layer_are_the_tokens_that_it_names() -> None:
    layer = HeavyHitterLayer(BUDGET, RECENT)
    k = torch.randn(B, HKV, 40, D)
    for t in range(40):
        held, values = layer.update(k[:, :, t : t + 1], k[:, :, t : t + 1])
        ch.attention(torch.randn(B, HQ, 1, D), held, values)
    assert layer.keys is not None
    rows = k.gather(2, layer.positions.long()[..., None].expand(-1, -1, -1, D))
    assert torch.equal(layer.keys, rows)
    layer.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(layer.keys, rows[[1, 1]])
    assert torch.equal(layer.kept()[0], layer.kept()[1])


def test_each_layer_is_told_its_own_and_alike_when_watched() -> None:
    model, ids = BY_NAME["llama"].build("clearhead"), numbers(8, 1, 40)
    kept, logits = [], []
    for watched in (False, True):
        cache = HeavyHitterCache(model.config, budget=10)
        with torch.inference_mode():
            for piece in ids.split([20] + [1] * 20, 1):
                if watched:
                    segments = ch.Segments(torch.zeros(40, dtype=torch.long), ["all"])
                    with ch.observe(model, segments, [ch.Entropy()]):
                        out = model(piece, cache=cache)
                else:
                    out = model(piece, cache=cache)
        kept.append([layer.kept().tolist() for layer in cache.layers])
        logits.append(out.logits)
    assert kept[0] == kept[1]
    assert torch.equal(*logits)
    assert not torch.equal(cache.layers[0].received, cache.layers[1].received)


def test_what_it_takes_is_the_formula_and_its_accounts() -> None:
    config = tf.LlamaConfig(**{**LLM, "head_dim": 64})
    model = make(tf.LlamaForCausalLM, config, "clearhead")
    cache = HeavyHitterCache(config, budget=100)
    with torch.inference_mode():
        model(numbers(9, 1, 120), cache=cache)
    formula = 2 * 2 * 2 * 64 * 100 * 4
    assert formula < cache.nbytes < 1.05 * formula
    assert (cache.capacity, cache.recent, cache.evicted) == (100, 50, 20)


def test_models_that_look_by_distance_and_rows_with_padding_are_refused() -> None:
    for name in ("mistral", "gemma3"):
        model = BY_NAME[name].build("clearhead")
        with pytest.raises(MaskError, match=r"masks or biases by position \(window\)"):
            model(numbers(0, 1, 9), cache=HeavyHitterCache(model.config, budget=4))
    llama = BY_NAME["llama"].build("clearhead")
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[0, :2] = 0
    with pytest.raises(MaskError, match="pads would take"):
        llama(numbers(0, 1, 9), attention_mask=mask, cache=HeavyHitterCache(llama.config, budget=4))
    layer = HeavyHitterLayer(4, 2)
    k = torch.randn(1, 2, 3, 8)
    held, values = layer.update(k, k)
    with pytest.raises(MaskError, match="a bias"):
        ch.attention(torch.randn(1, 2, 3, 8), held, values, bias=ch.ALiBi.for_heads(2))


def test_a_call_that_failed_is_noticed_at_the_next() -> None:
    layer: Any = HeavyHitterLayer(4, 2)
    k = torch.randn(1, 1, 3, 8)
    layer.update(k, k)
    with pytest.raises(ModelError, match="never told to this cache"):
        layer.update(k, k)
    layer.reset()
    layer.update(k, k)
