"""Settlements with any store that does not list open batches: in memory, or while the database is unavailable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from tidegate.budget.storage.sqlite import Completion, Settlement
    from tidegate.clock import Clock
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Store


class StoreSettlements:
    """Settles with any store. It does not list open batches: the batch of a killed process stays charged."""

    returns_expired = False
    has_more_expired = False

    def __init__(self, store: Store, clock: Clock | None) -> None:
        """Settle with this store; `clock` replaces its own, for tests."""
        self._store = store
        self._clock = clock

    def take_number(self, policy: Policy, at: int, costs: tuple[int, ...]) -> int:
        """Return -1: the instant alone identifies a charge."""
        del policy, at, costs
        return -1

    def _now(self) -> int | None:
        return None if self._clock is None else self._clock.ns() // 1000

    def settle(self, settlement: Settlement) -> None:
        """Correct the charge of a batch; the guarded store repeats a correction that a lost store misses."""
        policy, unlimited, key, at, _, share, _ = settlement
        self._store.apply_one("adjust", policy, key, share.corrections, self._now(), at)
        if any(share.unreserved):
            self.record(unlimited, key, share.unreserved, None)

    async def settle_async(self, settlement: Settlement) -> None:
        """Correct the charge of a batch."""
        policy, unlimited, key, at, _, share, _ = settlement
        await self._store.apply_async("adjust", ((policy, key, share.corrections),), self._now(), at)
        if any(share.unreserved):
            await self.record_async(unlimited, key, share.unreserved, None)

    def record(self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None) -> None:
        """Charge tasks that were not reserved."""
        del completion
        self.check_charged(self._store.apply_one("acquire", unlimited, key, costs, self._now()))

    async def record_async(
        self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None
    ) -> None:
        """Charge tasks that were not reserved."""
        del completion
        self.check_charged((await self._store.apply_async("acquire", ((unlimited, key, costs),), self._now()))[0])

    def check_charged(self, decision: Decision) -> None:
        """Raise StoreUnavailable if the store has not charged completed tasks."""
        if isinstance(decision, LocalDecision):  # the guarded store answered without the store; nothing was charged
            raise StoreUnavailable("could not record completed tasks; they are recorded when the store is available")

    def return_ended(self, policy: Policy, key: Key) -> int:
        """Return 0: there is no list of open batches."""
        del policy, key
        return 0

    async def return_ended_async(self, policy: Policy, key: Key) -> int:
        """Return 0: there is no list of open batches."""
        return self.return_ended(policy, key)

    def list_open(self, policy: Policy, key: Key) -> list[tuple[int, tuple[int, ...]]]:
        """Return none: there is no list of open batches."""
        del policy, key
        return []

    def clean_up(self, policy: Policy, key: Key) -> int:
        """Return 0: states in the store expire by themselves."""
        del policy, key
        return 0
