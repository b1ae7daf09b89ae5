"""Simulate many processes that lease from sharded stores, in virtual time: `python -m bench.scale`, three minutes.

The code of leases and limits is real: each process has a LeasedStore, each shard is a MemoryStore, and the events come
from the simulator of the tests (`tests/stores/lease/simulator.py`). Simulated are the network (delays), the queue of
each shard (a store call occupies it for the processor time that Valkey needs, measured at the start), processes that
are killed and replaced, and a shard that does not answer for a third of the time (`lost`) and may have lost its state
when it answers again (`emptied`).

Every key has the same token bucket. One key in twenty demands four times its limit, the others half of it, so denials
happen. `over` counts admissions beyond the limit. An oracle in this file counts them from the times of all admissions,
without code of tidegate: at most burst + rate * time in every interval. It is not multiplied by `slice`.

A scenario with `slice` simulates one key in so many, and all processes: keys are independent of each other, so that
the calls of each pair of process and key are those of the whole. Rates are printed for the whole, multiplied by
`slice`. For the hottest shard, all keys are distributed, with the average calls of the simulated ones. The waits of a
slice lack the queues of the whole: see `busy`.

`python -m bench.scale --check` only compares the simulation with eight real processes on one Valkey.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter, defaultdict
from functools import partial
from random import Random
from statistics import mean
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from bench.store_costs import measure_all
from tests.servers.valkey import ValkeyServer
from tests.stores.lease.simulator import FlowRun, Network, Process, Simulation
from tidegate import Limit, Limiter, Policy
from tidegate.stores import MemoryStore
from tidegate.stores._lease import Lease

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Barrier

    from tidegate import Decision

SECOND: Final = 1_000_000
HOT_SHARE: Final = 20  # one key in so many is hot
HOT_DEMAND: Final = 8  # ... and is called so many times as often as the others, which demand half of their limit
PERIOD: Final = 10  # seconds
DEFAULT_SERVICE: Final = 50  # microseconds of a shard for a store call, if it was not measured
NETWORK: Final = Network(delay=500, slow=0.001, timeout=250_000)  # one way: up to 0.5 ms, one in 1,000 much longer


class Scenario(NamedTuple):
    """What to simulate."""

    name: str
    decisions: int  # demanded per second
    processes: int
    shards: int
    keys: int
    homes: int = 0  # processes that get the calls of a key; 0: all of them
    slice: int = 1
    seconds: int = 12
    churn: float = 0.0  # processes that are killed and replaced, per second
    lost: bool = False  # whether a shard does not answer in the second third of the time
    emptied: bool = False  # ... and has lost its state when it answers again
    lease: float | None = None  # seconds; None: the default, a twentieth of the period
    headroom: float = 2.0  # the limit of a key, as a multiple of the demand of a usual key
    network: Network = NETWORK

    @property
    def limit(self) -> Limit:
        """The limit of each key."""
        usual = self.decisions / self.keys / (1 + (HOT_DEMAND - 1) / HOT_SHARE)
        return Limit(max(20, round(self.headroom * usual * PERIOD)), PERIOD)


MILLION: Final = Scenario("1,000,000/s", 1_000_000, 100, 32, 10_000, slice=50)
SCENARIOS: Final = (
    Scenario("100/s", 100, 2, 1, 10, seconds=60),
    Scenario("100/s, churn, shard lost", 100, 2, 1, 10, seconds=60, churn=0.2, lost=True),
    Scenario("10,000/s", 10_000, 8, 2, 200),
    Scenario("10,000/s, lease 3 s", 10_000, 8, 2, 200, lease=3),
    Scenario("10,000/s, 2 homes", 10_000, 8, 2, 200, homes=2),
    Scenario("10,000/s, 2 homes, churn, lost", 10_000, 8, 2, 200, homes=2, churn=1, lost=True),
    Scenario("10,000/s, 10,000 keys", 10_000, 8, 2, 10_000),
    MILLION,
    MILLION._replace(name="1,000,000/s, 2 homes", homes=2),
    MILLION._replace(name="1,000,000/s, 2 homes, lease 3 s", homes=2, lease=3),
    MILLION._replace(name="1,000,000/s, 2 homes, churn, lost", homes=2, churn=5, lost=True),
    MILLION._replace(name="1,000,000/s, 2 homes, emptied", homes=2, emptied=True),
)


class Shard:
    """One store: its queue, and whether it answers."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.lost = False
        self.free_at = 0  # when it has served all calls that have arrived


class Fleet(Simulation):
    """Processes over sharded stores."""

    def __init__(self, scenario: Scenario, seed: int = 1, service: int = DEFAULT_SERVICE) -> None:
        super().__init__(Policy("p", (scenario.limit,)), Lease(scenario.lease), scenario.network, seed)
        self.scenario = scenario
        self.service = service
        self.keys = [f"tenant:{i}" for i in range(0, scenario.keys, scenario.slice)]
        self.shards = [Shard() for _ in range(scenario.shards)]
        self.processes = [FleetProcess(self) for _ in range(scenario.processes)]
        self.homes = {key: self._choose_homes(key) for key in self.keys}
        self.admitted: defaultdict[str, list[int]] = defaultdict(list)
        self.calls: Counter[str] = Counter()  # of the store, by key
        self.waits: list[int] = []  # of answered store calls
        self.demanded = self.unanswered = self.killed = self.lost_permits = 0
        self.idle: list[float] = []

    def _choose_homes(self, key: str) -> list[int]:
        count = len(self.processes)
        if not self.scenario.homes:
            return list(range(count))
        return [(crc32(key.encode()) + i) % count for i in range(self.scenario.homes)]

    def shard_of(self, key: str) -> Shard:
        """Return the shard of a key."""
        return self.shards[shard_number(key, len(self.shards))]

    def hottest_shard(self) -> float:
        """Return the calls of the hottest shard, as a multiple of the average.

        For a slice, all keys are distributed: a hot key has the average calls of simulated hot keys, others likewise.
        """
        scenario, loads = self.scenario, [0.0] * len(self.shards)
        if scenario.slice == 1:
            for key in self.keys:
                loads[shard_number(key, len(loads))] += self.calls[key]
        else:
            hot = mean([self.calls[key] for key in self.keys[::HOT_SHARE]])
            usual = mean([self.calls[key] for i, key in enumerate(self.keys) if i % HOT_SHARE])
            for i, weight in enumerate(weights_of(scenario.keys)):
                loads[shard_number(f"tenant:{i}", len(loads))] += usual if weight == 1 else hot
        return max(loads) * len(loads) / max(1.0, sum(loads))

    def play(self) -> None:
        """Run the scenario."""
        scenario, began = self.scenario, self.now
        rate = scenario.decisions / scenario.slice
        batch = max(1, round(rate / 1000))
        weights = weights_of(len(self.keys))
        length = scenario.seconds * SECOND
        self.demand(batch, round(batch * SECOND / rate), weights, began + length)
        if scenario.churn:
            self.replace_one(round(SECOND / scenario.churn))
        if scenario.lost or scenario.emptied:
            self.after(length // 3, self.lose_shard)
            self.after(2 * length // 3, self.restore_shard)
        self.after(SECOND // 2, self.sample_idle)
        self.run(began + length)

    def demand(self, batch: int, pause: int, weights: list[int], until: int) -> None:
        """Let processes call, now and after each pause."""
        for key in self.random.choices(self.keys, weights, k=batch):
            self.processes[self.random.choice(self.homes[key])].call_key(key)
        self.demanded += batch
        if self.now + pause < until:
            self.after(self.random.randrange(1, 2 * pause), partial(self.demand, batch, pause, weights, until))

    def replace_one(self, pause: int) -> None:
        """Kill a process, and start another one in its place."""
        which = self.random.randrange(len(self.processes))
        self.lost_permits += self.processes[which].outstanding()
        self.processes[which].kill()
        self.processes[which] = FleetProcess(self)
        self.killed += 1
        self.after(pause, partial(self.replace_one, pause))

    def lose_shard(self) -> None:
        """Let a shard answer no more."""
        self.shard_of(self.keys[0]).lost = True

    def restore_shard(self) -> None:
        """Let it answer again."""
        shard = self.shard_of(self.keys[0])
        shard.lost = False
        if self.scenario.emptied:
            shard.store = MemoryStore()

    def sample_idle(self) -> None:
        """Record the unused permits of all shares, as a part of all limits."""
        held = sum(process.outstanding() for process in self.processes)
        self.idle.append(held / (len(self.keys) * self.policy.limits[0].burst))
        self.after(SECOND // 2, self.sample_idle)

    def result(self) -> Result:
        """Sum up."""
        scenario = self.scenario
        scale, hottest = scenario.slice / scenario.seconds, self.hottest_shard()
        calls = self.calls.total() * scale
        waits, admitted = sorted(self.waits), sum(map(len, self.admitted.values()))
        return Result(
            decisions=self.demanded * scale,
            admitted=admitted / self.demanded,
            calls=calls,
            hottest=hottest,
            busy=hottest * calls / scenario.shards * self.service / SECOND,
            over=sum(count_over(times, self.policy.limits[0]) for times in self.admitted.values()),
            idle=sum(self.idle) / max(1, len(self.idle)),
            p99=waits[len(waits) * 99 // 100] / 1000 if waits else 0.0,
            unanswered=self.unanswered / self.demanded,
            lost_permits=self.lost_permits * scenario.slice / max(1, self.killed),
        )


class Result(NamedTuple):
    """What a scenario showed; rates are per second, of the whole."""

    decisions: float
    admitted: float  # part of the demand
    calls: float
    hottest: float  # calls of the hottest shard, as a multiple of the average
    busy: float  # part of its processor time
    over: int  # admissions beyond the limits
    idle: float  # unused permits in shares, as a part of all limits
    p99: float  # milliseconds of a store call that was answered
    unanswered: float  # calls without a decision, as a part of the demand
    lost_permits: float  # of a killed process, on average

    def __str__(self) -> str:
        """Format as a row."""
        return (
            f"{self.decisions:>11,.0f}{self.admitted:>9.1%}{self.calls:>11,.0f}{self.calls / self.decisions:>8.3f}"
            f"{self.hottest:>9.2f}{self.busy:>7.1%}{self.over:>6}{self.idle:>8.2%}{self.p99:>9.2f}"
            f"{self.unanswered:>9.2%}{self.lost_permits:>9.0f}"
        )


HEADER: Final = (
    f"{'scenario':46}{'decisions/s':>11}{'allowed':>9}{'calls/s':>11}{'each':>8}{'hottest':>9}{'busy':>7}{'over':>6}"
    f"{'idle':>8}{'p99 ms':>9}{'failed':>9}{'lost':>9}"
)


class FleetProcess(Process):
    """A process that calls many keys."""

    simulation: Fleet

    def call_key(self, key: str) -> None:
        """Call once, as `try_acquire` does."""
        decision = self.try_held(key, 1)
        if decision is not None:
            self.record(key, [decision], None)
            return
        flow = self.manager.apply_flow("acquire", [(self.simulation.policy, key, (1,))], None, None)
        self.drive(flow, partial(self.record, key))

    def record(self, key: str, decisions: list[Decision], at: int | None) -> None:
        """Record an admission at the time of its use, or of its decision in the store."""
        if decisions[0].allowed:
            self.simulation.admitted[key].append(self.simulation.now if at is None else at)

    def drive(self, flow: Any, then: Callable[[Any, int | None], None] | None = None) -> None:  # noqa: ANN401 - a flow
        """Run a flow over the shards."""
        ShardRun(self, flow, then).resume(flow.send, None)

    def outstanding(self) -> int:
        """Return the unused permits of its shares."""
        return self.manager.metrics().get("lease_outstanding_requests", 0)


class ShardRun(FlowRun):
    """Carries the requests of a flow to their shards, and the replies back."""

    process: FleetProcess
    sent = 0

    def send(self, request: Any) -> None:  # noqa: ANN401 - a StoreRequest
        """Send a request."""
        fleet = self.process.simulation
        self.sent = fleet.now
        fleet.after(fleet.delay(), partial(self.arrive, self.number, request))
        fleet.after(fleet.network.timeout, partial(self.time_out, self.number))

    def arrive(self, number: int, request: Any) -> None:  # noqa: ANN401 - as above
        """Queue at the shard, unless it is lost."""
        fleet = self.process.simulation
        shard = fleet.shard_of(request.asks[0][1])
        if not shard.lost:
            shard.free_at = max(shard.free_at, fleet.now) + fleet.service
            fleet.after(shard.free_at - fleet.now, partial(self.serve, number, request, shard))

    def serve(self, number: int, request: Any, shard: Shard) -> None:  # noqa: ANN401 - as above
        """Let the shard decide, and send its reply."""
        fleet = self.process.simulation
        if shard.lost:
            return
        fleet.calls[request.asks[0][1]] += 1
        decisions = shard.store.apply(request.verb, request.asks, fleet.now, request.at)
        fleet.after(fleet.delay(), partial(self.receive, number, decisions, fleet.now))

    def receive(self, number: int, decisions: list[Decision], at: int) -> None:
        """Receive a reply, unless the client has timed out."""
        if number == self.number:
            self.process.simulation.waits.append(self.process.simulation.now - self.sent)
        super().receive(number, decisions, at)

    def time_out(self, number: int) -> None:
        """Stop waiting for the reply; a call fails, a job has no caller."""
        if number == self.number and self.then is not None and self.process.alive:
            self.process.simulation.unanswered += 1
        super().time_out(number)


def weights_of(keys: int) -> list[int]:
    """Return how often each key is called, relative to a usual key."""
    return [HOT_DEMAND if i % HOT_SHARE == 0 else 1 for i in range(keys)]


def shard_number(key: str, shards: int) -> int:
    """Return the shard of a key, by its hash as in a cluster."""
    return crc32(b"shard" + key.encode()) % shards


def count_over(times: list[int], limit: Limit) -> int:
    """Count admissions beyond burst + rate * time, in integers: a permit is `length` units, a microsecond adds `quota`.

    An admission that finds less than a permit is counted, and not charged.
    """
    full = limit.burst * limit.length
    level, last, over = full, min(times, default=0), 0
    for at in sorted(times):
        level = min(full, level + (at - last) * limit.quota)
        last = at
        if level < limit.length:
            over += 1
        else:
            level -= limit.length
    return over


def simulate(scenario: Scenario, seed: int = 1, service: int = DEFAULT_SERVICE) -> Result:
    """Run one scenario."""
    fleet = Fleet(scenario, seed, service)
    fleet.play()
    return fleet.result()


# ---- the check against real processes --------------------------------------------------------------------------------

CHECK: Final = Scenario("check", 1600, 8, 1, 40, seconds=6, network=Network(delay=150))


def work(barrier: Barrier, url: str, seed: int) -> int:
    """Call as one of the processes of CHECK does, in real time; returns the number of calls."""
    random, keys = Random(seed), [f"tenant:{i}" for i in range(CHECK.keys)]
    weights = weights_of(CHECK.keys)
    pause, made = CHECK.processes / CHECK.decisions, 0
    with Limiter(CHECK.limit, store=url, lease=True, name="p") as limiter:
        barrier.wait(30)
        due = began = time.monotonic()
        while due < began + CHECK.seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            limiter.try_acquire(random.choices(keys, weights)[0])
            made += 1
            due += random.uniform(0, 2 * pause)
        barrier.wait(30)  # the parent counts before shares are returned
        barrier.wait(30)
    return made


def run_real() -> tuple[float, float]:
    """Return the decisions and store calls per second of eight real processes on one Valkey."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(CHECK.processes + 1)
    with ValkeyServer() as server, context.Pool(CHECK.processes, prepare, (barrier,)) as pool:
        jobs = [pool.apply_async(work_of_one, (server.url + "?deadline=5s", seed)) for seed in range(CHECK.processes)]
        barrier.wait(60)
        before, began = server.calls("fcall"), time.monotonic()
        barrier.wait(60)
        calls, passed = server.calls("fcall") - before, time.monotonic() - began
        barrier.wait(60)
        made = sum(job.get(60) for job in jobs)
    return made / passed, calls / passed


BARRIER: list[Barrier] = []


def prepare(barrier: Barrier) -> None:
    """Give a process what it waits at."""
    BARRIER.append(barrier)


def work_of_one(url: str, seed: int) -> int:
    """Work in a process of the pool."""
    return work(BARRIER[0], url, seed)


def check(service: int) -> None:
    """Print what the simulation predicts, beside what real processes do."""
    predicted, (decisions, calls) = simulate(CHECK, service=service), run_real()
    print(
        f"\n{CHECK.processes} processes, {CHECK.keys} keys, one Valkey, {CHECK.seconds} s of virtual and of real time:"
    )
    print(f"{'':12}{'decisions/s':>12}{'store calls/s':>15}{'calls/decision':>16}")
    for name, rate, each in (("predicted", predicted.decisions, predicted.calls), ("measured", decisions, calls)):
        print(f"{name:12}{rate:>12,.0f}{each:>15,.0f}{each / rate:>16.3f}")


def calls_by_rate() -> None:
    """Print the store calls per decision, by how often one process calls one key."""
    print("\nstore calls per decision, one process, one key, lease of 0.5 s:")
    print(f"{'calls of the key':>18}{'below the limit':>18}{'four times the limit':>22}")
    for rate in (1, 5, 20, 100, 1000, 10_000):
        below = Scenario("", rate, 1, 1, 1, seconds=200 if rate < 100 else 20)
        beyond = below._replace(headroom=0.25 * (1 + (HOT_DEMAND - 1) / HOT_SHARE))
        each = [found.calls / found.decisions for found in (simulate(below), simulate(beyond))]
        second = f"{each[1]:>22.4f}" if rate >= 20 else ""  # a limit has at least 20 permits to be leased
        print(f"{rate:>16,}/s{each[0]:>18.4f}{second}")


def main() -> None:
    """Measure, simulate and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="only compare with real processes")
    only_check = options.parse_args().check
    print("load average:", *(f"{load:.1f}" for load in os.getloadavg()))
    service = DEFAULT_SERVICE
    if not only_check:
        costs = measure_all(1.0)
        service = max(1, round(costs["Valkey"].server)) if "Valkey" in costs else DEFAULT_SERVICE
        print(f"\na store call occupies a shard for {service} us\n\n{HEADER}")
        for scenario in SCENARIOS:
            began = time.process_time()
            name = scenario.name + (f" (slice {scenario.slice})" if scenario.slice > 1 else "")
            found = simulate(scenario, service=service)
            print(f"{name:46}{found!s}   {time.process_time() - began:.0f} s of CPU", flush=True)
        calls_by_rate()
    check(service)
    print("load average:", *(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
