"""`Alternatives`: one step of the store charges the first alternative that is allowed, and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.servers.valkey import ValkeyServer
from tidegate import ConfigError, Limit, Policy
from tidegate.core._bounds import SECOND
from tidegate.stores import MemoryStore, Store, open_store
from tidegate.stores._base import Alternatives, decided_asks
from tidegate.stores._lease import Lease, LeasedStore
from tidegate.stores._outage import GuardedStore
from tidegate.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tidegate import Decision
    from tidegate.stores._base import Ask
    from tidegate.stores._values import Write

STORES = ("memory", "sqlite", "redis", "postgres")
MEMBER = Policy("member", (Limit(3, "1h", algorithm="fixed_window"),))
TEAM = Policy("team", (Limit(7, "1h", algorithm="sliding_log"),))


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[dict[str, str]]:
    path: Path = tmp_path_factory.mktemp("alternatives")
    with ValkeyServer() as valkey:
        yield {
            "memory": "memory://",
            "sqlite": f"sqlite:///{path}/a.db",
            "redis": f"{valkey.url}?connect_timeout=5&timeout=5",
            "postgres": f"{postgres_url}?connect_timeout=10&timeout=10",
        }


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, urls: dict[str, str]) -> Iterator[Store]:
    with opened(urls[request.param]) as found:
        for policy in (MEMBER, TEAM):
            for key in [f"k{i}" for i in range(60)]:
                found.apply_one("reset", policy, key, (0,))
        yield found


@contextmanager
def opened(url: str) -> Iterator[Store]:
    found = open_store(url)
    try:
        yield found
    finally:
        found.close()


def members(*keys: str, cost: int = 1) -> Alternatives:
    return Alternatives.of([(MEMBER, key, (cost,))] for key in keys)


def used(store: Store, policy: Policy, key: str) -> int:
    return store.apply_one("peek", policy, key, (0,)).used[0]


def chosen(asks: Alternatives, decisions: Sequence[Decision]) -> int | None:
    groups = asks.split(decisions)
    return len(groups) - 1 if groups[-1][-1].within_limits else None


def test_the_first_with_room_is_charged_and_no_other(store: Store) -> None:
    asks = members("k1", "k2", "k3")
    picked = [chosen(asks, store.apply("acquire", asks)) for _ in range(10)]
    assert picked == [0] * 3 + [1] * 3 + [2] * 3 + [None]
    assert [used(store, MEMBER, key) for key in ("k1", "k2", "k3")] == [3, 3, 3]


def test_an_alternative_is_all_or_nothing(store: Store) -> None:
    asks = Alternatives.of(((MEMBER, key, (1,)), (TEAM, "k0", (1,))) for key in ("k1", "k2", "k3"))
    picked = [chosen(asks, store.apply("acquire", asks)) for _ in range(9)]
    assert picked == [0] * 3 + [1] * 3 + [2, None, None]  # the team's seven are used up
    assert used(store, TEAM, "k0") == 7
    assert [used(store, MEMBER, key) for key in ("k1", "k2", "k3")] == [3, 3, 1]


def test_denied_alternatives_tell_when_to_retry(store: Store) -> None:
    store.apply("acquire", members("k1", cost=3))
    decisions = store.apply("acquire", members("k1", "k2", cost=4))
    assert [bool(decision) for decision in decisions] == [False, False]
    assert [decision.retry_after for decision in decisions] == [None, None]  # four never fit
    decisions = store.apply("acquire", members("k1", cost=1))
    assert decisions[0].retry_after is not None
    assert decisions[0].retry_after > 0


def test_peek_charges_nothing_and_hold_can_be_corrected(store: Store) -> None:
    asks = members("k1", "k2")
    store.apply("acquire", members("k1", cost=3))
    assert chosen(asks, store.apply("peek", asks)) == 1
    assert used(store, MEMBER, "k2") == 0
    decisions = store.apply("hold", asks)
    ((policy, key, _),), (decision,) = decided_asks(asks, decisions)
    assert key == "k2"
    store.apply("adjust", [(policy, key, (-1,))], None, decision.at)
    assert used(store, MEMBER, "k2") == 0


async def test_tasks_get_as_many_as_there_are(store: Store) -> None:
    asks = members(*[f"k{i}" for i in range(20)])
    results = await asyncio.gather(*(store.apply_async("acquire", asks) for _ in range(80)))
    counts = Counter(chosen(asks, decisions) for decisions in results)
    assert counts == {**dict.fromkeys(range(20), 3), None: 20}
    await store.close_async()


@pytest.mark.parametrize("kind", ["sqlite", "redis", "postgres"])
async def test_cancelled_choices_leave_no_charge(urls: dict[str, str], kind: str) -> None:
    store = open_store(urls[kind])
    for key in ("k1", "k2"):
        await store.apply_async("reset", [(MEMBER, key, (0,))])
    asks = members("k1", "k2")
    for turns in range(40):
        task = asyncio.ensure_future(store.apply_async("hold", asks))
        for _ in range(turns % 8):
            await asyncio.sleep(0)
        if task.done() and not task.cancelled():
            (ask,), (decision,) = decided_asks(asks, task.result())
            if decision.within_limits:
                await store.apply_async("adjust", [(ask[0], ask[1], (-1,))], None, decision.at)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await store.close_async()
    with opened(urls[kind]) as again:
        assert [used(again, MEMBER, key) for key in ("k1", "k2")] == [0, 0]


def test_fifty_members_are_one_round_trip_on_redis(urls: dict[str, str]) -> None:
    with opened(urls["redis"]) as store:
        asks = Alternatives.of([(MEMBER, f"one{i}", (1,)), (TEAM, f"one{i}", (1,))] for i in range(50))
        for index in range(49):
            store.apply("acquire", [(MEMBER, f"one{index}", (3,))])
        before = store.metrics()["scripts"]
        assert chosen(asks, store.apply("acquire", asks)) == 49
        assert store.metrics()["scripts"] - before == 1


def test_calendar_windows_that_the_server_lacks(urls: dict[str, str]) -> None:
    """The server needs the windows around a far instant, also of an alternative that is not the first."""
    calendar = Policy("calendar", (Limit(1, algorithm="calendar_window", period="month"),))
    for name in ("redis", "postgres"):
        with opened(urls[name]) as store:
            now = 1_700_000_000 * SECOND
            asks = Alternatives.of([[(MEMBER, "w0", (4,))], [(calendar, "w1", (1,))], [(calendar, "w2", (1,))]])
            assert [chosen(asks, store.apply("acquire", asks, now)) for _ in range(3)] == [1, 2, None]
            later = now + 40 * 86_400 * SECOND
            assert chosen(asks, store.apply("acquire", asks, later)) == 1


# ---- wrappers --------------------------------------------------------------------------------------------------------


def test_a_guarded_store_decides_alternatives_in_an_outage() -> None:
    class FailingStore(MemoryStore):
        def apply(
            self,
            verb: str,
            asks: Sequence[Ask],
            now: int | None = None,
            at: int | None = None,
            writes: Sequence[Write] = (),
        ) -> list[Decision]:
            raise OSError("no server")

    allowing = Policy("lenient", MEMBER.limits, on_store_error="allow")
    denying = Policy("strict", MEMBER.limits, on_store_error="deny")
    guarded = GuardedStore(FailingStore(), background=False)
    asks = Alternatives.of([[(denying, "a", (1,))], [(allowing, "b", (1,))], [(allowing, "c", (1,))]])
    assert guarded.decides_alternatives
    for _ in range(2):  # the call that fails, and one during the outage
        assert chosen(asks, guarded.apply("acquire", asks)) == 1
    guarded.close()


def test_a_leased_store_decides_alternatives_from_its_shares() -> None:
    """Random choices over leased members: never more than the quotas, and few requests once shares are held."""
    clock, random = ManualClock(1_700_000_000), Random(7)
    inner = MemoryStore(clock=clock)
    inner.instant = False  # type: ignore[misc]  # like a shared store
    policy = Policy("pool", (Limit(100, "1h", algorithm="fixed_window"),))
    stores = [LeasedStore(inner, Lease(), clock=clock, owns=False) for _ in range(3)]
    asks = Alternatives.of([(policy, f"m{i}", (1,))] for i in range(5))
    counts: Counter[str] = Counter()
    denied = 0
    for _ in range(700):
        store = random.choice(stores)
        index = chosen(asks, store.apply("acquire", asks))
        if index is None:
            denied += 1
        else:
            counts[f"m{index}"] += 1
        clock.advance(random.random())
    for store in stores:
        store.close()
    assert max(counts.values()) <= 100
    assert sum(counts.values()) >= 485, counts  # of 500
    assert denied == 700 - sum(counts.values())
    charged = [inner.apply_one("peek", policy, f"m{i}", (0,)).used[0] for i in range(5)]
    assert charged == [counts[f"m{i}"] for i in range(5)]  # what was not used was returned


def test_a_key_twice_or_no_ask_is_refused() -> None:
    with pytest.raises(ConfigError, match="contains a key twice"):
        Alternatives.of([[(MEMBER, "k", (1,)), (MEMBER, "k", (2,))]])
    with pytest.raises(ConfigError, match="at least one policy and key"):
        Alternatives.of([[]])
