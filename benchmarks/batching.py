"""How many tokens a second come out when many requests share a model, and how long each of them waits?

    python benchmarks/batching.py [--threads N] [--text FILE] [--quick]

SmolLM2, greedy, prompts cut out of a real text at different places. Through `clearhead.Engine`:

- 16 requests together against the same requests one after another, each with its own beginning, and then
  all with the same first 1,024 tokens (a system prompt). One after another nothing is shared: each computes
  all of its prompt. Both sides run the same kernels; "differ" counts requests whose tokens are not the same.
- 1, 2, 4, 8 and 16 requests at once: latency of the prefill (until all have their first token), time between
  tokens, tokens per second.
- transformers' own continuous batching (`generate_batch`, sdpa) on the same requests, where it runs.

Ratios of times measured in turns in one process; the median of the rounds, with the lowest and highest.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import clearhead as ch
from record import arguments, save, table
from texts import token_ids

Prompts = list[list[int]]
CACHE = 1 << 30


def run(model: Any, prompts: Prompts, new: int, batch: int, *, share: bool) -> tuple[float, list[Any]]:
    """Seconds for all requests, at most `batch` of them at once, and their handles."""
    with ch.Engine(model, cache_bytes=CACHE, max_batch=batch, share_prefixes=share) as engine:
        start = time.perf_counter()
        handles = [engine.submit(prompt, max_new_tokens=new, stop_tokens=()) for prompt in prompts]
        engine.run()
        seconds = time.perf_counter() - start
        for handle in handles:
            handle.result()
        return seconds, handles


def texts(handles: Sequence[Any]) -> list[list[int]]:
    """The tokens of finished requests."""
    return [[token.id for token in handle] for handle in handles]


def compare(
    name: str, forms: dict[str, Callable[[], tuple[float, Any]]], base: str, tokens: int, rounds: int
) -> dict[str, Any]:
    """Run forms in turns. Returns tokens per second of each and how much faster than `base` they are."""
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    said: dict[str, Any] = {}
    for _ in range(rounds):
        for form, call in forms.items():
            gc.collect()
            taken, said[form] = call()
            seconds[form].append(taken)
    line: dict[str, Any] = {"work": name, "rounds": rounds}
    for form, times in seconds.items():
        line[f"{form} tokens/s"] = tokens / statistics.median(times)
        if form != base:
            ratios = [b / a for a, b in zip(times, seconds[base], strict=True)]
            line[f"{form} ×"] = statistics.median(ratios)
            line[f"{form} spread"] = f"{min(ratios):.2f}-{max(ratios):.2f}"
            line[f"{form} differ"] = sum(a != b for a, b in zip(said[form], said[base], strict=True))
    return line


def theirs(model: Any, prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
    """The same requests through transformers' continuous batching, with sdpa."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    longest = sum(len(prompt) + new for prompt in prompts)
    blocks = -(-longest // 32) + len(prompts)
    config = ContinuousBatchingConfig(page_size=32, num_blocks=blocks, max_batch_tokens=256)
    model.set_attn_implementation("sdpa")
    try:
        start = time.perf_counter()
        out = model.generate_batch(
            inputs=prompts,
            generation_config=settings,
            continuous_batching_config=config,
            warmup=False,
            progress_bar=False,
        )
        seconds = time.perf_counter() - start
    finally:
        model.set_attn_implementation("clearhead")
    return seconds, [list(answer.generated_tokens) for answer in out.values()]


def by_requests(
    model: Any, prompts: Prompts, new: int, batches: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Latency and throughput for each number of requests at once."""
    kept: dict[int, list[tuple[float, float, float]]] = {batch: [] for batch in batches}
    for _ in range(rounds):
        for batch in batches:
            taken, handles = run(model, prompts[:batch], new, batch, share=False)
            firsts = max(handle.seconds[0] for handle in handles)
            last = max(handle.seconds[-1] for handle in handles)
            kept[batch].append((firsts, (last - firsts) / (new - 1), batch * new / taken))
    rows = []
    for batch, figures in kept.items():
        first, between, rate = (statistics.median(column) for column in zip(*figures, strict=True))
        rows.append(
            {
                "requests": batch,
                "prefill ms": first * 1e3,
                "ms per token": between * 1e3,
                "tokens/s": rate,
                "decode tokens/s": batch / between,
            }
        )
    return rows


def main() -> None:
    """Print the tables and write the JSON."""
    parser = arguments(__doc__, text=True)
    parser.add_argument("--threads", type=int, help="of torch (default: as many as torch takes)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer, *_ = ch.load("smollm2")
    count, own, common, new, rounds = (4, 24, 128, 6, 1) if options.quick else (16, 64, 1024, 64, 3)
    ids = token_ids(tokenizer, common + count * own, options.text)[0].tolist()
    apart = [ids[common + i * own : common + (i + 1) * own] for i in range(count)]
    shared = [ids[:common] + prompt for prompt in apart]
    run(model, apart[:1], 2, 1, share=False)  # the first call of everything is slower

    rows = []
    for name, prompts, tokens in (("own beginnings", apart, new), (f"first {common} in common", shared, new)):
        forms = {
            "one by one": lambda p=prompts: _told(run(model, p, new, 1, share=False)),
            "engine": lambda p=prompts: _told(run(model, p, new, count, share=True)),
            "transformers": lambda p=prompts: theirs(model, p, new),
        }
        rows.append(compare(name, forms, "one by one", count * tokens, rounds))
        table(rows[-1:], f"{count} requests, {new} new tokens each: {name}")
    by_size = by_requests(model, apart, new, [n for n in (1, 2, 4, 8, 16) if n <= count], rounds)
    table(by_size, f"requests at once: prompts of {own} tokens, {new} new ones")

    figures = {
        "requests": count,
        "new_tokens": new,
        "prefix": common,
        "together": rows[0]["engine ×"],
        "together_differ": rows[0]["engine differ"],
        "against_transformers": rows[0]["engine tokens/s"] / rows[0]["transformers tokens/s"],
        "shared": rows[1]["engine ×"],
        "shared_against_transformers": rows[1]["engine tokens/s"] / rows[1]["transformers tokens/s"],
        "shared_differ": rows[1]["engine differ"],
        "batches": [row["requests"] for row in by_size],
        "prefill_ms": [row["prefill ms"] for row in by_size],
        "ms_per_token": [row["ms per token"] for row in by_size],
        "tokens_per_s": [row["tokens/s"] for row in by_size],
    }
    save("batching", options, figures, together=rows, sizes=by_size)


def _told(result: tuple[float, Sequence[Any]]) -> tuple[float, list[list[int]]]:
    return result[0], texts(result[1])


if __name__ == "__main__":
    main()
