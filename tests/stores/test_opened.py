"""Every interface opens its store in one way, and closes only what it opened."""

import pytest

from tests.cases import cases
from tests.core.memory_calls import OnlyApply
from tidegate import AsyncLimiter, Closed, ConfigError, Limit, Limiter, Policy
from tidegate.outbound import Providers
from tidegate.outbound._quota.gate import Gate
from tidegate.stores import MemoryStore
from tidegate.stores._lease import LeasedStore
from tidegate.stores._opened import OpenedStore
from tidegate.stores._outage import GuardedStore
from tidegate.swarm import MemoryLimiter
from tidegate.testing import ManualClock

RULE = "1000/1h fixed_window"


class ClosingStore(MemoryStore):
    """Records whether it was closed."""

    closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def clock():
    return ManualClock(1_700_000_000)


@pytest.fixture
def store(clock):
    return ClosingStore(clock=clock)


@pytest.mark.parametrize("lease", [None, True], ids=["direct", "leased"])
def test_a_store_passed_as_object_stays_open(store, lease):
    with Limiter(RULE, store=store, lease=lease) as limiter:
        assert limiter.try_acquire("k")
    assert not store.closed


async def test_a_store_passed_as_object_to_an_async_limiter_stays_open(store):
    async with AsyncLimiter(RULE, store=store, lease=True) as limiter:
        assert await limiter.try_acquire("k")
    assert not store.closed


def test_a_url_opens_a_guarded_store(tmp_path):
    opened = OpenedStore.open(f"sqlite:///{tmp_path / 'limits.db'}")
    assert isinstance(opened.store, GuardedStore)
    assert opened.owned
    opened.close()


def test_a_lease_of_a_url_returns_its_permits_when_closed(tmp_path):
    url = f"sqlite:///{tmp_path / 'limits.db'}?deadline=60s"
    opened = OpenedStore.open(url, lease=0.5)
    assert isinstance(opened.store, LeasedStore)
    limiter = Limiter([RULE], store=opened.store)
    for _ in range(50):
        assert limiter.try_acquire("k")
    opened.close()
    with Limiter([RULE], store=url) as other:
        assert other.peek("k").remaining == 949


def test_a_store_in_memory_of_one_process_is_not_leased(clock):
    assert OpenedStore.open("memory://", clock=clock, lease=True).store.__class__ is MemoryStore


@cases(
    "build",
    [
        lambda wrong: Limiter(RULE, store=wrong),
        lambda wrong: Gate(Providers.load(), store=wrong),
        OpenedStore.open,
    ],
)
@cases("wrong", [5, object(), "limits.db"])
def test_anything_else_is_refused(build, wrong):
    with pytest.raises(ConfigError, match=r"store: expected a URL such as 'memory://'"):
        build(wrong)


# ---- methods that were kept ------------------------------------------------------------------------------------------


async def test_a_store_with_nothing_but_apply_makes_the_same_decisions(store):
    plain = OnlyApply(store)
    assert [bool(Limiter("2/1h", store=plain).try_acquire("a")) for _ in range(3)] == [True, True, False]
    limiter = AsyncLimiter("2/1h", store=plain)
    assert [bool(await limiter.try_acquire("b")) for _ in range(3)] == [True, True, False]


@pytest.fixture(params=["memory", "leased"])
def busy(request, store):
    """A limiter that has made some decisions, in memory."""
    limiter = Limiter(RULE, store=store if request.param == "memory" else LeasedStore(store))
    for _ in range(50):
        assert limiter.try_acquire("k")
    return limiter


def test_a_method_that_was_kept_is_closed_with_its_limiter(busy):
    try_acquire = busy.try_acquire
    busy.close()  # the store stays open: it belongs to the caller
    with pytest.raises(Closed):
        try_acquire("k")


def test_a_method_that_was_kept_follows_new_rules(busy):
    try_acquire = busy.try_acquire
    busy.update(Policy("default", (Limit(10, "1h", "fixed_window"),), mode="shadow"))
    assert try_acquire("k").violated == ("1h",), "allowed, and reported: only the new rules do that"


def test_swarm_limiters_close_the_store_that_they_opened(clock):
    limiter = MemoryLimiter(clock=clock)
    limiter.set_capacity("api", 10, 60)
    assert limiter.try_acquire("api")
    limiter.close()
    with pytest.raises(Closed):
        limiter.acquire("api")
