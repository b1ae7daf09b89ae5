"""Time what reading a decision, other costs, `peek` and `usage` add to a plain `try_acquire`, in one interleaved run.

python bench/reading.py [--rounds 2000] [--rule "1000000000/1s"]

The rows take turns in short slices. Of each row the table shows the best slice and the lower quartile: on a busy
machine many slices are interrupted by other programs, so that a mean or a median says more about those.
"""

from __future__ import annotations

import argparse
import time
from statistics import quantiles
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate import AsyncLimiter, Limiter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

CALLS: Final = 100  # in one slice


class Row(NamedTuple):
    """A call, whether only the difference to the row before counts, and the target."""

    name: str
    run: Callable[[], object]
    added: bool = False
    target: float | None = None  # a ratio to the first row, or microseconds that are added


def rows(rule: str) -> list[Row]:
    """Return the calls, on a key with permits and on a key without."""
    limiter, empty, tasks = Limiter(rule), Limiter("5/1m"), AsyncLimiter(rule)
    limiter.try_acquire("k")
    await_now(tasks.try_acquire("k"))
    while empty.try_acquire("k"):
        pass
    acquire, peek, usage, deny = limiter.try_acquire, limiter.peek, limiter.usage, empty.try_acquire

    def read() -> None:
        decision = acquire("k")
        decision.remaining  # noqa: B018 - computed when it is read
        decision.retry_after  # noqa: B018 - as above

    def read_denied() -> None:
        decision = deny("k")
        decision.remaining  # noqa: B018 - as above
        decision.retry_after  # noqa: B018 - as above

    def plain() -> None:
        acquire("k")

    def denied() -> None:
        deny("k")

    return [
        Row("try_acquire(key)", plain),
        Row("  and remaining, retry_after", read, added=True, target=0.6),
        Row("try_acquire(key), denied", denied),
        Row("  and remaining, retry_after", read_denied, added=True, target=0.8),
        Row("try_acquire(key, 0)", lambda: acquire("k", 0), target=1.5),
        Row("try_acquire(key, 3)", lambda: acquire("k", 3), target=1.5),
        Row("try_acquire(key, 1800)", lambda: acquire("k", 1800), target=1.5),
        Row("peek(key)", lambda: peek("k"), target=3),
        Row("peek(key, 5)", lambda: peek("k", 5), target=3),
        Row("usage(key)", lambda: usage("k"), target=3),
        Row("peek(another key)", lambda: peek("another"), target=3),
        Row("usage(another key)", lambda: usage("another"), target=3),
        Row("await try_acquire(key)", lambda: await_now(tasks.try_acquire("k")), target=2),
        Row("await peek(key)", lambda: await_now(tasks.peek("k")), target=4),
        Row("await peek(key, 5)", lambda: await_now(tasks.peek("k", 5)), target=4),
        Row("await usage(key)", lambda: await_now(tasks.usage("k")), target=4),
    ]


def await_now(call: Coroutine[object, None, object]) -> None:
    """Run a coroutine that never suspends, as `await` in a task would."""
    try:
        call.send(None)
    except StopIteration:
        return


def time_slice(run: Callable[[], object]) -> float:
    """Return microseconds for each call."""
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        run()
    return (time.perf_counter_ns() - start) / CALLS / 1000


def main() -> None:
    """Measure and print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=2000)
    options.add_argument("--rule", default="1000000000/1s")
    chosen = options.parse_args()
    table = rows(chosen.rule)
    rounds = [[time_slice(row.run) for row in table] for _ in range(chosen.rounds)]
    best = [min(times) for times in zip(*rounds, strict=True)]
    usual = [quantiles(times)[0] for times in zip(*rounds, strict=True)]
    print(f"{'':32} {'best':>8} {'quartile':>8} us, ratio to the plain call: {'best':>6} {'quartile':>8}  target")
    beside = 0
    for index, row in enumerate(table):
        beside = index if not row.added else beside
        some = [times[index] - (times[beside] if row.added else 0) for times in (best, usual)]
        ratios = [each / times[0] for each, times in zip(some, (best, usual), strict=True)]
        target = "" if row.target is None else f"{row.target} us added" if row.added else f"{row.target} times"
        print(f"{row.name:32} {some[0]:8.3f} {some[1]:8.3f} {'':28} {ratios[0]:6.2f} {ratios[1]:8.2f}  {target}")


if __name__ == "__main__":
    main()
