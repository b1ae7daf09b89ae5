"""What the answers of one provider say of its capacity, shared with other processes over a bus if there is one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from tidegate.adaptive import SUBJECT, Capacities, CapacityUpdate
from tidegate.bus import Retain
from tidegate.core.bounds import MAX, SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.adaptive import Terms
    from tidegate.bus import Bus
    from tidegate.clock import Clock

KEPT: Final = 3600.0  # seconds for which who joins later is told of a reduction


class Pressure:
    """The capacities of a provider's accounts, by resource.

    The provider itself is the agent that speaks here: `say` is what one of its answers meant. Everybody on the bus
    hears it, and what others heard counts here too.
    """

    def __init__(self, agent: str, terms: Terms, clock: Clock, bus: Bus | None) -> None:
        """Listen on the bus; `agent` is a name that no other process has."""
        self._agent = f"{agent}/answers"
        self._bus = bus
        self._clock = clock
        self._latest = 0
        self.interval = terms.interval
        self._changed: dict[str, Callable[[], object]] = {}
        self.capacities = Capacities(agent, terms=terms, clock=clock, bus=bus, changed=self._look, told=self._note)
        self.look = self.capacities.look
        self.due = self.capacities.due

    def set(self, resource: str, quota: int, changed: Callable[[], object]) -> None:
        """Begin with the whole quota (less what others have said); `changed` is called when to look again."""
        self._changed[resource] = changed
        self.capacities.set(resource, quota)

    def say(self, resource: str, value: int, pause: int, reason: str) -> None:
        """Reduce to a value, and ask for no calls for so many microseconds."""
        wall = self._clock.ns() // 1000
        epoch = min(MAX, max(self._latest + 1, wall))
        wait = pause / SECOND or None
        instant = datetime.fromtimestamp(wall / SECOND, UTC)
        update = CapacityUpdate(resource, self._agent, value, reason, instant, epoch, wait)
        payload = update.to_json()
        if self.capacities.hear(update, payload) and self._bus is not None:
            self._bus.publish(SUBJECT, payload, Retain(f"{resource}\n{self._agent}", epoch, KEPT + (wait or 0)))

    def _note(self, update: CapacityUpdate) -> None:
        self._latest = max(self._latest, update.order)

    def _look(self, resource: str) -> None:
        changed = self._changed.get(resource)
        if changed is not None:
            changed()

    def close(self) -> None:
        """Listen no more."""
        self.capacities.close()
