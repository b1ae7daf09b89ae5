"""Fair waiting for permits.

Each key has its own wait queue. A call stands in the queues of the keys that did not let it pass when it last asked:
their limits denied it, or a call ahead of it waits there. It asks the store when no call ahead of it waits for one of
its keys: then it sleeps for exactly the `retry_after` of the decision, and asks again; the others sleep until they are
first. A call with alternatives asks for those for which this holds. So no call polls, one permit wakes one waiter,
calls with a small cost do not overtake one with a large cost, and a call that waits for one of its keys holds up none
of those that need only the others.

Queues are ordered by time of arrival, moved forward by `ageing` seconds for each step of priority. Equal priorities are
served in order of arrival, and a waiter is overtaken only by higher priorities that arrive within that time. The order
is the same in every queue, so calls with several keys never wait for each other in a circle. While a call waits for one
key, later calls may take the permits of another one that it needs, too. Then it waits for that key next, ahead of those
that arrived later, and stays in the queues where it stood if it has waited at least as long as it still has to wait. So
it cannot starve between keys whose permits come at different times, and it holds up others at most as long as it has
waited itself.

A signal handler may raise at any instruction, so a call can end without leaving its queues. It holds a lock for as long
as it waits (`Waiter.running`): `with` releases it whatever happens. A waiter whose lock is free has ended, and is
removed by the next operation on its queue; when its object is freed, the waiters behind it are woken.
Its lifetime alone would not do: a program may keep the exception, whose frames refer to the waiter.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from bisect import insort
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from weakref import ref

from tidegate._runtime.flow import Flow
from tidegate._runtime.fork import at_fork, fork_safe
from tidegate.core._algorithms import NEVER
from tidegate.core._decision import Decision
from tidegate.errors import Closed, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from tidegate._policy import Key
    from tidegate._runtime.clock import Signal
    from tidegate.stores._base import Ask, Store
    from tidegate.stores._values import Collection, Value, Write

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


class ReadStep(NamedTuple):
    """A step that reads a value of a store, or all values of a collection by name (`name` None)."""

    store: Store
    collection: Collection
    name: str | None
    now: int | None = None

    def read(self) -> Value | dict[str, Value] | None:
        """Read in this thread."""
        if self.name is None:
            return self.store.list_values(self.collection, self.now)
        return self.store.get_value(self.collection, self.name, self.now)

    async def read_async(self) -> Value | dict[str, Value] | None:
        """Read without blocking the event loop."""
        if self.name is None:
            return await self.store.list_values_async(self.collection, self.now)
        return await self.store.get_value_async(self.collection, self.name, self.now)


class CallStep(NamedTuple):
    """A step that calls a function of the program: it may block, and may be a coroutine function for tasks."""

    function: Callable[[], Any]
    blocks: bool = False  # whether a task must call it in a thread

    def read(self) -> Any:  # noqa: ANN401 - what the function returns
        """Call it in this thread."""
        found = self.function()
        if inspect.iscoroutine(found):
            found.close()
            raise ConfigError("a coroutine function cannot be called by a thread: pass a plain function")
        return found

    async def read_async(self) -> Any:  # noqa: ANN401 - as above
        """Call it without blocking the event loop."""
        found = await asyncio.to_thread(self.function) if self.blocks else self.function()
        return await found if inspect.isawaitable(found) else found


class Sleep(NamedTuple):
    """A step that waits until the signal is set or steady time reaches `until`."""

    signal: Signal
    until: int | None


Step = ApplyStep | ReadStep | CallStep | Sleep
WaitFlow = Flow[Any, Decision]  # yields Steps, or what the flow that asks yields
QueuePlace = tuple["WaitQueues", "Key"]  # a queue in which a call waits


class Waiter:
    """One waiting call: its position in the order, the signal that wakes it, and the queues in which it stands."""

    __slots__ = ("__weakref__", "joined", "order", "running", "signal")

    def __init__(self, rank: int, signal: Signal) -> None:
        """Create the waiter of a call; a lower rank is served first."""
        self.order: tuple[int, int] = rank, next(NUMBERS)
        self.signal: Signal = signal
        self.running: threading.Lock = threading.Lock()  # held while the call waits
        self.joined: list[QueuePlace] = []

    def stand_in(self, places: Sequence[QueuePlace]) -> bool:
        """Stand in these queues and in no other; returns whether it joined one. Raises Closed."""
        joined = self.joined
        new = [place for place in places if place not in joined]
        for place in new:
            joined.append(place)  # before it joins: a signal handler may raise
            place[0].join(place[1], self)
        for place in [place for place in joined if place not in places]:
            place[0].leave(place[1], self)
            joined.remove(place)
        return bool(new)


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
        return len(self.waiters((key,)))

    def waiters(self, keys: Iterable[Key] | None = None) -> set[Waiter]:
        """Return the calls that wait for these keys; None: for any."""
        with self._lock:
            found = [queue for key, queue in self._queues.items() if keys is None or key in keys]
            return {waiter for queue in found for entry in queue if (waiter := entry.alive()) is not None}

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

    def is_passable(self, key: Key, waiter: Waiter | None) -> bool:
        """Return whether no call ahead of this one waits for the key; None: a call that arrives now."""
        if key not in self._queues:
            return True
        first = self.first(key)
        return first is None or (waiter is not None and waiter.order <= first.order)

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
    """A decision that denied a call, and the `wakes` of its queues before it was made.

    `received` is the steady time when it was received: `retry_after` counts from then. `places` are the queues of the
    keys that denied it, `numbers` the alternatives that it is about.
    """

    decision: Decision
    received: int
    wakes: int
    places: Sequence[QueuePlace]
    numbers: Sequence[int] = (0,)


class Places:
    """The queues in which a call may have to wait: for each of its alternatives, one for each key."""

    __slots__ = ("_alternatives", "everything")

    def __init__(self, alternatives: Sequence[Sequence[QueuePlace]]) -> None:
        """Wait for the first of these that is allowed."""
        self._alternatives = alternatives
        self.everything: Sequence[int] = tuple(range(len(alternatives)))

    @property
    def queues(self) -> Sequence[QueuePlace]:
        """Each of the queues once."""
        found = {(id(queues), key): (queues, key) for places in self._alternatives for queues, key in places}
        return tuple(found.values())

    def open_to(self, waiter: Waiter | None) -> Sequence[int]:
        """Return the numbers of the alternatives that a call may ask for; None: a call that arrives now."""
        if waiter is None and not any([queues.occupied for places in self._alternatives for queues, _ in places]):  # noqa: C419 - a generator costs more
            return self.everything
        return tuple(
            number
            for number, places in enumerate(self._alternatives)
            if all(queues.is_passable(key, waiter) for queues, key in places)
        )

    def occupied_before(self, waiter: Waiter) -> list[QueuePlace]:
        """Return the queues in which other calls are ahead."""
        return [(queues, key) for queues, key in self.queues if not queues.is_passable(key, waiter)]

    @property
    def waiting(self) -> int:
        """The number of calls that wait in these queues."""
        return len({waiter for queues, key in self.queues for waiter in queues.waiters((key,))})

    @property
    def wakes(self) -> int:
        """A number that changes with every wake-up."""
        return sum([queues.wakes for places in self._alternatives for queues, _ in places])

    def check_open(self) -> None:
        """Raise Closed if a limiter was closed."""
        for queues, _ in self.queues:
            if queues.closed:
                raise Closed("the limiter was closed while this call waited")


class WaitingCall(Protocol):
    """What waits: a call that asks for one or more alternatives."""

    @property
    def denying(self) -> Sequence[QueuePlace]:
        """The queues of the keys that denied the last ask."""

    def ask_flow(self, verb: str, numbers: Sequence[int]) -> Generator[Any, Any, Decision]:
        """Apply a verb, with the current policies, to the keys of the alternatives with these numbers."""

    def max_sleep(self, verb: str) -> int:
        """Return how long it may sleep at most, where permits may come back without a wake-up in this process."""


def wait_flow(
    call: WaitingCall,
    places: Places,
    waiter: Waiter,
    verb: str,
    deadline: int | None,
    steady: Callable[[], int],
    denied: Denial | None = None,
) -> WaitFlow:
    """Wait for permits; `denied` is a decision that was made before.

    Returns the decision that ended the wait: allowed, impossible, or denied at the deadline.
    """
    with waiter.running:
        try:
            return (yield from _wait_flow(call, places, waiter, verb, deadline, steady, denied))
        finally:
            waiter.stand_in(())


def _wait_flow(
    call: WaitingCall,
    places: Places,
    waiter: Waiter,
    verb: str,
    deadline: int | None,
    steady: Callable[[], int],
    denied: Denial | None,
) -> WaitFlow:
    started = steady()
    while True:
        waiter.signal.clear()
        places.check_open()
        until = deadline
        numbers = places.open_to(waiter)
        if not numbers:
            denied = None
        elif denied is None or denied.wakes != places.wakes or denied.numbers != numbers:
            wakes = places.wakes  # after the signal was cleared: none is missed
            decision = yield from call.ask_flow(verb, numbers)
            denied = Denial(decision, steady(), wakes, call.denying, numbers)
        if denied is not None:
            decision = denied.decision
            never = decision.retry == NEVER
            if decision.allowed or (never and numbers == places.everything):
                return decision
            most = call.max_sleep(verb)
            again = denied.received + (most if never else min(decision.retry, most))
            until = again if deadline is None else min(deadline, again)
        if deadline is not None and steady() >= deadline:
            return deny_unserved((yield from call.ask_flow("peek", places.everything))) if denied is None else decision
        queues = [] if numbers == places.everything else places.occupied_before(waiter)
        if denied is not None:
            queues += denied.places
            if not never and denied.decision.retry <= steady() - started:
                queues += waiter.joined
        if waiter.stand_in(queues) or places.open_to(waiter) != numbers:
            continue  # what it waits for may have happened before it joined the queue, or instead of joining it
        denied = None
        yield Sleep(waiter.signal, until)


def deny_unserved(peeked: Decision) -> Decision:
    """Deny a call that timed out in the queue: free permits belong to the calls ahead of it."""
    return Decision.of_views(peeked.at, peeked.policy_limits, peeked.views, within_limits=False)
