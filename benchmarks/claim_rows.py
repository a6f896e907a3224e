"""The rows of docs/claims.md: what is known, and how our figure is read from the results.

No figure is typed by hand. A row is a function of the figures of the benchmarks, by name; to add one, write
it and put it into CLAIMS or TARGETS.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

Figures = dict[str, Any]


class Claim(NamedTuple):
    """One row: what is known, what we measured."""

    name: str  # as in the project's mission
    published: str
    benchmark: str  # the JSON file, without .json
    ours: Callable[[dict[str, Figures]], str]


class Target(NamedTuple):
    """What a figure was to be, and what it is."""

    what: str
    target: str
    benchmark: str
    ours: Callable[[Figures], str]
    reached: Callable[[Figures], bool]


class Run(NamedTuple):
    """What `clearhead claims run NAME` does: a benchmark, by its file's name, for these claims."""

    benchmark: str  # the script and its JSON file, without .py and .json
    claims: tuple[str, ...]
    measures: str


#: By the names that `clearhead claims` takes.
RUNS = {
    "mechanism": Run(
        "mechanism", ("M1", "M2", "M4"), "weights, scale, heads and shared heads as in the papers"
    ),
    "parity": Run("parity", ("M3",), "28 kinds of model against their own eager code"),
    "gqa": Run("gqa", ("M2", "M4"), "multi-head, grouped-query and multi-query: quality and speed"),
    "kernels": Run("kernels", ("M5",), "the kernels against others, in time and memory"),
    "caches": Run("caching", ("M6",), "decoding with a cache and without; its bytes"),
    "losses": Run("caches", ("M6", "M7"), "perplexity of every kind of cache at equal bytes"),
    "sinks": Run("sinks", ("M7",), "heads that rest on the first tokens; streams without end"),
    "cost": Run("cost_of_looking", ("C1",), "attention's time by length, and what looking adds"),
    "memory": Run("memory", ("C2",), "memory by length, with weights written down and without"),
    "batching": Run("batching", ("C3",), "latency and throughput by the number of requests at once"),
    "exactness": Run("exactness", ("S1",), "every observable against weights written down"),
    "animal": Run("animal", ("S6",), "what “it” looks at"),
}


def small(value: float) -> str:
    """Two digits: 3.1e-07, 0.0086, 12."""
    return f"{value:.2g}"


def listed(values: list[float], digits: int = 2) -> str:
    """A, b and c."""
    shown = [f"{value:.{digits}f}" for value in values]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def m1(results: dict[str, Figures]) -> str:
    f = results["mechanism"]
    mean, head = f["saturation"], f["head"]
    return (
        f"SmolLM2, {f['tokens']} tokens, {f['heads']} heads: every row of weights adds up to 1 within "
        f"{small(f['rows_add_up_within'])}. Without the division the mean largest weight of a row goes from "
        f"{mean['largest with']:.2f} to {mean['largest without']:.2f}, the entropy from "
        f"{mean['entropy with']:.2f} to {mean['entropy without']:.2f} nats, the rows with over 0.99 on one "
        f"key from {mean['over 0.99 with']:.0%} to {mean['over 0.99 without']:.0%}. Layer "
        f"{head['layer']}, head {head['head']}: largest weight {head['largest with']:.2f} → "
        f"{head['largest without']:.2f}, entropy {head['entropy with']:.2f} → {head['entropy without']:.2f}"
    )


def m2(results: dict[str, Figures]) -> str:
    f = results["mechanism"]
    return (
        "8 heads of 64, self, causal and cross-attention, outputs and weights of every head: largest "
        f"difference from `torch.nn.MultiheadAttention` {small(f['multi_head_worst'])}"
    )


def m3(results: dict[str, Figures]) -> str:
    f = results["parity"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in f["kinds"].items())
    return (
        f"{f['families']} configurations of transformers ({kinds}), {f['cases']} cases with padding: largest "
        f"difference of any output from the model's own eager code {small(f['largest_difference'])}"
    )


def m4(results: dict[str, Figures]) -> str:
    f = results["mechanism"]
    logits = f["logits"]
    return (
        "9/3, 8/2, 8/1 and 64/8 query/key heads: largest difference from torch's plain attention on repeated "
        f"heads {small(f['grouped_worst'])}. SmolLM2 (9/3), {f['tokens']} tokens: logits up to "
        f"{logits['largest']:.0f} differ from its eager code by {small(logits['ours_eager'])}; from the "
        f"model in float64 ours by {small(logits['ours_float64'])}, eager by {small(logits['eager_float64'])}"
    )


def m5(results: dict[str, Figures]) -> str:
    f = results["kernels"]
    grows, tokens = f["memory"], f["memory_tokens"]
    return (
        "GPT-2's shape (12 heads of 64, 4 layers), a training step at 1024 tokens, on the CPU: "
        f"{f['gpt2_step_eager']:.2f}× as fast as with attention written down, {f['gpt2_step_sdpa']:.2f}× as "
        f"with torch's fused one; a layer's attention alone, forward and backward: "
        f"{f['gpt2_layer_written_down']:.2f}× and {f['gpt2_layer_sdpa']:.2f}×. Peak memory beyond the inputs "
        f"from {tokens[0]} to {tokens[-1]} tokens: exponent {grows['forward']:.2f} forward, "
        f"{grows['forward + backward']:.2f} forward and backward; written down {grows['written down']:.2f}"
    )


def m2_m4(results: dict[str, Figures]) -> str:
    f = results["gqa"]
    loss, speed = f["quality"], f["decoding"]

    def bits(name: str) -> str:
        return f"{loss[name]['bits']:.3f} ± {loss[name]['spread']:.3f}"

    recipe = f["recipe"]
    grown = loss["MHA-16 to 16, 5% more steps"]["bits"]
    pooled = ", ".join(
        f"to {groups} {loss[f'MHA-16 to {groups}, 5% more steps']['bits'] - grown:+.3f}"
        for groups in (8, 2, 1)
    )
    twice = f["recipe"]["steps"] * 5 // 100
    return (
        f"a decoder of {recipe['layers']} layers and 16 query heads, {recipe['steps']} steps, "
        f"{len(loss['MHA-16']['seeds'])} seeds, bits per character on kept-out text: "
        + ", ".join(f"{name} {bits(name)}" for name in speed)
        + f". Multi-head converted by mean-pooling and trained {twice} steps more (5%), against itself "
        f"trained {twice} more: {pooled}, "
        "so at this size 5% does not bring it back. "
        f"A token with {f['cached']} in the cache, times as fast as multi-head: "
        + ", ".join(
            f"{name} {row['times as fast as MHA']:.2f}× ({row['cache MB']:.0f} MB)"
            for name, row in speed.items()
        )
    )


def m6(results: dict[str, Figures]) -> str:
    rows = results["caching"]["rows"]
    saved = ", ".join(f"{row['everything anew ×']:.1f}× at {row['tokens']}" for row in rows)
    last = rows[-1]
    return (
        "SmolLM2, a token computed with everything before it anew takes this many times as long as with a "
        f"cache: {saved}; the cache takes {min(row['of formula'] for row in rows):.3f}–"
        f"{max(row['of formula'] for row in rows):.3f} of 2 · layers · key heads · d · n · 4 bytes, "
        f"{last['MB']:.0f} MB at {last['tokens']} tokens, as bytes {last['int8 MB']:.0f} MB"
    )


def m7(results: dict[str, Figures]) -> str:
    f = results["sinks"]

    def mean(name: str) -> float:
        return statistics.mean(f["first"][name][2:])

    loss, speed = f["loss"], f["speed"]
    perplexities = "; ".join(
        f"{name}: {row['perplexity']:.1f}, last eighth {row['by stretch'][-1]:.1f}"
        for name, row in loss.items()
    )
    small, large = f["stream"]["small model"], f["stream"]["SmolLM2"]
    best = max(speed, key=lambda row: float(row["times as fast"]))
    return (
        "(a) SmolLM2, layers 2 and up: the first four tokens get "
        f"{mean('as it is, first four'):.0%} of the attention of later queries; "
        f"{mean('line breaks, first four'):.0%} if they are line breaks, "
        f"{mean('other words, first four'):.0%} if other words. (b) Perplexity over 12,288 tokens, past the "
        f"trained 8,192: {perplexities}. (c) {small['tokens']:,} tokens through a small model, "
        f"{flat(small)}; "
        f"{large['tokens']:,} through SmolLM2, {flat(large)}. (d) {best['times as fast']:.0f}× as fast "
        f"as computing a window of {best['window']} anew for each token, "
        + ", ".join(f"{row['times as fast']:.1f}× of {row['window']}" for row in speed if row is not best)
    )


def flat(stream: Figures) -> str:
    """How far time, memory and loss of a stream stay what they were."""
    points = stream["points"]
    early = [p for p in points if p["token"] >= stream["tokens"] / 10]
    first, last = early[0], points[-1]
    return (
        f"time per token at the end {last['ms per token'] / first['ms per token']:.2f}× that at token "
        f"{first['token']:,}, the cache {last['cache MB']:.1f} MB all along, the process "
        f"{last['process MB'] - first['process MB']:+.0f} MB, perplexity {first['perplexity']:.1f} and "
        f"{last['perplexity']:.1f}"
    )


def c3(results: dict[str, Figures]) -> str:
    f = results["batching"]
    steps = zip(f["batches"], f["prefill_ms"], f["ms_per_token"], f["tokens_per_s"], strict=True)
    return (
        "SmolLM2 through the engine, requests at once: first tokens after, time between tokens, tokens per "
        "second: "
        + "; ".join(
            f"{n}: {first:.0f} ms, {between:.0f} ms, {rate:.0f}/s" for n, first, between, rate in steps
        )
    )


def c1(results: dict[str, Figures]) -> str:
    f = results["cost_of_looking"]
    return (
        f"measured exponent {f['exponent']:.2f} from {f['tokens'][0]} to {f['tokens'][-1]} tokens; between "
        f"neighbours {listed(f['steps'])}; the last doubling takes {f['last_step_factor']:.1f} times as long"
    )


def c2(results: dict[str, Figures]) -> str:
    f = results["memory"]
    left_out = "".join(f" (left out: {reason})" for reason in f["left_out"])
    return (
        "peak extra bytes of a layer with the statistics of every query: exponent "
        f"{f['exponent_written_down']:.2f} with weights written down, {f['exponent_clearhead']:.2f} here, "
        f"{f['layer_tokens'][0]} to {f['layer_tokens'][-1]} tokens{left_out}; the last doubling alone "
        f"{f['steps']['written down'][-1]:.2f} and {f['steps']['clearhead'][-1]:.2f}, as a fixed part of a "
        "few MB weighs less"
    )


def s1(results: dict[str, Figures]) -> str:
    f, memory = results["exactness"], results["memory"]
    return (
        f"SmolLM2, all layers and heads, {f['tokens']} tokens: weights within {small(f['weights_error'])} of "
        f"eager's on the same queries and keys; {f['long_tokens']} tokens, where eager's weights take "
        f"{f['long_eager_gb']:.0f} GB: within {small(f['long_weights_error'])} on {f['long_queries']} "
        f"sampled queries per head; {memory['model_tokens']} tokens in {memory['model_peak_gb']:.2f} GB, "
        "whole process (`python benchmarks/memory.py`)"
    )


def s6(results: dict[str, Figures]) -> str:
    f = results["animal"]
    top, one, every = f["top"], f["effects"][0], f["effects"][-2]
    return (
        f"SmolLM2: layer {top['layer']}, head {top['head']} puts {top['on animal']:.0%} of “it” on “animal” "
        f"and {top['on road']:.1%} on “road”; {f['heads_looking_most_at_animal']} of {f['heads']} heads look "
        f"at “animal” most, the mean over all is {f['mean_on_animal']:.3f} (“road” {f['mean_on_road']:.3f}). "
        f"“animal” deleted from that head's view: P(“tired”) after “too” goes from {one['tired before']:.2%} "
        f"to {one['tired after']:.2%}; from the view of all heads: to {every['tired after']:.3%}"
    )


def absolute(f: Figures) -> str:
    """The largest absolute error below the target, and each that lies above, with its scale."""
    above = "".join(
        f"; {row['observable']} {small(row['against eager'])} of up to {row['largest value']:.0f}"
        for row in f["above_target"]
    )
    return f"{small(f['largest_error_within'])}{above}"


CLAIMS = (
    Claim(
        "M1",
        "softmax(QKᵀ/√d_k)V; the weights of a row add up to 1; without the division by √d_k the softmax "
        "saturates (Vaswani et al. 2017, eq. 1 and §3.2.1)",
        "mechanism",
        m1,
    ),
    Claim(
        "M2",
        "h heads in parallel, concatenated and projected; base model: 8 heads of 64 (Vaswani et al. 2017, "
        "§3.2.2); `torch.nn.MultiheadAttention`",
        "mechanism",
        m2,
    ),
    Claim(
        "M3",
        "self-attention, masked self-attention and cross-attention: encoder-only, decoder-only, "
        "encoder-decoder and text-to-image models give the outputs of their own code",
        "parity",
        m3,
    ),
    Claim(
        "M4",
        "several query heads share a key/value head: multi-query (Shazeer 2019), grouped-query (Ainslie et "
        "al. 2023), as Llama 2 70B has it (8 key/value heads for 64)",
        "mechanism",
        m4,
    ),
    Claim(
        "M4",
        "grouped-query attention: quality near multi-head, speed near multi-query; a multi-head model "
        "becomes one by mean-pooling its key/value heads and 5% further training (Ainslie et al. 2023)",
        "gqa",
        m2_m4,
    ),
    Claim(
        "M5",
        "FlashAttention: exact, tiled, online softmax, no n × n in memory; GPT-2 trained 3 times as fast at "
        "1024 tokens on a GPU, memory linear in n (Dao et al. 2022)",
        "kernels",
        m5,
    ),
    Claim(
        "M6",
        "with keys and values kept, a new token costs one row of attention instead of all (Shazeer 2019, "
        "§2.4.1); the cache grows by 2 · layers · key heads · d numbers a token",
        "caching",
        m6,
    ),
    Claim(
        "M7",
        "attention sinks: heads rest on the first tokens even if they mean nothing; with 4 of them kept, a "
        "window streams to 4 million tokens and more, up to 22.2 times as fast as computing the window anew "
        "(Xiao et al. 2023)",
        "sinks",
        m7,
    ),
    Claim(
        "C1",
        "n tokens are compared with n tokens: twice the input, about four times the attention work, "
        "exponent 2 (Vaswani et al. 2017, table 1)",
        "cost_of_looking",
        c1,
    ),
    Claim(
        "C2",
        "memory: n × n for the straightforward form, exponent 2; linear for the tiled one, exponent 1 (Dao "
        "et al. 2022)",
        "memory",
        c2,
    ),
    Claim(
        "C3",
        "batching: throughput grows with the number of requests while each waits longer (Orca, Yu et al. "
        "2022)",
        "batching",
        c3,
    ),
    Claim(
        "S1",
        "what each head takes from each source, exact, at lengths where eager weights do not fit into memory",
        "exactness",
        s1,
    ),
    Claim(
        "S6",
        "“The animal didn't cross the road because it was too tired.”: a head in which “it” looks at "
        "“animal” (Uszkoreit 2017, figure of a translation model)",
        "animal",
        s6,
    ),
)

TARGETS = (
    Target(
        "largest error of any observable against eager weights, SmolLM2, 512 tokens, all layers and heads",
        "≤ 2e-5",
        "exactness",
        absolute,
        lambda f: f["largest_error"] <= 2e-5,
    ),
    Target(
        "the same, relative to the observable's largest value where that is above 1",
        "≤ 2e-5",
        "exactness",
        lambda f: small(f["largest_relative_error"]),
        lambda f: f["largest_relative_error"] <= 2e-5,
    ),
    Target(
        "logits of 28 model configurations against their eager code",
        "≤ 1e-5",
        "parity",
        lambda f: small(f["largest_difference"]),
        lambda f: f["largest_difference"] <= 1e-5,
    ),
    Target(
        "exponent of a layer's peak extra memory",
        "≤ 1.1",
        "memory",
        lambda f: f"{f['exponent_clearhead']:.2f}",
        lambda f: f["exponent_clearhead"] <= 1.1,
    ),
    Target(
        "peak memory of the whole model at 8192 tokens: segments, entropy and 8 top keys of every query",
        "< 3 GB",
        "memory",
        lambda f: f"{f['model_peak_gb']:.2f} GB, of it answers {f['model_answers_gb']:.2f} GB",
        lambda f: f["model_peak_gb"] < 3,
    ),
    Target(
        "segments and entropy of all queries, time over plain attention, 512 to 8192 tokens",
        "≤ 2.5×",
        "cost_of_looking",
        lambda f: f"{listed(f['all'])}×",
        lambda f: f["all_worst"] <= 2.5,
    ),
    Target(
        "the same of the last query only",
        "≤ 1.05×",
        "cost_of_looking",
        lambda f: f"{listed(f['last'], 3)}×",
        lambda f: f["last_worst"] <= 1.05,
    ),
    Target(
        "SmolLM2, a token with 8192 in the cache, against transformers' own cache with sdpa; with eager",
        "≥ 1.6×; ≥ 10×",
        "caching",
        lambda f: (
            f"{f['rows'][-1]['transformers sdpa ×']:.2f}×; {f['rows'][-1]['transformers eager ×']:.1f}×"
        ),
        lambda f: f["rows"][-1]["transformers sdpa ×"] >= 1.6 and f["rows"][-1]["transformers eager ×"] >= 10,
    ),
    Target(
        "the same with a cache of bytes, against ours in float32: time; bytes",
        "≥ 1.15×; 3.7×",
        "caching",
        lambda f: (
            f"{1 / f['rows'][-1]['ours int8 ×']:.2f}×; {f['rows'][-1]['MB'] / f['rows'][-1]['int8 MB']:.2f}×"
        ),
        lambda f: (
            1 / f["rows"][-1]["ours int8 ×"] >= 1.15 and f["rows"][-1]["MB"] >= 3.7 * f["rows"][-1]["int8 MB"]
        ),
    ),
    Target(
        "source masses of each new token, 256 to 8192 in the cache: time over the same without",
        "≤ +10%",
        "caching",
        lambda f: listed([row["ours, observed ×"] for row in f["rows"]]) + "×",
        lambda f: max(row["ours, observed ×"] for row in f["rows"]) <= 1.10,
    ),
    Target(
        "16 requests through the engine against one after another; with a common beginning of 1024 tokens",
        "≥ 3×; ≥ 5×",
        "batching",
        lambda f: f"{f['together']:.1f}×; {f['shared']:.1f}×",
        lambda f: f["together"] >= 3 and f["shared"] >= 5,
    ),
    Target(
        "lines of the table of kernels with a target, [one by one](performance.md)",
        "all",
        "kernels",
        lambda f: f"{f['reached']} of {f['judged']}",
        lambda f: f["reached"] == f["judged"],
    ),
)


def remarks(figures: dict[str, Figures]) -> list[str]:
    """What one must know to read the figures."""
    exact, cost = figures["exactness"], figures["cost_of_looking"]
    whole = exact["end_to_end"]
    return [
        "Exactness is measured on the same queries and keys, layer by layer. Two models that round "
        "differently drift apart from layer to layer: end to end, our weights differ from those of a "
        f"separate eager run by up to {small(whole['weights_ours_eager'])} (in the first layer "
        f"{small(whole['weights_ours_eager_first_layer'])}); from the model in float64 ours are up to "
        f"{small(whole['weights_ours_float64'])} away, eager's {small(whole['weights_eager_float64'])}.",
        "",
        *wide(exact),
        "Times are medians of ratios within interleaved rounds. Two equal calls in the same rounds are apart "
        f"by (quarter of the rounds below and above, each length) {', '.join(cost['noise'])}. On SmolLM2's "
        f"prefill of {cost['model_tokens']} tokens looking costs {cost['model_all']:.2f}× (all queries) and "
        f"{cost['model_last']:.2f}× (the last).",
    ]


def wide(exact: Figures) -> list[str]:
    """Why sums over hundreds of tokens have larger absolute errors; nothing if none is above the target."""
    if not exact["above_target"]:
        return []
    names = " and ".join(row["observable"] for row in exact["above_target"])
    errors = ", ".join(
        f"{row['observable']} {small(row['eager against float64'])}" for row in exact["above_target"]
    )
    return [
        f"{names} are sums over up to {exact['tokens']} queries or distances: float32 numbers of that size "
        f"are {small(exact['float32_step'])} apart, so their absolute error cannot be that of a weight. "
        f"Eager's own float32 weights give them this far from float64: {errors}.",
        "",
    ]
