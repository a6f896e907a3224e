"""Layers with clearhead's own caches: exact ones change nothing, a stream with sinks is what the paper says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.nn.test_layer import loud

from clearhead import cache as caches
from clearhead.errors import ArgumentError, MaskError
from clearhead.nn import Decoder, MultiHeadAttention

POSITIONS = ["rotary", "alibi", "relative", None]
IDS = torch.randint(40, (2, 60), generator=torch.Generator().manual_seed(4))


def model(layers: int = 1, **form: Any) -> Decoder:
    made = loud(Decoder(40, 32, layers, 4, num_kv_heads=2, **form).double().eval())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter *= 0.3
    return made


def read(model: Decoder, cache: Any, *, first: int = 10) -> torch.Tensor:
    """Logits of the text, read in one piece and then token by token."""
    with torch.inference_mode():
        pieces = IDS.split([first] + [1] * (IDS.shape[1] - first), dim=1)
        return torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)


@pytest.mark.parametrize("positions", POSITIONS)
def test_caches_that_keep_everything_change_nothing(positions: str | None) -> None:
    made = model(2, positions=positions, window=13, sinks=2)
    want = made(IDS)
    for cache in (
        caches.DynamicCache(),
        caches.PagedCache(made.config, cache_bytes=2**20, dtype=torch.float64),
    ):
        torch.testing.assert_close(read(made, cache), want, atol=1e-9, rtol=1e-9)
        assert cache.get_seq_length() == 60


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(
    "own", [{}, {"window": 16, "sinks": 3}], ids=["layer sees all", "layer has the window"]
)
def test_a_stream_with_sinks_is_the_first_and_the_last_tokens_side_by_side(
    positions: str | None, own: dict[str, int]
) -> None:
    made = model(positions=positions, **own)
    near = [IDS[:, :t] if t <= 19 else torch.cat([IDS[:, :3], IDS[:, t - 16 : t]], 1) for t in range(1, 61)]
    want = torch.stack([made(text)[:, -1] for text in near], 1)  # numbered by their places in the cache
    cache = caches.SinkCache(made, sinks=3, window=16)
    torch.testing.assert_close(read(made, cache), want, atol=1e-9, rtol=1e-9)
    assert cache.evicted == 60 - (3 + 15)


def test_a_window_of_the_layer_holds_in_a_piece_longer_than_it() -> None:
    made = model(positions="rotary", window=16, sinks=3)
    out = read(made, caches.SinkCache(made, sinks=3, window=16), first=60)
    torch.testing.assert_close(out, made(IDS), atol=1e-9, rtol=1e-9)


def test_a_sliding_cache_is_the_window_of_the_layer() -> None:
    made = model(2, window=11)
    torch.testing.assert_close(read(made, caches.SlidingCache(window=11)), made(IDS), atol=1e-9, rtol=1e-9)
    with pytest.raises(ArgumentError, match="sinks=3 among them"):
        read(model(window=16, sinks=3), caches.SlidingCache(window=16))


def test_heavy_hitters_with_room_for_all_are_exact_and_a_window_refuses_them() -> None:
    made = model(2)
    torch.testing.assert_close(
        read(made, caches.HeavyHitterCache(budget=60)), made(IDS), atol=1e-9, rtol=1e-9
    )
    assert (read(made, caches.HeavyHitterCache(budget=20)) - made(IDS)).abs().max() > 1e-3
    with pytest.raises(MaskError, match="window"):
        read(model(window=16), caches.HeavyHitterCache(budget=60))


def test_bytes_in_place_of_floats_come_close() -> None:
    made = model(2).float()
    assert (read(made, caches.Int8Cache()) - made(IDS)).abs().max() < 0.1


def test_cross_attention_keeps_its_keys_in_any_cache_that_keeps_everything() -> None:
    layer = loud(MultiHeadAttention(16, 4, num_kv_heads=2))
    x, key = torch.randn(2, 5, 16), torch.randn(2, 9, 16)
    for made, close in ((caches.DynamicCache(), 1e-5), (caches.Int8Cache(), 0.05)):
        with torch.inference_mode():
            out = torch.cat([layer(x[:, i : i + 1], key, cache=made) for i in range(5)], 1)
        want = layer(x, key)
        assert (out - want).abs().max() < close * want.abs().max()
    for made in (
        caches.SlidingCache(window=4),
        caches.SinkCache(sinks=1, window=4),
        caches.HeavyHitterCache(budget=4),
    ):
        with torch.inference_mode(), pytest.raises(ArgumentError, match="cross-attention looks at all"):
            layer(x, key, cache=made)
