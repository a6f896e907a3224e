"""Whole models against transformers' own attention: SmolLM2's prefill, a training step of a small GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from speed.case import Case, Cases, Error, Goal, Run, Setup, WrongResultError
from texts import even_segments, token_ids

SEGMENTS = 16
HIDDEN = 1e-3  # largest difference of hidden states and gradients, parts of the largest; of the loss itself


def cases(setup: Setup) -> Cases:
    """Prefill and training."""
    for n in (1024,) if setup.quick else (2048, 8192):
        for looking in (False,) if setup.quick else (False, True):
            yield partial(prefill, n, looking)
    yield partial(training, 1024)


@cache
def _smollm2() -> tuple[Any, Any]:
    model, tokenizer, *_ = ch.load("smollm2")
    return model, tokenizer


def _with(model: Any, name: str, run: Callable[[], Any]) -> Run:
    """The same model and weights, with another attention."""

    def call() -> object:
        model.config._attn_implementation = name
        return run()

    return call


def prefill(n: int, looking: bool) -> Case:
    """Without the output layer, whose logits are no matter of attention; by the backend that is chosen."""
    model, tokenizer = _smollm2()
    ids, segments = token_ids(tokenizer, n), even_segments(n, SEGMENTS)

    @torch.no_grad()
    def plain() -> Tensor:
        out: Tensor = model.model(ids, use_cache=False).last_hidden_state
        return out

    questions = [ch.SegmentMass, ch.Entropy(), ch.TopKeys(8), ch.KeyMass(), ch.MeanDistance(), ch.MaxWeight()]
    questions.append(ch.PooledMap(64, 64))

    @torch.no_grad()
    def observed() -> Tensor:
        with ch.observe(model, segments, questions):
            out: Tensor = model.model(ids, use_cache=False).last_hidden_state
        return out

    ours = _with(model, "clearhead", observed if looking else plain)
    peer = _with(model, "sdpa", plain)

    def check() -> dict[str, Error]:
        wanted, result = peer(), ours()
        assert isinstance(wanted, Tensor)
        assert isinstance(result, Tensor)
        off = (result - wanted).abs()
        if not float(off.max()) <= HIDDEN * float(wanted.abs().max()):
            raise WrongResultError(f"hidden states differ by {float(off.max()):.2g}")
        return {"ours against SDPA": Error(float(off.max()), float(off.mean()))}

    faster = Goal(1, 1) if looking else Goal(1.25, 1.5) if n == 8192 else Goal()
    return Case(
        "SmolLM2, prefill" + (f", {len(questions)} observables of every query" if looking else ""),
        f"{n} tokens",
        ours,
        {"transformers sdpa": peer},
        check,
        ratios={"transformers sdpa": faster},
        key=f"smollm2 {n}" + (" observed" if looking else ""),
    )


def training(n: int) -> Case:
    """Forward, loss, backward and an AdamW step: 4 layers as wide as GPT-2's smallest, random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        vocab_size=4096,
        n_positions=n,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(config.vocab_size, (1, n), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)  # weights stay what they are

    def gradients() -> float:
        optimizer.zero_grad()
        logits = model(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        loss.backward()
        return float(loss.detach())

    def step() -> object:
        gradients()
        optimizer.step()
        return None

    def check() -> dict[str, Error]:
        found: dict[str, tuple[float, Tensor]] = {}
        for name in ("eager", "sdpa", "clearhead"):
            model.config._attn_implementation = name
            loss = gradients()
            weights = model.transformer.h[0].attn.c_attn.weight.grad
            found[name] = (loss, weights.clone())
        wanted, result = found["eager"], found["clearhead"]
        off = (result[1] - wanted[1]).abs()
        limit = HIDDEN * float(wanted[1].abs().max())
        if not abs(result[0] - wanted[0]) <= HIDDEN or not float(off.max()) <= limit:
            raise WrongResultError(
                f"loss {result[0]} and {wanted[0]}, gradients differ by {float(off.max()):.2g}"
            )
        return {"ours against eager": Error(float(off.max()), float(off.mean()))}

    peers = {f"transformers {name}": _with(model, name, step) for name in ("sdpa", "eager")}
    return Case(
        "GPT-2 shape, training step",
        f"{n} tokens, 4 layers",
        _with(model, "clearhead", step),
        peers,
        check,
        ratios={"transformers sdpa": Goal(1.0, 1.0)},
        key=f"gpt2 {n}",
        note="3× on GPT-2 at 1K tokens (Dao et al. 2022) is against eager attention, on a GPU",
    )
