"""An encoder: it fills gaps in a text, and needs to look both ways to do it.

    python examples/encoder.py [--steps 400] [--out docs/figures/encoder.svg]

A text is a random word of 12 letters written twice; some letters of it are hidden, never both of a pair. What
a hidden letter was can be read at its twin, 12 places ahead for gaps in the first half. The same model with
causal attention is trained beside it: it cannot look ahead, and must guess there.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from picture import Panel, draw
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import Block

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
LETTERS, HIDDEN, LENGTH = 16, 16, 12  # letters are 0 to 15; 16 stands for a hidden one


class Encoder(nn.Module):
    """Letters in, scores of the letters out, (B, L) to (B, L, letters)."""

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS + 1, 64)
        self.blocks = nn.ModuleList(Block(64, 4, causal=causal, positions="rotary") for _ in range(2))
        self.head = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, LETTERS))

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The scores, and each layer's weights (B, heads, L, L), which a text this short can afford."""
        x, looks = self.embedding(ids), []
        for block in self.blocks:
            x, (weights,) = block(x, observe=[ch.Weights(rows="all")])
            looks.append(weights)
        return self.head(x), looks


def texts(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts with gaps (count, 24), and what they were."""
    word = torch.randint(LETTERS, (count, LENGTH), generator=generator)
    whole = torch.cat([word, word], dim=1)
    gap = torch.rand(count, LENGTH, generator=generator) < 0.3
    first = torch.rand(count, LENGTH, generator=generator) < 0.5
    gaps = torch.cat([gap & first, gap & ~first], dim=1)
    return whole.masked_fill(gaps, HIDDEN), whole


def train(model: Encoder, steps: int) -> list[float]:
    """Fill gaps, `steps` times 64 texts of them; the losses."""
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        seen, whole = texts(64, generator)
        scores, _ = model(seen)
        loss = F.cross_entropy(scores[seen == HIDDEN], whole[seen == HIDDEN])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def accuracy(model: Encoder) -> list[float]:
    """How many gaps of 1000 new texts are filled right, in the first and in the second half."""
    seen, whole = texts(1000, torch.Generator().manual_seed(2))
    right = model(seen)[0].argmax(-1) == whole
    halves = (slice(0, LENGTH), slice(LENGTH, None))
    return [right[:, half][seen[:, half] == HIDDEN].float().mean().item() for half in halves]


@torch.no_grad()
def look(model: Encoder) -> tuple[Tensor, list[str], str, float]:
    """Of the head that puts most on a gap's twin: a map (24, 24), of which text; its name and share."""
    seen, _ = texts(200, torch.Generator().manual_seed(3))
    looks = torch.stack(model(seen)[1], dim=1)  # (B, layers, heads, L, L)
    place = torch.arange(2 * LENGTH)
    on_twin = looks[..., place, (place + LENGTH) % (2 * LENGTH)]  # (B, layers, heads, L)
    share = (on_twin * (seen == HIDDEN)[:, None, None]).sum((0, 3)) / (seen == HIDDEN).sum()
    layer, head = divmod(int(share.argmax()), looks.shape[2])
    row = int((seen == HIDDEN).sum(1).argmax())  # the text with the most gaps
    text = ["·" if i == HIDDEN else string.ascii_lowercase[i] for i in seen[row]]
    return looks[row, layer, head], text, f"layer {layer}, head {head}", share.max().item()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, measure, draw; the losses of the encoder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="of training, for each of the two models")
    parser.add_argument("--out", type=Path, default=FIGURES / "encoder.svg", help="the picture")
    given = parser.parse_args(arguments)

    panels, said, losses = [], [], []
    for causal in (False, True):
        torch.manual_seed(0)
        model = Encoder(causal=causal)
        losses.append(train(model, given.steps))
        first, second = accuracy(model)
        name = "causal" if causal else "both ways"
        weights, text, where, share = look(model)
        said.append(
            f"{name}: {first:.1%} of the gaps in the first half filled right, {second:.1%} in the second"
        )
        print(f"{said[-1]}; {where} puts {share:.1%} of a gap's attention on its twin")
        panels.append(Panel(f"{name}, {where}", weights, text, text))
    draw(
        given.out,
        panels,
        "A word written twice, with gaps (·), and the head that looks most at a gap's twin. Both ways, a gap "
        "in the first half finds its letter 12 places ahead, one in the second half 12 places back. Causal "
        f"attention cannot look ahead: nothing lies above the diagonal. {'; '.join(said)} (chance: "
        f"{1 / LETTERS:.1%}).",
    )
    print(f"written: {given.out}")
    return losses[0]


if __name__ == "__main__":
    main()
