"""Fair waiting for permits.

Each key has its own wait queue. A call that waits for several keys stands in the queue of each of them. It asks the
store only while it is the first in all of its queues: then it sleeps for exactly the `retry_after` of the decision, and
asks again; the others sleep until they are first. A call with alternatives stands in the queues of all of them, and
asks for those alternatives in whose queues it is the first. So no call polls, one permit wakes one waiter, calls with a
small cost do not overtake one with a large cost, and calls that share no key do not wait for each other.

Queues are ordered by time of arrival, moved forward by `ageing` seconds for each step of priority. Equal priorities are
served in order of arrival, and a waiter is overtaken only by higher priorities that arrive within that time. The order
is the same in every queue, so calls with several keys never wait for each other in a circle.

A signal handler may raise at any instruction, so a call can end without leaving its queues. It holds a lock for as long
as it waits (`Waiter.running`): `with` releases it whatever happens. A waiter whose lock is free has ended, and is
removed by the next operation on its queue; when its object is freed, the waiters behind it are woken.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import ref

from tidegate.core.algorithms import NEVER
from tidegate.core.decision import Decision
from tidegate.errors import Closed
from tidegate.flow import Flow
from tidegate.fork import at_fork, fork_safe

if TYPE_CHECKING:
    from tidegate.clock import Signal
    from tidegate.policy import Key
    from tidegate.stores.base import Ask, Store
    from tidegate.stores.values import Write

MAX_PRIORITY: Final = 100  # default bound of `priority`, in both directions
NUMBERS: Final = count()  # of waiters, in order of arrival


class ApplyStep(NamedTuple):
    """A step that calls `Store.apply` with these arguments; the list of Decisions is sent back."""

    store: Store
    verb: str
    asks: Sequence[Ask]
    now: int | None = None
    at: int | None = None
    writes: Sequence[Write] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments; a store that keeps no values has no parameter for writes."""
        return self[1:] if self.writes else self[1:5]

    def apply(self) -> list[Decision]:
        """Call the store, in this thread."""
        store, verb, asks, now, at, writes = self
        if len(asks) == 1 and not writes:
            return [store.apply_one(verb, *asks[0], now, at)]
        return store.apply(*self.arguments)


class Sleep(NamedTuple):
    """A step that waits until the signal is set or steady time reaches `until`."""

    signal: Signal
    until: int | None


Step = ApplyStep | Sleep
WaitFlow = Flow[Any, Decision]  # yields Steps, or what the flow that asks yields
# Applies a verb to the keys of a call: to those of the alternatives with these numbers.
AskFlow = Callable[[str, Sequence[int]], Generator[Any, Any, Decision]]


class Waiter:
    """One waiting call: its position in the order, and the signal that wakes it."""

    __slots__ = ("__weakref__", "order", "running", "signal")

    def __init__(self, rank: int, signal: Signal) -> None:
        """Create the waiter of a call; a lower rank is served first."""
        self.order: tuple[int, int] = rank, next(NUMBERS)
        self.signal: Signal = signal
        self.running: threading.Lock = threading.Lock()  # held while the call waits


class QueueEntry(NamedTuple):
    """A waiter in a queue; the call owns the Waiter."""

    order: tuple[int, int]
    waiter: ref[Waiter]

    def alive(self) -> Waiter | None:
        """Return the waiter, unless its call has ended."""
        waiter = self.waiter()
        return waiter if waiter is not None and waiter.running.locked() else None


class WaitQueues:
    """The wait queues of a limiter, one per key. Thread-safe."""

    def __init__(self) -> None:
        """Create empty queues."""
        self._lock = fork_safe(threading.Lock())
        self._queues: dict[Key, list[QueueEntry]] = {}
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

    def __len__(self) -> int:
        """Return the number of waiting calls."""
        with self._lock:
            return sum(entry.alive() is not None for queue in self._queues.values() for entry in queue)

    def waiting(self, key: Key) -> int:
        """Return the number of calls that wait for a key."""
        with self._lock:
            return sum(entry.alive() is not None for entry in self._queues.get(key, ()))

    def join(self, key: Key, waiter: Waiter) -> None:
        """Add a waiter to the queue of a key; raises Closed."""
        with self._lock:
            if self.closed:
                raise Closed("the limiter is closed")
            queue = self._queues.setdefault(key, [])
            insort(
                queue,
                QueueEntry(waiter.order, ref(waiter, lambda _: wake_waiters(queue))),
                key=lambda entry: entry.order,
            )

    def first(self, key: Key) -> Waiter | None:
        """Return the first waiter of a key."""
        with self._lock:
            return self._first(key)

    def leave(self, key: Key, waiter: Waiter) -> None:
        """Remove a waiter from the queue of a key; if it was the first, wake the next one."""
        with self._lock:
            following = self._remove(key, waiter)
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
        with self._lock:
            self.closed = True
            waiters = [entry.waiter() for queue in self._queues.values() for entry in queue]
        for waiter in waiters:
            if waiter is not None:
                waiter.signal.set()

    def _clear(self) -> None:
        """Remove all waiters in a child process: they are threads of its parent."""
        self._queues.clear()

    def _remove(self, key: Key, waiter: Waiter) -> Waiter | None:
        """Remove a waiter; if it was the first, return the new first one. Requires the lock."""
        queue = self._queues.get(key, [])
        was_first = bool(queue) and queue[0].waiter() is waiter
        queue[:] = [entry for entry in queue if entry.waiter() is not waiter]
        if not queue:
            self._queues.pop(key, None)
        return self._first(key) if was_first else None

    def _first(self, key: Key) -> Waiter | None:
        """Return the first waiter, and remove those before it whose calls have ended. Requires the lock."""
        queue = self._queues.get(key, [])
        while queue:
            waiter = queue[0].alive()
            if waiter is not None:
                return waiter
            del queue[0]
        self._queues.pop(key, None)
        return None


def wake_waiters(queue: Sequence[QueueEntry]) -> None:
    """Wake all waiters of a queue: one of them has ended. Takes no lock: the garbage collector may call it anywhere."""
    for entry in tuple(queue):
        waiter = entry.waiter()
        if waiter is not None:
            waiter.signal.set()


class Denial(NamedTuple):
    """A decision that denied a call, the `wakes` of its queues before it was made, and the alternatives it is about."""

    decision: Decision
    wakes: int
    numbers: Sequence[int] = (0,)


class Places:
    """The queues in which a call waits: for each of its alternatives, one for each key."""

    __slots__ = ("_alternatives", "everything")

    def __init__(self, alternatives: Sequence[Sequence[tuple[WaitQueues, Key]]]) -> None:
        """Wait for the first of these that is allowed."""
        self._alternatives = alternatives
        self.everything: Sequence[int] = tuple(range(len(alternatives)))

    @property
    def queues(self) -> Sequence[tuple[WaitQueues, Key]]:
        """Each of the queues once."""
        found = {(id(queues), key): (queues, key) for places in self._alternatives for queues, key in places}
        return tuple(found.values())

    def open_to(self, waiter: Waiter | None) -> Sequence[int]:
        """Return the numbers of the alternatives in whose queues the waiter is the first; None: no call waits."""
        if waiter is None and not any([queues.occupied for places in self._alternatives for queues, _ in places]):  # noqa: C419 - a generator costs more
            return self.everything
        return tuple(
            number
            for number, places in enumerate(self._alternatives)
            if all(queues.first(key) is waiter for queues, key in places)
        )

    @property
    def waiting(self) -> int:
        """The number of calls that wait in these queues."""
        return sum([queues.waiting(key) for queues, key in self.queues])

    @property
    def wakes(self) -> int:
        """A number that changes with every wake-up."""
        return sum([queues.wakes for places in self._alternatives for queues, _ in places])

    def check_open(self) -> None:
        """Raise Closed if a limiter was closed."""
        for queues, _ in self.queues:
            if queues.closed:
                raise Closed("the limiter was closed while this call waited")

    def leave(self, waiter: Waiter) -> None:
        """Leave all queues."""
        for queues, key in self.queues:
            queues.leave(key, waiter)


def wait_flow(
    places: Places,
    waiter: Waiter,
    verb: str,
    ask_flow: AskFlow,
    deadline: int | None,
    max_sleep: Callable[[str], int],
    steady: Callable[[], int],
    denied: Denial | None = None,
) -> WaitFlow:
    """Wait for permits.

    `ask_flow` applies a verb, with the current policies. `max_sleep` of the verb bounds each sleep where permits may
    come back without a wake-up in this process. `denied` is a decision that was made before the call joined its queues.
    Returns the decision that ended the wait: allowed, impossible, or denied at the deadline.
    """
    with waiter.running:
        try:
            for queues, key in places.queues:
                queues.join(key, waiter)
            return (yield from _wait_flow(places, waiter, verb, ask_flow, deadline, max_sleep, steady, denied))
        finally:
            places.leave(waiter)


def _wait_flow(
    places: Places,
    waiter: Waiter,
    verb: str,
    ask_flow: AskFlow,
    deadline: int | None,
    max_sleep: Callable[[str], int],
    steady: Callable[[], int],
    denied: Denial | None,
) -> WaitFlow:
    while True:
        decision: Decision | None = None
        waiter.signal.clear()
        places.check_open()
        until = deadline
        numbers = places.open_to(waiter)
        if numbers:
            seen = denied is not None and denied.wakes == places.wakes and denied.numbers == numbers
            if denied is not None and seen:  # after the signal was cleared: none is missed
                decision = denied.decision
            else:
                decision = yield from ask_flow(verb, numbers)
            never = decision.retry == NEVER
            if decision.allowed or (never and numbers == places.everything):
                return decision
            most = max_sleep(verb)
            again = steady() + (most if never else min(decision.retry, most))
            until = again if deadline is None else min(deadline, again)
        denied = None
        if deadline is not None and steady() >= deadline:
            return deny_unserved((yield from ask_flow("peek", places.everything))) if decision is None else decision
        yield Sleep(waiter.signal, until)


def deny_unserved(peeked: Decision) -> Decision:
    """Deny a call that timed out in the queue: free permits belong to the calls ahead of it."""
    return Decision.of_views(peeked.at, peeked.policy_limits, peeked.views, within_limits=False)
