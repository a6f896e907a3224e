"""From what a pass says about the spans to probabilities: none, a benign imperative, an attack.

A span's features go through one multinomial logistic regression with three classes, so that an imperative
meant for people is learned as such (as in AlignSentinel, arXiv 2602.13597). A text is judged by its strongest
span; averages over the spans, their sum and what the others say did not help. A text of several windows has
more chances to look suspicious somewhere: its odds are divided by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import ArgumentError
from clearhead.guard.features import FLOOR, Reading

Floats = NDArray[np.float32]

CLASSES = ("none", "imperative", "attack")
VIEWS = ("attention", "hidden")
ROWS = 5
"""The last tokens of the prompt whose attention is read: those with which the template opens the answer."""


def check_views(views: Sequence[str]) -> tuple[str, ...]:
    """Return the views in order. Raises ArgumentError for none and for unknown ones."""
    if isinstance(views, str) or not views or any(view not in VIEWS for view in views):
        raise ArgumentError(f"views must be one or both of {', '.join(VIEWS)}, got {views!r}")
    return tuple(view for view in VIEWS if view in views)


def features(reading: Reading, views: Sequence[str]) -> Floats:
    """Return the features of each span, (S, d) float32.

    attention: per head the log mass per token that the last token gives to the span, the same relative to
    all spans together, and the log mass per token that the template's tokens before it give, averaged: 3 H.
    hidden: the residual stream after each kept layer, mean over the span's tokens, with its cosine to the
    instruction's mean and to the mean over the spans: K (D + 2). Both: the log of the span's tokens. All are
    finite where the reading is, also those of a span whose characters are in the tokens of another one.
    """
    sizes = np.maximum(reading.sizes, 1)[:, None]
    parts: list[Floats] = []
    if "attention" in views:
        last = reading.spans[-1]
        own = np.log(last / sizes + FLOOR)
        parts += [own, own - np.log(last.sum(0) / sizes.sum() + FLOOR)]
        before = reading.spans[:-1] if len(reading.spans) > 1 else reading.spans
        parts.append(np.log(before.mean(0) / sizes + FLOOR))
    if "hidden" in views:
        for states, task in zip(reading.hidden, reading.task, strict=True):
            length = np.linalg.norm(states, axis=1) + FLOOR
            whole = states.mean(0)
            parts.append(states)
            for other in (task, whole):
                parts.append((states @ other / length / (np.linalg.norm(other) + FLOOR))[:, None])
    parts.append(np.log(sizes))
    return np.concatenate(parts, 1).astype(np.float32)


@dataclass(frozen=True)
class Readout:
    """The weights of one choice of views, fitted.

    weights (d, 2) and bias (2,): logits of "imperative" and "attack" against "none". slope, offset: from a
    window's log odds to calibrated ones.
    """

    views: tuple[str, ...]
    weights: Floats
    bias: Floats
    slope: float
    offset: float

    def span_logits(self, x: Floats) -> Floats:
        """Return log odds of (imperative, attack) against none of each span, (S, 2)."""
        out: Floats = x @ self.weights + self.bias
        return out

    def span_odds(self, x: Floats) -> Floats:
        """Return the log odds of attack against the other two of each span, (S,)."""
        z = self.span_logits(x)
        out: Floats = z[:, 1] - np.logaddexp(0, z[:, 0])
        return out

    def odds(self, windows: Sequence[Floats], number: float) -> float:
        """Return the calibrated log odds of a text from its windows' span odds, (S,) each.

        number: how many windows of the calibration's length they are.
        """
        return self.slope * pooled(windows, number) + self.offset


def pooled(windows: Sequence[Floats], number: float) -> float:
    """Return the log odds of the strongest span, divided by the number of windows."""
    return float(max(odds.max() for odds in windows) - np.log(number))
