"""Fewer key/value heads: what they cost in quality and what they save in decoding (claims M2 and M4).

    python benchmarks/gqa.py [--text FILE] [--quick]

A decoder of 4 layers and 16 query heads learns characters, with 16 (multi-head), 8 and 2 (grouped-query) and
1 (multi-query) key/value heads: equal steps, the same pieces of text in the same order, three seeds. Then the
multi-head models are converted by mean-pooling their key/value heads and trained for 5% more steps (Ainslie
et al. 2023), and, to be fair, so are the models themselves. Quality: bits per character on text that was kept
out. Speed: time per token with 8192 tokens in the cache, all forms in turns.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.cache import DynamicCache
from clearhead.nn import Decoder, mha_to_gqa
from record import arguments, save, table
from small_models import Recipe, bits, corpus, describe, train, trained
from speed.pairs import Budget, measure

HEADS = 16
FORMS = {"MHA-16": 16, "GQA-8": 8, "GQA-2": 2, "MQA-1": 1}
SEEDS = (0, 1, 2)
MORE = 0.05  # of the steps, after conversion
CACHED = 8192


def quality(
    recipe: Recipe, learnt: Tensor, kept_out: Tensor, seeds: tuple[int, ...]
) -> dict[str, list[float]]:
    """Bits per character on kept-out text, per form and seed."""
    found: dict[str, list[float]] = {}
    for seed in seeds:
        for name, kv_heads in FORMS.items():
            one = dataclasses.replace(recipe, kv_heads=kv_heads, seed=seed)
            model = trained(one, learnt)
            note(found, name, bits(model, kept_out, one.length))
            if kv_heads != HEADS:
                continue
            steps = max(2, round(MORE * one.steps))
            more = dataclasses.replace(one, rate=one.rate / 4, seed=seed + 100)
            for groups in (HEADS, 8, 2, 1):
                pooled = mha_to_gqa(model, groups).train()
                label = f"MHA-16 to {groups}"
                if groups != HEADS:
                    note(found, f"{label}, untrained", bits(pooled.eval(), kept_out, one.length))
                train(pooled.train(), learnt, more, steps)
                note(found, f"{label}, 5% more steps", bits(pooled.eval(), kept_out, one.length))
    return found


def note(found: dict[str, list[float]], name: str, value: float) -> None:
    """Keep a figure and say so."""
    found.setdefault(name, []).append(value)
    print(f"  {name}: {value:.4f} bits per character", flush=True)


@torch.inference_mode()
def speed(recipe: Recipe, cached: int, seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds per token with a full cache, and its megabytes, per form."""
    forms: dict[str, Callable[[], object]] = {}
    sizes = {}
    for name, kv_heads in FORMS.items():
        model = dataclasses.replace(recipe, kv_heads=kv_heads).model().eval()
        cache = DynamicCache()
        for part in torch.randint(90, (1, cached)).split(1024, 1):
            model(part, cache=cache, last=1)
        sizes[name] = cache.nbytes / 2**20
        forms[name] = stepping(model, cache, torch.randint(90, (1, 1)))
    times = measure(forms, Budget(seconds, most=60))
    return {
        name: {
            "ms": 1e3 * times.median(name),
            "times as fast as MHA": times.ratio("MHA-16", name).middle,
            "cache MB": sizes[name],
        }
        for name in forms
    }


def stepping(model: Decoder, cache: Any, token: Tensor) -> Callable[[], object]:
    """One token with the cache as it is; the token is taken out again."""

    def step() -> object:
        out = model(token, cache=cache, last=1)
        cache.crop(-1)
        return out

    return step


def main() -> None:
    """Train, measure, write."""
    options = arguments(__doc__, text=True).parse_args()
    recipe = Recipe(steps=6, batch=2) if options.quick else Recipe()
    learnt, kept_out = corpus(options.text)
    found = quality(recipe, learnt, kept_out, SEEDS[:1] if options.quick else SEEDS)
    rows = {
        name: {
            "bits": statistics.mean(values),
            "spread": statistics.stdev(values) if len(values) > 1 else 0.0,
            "seeds": values,
        }
        for name, values in found.items()
    }
    table(
        [
            {"form": name, "bits per character": row["bits"], "spread": row["spread"]}
            for name, row in rows.items()
        ]
    )
    times = speed(recipe, 512 if options.quick else CACHED, 1 if options.quick else 8)
    table([{"form": name, **row} for name, row in times.items()], "decoding")
    save("gqa", options, {"quality": rows, "decoding": times, "cached": CACHED, "recipe": describe(recipe)})


if __name__ == "__main__":
    main()
