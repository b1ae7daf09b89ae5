"""A swarm in virtual time: real limiters on a bus that loses, delays, repeats and reorders, agents that crash.

All agents call one server with a limit that they do not know. In per-agent mode each has a bucket of its own and is
slowed by 429s; in shared mode they share a store. Everything is drawn from one seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidegate import Limiter
from tidegate.bus import Bus, Event, Retain, Subscription
from tidegate.stores import MemoryStore
from tidegate.swarm import SwarmLimiter
from tidegate.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

START = 1_728_000_000
MINUTE = 60.0
RETAINED = 5000


@dataclass
class SimulatedFaults:
    """The faults of the network and the agents: shares of messages, seconds, and crashes per agent and day."""

    loss: float = 0.05
    duplicate: float = 0.05
    delay: float = 0.05  # seconds, on average
    straggler: float = 0.02  # ... and so many messages take up to a minute
    crashes: float = 4.0


class SimulatedNetwork:
    """The network between the buses: loses, delays and repeats messages."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.buses: dict[str, list[Subscription]] = {}
        self.retained: dict[tuple[str, str], tuple[int, bytes]] = {}

    def send(self, event: Event, retain: Retain | None) -> None:
        """Deliver a message to each subscriber, with its own delay."""
        simulation, rng, faults = self.simulation, self.simulation.rng, self.simulation.faults
        if retain is not None:
            kept = self.retained.get((event.subject, retain.key), (0, b""))
            if kept[0] < retain.version:
                self.retained[event.subject, retain.key] = (retain.version, event.payload)
            while len(self.retained) > RETAINED:
                del self.retained[next(iter(self.retained))]
        for subscription in self.buses.get(event.subject, ()):
            if rng.random() < faults.loss:
                simulation.lost += 1
                continue
            copies = 2 if rng.random() < faults.duplicate else 1
            for _ in range(copies):
                late = rng.random() < faults.straggler
                delay = rng.uniform(0, MINUTE) if late else rng.expovariate(1 / faults.delay)
                simulation.after(delay, subscription.deliver, event)


class SimulatedBus(Bus):
    """The bus of one agent."""

    def __init__(self, network: SimulatedNetwork, clock: ManualClock) -> None:
        self.clock = clock
        self._network = network
        self._own: list[Subscription] = []

    def publish(self, subject: str, payload: bytes, retain: Retain | None = None, *, late: bool = False) -> None:
        self._network.send(Event(subject, payload, late), retain)

    def subscribe(self, subject: str, handler: Any, synced: Any = None) -> Subscription:
        subscription = Subscription(self, subject, handler, synced)
        self._own.append(subscription)
        self._network.buses.setdefault(subject, []).append(subscription)
        retained = {key: kept for (of, key), kept in self._network.retained.items() if of == subject}
        for _, payload in retained.values():
            subscription.deliver(Event(subject, payload, late=True))
        subscription.sync({key: version for key, (version, _) in retained.items()})
        return subscription

    def forget(self, subscription: Subscription) -> None:
        self._network.buses[subscription.subject].remove(subscription)

    @property
    def connected(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True

    def metrics(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        for subscription in self._own:
            subscription.close()


@dataclass
class Outcome:
    """The result of a simulation, minute by minute."""

    hidden: int
    sent: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    capacity: list[int] = field(default_factory=list)  # of all agents together
    announcements: int = 0
    crashes: int = 0
    lost: int = 0
    most_in_a_window: int = 0

    @property
    def settled(self) -> int | None:
        """The first minute from which on ten minutes passed without one being a tenth above the hidden limit."""
        for minute in range(len(self.sent) - 10):
            if all(sent <= self.hidden * 1.1 for sent in self.sent[minute : minute + 10]):
                return minute
        return None

    def used_since(self, minute: int) -> float:
        """Return the share of the hidden limit that was used from a minute on."""
        return (sum(self.sent[minute:]) - sum(self.refused[minute:])) / (self.hidden * len(self.sent[minute:]))

    @property
    def utilisation(self) -> float:
        """The share of the hidden limit that was used after settling."""
        start = self.settled
        served = [sent - refused for sent, refused in zip(self.sent, self.refused, strict=True)]
        return 0.0 if start is None else sum(served[start:]) / (self.hidden * len(served[start:]))

    @property
    def refused_share(self) -> float:
        """The share of calls after settling that the server refused."""
        start = self.settled
        return 1.0 if start is None else sum(self.refused[start:]) / max(1, sum(self.sent[start:]))


class Simulation:
    """Agents, the server, and the queue of events."""

    def __init__(
        self,
        agents: int,
        minutes: int,
        *,
        shared: bool = False,
        seed: int = 0,
        faults: SimulatedFaults | None = None,
        own_capacity: int = 20,
        share: float = 0.3,
        recovery_interval: float = 60.0,
        recovery: str = "gradual",
        blind: bool = False,
        retry_after: float | None = None,
        algorithm: str | None = None,
    ) -> None:
        """Set the hidden limit to a `share` of the configured capacity of all agents.

        If agents that share a store are `blind`, they do not know the limit either: they share the whole capacity.
        A refusal says `retry_after`. The server counts with `algorithm`.
        """
        self.recovery = recovery
        self.retry_after = retry_after
        self.blind = blind
        self.calls_server = blind or not shared
        self.rng = random.Random(seed)
        self.faults = faults or SimulatedFaults()
        self.clock = ManualClock(START)
        self.now = 0.0
        self.shared = shared
        self.minutes = minutes
        self.own_capacity = own_capacity
        self.share = share
        self.recovery_interval = recovery_interval
        self.hidden = round(agents * own_capacity * share)
        # A shared quota is a number of calls in any minute, so its server counts windows, too.
        rule = f"{self.hidden}/1m sliding_log" if shared else f"{self.hidden}/1m burst={max(1, self.hidden // 6)}"
        rule = rule if algorithm is None else f"{self.hidden}/1m {algorithm}"
        self.server = Limiter(rule, clock=self.clock)
        self.store = MemoryStore(clock=self.clock)
        self.network = SimulatedNetwork(self)
        self.lost = 0
        self.outcome = Outcome(self.hidden)
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._sent = self._refused = 0
        self._window: deque[float] = deque()
        self._agents: list[tuple[SwarmLimiter, SimulatedBus]] = []
        for number in range(agents):
            self._agents.append(self._join())
            self.after(self.rng.uniform(0, 60 / own_capacity), self._call, number)
        self.after(MINUTE, self._count)
        if self.faults.crashes:
            self.after(self._until_crash(), self._crash)

    def after(self, seconds: float, what: Callable[..., object], *arguments: Any) -> None:
        """Schedule an event."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), what, arguments))

    def run(self) -> Outcome:
        """Let it all happen."""
        end = self.minutes * MINUTE
        while self._queue[0][0] <= end:
            instant, _, what, arguments = heapq.heappop(self._queue)
            self.clock.advance(START + instant - self.clock.now())
            self.now = instant
            what(*arguments)
        self.outcome.lost = self.lost
        return self.outcome

    def _join(self) -> tuple[SwarmLimiter, SimulatedBus]:
        bus = SimulatedBus(self.network, self.clock)
        options: dict[str, Any] = {"store": self.store, "lease": True} if self.shared else {}
        limiter = SwarmLimiter(
            bus,
            agent_id=f"agent-{next(self._names)}",
            cooldown=5.0,
            recovery_interval=self.recovery_interval,
            recovery=self.recovery,
            clock=self.clock,
            **options,
        )
        together = round(self.hidden / self.share) if self.blind else self.hidden
        limiter.set_capacity("api", together if self.shared else self.own_capacity, 60)
        return limiter, bus

    def _call(self, number: int) -> None:
        """Let an agent make a call if it may, and come again when the next permit should be there."""
        limiter, _ = self._agents[number]
        wait = 60 / self.own_capacity
        if limiter.try_acquire("api"):
            limiter.release("api", return_token=False)
            self._sent += 1
            if self.shared:
                self._admitted()
            if self.calls_server and not self.server.try_acquire("api"):
                self._refused += 1
                self.outcome.announcements += 1
                limiter.announce_reduced("api", "received 429 response", retry_after=self.retry_after)
        if not self.shared:
            capacity = limiter.get_capacity("api")
            assert capacity is not None
            wait = 60 / capacity.total
        self.after(wait * self.rng.uniform(0.9, 1.1), self._call, number)

    def _admitted(self) -> None:
        window = self._window
        window.append(self.now)
        while window[0] <= self.now - MINUTE:
            window.popleft()
        self.outcome.most_in_a_window = max(self.outcome.most_in_a_window, len(window))

    def _until_crash(self) -> float:
        return self.rng.expovariate(len(self._agents) * self.faults.crashes / 86_400)

    def _crash(self) -> None:
        """Let an agent end without a word, and another take its place."""
        number = self.rng.randrange(len(self._agents))
        self._agents[number][1].close()
        self._agents[number] = self._join()
        self.outcome.crashes += 1
        self.after(self._until_crash(), self._crash)

    def _count(self) -> None:
        self.outcome.sent.append(self._sent)
        self.outcome.refused.append(self._refused)
        self._sent = self._refused = 0
        capacities = [limiter.get_capacity("api") for limiter, _ in self._agents] if not self.shared else []
        self.outcome.capacity.append(sum(capacity.total for capacity in capacities if capacity is not None))
        self.after(MINUTE, self._count)
