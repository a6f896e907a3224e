"""Whose tokens go into the next step: decoding first, then chunks of prompts, as far as there is room."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from clearhead.cache.pool import BlockPool
from clearhead.cache.rows import BlockRow, grow
from clearhead.errors import PoolFullError
from clearhead.generation.engine_prefixes import Prefixes
from clearhead.generation.engine_request import Request


class Work(NamedTuple):
    """A request's part of a step: tokens `start` to `start + size` of its own."""

    request: Request
    start: int
    size: int

    @property
    def chooses(self) -> bool:
        """Whether the next token is chosen from its last query."""
        return self.start + self.size == len(self.request.tokens)


class Counts:
    """What a scheduler has done so far, in tokens and requests."""

    def __init__(self) -> None:
        self.steps = 0
        self.computed = 0  # tokens that went through the model
        self.shared = 0  # tokens that did not have to: their blocks were there
        self.preempted = 0  # times that a running request had to wait again

    def __repr__(self) -> str:
        return f"Counts({', '.join(f'{name}={value}' for name, value in vars(self).items())})"


class Scheduler:
    """Requests in the order in which they came: those that run and hold blocks, and those that wait.

    batch: how many may run at once. tokens: how many go into a step at most. share: whether blocks of common
    beginnings are computed once.

    The oldest request always gets on: when blocks are missing the youngest running one lets go of its own and
    waits again. What it has generated is kept, and computed anew as part of its prompt.
    """

    def __init__(self, pool: BlockPool, *, batch: int, tokens: int, share: bool) -> None:
        self.pool, self.batch, self.budget = pool, batch, tokens
        self.prefixes = Prefixes(pool) if share else None
        self.running: list[Request] = []  # oldest first
        self.waiting: deque[Request] = deque()  # oldest first
        self.counts = Counts()

    def plan(self) -> list[Work]:
        """Return the work of the next step, with room for it in the pool; empty if there is none."""
        works: list[Work] = []
        left = self.budget
        for request in [r for r in self.running if r.todo == 1] + [r for r in self.running if r.todo > 1]:
            count = min(request.todo, left)
            if not count or request.row is None:  # the latter: preempted meanwhile
                continue
            lost = self._make_room(request, request.computed + count)
            works = [work for work in works if work.request not in lost]
            if request in lost:
                continue
            works.append(Work(request, request.computed, count))
            left = self.budget - sum(work.size for work in works)
        self._admit(works, left)
        # Tokens that attend alike stand together.
        return [w for w in works if w.size == 1] + [w for w in works if w.size > 1]

    def _make_room(self, request: Request, length: int) -> list[Request]:
        """Grow a request's row; return the requests that had to go for it, itself among them if it must."""
        lost: list[Request] = []
        while True:
            assert request.row is not None
            try:
                grow([request.row], [max(length, request.row.length)])
            except PoolFullError:
                youngest = self.running[-1]
                if youngest is request and len(self.running) == 1:
                    raise
                self._preempt(youngest)
                lost.append(youngest)
                if youngest is request:
                    return lost
            else:
                return lost

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._let_go(request)
        self.waiting.appendleft(request)
        self.counts.preempted += 1

    def _admit(self, works: list[Work], left: int) -> None:
        for request in list(self.waiting):
            if left <= 0 or len(self.running) >= self.batch:
                return
            names = request.block_names(self.pool.page)[: (len(request.tokens) - 1) // self.pool.page]
            shared = [] if self.prefixes is None else self.prefixes.find(names)
            if len(shared) < len(names) and names[len(shared)] in self._under_way():
                continue  # another request computes this very block: wait for it
            row = BlockRow(self.pool, shared)
            # One block more for each that runs and will grow, or it would be sent away again at once.
            needed = -(-len(request.tokens) // self.pool.page) - len(shared) + len(self.running)
            if needed > self.pool.free + (0 if self.prefixes is None else self.prefixes.spare):
                row.free()
                return  # nobody overtakes: those who ask for much would wait for ever
            self.waiting.remove(request)
            self.running.append(request)
            self.running.sort(key=lambda r: r.number)
            request.row, request.computed = row, row.length
            self.counts.shared += row.length
            count = min(request.todo, left)
            grow([row], [row.length + count])
            works.append(Work(request, request.computed, count))
            left -= count

    def _under_way(self) -> set[bytes]:
        """The blocks that running requests are going to compute and others may then share."""
        if self.prefixes is None:
            return set()
        page = self.pool.page
        return {name for r in self.running for name in r.block_names(page)[r.computed // page :]}

    def advance(self, work: Work) -> None:
        """A request's part of a step is done: its keys are in the pool, and others may use full blocks."""
        request, page = work.request, self.pool.page
        assert request.row is not None
        self.counts.computed += work.size
        request.computed = work.start + work.size
        if self.prefixes is not None:
            full = range(work.start // page, request.computed // page)
            names = request.block_names(page) if full else []
            for block in full:
                self.prefixes.add(names[block], request.row.blocks[block])

    def remove(self, request: Request) -> None:
        """Forget a request, whatever it was doing; its blocks are free."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if request.row is not None:
            request.row.free()
        request.row, request.computed = None, 0

    @property
    def requests(self) -> list[Request]:
        """All that have not ended."""
        return [*self.running, *self.waiting]
