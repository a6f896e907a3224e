"""The small decoder: cached as uncached, one table of positions, and it learns."""

from __future__ import annotations

import math

import pytest
import torch
from tests.nn.test_layer import loud
from transformers import DynamicCache

import clearhead as ch
from clearhead.nn import Decoder


@pytest.mark.parametrize("positions", ["rotary", "alibi", "relative", None])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_generating_with_a_cache_is_generating_without(positions: str | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    model = Decoder(40, 32, 2, 4, num_kv_heads=kv_heads, window=7, sinks=2, positions=positions).eval()
    ids = torch.randint(40, (2, 5))
    cached = torch.stack(list(model.generate(ids, 12, cache=DynamicCache())), 1)
    text = ids
    for _ in range(12):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    assert torch.equal(cached, text[:, 5:])


def test_sampling_repeats_with_its_seed() -> None:
    model = Decoder(40, 16, 1, 2).eval()
    ids = torch.zeros(3, 2, dtype=torch.int64)

    def draw(seed: int) -> torch.Tensor:
        steps = model.generate(
            ids, 8, cache=DynamicCache(), temperature=1.0, generator=torch.manual_seed(seed)
        )
        return torch.stack(list(steps), 1)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_a_decoder_never_looks_ahead() -> None:
    model = loud(Decoder(40, 16, 2, 4, num_kv_heads=2)).eval()
    ids = torch.randint(40, (1, 9))
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 40
    torch.testing.assert_close(model(ids)[:, :6], model(changed)[:, :6])
    assert not torch.allclose(model(ids)[:, 6:], model(changed)[:, 6:])


def test_what_it_looked_at_is_told_layer_by_layer() -> None:
    model = Decoder(40, 16, 3, 4)
    logits, seen = model(torch.randint(40, (2, 6)), observe=[ch.Entropy(), ch.KeyMass()], last=1)
    assert logits.shape == (2, 1, 40)
    assert len(seen) == 3
    assert seen[2][0].shape == (2, 4, 6)
    assert seen[2][1].shape == (2, 4, 6)


@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_layers_share_their_positions(positions: str) -> None:
    model = Decoder(40, 16, 3, 4, positions=positions)
    assert all(block.attention.positions is model.positions for block in model.blocks)
    assert (model.rotary is not None) == (positions == "rotary")


def test_it_starts_from_no_opinion_and_learns() -> None:
    torch.manual_seed(0)
    model = Decoder(50, 32, 2, 4, num_kv_heads=2, qk_norm=True, sink_logits=True, softcap=20.0)
    ids = torch.arange(25).repeat(2, 2) % 7
    assert model.loss(ids).item() == pytest.approx(math.log(50), abs=0.5)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = model.loss(ids)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert model.loss(ids).item() < 0.3
