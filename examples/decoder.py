"""A decoder: it learns to write English from Python's own help texts, character by character.

    python examples/decoder.py [--steps 600] [--out docs/figures/decoder.svg]

The texts are those behind `help("lambda")` and its like, in pydoc_data.topics; every tenth topic is kept out
of training. Each character sees only those before it, so every place of a text is a lesson, and a cache makes
writing cheap. Grouped-query attention: two query heads share one key/value head.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics

import torch
from picture import Panel, draw
from torch import Tensor
from transformers import DynamicCache

import clearhead as ch
from clearhead.nn import Decoder

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
CHARACTERS = [chr(i) for i in (10, *range(32, 127))]  # all others are left out
NUMBER = {character: i for i, character in enumerate(CHARACTERS)}
LENGTH, BATCH = 128, 16


def encode(text: str) -> Tensor:
    """The characters' numbers, (length,)."""
    return torch.tensor([NUMBER[c] for c in text if c in NUMBER])


def corpus() -> tuple[Tensor, Tensor]:
    """The texts to learn from and those kept out, each as one row of numbers."""
    kept_out = sorted(topics.topics)[::10]
    parts = [
        [text for name, text in topics.topics.items() if (name in kept_out) == out] for out in (False, True)
    ]
    return encode("\n".join(parts[0])), encode("\n".join(parts[1]))


def train(model: Decoder, text: Tensor, steps: int) -> list[float]:
    """Learn to guess the next character, `steps` times 16 pieces of 128; the losses in bits per character."""
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        loss = model.loss(text[starts + torch.arange(LENGTH + 1)])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item() / math.log(2))
        if step % 100 == 99:
            print(f"step {step + 1}: {sum(losses[-100:]) / 100:.2f} bits per character")
    return losses


@torch.no_grad()
def bits(model: Decoder, text: Tensor) -> float:
    """Bits per character on a text, in pieces of 128."""
    pieces = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return sum(model.loss(part).item() * len(part) for part in pieces.split(64)) / len(pieces) / math.log(2)


def unigram_bits(text: Tensor) -> float:
    """Bits per character for a guesser who knows only how frequent each is."""
    counts = Counter(text.tolist())
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values())


@torch.no_grad()
def heads(model: Decoder, text: Tensor) -> tuple[Tensor, Tensor]:
    """Of each head (layers, heads): weight on the character before, and mean distance looked back."""
    pieces = text[: 32 * LENGTH].view(32, LENGTH)
    _, seen = model(pieces, observe=[ch.Weights(rows="all"), ch.MeanDistance()])
    before = torch.stack([w.diagonal(-1, 2, 3).mean((0, 2)) for w, _ in seen])
    return before, torch.stack([distance.mean((0, 2)) for _, distance in seen])


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, measure, write a little, draw; the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600, help="of training")
    parser.add_argument("--out", type=Path, default=FIGURES / "decoder.svg", help="the picture")
    given = parser.parse_args(arguments)

    torch.manual_seed(0)
    learnt, kept_out = corpus()
    model = Decoder(len(CHARACTERS), 128, 4, 4, num_kv_heads=2)
    losses = train(model, learnt, given.steps)
    model.eval()
    reached = bits(model, kept_out)
    alone = unigram_bits(kept_out)
    print(f"kept-out topics: {reached:.2f} bits per character ({alone:.2f} by frequencies alone)")

    prompt = "The lambda expression "
    started = time.perf_counter()
    steps = model.generate(encode(prompt)[None], 200, cache=DynamicCache(), temperature=0.5,
                           generator=torch.Generator().manual_seed(2))  # fmt: skip
    written = "".join(CHARACTERS[int(token)] for token in steps)
    print(f"{prompt}{written}\n({200 / (time.perf_counter() - started):.0f} characters per second)")

    text = "returns the value of the"
    before, distance = heads(model, kept_out)
    near, far = divmod(int(before.argmax()), 4), divmod(int(distance.argmax()), 4)
    _, seen = model(encode(text)[None], observe=[ch.Weights(rows="all")])
    draw(
        given.out,
        [
            Panel(f"layer {layer}, head {head}", seen[layer][0][0, head].detach(), text, text)
            for layer, head in (near, far)
        ],
        "A decoder reads a text it has not learnt from. Nothing lies above the diagonal: no character sees a "
        f"later one, which is what lets the model write. Layer {near[0]}, head {near[1]} puts "
        f"{before[near]:.0%} of its attention on the character before (kept-out texts); layer {far[0]}, head "
        f"{far[1]} looks farthest back, {distance[far]:.0f} characters in the mean. After {given.steps} "
        f"steps it needs {reached:.2f} bits per character of kept-out text; by frequencies {alone:.2f}.",
    )
    print(f"written: {given.out}")
    return losses


if __name__ == "__main__":
    main()
