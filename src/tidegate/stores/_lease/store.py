"""LeasedStore: decides in memory, from shares of permits that it takes from a shared store."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING, Any

from tidegate._runtime.clock import TaskSignal, yield_thread
from tidegate._runtime.flow import run, run_async
from tidegate._runtime.fork import at_fork
from tidegate.core._algorithms import View
from tidegate.core._decision import Decision
from tidegate.errors import StoreUnavailable
from tidegate.stores._delegating import DelegatingStore
from tidegate.stores._lease.manager import LeaseManager
from tidegate.stores._lease.renewal import BackgroundRenewal
from tidegate.stores._lease.share import NO_SHARE, LazyViews
from tidegate.stores._lease.terms import Lease
from tidegate.stores._token import release_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._policy import Cost, Key, Policy
    from tidegate._runtime.clock import Clock
    from tidegate.stores._base import Ask, Store, T, TryAcquire
    from tidegate.stores._lease.steps import LeaseFlow, StoreRequest
    from tidegate.stores._values import Write


class LeasedStore(DelegatingStore):
    """Takes shares of permits from a shared store in advance, and decides from them in this process.

    The shared limit is never exceeded, whatever is delayed, lost or killed: the store charges permits before they are
    used, under limits strict enough for permits used when the lease ends (see `terms`). Other processes cannot use the
    unused permits of a share: `metrics()` counts them. Those of a killed process come back when their window ends.

    Shares are sized by the recent demand of a key. A background thread (a task under asyncio) renews them before they
    run out and returns them when they end. With a clock other than the SystemClock, calls do this work themselves. If
    demand is above the limit, permits gather in the store, and calls are denied in memory until the next request (see
    `key_lease`). A forked child starts without shares.
    """

    def __init__(
        self, inner: Store, lease: Lease | None = None, *, clock: Clock | None = None, owns: bool = True
    ) -> None:
        """Take shares from `inner`, and close it with this store if `owns` is true. `clock` is the steady clock."""
        super().__init__(inner, clock)
        self.instant: bool = False  # type: ignore[misc]  # a call may wait for a share
        self.lease: Lease = lease or Lease()
        self._owns = owns
        self.manager: LeaseManager = LeaseManager(
            self.lease,
            self.clock.steady,
            (lambda: inner.unavailable) if inner.has_fallback else None,
            alternatives=inner.decides_alternatives,
        )
        self._renewal = BackgroundRenewal(self)
        at_fork(child=self._reset_after_fork)
        self._at_exit = call_if_alive(weakref.WeakMethod(self._return_all))
        atexit.register(self._at_exit)

    # ---- applying verbs ----------------------------------------------------------------------------------------------

    def specialize(  # noqa: C901 - with the lock written out
        self, policy: Policy, try_acquire: TryAcquire[T]
    ) -> TryAcquire[T]:
        """Return a faster `try_acquire` for calls that a share or a denial can answer."""
        policy_leases = self.manager.find_policy_leases(policy)
        if not policy_leases.length or not any(policy.one):
            return try_acquire
        token, steady = self.manager.token, self.clock.steady
        release = token.append
        key_leases, limits, single = policy_leases.key_leases, policy.limits, policy.only is not None
        one: object = 1
        create = tuple.__new__

        def try_held(key: Key, cost: Cost = 1) -> Decision | T:
            if cost is one:  # not True or 1.0, which are no costs
                while True:
                    try:
                        del token[0]
                    except IndexError:
                        yield_thread(0)
                    else:
                        break
                try:
                    key_lease = key_leases[key]
                    share = key_lease.share
                    units = share.units
                    now = steady()
                    if units > share.renew_below and now < share.renew_at:
                        share.units = units = units - 1
                        if single:  # LazyViews, inlined
                            remaining, _, reset = share.store_views[0]
                            reset += share.received - now
                            reset = reset if reset > 0 else 0  # noqa: FURB136 - no call
                            views: Any = (create(View, (units + remaining, 0, reset)),)
                        else:
                            views = LazyViews(share, units, now)
                        return Decision((True, share.offset + now, limits, views, None))  # of_views, inlined
                    denial = key_lease.denial if share is NO_SHARE else None
                    if denial is not None and (denied := denial.decide_one(now, limits)) is not None:
                        return denied
                except (KeyError, TypeError):
                    pass  # a key without a lease, or not a valid key
                finally:
                    release(None)
            return try_acquire(key, cost)

        return try_held

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply the verb to all keys together."""
        try:
            decisions: list[Decision] = run(self._apply_flow(verb, asks, now, at, writes), self.send)
        finally:
            self._renewal.ensure_running()
        return decisions

    async def apply_async(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply without blocking the event loop."""
        flow = self._apply_flow(verb, asks, now, at, writes)
        try:
            decisions: list[Decision] = await run_async(flow, self.send_async)
        finally:
            self._renewal.ensure_running_async()
        return decisions

    def _apply_flow(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, writes: Sequence[Write]
    ) -> LeaseFlow:
        if writes:
            return self.manager.write_flow(verb, asks, now, at, writes)
        return self.manager.apply_flow(verb, asks, now, at)

    def ask_store(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply, but never decide without the store."""
        self._require_store()
        return self.apply(verb, asks, now, at)

    async def ask_store_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply, but never decide without the store."""
        self._require_store()
        return await self.apply_async(verb, asks, now, at)

    def decide_held(self, ask: Ask) -> Decision | None:
        """Decide from the shares or the cached denial of a key. A share is renewed before it is used up."""
        decision = self.manager.decide_held("acquire", (ask,), None)
        self._renewal.ensure_running_async()
        return decision

    async def wait_for_shares(self, asks: Sequence[Ask]) -> bool:
        """Request shares of keys without permits, and wait for them; returns whether there was one to wait for.

        Many calls for the same keys then need one request for each key, in place of one for each call.
        """
        signal = TaskSignal()
        left = 0

        def notify() -> None:
            nonlocal left
            left -= 1
            if not left:
                signal.set()

        count, until = self.manager.request_shares(asks, notify)
        left += count
        self._renewal.ensure_running_async()
        if left > 0:
            await self.clock.wait_async(signal, until)
        return count > 0

    # During an outage a GuardedStore decides without the store. Such permits cannot be returned, so they are no share.

    def send(self, request: StoreRequest) -> list[Decision]:
        """Send a request to the inner store."""
        verb, asks, now, at, share, writes = request
        if share:
            self._require_store()
            return self.inner.ask_store(verb, asks, now, at)
        return self.inner.apply(verb, asks, now, at, writes) if writes else self.inner.apply(verb, asks, now, at)

    async def send_async(self, request: StoreRequest) -> list[Decision]:
        """Send a request to the inner store, without blocking the event loop."""
        verb, asks, now, at, share, writes = request
        if share:
            self._require_store()
            return await self.inner.ask_store_async(verb, asks, now, at)
        if writes:
            return await self.inner.apply_async(verb, asks, now, at, writes)
        return await self.inner.apply_async(verb, asks, now, at)

    def clear(self) -> bool:
        """Forget the usage of all keys, and all shares, if the inner store serves only this process."""
        cleared = self.inner.clear()
        if cleared:
            self.manager.discard_all()
        return cleared

    @property
    def unleased(self) -> Store:
        """The inner store."""
        return self.inner

    def _require_store(self) -> None:
        if self.inner.unavailable:
            raise StoreUnavailable("the store is unavailable: no permits can be leased until it is available again")

    # ---- metrics and closing -----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """Return the metrics of the inner store, and by unit the permits granted to this process and their outcome.

        `lease_outstanding_…` are unused permits of shares: other processes cannot use them.
        `lease_lost_…` could not be returned, or their request had no reply, or their call was interrupted; they count
        as used until their window ends.
        """
        return {**self.inner.metrics(), **self.manager.metrics()}

    def close(self) -> None:
        """Return all shares, and close the inner store if this store owns it."""
        atexit.unregister(self._at_exit)
        self._renewal.stop()
        self._return_all()
        if self._owns:
            self.inner.close()

    async def close_async(self) -> None:
        """Return all shares, and close the inner store if this store owns it, without blocking the event loop."""
        atexit.unregister(self._at_exit)
        await self._renewal.stop_async()
        self.manager.close()
        await self._renewal.run_jobs_async()
        if self._owns:
            await self.inner.close_async()

    def _return_all(self) -> None:
        self.manager.close()
        self._renewal.run_jobs()

    def _reset_after_fork(self) -> None:
        """Start without shares in a forked child; the thread that held the lock is one of its parent."""
        release_token(self.manager.token)
        self.manager.discard_all()
        self._renewal = BackgroundRenewal(self)


def call_if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """Return a function that calls the method if its object still exists."""

    def call() -> None:
        found = method()
        if found is not None:
            found()

    return call
