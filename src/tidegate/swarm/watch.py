"""Who is in the swarm and how they stand: agents answer whoever asks, and only then.

A watcher publishes a question on `ratelimit.agents.ask`; each agent answers on `ratelimit.agents` with its name and its
resources. So watching costs nothing while nobody watches.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from tidegate.adaptive.update import MalformedError, read_signed, write_signed
from tidegate.core.bounds import SECOND
from tidegate.fork import fork_safe
from tidegate.swarm.model import Capacity

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.bus import Bus, Event

ASK: Final = "ratelimit.agents.ask"
TELL: Final = "ratelimit.agents"
LONGEST: Final = 1_000_000  # bytes of an answer


class Presence:
    """Answers for one agent."""

    def __init__(
        self, bus: Bus, agent_id: str, secret: str | bytes | None, describe: Callable[[], list[Capacity]]
    ) -> None:
        """Answer with what `describe` tells."""
        self._bus = bus
        self._agent_id = agent_id
        self._secret = secret
        self._describe = describe
        self._subscription = bus.subscribe(ASK, self._answer)

    def _answer(self, event: Event) -> None:
        if event.late:
            return
        try:
            read_signed(event.payload, self._secret, LONGEST)
        except MalformedError:  # somebody who does not know the secret
            return
        resources = {capacity.resource: asdict(capacity) for capacity in self._describe()}
        fields = {"agent_id": self._agent_id, "resources": resources}
        self._bus.publish(TELL, write_signed(fields, self._secret))

    def close(self) -> None:
        """Answer no more."""
        self._subscription.close()


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent as it last answered, so many seconds ago."""

    agent_id: str
    seconds_ago: float
    resources: dict[str, Capacity]


class Watcher:
    """Asks, and collects the answers."""

    def __init__(self, bus: Bus, secret: str | bytes | None = None) -> None:
        """Listen to answers on the bus."""
        self._bus = bus
        self._secret = secret
        self._lock = fork_safe(threading.Lock())
        self._answers: dict[str, tuple[int, dict[str, Capacity]]] = {}
        self.malformed = 0
        self._subscription = bus.subscribe(TELL, self._hear)

    def ask(self) -> None:
        """Ask everybody to answer."""
        self._bus.publish(ASK, write_signed({}, self._secret))

    def agents(self, within: float = 10.0) -> list[Agent]:
        """List who answered within so many seconds, by name; the others are forgotten."""
        now = self._bus.clock.steady()
        with self._lock:
            self._answers = {
                name: answer for name, answer in self._answers.items() if now - answer[0] <= within * SECOND
            }
            found = sorted(self._answers.items())
        return [Agent(name, (now - at) / SECOND, resources) for name, (at, resources) in found]

    def _hear(self, event: Event) -> None:
        try:
            fields = read_signed(event.payload, self._secret, LONGEST)
            name, resources = _read(fields)
        except (MalformedError, TypeError, KeyError, AttributeError):
            self.malformed += 1
            return
        with self._lock:
            self._answers[name] = (self._bus.clock.steady(), resources)

    def close(self) -> None:
        """Listen no more."""
        self._subscription.close()


def _read(fields: dict[str, Any]) -> tuple[str, dict[str, Capacity]]:
    resources = {str(name): Capacity(**told) for name, told in fields["resources"].items()}
    for capacity in resources.values():
        numbers = (capacity.available, capacity.total, capacity.window, capacity.in_flight, capacity.original)
        if not all(isinstance(number, (int, float)) for number in (*numbers, capacity.frozen_for)):
            raise MalformedError(f"the numbers of {capacity.resource!r} are none")
    return str(fields["agent_id"]), resources
