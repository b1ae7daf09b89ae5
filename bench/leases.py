"""Compare decisions with and without leases, on SQLite, Redis (Valkey) and memory; check that the limit is kept.

python -m bench.leases               under a minute
python -m bench.leases --quick       a look
python -m bench.leases --saturated   only demand above the limit, and with room, on one Valkey and on a cluster

The contenders take turns, in several rounds of processes of their own. Rates are decisions per second over all
processes, the best round (and the median); p50 and p99 are of single calls, timed one by one in a round of their own;
CPU is that of the clients, per decision. "Exact" lets the processes fight for a quota until all are denied, and counts
what they were allowed together: never more than the quota; less by what was held unused by others at the end.

"Saturated" lets four processes call six keys as fast as they can, for longer than the bursts last. `admitted` is the
part of the limits that was used; `over` counts admissions beyond burst + rate * time (`bench.scale.count_over`);
`least` is what the process with the fewest permits got, as a part of an even share.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bench.scale import count_over
from tests.servers.valkey import ValkeyCluster, ValkeyServer, find_server

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.synchronize import Barrier

CONTEXT: Final = multiprocessing.get_context("spawn")
PLENTY: Final = 1_000_000_000
QUOTA: Final = 20_000
NAMES: Final = count()
PATIENT: Final = "?deadline=30s"  # a store that is slow on a busy machine is not lost, or denials would be counted
FIVE: Final = ("1m", "1h", "1d", "1w", "30d")


class Contender(NamedTuple):
    """Who is measured: a store, leased or not, by so many processes, each with so many tasks (0: a plain thread)."""

    store: str
    leased: bool
    processes: int = 1
    tasks: int = 0
    limits: int = 1

    def __str__(self) -> str:
        """Name it as a row of a table."""
        who = "1 process" if self.processes == 1 else f"{self.processes} processes"
        how = f", {self.tasks} tasks" if self.tasks else ""
        five = ", 5 limits" if self.limits > 1 else ""
        return f"{self.store}{' leased' if self.leased else ''}, {who}{how}{five}"


CONTENDERS: Final = (
    Contender("memory", leased=False),
    Contender("sqlite", leased=False),
    Contender("sqlite", leased=True),
    Contender("sqlite", leased=True, limits=5),
    Contender("sqlite", leased=False, processes=4),
    Contender("sqlite", leased=True, processes=4),
    Contender("redis", leased=False),
    Contender("redis", leased=True),
    Contender("redis", leased=True, limits=5),
    Contender("redis", leased=False, tasks=256),
    Contender("redis", leased=True, tasks=256),
    Contender("redis", leased=True, processes=2, tasks=256),
)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="one short round")
    options.add_argument("--saturated", action="store_true", help="only demand above the limit")
    given = options.parse_args()
    rounds, seconds = (1, 0.5) if given.quick else (5, 1.0)
    if given.saturated:
        saturate_all(1 if given.quick else 3, 4.0)
        return
    with ExitStack() as stack:
        addresses = {"memory": "memory://"}
        addresses["sqlite"] = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/limits.db{PATIENT}"
        if find_server() is not None:
            addresses["redis"] = stack.enter_context(ValkeyServer()).url + PATIENT
        able = [contender for contender in CONTENDERS if contender.store in addresses]
        rates: dict[Contender, list[dict[str, Any]]] = {contender: [] for contender in able}
        for turn in range(rounds):
            for contender in able[turn % len(able) :] + able[: turn % len(able)]:
                rates[contender].append(run(contender, addresses[contender.store], "rate", seconds))
        titles = f"{'decisions/s (median)':>24}{'p50 us':>9}{'p99 us':>9}{'CPU us':>9}"
        print(f"{'':38}{titles}{f'allowed of {QUOTA:,}':>19}")
        for contender, found in rates.items():
            calls = run(contender, addresses[contender.store], "calls", seconds)
            exact = run(contender, addresses[contender.store], "exact", seconds)
            each = [round_["rate"] for round_ in found]
            rate = f"{max(each):,.0f} ({median(each):,.0f})"
            cpu = min(round_["cpu"] for round_ in found)
            times = f"{calls['p50']:>9.1f}{calls['p99']:>9.1f}{cpu:>9.2f}"
            print(f"{contender!s:38}{rate:>24}{times}{exact['allowed']:>19,}")


def run(contender: Contender, address: str, what: str, seconds: float) -> dict[str, Any]:
    """Start the processes, let them go together, and sum up."""
    name = f"run{next(NAMES)}"
    barrier = CONTEXT.Barrier(contender.processes)
    with CONTEXT.Pool(contender.processes, prepare, (barrier,)) as pool:
        work = [(contender, address, what, seconds, name)] * contender.processes
        found = pool.starmap(work_of_one, work, chunksize=1)
    summed = {key: sum(each[key] for each in found) for key in found[0]}
    average: dict[str, Any] = {key: summed[key] / len(found) for key in ("cpu", "p50", "p99") if key in summed}
    return {**summed, **average}


BARRIER: list[Barrier] = []


def prepare(barrier: Barrier) -> None:
    """Give a process what it waits at."""
    BARRIER.append(barrier)


def work_of_one(contender: Contender, address: str, what: str, seconds: float, name: str) -> dict[str, float]:
    """Do the work of one process."""
    if contender.tasks:
        return asyncio.run(work_of_tasks(contender, address, what, seconds, name))
    from tidegate import Limiter  # noqa: PLC0415 - loaded by the process that measures it

    with Limiter(rules(contender, what), store=address, lease=contender.leased, name=name) as limiter:
        try_acquire, clock = limiter.try_acquire, time.perf_counter
        for _ in range(0 if what == "exact" else 2000):
            try_acquire("user:42")
        BARRIER[0].wait()
        if what == "exact":
            return {"allowed": sum(bool(try_acquire("user:42")) for _ in range(QUOTA + QUOTA // 2))}
        if what == "calls":
            return spread([timed(try_acquire, clock) for _ in range(20_000)])
        made, began, used, ends = 0, clock(), time.process_time(), clock() + seconds
        while clock() < ends:
            for _ in range(200):
                try_acquire("user:42")
            made += 200
        return {"rate": made / (clock() - began), "cpu": (time.process_time() - used) * 1e6 / made}


def timed(ask: Any, clock: Any) -> float:  # noqa: ANN401 - functions
    """Time one call, in microseconds."""
    before = clock()
    ask("user:42")
    return float(clock() - before) * 1e6


async def work_of_tasks(contender: Contender, address: str, what: str, seconds: float, name: str) -> dict[str, float]:
    """Do the work of one process, by many tasks at once."""
    from tidegate import AsyncLimiter  # noqa: PLC0415 - as above

    clock = time.perf_counter
    times: list[float] = []
    allowed = made = 0
    async with AsyncLimiter(rules(contender, what), store=address, lease=contender.leased, name=name) as limiter:

        async def task(calls: int, ends: float) -> None:
            nonlocal allowed, made
            while calls and (ends == 0 or clock() < ends):
                calls -= 1
                before = clock()
                decision = await limiter.try_acquire("user:42")
                times.append((clock() - before) * 1e6)
                allowed += decision.allowed
                made += 1
                if calls % 10 == 0:  # a call that a share answers does not let other tasks run
                    await asyncio.sleep(0)

        await asyncio.gather(*(task(200, 0) for _ in range(0 if what == "exact" else contender.tasks)))
        BARRIER[0].wait()
        calls = {"exact": 2 * QUOTA // contender.tasks, "calls": 200, "rate": sys.maxsize}[what]
        allowed, made, began, used = 0, 0, clock(), time.process_time()
        times.clear()
        ends = clock() + seconds if what == "rate" else 0
        await asyncio.gather(*(task(calls, ends) for _ in range(contender.tasks)))
        passed, cpu = clock() - began, time.process_time() - used
    if what == "exact":
        return {"allowed": allowed}
    return spread(times) if what == "calls" else {"rate": made / passed, "cpu": cpu * 1e6 / made}


def rules(contender: Contender, what: str) -> Any:  # noqa: ANN401 - limits
    """Give the limits to measure with."""
    from tidegate import Limit  # noqa: PLC0415 - as above

    if what == "exact":
        return [Limit(QUOTA, period, "fixed_window") for period in (("1d",) if contender.limits == 1 else FIVE[1:])]
    return [Limit(PLENTY, period) for period in (("1d",) if contender.limits == 1 else FIVE)]


def spread(times: list[float]) -> dict[str, float]:
    """Give the usual and the slow."""
    cuts = quantiles(times, n=100)
    return {"p50": cuts[49], "p99": cuts[98]}


# ---- demand above the limit ------------------------------------------------------------------------------------------

CALLERS: Final = 4
KEYS: Final = tuple(f"tenant:{number}" for number in range(6))
WARM_UP: Final = 1.0  # seconds before and after the measurement; the bursts are used up in the first
SATURATED: Final = {"token_bucket": 2000, "sliding_log": 2000, "fixed_window": 2000, "with room": PLENTY}


def saturate_all(rounds: int, seconds: float) -> None:
    """Measure and print demand above the limit, on one server and on a cluster."""
    print(f"{'':34}{'calls/s':>12}{'store calls/s/key':>19}{'admitted':>10}{'least':>8}{'over':>6}")
    for name, servers in (("one Valkey", ValkeyServer()), ("cluster", ValkeyCluster())):
        with servers:
            nodes = getattr(servers, "servers", [servers])
            for what in SATURATED:
                for _ in range(rounds):
                    print(f"{name + ', ' + what:34}{saturate(servers.url + PATIENT, nodes, what, seconds)}", flush=True)


def saturate(url: str, nodes: Sequence[ValkeyServer], what: str, seconds: float) -> str:
    """Let the processes call as fast as they can, and sum up as a row."""
    barrier = CONTEXT.Barrier(CALLERS + 1)
    with CONTEXT.Pool(CALLERS, prepare, (barrier,)) as pool:
        work = [(url, what, f"run{next(NAMES)}", seconds)] * CALLERS
        job = pool.starmap_async(call_keys, work, chunksize=1)
        barrier.wait(60)
        time.sleep(WARM_UP)
        before, began = count_calls(nodes), time.monotonic()
        time.sleep(seconds)
        asked, passed = count_calls(nodes) - before, time.monotonic() - began
        found = job.get(60)
    limit, begins = saturated_limit(what), round(began * 1e6)
    quota = limit.quota * seconds / (limit.length / 1e6) * len(KEYS)
    each = [sum(begins <= at < begins + seconds * 1e6 for times in all_times for at in times) for _, all_times in found]
    over = 0
    if limit.algorithm == "token_bucket":
        for number in range(len(KEYS)):
            over += count_over([at for _, all_times in found for at in all_times[number]], limit)
    least = min(each) * len(each) / max(1, sum(each))
    part = f"{sum(each) / quota:>10.1%}{least:>8.2f}" if quota < PLENTY else " " * 18
    made = sum(rate for rate, _ in found)
    return f"{made:>12,.0f}{asked / passed / len(KEYS):>19.1f}{part}{over:>6}"


def count_calls(nodes: Sequence[ValkeyServer]) -> int:
    """Count the scripts that servers have run, as functions or by EVALSHA."""
    return sum(node.calls("fcall") + node.calls("evalsha") for node in nodes)


def saturated_limit(what: str) -> Any:  # noqa: ANN401 - a Limit
    """Return the limit of each key."""
    from tidegate import Limit  # noqa: PLC0415 - as above

    return Limit(SATURATED[what], "2s", "token_bucket" if what == "with room" else what)


def call_keys(url: str, what: str, name: str, seconds: float) -> tuple[float, list[list[int]]]:
    """Call each key in turn, in one process; return the calls per second, and when calls of each key were allowed."""
    from tidegate import Limiter  # noqa: PLC0415 - as above

    made, clock, nanoseconds, record = 0, time.monotonic, time.monotonic_ns, what != "with room"
    allowed: list[list[int]] = [[] for _ in KEYS]
    with Limiter(saturated_limit(what), store=url, lease=True, name=name) as limiter:
        try_acquire, pairs = limiter.try_acquire, list(zip(KEYS, allowed, strict=True))
        BARRIER[0].wait(60)
        began = clock()
        ends = began + seconds + 2 * WARM_UP
        while clock() < ends:
            for _ in range(20):
                for key, times in pairs:
                    if try_acquire(key) and record:
                        times.append(nanoseconds() // 1000)
            made += 20 * len(KEYS)
    return made / (clock() - began), allowed


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
