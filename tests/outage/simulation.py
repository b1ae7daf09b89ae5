"""Several processes over one store, in virtual time: each may lose it, find it, crash, start or leave, by itself.

The server is a MemoryStore. Every process has its own `Link` to it, which loses questions, loses answers after the
server has acted, or lets a question arrive long after its caller gave up. Whatever is admitted is written down with the
instant of its use; an oracle then asks whether one limit, seeing all of it, would have allowed each call.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate, count
from typing import TYPE_CHECKING

from tidegate.errors import StoreUnavailable
from tidegate.stores import MemoryStore, Store
from tidegate.stores.outage import GuardedStore
from tidegate.testing import ManualClock

if TYPE_CHECKING:
    from tidegate.core.limit import Limit
    from tidegate.policy import Policy

START = 1_728_000_000


class Link(Store):
    """The way of one process to the server. `state` is up, or what is lost on it.

    lost: questions; deaf: answers; slow: answers, while questions arrive some time later; stubborn: corrections.
    """

    def __init__(self, server, world=None):
        super().__init__(server.clock)
        self.server = server
        self.world = world
        self.state = "up"
        self.reached = 0

    def apply(self, verb, asks, now=None, at=None):
        if self.state == "lost" or (self.state == "stubborn" and verb == "adjust"):
            raise StoreUnavailable("could not ask: the link is cut; mend it")
        if self.state == "slow":
            self.world.late.append((verb, asks, at))
            raise StoreUnavailable("no answer: the link is slow; mend it")
        self.reached += 1
        decisions = self.server.apply(verb, asks, now, at)
        if self.state == "deaf":
            raise StoreUnavailable("the answer got lost; mend the link")
        return decisions


class Process:
    """A guard and its link, tended by the world instead of a thread."""

    def __init__(self, world, number):
        self.link = Link(world.server, world)
        self.guard = GuardedStore(
            self.link,
            beat=1.0,
            local_for=world.local_for,
            bounded=True,
            clock=world.clock,
            number=number,
            background=False,
        )
        self.due = 0


class World:
    """Processes that share a policy, and what they admitted."""

    def __init__(self, policy: Policy, seed: int, processes: int = 3, local_for: float = 100.0):
        self.clock = ManualClock(START)
        self.server = MemoryStore(clock=self.clock)
        self.policy = policy
        self.random = random.Random(seed)
        self.local_for = local_for
        self.numbers = count(1)
        self.late = []
        self.gone = []  # crashed: kept, so that nothing tidies up after them
        self.processes = []
        self.used: list[tuple[int, int]] = []
        self.by_share = 0
        self.denied = 0
        for _ in range(processes):
            self.join()

    def join(self) -> Process:
        process = Process(self, self.random.getrandbits(40) | 1)
        self.processes.append(process)
        return process

    def tend(self) -> None:
        now = self.clock.steady()
        for process in self.processes:
            if now >= process.due:
                process.due = process.guard.tend() or 0

    def call(self, process, key="k", cost=1):
        before = process.link.reached
        decision = process.guard.apply_one("acquire", self.policy, key, (cost,))
        if decision.allowed:
            self.used.append((self.clock.steady(), cost))
            self.by_share += process.link.reached == before
        else:
            self.denied += 1
        return decision

    def deliver(self) -> None:
        for verb, asks, at in self.late:
            self.server.apply(verb, asks, None, at)
        self.late.clear()

    def step(self, busy: float) -> None:
        """Let a little time pass and something happen."""
        draw = self.random
        self.clock.advance(draw.choice((0.001, 0.05, 0.1, 0.25, 0.4)))
        self.tend()
        if self.late and draw.random() < 0.05:
            self.deliver()
        for process in self.processes:
            if draw.random() < busy:
                for _ in range(draw.choice((1, 1, 2, 10))):
                    self.call(process, cost=draw.choice((1, 1, 1, 2, 3)))

    def trouble(self) -> None:
        """Let something go wrong, or right."""
        draw = self.random
        what = draw.random()
        if what < 0.55:
            draw.choice(self.processes).link.state = draw.choice(("up", "lost", "deaf", "slow"))
        elif what < 0.75:
            state = draw.choice(("up", "up", "lost", "deaf", "slow"))
            for process in self.processes:
                process.link.state = state
        elif what < 0.85:
            for process in self.processes:
                process.link.state = "up"
        elif what < 0.9 and len(self.processes) > 1:
            self.gone.append(self.processes.pop(draw.randrange(len(self.processes))))
        elif what < 0.95 and len(self.processes) > 1:
            process = self.processes.pop(draw.randrange(len(self.processes)))
            process.guard.close()
            self.gone.append(process)
        elif len(self.processes) < 6:
            self.join()

    def run(self, steps: int, busy: float, trouble: float) -> None:
        for _ in range(steps):
            self.step(busy)
            if self.random.random() < trouble:
                self.trouble()


def excess(limit: Limit, used: list[tuple[int, int]]) -> int:
    """Count the permits that the limit would not have granted, had it seen every call when it was used."""
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
    """Count what exceeds what windows that open at any instant can hold: (n + 1) quotas in any n periods."""
    times = [at for at, _ in used]
    sums = [0, *accumulate(cost for _, cost in used)]
    worst = 0
    for first, at in enumerate(times):
        for periods in (1, 2, 3, 5, 10, 20):
            last = bisect_left(times, at + periods * limit.length)
            worst = max(worst, sums[last] - sums[first] - (periods + 1) * limit.quota)
    return worst
