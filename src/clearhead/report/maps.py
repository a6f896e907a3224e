"""Attention maps small enough for a page: sixteen bits a weight, compressed, as many queries as fit.

A weight w in 0..1 is kept as round(65535 √w). The square root spends the steps where attention lives, near
zero: the error is at most √w / 65535, so never more than 0.0016 percentage points, and below 1 % of the
weight itself down to w = 2.4e-6. Low bytes come first, then high bytes, because the high ones are nearly
all zero and compress to almost nothing.
"""

from __future__ import annotations

import base64
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.look.result import Look

STEPS = 65535


class PackedMap(NamedTuple):
    """The weights of one query, ready to stand in a page."""

    position: int
    base64: str  # deflate (zlib) of L·H·n low bytes and then L·H·n high bytes


def pack_maps(look: Look, budget: int) -> list[PackedMap]:
    """Return the maps of the latest queries whose base64 together fits into `budget` bytes, by position.

    The queries with a map are taken from the last position towards the first, and the first that does not
    fit ends the list: what is left out is always the earliest.
    """
    packed: list[PackedMap] = []
    order = sorted(range(len(look.map_queries)), key=lambda q: -look.map_queries[q])
    for q in order:
        text = base64.b64encode(_pack(look.maps[:, :, q, :])).decode("ascii")
        budget -= len(text) + 64  # 64: the tag around it
        if budget < 0:
            break
        packed.append(PackedMap(int(look.map_queries[q]), text))
    return packed[::-1]


def _pack(weights: NDArray[np.float32]) -> bytes:
    clean = np.clip(np.nan_to_num(weights, nan=0.0), 0.0, 1.0)
    codes = np.rint(np.sqrt(clean) * STEPS).astype("<u2").ravel()
    planes = codes.view(np.uint8).reshape(-1, 2).T
    return zlib.compress(planes.tobytes(), level=6)
