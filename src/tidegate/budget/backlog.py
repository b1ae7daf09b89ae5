"""What the database could not be told, kept until it can: a queue, and a thread that tries again."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tidegate.budget.ledger import Note
from tidegate.clock import SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import StoreUnavailable
from tidegate.fork import at_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.budget.books import Books

MOST: Final = 10_000  # kept one by one; further records are added up, and lose the names of their tasks
AGAIN: Final = SECOND // 4  # between two attempts


class Backlog:
    """Calls of the books that are to be made, in order."""

    def __init__(self, books: Books, is_lost: Callable[[], bool], now: Callable[[], int]) -> None:
        """Tell these books, while they are not lost."""
        self._books = books
        self._is_lost = is_lost
        self._now = now
        self._closed = False
        at_fork(child=self._start_over)
        self._start_over()

    def _start_over(self) -> None:
        """Start with nothing kept: also in a forked process, whose parent makes the calls it has kept."""
        self._queue: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()  # of the queue, held for a moment
        self._telling = threading.Lock()  # held while the database is told
        self._wake = ThreadSignal()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Count what is kept."""
        return len(self._queue)

    def keep(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Keep a call, with the instant at which its tasks were completed."""
        if name == "settle":
            told: tuple[Any, ...] = (arguments[0]._replace(note=dated(arguments[0].note, self._now())),)
        else:
            told = (*arguments[:-1], dated(arguments[-1], self._now()))
        with self._lock:
            before = self._queue[-1] if len(self._queue) >= MOST else None
            if before is not None and name == before[0] == "record" and before[1][0] is told[0]:
                self._queue[-1] = name, added(before[1], told)
            else:
                self._queue.append((name, told))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="tidegate-budget", daemon=True)
                self._thread.start()

    def catch_up(self) -> bool:
        """Make the calls, as far as the database answers; tell whether it knows everything now."""
        with self._telling:
            while self._queue and not self._is_lost():
                name, arguments = self._queue[0]
                try:
                    getattr(self._books, name)(*arguments)
                except StoreUnavailable:
                    return False
                with self._lock:
                    self._queue.popleft()
        return not self._queue

    def close(self) -> None:
        """Try once more, and end the thread."""
        self.catch_up()
        self._closed = True
        self._wake.set()
        if (thread := self._thread) is not None:
            thread.join()

    def _work(self) -> None:
        clock = SystemClock()
        while True:
            clock.wait(self._wake, clock.steady() + AGAIN)
            if not self._closed:
                self.catch_up()
            with self._lock:
                if self._closed or not self._queue:
                    self._thread = None
                    return


def dated(note: Note | None, now: int) -> Note | None:
    """Note when tasks were completed, since they are written down later."""
    return None if note is None else note._replace(completed=now)


def added(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add two records up; the names of their tasks are dropped."""
    vast, key, costs, note = one
    more, further = other[2], other[3]
    tasks = (note.tasks if note else 0) + (further.tasks if further else 0)
    total = tuple(a + b for a, b in zip(costs, more, strict=True))
    return vast, key, total, Note(tasks, completed=further.completed if further else None)
