"""What does it cost to keep less? Perplexity of SmolLM2 with each kind of cache, at equal bytes.

    python benchmarks/caches.py [--text FILE] [--tokens N] [--chunk C] [--quick]

A text is read in pieces of C tokens through a cache. Counted is the loss of the tokens in its second half,
where the small caches have let go of most. The bytes are those that a cache of bytes takes for the whole
text, and fractions of it; a window, sinks and a window, and heavy hitters get as many tokens as fit in them,
what they keep beside the keys and values included. Whole caches (floats, bytes) are one point each.

In a piece every token has its own window; the sinks lie where they belong for its first token; heavy hitters
are chosen after each piece. --chunk 1 is generation to the letter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead.cache import DynamicCache, HeavyHitterCache, Int8Cache, SinkCache, SlidingCache
from clearhead.cache.sizes import layer_sizes
from record import arguments, save, table
from texts import token_ids

SINKS = 4
FRACTIONS = (1, 2, 4, 8)  # of the bytes of the cache of bytes
COLOURS = {"window": "#c2571a", "sinks + window": "#1f6f8b", "heavy hitters": "#4b7f3f"}
Row = dict[str, Any]


def kinds(model: Any) -> dict[str, Callable[[int], Any]]:
    """How to make each kind of cache for so many bytes over all layers; whole ones do not look at them."""
    sizes = layer_sizes(model.config)
    per_token = sum(layer.heads * (layer.d + layer.dv) * 4 for layer in sizes)
    accounts = sum(layer.heads * (8 + 4) for layer in sizes)  # a sum and a position per key
    sinks = sum(layer.heads * SINKS * (8 * layer.d + 4 * layer.dv) for layer in sizes)  # as they came
    return {
        "all, floats": lambda size: DynamicCache(model.config),
        "all, bytes": lambda size: Int8Cache(model.config),
        "window": lambda size: SlidingCache(model.config, window=size // per_token + 1),
        "sinks + window": lambda size: SinkCache(
            model, sinks=SINKS, window=(size - sinks) // per_token - SINKS
        ),
        "heavy hitters": lambda size: HeavyHitterCache(model.config, budget=size // (per_token + accounts)),
    }


def read(model: Any, cache: Any, ids: Tensor, chunk: int) -> tuple[float, int]:
    """Mean loss of the second half of the text, and the most bytes that the cache held between pieces."""
    losses, most, half = [], 0, ids.shape[1] // 2
    with torch.inference_mode():
        for start in range(0, ids.shape[1] - 1, chunk):
            piece = ids[:, start : start + chunk]
            logits = model(piece, cache=cache).logits[0]
            most = max(most, cache.nbytes)
            right = ids[0, start + 1 : start + 1 + len(logits)]
            if start >= half:
                losses.append(F.cross_entropy(logits[: len(right)], right, reduction="none"))
    return float(torch.cat(losses).mean()), most


def rows_of(model: Any, ids: Tensor, chunk: int, fractions: Sequence[int]) -> list[Row]:
    """The table: a line per cache and size, as they are measured."""
    tokens = ids.shape[1]
    made = kinds(model)
    rows: list[Row] = []
    limit = 0
    for name, make in made.items():
        for part in (1,) if name.startswith("all") else fractions:
            cache = make(limit // part)
            start = time.perf_counter()
            loss, size = read(model, cache, ids, chunk)
            if name == "all, bytes":
                limit = size
            whole = rows[0] if rows else {"bytes": size, "loss": loss}
            rows.append(
                {
                    "cache": name,
                    "keys of a head": cache.capacity or tokens,
                    "bytes": size,
                    "of all in floats": size / whole["bytes"],
                    "loss": loss,
                    "perplexity": math.exp(loss),
                    "times all": math.exp(loss - whole["loss"]),
                    "seconds": time.perf_counter() - start,
                }
            )
            print(f"{name}: {size / 2**20:.1f} MB, perplexity {math.exp(loss):.2f}", flush=True)
    return rows


def drawing(rows: list[Row]) -> str:
    """Perplexity over bytes, both on logarithmic axes, as an SVG."""
    wide, high, left, top = 640, 360, 70, 30
    sizes, worst = [row["bytes"] for row in rows], [row["perplexity"] for row in rows]
    low, far = math.log(min(sizes) * 0.9), math.log(max(sizes) * 1.1)
    under, over = math.log(min(worst) * 0.95), math.log(max(worst) * 1.05)

    def at(row: Row) -> tuple[float, float]:
        x = left + (math.log(row["bytes"]) - low) / (far - low) * (wide - left - 120)
        y = top + (over - math.log(row["perplexity"])) / (over - under) * (high - top - 50)
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        f'<text x="{left}" y="18">perplexity, by the bytes of the cache (both logarithmic)</text>',
        f'<path d="M{left} {top}V{high - 50}H{wide - 100}" fill="none" stroke="#555"/>',
    ]
    for name in dict.fromkeys(row["cache"] for row in rows):
        line = [row for row in rows if row["cache"] == name]
        colour = COLOURS.get(name, "#222")
        points = " ".join(f"{x},{y}" for x, y in map(at, line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for row in line:
            x, y = at(row)
            about = f"{name}: {row['bytes'] / 2**20:.1f} MB, perplexity {row['perplexity']:.2f}"
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"><title>{about}</title></circle>')
        x, y = at(line[0])
        parts.append(f'<text x="{x + 7}" y="{y + 4}" fill="{colour}">{name}</text>')
    for row in (min(rows, key=lambda r: r["bytes"]), max(rows, key=lambda r: r["bytes"])):
        x = at(row)[0]
        label = f"{row['bytes'] / 2**20:.1f} MB"
        parts.append(f'<text x="{x}" y="{high - 34}" text-anchor="middle">{label}</text>')
    for row in (min(rows, key=lambda r: r["loss"]), max(rows, key=lambda r: r["loss"])):
        label, y = f"{row['perplexity']:.1f}", at(row)[1] + 4
        parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Measure, show, save."""
    parser = arguments(__doc__, text=True)
    parser.add_argument("--tokens", type=int, help="tokens of the text (default: 8192; with --quick 512)")
    parser.add_argument("--chunk", type=int, default=32, help="tokens of a piece (default: 32)")
    options = parser.parse_args()
    tokens = options.tokens or (512 if options.quick else 8192)
    model, tokenizer, *_ = ch.load("smollm2")
    fractions = FRACTIONS[::2] if options.quick else FRACTIONS
    rows = rows_of(model, token_ids(tokenizer, tokens, options.text), options.chunk, fractions)
    table(rows, f"SmolLM2, {tokens} tokens in pieces of {options.chunk}, the second half counted")
    figures = {row["cache"]: row for row in rows if row["keys of a head"] == tokens}
    save("caches", options, figures, rows=rows, tokens=tokens, chunk=options.chunk)
    picture = (options.out or Path(__file__).parent / "results" / "caches.json").with_suffix(".svg")
    if options.out or not options.quick:
        picture.write_text(drawing(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
