"""Fair waiting for permits.

Whoever waits for a key stands in that key's line. Only the first of a line asks the store, sleeps for exactly the
`retry_after` it is told, and asks again; the others sleep until they are first. So nobody polls, one permit wakes one
waiter, a large cost is not overtaken by small ones behind it, and keys never wait for each other.

The order of a line is by arrival, moved forward by `ageing` seconds for each step of priority: among equals first come
first served, and a waiter of low priority is passed only by those of higher priority that come within that time.

A signal handler may raise at any instruction, so a call can end without leaving its line. Every waiter therefore knows
whether its call is still under way (`Call`). Whoever finds a dead waiter at the head of a line removes it, and those
behind it look from time to time.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Coroutine, Generator
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision
from tidegate.errors import Closed
from tidegate.fork import at_fork
from tidegate.lock import Lock, locked

if TYPE_CHECKING:
    from tidegate.clock import Signal
    from tidegate.policy import Key, Policy

MAX_PRIORITY: Final = 100  # steps up or down that a call may ask for, unless the limiter says otherwise
LOOK: Final = SECOND  # after this long, and then ever more rarely, a waiter looks whether those in front are alive


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


class Call(Protocol):
    """A call that may wait, as others see it."""

    @property
    def alive(self) -> bool:
        """Whether it is still under way."""


class ThreadCall:
    """A call of a thread. It runs inside a generator, since a generator tells whether it is running."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        """Not under way yet."""
        self._runs: Generator[Decision, None, None] | None = None

    def run(self, drive: Callable[[Steps], Decision], steps: Steps) -> Decision:
        """Drive the steps of this call."""
        self._runs = runs = within(drive, steps)
        return next(runs)

    @property
    def alive(self) -> bool:
        """Whether `run` has begun and not ended."""
        return self._runs is not None and self._runs.gi_running  # type: ignore[attr-defined]  # a generator function made it


def within(drive: Callable[[Steps], Decision], steps: Steps) -> Generator[Decision, None, None]:
    """Drive steps inside a generator."""
    yield drive(steps)


class TaskCall:
    """A call of a task: under way until its coroutine or its task ends."""

    __slots__ = ("_runs", "_task")

    def __init__(self) -> None:
        """Belong to the running task."""
        self._task = asyncio.current_task()
        self._runs: Coroutine[Any, Any, Decision] | None = None

    async def run(self, drive: Callable[[Steps], Coroutine[Any, Any, Decision]], steps: Steps) -> Decision:
        """Drive the steps of this call."""
        self._runs = runs = drive(steps)
        return await runs

    @property
    def alive(self) -> bool:
        """Whether `run` has begun and not ended, and may go on."""
        if self._runs is None or self._runs.cr_frame is None:  # type: ignore[attr-defined]  # made by `async def`
            return False
        return self._task is None or not self._task.done()


class Waiter(NamedTuple):
    """One who waits: its place in the order, how to wake it, and the call that waits."""

    rank: int
    number: int
    key: Key
    signal: Signal
    call: Call


class WaitQueues:
    """The lines of all keys of a limiter. Safe to use from any thread."""

    def __init__(self) -> None:
        """Start with nobody waiting."""
        self.lock = Lock()
        self._lines: dict[Key, list[Waiter]] = {}
        self._numbers = count()
        self.closed = False
        at_fork(child=self._forget)

    def __contains__(self, key: Key) -> bool:
        """Tell whether anybody waits for the key."""
        return key in self._lines and self.first(key) is not None

    @locked
    def __len__(self) -> int:
        """Count the waiters."""
        return sum(waiter.call.alive for line in self._lines.values() for waiter in line)

    @locked
    def join(self, key: Key, rank: int, signal: Signal, call: Call) -> Waiter:
        """Stand in line."""
        if self.closed:
            raise Closed("the limiter is closed")
        waiter = Waiter(rank, next(self._numbers), key, signal, call)
        insort(self._lines.setdefault(key, []), waiter, key=lambda other: (other.rank, other.number))
        return waiter

    @locked
    def first(self, key: Key) -> Waiter | None:
        """Give the first of a line."""
        return self._first(key)

    def leave(self, waiter: Waiter) -> None:
        """Leave the line; if the first leaves, the next one is woken to ask."""
        following = self._remove(waiter)
        if following is not None:
            following.signal.set()

    def wake(self, key: Key) -> None:
        """Let the first in line ask again: permits may have become free."""
        if key in self._lines:
            first = self.first(key)
            if first is not None:
                first.signal.set()

    def wake_all(self) -> None:
        """Let the first of every line ask again: the rules may have changed."""
        for key in list(self._lines):
            self.wake(key)

    def close(self) -> None:
        """Wake everybody; they find the lines closed."""
        for waiter in self._close():
            waiter.signal.set()

    @locked
    def _forget(self) -> None:
        """Forget all waiters, in a child process: they are threads of its parent."""
        self._lines.clear()

    @locked
    def _close(self) -> list[Waiter]:
        self.closed = True
        return [waiter for line in self._lines.values() for waiter in line]

    @locked
    def _remove(self, waiter: Waiter) -> Waiter | None:
        """Take a waiter out of its line; if it was the first, give the one that is now."""
        line = self._lines.get(waiter.key, [])
        if waiter not in line:
            return None
        led = line[0] is waiter
        line.remove(waiter)
        return self._first(waiter.key) if led else None

    def _first(self, key: Key) -> Waiter | None:
        """Give the first of a line, after removing those before it whose calls have ended. The lock is ours."""
        line = self._lines.get(key, [])
        while line and not line[0].call.alive:
            del line[0]
        if not line:
            self._lines.pop(key, None)
            return None
        return line[0]


def wait_in_line(
    lines: WaitQueues,
    waiter: Waiter,
    verb: str,
    ask: Asker,
    deadline: int | None,
    longest: int,
    steady: Callable[[], int],
) -> Steps:
    """Wait for a permit, step by step, for whoever can ask and sleep.

    `ask` words the question for a verb, by the rules of the moment. `longest` bounds a sleep where permits may come
    back that nobody here is told of. Returns the decision that ended the wait: allowed, impossible, or denied at the
    deadline.
    """
    decision: Decision | None = None
    since = steady()
    try:
        while True:
            waiter.signal.clear()
            if lines.closed:
                raise Closed("the limiter was closed while this call waited")
            if lines.first(waiter.key) is waiter:
                decision = yield ask(verb)
                retry = decision.retry
                if decision.allowed or retry == NEVER:
                    return decision
                again = steady() + min(retry, longest)
            else:
                now = steady()
                again = now + max(LOOK, (now - since) // 2)
            until = again if deadline is None else min(deadline, again)
            if deadline is not None and steady() >= deadline:
                return decision or not_served((yield ask("peek")))
            yield Sleep(waiter.signal, until)
    finally:
        lines.leave(waiter)


def not_served(looked: Decision) -> Decision:
    """Deny one who never came to ask: even where permits are free, they are for those in front."""
    return Decision((False, looked.at, looked[2], looked.views, None))
