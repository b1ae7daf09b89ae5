"""The capacity of one provider's accounts, learned from responses and shared with other processes.

Those that share the store read it there (`shared_notices`), the others receive it over a bus, if there is one.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from tidegate.adaptive import SUBJECT, Capacities, CapacityUpdate
from tidegate.adaptive._update import retain_key
from tidegate.bus import Retain
from tidegate.core._bounds import MAX_INTEGER, SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate.adaptive import RecoverySettings
    from tidegate.adaptive._capacities import CapacitySnapshot
    from tidegate.bus import Bus

RETAIN_SECONDS: Final = 3600.0  # for which a reduction is retained for processes that join later


class SharedCapacity:
    """The capacities of a provider's accounts, by resource.

    `announce` publishes the reduction that follows from a response of the provider, under an agent id of its own. Every
    other process on the bus receives the reduction and applies it.
    """

    def __init__(self, agent: str, settings: RecoverySettings, clock: Clock, bus: Bus | None) -> None:
        """Subscribe to the bus; `agent` is a unique name of this process."""
        self._agent = f"{agent}/answers"
        self._bus = bus
        self._clock = clock
        self._latest = 0
        self.interval: int | None = settings.interval
        self._changed: dict[str, Callable[[], object]] = {}
        self._received: dict[str, Callable[[int], object]] = {}
        self.capacities: Capacities = Capacities(
            agent, settings=settings, clock=clock, bus=bus, changed=self._notify_changed, received=self._record
        )
        self.snapshot: Callable[[str], CapacitySnapshot | None] = self.capacities.snapshot
        self.due: Callable[[str], int | None] = self.capacities.due

    def rename(self, agent: str) -> None:
        """Send under another name from now on."""
        self._agent = f"{agent}/answers"
        self.capacities.agent_id = agent

    def set(self, resource: str, quota: int, changed: Callable[[], object], received: Callable[[int], object]) -> None:
        """Start with the whole quota, less the reductions of others.

        `changed` is called when the capacity changed, `received` with the capacity to which another process reduced it.
        """
        self._changed[resource] = changed
        self._received[resource] = received
        self.capacities.set(resource, quota)

    def remove(self, resource: str) -> None:
        """Remove a resource."""
        self._changed.pop(resource, None)
        self._received.pop(resource, None)
        self.capacities.remove(resource)

    def announce(self, resource: str, value: int, pause: int, reason: str) -> CapacityUpdate:
        """Reduce to a value, pause calls for a number of microseconds, and publish both; returns the message."""
        update = self.make_update(resource, value, pause, reason)
        payload = update.to_json()
        if self.capacities.receive(update, payload) and self._bus is not None:
            kept = RETAIN_SECONDS + (update.retry_after or 0)
            self._bus.publish(SUBJECT, payload, Retain(retain_key(resource, self._agent), update.order, kept))
        return update

    def hold(self, resource: str, value: int) -> None:
        """Stay at a value; other processes received the same refusals and hold it themselves."""
        self.capacities.receive(self.make_update(resource, value, 0, "the provider refused more than this before"))

    def receive(self, update: CapacityUpdate, age: int) -> bool:
        """Apply what another process has written this number of microseconds ago; return whether it changes anything.

        Its own clock does not matter: the age is known by the clock of the store.
        """
        timestamp = datetime.fromtimestamp((self._clock.ns() // 1000 - age) / SECOND, UTC)
        return self.capacities.receive(replace(update, timestamp=timestamp), late=True)

    def make_update(self, resource: str, value: int, pause: int, reason: str) -> CapacityUpdate:
        """Return the message about a reduction that is made now."""
        wall = self._clock.ns() // 1000
        epoch = min(MAX_INTEGER, max(self._latest + 1, wall))
        instant = datetime.fromtimestamp(wall / SECOND, UTC)
        return CapacityUpdate(resource, self._agent, value, reason, instant, epoch, pause / SECOND or None)

    def _record(self, update: CapacityUpdate) -> None:
        self._latest = max(self._latest, update.order)
        if update.agent_id != self._agent and update.resource in self._received:
            self._received[update.resource](update.new_capacity)

    def _notify_changed(self, resource: str) -> None:
        changed = self._changed.get(resource)
        if changed is not None:
            changed()

    def close(self) -> None:
        """Unsubscribe from the bus."""
        self.capacities.close()
