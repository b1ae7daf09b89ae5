"""Opens the storage of a budget: the SQLite file, a shared store that lists open batches, or memory."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

from tidegate.budget.storage.file_check import check_path
from tidegate.budget.storage.listing_store import ListedSettlements, ListingStore
from tidegate.budget.storage.sqlite import BudgetStore, Completion, Settlement
from tidegate.budget.storage.store_settlements import StoreSettlements
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.stores.opened import OpenedStore
from tidegate.stores.outage import GuardedStore
from tidegate.urls import split_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tidegate.budget.settings.model import BudgetSettings
    from tidegate.budget.storage.recount import CountedLimits
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

    def list_open(self, policy: Policy, key: Key, /) -> list[tuple[int, tuple[int, ...]]]:
        """Return the instant of each open batch, and what is still reserved for it at each limit."""

    def clean_up(self, policy: Policy, key: Key, /) -> int:
        """Refund expired batches and remove old completions; returns how many."""


class SQLiteSettlements:
    """Settles with the SQLite file directly: while it is unavailable, the budget queues and retries the calls."""

    returns_expired = True

    def __init__(self, budget_store: BudgetStore, guarded: GuardedStore) -> None:
        """Settle with this file; `guarded` decides on it, and learns of failures."""
        self.budget_store = budget_store
        self._guarded = guarded
        self.take_number: Callable[[Policy, int, tuple[int, ...]], int] = budget_store.take_number
        self.clean_up: Callable[[Policy, Key], int] = budget_store.clean_up
        self.list_open: Callable[[Policy, Key], list[tuple[int, tuple[int, ...]]]] = budget_store.list_open

    def settle(self, settlement: Settlement) -> None:
        """Correct the charge of a batch."""
        with self._guarded.observe_call():
            self.budget_store.settle(settlement)

    async def settle_async(self, settlement: Settlement) -> None:
        """Correct the charge of a batch."""
        with self._guarded.observe_call():
            await self.budget_store.settle_async(settlement)

    def record(self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None) -> None:
        """Charge tasks that were not reserved."""
        with self._guarded.observe_call():
            self.budget_store.record(unlimited, key, costs, completion)

    async def record_async(
        self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None
    ) -> None:
        """Charge tasks that were not reserved."""
        with self._guarded.observe_call():
            await self.budget_store.record_async(unlimited, key, costs, completion)

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


def open_storage(
    settings: BudgetSettings, clock: Clock | None, limits: CountedLimits | None, *, only_reads: bool = False
) -> tuple[Store, SettlementStorage]:
    """Open the storage: a guarded store that decides, and the storage of settlements.

    Raises ConfigError if a path can never work. With `only_reads`, no file is created.
    """
    text, path = str(settings.storage), find_path(settings.storage)
    if path is None:
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
        "limits": limits,
        "only_reads": only_reads,
    }
    budget_store = BudgetStore(path, **options)
    guarded = GuardedStore(budget_store)
    if budget_store.open():
        with guarded.observe_call():  # the file is connected
            pass
    return guarded, SQLiteSettlements(budget_store, guarded)


def find_path(storage: str | Path) -> Path | None:
    """Return the path of an SQLite file; None for the URL of another store."""
    text = str(storage)
    if "://" not in text:
        return Path(text)
    if split_url(text, "storage").scheme != "sqlite":
        return None
    return Path(unquote(text.partition("?")[0].removeprefix("sqlite:///")))


def check_storage(settings: BudgetSettings) -> None:
    """Raise ConfigError if the path of the storage can never work. Changes nothing."""
    path = find_path(settings.storage)
    if path is not None:
        check_path(path)


@contextmanager
def locate_storage_errors(field: str = "storage", file: str | None = None) -> Iterator[None]:
    """Name the variable or the file that configured a storage that can never work."""
    try:
        yield
    except ConfigError as error:
        if error.field != "storage" or error.file is not None:
            raise
        raise ConfigError(error.detail, file=file, field=field) from None


def with_deadline(url: str, seconds: float) -> str:
    """Add the deadline of the guarded store to a URL, unless it has one."""
    if url.startswith("memory:") or "deadline=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}deadline={seconds:g}"
