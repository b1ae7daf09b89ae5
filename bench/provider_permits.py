"""Measure what `Gate.try_acquire(name)` adds to the decision of the same quota, with few and with many providers.

python -m bench.provider_permits

The gate, and a plain Limiter with the policy of one provider on a store of the same kind (memory), take turns in short
slices. Shown is the processor time of one call: the fastest slice of each, their difference and their ratio. A quota
whose permits must be reserved to be settled (a token bucket) is compared with `Limiter.reserve`.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from tidegate import Limiter
from tidegate.outbound import Gate, Providers

if TYPE_CHECKING:
    from collections.abc import Callable

SLICE: Final = 500  # calls
ROUNDS: Final = 40
ALGORITHMS: Final = {"sliding_log": "try_acquire", "fixed_window": "try_acquire", "token_bucket": "reserve"}


def measure(call: Callable[[], object]) -> float:
    """Return the microseconds of processor time of one call, over a slice."""
    began = time.thread_time_ns()
    for _ in range(SLICE):
        call()
    return (time.thread_time_ns() - began) / SLICE / 1000


def compare(count: int, algorithm: str, verb: str) -> str:
    """Measure with this number of providers, and return a row."""
    limit = f"100_000_000/1m {algorithm}"
    providers = Providers.of(*({"domain": f"d{i}.example", "name": f"n{i}", "limits": [limit]} for i in range(count)))
    provider = providers.find("n7")
    if provider is None:
        raise AssertionError("n7 is configured")
    gate, limiter = Gate(providers), Limiter(provider.policy)
    charge = getattr(limiter, verb)
    rounds = [(measure(lambda: gate.try_acquire("n7")), measure(lambda: charge("n7"))) for _ in range(ROUNDS)]
    permit, decision = (min(times) for times in zip(*rounds, strict=True))
    gate.close()
    limiter.close()
    return (
        f"{count:>9,}  {algorithm:<12}  {permit:7.2f}  {decision:7.2f} ({verb})  "
        f"{permit - decision:+6.2f}  x {permit / decision:.1f}"
    )


def main() -> None:
    """Print a row for each number of providers and each algorithm."""
    sys.stdout.write("providers  algorithm      permit  decision, µs\n")
    for algorithm, verb in ALGORITHMS.items():
        for count in (10, 10_000):
            sys.stdout.write(f"{compare(count, algorithm, verb)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
