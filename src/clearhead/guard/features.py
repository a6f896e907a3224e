"""What the model's pass over a window says about each of its spans: attention by head, and hidden states.

Everything comes from one prefill: the mass that the last token of the prompt (from which the answer starts)
gives to each span and to the instruction in every head (`SegmentMass`, exact, memory linear in the length),
and, if asked for, the residual stream of a few layers, averaged over a span's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clearhead.errors import GuardError, ModelError
from clearhead.guard.layout import Laid
from clearhead.models.fit import check_one_sided, read
from clearhead.models.prompt import check_length
from clearhead.observables import SegmentMass
from clearhead.segments import Segments
from clearhead.trace.observe import observe
from clearhead.trace.trace import Trace

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
    tokens. tokens: of the prompt.
    """

    instruction: Floats
    spans: Floats
    sizes: Floats
    hidden: Floats
    task: Floats
    tokens: int


def read_window(model: Any, laid: Laid, *, rows: int = 1, layers: Sequence[int] = ()) -> Reading:
    """Run the model once over a window and return what its spans got.

    rows: how many tokens from the last one back are looked at. layers: whose residual stream is kept,
    numbered as in the model's own list.

    Raises ModelError for a model that is no causal one, or that does not attend through clearhead, and
    PromptError for a window longer than the model's positions.
    """
    check_causal(model)
    check_length(len(laid.prompt), model.config)
    with torch.inference_mode(), Watched(model, laid, rows=rows, layers=layers) as watched:
        read(model, laid.prompt, logits_to_keep=1)
    return watched.reading()


class Watched:
    """A context in which a model reads a prompt, in one call or several, and its spans are watched.

    Arguments as in `read_window`. Ask `complete` whether the whole prompt has been read, then `reading`.
    """

    def __init__(self, model: Any, laid: Laid, *, rows: int = 1, layers: Sequence[int] = ()) -> None:
        self._model, self._laid, self._layers = model, laid, tuple(layers)
        self._owners = span_of_token(laid)
        n = self._n = len(self._owners)
        self._asked = SegmentMass(
            Segments(self._owners, [str(i) for i in range(_FIRST + len(laid.spans))]),
            rows=list(range(n - min(rows, n), n)),
        )
        self._sums: dict[int, Tensor] = {}
        self._seen: dict[int, int] = {}
        self._stack = ExitStack()
        self._trace: Trace | None = None

    def __enter__(self) -> Watched:
        with ExitStack() as stack:
            segments = self._asked.membership.segments
            # First, as it may run an unknown model on two tokens of its own, which are no part of the prompt.
            self._trace = stack.enter_context(observe(self._model, segments, self._asked))
            blocks = decoder_blocks(self._model)
            for k in self._layers:
                if not 0 <= k < len(blocks):
                    raise ModelError(f"layer must be 0 to {len(blocks) - 1} in this model, got {k}")
                handle = blocks[k].register_forward_hook(self._keep(k))
                stack.callback(handle.remove)
            last = blocks[-1].register_forward_hook(self._count)
            stack.callback(last.remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; what was seen is kept."""
        self._stack.close()

    @property
    def read(self) -> int:
        """How many tokens the model has read."""
        return self._seen.get(-1, 0)

    @property
    def complete(self) -> bool:
        """Whether the whole prompt has been read."""
        return self.read >= self._n

    def reading(self) -> Reading:
        """Return what was seen.

        Raises GuardError before the whole prompt has been read, and for numbers that are not finite, as of a
        model that runs over in half precision: they are above no threshold.
        """
        if self._trace is None or not self.complete:
            raise GuardError(
                f"the model has read {self.read} of the prompt's {self._n} tokens: there is "
                "nothing to judge yet"
            )
        mass = torch.as_tensor(self._trace.stream().mass).float()  # (layers, heads, R, S + 2)
        by_row = mass.flatten(0, 1).permute(1, 2, 0).cpu().numpy()
        counts = torch.bincount(self._owners, minlength=_FIRST + len(self._laid.spans)).float()
        means = [self._sums[k] / counts.clamp_min(1)[:, None] for k in self._layers]
        states = torch.stack(means).numpy() if means else np.zeros((0, len(counts), 0), np.float32)
        found = Reading(
            instruction=np.ascontiguousarray(by_row[:, _INSTRUCTION]),
            spans=np.ascontiguousarray(by_row[:, _FIRST:]),
            sizes=counts[_FIRST:].numpy(),
            hidden=states[:, _FIRST:],
            task=states[:, _INSTRUCTION],
            tokens=self._n,
        )
        if not all(np.isfinite(part).all() for part in (by_row, states)):
            raise GuardError(
                "the model's numbers are not finite (NaN or infinity): nothing can be judged by them"
            )
        return found

    def _keep(self, layer: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            state = (output[0] if isinstance(output, tuple) else output).detach()
            at, stop = self._place(layer, state)
            if stop > at:
                if layer not in self._sums:
                    self._sums[layer] = torch.zeros(_FIRST + len(self._laid.spans), state.shape[-1])
                self._sums[layer].index_add_(0, self._owners[at:stop], state[0, : stop - at].float().cpu())

        return hook

    def _count(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._place(-1, output[0] if isinstance(output, tuple) else output)

    def _place(self, key: int, state: Tensor) -> tuple[int, int]:
        """Which of the prompt's tokens these states are."""
        if state.shape[0] != 1:
            raise GuardError(f"one prompt is watched at a time, got a batch of {state.shape[0]}")
        at = self._seen.get(key, 0)
        self._seen[key] = at + state.shape[1]
        return min(at, self._n), min(at + state.shape[1], self._n)


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


def decoder_blocks(model: Any) -> nn.ModuleList:
    """Return the model's layers: the first of its module lists that is as long as there are layers."""
    config = model.config.get_text_config()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise ModelError(f"{type(model).__name__} has no list of its {config.num_hidden_layers} layers")
