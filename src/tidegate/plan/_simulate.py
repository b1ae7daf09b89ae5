"""Simulates limits under generated traffic: the same calls for each rule, decided by the code that enforces limits.

    Traffic ──► calls in the order of time ──► Simulation of each rule ──► report

What a caller does after a denial is a `Behaviour`: it gives up, retries as it was told or as it likes, or waits in the
queue of its key. A hidden limit is one that a provider applies to the calls that were admitted.
"""

from __future__ import annotations

import heapq
import random
from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._limiter.limiter import Limiter
from tidegate._policy import Policy
from tidegate.core import Limit
from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.plan._clock import ReplayClock
from tidegate.plan._report import quantile, share
from tidegate.plan._traffic import Traffic
from tidegate.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tidegate.core import Decision
    from tidegate.plan._report import Report
    from tidegate.plan._traffic import Arrival

START: Final = 1_728_000_000 * SECOND  # the start of a day, hour and minute in UTC
MAX_STEPS: Final = 120  # of a timeline
IMPATIENCE: Final = SECOND  # a client that ignores Retry-After comes back within this time
JITTER: Final = 0.1  # of the wait that an obedient client was told
MAX_KEYS: Final = 50_000_000
HIDDEN_KEY: Final = "provider"


@dataclass(frozen=True)
class SimulateOptions:
    """How long to simulate, and what callers do after a denial: see `tidegate plan simulate --help`."""

    duration: int = 600 * SECOND
    seed: int = 1
    retries: int = 0  # times that a denied client comes back
    obedient: float = 1.0  # the share of clients that wait for Retry-After; the others come back within a second
    wait: int = 0  # how long a caller waits in the queue of its key, instead of being denied; in microseconds
    hidden: Limit | None = None  # of a provider, for all admitted calls together
    progress: Callable[[int, int], None] = field(default=lambda _done, _total: None)


class Attempt(NamedTuple):
    """A call that is made: now for the first time, or again."""

    first: int  # when the call was made for the first time
    client: int
    before: int  # attempts before this one


class Outcomes:
    """What happened to the calls under one rule."""

    def __init__(self, duration: int) -> None:
        """Count nothing yet."""
        self.calls: int = 0
        self.admitted: int = 0
        self.denied: int = 0  # calls that were never admitted
        self.attempts: int = 0
        self.refused: int = 0  # admitted calls that the hidden limit refused
        self.waits: array[int] = array("q")  # of admitted calls, from their first attempt
        self.times: dict[int, array[int]] = {}  # when calls were admitted, by client
        self.step: int = max(SECOND, -(-duration // MAX_STEPS))
        steps = -(-duration // self.step)
        self.offered_steps: list[int] = [0] * steps
        self.admitted_steps: list[int] = [0] * steps
        self.denied_steps: list[int] = [0] * steps

    def admit(self, now: int, attempt: Attempt) -> None:
        """Count an admitted call."""
        self.admitted += 1
        self.waits.append(now - attempt.first)
        times = self.times.get(attempt.client)
        if times is None:
            times = self.times[attempt.client] = array("q")
        times.append(now)
        self._count(self.admitted_steps, now)

    def deny(self, now: int) -> None:
        """Count a call that is not made again."""
        self.denied += 1
        self._count(self.denied_steps, now)

    def offer(self, now: int) -> None:
        """Count a call that is made for the first time."""
        self.calls += 1
        self._count(self.offered_steps, now)

    def _count(self, steps: list[int], now: int) -> None:
        place = min(now // self.step, len(steps) - 1)
        steps[place] += 1


class Simulation:
    """Decides about calls by one rule."""

    def __init__(self, name: str, limits: Sequence[Limit], options: SimulateOptions) -> None:
        """Simulate these limits, for each client."""
        self.name: str = name
        self.limits: Sequence[Limit] = limits
        self.outcomes: Outcomes = Outcomes(options.duration)
        self._options = options
        self._clock = ReplayClock()
        store = MemoryStore(clock=self._clock, max_entries=MAX_KEYS)
        self._limiter = Limiter(Policy(name, tuple(limits)), store=store)
        self._hidden = None if options.hidden is None else Limiter(Policy("hidden", (options.hidden,)), store=store)
        self._pending: list[tuple[int, int, Attempt]] = []
        self._order = count()
        self._queues: dict[int, deque[Attempt]] = {}  # of callers that wait, by client
        self._chance = random.Random(f"retries {options.seed}")  # noqa: S311 - no secret

    def call(self, arrival: Arrival) -> None:
        """Decide about a call, after everything that is due before it."""
        self.advance(arrival.at)
        self.outcomes.offer(arrival.at)
        self._attempt(arrival.at, Attempt(arrival.at, arrival.client, 0))

    def advance(self, until: int) -> None:
        """Make the retries that are due."""
        while self._pending and self._pending[0][0] <= until:
            now, _, attempt = heapq.heappop(self._pending)
            if self._options.wait:
                self._serve(now, attempt.client)
            else:
                self._attempt(now, attempt)

    def finish(self) -> None:
        """Deny the callers that still wait or would come back after the end."""
        end = self._options.duration
        self.advance(end - 1)
        left = sum(map(len, self._queues.values())) if self._options.wait else len(self._pending)
        for _ in range(left):
            self.outcomes.deny(end - 1)

    def _decide(self, now: int, client: int) -> Decision:
        self._clock.set(START + now)
        self.outcomes.attempts += 1
        return self._limiter.try_acquire(str(client))

    def _attempt(self, now: int, attempt: Attempt) -> None:
        if self._queues.get(attempt.client):  # behind those who wait already
            self._enqueue(attempt)
            return
        decision = self._decide(now, attempt.client)
        if decision.allowed:
            self._admit(now, attempt)
        elif self._options.wait:
            self._wait(now, attempt, decision)
        elif attempt.before < self._options.retries:
            self._schedule(now + self._pause(attempt.client, decision), attempt._replace(before=attempt.before + 1))
        else:
            self.outcomes.deny(now)

    def _admit(self, now: int, attempt: Attempt) -> None:
        self.outcomes.admit(now, attempt)
        if self._hidden is not None and not self._hidden.try_acquire(HIDDEN_KEY).allowed:
            self.outcomes.refused += 1

    def _pause(self, client: int, decision: Decision) -> int:
        """Return how long a denied client pauses; whether it obeys depends on the client alone."""
        obeys = random.Random(f"client {client}").random() < self._options.obedient  # noqa: S311 - no secret
        told = decision.retry_after
        if not obeys or told is None:
            return int(self._chance.random() * IMPATIENCE) + 1
        return int(told * SECOND * (1 + JITTER * self._chance.random())) + 1

    def _schedule(self, when: int, attempt: Attempt) -> None:
        heapq.heappush(self._pending, (when, next(self._order), attempt))

    def _wait(self, now: int, attempt: Attempt, decision: Decision) -> None:
        """Wait at the head of the queue until a permit is due, if that is before the deadline."""
        due = None if decision.retry_after is None else now + round(decision.retry_after * SECOND)
        if due is None or due > attempt.first + self._options.wait:
            self.outcomes.deny(now)
            return
        self._queues.setdefault(attempt.client, deque()).appendleft(attempt)
        self._schedule(due, attempt)

    def _enqueue(self, attempt: Attempt) -> None:
        self._queues[attempt.client].append(attempt)

    def _serve(self, now: int, client: int) -> None:
        """Let the head of a queue ask again; if it is served or gives up, the next one asks."""
        queue = self._queues[client]
        while queue:
            attempt = queue.popleft()
            if now > attempt.first + self._options.wait:
                self.outcomes.deny(now)
                continue
            decision = self._decide(now, client)
            if decision.allowed:
                self._admit(now, attempt)
                continue
            before = len(queue)
            self._wait(now, attempt, decision)
            if len(queue) > before:  # it waits again
                return


def simulate(
    rules: Mapping[str, Sequence[Limit | str]], traffic: Iterable[str], options: SimulateOptions | None = None
) -> Report:
    """Simulate rules side by side under the same traffic, and return the report.

    `rules` maps names to the limits of a client; see `compare_algorithms`. Several kinds of traffic are merged. The
    same seed gives the same report.
    """
    options = options or SimulateOptions()
    kinds = [Traffic.parse(text) for text in traffic]
    if not rules or not kinds:
        raise ConfigError("expected rules and traffic, such as 100/1m and 'poisson rate=5/1s'")
    simulations = [Simulation(name, [read_limit(each) for each in limits], options) for name, limits in rules.items()]
    total = sum(kind.expected_calls(options.duration) for kind in kinds)
    arrivals = heapq.merge(*(kind.arrivals(options.duration, options.seed + n) for n, kind in enumerate(kinds)))
    for done, arrival in enumerate(arrivals):
        for simulation in simulations:
            simulation.call(arrival)
        if not done % 1000:
            options.progress(done, max(int(total), done))
    for simulation in simulations:
        simulation.finish()
    return {
        "traffic": [kind.text for kind in kinds],
        "duration": options.duration / SECOND,
        "seed": options.seed,
        "behaviour": describe_behaviour(options),
        "step": simulations[0].outcomes.step / SECOND,
        "offered": simulations[0].outcomes.offered_steps,
        "rules": [describe(simulation) for simulation in simulations],
    }


def read_limit(limit: Limit | str) -> Limit:
    """Return a limit that can be simulated; raises ConfigError."""
    found = limit if isinstance(limit, Limit) else Limit.parse(limit)
    if found.rules.holds_slots:
        raise ConfigError("slots cannot be simulated: generated calls have no durations", field=str(found))
    return found


def compare_algorithms(limit: str) -> dict[str, list[Limit]]:
    """Return a limit that names no algorithm with each algorithm that can count it, as rules for `simulate`."""
    given = Limit.parse(limit)
    if given.calendar is not None or any(word in ALGORITHMS for word in limit.split()):
        return {str(given): [given]}
    names = [name for name, each in ALGORITHMS.items() if not each.by_calendar and not each.holds_slots]
    return {f"{limit} {name}": [Limit.parse(f"{limit} {name}")] for name in names}


def describe_behaviour(options: SimulateOptions) -> dict[str, Any]:
    """Describe what callers do after a denial."""
    return {
        "retries": options.retries,
        "obedient": options.obedient,
        "wait": options.wait / SECOND,
        "hidden": None if options.hidden is None else str(options.hidden),
    }


def describe(simulation: Simulation) -> dict[str, Any]:
    """Return the outcomes of one rule as data."""
    found = simulation.outcomes
    waits = sorted(found.waits)
    return {
        "rule": simulation.name,
        "limits": [str(limit) for limit in simulation.limits],
        "calls": found.calls,
        "admitted": found.admitted,
        "admitted_share": share(found.admitted, found.calls),
        "denied": found.denied,
        "attempts": found.attempts,
        "refused": found.refused,
        "waits": {"median": quantile(waits, 0.5), "p95": quantile(waits, 0.95), "longest": quantile(waits, 1.0)},
        "bursts": [
            {"limit": str(limit), "quota": limit.quota, "worst": worst_burst(found.times.values(), limit.length)}
            for limit in simulation.limits
        ],
        "timeline": {"admitted": found.admitted_steps, "denied": found.denied_steps},
    }


def worst_burst(times: Iterable[Sequence[int]], length: int) -> int:
    """Return the most calls of one client that were admitted within any time of this length."""
    return max((bisect_left(own, at + length) - n for own in times for n, at in enumerate(own)), default=0)
