"""What does the guard add to a prefill, and how long does a scan take?

    python benchmarks/guard_cost.py [--quick]

SmolLM2 reads an instruction and a text of N tokens: plainly (attention through clearhead, nothing watched),
in host mode (`clearhead.guard.watch` around the same call, verdict included), and as a scan
(`InjectionDetector.scan`, laying out and cutting included). All three take turns, in a new random order each
round; a ratio is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import clearhead as ch
from record import arguments, save, table
from texts import token_ids

LENGTHS = (200, 500, 2000)
INSTRUCTION = "Answer the question about the text: which licence is it?"


def forms(detector: Any, text: str) -> dict[str, Callable[[], object]]:
    """The same text, read in three ways."""
    loaded = detector.loaded
    segments = [
        ch.Segment("instruction", "system", INSTRUCTION),
        ch.Segment("label", "user", "Data:"),
        ch.Segment("text", "data", text),
    ]

    def plain() -> object:
        inputs = ch.Prompt(segments, loaded.tokenizer).inputs
        return loaded.model(**inputs, logits_to_keep=1, use_cache=False)

    def host() -> object:
        prompt = ch.Prompt(segments, loaded.tokenizer)
        with ch.guard.watch(detector, prompt) as seen:
            loaded.model(**prompt.inputs, logits_to_keep=1, use_cache=False)
        return seen.finding

    return {"plain": plain, "host": host, "scan": lambda: detector.scan(INSTRUCTION, text)}


def rounds(ways: dict[str, Callable[[], object]], number: int) -> list[dict[str, float]]:
    """Seconds of each way, per round."""
    order = random.Random(0)
    out = []
    for way in ways.values():
        way()
    for _ in range(number):
        names = list(ways)
        order.shuffle(names)
        row = {}
        for name in names:
            start = time.perf_counter()
            ways[name]()
            row[name] = time.perf_counter() - start
        out.append(row)
    return out


def main() -> None:
    """Measure, show, save."""
    options = arguments(__doc__).parse_args()
    detector = ch.guard.InjectionDetector.load("smollm2")
    tokenizer = detector.loaded.tokenizer
    rows = []
    with torch.inference_mode():
        for n in LENGTHS[:1] if options.quick else LENGTHS:
            text = tokenizer.decode(token_ids(tokenizer, n, None)[0])
            times = rounds(forms(detector, text), 3 if options.quick else max(12, 6000 // n))
            rows.append(
                {
                    "tokens": n,
                    "prefill ms": 1e3 * statistics.median(t["plain"] for t in times),
                    "host ×": statistics.median(t["host"] / t["plain"] for t in times),
                    "scan ms": 1e3 * statistics.median(t["scan"] for t in times),
                    "scan ×": statistics.median(t["scan"] / t["plain"] for t in times),
                    "rounds": len(times),
                }
            )
    table(rows, "SmolLM2: the guard in the host's prefill, and as a scan, against the prefill alone")
    save("guard_cost", options, {}, rows=rows)


if __name__ == "__main__":
    main()
