"""A small multinomial logistic regression with L2, for labels that may be known only in part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Logistic:
    """Probabilities softmax((x − mean) / scale · weights + bias).

    mean, scale (d,); weights (d, C); bias (C,); all float32.
    """

    mean: Floats
    scale: Floats
    weights: Floats
    bias: Floats

    def logits(self, x: Floats) -> Floats:
        """Return the logits, (n, C), of features (n, d)."""
        return np.asarray(((x - self.mean) / self.scale) @ self.weights + self.bias, np.float32)

    def probabilities(self, x: Floats) -> Floats:
        """Return softmax of the logits, (n, C)."""
        z = self.logits(x)
        raised: Floats = np.exp(z - z.max(1, keepdims=True))
        out: Floats = raised / raised.sum(1, keepdims=True)
        return out


def fit(x: Floats, allowed: NDArray[np.bool_], weight: Floats, *, c: float, steps: int = 60) -> Logistic:
    """Fit a logistic regression.

    x: features (n, d). allowed: (n, C), the classes that an example may be of; one for a known label, several
    if only that much is known (the loss is then minus the log of their summed probability). weight: (n,),
    of each example. c: inverse strength of the L2 penalty, as in scikit-learn: the penalty is
    ||weights||² / (2 c) against the weighted sum of losses, features standardised.

    Deterministic: full-batch L-BFGS from zero.
    """
    mean, scale = x.mean(0), x.std(0) + 1e-4
    data = torch.from_numpy((x - mean) / scale)
    mask = torch.from_numpy(np.where(allowed, 0.0, -np.inf).astype(np.float32))
    share = torch.from_numpy(weight.astype(np.float32))
    weights = torch.zeros(x.shape[1], allowed.shape[1], requires_grad=True)
    bias = torch.zeros(allowed.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, bias], max_iter=steps, history_size=10, line_search_fn="strong_wolfe", tolerance_grad=1e-5
    )

    def closure() -> Any:
        optimizer.zero_grad()
        logits = torch.log_softmax(data @ weights + bias, 1)
        loss = -(share * torch.logsumexp(logits + mask, 1)).sum() + weights.square().sum() / (2 * c)
        loss = loss / share.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return Logistic(mean, scale, weights.detach().numpy(), bias.detach().numpy())
