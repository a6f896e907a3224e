"""Whether a text is of a kind that the calibration has seen, by where the model itself puts it.

A calibration on mails says nothing about code: measured on such a pair, a read-out was hardly better than
the text's length. So the calibration keeps where its texts lie in the model's hidden space (the mean over a
text's spans after one layer, as a few centres with one spread per dimension), and a text that lies farther
from all of them than such texts do is not judged. On calibrations of mails alone this refuses over nine
tenths of BIPIA's code and tables and one in a hundred of its unseen mails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_CENTRES, _EACH = 8, 40
"""At most this many centres, and at least this many texts for each."""


@dataclass(frozen=True)
class Domain:
    """Where texts lie: centres (C, D) and spread (D,). cutoff: the distance up to which one is near."""

    centres: Floats
    spread: Floats
    cutoff: float

    def distance(self, place: Floats) -> float:
        """Return the root mean square distance, in spreads, of a text (D,) to the nearest centre."""
        away = (place - self.centres) / self.spread
        return float(np.sqrt((away**2).mean(1)).min())

    def why_foreign(self, place: Floats) -> str:
        """Return why a text is of no kind that was seen, "" if it is of one."""
        distance = self.distance(place)
        if distance <= self.cutoff:
            return ""
        return (
            f"the calibration has no texts of this kind: it lies {distance:.2f} spreads away from the "
            f"nearest ones, and up to {self.cutoff:.2f} is usual"
        )


def learn(places: Floats, groups: NDArray[Any], *, seed: int = 0) -> Domain:
    """Return the domain of texts at `places`, (n, D).

    groups (n,): which texts were made from one; the cutoff is what 99.5% of those of every other group keep
    when the rest sets the centres, with a margin of 5%.
    """
    names = np.unique(groups)
    rng = np.random.default_rng(seed)
    held = np.isin(groups, rng.permutation(names)[: max(1, len(names) // 3)])
    trial = _around(places[~held] if (~held).any() else places, rng)
    distances = [trial.distance(place) for place in places[held]]
    whole = _around(places, rng)
    return Domain(whole.centres, whole.spread, 1.05 * float(np.quantile(distances, 0.995)))


def _around(places: Floats, rng: np.random.Generator) -> Domain:
    """Centres by k-means on standardised places, and the spread around them."""
    count = int(np.clip(len(places) // _EACH, 1, _CENTRES))
    scale = places.std(0) + 1e-3
    data = places / scale
    centres = data[rng.choice(len(data), count, replace=False)]
    nearest = np.zeros(len(data), np.int64)
    for _ in range(30):
        nearest = ((data[:, None] - centres[None]) ** 2).sum(2).argmin(1)
        centres = np.stack(
            [data[nearest == k].mean(0) if (nearest == k).any() else centres[k] for k in range(count)]
        )
    spread = (data - centres[nearest]).std(0) + 0.1
    return Domain((centres * scale).astype(np.float32), (spread * scale).astype(np.float32), np.inf)
