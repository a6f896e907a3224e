"""What the model's pass over a window says about each of its spans: attention by head, and hidden states.

Everything comes from one prefill: the mass that the last token of the prompt (from which the answer starts)
gives to each span and to the instruction in every head (`SegmentMass`, exact, memory linear in the length),
and, if asked for, the residual stream of a few layers, averaged over a span's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clearhead.errors import ModelError
from clearhead.guard.layout import Laid
from clearhead.models.fit import check_one_sided, read
from clearhead.models.prompt import check_length
from clearhead.observables import SegmentMass
from clearhead.segments import Segments
from clearhead.trace.observe import observe

Floats = NDArray[np.float32]

FLOOR = 1e-8
"""Added to a mass before its logarithm."""

_OTHER, _INSTRUCTION, _FIRST = 0, 1, 2


@dataclass(frozen=True)
class Reading:
    """One window as the model read it; H = layers · heads, S spans, D hidden size, all float32.

    instruction (R, H): mass on the instruction, of each of the R rows that were looked at, the last token's
    last. spans (R, S, H): mass on each span. sizes (S,): tokens of each span. hidden (K, S, D): residual
    stream after each of the K layers, mean over the span's tokens. task (K, D): the same of the instruction's
    tokens. last (K, D): of the last token. logits (V,): of the next token. tokens, instruction_tokens: of
    the prompt and of the instruction in it.
    """

    instruction: Floats
    spans: Floats
    sizes: Floats
    hidden: Floats
    task: Floats
    last: Floats
    tokens: int
    instruction_tokens: int
    logits: Tensor


def read_window(model: Any, laid: Laid, *, rows: int = 1, layers: Sequence[int] = ()) -> Reading:
    """Run the model once over a window and return what its spans got.

    rows: how many tokens from the last one back are looked at. layers: whose residual stream is kept,
    numbered as in the model's own list.

    Raises ModelError for a model that is no causal one, or that does not attend through clearhead, and
    PromptError for a window longer than the model's positions.
    """
    check_causal(model)
    n = len(laid.prompt)
    check_length(n, model.config)
    owners = span_of_token(laid)
    segments = Segments(owners, [str(i) for i in range(_FIRST + len(laid.spans))])
    asked = SegmentMass(segments, rows=list(range(n - min(rows, n), n)))
    with (
        torch.inference_mode(),
        kept_states(model, layers) as states,
        observe(model, segments, asked) as trace,
    ):
        output = read(model, laid.prompt, logits_to_keep=1)
    mass = torch.as_tensor(trace.stream().mass).float()  # (layers, heads, R, S + 2)
    by_row = mass.flatten(0, 1).permute(1, 2, 0).numpy()
    return summed(by_row, owners, [states[k] for k in layers], output.logits[0, -1].float(), laid)


def summed(by_row: Floats, owners: Tensor, states: Sequence[Tensor], logits: Tensor, laid: Laid) -> Reading:
    """Put a reading together. by_row: (R, S + 2, H) masses. states: per layer (n, D)."""
    S, n = len(laid.spans), len(owners)
    counts = torch.bincount(owners, minlength=_FIRST + S).float()
    means = []
    for state in states:
        total = torch.zeros(_FIRST + S, state.shape[-1])
        total.index_add_(0, owners, state.float())
        means.append((total / counts.clamp_min(1)[:, None])[_INSTRUCTION:])
    width = states[0].shape[-1] if states else 0
    mean = torch.stack(means).numpy() if means else np.zeros((0, 1 + S, width), np.float32)
    return Reading(
        instruction=np.ascontiguousarray(by_row[:, _INSTRUCTION]),
        spans=np.ascontiguousarray(by_row[:, _FIRST:]),
        sizes=counts[_FIRST:].numpy(),
        hidden=mean[:, 1:],
        task=mean[:, 0],
        last=torch.stack([s[-1].float() for s in states]).numpy()
        if states
        else np.zeros((0, width), np.float32),
        tokens=n,
        instruction_tokens=int(counts[_INSTRUCTION]),
        logits=logits,
    )


def span_of_token(laid: Laid) -> Tensor:
    """Return for each token 0 (neither), 1 (of the instruction) or 2 + the number of its span, (n,) int64.

    A token belongs to the span with most of its characters.
    """
    kind = np.zeros(len(laid.prompt.text) + 1, np.int64)
    for name in laid.trusted:
        for start, end in laid.prompt.characters[name]:
            kind[start:end] = _INSTRUCTION
    for number, (start, end) in enumerate(laid.characters):
        kind[start:end] = _FIRST + number
    owners = np.zeros(len(laid.prompt), np.int64)
    at = 0
    for position, token in enumerate(laid.prompt.tokens):
        own = kind[at : at + len(token)]
        at += len(token)
        if len(own):
            values, counts = np.unique(own[own > 0] if (own > 0).any() else own, return_counts=True)
            owners[position] = values[counts.argmax()]
        elif position:
            owners[position] = owners[position - 1]  # a further token of the same character
    return torch.from_numpy(owners)


def check_causal(model: Any) -> None:
    """Raise ModelError unless the model reads one text from left to right and writes the next token."""
    check_one_sided(model, "the guard")
    if not getattr(model, "can_generate", bool)():
        raise ModelError(
            f"the guard needs a causal language model, one that writes an answer; {type(model).__name__} "
            "does not"
        )


@contextmanager
def kept_states(model: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Keep the residual stream after some layers of the first item, (n, D) each, while the context is open.

    Raises ModelError for layers that the model does not have.
    """
    blocks = decoder_blocks(model)
    wrong = [k for k in layers if not 0 <= k < len(blocks)]
    if wrong:
        raise ModelError(f"layer must be 0 to {len(blocks) - 1} in this model, got {wrong[0]}")
    kept: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            kept[number] = (output[0] if isinstance(output, tuple) else output)[0].detach()

        return hook

    handles = [blocks[k].register_forward_hook(keep(k)) for k in layers]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def decoder_blocks(model: Any) -> nn.ModuleList:
    """Return the list of the model's layers: of its module lists the one as long as its number of layers."""
    config = model.config.get_text_config()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise ModelError(f"{type(model).__name__} has no list of its {config.num_hidden_layers} layers")
