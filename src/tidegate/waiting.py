"""Fair waiting for permits.

Whoever waits for a key stands in that key's line. Only the first of a line asks the store, sleeps for exactly the
`retry_after` it is told, and asks again; the others sleep until they are first. So nobody polls, one permit wakes one
waiter, a large cost is not overtaken by small ones behind it, and keys never wait for each other.

The order of a line is by arrival, moved forward by `ageing` seconds for each step of priority: among equals first come
first served, and a waiter of low priority is passed only by those of higher priority that come within that time.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Generator
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.core.algorithms import NEVER
from tidegate.core.decision import Decision
from tidegate.errors import Closed

if TYPE_CHECKING:
    from tidegate.clock import Signal
    from tidegate.policy import Key, Policy


class Ask(NamedTuple):
    """A step that needs the store asked: `Store.apply_one` takes these; the step is sent the Decision."""

    verb: str
    policy: Policy
    key: Key
    costs: tuple[int, ...]
    at: int | None = None


class Sleep(NamedTuple):
    """A step that needs to wait until the signal is set, or until an instant of steady time."""

    signal: Signal
    until: int | None


Step = Ask | Sleep
Steps = Generator[Step, Any, Decision]  # sent the Decision after an Ask
Asker = Callable[[str], Ask]


class Waiter(NamedTuple):
    """One who waits: its place in the order, and how to wake it."""

    rank: int
    number: int
    key: Key
    signal: Signal


class Lines:
    """The lines of all keys of a limiter. Safe to use from any thread."""

    def __init__(self) -> None:
        """Start with nobody waiting."""
        self._lock = threading.Lock()
        self._lines: dict[Key, list[Waiter]] = {}
        self._numbers = count()
        self.closed = False

    def __contains__(self, key: Key) -> bool:
        """Tell whether anybody waits for the key."""
        return key in self._lines

    def __len__(self) -> int:
        """Count the waiters."""
        with self._lock:
            return sum(map(len, self._lines.values()))

    def join(self, key: Key, rank: int, signal: Signal) -> Waiter:
        """Stand in line."""
        with self._lock:
            if self.closed:
                raise Closed("the limiter is closed")
            waiter = Waiter(rank, next(self._numbers), key, signal)
            insort(self._lines.setdefault(key, []), waiter, key=lambda other: (other.rank, other.number))
        return waiter

    def leads(self, waiter: Waiter) -> bool:
        """Tell whether the waiter is the first of its line."""
        with self._lock:
            return self._lines[waiter.key][0] is waiter

    def leave(self, waiter: Waiter) -> None:
        """Leave the line; if the first leaves, the next one is woken to ask."""
        with self._lock:
            line = self._lines[waiter.key]
            led = line[0] is waiter
            line.remove(waiter)
            if not line:
                del self._lines[waiter.key]
            following = line[0] if led and line else None
        if following is not None:
            following.signal.set()

    def wake(self, key: Key) -> None:
        """Let the first in line ask again: permits may have become free."""
        if key in self._lines:
            with self._lock:
                line = self._lines.get(key)
                first = line[0] if line else None
            if first is not None:
                first.signal.set()

    def wake_all(self) -> None:
        """Let the first of every line ask again: the rules may have changed."""
        with self._lock:
            firsts = [line[0] for line in self._lines.values()]
        for first in firsts:
            first.signal.set()

    def close(self) -> None:
        """Wake everybody; they find the lines closed."""
        with self._lock:
            self.closed = True
            waiters = [waiter for line in self._lines.values() for waiter in line]
        for waiter in waiters:
            waiter.signal.set()


def wait_in_line(
    lines: Lines, waiter: Waiter, verb: str, ask: Asker, deadline: int | None, longest: int, steady: Callable[[], int]
) -> Steps:
    """Wait for a permit, step by step, for whoever can ask and sleep.

    `ask` words the question for a verb, by the rules of the moment. `longest` bounds a sleep where permits may come
    back that nobody here is told of. Returns the decision that ended the wait: allowed, impossible, or denied at the
    deadline.
    """
    decision: Decision | None = None
    try:
        while True:
            waiter.signal.clear()
            if lines.closed:
                raise Closed("the limiter was closed while this call waited")
            until = deadline
            if lines.leads(waiter):
                decision = yield ask(verb)
                retry = decision.retry
                if decision.allowed or retry == NEVER:
                    return decision
                again = steady() + min(retry, longest)
                until = again if deadline is None else min(deadline, again)
            if deadline is not None and steady() >= deadline:
                return decision or not_served((yield ask("peek")))
            yield Sleep(waiter.signal, until)
    finally:
        lines.leave(waiter)


def not_served(looked: Decision) -> Decision:
    """Deny one who never came to ask: even where permits are free, they are for those in front."""
    return Decision((False, looked.at, looked[2], looked.views, None))
