"""How does memory grow with the length, with n × n weights and without?

    python benchmarks/memory.py [--text FILE] [--quick]

One SmolLM2-shaped layer (9 heads, 3 key heads, d = 64, float32, causal) that must say for every query how
much it looks at each of 8 segments, its entropy and its 8 heaviest keys: once by writing the weights down, as
eager code does, once by `clearhead.attention`. Then the whole model, with the same three questions.

Each point is a process of its own. Peak extra bytes of a layer: highest resident memory during the call less
the resident memory just before it, inputs there and code warm. For the model: highest resident memory of the
whole process, weights and libraries included. The model runs without its output layer, whose logits (n ×
49152) would be another 1.6 GB at 8192 tokens and are no matter of attention.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from record import arguments, exponent, pairs, save, table
from texts import HEAD_SIZE, HEADS, KV_HEADS, even_segments, layer_inputs, token_ids

SEGMENTS, TOP = 8, 8
MB = 2**20


def written_down(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Output and statistics from n × n weights, step by step as transformers' eager code has them."""
    n, group = q.shape[2], HEADS // KV_HEADS
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    hidden = torch.full((n, n), torch.finfo(q.dtype).min).triu_(1)
    weights = torch.matmul(q, k.transpose(2, 3)) * HEAD_SIZE**-0.5
    weights = weights + hidden
    weights = weights.softmax(-1)
    one_hot = torch.nn.functional.one_hot(even_segments(n, SEGMENTS), SEGMENTS).to(q.dtype)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    return weights @ v, weights @ one_hot, entropy, weights.topk(TOP, -1)


def observed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """The same without weights."""
    questions = [ch.SegmentMass(even_segments(q.shape[2], SEGMENTS)), ch.Entropy(), ch.TopKeys(TOP)]
    return ch.attention(q, k, v, mask=ch.Mask(causal=True), observe=questions)


FORMS: dict[str, Callable[..., tuple[Any, ...]]] = {"written down": written_down, "clearhead": observed}


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def available() -> int:
    """Bytes that a process can still get: MemAvailable, or what its control group has left."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def size_of(answer: Any) -> int:
    """Bytes of all tensors in nested tuples."""
    if isinstance(answer, Tensor):
        return answer.numel() * answer.element_size()
    return sum(size_of(part) for part in answer)


@torch.no_grad()
def layer(form: str, n: int) -> dict[str, int]:
    """Peak extra bytes of one call, and the bytes of what it returned. In a fresh process."""
    run = FORMS[form]
    run(*layer_inputs(64))
    inputs = layer_inputs(n)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present size
    answer = run(*inputs)
    return {"peak": resident("VmHWM") - before, "answers": size_of(answer)}


@torch.no_grad()
def whole(form: str, n: int, text: Path | None) -> dict[str, int]:
    """Peak resident bytes of a process that runs the model on n tokens. In a fresh process."""
    model, tokenizer, *_ = ch.load("smollm2")
    ids = token_ids(tokenizer, n, text)
    loaded = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    if form == "plain":
        model.model(ids, use_cache=False)
        return {"peak": resident("VmHWM"), "loaded": loaded, "answers": 0}
    questions = [ch.SegmentMass, ch.Entropy(), ch.TopKeys(TOP)]
    with ch.observe(model, even_segments(n, SEGMENTS), questions) as trace:
        model.model(ids, use_cache=False)
    answers = size_of((trace.mass, trace.entropy, trace.top_keys))
    return {"peak": resident("VmHWM"), "loaded": loaded, "answers": answers}


def fresh(kind: str, form: str, n: int, text: Path | None) -> dict[str, int]:
    """Run `layer` or `whole` in a process of its own."""
    command = [sys.executable, __file__, "--one", kind, form, str(n)]
    command += ["--text", str(text)] if text else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} {form} {n} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def layers(sizes: list[int]) -> tuple[list[dict[str, Any]], list[str]]:
    """One row per length, and what was left out, with the reason."""
    rows, skipped = [], []
    for n in sizes:
        row: dict[str, Any] = {"tokens": n}
        for form in FORMS:
            needed = (2 * HEADS + 1) * n * n * 4  # two of scores, weights and P log P at a time, and the mask
            room = available()
            if form == "written down" and needed > 0.8 * room:  # others need memory too
                reason = f"{form} at {n} tokens needs {needed / 1e9:.0f} GB, of {room / 1e9:.0f} GB free"
                skipped.append(reason)
                print("left out:", reason)
                continue
            found = fresh("layer", form, n, None)
            row[f"{form} MB"] = found["peak"] / MB
            if form == "clearhead":
                row["of it answers MB"] = found["answers"] / MB
                row["bytes per token"] = found["peak"] // n
        rows.append(row)
    return rows, skipped


def main() -> None:
    """Print the tables and write the JSON."""
    parser = arguments(__doc__, text=True)
    parser.add_argument("--one", nargs=3, metavar=("KIND", "FORM", "N"), help="one point (used by itself)")
    options = parser.parse_args()
    if options.one:
        kind, form, n = options.one[0], options.one[1], int(options.one[2])
        print(json.dumps(layer(form, n) if kind == "layer" else whole(form, n, options.text)))
        return
    sizes = [256, 512, 1024] if options.quick else [1024, 2048, 4096, 8192, 16384]
    rows, skipped = layers(sizes)
    table(rows, "one layer, statistics of every query: peak extra memory")
    exponents, steps = {}, {}
    for form in FORMS:
        points = [(row["tokens"], row[f"{form} MB"]) for row in rows if f"{form} MB" in row]
        exponents[form] = exponent(*zip(*points, strict=True))
        steps[form] = pairs(*zip(*points, strict=True))
        shown = ", ".join(f"{step:.2f}" for step in steps[form])
        print(f"{form}: exponent {exponents[form]:.2f} over all, {shown} from each length to the next")

    models = []
    for n in [256] if options.quick else [4096, 8192]:
        plain, seen = (fresh("whole", form, n, options.text) for form in ("plain", "observed"))
        models.append(
            {
                "tokens": n,
                "loaded MB": seen["loaded"] / MB,
                "plain peak MB": plain["peak"] / MB,
                "observed peak MB": seen["peak"] / MB,
                "of it answers MB": seen["answers"] / MB,
                "eager weights would be MB": 30 * HEADS * n * n * 4 / MB,
            }
        )
    table(models, "the whole model: peak resident memory of the process")
    figures = {
        "exponent_written_down": exponents["written down"],
        "exponent_clearhead": exponents["clearhead"],
        "steps": steps,
        "layer_tokens": sizes,
        "model_tokens": models[-1]["tokens"],
        "model_peak_gb": models[-1]["observed peak MB"] * MB / 1e9,
        "model_answers_gb": models[-1]["of it answers MB"] * MB / 1e9,
        "model_eager_weights_gb": models[-1]["eager weights would be MB"] * MB / 1e9,
        "left_out": skipped,
    }
    save("memory", options, figures, layer=rows, model=models)


if __name__ == "__main__":
    main()
