"""pyrate-limiter: an InMemoryBucket (its default, faster than its GCRA) per key, made by a factory as it documents."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pyrate_limiter import (  # type: ignore[import-not-found]  # peers are only in .venv-bench
    BucketFactory,
    InMemoryBucket,
    Limiter,
    MonotonicClock,
    Rate,
    RateItem,
)

from bench.libraries import DAY, FIVE

if TYPE_CHECKING:
    from bench.libraries import Ask, AskAsync

NAME = DISTRIBUTION = "pyrate-limiter"
STRATEGY = "InMemoryBucket (sliding log), non-blocking; bool"
HOT = "user:42"


class BucketPerKey(BucketFactory):  # type: ignore[misc]  # an untyped peer
    """Routes each key to a bucket of its own."""

    def __init__(self, rates: list[Any]) -> None:
        """Start without buckets."""
        self.rates = rates
        self.clock = MonotonicClock()
        self.of: dict[str, Any] = {}

    def wrap_item(self, name: str, weight: int = 1) -> Any:  # noqa: ANN401 - an untyped peer
        """Stamp a call."""
        return RateItem(name, self.clock.now(), weight=weight)

    def get(self, item: Any) -> Any:  # noqa: ANN401 - an untyped peer
        """Give the key's bucket."""
        bucket = self.of.get(item.name)
        if bucket is None:
            bucket = self.of[item.name] = self.create(InMemoryBucket, self.rates)
        return bucket


def limiter(*rates: tuple[int, int]) -> Any:  # noqa: ANN401 - an untyped peer
    """Limit each key by these quotas per seconds."""
    return Limiter(BucketPerKey([Rate(quota, seconds * 1000) for quota, seconds in rates]))


def per_day(quota: int, days: int = 1) -> Ask:
    """Ask for one permit of `quota` in so many days."""
    return partial(limiter((quota, days * DAY)).try_acquire, blocking=False)


def admitted(answer: object) -> bool:
    """Read an answer."""
    return answer is True


def five() -> Ask:
    """Ask five rates at once."""
    return partial(limiter(*FIVE).try_acquire, blocking=False)


def per_day_async(quota: int) -> AskAsync:
    """Ask, awaited."""
    return partial(limiter((quota, DAY)).try_acquire_async, blocking=False)
