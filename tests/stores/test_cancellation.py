"""Every store charges exactly what callers received, however many tasks are cancelled.

`TIDEGATE_CANCELLATIONS=100000 pytest tests/stores/test_cancellation.py` runs the long form.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.servers.valkey import ValkeyCluster, ValkeyServer
from tests.stores.random_cancellations import RandomCancellations, cancellations
from tidegate.core._limit import Limit
from tidegate.stores import MemoryStore, Store, open_store
from tidegate.stores._cancellation import bucket_credit
from tidegate.stores._outage import GuardedStore, open_guarded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from tidegate import Decision
    from tidegate.stores._base import Ask
    from tidegate.stores._values import Write


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with ValkeyServer() as server:
        yield f"{server.url}?connect_timeout=5"


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    with ValkeyCluster() as cluster:
        yield f"{cluster.url}?connect_timeout=5"


class BlockingStore(Store):
    """A store without an async form or deadlines: GuardedStore runs it in threads."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryStore()

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        return self.memory.apply(verb, asks, now, at, writes)


PLACES = ("memory", "sqlite", "redis", "cluster", "postgres")
FORMS = [
    *((place, form) for place in PLACES for form in ("plain", "guarded", "leased")),
    ("threads", "guarded"),
]


@asynccontextmanager
async def open_for_test(request: pytest.FixtureRequest, tmp_path: Path, place: str, form: str) -> AsyncIterator[Store]:
    store: Store
    if place == "threads":
        store = GuardedStore(BlockingStore())
    else:
        urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/run.db?synchronous=normal"}
        url = urls.get(place) or request.getfixturevalue(f"{place}_url")
        if place == "postgres":
            url += f"?schema={form}&synchronous_commit=off"
        elif place not in ("memory", "sqlite"):
            url += f"&prefix={form}"
        if place not in ("memory", "sqlite"):
            url += "&timeout=10"  # a loaded machine may be slow; this test does not check timeouts
        if place != "memory" and form != "plain":
            url += "&deadline=10s"
        store = open_store(url) if form == "plain" else open_guarded(url)
    yield store
    await store.close_async()


@pytest.mark.once
@pytest.mark.timeout(120 + cancellations() // 50)
@pytest.mark.parametrize(("place", "form"), FORMS)
async def test_charges_equal_what_callers_received(
    request: pytest.FixtureRequest, tmp_path: Path, place: str, form: str
) -> None:
    async with open_for_test(request, tmp_path, place, form) as store:
        run = RandomCancellations(store, seed=1, lease=form == "leased")
        await run.run(cancellations())
        charged, received, held = await run.settle()
        await run.limiter.close()
        assert charged == received
        assert held == 0
        assert run.cancelled >= cancellations()


@pytest.mark.parametrize("place", ["sqlite", "redis", "postgres"])
async def test_closing_gives_back_the_charges_of_cancelled_calls(
    request: pytest.FixtureRequest, tmp_path: Path, place: str
) -> None:
    """The store is closed while calls are being cancelled: callers received all that was charged until then."""
    async with open_for_test(request, tmp_path, place, "guarded") as store:
        run = RandomCancellations(store, seed=2)
        before = await run.charged()
        tasks = [asyncio.ensure_future(run.try_acquire(f"k{n % 20}", 1)) for n in range(200)]
        for _ in range(4):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks[::2], return_exceptions=True)
        await store.close_async()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(run.received.values()) > 0
    async with open_for_test(request, tmp_path, place, "guarded") as store:
        after = await RandomCancellations(store).charged()
    assert {key: [used - old for used, old in zip(after[key], before[key], strict=True)] for key in after} == {
        key: [run.received.get(key, 0)] * len(run.counted) for key in after
    }


@pytest.mark.parametrize(
    ("limit", "cost", "reset", "passed", "credit"),
    [
        ("5/1h", 1, 720_000_000, 1_000_000, 1),  # from full: less than a permit was refilled meanwhile
        ("1000/1s", 1, 1000, 1_000_000, 0),  # from full: the bucket is full again
        ("1000/1s", 500, 500_000, 100_000, 400),  # from full: 100 would have been lost beyond the burst
        ("1000/1s", 500, 900_000, 100_000, 500),  # 400 were missing: nothing would have been lost
    ],
)
def test_a_bucket_gets_back_what_it_cannot_have_refilled(
    limit: str, cost: int, reset: int, passed: int, credit: int
) -> None:
    assert bucket_credit(Limit.parse(limit), cost, reset, passed) == credit
