"""The audit log: who reset, blocked or unblocked a key, or corrected a task budget, when and why.

A shared or durable store keeps the entries for 32 days, one day longer than the longest block. So they survive a
restart of the service, and all services on the store write to one log. The entries of a day, by the clock of the store,
are a collection of values: their names are numbers without gaps, an entry is a JSON array. A store in memory ends with
the process, and so does its log; a store without values has none.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core._bounds import SECOND
from tidegate.errors import CollectionFull, ValueConflict
from tidegate.service._decisions.shared_store import is_shared, read_time
from tidegate.stores._outage.guarded_store import OUTAGE_ERRORS
from tidegate.stores._values import Collection

if TYPE_CHECKING:
    from tidegate._policy import Key
    from tidegate.stores import Store

log: logging.Logger = logging.getLogger("tidegate.service")

DAY: Final = 86_400  # seconds
KEPT_DAYS: Final = 32
MAX_ENTRIES_PER_DAY: Final = 1000
MAX_LISTED: Final = 200
MAX_REASON_LENGTH: Final = 200  # characters; also of the actor
CACHE_TTL: Final = 2 * SECOND


class Origin(NamedTuple):
    """Who makes a change, from where, and why; as given, not verified."""

    actor: str = ""
    address: str = ""
    reason: str = ""


NO_ORIGIN: Final = Origin()


class AuditEntry(NamedTuple):
    """An entry of the audit log."""

    at: int  # milliseconds since 1970
    action: str  # reset, block or unblock; add, refund or reset of a budget, whose tiers are the key
    policy: str
    key: Key
    seconds: float | None  # the duration of a block
    actor: str
    address: str
    reason: str


class AuditLog:
    """The audit log of the services on one store."""

    def __init__(self, store: Store) -> None:
        """Keep the log in this store."""
        self._clock = store.clock
        self._store = store.unleased
        self._durable = is_shared(store)
        self._recent: deque[AuditEntry] = deque(maxlen=MAX_LISTED)  # of this process
        self._next: tuple[int, int] = (0, 0)  # a day, and its first free number as far as known
        self._days: dict[int, list[AuditEntry]] = {}  # the entries that were read, by day
        self._cached: tuple[int, list[AuditEntry]] | None = None  # until when, in steady time
        self.others: list[AuditLog] = []  # logs in other stores, whose entries `read` returns too

    async def add(self, action: str, policy: str, key: Key, origin: Origin, seconds: float | None = None) -> None:
        """Write an entry. If the store does not accept it, it is logged and kept in this process."""
        at = self._clock.ns() // 1_000_000
        actor, address, reason = (part[:MAX_REASON_LENGTH] for part in origin)
        entry = AuditEntry(at, action, policy, key, seconds, actor, address, reason)
        self._recent.append(entry)
        self._cached = None
        who, why = actor or address or "unknown", reason or "no reason given"
        log.info("%s of key %r of policy %r by %s: %s", action, key, policy, who, why)
        if self._durable and not await self._append(entry):
            log.warning("the audit log in the store is full or unavailable: this process keeps the entry")

    async def _append(self, entry: AuditEntry) -> bool:
        data = json.dumps(entry, separators=(",", ":")).encode()
        try:
            day = await self._read_day()
            number = self._next[1] if self._next[0] == day else 0
            while number < MAX_ENTRIES_PER_DAY:
                if await self._put(day, number, data):
                    self._next = (day, number + 1)
                    return True
                number = max(number + 1, len(await self._store.list_values_async(entries_of(day))))
        except (*OUTAGE_ERRORS, CollectionFull):
            pass
        return False

    async def _put(self, day: int, number: int, data: bytes) -> bool:
        """Write an entry; False if the day has one of this number."""
        try:
            await self._store.put_value_async(entries_of(day), f"{number}", data, KEPT_DAYS * DAY, expected=None)
        except ValueConflict:
            return False
        return True

    async def _read_day(self) -> int:
        """Return the number of the current day, by the clock of the store."""
        return await read_time(self._store) // (DAY * SECOND)

    async def read(self) -> list[AuditEntry]:
        """Return the latest entries, the newest first: of all services on the store, and of the other logs."""
        entries = await self._read_own()
        for other in self.others:
            entries = [*entries, *await other.read()]
        return sorted(dict.fromkeys(entries), key=lambda entry: -entry.at)[:MAX_LISTED] if self.others else entries

    async def _read_own(self) -> list[AuditEntry]:
        if not self._durable:
            return list(self._recent)[::-1]
        steady = self._clock.steady()
        if self._cached is None or self._cached[0] <= steady:
            self._cached = (steady + CACHE_TTL, await self._read_store())
        return self._cached[1]

    async def _read_store(self) -> list[AuditEntry]:
        with suppress(*OUTAGE_ERRORS):
            await self._read_days()
        found = dict.fromkeys(entry for entries in self._days.values() for entry in entries)
        found |= dict.fromkeys(self._recent)
        return sorted(found, key=lambda entry: -entry.at)[:MAX_LISTED]

    async def _read_days(self) -> None:
        """Read the latest days: today, yesterday (to which an entry may still be added), and those not yet read."""
        today = await self._read_day()
        self._days = {day: entries for day, entries in self._days.items() if day > today - KEPT_DAYS}
        listed = 0
        for day in range(today, today - KEPT_DAYS, -1):
            if listed >= MAX_LISTED:
                break
            if day >= today - 1 or day not in self._days:
                values = await self._store.list_values_async(entries_of(day))
                self._days[day] = [entry for value in values.values() if (entry := read_entry(value.data))]
            listed += len(self._days[day])

    async def find_last(self, policy: str, key: Key, action: str) -> AuditEntry | None:
        """Return the latest entry about a key."""
        wanted = (action, policy, key)
        return next((entry for entry in await self.read() if (entry.action, entry.policy, entry.key) == wanted), None)


def entries_of(day: int) -> Collection:
    """Return the collection of the entries of a day."""
    return Collection(f"tidegate.audit.{day}")


def read_entry(data: bytes) -> AuditEntry | None:
    """Read an entry; None if it is not what `AuditLog` writes."""
    try:
        values: list[Any] = json.loads(data)
        entry = AuditEntry(*values)
    except (ValueError, TypeError):
        return None
    return entry if isinstance(entry.key, str) else entry._replace(key=tuple(entry.key))


def describe_entry(entry: AuditEntry) -> dict[str, Any]:
    """Describe an entry for everybody who may see the dashboard: without its address, which only /v1/audit shows."""
    return {name: value for name, value in entry._asdict().items() if name != "address"}
