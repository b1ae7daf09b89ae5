"""A budget in a shared store: its checks list the open batches, and its settlements update the list."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidegate.budget.storage import owners
from tidegate.budget.storage.listed_batches import ListedBatches
from tidegate.budget.storage.owners import StoreStep
from tidegate.budget.storage.sqlite import POLICY_PREFIX
from tidegate.budget.storage.store_settlements import StoreSettlements
from tidegate.clock import SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.core.decision import LocalDecision
from tidegate.errors import Closed, ConfigError, StoreUnavailable
from tidegate.flow import run, run_async
from tidegate.fork import at_fork, fork_safe
from tidegate.stores.delegating import DelegatingStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.budget.storage.sqlite import Settlement
    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.flow import Flow
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Ask, Store
    from tidegate.stores.values import Write

log: logging.Logger = logging.getLogger("tidegate.budget")
T = TypeVar("T")

HEARTBEATS_PER_LEASE: Final = 4


class ListingStore(DelegatingStore):
    """Forwards everything to a shared store; a check of a budget also lists the batch that it reserves."""

    def __init__(self, inner: Store, budget: str, clock: Clock | None) -> None:
        """Wrap the store of the budget with this name; `clock` replaces the clock of the store, for tests."""
        super().__init__(inner)
        self.batches: ListedBatches = ListedBatches(budget, clock or inner.clock)
        self._test_clock = clock
        self._heartbeats = Heartbeats(weakref.WeakMethod(self.heartbeat))

    # ---- run flows ---------------------------------------------------------------------------------------------------

    def run(self, flow: Flow[StoreStep, T]) -> T:
        """Run a flow of steps in this thread."""
        return run(flow, self._perform)

    async def run_async(self, flow: Flow[StoreStep, T]) -> T:
        """Run a flow of steps in this task."""
        return await run_async(flow, self._perform_async)

    def _perform(self, step: StoreStep) -> list[Decision]:
        apply = self.inner.apply if step.has_fallback else self.inner.ask_store
        return apply(step.verb, step.asks, self._now(), step.at)

    async def _perform_async(self, step: StoreStep) -> list[Decision]:
        apply = self.inner.apply_async if step.has_fallback else self.inner.ask_store_async
        return await apply(step.verb, step.asks, self._now(), step.at)

    def _now(self) -> int | None:
        return None if self._test_clock is None else self._test_clock.ns() // 1000

    # ---- methods of Store --------------------------------------------------------------------------------------------

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply the verb; list a batch that it reserves."""
        flow = None if writes else self._batch_flow(verb, asks, at)
        return super().apply(verb, asks, now, at, writes) if flow is None else self.run(flow)

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key; list a batch that it reserves."""
        flow = self._batch_flow(verb, ((policy, key, costs),), at)
        return self.inner.apply_one(verb, policy, key, costs, now, at) if flow is None else self.run(flow)[0]

    async def apply_async(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply the verb without blocking the event loop; list a batch that it reserves."""
        flow = None if writes else self._batch_flow(verb, asks, at)
        if flow is None:
            return await super().apply_async(verb, asks, now, at, writes)
        return await self.run_async(flow)

    def close(self) -> None:
        """Free the place of this process, and close the wrapped store."""
        self._heartbeats.stop()
        if not self.unavailable:
            with suppress(StoreUnavailable, Closed):
                self.run(self.batches.leave_flow())
        self.inner.close()

    async def close_async(self) -> None:
        """Free the place of this process, and close the wrapped store, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def _batch_flow(self, verb: str, asks: Sequence[Ask], at: int | None) -> Flow[StoreStep, list[Decision]] | None:
        """Return the flow of a call that reserves or refunds a batch; None for any other call."""
        policy, key, costs = asks[0]
        if not policy.name.startswith(POLICY_PREFIX) or not any(costs):
            return None
        if verb == "hold" and not self.unavailable:
            return self._reserve_flow(policy, key, costs)
        if verb == "adjust" and at is not None:
            return self._give_back_flow(policy, key, costs, at)
        return None

    def _reserve_flow(self, policy: Policy, key: Key, costs: tuple[int, ...]) -> Flow[StoreStep, list[Decision]]:
        slot = yield from self.batches.slot_flow(policy, key)
        if slot is None:
            decisions: list[Decision] = yield StoreStep("hold", ((policy, key, costs),), has_fallback=True)
            return decisions
        self._heartbeats.start()
        asks = ((policy, key, costs), self.batches.entry_ask(policy, slot, costs))
        try:
            decisions = yield StoreStep("hold", asks, has_fallback=True)
        except BaseException:  # it may be listed, and refunded later
            self.batches.suspend(slot)
            raise
        if decisions[0].within_limits and not isinstance(decisions[0], LocalDecision):
            self.batches.add(slot, decisions[0].at, costs)
        else:
            self.batches.free(slot)
        return decisions[:1]

    def _give_back_flow(
        self, policy: Policy, key: Key, costs: tuple[int, ...], at: int
    ) -> Flow[StoreStep, list[Decision]]:
        """Undo a check whose caller was cancelled."""
        reserved = tuple(-cost for cost in costs)
        number = self.batches.take_number(at, reserved)
        closing = self.batches.closing_asks(number, policy, reserved, (0,) * len(reserved))
        decisions: list[Decision] = yield StoreStep("adjust", ((policy, key, costs), *closing), at, has_fallback=True)
        self.batches.close_batch(number, closing, decisions, last=True)
        return decisions[:1]

    def heartbeat(self) -> None:
        """Add a heartbeat of this process, if it reaches the store."""
        if not self.unavailable:
            with suppress(StoreUnavailable, Closed):
                self.run(self.batches.heartbeat_flow())


class ListedSettlements(StoreSettlements):
    """Settles with a shared store that lists open batches."""

    _store: ListingStore

    def __init__(self, store: ListingStore, clock: Clock | None) -> None:
        """Settle with this store; `clock` replaces its own, for tests."""
        super().__init__(store, clock)
        self._batches = store.batches

    def take_number(self, policy: Policy, at: int, costs: tuple[int, ...]) -> int:
        """Return the number of a batch that was just reserved, or -1 if it is not listed."""
        del policy
        return self._batches.take_number(at, costs)

    def settle(self, settlement: Settlement) -> None:
        """Correct the charge of a batch, and its entry in the list."""
        if settlement.number < 0:
            super().settle(settlement)
        else:
            self._store.run(self._settle_flow(settlement))

    async def settle_async(self, settlement: Settlement) -> None:
        """Correct the charge of a batch, and its entry in the list."""
        if settlement.number < 0:
            await super().settle_async(settlement)
        else:
            await self._store.run_async(self._settle_flow(settlement))

    def _settle_flow(self, settlement: Settlement) -> Flow[StoreStep, None]:
        """Settle a listed batch. If a call fails, the settlement is repeated, without the steps that succeeded."""
        policy, unlimited, key, at, number, share, _ = settlement
        batches, last = self._batches, not any(share.after)
        if (yield from batches.was_returned_flow(number)):
            yield from self._charge_flow(unlimited, key, share.actual)
            batches.close_batch(number, (), [], last=last)
            return
        if batches.is_listed(number):
            closing = batches.closing_asks(number, policy, share.before, share.after)
            asks = ((policy, key, share.corrections), *closing)
            decisions = yield StoreStep("adjust", asks, at, has_fallback=True)
            batches.close_batch(number, closing, decisions, last=last)
        yield from self._charge_flow(unlimited, key, share.unreserved)

    def _charge_flow(self, unlimited: Policy, key: Key, costs: tuple[int, ...]) -> Flow[StoreStep, None]:
        if any(costs):
            [decision] = yield StoreStep("acquire", ((unlimited, key, costs),), has_fallback=True)
            self.check_charged(decision)

    def return_ended(self, policy: Policy, key: Key) -> int:
        """Refund the batches of processes that have ended; returns how many."""
        with suppress(StoreUnavailable):
            return self._store.run(self._batches.return_ended_flow(policy, key))
        return 0

    async def return_ended_async(self, policy: Policy, key: Key) -> int:
        """Refund the batches of processes that have ended; returns how many."""
        with suppress(StoreUnavailable):
            return await self._store.run_async(self._batches.return_ended_flow(policy, key))
        return 0

    def list_open(self, policy: Policy, key: Key) -> list[tuple[int, tuple[int, ...]]]:
        """Return the listed batches of all processes; none if the store cannot list them (a cluster)."""
        del key
        with suppress(ConfigError):
            return self._store.run(self._batches.list_open_flow(policy))
        return []

    def clean_up(self, policy: Policy, key: Key) -> int:
        """Refund the batches of processes that have ended; states in the store expire by themselves."""
        return self.return_ended(policy, key)


class Heartbeats:
    """A thread that calls a method several times per lease, until it is stopped or the object of the method is gone."""

    def __init__(self, heartbeat: weakref.WeakMethod[Any]) -> None:
        """Call this method."""
        self._heartbeat = heartbeat
        self._stopped = ThreadSignal()
        self._lock = fork_safe(threading.Lock())
        self._thread: threading.Thread | None = None
        at_fork(child=self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        self._thread = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="tidegate-budget-owner", daemon=True)
                    self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        if (thread := self._thread) is not None:
            thread.join()

    def _run(self) -> None:
        clock, interval = SystemClock(), round(owners.LEASE_SECONDS * SECOND) // HEARTBEATS_PER_LEASE
        while not self._stopped.is_set():
            clock.wait(self._stopped, clock.steady() + interval)
            heartbeat = self._heartbeat()
            if heartbeat is None:
                return
            if not self._stopped.is_set():
                try:
                    heartbeat()
                except Exception:
                    log.exception("a heartbeat of the budget failed; the next one is in %.3g s", interval / SECOND)
            del heartbeat
