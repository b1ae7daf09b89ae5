"""Fair waiting for permits.

Each key has its own FIFO wait queue. Only the first waiter of a queue asks the store, sleeps for exactly the
`retry_after` of the decision, and asks again; the others sleep until they are first. So no call polls, one permit wakes
one waiter, calls with a small cost do not overtake one with a large cost, and keys do not wait for each other.

A queue is ordered by time of arrival, moved forward by `ageing` seconds for each step of priority. Equal priorities are
served in order of arrival, and a waiter is overtaken only by higher priorities that arrive within that time.

A signal handler may raise at any instruction, so a call can end without leaving its queue. Every waiter therefore
records whether its call is still running (`Call`). A dead waiter at the head of a queue is removed by the next
operation on that queue, and waiters behind the head check for one from time to time.
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
from tidegate.flow import Flow, run, run_async
from tidegate.fork import at_fork
from tidegate.lock import Lock, locked

if TYPE_CHECKING:
    from tidegate.clock import Signal
    from tidegate.policy import Key, Policy

MAX_PRIORITY: Final = 100  # default bound of `priority`, in both directions
HEAD_CHECK_INTERVAL: Final = SECOND  # at least this long between two checks of the head of a queue by a waiter


class AskStep(NamedTuple):
    """A step that calls `Store.apply_one` with these arguments; the Decision is sent back."""

    verb: str
    policy: Policy
    key: Key
    costs: tuple[int, ...]
    at: int | None = None


class Sleep(NamedTuple):
    """A step that waits until the signal is set or steady time reaches `until`."""

    signal: Signal
    until: int | None


Step = AskStep | Sleep
WaitFlow = Flow[Step, Decision]  # receives the Decision of an AskStep, and None after a Sleep
MakeAsk = Callable[[str], AskStep]


class Call(Protocol):
    """A call that may wait."""

    @property
    def alive(self) -> bool:
        """Whether the call is still running."""


class ThreadCall:
    """A call of a thread. It runs inside a generator, because `gi_running` shows whether a generator is running."""

    __slots__ = ("_generator",)

    def __init__(self) -> None:
        """Create a call that is not running yet."""
        self._generator: Generator[Decision, None, None] | None = None

    def run(self, flow: WaitFlow, perform: Callable[[Step], Decision | None]) -> Decision:
        """Run the flow of this call."""
        self._generator = generator = _run_in_generator(flow, perform)
        return next(generator)

    @property
    def alive(self) -> bool:
        """Whether `run` has begun and not ended."""
        return self._generator is not None and self._generator.gi_running  # type: ignore[attr-defined]  # a generator function made it


def _run_in_generator(flow: WaitFlow, perform: Callable[[Step], Decision | None]) -> Generator[Decision, None, None]:
    yield run(flow, perform)


class TaskCall:
    """A call of a task: it runs until its coroutine or its task ends."""

    __slots__ = ("_coroutine", "_task")

    def __init__(self) -> None:
        """Create a call of the running task."""
        self._task = asyncio.current_task()
        self._coroutine: Coroutine[Any, Any, Decision] | None = None

    async def run(self, flow: WaitFlow, perform: Callable[[Step], Any]) -> Decision:
        """Run the flow of this call."""
        self._coroutine = coroutine = run_async(flow, perform)
        return await coroutine

    @property
    def alive(self) -> bool:
        """Whether `run` has begun and not ended, and its task can continue."""
        if self._coroutine is None or self._coroutine.cr_frame is None:  # type: ignore[attr-defined]  # made by `async def`
            return False
        return self._task is None or not self._task.done()


class Waiter(NamedTuple):
    """One waiting call: its position in the order, its key, the signal that wakes it, and the call."""

    rank: int
    number: int
    key: Key
    signal: Signal
    call: Call


class WaitQueues:
    """The wait queues of a limiter, one per key. Thread-safe."""

    def __init__(self) -> None:
        """Create empty queues."""
        self.lock: Lock = Lock()
        self._queues: dict[Key, list[Waiter]] = {}
        self._numbers = count()
        self.closed: bool = False
        self.wakes: int = 0  # changes with every wake-up, also of a key that no call waits for
        at_fork(child=self._clear)

    def __contains__(self, key: Key) -> bool:
        """Return whether a call waits for the key."""
        return key in self._queues and self.first(key) is not None

    @property
    def occupied(self) -> bool:
        """Whether there are waiters; some of them may have ended without leaving."""
        return bool(self._queues)

    @locked
    def __len__(self) -> int:
        """Return the number of waiting calls."""
        return sum(waiter.call.alive for queue in self._queues.values() for waiter in queue)

    @locked
    def waiting(self, key: Key) -> int:
        """Return the number of calls that wait for a key."""
        return sum(waiter.call.alive for waiter in self._queues.get(key, ()))

    @locked
    def join(self, key: Key, rank: int, signal: Signal, call: Call) -> Waiter:
        """Add a waiter to the queue of a key."""
        if self.closed:
            raise Closed("the limiter is closed")
        waiter = Waiter(rank, next(self._numbers), key, signal, call)
        insort(self._queues.setdefault(key, []), waiter, key=lambda other: (other.rank, other.number))
        return waiter

    @locked
    def first(self, key: Key) -> Waiter | None:
        """Return the first waiter of a key."""
        return self._first(key)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter; if it was the first, wake the next one."""
        following = self._remove(waiter)
        if following is not None:
            following.signal.set()

    def wake(self, key: Key) -> None:
        """Wake the first waiter of a key: permits may have become available."""
        self.wakes += 1
        if key in self._queues:
            first = self.first(key)
            if first is not None:
                first.signal.set()

    def wake_all(self) -> None:
        """Wake the first waiter of every key: the limits may have changed."""
        self.wakes += 1
        for key in list(self._queues):
            self.wake(key)

    def close(self) -> None:
        """Close the queues and wake all waiters."""
        for waiter in self._close():
            waiter.signal.set()

    @locked
    def _clear(self) -> None:
        """Remove all waiters in a child process: they are threads of its parent."""
        self._queues.clear()

    @locked
    def _close(self) -> list[Waiter]:
        self.closed = True
        return [waiter for queue in self._queues.values() for waiter in queue]

    @locked
    def _remove(self, waiter: Waiter) -> Waiter | None:
        """Remove a waiter; if it was the first, return the new first one."""
        queue = self._queues.get(waiter.key, [])
        if waiter not in queue:
            return None
        was_first = queue[0] is waiter
        queue.remove(waiter)
        return self._first(waiter.key) if was_first else None

    def _first(self, key: Key) -> Waiter | None:
        """Return the first waiter of a key, after removing those whose calls have ended. The caller holds the lock."""
        queue = self._queues.get(key, [])
        while queue and not queue[0].call.alive:
            del queue[0]
        if not queue:
            self._queues.pop(key, None)
            return None
        return queue[0]


class Denial(NamedTuple):
    """A decision that denied a call, and the `wakes` of the queues before it was made."""

    decision: Decision
    wakes: int


def wait_flow(
    queues: WaitQueues,
    waiter: Waiter,
    verb: str,
    make_ask: MakeAsk,
    deadline: int | None,
    max_sleep: int,
    steady: Callable[[], int],
    denied: Denial | None = None,
) -> WaitFlow:
    """Wait for a permit.

    `make_ask` builds the step for a verb and the current policy. `max_sleep` bounds each sleep where permits may come
    back without a wake-up in this process. `denied` is a decision that was made before the waiter joined its queue.
    Returns the decision that ended the wait: allowed, impossible, or denied at the deadline.
    """
    decision: Decision | None = None
    since = steady()
    try:
        while True:
            waiter.signal.clear()
            if queues.closed:
                raise Closed("the limiter was closed while this call waited")
            if queues.first(waiter.key) is waiter:
                if denied is not None and denied.wakes == queues.wakes:  # after the signal was cleared: none is missed
                    decision = denied.decision
                else:
                    decision = yield make_ask(verb)
                retry = decision.retry
                if decision.allowed or retry == NEVER:
                    return decision
                again = steady() + min(retry, max_sleep)
            else:
                decision = None  # an earlier one no longer tells when this call would be allowed
                now = steady()
                again = now + max(HEAD_CHECK_INTERVAL, (now - since) // 2)
            denied = None
            until = again if deadline is None else min(deadline, again)
            if deadline is not None and steady() >= deadline:
                return deny_unserved((yield make_ask("peek"))) if decision is None else decision
            yield Sleep(waiter.signal, until)
    finally:
        queues.leave(waiter)


def deny_unserved(peeked: Decision) -> Decision:
    """Deny a call that timed out in the queue: free permits belong to the calls ahead of it."""
    return Decision.of_views(peeked.at, peeked.policy_limits, peeked.with_views().views, within_limits=False)
