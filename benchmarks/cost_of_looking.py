"""How does attention's time grow with the length, and what does looking add to it?

    python benchmarks/cost_of_looking.py [--threads N] [--seconds N] [--text FILE] [--quick]

One SmolLM2-shaped layer (9 heads, 3 key heads, d = 64, float32, causal), plain, observed (8 segments and the
entropy) over all queries and over the last one, torch's own call, and the same answers from n × n weights as
eager code writes them down. Then SmolLM2's prefill, plain and observed.

All forms of a length run in turn, in a new random order each round; a ratio is the median over rounds of the
ratio within a round, with the quarter of the rounds below and above it beside it. Two "plain" forms in every
round say how far two equal things are apart here. On a machine with other work, more threads than idle cores
wait for each other at every step and the figures say nothing: use --threads 1.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import clearhead as ch
from record import arguments, exponent, pairs, save, table
from texts import HEAD_SIZE, HEADS, KV_HEADS, even_segments, layer_inputs, token_ids

SEGMENTS = 8
CAUSAL = ch.Mask(causal=True)
Forms = dict[str, Callable[[], object]]


def layer_forms(n: int, *, eager: bool) -> Forms:
    """What runs in each round at this length."""
    q, k, v = layer_inputs(n)
    ids = even_segments(n, SEGMENTS)
    every = [ch.SegmentMass(ids), ch.Entropy()]
    last = [ch.SegmentMass(ids, rows="last"), ch.Entropy(rows="last")]
    one_hot = torch.nn.functional.one_hot(ids, SEGMENTS).float()

    def written_down() -> object:
        keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        hidden = torch.full((n, n), torch.finfo(q.dtype).min).triu_(1)
        weights = (q @ keys.transpose(2, 3) * HEAD_SIZE**-0.5 + hidden).softmax(-1)
        return weights @ values, weights @ one_hot, -torch.xlogy(weights, weights).sum(-1)

    fused = torch.nn.functional.scaled_dot_product_attention
    forms: Forms = {
        "plain": lambda: ch.attention(q, k, v, mask=CAUSAL),
        "plain again": lambda: ch.attention(q, k, v, mask=CAUSAL),
        "all": lambda: ch.attention(q, k, v, mask=CAUSAL, observe=every),
        "last": lambda: ch.attention(q, k, v, mask=CAUSAL, observe=last),
        "torch": lambda: fused(q, k, v, is_causal=True, enable_gqa=True),
    }
    return forms | {"written down": written_down} if eager else forms


def model_forms(n: int, options: Any) -> Forms:
    """A prefill of SmolLM2, without its output layer."""
    model, tokenizer, *_ = ch.load("smollm2")
    ids = token_ids(tokenizer, n, options.text)
    segments = even_segments(n, SEGMENTS)

    def plain() -> object:
        return model.model(ids, use_cache=False)

    def seen(rows: str) -> object:
        with ch.observe(model, segments, [ch.SegmentMass, ch.Entropy()], rows=rows) as trace:
            model.model(ids, use_cache=False)
        return trace.mass

    return {"plain": plain, "plain again": plain, "all": lambda: seen("all"), "last": lambda: seen("last")}


@torch.no_grad()
def rounds(forms: Forms, count: int, seed: int = 0) -> dict[str, list[float]]:
    """Seconds of each form in each round, the forms in a new order every time."""
    order = random.Random(seed)
    names = list(forms)
    times: dict[str, list[float]] = {name: [] for name in names}
    for run in forms.values():
        run()
    for _ in range(count):
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            forms[name]()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], name: str, to: str = "plain") -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of a form's time over another's, round by round."""
    each = [a / b for a, b in zip(times[name], times[to], strict=True)]
    low, middle, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    return low, middle, high


def row(n: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """One line of a table."""
    out: dict[str, Any] = {"tokens": n, "rounds": len(times["plain"])}
    out["plain ms"] = statistics.median(times["plain"]) * 1e3
    out["fastest ms"] = min(times["plain"] + times.get("plain again", [])) * 1e3
    for name in ("plain again", "torch", "last", "all", "written down"):
        if name in times:
            low, middle, high = ratio(times, name)
            out[f"{name} ×"] = middle
            out[f"{name} spread"] = f"{low:.3f}-{high:.3f}"
    if "written down" in times:
        out["written down / all"] = ratio(times, "written down", "all")[1]
    return out


def layer_rows(sizes: list[int], seconds: float, largest_eager: int) -> list[dict[str, Any]]:
    """A row per length; each length gets about this many seconds."""
    out = []
    for n in sizes:
        forms = layer_forms(n, eager=n <= largest_eager)
        once = sum(sum(times) for times in rounds(forms, 1).values())
        out.append(row(n, rounds(forms, max(7, min(300, int(seconds / once))))))
        table(out[-1:], "" if len(out) > 1 else "one layer: milliseconds, and times as long as plain")
    return out


def main() -> None:
    """Print the tables and write the JSON."""
    parser = arguments(__doc__, text=True)
    parser.add_argument("--seconds", type=int, help="for each length (default: 40)")
    parser.add_argument("--threads", type=int, help="of torch (default: as many as torch takes)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = [256, 512] if options.quick else [512, 1024, 2048, 4096, 8192]
    rows = layer_rows(sizes, 1 if options.quick else options.seconds or 40, 512 if options.quick else 4096)
    plain = [line["fastest ms"] for line in rows]  # other work only ever adds time
    b, steps = exponent(sizes, plain), pairs(sizes, plain)
    shown = ", ".join(f"{step:.2f}" for step in steps)
    print(f"\nattention time, fastest of all rounds: exponent {b:.2f}, {shown} from each length to twice it")

    n, count = (128, 3) if options.quick else (2048, 11)
    model = row(n, rounds(model_forms(n, options), count))
    table([model], f"SmolLM2, prefill of {n} tokens")
    figures = {
        "exponent": b,
        "steps": steps,
        "last_step_factor": plain[-1] / plain[-2],
        "tokens": sizes,
        "all_worst": max(line["all ×"] for line in rows),
        "last_worst": max(line["last ×"] for line in rows),
        "all": [line["all ×"] for line in rows],
        "last": [line["last ×"] for line in rows],
        "noise": [line["plain again spread"] for line in rows],
        "model_tokens": n,
        "model_all": model["all ×"],
        "model_last": model["last ×"],
    }
    save("cost_of_looking", options, figures, layer=rows, model=model)


if __name__ == "__main__":
    main()
