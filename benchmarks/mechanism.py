"""Is it the attention of the papers? Weights that add up, the division by √d_k, many heads, shared heads.

    python benchmarks/mechanism.py [--text FILE] [--quick]

M1: rows of weights of a real model add up to 1; what its softmax becomes without the division by √d_k
(Vaswani et al. 2017, section 3.2.1), on the queries and keys of all its heads. M2: the base model's eight
heads of 64 (section 3.2.2) against `torch.nn.MultiheadAttention`. M4: grouped and multi-query heads against
the same heads repeated, on made-up tensors and in SmolLM2 (9 query heads, 3 key heads).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch
from clearhead.models.active import ACTIVE, Call
from record import arguments, save, table
from texts import token_ids

CAUSAL = ch.Mask(causal=True)


class Saturation:
    """A recorder that asks each layer's heads for entropy and largest weight, with ÷ √d and without."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.off_one = 0.0

    def observables(self, call: Call) -> Sequence[ch.Observable]:
        q, k, v = call.query, call.key, call.value
        n, layer = k.shape[2], getattr(call.module, "layer_idx", len(self.rows))
        asked = [ch.Entropy(), ch.MaxWeight(), ch.Weights(rows="all")]
        found = {
            scale: ch.attention(q, k, v, mask=call.mask, scale=scale, observe=asked)[1]
            for scale in (q.shape[-1] ** -0.5, 1.0)
        }
        divided = found[q.shape[-1] ** -0.5]
        self.off_one = max(self.off_one, float((divided[2].double().sum(-1) - 1).abs().max()))
        late = slice(n // 2, n)  # the early queries have few keys to choose from
        for head in range(q.shape[1]):
            row: dict[str, Any] = {"layer": layer, "head": head}
            for name, (entropy, largest, _) in zip(("with", "without"), found.values(), strict=True):
                row[f"entropy {name}"] = float(entropy[0, head, late].mean())
                row[f"largest {name}"] = float(largest[0, head, late].mean())
                row[f"over 0.99 {name}"] = float((largest[0, head, late] > 0.99).double().mean())
            self.rows.append(row)
        return ()

    def record(self, call: Call, observables: Sequence[ch.Observable], seen: Sequence[Any]) -> None:
        """Nothing was asked."""


@torch.no_grad()
def multi_head(n: int = 128, width: int = 512, heads: int = 8) -> dict[str, float]:
    """Largest differences from torch's own multi-head layer, with its projections around our attention."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(width, heads, batch_first=True).eval()
    nn.init.normal_(layer.in_proj_bias)
    x, memory = torch.randn(2, n, width), torch.randn(2, n + 40, width)
    out = {}
    for name, source, mask in (("self", x, None), ("causal", x, CAUSAL), ("cross", memory, None)):
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1) if mask else None
        wanted, weights = layer(x, source, source, attn_mask=hidden, average_attn_weights=False)
        inputs = zip(
            (x, source, source), layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True
        )
        q, k, v = (_split(nn.functional.linear(t, w, b), heads) for t, w, b in inputs)
        mixed, (seen,) = ch.attention(q, k, v, mask=mask, observe=[ch.Weights(rows="all")])
        got = layer.out_proj(mixed.transpose(1, 2).flatten(2))
        out[f"{name}, output"] = float((got - wanted).abs().max())
        out[f"{name}, weights"] = float((seen - weights).abs().max())
    return out


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


@torch.no_grad()
def grouped(n: int) -> list[dict[str, Any]]:
    """Fewer key heads against torch's plain attention on the same heads repeated."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    for query_heads, key_heads in ((9, 3), (8, 2), (8, 1), (64, 8)):
        q, k, v = (
            torch.randn(1, heads, n, 64, generator=generator) for heads in (query_heads, key_heads, key_heads)
        )
        group = query_heads // key_heads
        repeated = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        with sdpa_kernel(SDPBackend.MATH):
            wanted = nn.functional.scaled_dot_product_attention(q, *repeated, is_causal=True)
        got = ch.attention(q, k, v, mask=CAUSAL)
        rows.append(
            {
                "query heads": query_heads,
                "key heads": key_heads,
                "difference": float((got - wanted).abs().max()),
                "keys and values in the cache": f"1/{group}",
            }
        )
    return rows


@torch.no_grad()
def adapter(ids: Tensor) -> dict[str, float]:
    """SmolLM2's logits through clearhead and through its own eager code; both against float64."""
    ours = ch.load("smollm2").model(ids, use_cache=False).logits.double()
    model = ch.load("smollm2", attn_implementation="eager").model
    eager = model(ids, use_cache=False).logits.double()
    truth = model.double()(ids, use_cache=False).logits
    return {
        "ours_eager": float((ours - eager).abs().max()),
        "ours_float64": float((ours - truth).abs().max()),
        "eager_float64": float((eager - truth).abs().max()),
        "largest": float(truth.abs().max()),
        "same_next_token": float((ours.argmax(-1) == eager.argmax(-1)).double().mean()),
    }


def main() -> None:
    """Print the tables and write the JSON."""
    options = arguments(__doc__, text=True).parse_args()
    n = 64 if options.quick else 256
    model, tokenizer, *_ = ch.load("smollm2")
    ids = token_ids(tokenizer, n, options.text)
    recorder = Saturation()
    token = ACTIVE.set(recorder)
    try:
        with torch.no_grad():
            model.model(ids, use_cache=False)
    finally:
        ACTIVE.reset(token)
    rows = recorder.rows
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in list(rows[0])[2:]}
    table([mean], f"M1: SmolLM2, {n} tokens, mean over {len(rows)} heads, later half of the queries")
    sharpened = sorted(rows, key=lambda row: row["largest without"] - row["largest with"], reverse=True)
    table(sharpened[:5], "the heads that change most without the division by √d_k = 8")
    print(f"rows add up to 1 within {recorder.off_one:.2g}")
    layer = multi_head()
    table(
        [{"compared": name, "largest difference": value} for name, value in layer.items()],
        "M2: 8 heads of 64",
    )
    shared = grouped(n)
    table(shared, "M4: grouped heads against repeated ones")
    logits = adapter(ids)
    table([logits], f"M4: SmolLM2's logits, {n} tokens")
    figures = {
        "tokens": n,
        "heads": len(rows),
        "rows_add_up_within": recorder.off_one,
        "saturation": mean,
        "even_entropy": sum(math.log(i + 1) for i in range(n // 2, n)) / (n - n // 2),
        "head": sharpened[0],
        "multi_head_worst": max(layer.values()),
        "grouped_worst": max(row["difference"] for row in shared),
        "logits": logits,
    }
    save("mechanism", options, figures, multi_head=layer, grouped=shared, heads=sharpened[:10])


if __name__ == "__main__":
    main()
