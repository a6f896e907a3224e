"""What the front door and the registry promise a backend, with backends made up for the purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from clearhead import Entropy, KeyMass, MaxWeight, Observable, attention
from clearhead.backends import registry, tiles
from clearhead.backends.base import Request, Result

Q = torch.randn(1, 2, 7, 8)


class Seeing:
    """Answers MaxWeight in the pass, and leaves the rest for later."""

    name = "seeing"

    def __init__(self) -> None:
        self.asked_later: list[Sequence[Observable]] = []

    def supports(self, request: Request) -> str | None:
        return None

    def forward(self, request: Request) -> Result:
        out, lse = tiles.forward(request)
        seen = tuple("came along" if isinstance(o, MaxWeight) else None for o in request.observe)
        return Result(out, lse, seen)

    def observe(self, request: Request, result: Result, observables: Sequence[Observable]) -> tuple[Any, ...]:
        self.asked_later.append(observables)
        assert result.lse is not None
        return tiles.observe(request, result.lse, observables)


@pytest.fixture
def seeing() -> Iterator[Seeing]:
    backend = Seeing()
    registry.register(backend)
    yield backend
    registry.unregister("seeing")


def test_answers_that_came_with_the_pass_are_not_asked_for_again(seeing: Seeing) -> None:
    entropy, received = Entropy(), KeyMass()
    _, seen = attention(Q, Q, Q, observe=[entropy, MaxWeight(), received], backend="seeing")
    assert seeing.asked_later == [[entropy, received]]
    assert seen[1] == "came along"
    want = attention(Q, Q, Q, observe=[entropy, received], backend="reference")[1]
    assert torch.allclose(seen[0], want[0], atol=1e-5)
    assert torch.allclose(seen[2], want[1], atol=1e-5)


def test_nothing_is_asked_later_where_everything_came_along(seeing: Seeing) -> None:
    assert attention(Q, Q, Q, observe=MaxWeight(), backend="seeing")[1] == ("came along",)
    assert seeing.asked_later == []


class Choosy(Seeing):
    """Rather leaves long calls to others."""

    name = "choosy"

    def declines(self, request: Request) -> str | None:
        return "others are faster there" if request.shape.Lq > 5 else None


def test_a_backend_may_leave_a_request_to_the_next_one_but_does_it_if_named() -> None:
    backend = Choosy()
    registry.register(backend, first=True)
    try:
        attention(Q, Q, Q, observe=Entropy())
        assert backend.asked_later == []
        attention(Q[:, :, :3], Q, Q, observe=Entropy())
        attention(Q, Q, Q, observe=Entropy(), backend="choosy")
        assert len(backend.asked_later) == 2
    finally:
        registry.unregister("choosy")


def test_what_all_decline_is_done_by_the_first_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Choosy()
    monkeypatch.setattr(registry, "_BACKENDS", {"choosy": backend})
    attention(Q, Q, Q, observe=Entropy())
    assert len(backend.asked_later) == 1
