"""Keys and values kept from token to token (claim M6): what that saves, what it takes, and in which form.

    python benchmarks/caching.py [--text FILE] [--quick]

SmolLM2, a token at a time behind 256 to 8192 tokens of text: with our cache and attention, with
transformers' own cache and its sdpa and eager attention, with bytes, while the source masses of every new
token are observed, and without a cache, everything computed anew. All forms of a length run in turns. Bytes:
what the cache says against 2 · layers · key heads · d · n · size. The new token is the same each time and is
taken out again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import clearhead as ch
from clearhead.cache import DynamicCache, Int8Cache
from record import arguments, save, table
from speed.pairs import Budget, Forms, Times, measure
from texts import even_segments, token_ids

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
ANEW = "everything anew"
OURS, SDPA, EAGER, BYTES, SEEN = (
    "ours",
    "transformers sdpa",
    "transformers eager",
    "ours int8",
    "ours, observed",
)
SEGMENTS = 4


def filled(model: Any, cache: Any, ids: Tensor) -> Any:
    """The cache with these tokens in it."""
    for part in ids.split(1024, 1):
        model(part, cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def step(model: Any, cache: Any, token: Tensor) -> Callable[[], object]:
    """One token, then taken out again."""

    def run() -> object:
        out = model(token, cache=cache, use_cache=True)
        cache.crop(-1)
        return out

    return run


def seen(model: Any, run: Callable[[], object], n: int) -> Callable[[], object]:
    """The same with the mass of each source observed, as `clearhead.generate` does."""
    segments = even_segments(n + 1, SEGMENTS)

    def observed() -> object:
        with ch.observe(model, segments, [ch.SegmentMass], rows="last"):
            return run()

    return observed


def forms(models: dict[str, Any], ids: Tensor, n: int) -> tuple[Forms, dict[str, int]]:
    """What runs in each round at this length, and the bytes of each cache."""
    behind, token = ids[:, :n], ids[:, n : n + 1]
    ours = models["clearhead"]
    caches = {
        OURS: filled(ours, DynamicCache(ours.config), behind),
        BYTES: filled(ours, Int8Cache(ours.config), behind),
        SDPA: filled(models["sdpa"], transformers.DynamicCache(), behind),
    }
    runs = {
        OURS: step(ours, caches[OURS], token),
        BYTES: step(ours, caches[BYTES], token),
        SDPA: step(models["sdpa"], caches[SDPA], token),
        SEEN: seen(ours, step(ours, filled(ours, DynamicCache(ours.config), behind), token), n),
        ANEW: lambda: ours(ids[:, : n + 1], use_cache=False, logits_to_keep=1),
    }
    if EAGER in models:
        # its prefill would write n x n weights down: the keys are those that sdpa's model computed
        runs[EAGER] = step(models[EAGER], filled(models["sdpa"], transformers.DynamicCache(), behind), token)
    return runs, {name: caches[name].nbytes for name in (OURS, BYTES)}


def line(n: int, times: Times, sizes: dict[str, int], config: Any) -> dict[str, Any]:
    """One row of the table."""
    heads, width = config.num_key_value_heads, config.head_dim
    formula = 2 * config.num_hidden_layers * heads * width * n * 4
    row: dict[str, Any] = {"tokens": n, "ours ms": 1e3 * times.median(OURS)}
    row |= {f"{name} ×": times.ratio(name, OURS).middle for name in times.seconds if name != OURS}
    row |= {"MB": sizes[OURS] / 2**20, "of formula": sizes[OURS] / formula, "int8 MB": sizes[BYTES] / 2**20}
    return row


@torch.inference_mode()
def measured(lengths: tuple[int, ...], text: Path | None, seconds: float) -> list[dict[str, Any]]:
    """A row per length."""
    names = {"clearhead": "clearhead", "sdpa": "sdpa", EAGER: "eager"}
    models, tokenizer = {}, None
    for name, kind in names.items():
        models[name], tokenizer, *_ = ch.load("smollm2", attn_implementation=kind)
    ids = token_ids(tokenizer, max(lengths) + 1, text)
    rows = []
    for n in lengths:
        runs, sizes = forms(models, ids, n)
        rows.append(line(n, measure(runs, Budget(seconds, least=3, most=30)), sizes, models["sdpa"].config))
        table(rows[-1:], f"{n} tokens; × is that form's time over ours")
    return rows


def main() -> None:
    """Measure, write."""
    options = arguments(__doc__, text=True).parse_args()
    rows = measured((64, 128) if options.quick else LENGTHS, options.text, 1 if options.quick else 12)
    save("caching", options, {"rows": rows})


if __name__ == "__main__":
    main()
