"""Where settlements are stored: in the SQLite file, which lists open batches, or in any other store, which does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

from tidegate.budget.storage.sqlite import BudgetStore, Completion, Settlement
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import StoreUnavailable
from tidegate.stores.opened import OpenedStore
from tidegate.stores.outage import GuardedStore
from tidegate.urls import split_url

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tidegate.budget.settings.model import BudgetSettings
    from tidegate.clock import Clock
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Store

DAY_SECONDS: Final = 86_400


class SettlementStorage(Protocol):
    """Stores settlements, for threads and for tasks. Raises StoreUnavailable if a call has to be repeated later."""

    lists_open: bool  # whether open batches are stored, so that those of a killed process are found and returned

    @property
    def has_more_expired(self) -> bool:
        """Whether more batches may have expired: the next call returns some of them."""

    def take_number(self, policy: Policy, at: int, costs: tuple[int, ...], /) -> int:
        """Return the number of a batch that was just reserved; together with its instant it identifies the batch."""

    def settle(self, settlement: Settlement, /) -> None:
        """Correct the charge of a batch."""

    async def settle_async(self, settlement: Settlement, /) -> None:
        """Correct the charge of a batch."""

    def record(self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None, /) -> None:
        """Charge tasks that were not reserved."""

    async def record_async(
        self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None, /
    ) -> None:
        """Charge tasks that were not reserved."""

    def clean_up(self, policy: Policy, key: Key, /) -> int:
        """Return expired batches and remove old completions; returns how many."""


class StoreSettlements:
    """Settles with any store. It does not list open batches: the batch of a killed process stays charged."""

    lists_open = False
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
        self._check_charged(self._store.apply_one("acquire", unlimited, key, costs, self._now()))

    async def record_async(
        self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None
    ) -> None:
        """Charge tasks that were not reserved."""
        del completion
        self._check_charged((await self._store.apply_async("acquire", ((unlimited, key, costs),), self._now()))[0])

    def _check_charged(self, decision: Decision) -> None:
        if isinstance(decision, LocalDecision):  # the guarded store answered without the store; nothing was charged
            raise StoreUnavailable("could not record completed tasks; they are recorded when the store is available")

    def clean_up(self, policy: Policy, key: Key) -> int:
        """Return 0: states in the store expire by themselves."""
        del policy, key
        return 0


class SQLiteSettlements:
    """Settles with the SQLite file directly: while it is unavailable, the budget queues and retries the calls."""

    lists_open = True

    def __init__(self, budget_store: BudgetStore) -> None:
        """Settle with this file."""
        self.budget_store = budget_store
        self.take_number: Callable[[Policy, int, tuple[int, ...]], int] = budget_store.take_number
        self.settle: Callable[[Settlement], None] = budget_store.settle
        self.settle_async: Callable[[Settlement], Coroutine[Any, Any, None]] = budget_store.settle_async
        self.record: Callable[[Policy, Key, tuple[int, ...], Completion | None], None] = budget_store.record
        self.record_async: Callable[[Policy, Key, tuple[int, ...], Completion | None], Coroutine[Any, Any, None]] = (
            budget_store.record_async
        )
        self.clean_up: Callable[[Policy, Key], int] = budget_store.clean_up

    @property
    def has_more_expired(self) -> bool:
        """Whether more batches may have expired."""
        return self.budget_store.has_more_expired


def open_storage(settings: BudgetSettings, clock: Clock | None) -> tuple[Store, SettlementStorage]:
    """Open the storage: a guarded store that decides, and the storage of settlements."""
    text = str(settings.storage)
    scheme = split_url(text, "storage").scheme if "://" in text else ""
    if scheme and scheme != "sqlite":
        store = OpenedStore.open(with_deadline(text, settings.deadline), clock=clock).store
        test_clock = clock if clock is not None and clock is not store.clock else None
        return store, StoreSettlements(store, test_clock)
    options: dict[str, Any] = {
        "batch_ttl": settings.batch_ttl_microseconds,
        "retention": round(settings.retention_days * DAY_SECONDS * SECOND),
        "busy_timeout": settings.deadline,
        "clock": clock,
    }
    path = unquote(text.partition("?")[0].removeprefix("sqlite:///")) if scheme else text
    budget_store = BudgetStore(path, **options)
    return GuardedStore(budget_store, deadline=settings.deadline, bounded=True), SQLiteSettlements(budget_store)


def with_deadline(url: str, seconds: float) -> str:
    """Add the deadline of the guarded store to a URL, unless it has one."""
    if url.startswith("memory:") or "deadline=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}deadline={seconds:g}"
