"""Lists the services that share a store, each with its name and its decisions. For display only.

A service writes a record to the store every `RECORD_SECONDS`, by the clock of the store. A record is a write-once entry
(see `write_once`) in the first free place of that period. A reader reads the places of the current and the previous
period, up to the first free one of each. Records expire by themselves, so a service that has ended disappears within
two periods. A store needs nothing but `apply` for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.clock import TaskSignal
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.service.decisions.write_once import (
    NUMBER_BYTES,
    NUMBER_LIMIT,
    digest_number,
    pack_bytes,
    read_numbers,
    unpack_bytes,
    was_written,
    write_once_policy,
    written_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tidegate.stores import Store

RECORD_SECONDS: Final = 30
ANNOUNCE_INTERVAL: Final = 10 * SECOND
CACHE_TTL: Final = 2 * SECOND
MAX_SERVICES: Final = 32
NAME_NUMBERS: Final = 8  # numbers that make up the name
MAX_NAME_BYTES: Final = NAME_NUMBERS * NUMBER_BYTES
RECORD_NUMBERS: Final = 1 + NAME_NUMBERS + 2  # identity, name, admitted and denied calls
RECORD_POLICY: Final = write_once_policy("tidegate.services", 3.0 * RECORD_SECONDS, RECORD_NUMBERS)


class ServiceRecord(NamedTuple):
    """A service on the store. Its counts are those at the time of the record."""

    name: str
    admitted: int
    denied: int
    own: bool  # whether this is the service that lists them
    seconds_ago: float


class ServiceDirectory:
    """The services on one store, and the record of this service."""

    def __init__(self, store: Store, name: str, identity: tuple[object, ...]) -> None:
        """Write records under this name. `identity` is different for each service, and the same in its workers."""
        self._store = store.unleased
        self._clock = self._store.clock
        self._name = name.encode("utf-8", "replace")[:MAX_NAME_BYTES]
        self.identity: int = digest_number(*(str(part).encode() for part in (name, *identity)))
        self._cached: tuple[int, dict[int, ServiceRecord]] | None = None  # until when, in steady time; by identity

    async def announce(self, admitted: int, denied: int) -> bool:
        """Write the record of the current period, unless that was done before; return whether the store has it."""
        if self._store.instant:
            return False
        counts = (min(count, NUMBER_LIMIT - 1) for count in (admitted, denied))
        numbers = (self.identity, *pack_bytes(self._name, NAME_NUMBERS), *counts)
        period = await self._period()
        for place in range(MAX_SERVICES if period is not None else 0):
            entry = await self._apply("acquire", f"{period}", f"{place}", (1, *numbers))
            if isinstance(entry, LocalDecision):
                return False
            if not was_written(entry) or read_numbers(entry)[0] == self.identity:
                return True
        return False

    async def list(self) -> list[ServiceRecord]:
        """List the services on the store, by name; none while the store is unavailable or is not shared."""
        return sorted((await self._find_all()).values())

    async def find_others(self) -> Iterable[int]:
        """Return the identities of the other services on the store."""
        return [identity for identity, record in (await self._find_all()).items() if not record.own]

    async def _find_all(self) -> Mapping[int, ServiceRecord]:
        if self._store.instant:
            return {}
        now = self._clock.steady()
        if self._cached is None or self._cached[0] <= now:
            self._cached = (now + CACHE_TTL, await self._read())
        return self._cached[1]

    async def run(self, count: Callable[[], tuple[int, int]]) -> None:
        """Write a record with the admitted and denied calls in each period, until cancelled."""
        signal = TaskSignal()
        while not self._store.instant:
            await self.announce(*count())
            await self._clock.wait_async(signal, self._clock.steady() + ANNOUNCE_INTERVAL)

    async def _read(self) -> dict[int, ServiceRecord]:
        period = await self._period()
        found: dict[int, ServiceRecord] = {}
        for each in () if period is None else (period, period - 1):
            for place in range(MAX_SERVICES):
                entry = await self._apply("peek", f"{each}", f"{place}", (1, *(0,) * RECORD_NUMBERS))
                if isinstance(entry, LocalDecision) or not was_written(entry):
                    break
                identity, *name, admitted, denied = read_numbers(entry)
                text = unpack_bytes(name).rstrip(b"\0")
                ago = max(0, entry.at - written_at(entry)) / SECOND
                own = identity == self.identity
                record = ServiceRecord(text.decode("utf-8", "replace"), admitted, denied, own, ago)
                found.setdefault(identity, record)
        return found

    async def _period(self) -> int | None:
        """Return the number of the current period, by the clock of the store; None while it is unavailable."""
        entry = await self._apply("peek", "clock", "", (0,) * (RECORD_NUMBERS + 1))
        return None if isinstance(entry, LocalDecision) else entry.at // (RECORD_SECONDS * SECOND)

    async def _apply(self, verb: str, period: str, place: str, costs: tuple[int, ...]) -> Decision:
        return (await self._store.apply_async(verb, ((RECORD_POLICY, (period, place), costs),)))[0]
