"""Where settlements go: the SQLite file, which keeps books of what is open, or any other store, which has none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

from tidegate.budget.ledger import Ledger, Note, Settlement
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import StoreUnavailable
from tidegate.stores.failure import GuardedStore, open_guarded
from tidegate.urls import split_url

if TYPE_CHECKING:
    from tidegate.budget.settings import BudgetSettings
    from tidegate.clock import Clock
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Store

DAY: Final = 86_400


class Books(Protocol):
    """Takes settlements, in both colours. What cannot be told raises StoreUnavailable, to be told again later."""

    keeps_open: bool  # whether batches of a process that was killed are found and given back

    @property
    def behind(self) -> bool:
        """Whether some of these are still to be given back: asking again does that."""

    def ticket(self, policy: Policy, at: int, costs: tuple[int, ...]) -> int:
        """Give the number by which a batch that was just reserved is known, together with its instant."""

    def settle(self, settlement: Settlement) -> None:
        """Correct the charge of a batch."""

    async def settle_async(self, settlement: Settlement) -> None:
        """Correct the charge of a batch."""

    def record(self, vast: Policy, key: Key, costs: tuple[int, ...], note: Note | None) -> None:
        """Charge what was not reserved."""

    async def record_async(self, vast: Policy, key: Key, costs: tuple[int, ...], note: Note | None) -> None:
        """Charge what was not reserved."""

    def tidy(self, policy: Policy, key: Key) -> int:
        """Give back what is overdue and remove what is old; count both."""


class StoreBooks:
    """Settles with any store. It keeps no list of what is open: a killed process's batch stays charged."""

    keeps_open = False
    behind = False

    def __init__(self, store: Store, clock: Clock | None) -> None:
        """Settle with this store; `clock` replaces its own, for tests."""
        self._store = store
        self._clock = clock

    def ticket(self, policy: Policy, at: int, costs: tuple[int, ...]) -> int:
        """Give none: a charge is known by its instant."""
        del policy, at, costs
        return -1

    def _now(self) -> int | None:
        return None if self._clock is None else self._clock.ns() // 1000

    def settle(self, settlement: Settlement) -> None:
        """Correct the charge of a batch; the guard keeps what a lost store cannot be told."""
        told = settlement
        self._store.apply_one("adjust", told.policy, told.key, told.deltas, self._now(), told.at)
        if any(told.fresh):
            self.record(told.vast, told.key, told.fresh, None)

    async def settle_async(self, settlement: Settlement) -> None:
        """Correct the charge of a batch."""
        told = settlement
        await self._store.apply_async("adjust", ((told.policy, told.key, told.deltas),), self._now(), told.at)
        if any(told.fresh):
            await self.record_async(told.vast, told.key, told.fresh, None)

    def record(self, vast: Policy, key: Key, costs: tuple[int, ...], note: Note | None) -> None:
        """Charge what was not reserved."""
        del note
        self._charged(self._store.apply_one("acquire", vast, key, costs, self._now()))

    async def record_async(self, vast: Policy, key: Key, costs: tuple[int, ...], note: Note | None) -> None:
        """Charge what was not reserved."""
        del note
        self._charged((await self._store.apply_async("acquire", ((vast, key, costs),), self._now()))[0])

    def _charged(self, decision: Decision) -> None:
        if isinstance(decision, LocalDecision):  # the guard answered, and nothing was charged
            raise StoreUnavailable("could not record completed tasks; they are recorded when the store is back")

    def tidy(self, policy: Policy, key: Key) -> int:
        """Leave that to the store: its states end by themselves."""
        del policy, key
        return 0


class LedgerBooks:
    """Settles with the SQLite file itself: what the guard would keep for later is kept by the budget."""

    keeps_open = True

    def __init__(self, ledger: Ledger) -> None:
        """Settle with this file."""
        self.ledger = ledger
        self.ticket = ledger.ticket
        self.settle = ledger.settle
        self.settle_async = ledger.settle_async
        self.record = ledger.record
        self.record_async = ledger.record_async
        self.tidy = ledger.tidy

    @property
    def behind(self) -> bool:
        """Whether some batches are still to be given back."""
        return self.ledger.behind


def open_books(settings: BudgetSettings, clock: Clock | None) -> tuple[Store, Books]:
    """Open the storage: a guarded store to decide by, and the books to settle with."""
    text = str(settings.storage)
    scheme = split_url(text, "storage").scheme if "://" in text else ""
    if scheme and scheme != "sqlite":
        store = open_guarded(with_deadline(text, settings.deadline), clock=clock)
        given = clock if clock is not None and clock is not store.clock else None
        return store, StoreBooks(store, given)
    options: dict[str, Any] = {
        "lasting": settings.lasting,
        "retention": round(settings.retention_days * DAY * SECOND),
        "busy_timeout": settings.deadline,
        "clock": clock,
    }
    path = unquote(text.partition("?")[0].removeprefix("sqlite:///")) if scheme else text
    ledger = Ledger(path, **options)
    return GuardedStore(ledger, deadline=settings.deadline, bounded=True), LedgerBooks(ledger)


def with_deadline(url: str, seconds: float) -> str:
    """Give the guard its deadline, unless the URL says one."""
    if url.startswith("memory:") or "deadline=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}deadline={seconds:g}"
