"""What statistics add to the call that they ride along with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import clearhead as ch
from speed.case import Case, Cases, Error, Goal, Run, Setup, WrongResultError
from speed.prefill import Shape

SEGMENTS = 16
SHAPE = Shape(1, 9, 3, 4096, 64)
SMALL = Shape(1, 12, 12, 1024, 64)
LAST = Shape(1, 9, 3, 4096, 64)
TOLERANCE = 1e-4  # of a probability, of nats, of a mean output
SAMPLED = 32


def most(added_avx2: float, added_avx512: float) -> Goal:
    """At most this much more time, as a least ratio."""
    return Goal(1 / (1 + added_avx2), 1 / (1 + added_avx512))


def questions(n: int) -> dict[str, tuple[list[Any], Goal]]:
    """What is asked, by name."""
    ids = torch.arange(n) * SEGMENTS // n
    scattered = torch.arange(n) * 7 % SEGMENTS
    basic = [ch.SegmentMass(ids), ch.Entropy()]
    every = [
        *basic,
        ch.TopKeys(8),
        ch.KeyMass(),
        ch.MeanDistance(),
        ch.MaxWeight(),
        ch.PooledMap(64, 64),
        ch.SegmentOutput(ids, norms=True),
    ]
    last = [ch.SegmentMass(ids, rows="last"), ch.Entropy(rows="last"), ch.TopKeys(8, rows="last")]
    return {
        "SegmentMass(16) + Entropy": (basic, most(0.08, 0.04)),
        "these + TopKeys(8)": ([*basic, ch.TopKeys(8)], most(0.15, 0.12)),
        "one of each kind (8)": (every, most(0.40, 0.35)),
        "of the last row": (last, most(0.01, 0.01)),
        "arbitrary segments + Entropy": ([ch.SegmentMass(scattered), ch.Entropy()], Goal()),
        "SegmentOutput(16) itself": ([ch.SegmentOutput(ids)], Goal()),
    }


def cases(setup: Setup) -> Cases:
    """A causal prefill, and what is asked of it."""
    names = list(questions(SEGMENTS))
    for name in names[:4] if setup.quick else names:
        yield partial(observed, setup, SHAPE, name, True)
    if not setup.quick:
        for name in names[:4]:
            yield partial(observed, setup, SMALL, name, False)


def observed(setup: Setup, shape: Shape, name: str, is_causal: bool) -> Case:
    """The same call with and without questions; the output must be the same to the bit."""
    q, k, v = shape.inputs()
    mask = ch.Mask(causal=True) if is_causal else None
    asked, goal = questions(shape.n)[name]
    ours: Run = lambda: setup.attention(q, k, v, mask=mask, observe=asked)  # noqa: E731
    plain: Run = lambda: setup.attention(q, k, v, mask=mask)  # noqa: E731

    def check() -> dict[str, Error]:
        out, seen = setup.attention(q, k, v, mask=mask, observe=asked)
        if not torch.equal(out, setup.attention(q, k, v, mask=mask)):
            raise WrongResultError("the output is another one when it is observed")
        return {"ours": _errors(setup, shape, asked, seen, is_causal)}

    without = "without questions"
    fits = shape == SHAPE
    return Case(
        f"what looking adds, {'causal' if is_causal else 'full'}, {shape}",
        name,
        ours,
        {without: plain},
        check,
        added=True,
        ratios={without: goal if fits else Goal()},
        key=f"looking {shape} {name}",
    )


def _errors(setup: Setup, shape: Shape, asked: list[Any], seen: Any, is_causal: bool) -> Error:
    """Sampled queries, asked again of the reference in float64; sums over queries are left to the tests."""
    q, k, v = (t.double() for t in shape.inputs())
    rows = torch.linspace(0, shape.n - 1, SAMPLED).long()
    sees = torch.arange(shape.n)[None] <= (rows[:, None] if is_causal else shape.n)
    alike = [(item, answer) for item, answer in zip(asked, seen, strict=True) if _per_query(item)]
    exact = ch.attention(
        q[:, :, rows], k, v, mask=sees, observe=[item for item, _ in alike], backend="reference"
    )
    largest = mean = 0.0
    for (item, answer), wanted in zip(alike, exact[1], strict=True):
        if isinstance(item, ch.TopKeys):  # which of two equal keys is named does not matter
            answer, wanted = answer.weights, wanted.weights
        off = (answer[:, :, rows if answer.shape[2] > 1 else [0]].double() - wanted).abs()
        if not float(off.max()) <= TOLERANCE:
            raise WrongResultError(
                f"{item.name}: off by {float(off.max()):.2g}, at most {TOLERANCE} would do"
            )
        largest, mean = max(largest, float(off.max())), max(mean, float(off.mean()))
    return Error(largest, mean)


def _per_query(item: ch.Observable) -> bool:
    """True if an answer belongs to one query and does not depend on where that stands among the others."""
    return item.axes[2] == "query" and not isinstance(item, ch.MeanDistance)
