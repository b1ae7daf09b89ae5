"""Simulates several processes with one store in virtual time: each may disconnect, reconnect, crash, start or leave.

The server is a MemoryStore. Every process has its own `Link` to it, which loses requests, loses answers after the
server has acted, or delivers a request long after its caller gave up. Every admitted call is recorded with its instant;
an oracle then checks whether one limit that saw all of them would have allowed each call.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

from tidegate.core._decision import LocalDecision
from tidegate.errors import StoreUnavailable, ValueConflict
from tidegate.stores import MemoryStore, Store
from tidegate.stores._outage import GuardedStore
from tidegate.testing import ManualClock

if TYPE_CHECKING:
    from tidegate._policy import Policy
    from tidegate.core._limit import Limit

START = 1_728_000_000


class Link(Store):
    """The connection of one process to the server. `state` is "up", or what is lost.

    lost: requests; deaf: answers; slow: answers, while requests arrive some time later; stubborn: corrections.
    """

    def __init__(self, server, simulation=None):
        super().__init__(server.clock)
        self.server = server
        self.simulation = simulation
        self.state = "up"
        self.reached = 0

    keeps_values = True

    def apply(self, verb, asks, now=None, at=None, writes=()):
        if self.state == "lost" or (self.state == "stubborn" and verb == "adjust"):
            raise StoreUnavailable("could not ask: the link is down")
        if self.state == "slow":
            self.simulation.late.append((verb, asks, at, writes))
            raise StoreUnavailable("no answer: the link is slow")
        self.reached += 1
        decisions = self.server.apply(verb, asks, now, at, writes)
        if self.state == "deaf":
            raise StoreUnavailable("the answer was lost")
        return decisions

    def list_values(self, collection, now=None):
        if self.state != "up":
            raise StoreUnavailable("could not list: the link is down")
        self.reached += 1
        return self.server.list_values(collection, now)


class Process:
    """A GuardedStore and its link, maintained by the simulation instead of a thread."""

    def __init__(self, simulation):
        self.link = Link(simulation.server, simulation)
        self.guarded = GuardedStore(
            self.link,
            clock=simulation.clock,
            background=False,
        )
        self.due = 0


class Simulation:
    """Processes that share a policy, and the calls that they admitted."""

    def __init__(self, policy: Policy, seed: int, processes: int = 3):
        self.clock = ManualClock(START)
        self.server = MemoryStore(clock=self.clock)
        self.policy = policy
        self.random = random.Random(seed)
        self.late = []
        self.ended = []  # crashed: kept alive, so that no finalizer cleans up
        self.processes = []
        self.used: list[tuple[int, int]] = []  # with the store
        self.local: list[tuple[int, int]] = []  # without it
        self.denied = 0
        for _ in range(processes):
            self.join()

    def join(self) -> Process:
        process = Process(self)
        self.processes.append(process)
        return process

    def maintain(self) -> None:
        now = self.clock.steady()
        for process in self.processes:
            if now >= process.due or process.guarded.unavailable:  # the start of an outage wakes the real thread
                process.due = process.guarded.maintain() or 0

    def call(self, process, key="k", cost=1):
        decision = process.guarded.apply_one("acquire", self.policy, key, (cost,))
        if decision.allowed:
            (self.local if isinstance(decision, LocalDecision) else self.used).append((self.clock.steady(), cost))
        else:
            self.denied += 1
        return decision

    def deliver(self) -> None:
        for verb, asks, at, writes in self.late:
            with suppress(ValueConflict):
                self.server.apply(verb, asks, None, at, writes)
        self.late.clear()

    def step(self, busy: float) -> None:
        """Advance the time a little and make some calls."""
        draw = self.random
        self.clock.advance(draw.choice((0.001, 0.05, 0.1, 0.25, 0.4)))
        self.maintain()
        if self.late and draw.random() < 0.05:
            self.deliver()
        for process in self.processes:
            if draw.random() < busy:
                for _ in range(draw.choice((1, 1, 2, 10))):
                    self.call(process, cost=draw.choice((1, 1, 1, 2, 3)))

    def change_faults(self) -> None:
        """Start or end a random fault."""
        draw = self.random
        number = draw.random()
        if number < 0.55:
            draw.choice(self.processes).link.state = draw.choice(("up", "lost", "deaf", "slow"))
        elif number < 0.75:
            state = draw.choice(("up", "up", "lost", "deaf", "slow"))
            for process in self.processes:
                process.link.state = state
        elif number < 0.85:
            for process in self.processes:
                process.link.state = "up"
        elif number < 0.9 and len(self.processes) > 1:
            self.ended.append(self.processes.pop(draw.randrange(len(self.processes))))
        elif number < 0.95 and len(self.processes) > 1:
            process = self.processes.pop(draw.randrange(len(self.processes)))
            process.guarded.close()
            self.ended.append(process)
        elif len(self.processes) < 6:
            self.join()

    def run(self, steps: int, busy: float, fault_rate: float) -> None:
        for _ in range(steps):
            self.step(busy)
            if self.random.random() < fault_rate:
                self.change_faults()


def excess(limit: Limit, used: list[tuple[int, int]]) -> int:
    """Count the permits that one limit would not have granted if it had seen every call."""
    if limit.algorithm == "fixed_window":
        return windows_excess(limit, used)
    state, over = None, 0
    for at, cost in used:
        charged = limit.charge(state, limit, cost, at)
        if charged is None:
            over += cost
        else:
            state = charged
    return over


def windows_excess(limit: Limit, used: list[tuple[int, int]]) -> int:
    """Count what exceeds (n + 1) quotas in any n periods, the bound of windows that open at any instant."""
    times = [at for at, _ in used]
    sums = [0, *accumulate(cost for _, cost in used)]
    worst = 0
    for first, at in enumerate(times):
        for periods in (1, 2, 3, 5, 10, 20):
            last = bisect_left(times, at + periods * limit.length)
            worst = max(worst, sums[last] - sums[first] - (periods + 1) * limit.quota)
    return worst
