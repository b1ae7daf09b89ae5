"""A storm of cancellations: tasks that call a limiter are cancelled at random moments of the event loop.

`charged` is what the store has counted, `answered` what callers were told. When the storm is over and the store has
given back what cancelled calls took, the two are the same.
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

SHORT = 2000  # cancellations in the suite
KEYS = 20
WAVE = 60  # tasks at once
TURNS = 12  # turns of the loop within which a task of a wave is cancelled
KINDS = ("try_acquire", "acquire", "reserve", "commit", "block")
SETTLING = 30.0  # seconds for the last charges to be given back on a busy machine
# Nothing comes back by itself while a storm lasts.
COUNTED = (
    Limit(1000, "52w", burst=10**5, name="token_bucket"),
    Limit(10**6, "52w", "fixed_window", name="fixed_window"),
    Limit(10**6, "52w", "sliding_log", name="sliding_log"),
)
SLOTS = Limit(10**6, "1h", "concurrency", unit="concurrent-requests", name="slots")


def cancellations() -> int:
    """Return how many tasks to cancel: a few in the suite, TIDEGATE_STORM of them by hand."""
    return int(os.environ.get("TIDEGATE_STORM", str(SHORT)))


@dataclass
class Storm:
    """One storm over one store."""

    store: Store
    seed: int = 0
    lease: bool = False
    answered: dict[str, int] = field(default_factory=dict)
    cancelled: int = 0

    def __post_init__(self) -> None:
        """Open two limiters: of what is counted, and of slots."""
        self.random = random.Random(self.seed)
        # A bucket of which permits are leased is asked as a smaller one, and says so.
        self.counted = COUNTED[1:] if self.lease else COUNTED
        self.limiter = AsyncLimiter(Policy("storm", self.counted), store=self.store, lease=self.lease)
        self.slots = AsyncLimiter(Policy("slots", (SLOTS,)), store=self.store)

    async def try_acquire(self, key: str, cost: int) -> None:
        """Take permits, and keep them."""
        if await self.limiter.try_acquire(key, cost):
            self.note(key, cost)

    async def acquire(self, key: str, cost: int) -> None:
        """Wait for permits, and keep them."""
        with suppress(Denied):
            await self.limiter.acquire(key, cost, timeout=5)
            self.note(key, cost)

    async def reserve(self, key: str, cost: int) -> None:
        """Reserve permits; a reservation that nobody settles stands."""
        with suppress(Denied):
            await self.limiter.reserve(key, cost)
            self.note(key, cost)

    async def commit(self, key: str, cost: int) -> None:
        """Reserve permits and settle for less; a settlement that was begun is made."""
        with suppress(Denied):
            held = await self.limiter.reserve(key, cost + 1)
            self.note(key, cost + 1)
            settling = held.commit(cost)
            self.note(key, -1)
            await settling

    async def block(self, key: str, cost: int) -> None:
        """Hold slots during a block, which takes some turns of the loop."""
        with suppress(Denied):
            async with self.slots.limited(key, cost, timeout=5):
                for _ in range(self.random.randrange(3)):
                    await asyncio.sleep(0)

    def note(self, key: str, cost: int) -> None:
        """Count what a caller was told that it has."""
        self.answered[key] = self.answered.get(key, 0) + cost

    async def blow(self, count: int, kinds: tuple[str, ...] = KINDS) -> None:
        """Start tasks in waves and cancel most of them, until so many were cancelled."""
        calls: list[Callable[[str, int], Coroutine[None, None, None]]] = [getattr(self, kind) for kind in kinds]
        await self.limiter.try_acquire("warm")
        while self.cancelled < count:
            tasks = [asyncio.ensure_future(self.random.choice(calls)(*self._any_call())) for _ in range(WAVE)]
            doomed = self.random.sample(tasks, WAVE * 9 // 10)
            while doomed:
                for _ in range(self.random.randrange(TURNS)):
                    await asyncio.sleep(0)
                share = self.random.randrange(1, len(doomed) + 1)
                self.cancelled += sum(task.cancel() for task in doomed[:share])
                del doomed[:share]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            errors = [result for result in results if isinstance(result, Exception)]
            assert not errors, errors[:3]

    def _any_call(self) -> tuple[str, int]:
        return f"k{self.random.randrange(KEYS)}", self.random.randint(1, 3)

    async def charged(self) -> dict[str, list[int]]:
        """Ask how much of each limit every key has used."""
        return {
            f"k{number}": [used.used for used in (await self.limiter.usage(f"k{number}")).values()]
            for number in range(KEYS)
        }

    async def held(self) -> int:
        """Ask how many slots are held."""
        return sum([(await self.slots.usage(f"k{number}"))["slots"].used for number in range(KEYS)])

    async def settled(self) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
        """Wait until all is given back; return what is charged, what was answered, and the slots that are held."""
        answered = {f"k{n}": [self.answered.get(f"k{n}", 0)] * len(self.counted) for n in range(KEYS)}
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLING
        while True:
            charged, held = await self.charged(), await self.held()
            if (charged == answered and not held) or loop.time() > until:
                return charged, answered, held
            await asyncio.sleep(0)
