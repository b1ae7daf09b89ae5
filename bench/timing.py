"""Time decisions in many short slices, in which the libraries take turns; the fastest slice was disturbed least."""

from __future__ import annotations

import asyncio
import time
from itertools import islice, repeat
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from bench.libraries import Ask, AskAsync
    from bench.workers import Case, Worker

SLICE: Final = 0.006  # seconds
LOOP: Final = asyncio.new_event_loop()


class Timing(NamedTuple):
    """Nanoseconds for each decision."""

    best: float
    usual: float


def slices(ask: Ask, keys: Iterable[Any]) -> Callable[[], float]:
    """Measure nanoseconds for each decision over a slice of the keys, which never end."""
    endless = iter(keys)

    def measure(count: int) -> float:
        some = list(islice(endless, count))  # keys are made outside the measurement
        start = time.perf_counter_ns()
        for key in some:
            ask(key)
        return (time.perf_counter_ns() - start) / count

    return calibrated(measure)


def slices_async(ask: AskAsync, keys: Iterable[Any]) -> Callable[[], float]:
    """Measure as `slices` does, awaiting each decision in one task."""
    endless = iter(keys)

    async def measure(count: int) -> float:
        some = list(islice(endless, count))
        start = time.perf_counter_ns()
        for key in some:
            await ask(key)
        return (time.perf_counter_ns() - start) / count

    return calibrated(lambda count: LOOP.run_until_complete(measure(count)))


def calibrated(measure: Callable[[int], float]) -> Callable[[], float]:
    """Find how many decisions fill a slice."""
    measure(100)
    count = max(100, int(SLICE * 1e9 / min(measure(100) for _ in range(5))))
    return lambda: measure(count)


def same(key: Any) -> Iterator[Any]:  # noqa: ANN401 - some libraries have no keys
    """Give one key for ever."""
    return repeat(key)


def compare(module: str, cases: Sequence[Case], workers: Sequence[Worker], rounds: int) -> dict[str, dict[str, Timing]]:
    """Measure every case with every library, in turns; by case and library."""
    results: dict[str, dict[str, Timing]] = {}
    for case in cases:
        times: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for worker in workers:
            if worker.run(module, case.name) is None:
                del times[worker.name]
        able = [worker for worker in workers if worker.name in times]
        for turn in range(rounds):
            for worker in able[turn % len(able) :] + able[: turn % len(able)]:
                times[worker.name].append(worker.run(module, case.name))
        results[case.name] = {name: Timing(min(some), median(some)) for name, some in times.items()}
    return results
