"""Lists the services that share a store, each with its name and its decisions. For display only.

Each service writes its record to the store every ten seconds, as a value that ends after a minute. So a service that
has ended disappears by itself.
"""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.clock import TaskSignal
from tidegate.core._bounds import SECOND
from tidegate.errors import CollectionFull
from tidegate.service._decisions.shared_store import is_shared, read_time
from tidegate.stores._outage.guarded_store import OUTAGE_ERRORS
from tidegate.stores._values import Collection

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable

    from tidegate.stores import Store
    from tidegate.stores._values import Value

SERVICES: Final = Collection("tidegate.services")
RECORD_TTL: Final = 60.0
ANNOUNCE_INTERVAL: Final = 10 * SECOND
CACHE_TTL: Final = 2 * SECOND
MAX_SERVICES: Final = 32  # that are listed
MAX_NAME_LENGTH: Final = 48


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
        self._shared = is_shared(store)
        self._name = name[:MAX_NAME_LENGTH]
        self._identity = blake2b(repr((name, *map(str, identity))).encode(), digest_size=16).hexdigest()
        self._cached: tuple[int, list[ServiceRecord]] | None = None  # until when, in steady time

    async def announce(self, admitted: int, denied: int) -> bool:
        """Write the record of this service; return whether the store has it."""
        if not self._shared:
            return False
        data = json.dumps((self._name, admitted, denied)).encode()
        try:
            await self._store.put_value_async(SERVICES, self._identity, data, RECORD_TTL)
        except (*OUTAGE_ERRORS, CollectionFull):
            return False
        return True

    async def list(self) -> list[ServiceRecord]:
        """List the services on the store, by name; none while the store is unavailable or is not shared."""
        if not self._shared:
            return []
        now = self._clock.steady()
        if self._cached is None or self._cached[0] <= now:
            self._cached = (now + CACHE_TTL, await self._read())
        return self._cached[1]

    async def run(self, count: Callable[[], tuple[int, int]]) -> None:
        """Write a record with the admitted and denied calls every ten seconds, until cancelled."""
        signal = TaskSignal()
        while self._shared:
            await self.announce(*count())
            await self._clock.wait_async(signal, self._clock.steady() + ANNOUNCE_INTERVAL)

    async def _read(self) -> builtins.list[ServiceRecord]:
        with suppress(*OUTAGE_ERRORS):
            values = await self._store.list_values_async(SERVICES)
            time = await read_time(self._store)
            found = [self._decode(identity, value, time) for identity, value in values.items()]
            own_first = sorted((each for each in found if each is not None), key=lambda each: (not each.own, each))
            return sorted(own_first[:MAX_SERVICES])
        return []

    def _decode(self, identity: str, value: Value, time: int) -> ServiceRecord | None:
        """Read a record; None if it is not what `announce` writes."""
        try:
            name, admitted, denied = json.loads(value.data)
            own, ago = identity == self._identity, max(0, time - value.written) / SECOND
            return ServiceRecord(str(name), int(admitted), int(denied), own, ago)
        except (ValueError, TypeError):
            return None
