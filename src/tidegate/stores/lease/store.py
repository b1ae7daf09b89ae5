"""LeasedStore: decides from shares that it takes from a shared store, at the speed of memory."""

from __future__ import annotations

import atexit
import weakref
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tidegate.core.decision import Decision
from tidegate.errors import StoreUnavailable
from tidegate.fork import at_fork
from tidegate.stores.base import Store
from tidegate.stores.lease.manager import LeaseManager, StoreRequest
from tidegate.stores.lease.renewal import BackgroundRenewal
from tidegate.stores.lease.share import LazyViews
from tidegate.stores.lease.terms import Lease
from tidegate.stores.outage import GuardedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.clock import Clock
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores.base import Ask
    from tidegate.stores.lease.manager import Steps

    Shortcut = Callable[[Key, Cost], Any]


class LeasedStore(Store):
    """Takes shares of permits from a shared store ahead of their use, and decides from them in this process.

    The shared limit is never exceeded, whatever is delayed, lost or killed: permits are charged before they are used,
    and as if used when the lease ends (`terms` says how). What a process holds unused, others cannot use meanwhile:
    `metrics()` tells how many permits that is, and those that a killed process held come back when their window ends.

    Shares are sized by a key's recent demand, renewed before they run out and returned when they end, by a thread (or
    a task, under asyncio) that is there while anything is held. With a clock that is not the machine's, nothing happens
    by itself: calls do those chores. A forked child holds nothing.
    """

    def __init__(
        self, inner: Store, lease: Lease | None = None, *, clock: Clock | None = None, owns: bool = True
    ) -> None:
        """Take shares from `inner`; close it with this store if it `owns` it. `clock` is the steady clock to go by."""
        super().__init__(clock or inner.clock)
        self.waited_on = inner.waited_on
        self.inner = inner
        self.lease = lease or Lease()
        self._owns = owns
        self.desk = LeaseManager(self.lease, self.clock.steady, self._lost if isinstance(inner, GuardedStore) else None)
        self._keeper = BackgroundRenewal(self)
        at_fork(child=self._disown)
        self._at_exit = unless_gone(weakref.WeakMethod(self._give_back))
        atexit.register(self._at_exit)

    # ---- asking ------------------------------------------------------------------------------------------------------

    def shortcut(self, policy: Policy, otherwise: Shortcut) -> Shortcut:
        """Build a faster `try_acquire` for calls that a share answers; others go to `otherwise`."""
        book = self.desk.book(policy)
        if not book.length or not any(policy.one):
            return otherwise
        lock, steady = self.desk.lock, self.clock.steady
        token, give, contend = lock.token, lock.give, lock.contend
        holders, limits, single = book.holders, policy.limits, policy.only is not None

        def try_acquire(key: Key, cost: Cost = 1) -> Any:  # noqa: ANN401 - a Decision, or whatever `otherwise` gives
            if cost == 1:
                held = token  # see tidegate.lock
                try:
                    del held[0]
                except IndexError:
                    contend()
                try:
                    share = holders[key].share
                    units = share.units
                    now = steady()
                    if units > share.low and now < share.fresh:
                        share.units = units = units - 1
                        if single:  # Told, written out
                            remaining, _, reset = share.told[0]
                            reset += share.received - now
                            views: Any = ((units + remaining, 0, reset if reset > 0 else 0),)  # noqa: FURB136 - no call
                        else:
                            views = LazyViews(share, units, now)
                        return Decision((True, share.offset + now, limits, views, None))
                except (KeyError, TypeError):
                    pass  # a key without a share, or no key at all
                finally:
                    give(None)
                del held
            return otherwise(key, cost)

        return try_acquire

    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        """Apply the verb to every key together."""
        try:
            answer: list[Decision] = self.drive(self.desk.asking(verb, asks, now, at))
        finally:
            self._keeper.tend()
        return answer

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply without blocking the event loop."""
        try:
            answer: list[Decision] = await self.drive_async(self.desk.asking(verb, asks, now, at))
        finally:
            self._keeper.tend_async()
        return answer

    def drive(self, steps: Steps) -> Any:  # noqa: ANN401 - what the steps return
        """Ask the inner store for steps, in a thread."""
        with closing(steps):
            go: Callable[[Any], Any] = steps.send
            value: object = None
            while True:
                try:
                    step = go(value)
                except StopIteration as done:
                    return done.value
                try:
                    go, value = steps.send, self._ask(step)
                except BaseException as error:  # noqa: BLE001 - the steps pass it on, after counting what was lost
                    go, value = steps.throw, error

    async def drive_async(self, steps: Steps) -> Any:  # noqa: ANN401 - what the steps return
        """Ask the inner store for steps, in a task."""
        with closing(steps):
            go: Callable[[Any], Any] = steps.send
            value: object = None
            while True:
                try:
                    step = go(value)
                except StopIteration as done:
                    return done.value
                try:
                    go, value = steps.send, await self._ask_async(step)
                except BaseException as error:  # noqa: BLE001 - as above
                    go, value = steps.throw, error

    # What a guard decides while the store is lost is not the store's to take back, so no share comes from that.

    def _ask(self, step: StoreRequest) -> list[Decision]:
        verb, asks, now, at, share = step
        if share and isinstance(self.inner, GuardedStore):
            self._need_the_store()
            return self.inner.ask_store(verb, asks, now, at)  # within its deadline, but not instead of the store
        return self.inner.apply(verb, asks, now, at)

    async def _ask_async(self, step: StoreRequest) -> list[Decision]:
        verb, asks, now, at, share = step
        if share and isinstance(self.inner, GuardedStore):
            self._need_the_store()
            return await self.inner.ask_store_async(verb, asks, now, at)
        return await self.inner.apply_async(verb, asks, now, at)

    def _lost(self) -> bool:
        guard = self.inner
        return isinstance(guard, GuardedStore) and guard.unavailable

    def _need_the_store(self) -> None:
        if self._lost():
            raise StoreUnavailable("the store is lost: no share of permits can be taken until it is back")

    # ---- ending ------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """Count what the inner store counts, and by unit the permits granted to this process and what became of them.

        `lease_outstanding_…` are held unused: by as much others may be denied too early. `lease_lost_…` could not be
        returned, or perhaps were never granted, or were dropped with a call that was interrupted; they count as used
        until their window ends.
        """
        return {**self.inner.metrics(), **self.desk.sums()}

    def close(self) -> None:
        """Return what is held, and close the inner store if it is ours."""
        atexit.unregister(self._at_exit)
        self._keeper.end()
        self._give_back()
        if self._owns:
            self.inner.close()

    async def close_async(self) -> None:
        """Return what is held, and close the inner store if it is ours, without blocking the event loop."""
        atexit.unregister(self._at_exit)
        await self._keeper.end_async()
        self.desk.close()
        await self._keeper.work_async()
        if self._owns:
            await self.inner.close_async()

    def _give_back(self) -> None:
        self.desk.close()
        self._keeper.work()

    def _disown(self) -> None:
        """Start afresh in a child process."""
        self.desk.disown()
        self._keeper = BackgroundRenewal(self)


def unless_gone(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """Call a method of an object that nobody needs to keep for that."""

    def call() -> None:
        found = method()
        if found is not None:
            found()

    return call
