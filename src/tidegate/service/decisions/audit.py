"""The audit log: who reset, blocked or unblocked a key, or corrected a task budget, when and why.

A shared or durable store keeps the entries for 32 days, one day longer than the longest block. So they survive a
restart of the service, and all services on the store write to one log. Each day has a bounded number of places, filled
in order; an entry is a JSON object (see `stored_bytes`). A store in memory ends with the process, and so does its log.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.service.decisions.stored_bytes import StoredBytes

if TYPE_CHECKING:
    from tidegate.policy import Key
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
        self._durable = not store.instant
        self._stored = StoredBytes(store, "tidegate.audit", KEPT_DAYS * DAY)
        self._recent: deque[AuditEntry] = deque(maxlen=MAX_LISTED)  # of this process
        self._ends: dict[int, int] = {}  # by day: its first free place, as far as known
        self._days: dict[int, dict[int, AuditEntry]] = {}  # the entries that were read, by day and place
        self._ended: set[int] = set()  # days of which all entries were read
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
        now = await self._stored.now()
        if now is None:
            return False
        day = now // DAY
        data = json.dumps(entry, separators=(",", ":")).encode()
        while (place := await self._find_end(day)) is not None and place < MAX_ENTRIES_PER_DAY:
            written = await self._stored.write((f"{day}", f"{place}"), data)
            if written is not False:
                return bool(written)
        return False

    async def _find_end(self, day: int) -> int | None:
        """Return the first free place of a day; None while the store is unavailable."""
        low = high = self._ends.get(day, 0)
        step = 1
        used: bool | None = True
        while high < MAX_ENTRIES_PER_DAY and (used := await self._stored.has((f"{day}", f"{high}"))):
            low, high, step = high + 1, high + step, step * 2
        high = min(high, MAX_ENTRIES_PER_DAY)
        while low < high and used is not None:
            middle = (low + high) // 2
            used = await self._stored.has((f"{day}", f"{middle}"))
            low, high = (middle + 1, high) if used else (low, middle)
        if used is None:
            return None
        self._ends = {known: end for known, end in self._ends.items() if known > day - KEPT_DAYS} | {day: low}
        return low

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
        now = await self._stored.now()
        if now is not None:
            today = now // DAY
            for day in range(today, today - KEPT_DAYS, -1):
                if sum(map(len, self._days.values())) >= MAX_LISTED and day not in self._days:
                    break
                await self._read_day(day, ended=day < today)
            self._days = {day: entries for day, entries in self._days.items() if day > today - KEPT_DAYS}
        found = dict.fromkeys(entry for entries in self._days.values() for entry in entries.values())
        found |= dict.fromkeys(self._recent)
        return sorted(found, key=lambda entry: -entry.at)[:MAX_LISTED]

    async def _read_day(self, day: int, *, ended: bool) -> None:
        """Read the entries of a day that are not known; entries never change, and no entry is added to an ended day.

        An entry that could not be read, or is still being written, is read again the next time.
        """
        if day in self._ended:
            return
        known = self._days.setdefault(day, {})
        end = await self._find_end(day)
        if end is None:
            return
        places = [place for place in range(end) if place not in known]
        read = await self._stored.read_many([(f"{day}", f"{place}") for place in places])
        known |= {place: entry for place, data in zip(places, read, strict=True) if (entry := read_entry(data))}
        if ended and len(known) == end:
            self._ended.add(day)

    async def find_last(self, policy: str, key: Key, action: str) -> AuditEntry | None:
        """Return the latest entry about a key."""
        wanted = (action, policy, key)
        return next((entry for entry in await self.read() if (entry.action, entry.policy, entry.key) == wanted), None)


def read_entry(data: bytes | None) -> AuditEntry | None:
    """Read an entry; None if it is not what `AuditLog` writes."""
    try:
        values: list[Any] = json.loads(data or b"")
        entry = AuditEntry(*values)
    except (ValueError, TypeError):
        return None
    return entry if isinstance(entry.key, str) else entry._replace(key=tuple(entry.key))


def describe_entry(entry: AuditEntry) -> dict[str, Any]:
    """Describe an entry for everybody who may see the dashboard: without its address, which only /v1/audit shows."""
    return {name: value for name, value in entry._asdict().items() if name != "address"}
