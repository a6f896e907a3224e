"""What the result must be: float64, written down, for some of the queries.

Rows that are chosen at the edges and at random: with 8192 keys a few dozen queries of every head are enough
to see a kernel that is wrong, and cost milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from speed.case import Error, WrongResultError

Sees = Callable[[Tensor, Tensor], Tensor]  # (positions of queries (R, 1), of keys (1, Lk)) -> booleans
EDGES = (0, 1, 15, 16, 63, 64, 127, 128, 255, 256, 1023, 1024)
RANDOM = 16


def everything(i: Tensor, j: Tensor) -> Tensor:
    """Nothing is hidden."""
    return torch.ones(i.shape[0], j.shape[1], dtype=torch.bool)


def causal(i: Tensor, j: Tensor) -> Tensor:
    """Keys up to the query's own position."""
    return j <= i


def chosen_rows(count: int) -> Tensor:
    """Which queries are looked at, ascending."""
    generator = torch.Generator().manual_seed(count)
    some = torch.randint(count, (RANDOM,), generator=generator).tolist()
    edges = [e for e in EDGES if e < count] + [count - 1 - e for e in (0, 1, 16) if e < count]
    return torch.tensor(sorted({*some, *edges}))


def outputs(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, sees: Sees) -> Tensor:
    """softmax(q kᵀ/√d) v in float64 of the chosen queries, (B, Hq, R, dv).

    The last query sits at the last key.
    """
    group = q.shape[1] // k.shape[1]
    out = q.new_empty(q.shape[0], q.shape[1], len(rows), v.shape[3], dtype=torch.float64)
    hidden = ~sees(rows[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])[None])
    for item in range(q.shape[0]):
        for head in range(k.shape[1]):
            keys, values = k[item, head].double(), v[item, head].double()
            mine = slice(head * group, (head + 1) * group)
            scores = q[item, mine][:, rows].double() @ keys.T * q.shape[3] ** -0.5
            out[item, mine] = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ values
    return out


def compare(name: str, result: Tensor, wanted: Tensor, allowed: float) -> Error:
    """Return the error; WrongResultError if it is above `allowed`, a part of the largest number wanted."""
    off = (result.double() - wanted).abs()
    error = Error(float(off.max()), float(off.mean()))
    limit = allowed * float(wanted.abs().max())
    if not error.largest <= limit:  # NaN too
        raise WrongResultError(f"{name}: off by {error.largest:.2g}, at most {limit:.2g} would do")
    return error


def checked(
    runs: dict[str, Callable[[], object]],
    inputs: tuple[Tensor, Tensor, Tensor],
    sees: Sees,
    allowed: float,
) -> Callable[[], dict[str, Error]]:
    """Return a check of the outputs of these forms, each (B, Hq, Lq, dv) or a view of it."""

    def check() -> dict[str, Error]:
        q, k, v = inputs
        rows = chosen_rows(q.shape[2])
        wanted = outputs(q, k, v, rows, sees)
        found = {}
        for name, run in runs.items():
            result = run()
            if isinstance(result, tuple):
                result = result[0]
            assert isinstance(result, Tensor)
            whole = result.reshape(*q.shape[:3], v.shape[3])
            found[name] = compare(name, whole[:, :, rows], wanted, allowed)
        return found

    return check
