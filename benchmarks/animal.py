"""In "The animal didn't cross the road because it was too tired.", what does "it" look at, in which heads?

    python benchmarks/animal.py [--quick]

SmolLM2, the sentence as it is. For every head the weight of "it" on "animal" and on "road"; then "animal" is
deleted from the view of the head that looks at it most, of the ten that do, and of all (its key is masked
for every query; the other weights grow to fill the gap), and "road" likewise for comparison. What that does:
the Kullback-Leibler divergence of the next token's distribution after "it" and after "too", in bits, and the
probability of "tired" after "too".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from clearhead.models.active import ACTIVE, Call
from record import arguments, save, table

SENTENCE = "The animal didn't cross the road because it was too tired."
Head = tuple[int, int]  # layer, head


class _Calls:
    """A recorder that keeps the last call of each module and asks nothing."""

    def __init__(self) -> None:
        self.last: Call | None = None

    def observables(self, call: Call) -> Sequence[ch.Observable]:
        self.last = call
        return ()

    def record(self, call: Call, observables: Sequence[ch.Observable], seen: Sequence[Any]) -> None:
        """Nothing was asked."""


@contextmanager
def deleted(model: Any, key: int, heads: Sequence[Head]) -> Iterator[None]:
    """Run the model of the block with one token hidden from the keys of these heads."""
    calls, handles = _Calls(), []

    def hook(numbers: list[int]) -> Any:
        def before_projection(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            assert calls.last is not None
            q, k, v = calls.last.query, calls.last.key, calls.last.value
            real = torch.ones(1, k.shape[2], dtype=torch.bool)
            real[0, key] = False
            out = ch.attention(q, k, v, mask=calls.last.mask & ch.Mask(padding=real, start=0))
            mixed = inputs[0].unflatten(-1, (q.shape[1], -1)).clone()
            mixed[:, :, numbers] = out.transpose(1, 2)[:, :, numbers]
            return (mixed.flatten(2),)

        return before_projection

    for layer in {layer for layer, _ in heads}:
        numbers = [head for one, head in heads if one == layer]
        projection = model.model.layers[layer].self_attn.o_proj
        handles.append(projection.register_forward_pre_hook(hook(numbers)))
    token = ACTIVE.set(calls)
    try:
        yield
    finally:
        ACTIVE.reset(token)
        for handle in handles:
            handle.remove()


@torch.no_grad()
def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """Of the next token after each, (n, vocabulary)."""
    out: Tensor = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
    return out


def main() -> None:
    """Print the tables and write the JSON."""
    options = arguments(__doc__).parse_args()
    model, tokenizer, *_ = ch.load("smollm2")
    prompt = ch.Prompt.plain([ch.Segment("sentence", "user", SENTENCE)], tokenizer)
    words = [token.strip() for token in prompt.tokens]
    it, animal, road, too = (words.index(word) for word in ("it", "animal", "road", "too"))
    tired = int(prompt.input_ids[0, words.index("tired")])

    with ch.observe(model, prompt.segments, [ch.Weights(rows=[it])]) as trace, torch.no_grad():
        model(**prompt.inputs, use_cache=False)
    weights = trace.weights[:, :, 0]  # (layer, head, key)
    order = weights[:, :, animal].flatten().argsort(descending=True).tolist()
    heads: list[Head] = [divmod(place, weights.shape[1]) for place in order]
    rows = []
    for layer, head in heads[:10]:
        row = weights[layer, head]
        rows.append(
            {
                "layer": layer,
                "head": head,
                "on animal": float(row[animal]),
                "on road": float(row[road]),
                "on the first token": float(row[0]),
                "looks most at": words[int(row.argmax())],
            }
        )
    table(rows, f'"{SENTENCE}": where "it" looks, the ten heads most on "animal"')
    most = int((weights.argmax(-1) == animal).sum())
    mean = {word: float(weights[:, :, at].mean()) for word, at in (("animal", animal), ("road", road))}
    print(
        f'"animal" is what "it" looks at most in {most} of {len(heads)} heads; mean over all heads: ', end=""
    )
    print(f'{mean["animal"]:.3f} on "animal", {mean["road"]:.3f} on "road"')

    plain = log_probabilities(model, prompt.input_ids)
    effects = []
    for label, chosen in (("the first head", heads[:1]), ("the ten heads", heads[:10]), ("all heads", heads)):
        for word, key in (("animal", animal), ("road", road)):
            with deleted(model, key, chosen):
                changed = log_probabilities(model, prompt.input_ids)
            bits = (plain.exp() * (plain - changed)).sum(-1) / torch.tensor(2.0).log()
            effects.append(
                {
                    "deleted": word,
                    "from": label,
                    "bits after it": float(bits[it]),
                    "bits after too": float(bits[too]),
                    "tired before": float(plain[too, tired].exp()),
                    "tired after": float(changed[too, tired].exp()),
                }
            )
    table(effects, "what deleting it does to the next token")
    figures = {
        "sentence": SENTENCE,
        "top": rows[0],
        "heads_looking_most_at_animal": most,
        "heads": len(heads),
        "mean_on_animal": mean["animal"],
        "mean_on_road": mean["road"],
        "effects": effects,
    }
    save("animal", options, figures, heads=rows)


if __name__ == "__main__":
    main()
