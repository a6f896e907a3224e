"""Attention sinks (claim M7, Xiao et al. 2023): do heads rest on the first tokens, and what follows from it?

    python benchmarks/sinks.py [--text FILE] [--only PART ...] [--quick]

first   how much attention the first token gets, layer by layer, on a text, and with the first four tokens
        replaced by line breaks or by other words of the text: "even if they are not semantically important"
loss    perplexity of SmolLM2 past its trained length: all keys, the last W, the first 4 and the last W - 4
stream  a stream of tokens through sinks and a window, in time and memory that do not grow: SmolLM2 as far as
        --tokens says, a small model trained here for four million; it can be stopped and goes on where it was
speed   time per token against computing the window anew for each token (the paper: up to 22.2 times)
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead.cache import DynamicCache, SinkCache, SlidingCache
from record import arguments, save, table
from small_models import KEPT, Recipe, corpus, trained
from texts import token_ids

PARTS = ("first", "loss", "stream", "speed")
SINKS = 4
Step = Callable[[Tensor, Any], Tensor]  # ids (1, L) and a cache to logits (1, L, vocabulary)


def first(tokens: int, text: Path | None) -> dict[str, list[float]]:
    """Attention of later queries on the first token and on the first four: means per layer and beginning."""
    model, tokenizer, *_ = ch.load("smollm2")
    ids = token_ids(tokenizer, tokens, text)
    breaks, words = ids.clone(), ids.clone()
    breaks[0, :SINKS] = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    words[0, :SINKS] = ids[0, tokens // 2 : tokens // 2 + SINKS]
    found = {}
    segments = torch.full((tokens,), 2)
    segments[:SINKS] = 1
    segments[0] = 0
    for name, given in (("as it is", ids), ("line breaks", breaks), ("other words", words)):
        with torch.no_grad(), ch.observe(model, segments, [ch.SegmentMass]) as trace:
            model.model(given, use_cache=False)
        mass = torch.as_tensor(trace.mass)[:, :, tokens // 2 :].float()  # (layer, head, query, segment)
        found[f"{name}, first"] = mass[..., 0].mean((1, 2)).tolist()
        found[f"{name}, first four"] = mass[..., :2].sum(-1).mean((1, 2)).tolist()
    return found


def losses(step: Step, cache: Any, ids: Tensor, chunk: int) -> Iterator[Tensor]:
    """Nats of each token but the first, chunk by chunk, read through a cache."""
    carried = None
    for part in ids.split(chunk, 1):
        logits = step(part, cache).float()
        known = logits[:, :-1] if carried is None else torch.cat([carried, logits[:, :-1]], 1)
        yield F.cross_entropy(known[0], part[0, part.shape[1] - known.shape[1] :], reduction="none")
        carried = logits[:, -1:]


def perplexity(tokens: int, window: int, chunk: int, text: Path | None) -> dict[str, Any]:
    """Of SmolLM2 in stretches of an eighth of the text, for each cache."""
    model, tokenizer, *_ = ch.load("smollm2")
    ids = token_ids(tokenizer, tokens, text)
    step: Step = lambda part, cache: model(part, cache=cache, use_cache=True).logits  # noqa: E731
    caches = {
        "all keys": DynamicCache(),
        f"last {window}": SlidingCache(window=window),
        f"{SINKS} sinks, last {window - SINKS}": SinkCache(model, sinks=SINKS, window=window - SINKS),
    }
    rows: dict[str, Any] = {}
    for name, cache in caches.items():
        nats = torch.cat(list(losses(step, cache, ids, chunk)))
        parts = nats.split(-(-tokens // 8))
        rows[name] = {
            "perplexity": math.exp(nats[window:].mean()),
            "by stretch": [math.exp(part.mean()) for part in parts],
            "MB": cache.nbytes / 2**20,
        }
        print(f"  {name}: {rows[name]['perplexity']:.2f}", flush=True)
    return rows


def stream(
    name: str, step: Step, cache: Any, ids: Tensor, tokens: int, chunk: int, marks: int
) -> dict[str, Any]:
    """Read `ids` again and again up to `tokens`, `marks` points kept; goes on from what was kept before."""
    path = KEPT.parent / "streams" / f"{name}.pt"
    state: dict[str, Any] = {"done": 0, "points": [], "cache": cache}
    if path.exists():
        state = torch.load(path, weights_only=False)  # our own file
    every = max(chunk, tokens // marks)
    nats: list[Tensor] = []
    began, at = time.perf_counter(), state["done"]
    carried = None
    while state["done"] < tokens:
        places = (torch.arange(chunk) + state["done"]) % ids.shape[1]
        part = ids[:, places]
        logits = step(part, state["cache"]).float()
        known = logits[:, :-1] if carried is None else torch.cat([carried, logits[:, :-1]], 1)
        nats.append(F.cross_entropy(known[0], part[0, chunk - known.shape[1] :], reduction="none"))
        carried = logits[:, -1:]
        state["done"] += chunk
        if state["done"] - at >= every:
            now = time.perf_counter()
            point = {
                "token": state["done"],
                "perplexity": math.exp(torch.cat(nats).mean()),
                "ms per token": 1e3 * (now - began) / (state["done"] - at),
                "cache MB": state["cache"].nbytes / 2**20,
                "process MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
            state["points"].append(point)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
            print("  " + json.dumps(point), flush=True)
            began, at, nats = time.perf_counter(), state["done"], []
    return {"tokens": state["done"], "points": state["points"]}


def streams(tokens: int, small: int, window: int, text: Path | None) -> dict[str, Any]:
    """SmolLM2 and the small model."""
    model, tokenizer, *_ = ch.load("smollm2")
    ids = token_ids(tokenizer, max(64, min(tokens, 200_000)), text)
    step: Step = lambda part, cache: model(part, cache=cache, use_cache=True).logits  # noqa: E731
    cache = SinkCache(model, sinks=SINKS, window=window - SINKS)
    found = {"SmolLM2": stream(f"smollm2-{window}", step, cache, ids, tokens, 64, 20)}
    learnt, kept_out = corpus(text)
    recipe = Recipe(kv_heads=2)
    little = trained(recipe, learnt)
    width = recipe.length - SINKS
    one: Step = lambda part, cache: little(part, cache=cache)  # noqa: E731
    cache = SinkCache(little, sinks=SINKS, window=width)
    found["small model"] = stream("small", one, cache, kept_out[None], small, 256, 40)
    return found


def speed(windows: tuple[int, ...], rounds: int, text: Path | None) -> list[dict[str, Any]]:
    """Milliseconds per token: through sinks and window, and the window computed anew for each token."""
    model, tokenizer, *_ = ch.load("smollm2")
    ids = token_ids(tokenizer, 2 * max(windows) + rounds, text)
    rows = []
    for window in windows:
        cache = SinkCache(model, sinks=SINKS, window=window - SINKS)
        for part in ids[:, : 2 * window].split(256, 1):
            model(part, cache=cache, use_cache=True, logits_to_keep=1)
        kept, anew = [], []
        for i in range(rounds):
            token = ids[:, 2 * window + i, None]
            start = time.perf_counter()
            model(token, cache=cache, use_cache=True)
            middle = time.perf_counter()
            model(ids[:, window + i : 2 * window + i], use_cache=False, logits_to_keep=1)
            kept.append(middle - start)
            anew.append(time.perf_counter() - middle)
        rows.append(
            {
                "window": window,
                "sinks ms": 1e3 * statistics.median(kept),
                "anew ms": 1e3 * statistics.median(anew),
                "times as fast": statistics.median(b / a for a, b in zip(kept, anew, strict=True)),
            }
        )
    return rows


@torch.inference_mode()
def main() -> None:
    """Run the parts, write the figures of those that ran beside those that were there."""
    parser = arguments(__doc__, text=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts (default: all)")
    parser.add_argument("--tokens", type=int, default=100_000, help="how far SmolLM2 streams")
    parser.add_argument("--small", type=int, default=4_000_000, help="how far the small model streams")
    options = parser.parse_args()
    figures = run(options, options.only or PARTS)
    save("sinks", options, figures)


def run(options: argparse.Namespace, parts: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """The figures of these parts, added to those of an earlier result where only some are run."""
    quick, figures = options.quick, earlier(options)
    if "first" in parts:
        figures["first"] = first(256 if quick else 1024, options.text)
        rows = [{"layer": i, **{k: v[i] for k, v in figures["first"].items()}} for i in range(30)]
        table(rows, "attention of the second half's queries")
    if "loss" in parts:
        figures["loss"] = perplexity(*((1024, 256, 64) if quick else (12288, 1024, 64)), options.text)
        table(
            [{"cache": k, "perplexity": v["perplexity"], "MB": v["MB"]} for k, v in figures["loss"].items()],
            "perplexity",
        )
    if "stream" in parts:
        sizes = (2048, 20_480, 256) if quick else (options.tokens, options.small, 1024)
        figures["stream"] = streams(*sizes, options.text)
    if "speed" in parts:
        figures["speed"] = speed(
            (128,) if quick else (256, 512, 1024, 2048), 3 if quick else 10, options.text
        )
        table(figures["speed"], "per token")
    return figures


def earlier(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of an earlier run, if only some parts are run now."""
    path = options.out or Path(__file__).parent / "results" / "sinks.json"
    if options.only and path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8"))["figures"])
    return {}


if __name__ == "__main__":
    main()
