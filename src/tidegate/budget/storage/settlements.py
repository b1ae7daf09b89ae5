"""Opens the storage of a budget: the SQLite file, a shared store that lists open batches, or memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

from tidegate.budget.storage.listing_store import ListedSettlements, ListingStore
from tidegate.budget.storage.sqlite import BudgetStore, Completion, Settlement
from tidegate.budget.storage.store_settlements import StoreSettlements
from tidegate.core.bounds import SECOND
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

    returns_expired: bool  # whether every check returns batches that have expired, also those of this process

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

    def return_ended(self, policy: Policy, key: Key, /) -> int:
        """Refund the batches of processes that have ended, unless every check does that; returns how many."""

    async def return_ended_async(self, policy: Policy, key: Key, /) -> int:
        """Refund the batches of processes that have ended, unless every check does that; returns how many."""

    def clean_up(self, policy: Policy, key: Key, /) -> int:
        """Refund expired batches and remove old completions; returns how many."""


class SQLiteSettlements:
    """Settles with the SQLite file directly: while it is unavailable, the budget queues and retries the calls."""

    returns_expired = True

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

    def return_ended(self, policy: Policy, key: Key) -> int:
        """Return 0: every check returns them."""
        del policy, key
        return 0

    async def return_ended_async(self, policy: Policy, key: Key) -> int:
        """Return 0: every check returns them."""
        return self.return_ended(policy, key)

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
        if store.instant:  # in memory: no other process shares it
            return store, StoreSettlements(store, test_clock)
        listing = ListingStore(store, settings.name, test_clock)
        return listing, ListedSettlements(listing, test_clock)
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
