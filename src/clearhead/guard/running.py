"""Scans in threads of their own: one per text, however many ask, and who waits too long leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from clearhead.errors import ArgumentError
from clearhead.guard.finding import Finding


class Running:
    """The scans that run or wait, by key; at most `threads` at once. Thread-safe.

    Raises ArgumentError for threads below 1.
    """

    def __init__(self, threads: int) -> None:
        if type(threads) is not int or threads < 1:
            raise ArgumentError(f"threads must be a whole number, 1 or more, got {threads!r}")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="clearhead-guard")
        self._tasks: dict[str, Future[Finding]] = {}
        self._waiting: dict[Future[Finding], int] = {}
        self._lock = threading.RLock()

    def begin(self, key: str, scan: Callable[[], Finding]) -> Future[Finding]:
        """Return the future of the scan under a key: the one that is under way, else a new one."""
        with self._lock:
            task = self._tasks.get(key)
            if task is None or task.done():
                task = self._pool.submit(scan)
                self._tasks[key] = task
                self._waiting[task] = 0
                new = task
            else:
                new = None
            self._waiting[task] += 1
        if new is not None:
            new.add_done_callback(lambda done: self._forget(key, done))
        return task

    def leave(self, task: Future[Finding]) -> None:
        """Wait no longer. A scan that has not begun and that nobody else waits for never begins."""
        with self._lock:
            left = self._waiting.get(task, 0) - 1
            if task in self._waiting:
                self._waiting[task] = left
            if left <= 0:
                task.cancel()

    def _forget(self, key: str, task: Future[Finding]) -> None:
        with self._lock:
            self._waiting.pop(task, None)
            if self._tasks.get(key) is task:
                del self._tasks[key]
