"""Gives back the charge of a call whose task was cancelled, the same for every store.

A decision charges when it is made; the caller of a cancelled task never reads it. Every store therefore promises:

- A call that has not been sent is not sent (`DROPPABLE`). Corrections and resets are sent all the same.
- A call that is under way, or answered but not read yet, goes on in the background. The cancelled task ends at once;
  when the answer is there, its charge is corrected (`corrections`), and waiters of the key are woken.
- A call whose answer is lost may have been charged. It stays charged: nobody can tell, and this is the safe side.

Closing a store waits for what is under way in the background, for `MAX_CLOSING` seconds at most.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tidegate.core.bounds import SECOND
from tidegate.errors import RateLimitError
from tidegate.stores.base import merge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.core.limit import Limit
    from tidegate.stores.base import Ask, Store

log = logging.getLogger(__name__)
T = TypeVar("T")

CHARGING: Final = frozenset(("acquire", "hold"))
DROPPABLE: Final = frozenset(("acquire", "hold", "peek"))  # nothing is missing if a call of these is never made
MAX_CLOSING: Final = 2.0  # seconds that closing a store waits for calls under way
TRANSIT: Final = SECOND  # microseconds that a correction may take to reach the store


class GiveBack(NamedTuple):
    """What `Store.apply` is asked to give a charge back: `adjust`, these asks, and when they were charged."""

    asks: list[Ask]
    at: int | None


def corrections(verb: str, asks: Sequence[Ask], decisions: Sequence[Decision], passed: int) -> list[GiveBack]:
    """Return what gives back the charge of a call that was made `passed` microseconds ago; nothing if it was denied.

    Windows, logs and marked buckets correct the charge of the decision's instant. A bucket that was charged without
    a mark does not remember it: it gets back what it cannot have refilled meanwhile (see `bucket_credit`).
    """
    if verb not in CHARGING or not decisions or not decisions[0][0]:
        return []
    places, merged = merge(asks)
    answers = dict(zip(places, decisions, strict=True))
    marked: list[Ask] = []
    unmarked: list[Ask] = []
    for place, (policy, key, costs) in enumerate(merged):
        decision = answers[place]
        rows = list(zip(policy.limits, costs, decision.views, strict=True))
        if verb == "hold":
            marked.append((policy, key, tuple(-cost for cost in costs)))
            continue
        exact = tuple(0 if limit.algorithm == "token_bucket" else -cost for limit, cost, _ in rows)
        credit = tuple(-bucket_credit(limit, cost, view[2], passed + TRANSIT) for limit, cost, view in rows)
        marked.append((policy, key, exact))
        unmarked.append((policy, key, credit))
    found = (GiveBack(_needed(marked), decisions[0].at), GiveBack(_needed(unmarked), None))
    return [correction for correction in found if correction.asks]


def _needed(asks: Iterable[Ask]) -> list[Ask]:
    return [ask for ask in asks if any(ask[2])]


def bucket_credit(limit: Limit, cost: int, reset: int, passed: int) -> int:
    """Return how many permits an unmarked bucket gets back of a charge that left it `reset` microseconds from full.

    Had the charge not been made, the bucket might have been full within `passed` microseconds, and what it refills
    then is lost. That part is not given back, down to less than one permit: the bucket has refilled it by itself.
    """
    if limit.algorithm != "token_bucket" or not cost:
        return 0
    missing = max(0, (reset - 1) * limit.rate - cost * limit.scale)  # at least, before the charge
    overflow = max(0, passed * limit.rate - missing) // limit.scale
    return max(0, cost - overflow)


class BackgroundTasks:
    """Tasks that go on after their callers were cancelled. Each ends by itself, within a deadline of its own."""

    def __init__(self) -> None:
        """Start without tasks."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ends: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
        self._then: Callable[[], None] | None = None

    async def watch(self) -> None:
        """See that an event loop that ends waits for the tasks first; to be called before they are needed.

        A loop that ends cancels its tasks, waits for these, and no others; after that, it closes the asynchronous
        generators that were begun in it, and waits for their ends.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._ends:
            self._ends = {other: end for other, end in self._ends.items() if not other.is_closed()}
            self._ends[loop] = end = self._end_of_loop()
            await anext(end)

    async def _end_of_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self.finish()

    def give_back(self, store: Store, verb: str, asks: Sequence[Ask], decisions: Sequence[Decision]) -> None:
        """Undo a call whose answer nobody needs any more, though it was read."""
        passed = max(0, store.clock.ns() // 1000 - decisions[0].at) if decisions else 0
        found = corrections(verb, asks, decisions, passed)
        if found:
            self.start(self._give_back(store, found))

    @staticmethod
    async def _give_back(store: Store, found: list[GiveBack]) -> None:
        for asks, at in found:
            try:
                await store.apply_async("adjust", asks, None, at)
            except RateLimitError as error:
                log.warning("a cancelled call could not give its permits back: %s", error)
            else:
                store.wake(asks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Go on with something in the running event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something that is completed even if this task is cancelled meanwhile."""
        return await asyncio.shield(self.start(work))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that nobody is told it never was
        if not self._tasks and self._then is not None:
            then, self._then = self._then, None
            then()

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._tasks)

    async def finish(self) -> None:
        """Wait for the tasks of this event loop, but not for long."""
        loop = asyncio.get_running_loop()
        ours = [task for task in self._tasks if task.get_loop() is loop]
        if ours:
            await asyncio.wait(ours, timeout=MAX_CLOSING)

    def finally_do(self, then: Callable[[], None]) -> None:
        """Do something when there are no tasks: now, or when the last one has ended."""
        if any(not task.get_loop().is_closed() for task in tuple(self._tasks)):
            self._then = then
        else:
            then()
