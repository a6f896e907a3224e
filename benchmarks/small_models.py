"""Small language models, trained here on a text that comes with Python, and kept so that a run can go on.

Characters of the texts behind `help("lambda")` and its like (pydoc_data.topics, 0.4 MB), or of a file. What
is trained once lies under build/bench/models/, named after everything that went into it.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

from clearhead.nn import Decoder

KEPT = Path(__file__).parent.parent / "build" / "bench" / "models"
CHARACTERS = [chr(i) for i in (10, *range(32, 127))]  # all others are left out
NUMBER = {character: i for i, character in enumerate(CHARACTERS)}
KEPT_OUT = 10  # every tenth topic, or the last tenth of a file


@dataclass(frozen=True)
class Recipe:
    """What a model is and how it is trained: `batch` pieces of `length` characters a step."""

    embed_dim: int = 256
    layers: int = 4
    heads: int = 16
    kv_heads: int = 16
    length: int = 256
    batch: int = 8
    steps: int = 300
    rate: float = 2e-3
    seed: int = 0

    def model(self) -> Decoder:
        """A new one."""
        torch.manual_seed(self.seed)
        return Decoder(len(CHARACTERS), self.embed_dim, self.layers, self.heads, num_kv_heads=self.kv_heads)


def encode(text: str) -> Tensor:
    """The characters' numbers, (length,)."""
    return torch.tensor([NUMBER[c] for c in text if c in NUMBER])


def corpus(path: Path | None = None) -> tuple[Tensor, Tensor]:
    """What to learn from and what is kept out of it, one row of numbers each."""
    if path is None:
        names = sorted(topics.topics)
        out = set(names[::KEPT_OUT])
        parts = (
            "\n".join(topics.topics[name] for name in names if (name in out) == kept)
            for kept in (False, True)
        )
        learnt, kept_out = (encode(text) for text in parts)
        return learnt, kept_out
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    whole = encode(raw.decode("utf-8"))
    cut = len(whole) * (KEPT_OUT - 1) // KEPT_OUT
    return whole[:cut], whole[cut:]


def train(model: Decoder, text: Tensor, recipe: Recipe, steps: int | None = None) -> list[float]:
    """Learn to guess the next character; bits per character, step by step.

    The pieces and their order follow from the seed.
    """
    steps = recipe.steps if steps is None else steps
    generator = torch.Generator().manual_seed(1000 + recipe.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, steps // 10)  # then down a cosine

    def rate(step: int) -> float:
        return min(
            (step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm)))
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - recipe.length, (recipe.batch, 1), generator=generator)
        loss = model.loss(text[starts + torch.arange(recipe.length + 1)])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item() / math.log(2))
    return losses


def trained(recipe: Recipe, text: Tensor) -> Decoder:
    """The recipe's model, trained now or before."""
    words = json.dumps([dataclasses.asdict(recipe), hashlib.sha256(text.numpy().tobytes()).hexdigest()])
    path = KEPT / f"{hashlib.sha256(words.encode()).hexdigest()[:16]}.pt"
    model = recipe.model()
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    train(model, text, recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    torch.save(model.state_dict(), half)
    half.rename(path)
    return model.eval()


@torch.no_grad()
def bits(model: Decoder, text: Tensor, length: int, most: int = 512) -> float:
    """Bits per character on a text, in at most `most` pieces of `length`."""
    pieces = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)[:most]
    total = sum(model.loss(part).item() * len(part) for part in pieces.split(16))
    return total / len(pieces) / math.log(2)


def describe(recipe: Recipe) -> dict[str, Any]:
    """For a result."""
    return dataclasses.asdict(recipe)
