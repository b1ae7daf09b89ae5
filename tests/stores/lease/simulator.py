"""Simulates processes that lease from one store over an unreliable network, in virtual time, and checks every use.

Nothing sleeps or runs in the background: the Simulation has the only clock and an event queue. Requests and replies are
delayed or lost, clients time out on requests that still arrive, processes are killed and new ones start, clocks are set
wrong, step and drift. The code under test is the fast path, the flows and the jobs of a LeasedStore; only the driver
that carries requests to the store belongs to the simulation.
"""

from __future__ import annotations

import heapq
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate import Limit, Policy, StoreUnavailable
from tidegate.stores import MemoryStore
from tidegate.stores._base import decided_asks
from tidegate.stores._lease import Lease, LeasedStore
from tidegate.stores._lease.steps import StoreRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate import Decision

START = 1_700_000_000_000_000
MINUTE = 60_000_000


class AllowedCall(NamedTuple):
    """An allowed call: when, in true time, and its cost for each limit."""

    time: int
    costs: tuple[int, ...]


class Network(NamedTuple):
    """How unreliable the network is: the longest usual delay, how often it is longer, how often a message is lost."""

    delay: int = 2_000
    slow: float = 0.0
    lost: float = 0.0
    timeout: int = 200_000  # how long a client waits for a reply


NETWORKS = (
    Network(),
    Network(delay=20_000, slow=0.05, lost=0.02),
    Network(delay=50_000, slow=0.1, lost=0.1),
    Network(delay=300_000, slow=0.02, timeout=5_000_000),
)


class Simulation:
    """True time (the store's clock), the event queue, and the uses of one key."""

    def __init__(self, policy: Policy, lease: Lease, network: Network, seed: int, *, mixed: bool = False) -> None:
        self.random = Random(seed)
        self.mixed = mixed  # whether some processes do not lease
        self.policy = policy
        self.lease = lease
        self.network = network
        self.now = START - START % MINUTE + self.random.randrange(MINUTE // 6, MINUTE)
        self.store = MemoryStore()
        self.uses: list[AllowedCall] = []
        self.windows: dict[str, set[tuple[int, int]]] = {limit.name: set() for limit in policy.limits}
        self.denied = self.requests = self.local = 0  # calls denied; requests to the store; uses without a request
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._order = count()

    def after(self, delay: int, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def run(self, until: int) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = max(self.now, until)

    def delay(self) -> int:
        usual = self.random.randrange(1, self.network.delay + 1)
        return usual * self.random.randrange(10, 500) if self.random.random() < self.network.slow else usual

    def is_lost(self) -> bool:
        return self.random.random() < self.network.lost

    def apply(self, request: Any) -> list[Decision]:
        """Let the store decide now; record its windows."""
        self.requests += 1
        decisions = self.store.apply(request.verb, request.asks, self.now, request.at)
        if request.verb in ("acquire", "hold") and decisions[-1].allowed:
            ((policy, _, costs),), (decision,) = decided_asks(request.asks, decisions)
            for limit, cost, (_, _, reset) in zip(policy.limits, costs, decision.views, strict=True):
                if cost and limit.algorithm == "fixed_window":
                    self.windows[limit.name].add((self.now + reset - limit.length, self.now + reset))
        return decisions


class ProcessClock:
    """The clocks of a process: a steady clock that drifts, and a wall clock that may be set."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._start = simulation.now
        self._steady = simulation.random.randrange(10**12)
        self._drift = simulation.random.randrange(-400, 401)  # parts per million
        self.wall = 0

    def steady(self) -> int:
        passed = self._simulation.now - self._start
        return self._steady + passed + passed * self._drift // 1_000_000

    def ns(self) -> int:
        return (self._simulation.now + self.wall) * 1000


class Process:
    """A process with a leased store, until it is killed."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.clock = ProcessClock(simulation)
        inner = MemoryStore(clock=self.clock)  # never used: `drive` asks the store of the simulation
        self.store = LeasedStore(inner, simulation.lease)
        self.manager = self.store.manager
        self.try_held = self.store.specialize(simulation.policy, lambda _key, _cost: None)
        self.alive = True
        self._scheduled = 0

    def call(self, cost: int | tuple[int, ...]) -> None:
        """Call once, as `try_acquire` does."""
        if not self.alive:
            return
        policy = self.simulation.policy
        costs = tuple(o * cost for o in policy.one) if isinstance(cost, int) else cost
        decision = self.try_held("k", cost) if isinstance(cost, int) else None
        if decision is not None:
            self.record_use([decision], None, costs)
            return
        flow = self.manager.apply_flow("acquire", [(policy, "k", costs)], None, None)
        self.drive(flow, lambda decisions, at: self.record_use(decisions, at, costs))

    def record_use(self, decisions: list[Decision], at: int | None, costs: tuple[int, ...]) -> None:
        """Record an allowed call: used now, or, if the store decided it, at the time of its decision."""
        simulation = self.simulation
        if decisions[0].allowed:
            simulation.uses.append(AllowedCall(simulation.now if at is None else at, costs))
            simulation.local += at is None
        else:
            simulation.denied += 1

    def request_share(self, permits: int) -> None:
        """Request a share of any size: correctness must not depend on how shares are sized."""
        policy_leases = self.manager.find_policy_leases(self.simulation.policy)
        key_lease = policy_leases.find_or_add("k", self.clock.steady())
        now = self.clock.steady()
        if policy_leases.length and key_lease is not None and not key_lease.is_pending(now):
            costs = tuple(min(permits, limit.burst) for limit in policy_leases.strict.limits)
            key_lease.request(now, policy_leases.length)
            self.drive(self.manager.fetch_flow(policy_leases, key_lease, [costs], now, (0,) * len(costs)))

    def schedule_worst_case(self, others: list[Process]) -> None:
        """Request shares, use them at the last moment, and let the other processes take all they can get.

        They do so at that moment, and when the charges leave the store's window.
        """
        simulation = self.simulation
        length = self.manager.find_policy_leases(simulation.policy).length
        for _ in range(simulation.random.choice((1, 1, 2))):
            permits = simulation.random.choice((20, 100, 1000))
            simulation.after(simulation.random.randrange(length + 1), partial(self.request_share, permits))
        simulation.after(simulation.random.randrange(length + 1), lambda: self.use_up_late(others))
        simulation.after(length + 1, lambda: self.use_up_late(others))

    def use_up_late(self, others: list[Process]) -> None:
        """Use the shares just before they end."""
        simulation, policy_leases = self.simulation, self.manager.find_policy_leases(self.simulation.policy)
        key_lease = policy_leases.key_leases.get("k")
        if key_lease is None or (late := key_lease.share.ends - self.clock.steady() - 1) < 0:
            return
        simulation.after(late - late // 1000, lambda: self.use_up(others))  # the clock may be slow
        for limit in policy_leases.strict.limits:
            leaves = key_lease.share.charged + limit.length - simulation.now
            for other in others:
                simulation.after(max(0, leaves), other.drain)

    def use_up(self, others: list[Process]) -> None:
        key_lease = self.manager.find_policy_leases(self.simulation.policy).key_leases.get("k")
        for _ in range(key_lease.share.units if key_lease is not None else 0):
            self.call(1)
        for other in others:
            other.drain()

    def drain(self) -> None:
        """Take as many permits as possible."""
        simulation, strict = self.simulation, self.manager.find_policy_leases(self.simulation.policy).strict
        (decision,) = simulation.store.apply("peek", [(strict, "k", (0,) * len(strict.limits))], simulation.now)
        unleased = simulation.mixed and simulation.random.random() < 0.7
        for cost in (decision.remaining, decision.remaining // 4, 2, 1, 1):
            (self.call_unleased if unleased else self.call)((cost,) * len(strict.limits))

    def call_unleased(self, costs: tuple[int, ...]) -> None:
        """Call as a process that does not lease, under the limits as configured."""

        def flow() -> Any:
            return (yield StoreRequest("acquire", [(self.simulation.policy, "k", costs)]))

        self.drive(flow(), lambda decisions, at: self.record_use(decisions, at, costs))

    def reserve(self, costs: tuple[int, ...]) -> None:
        """Hold permits and give some of them back later, as a Reservation does."""
        simulation, policy = self.simulation, self.simulation.policy
        actual = tuple(simulation.random.randint(0, cost) for cost in costs)

        def settle(decisions: list[Decision], at: int | None) -> None:
            if not decisions[0].allowed or at is None:
                return
            simulation.uses.append(AllowedCall(at, actual))
            back = tuple(new - old for new, old in zip(actual, costs, strict=True))
            flow = self.manager.apply_flow("adjust", [(policy, "k", back)], None, decisions[0].at)
            simulation.after(simulation.random.randrange(MINUTE), lambda: self.drive(flow))

        self.drive(self.manager.apply_flow("hold", [(policy, "k", costs)], None, None), settle)

    def drive(self, flow: Any, then: Callable[[Any, int | None], None] | None = None) -> None:
        """Run a flow: carry its requests to the store and the replies back, as far as the network allows."""
        FlowRun(self, flow, then).resume(flow.send, None)

    def run_jobs(self) -> None:
        """Start all jobs, some of them late; run again when the next key lease is due."""
        simulation = self.simulation
        if not self.alive:
            return
        while (job := self.manager.next_job()) is not None:
            if simulation.random.random() < 0.8:
                self.drive(job)
            else:
                simulation.after(simulation.delay() * 20, partial(self.drive, job))
        due = self.manager.next_due()
        if due is not None and due != self._scheduled:
            self._scheduled = due
            wait = max(1, due - self.clock.steady())
            simulation.after(wait + wait // 1000, self.run_jobs)

    def kill(self) -> None:
        self.alive = False

    def close(self) -> None:
        self.manager.close()
        self.run_jobs()


class FlowRun:
    """Runs the flow of a call or job, request by request; `then` receives its result and when the store decided."""

    def __init__(self, process: Process, flow: Any, then: Callable[[Any, int | None], None] | None) -> None:
        self.process = process
        self.flow = flow
        self.then = then
        self.decided: int | None = None  # when the store made its last decision
        self.number = 0

    def resume(self, advance: Callable[[Any], Any], value: Any) -> None:
        """Run the flow up to its next request."""
        if not self.process.alive:
            return
        try:
            request = advance(value)
        except StopIteration as done:
            if self.then is not None:
                self.then(done.value, self.decided)
        except StoreUnavailable:
            pass  # the call failed; nothing is used
        else:
            self.send(request)
        self.process.run_jobs()

    def send(self, request: Any) -> None:
        """Send a request; whether or not it arrives, the client times out after a while."""
        simulation = self.process.simulation
        if not simulation.is_lost():
            simulation.after(simulation.delay(), partial(self.arrive, self.number, request))
        simulation.after(simulation.network.timeout, partial(self.time_out, self.number))

    def arrive(self, number: int, request: Any) -> None:
        """Let the store decide, and send its reply."""
        simulation = self.process.simulation
        decisions = simulation.apply(request)
        if not simulation.is_lost():
            simulation.after(simulation.delay(), partial(self.receive, number, decisions, simulation.now))

    def receive(self, number: int, decisions: list[Decision], at: int) -> None:
        """Receive a reply, unless the client has timed out."""
        if number == self.number:
            self.number += 1
            self.decided = at
            self.resume(self.flow.send, decisions)

    def time_out(self, number: int) -> None:
        """Stop waiting for the reply."""
        if number == self.number:
            self.number += 1
            self.resume(self.flow.throw, StoreUnavailable("no reply"))


def overspent(simulation: Simulation, limits: tuple[Limit, ...] | None = None) -> str | None:
    """Replay every use in order of true time, under the limits as configured; return where one is exceeded.

    A fixed_window opens when the store first charges it, so its windows are those of the store.
    """
    uses = sorted(simulation.uses)
    for i, limit in enumerate(limits or simulation.policy.limits):
        costs = [(use.time, use.costs[i]) for use in uses if use.costs[i]]
        if limit.algorithm == "fixed_window":
            found = _overspent_windows(limit, costs, simulation.windows[limit.name])
        else:
            found = _overspent(limit, costs)
        if found:
            return f"{limit}: {found}"
    return None


def _overspent(limit: Limit, costs: list[tuple[int, int]]) -> str | None:
    state = None
    for time, cost in costs:
        after = limit.charge(state, limit, cost, time)
        if after is None:
            return f"{cost} more at {time - START} us, with {limit.rules.view(state, limit, cost, time)}"
        state = after
    return None


def _overspent_windows(limit: Limit, costs: list[tuple[int, int]], windows: set[tuple[int, int]]) -> str | None:
    for start, end in windows:
        used = sum(cost for time, cost in costs if start <= time < end)
        if used > limit.quota:
            return f"{used} used in the window [{start - START}, {end - START})"
    outside = [time for time, _ in costs if not any(start <= time < end for start, end in windows)]
    return f"used at {outside[0] - START} us, in no window of the store" if outside else None


def random_policy(random: Random, algorithms: tuple[str, ...]) -> Policy:
    """Draw limits."""
    limits = []
    for i, algorithm in enumerate(algorithms):
        quota, period = random.choice((20, 50, 100, 300)), random.choice((2, 10))
        burst = random.choice((quota, max(20, quota // 3), quota * 2)) if algorithm == "token_bucket" else 0
        length = "minute" if algorithm == "calendar_window" else period
        limits.append(Limit(quota, length, algorithm, burst=burst, name=f"limit{i}"))
    return Policy("p", tuple(limits))


def random_simulation(seed: int, algorithms: tuple[str, ...], *, mixed: bool = False) -> Simulation:
    """Draw a policy, a network and some processes, run them for a few periods, and return the simulation."""
    random = Random(f"{seed} {algorithms}")
    policy = random_policy(random, algorithms)
    lease = Lease(seconds=random.choice((None, 0.2, 1, 60)), spread=random.choice((1, 2, 4)))
    simulation = Simulation(policy, lease, random.choice(NETWORKS), seed, mixed=mixed)
    lasts = max(min(limit.length, 10_000_000) for limit in policy.limits)
    processes = [Process(simulation) for _ in range(random.randint(1, 4))]
    pause = lasts // 12

    def next_event() -> None:
        random_event(simulation, processes, pause)
        quiet = 10 if simulation.random.random() < 0.1 else 1
        simulation.after(quiet * simulation.random.randrange(1, 2 * pause), next_event)

    next_event()
    simulation.run(simulation.now + 3 * lasts)
    return simulation


def random_event(simulation: Simulation, processes: list[Process], pause: int) -> None:
    """Let something random happen to one of the processes."""
    random, limits = simulation.random, simulation.policy.limits
    which = random.randrange(len(processes))
    process = processes[which]

    def crash() -> None:
        process.kill()
        processes[which] = Process(simulation)

    def set_clock() -> None:
        process.clock.wall += random.randrange(-(10**9), 10**9)

    def demand() -> None:
        for _ in range(random.randrange(5, 50)):
            simulation.after(random.randrange(pause), partial(process.call, 1))

    chances: dict[Callable[[], object], int] = {
        crash: 2,
        set_clock: 2,
        demand: 15,
        process.drain: 5,
        partial(process.reserve, tuple(random.randint(1, limit.quota // 4) for limit in limits)): 6,
        partial(process.request_share, random.choice((5, 20, 100, 1000))): 15,
        partial(process.schedule_worst_case, list(processes)): 35,
        partial(process.call, random.choice((1, tuple(random.randint(0, 5) for _ in limits)))): 20,
    }
    random.choices(list(chances), list(chances.values()))[0]()
