"""Runs tasks that call a limiter and cancels most of them at random moments of the event loop.

`charged` is what the store has counted, `received` what callers got. When all tasks have ended and the store has given
back the charges of cancelled calls, the two are equal.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidegate import AsyncLimiter, Denied, Limit, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tidegate.stores import Store

DEFAULT_CANCELLATIONS = 2000
KEYS = 20
BATCH = 60  # tasks at once
MAX_ITERATIONS = 12  # of the event loop, before a task of a batch is cancelled
METHODS = ("try_acquire", "acquire", "reserve", "commit", "block")
MAX_SETTLING = 30.0  # seconds until the last charges are given back, on a busy machine
# No permit comes back by itself during a run.
COUNTED = (
    Limit(1000, "52w", burst=10**5, name="token_bucket"),
    Limit(10**6, "52w", "fixed_window", name="fixed_window"),
    Limit(10**6, "52w", "sliding_log", name="sliding_log"),
)
SLOTS = Limit(10**6, "1h", "concurrency", unit="concurrent-requests", name="slots")


def cancellations() -> int:
    """Return how many tasks to cancel: TIDEGATE_CANCELLATIONS, or a default."""
    return int(os.environ.get("TIDEGATE_CANCELLATIONS", str(DEFAULT_CANCELLATIONS)))


@dataclass
class RandomCancellations:
    """A run of random cancellations on one store."""

    store: Store
    seed: int = 0
    lease: bool = False
    received: dict[str, int] = field(default_factory=dict)
    cancelled: int = 0

    def __post_init__(self) -> None:
        """Create two limiters: one of counted permits, one of slots."""
        self.random = random.Random(self.seed)
        # The store applies a smaller burst to a leased bucket, which its usage shows.
        self.counted = COUNTED[1:] if self.lease else COUNTED
        self.limiter = AsyncLimiter(Policy("counted", self.counted), store=self.store, lease=self.lease)
        self.slots = AsyncLimiter(Policy("slots", (SLOTS,)), store=self.store)

    async def try_acquire(self, key: str, cost: int) -> None:
        """Acquire permits without waiting."""
        if await self.limiter.try_acquire(key, cost):
            self.count(key, cost)

    async def acquire(self, key: str, cost: int) -> None:
        """Acquire permits, waiting for them."""
        with suppress(Denied):
            await self.limiter.acquire(key, cost, timeout=5)
            self.count(key, cost)

    async def reserve(self, key: str, cost: int) -> None:
        """Reserve permits; an unsettled reservation stays charged."""
        with suppress(Denied):
            await self.limiter.reserve(key, cost)
            self.count(key, cost)

    async def commit(self, key: str, cost: int) -> None:
        """Reserve permits and commit fewer; a commit that was started is completed."""
        with suppress(Denied):
            reservation = await self.limiter.reserve(key, cost + 1)
            self.count(key, cost + 1)
            commit = reservation.commit(cost)
            self.count(key, -1)
            await commit

    async def block(self, key: str, cost: int) -> None:
        """Hold slots during a block that takes some iterations of the loop."""
        with suppress(Denied):
            async with self.slots.limited(key, cost, timeout=5):
                for _ in range(self.random.randrange(3)):
                    await asyncio.sleep(0)

    def count(self, key: str, cost: int) -> None:
        """Count permits that a caller received."""
        self.received[key] = self.received.get(key, 0) + cost

    async def run(self, cancellations: int, methods: tuple[str, ...] = METHODS) -> None:
        """Start tasks in batches and cancel most of them, until enough were cancelled."""
        calls: list[Callable[[str, int], Coroutine[None, None, None]]] = [getattr(self, method) for method in methods]
        await self.limiter.try_acquire("warm")
        while self.cancelled < cancellations:
            tasks = [asyncio.ensure_future(self.random.choice(calls)(*self._random_arguments())) for _ in range(BATCH)]
            doomed = self.random.sample(tasks, BATCH * 9 // 10)
            while doomed:
                for _ in range(self.random.randrange(MAX_ITERATIONS)):
                    await asyncio.sleep(0)
                share = self.random.randrange(1, len(doomed) + 1)
                self.cancelled += sum(task.cancel() for task in doomed[:share])
                del doomed[:share]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            errors = [result for result in results if isinstance(result, Exception)]
            assert not errors, errors[:3]

    def _random_arguments(self) -> tuple[str, int]:
        return f"k{self.random.randrange(KEYS)}", self.random.randint(1, 3)

    async def charged(self) -> dict[str, list[int]]:
        """Return how much of each limit every key has used."""
        return {
            f"k{number}": [used.used for used in (await self.limiter.usage(f"k{number}")).values()]
            for number in range(KEYS)
        }

    async def held(self) -> int:
        """Return how many slots are held."""
        return sum([(await self.slots.usage(f"k{number}"))["slots"].used for number in range(KEYS)])

    async def settle(self) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
        """Wait until all charges are given back; return what is charged, what callers received, and the slots held."""
        received = {f"k{n}": [self.received.get(f"k{n}", 0)] * len(self.counted) for n in range(KEYS)}
        loop = asyncio.get_running_loop()
        until = loop.time() + MAX_SETTLING
        while True:
            charged, held = await self.charged(), await self.held()
            if (charged == received and not held) or loop.time() > until:
                return charged, received, held
            await asyncio.sleep(0)
