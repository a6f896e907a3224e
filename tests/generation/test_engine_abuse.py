"""Two hundred requests of every kind, a model that raises in the middle: nobody else notices, nothing leaks."""

from __future__ import annotations

import gc
import random
from typing import Any

import psutil
import pytest
from tests.generation.test_engine import (
    TroubleError,
    V,
    alone,
    everything_is_free,
    ids,
    tiny,
    troubled,
)

from clearhead.errors import ClearheadError
from clearhead.generation.engine import Engine


@pytest.mark.parametrize("threaded", [False, True], ids=["stepped", "in a thread"])
def test_two_hundred_requests_with_cancels_oversize_prompts_and_a_model_that_raises(threaded: bool) -> None:
    chance = random.Random(7)
    prompts = [ids(chance.randint(1, 60), seed) for seed in range(12)]
    expected = [alone(tiny(), prompt, 40) for prompt in prompts]
    hooks = troubled(tiny(), poison=V - 1)
    try:
        with Engine(tiny(), cache_bytes=9 * 4096, max_batch=6, step_tokens=32, page=16) as engine:
            if threaded:
                engine.start()
            good: list[tuple[Any, list[int]]] = []
            bad: list[Any] = []
            dropped: list[tuple[Any, list[int]]] = []
            refused = 0
            for _ in range(200):
                number, new = chance.randrange(len(prompts)), chance.randint(1, 40)
                kind = chance.random()
                if kind < 0.1:  # more than the model takes, more than the pool holds
                    with pytest.raises(ClearheadError):
                        engine.submit(ids(chance.choice([125, 400])), max_new_tokens=chance.choice([4, 300]))
                    refused += 1
                elif kind < 0.2:
                    place = chance.randint(0, 40)
                    bad.append(engine.submit([*ids(place), V - 1, *ids(3)], max_new_tokens=new))
                elif kind < 0.35:
                    handle = engine.submit(prompts[number], max_new_tokens=new, stop_tokens=())
                    dropped.append((handle, expected[number][:new]))
                else:
                    sampled = {"temperature": 0.9, "seed": 1} if kind > 0.9 else {}
                    handle = engine.submit(prompts[number], max_new_tokens=new, stop_tokens=(), **sampled)
                    good.append((handle, [] if sampled else expected[number][:new]))
                if not threaded:
                    for _ in range(chance.randint(0, 2)):
                        engine.step()
                if dropped and chance.random() < 0.2:
                    chance.choice(dropped)[0].cancel()
            for handle, _ in dropped:
                handle.cancel()
            for handle, tokens in good:
                got = handle.result(120)
                assert tokens in ([], got.ids)
                assert got.stopped == "length"
            for handle in bad:
                with pytest.raises(TroubleError):
                    handle.result(120)
            for handle, tokens in dropped:
                got = handle.result(120)
                assert got.ids == tokens[: got.count]
            assert refused > 5
            assert len(bad) > 5
            assert engine.counts.preempted > 0
            assert not engine._scheduler.requests
            assert everything_is_free(engine)
    finally:
        for hook in hooks:
            hook.remove()


def test_memory_comes_back_when_an_engine_is_closed() -> None:
    def held() -> int:
        gc.collect()
        return psutil.Process().memory_info().rss

    size = 160 << 20  # 40 MiB for each of four tensors: more than malloc keeps for itself
    before = None
    for _ in range(3):
        engine = Engine(tiny(), cache_bytes=size, page=16)
        for stored in (*engine.pool.keys, *engine.pool.values):
            stored.fill_(1.0)  # all of it is really there
        del stored
        engine.submit(ids(30), max_new_tokens=5).result()
        assert before is None or held() > before + size // 2
        engine.close()
        before = before or held()
    assert before is not None
    assert held() < before + size // 8
