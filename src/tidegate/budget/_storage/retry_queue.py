"""Queues settlements while the database is unavailable, and retries them from a thread until they succeed."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.background_thread import BackgroundThread
from tidegate._runtime.clock import SystemClock
from tidegate._runtime.fork import at_fork
from tidegate.budget._storage.sqlite import Completion
from tidegate.core._bounds import SECOND
from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.budget._storage.settlements import Settlements

MAX_QUEUED: Final = 10_000  # further records are added up, without the IDs of their tasks
RETRY_INTERVAL: Final = SECOND // 4  # between two attempts


class RetryQueue:
    """Calls of the settlement storage, in order: `settle` and `record`."""

    def __init__(self, settlements: Settlements, is_lost: Callable[[], bool], now: Callable[[], int]) -> None:
        """Call this storage, while the database is not lost."""
        self._settlements = settlements
        self._is_lost = is_lost
        self._now = now
        self._closed = False
        self._thread = BackgroundThread(self._retry, "tidegate-budget", delay=RETRY_INTERVAL / SECOND)
        at_fork(child=self._start_over)
        self._start_over()

    def _start_over(self) -> None:
        """Start with an empty queue, also in a forked process: the parent makes the calls it has queued."""
        self._queue: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()  # protects the queue; never held while the database is called
        self._calling = threading.Lock()  # held while queued calls are made

    def __len__(self) -> int:
        """Return how many calls are queued."""
        return len(self._queue)

    def call(self, method: str, *arguments: Any) -> None:  # noqa: ANN401 - those of the method
        """Call a method of the store, or queue the call if the database is unavailable."""
        try:
            getattr(self._settlements, method)(*arguments)
        except StoreUnavailable:
            self.add(method, arguments)

    async def call_async(self, method: str, *arguments: Any) -> None:  # noqa: ANN401 - those of the method
        """Call a method of the store, or queue the call if the database is unavailable."""
        try:
            await getattr(self._settlements, f"{method}_async")(*arguments)
        except StoreUnavailable:
            self.add(method, arguments)

    def add(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Queue a call, with the current time as the time at which its tasks were completed."""
        if method == "settle":
            (settlement,) = arguments
            arguments = (settlement._replace(completion=with_time(settlement.completion, self._now())),)
        else:
            arguments = (*arguments[:-1], with_time(arguments[-1], self._now()))
        with self._lock:
            last = self._queue[-1] if len(self._queue) >= MAX_QUEUED else None
            if last is not None and method == last[0] == "record" and last[1][0] is arguments[0]:
                self._queue[-1] = method, add_up(last[1], arguments)
            else:
                self._queue.append((method, arguments))
        self._thread.start()

    def catch_up(self) -> bool:
        """Make the queued calls until the database is unavailable; returns whether the queue is empty."""
        with self._calling:
            while self._queue and not self._is_lost():
                method, arguments = self._queue[0]
                try:
                    getattr(self._settlements, method)(*arguments)
                except StoreUnavailable:
                    return False
                with self._lock:
                    self._queue.popleft()
        return not self._queue

    def close(self) -> None:
        """Retry one last time, and end the thread."""
        self.catch_up()
        self._closed = True
        self._thread.stop()

    def _retry(self) -> int | None:
        if not self._closed:
            self.catch_up()
        return SystemClock.steady() + RETRY_INTERVAL if self._queue else None


def with_time(completion: Completion | None, now: int) -> Completion | None:
    """Set the time at which tasks were completed, because they are stored later."""
    return None if completion is None else completion._replace(completed=now)


def add_up(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add up the arguments of two records, without the IDs of their tasks."""
    unlimited, key, costs, completion = one
    _, _, more_costs, later = other
    tasks = (completion.tasks if completion else 0) + (later.tasks if later else 0)
    total = tuple(cost + more for cost, more in zip(costs, more_costs, strict=True))
    return unlimited, key, total, Completion(tasks, completed=later.completed if later else None)
