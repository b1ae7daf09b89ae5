"""The URL and its options, the clock, and names that PostgreSQL cannot store unchanged."""

import time

import pytest

from tests.cases import cases
from tidegate import AsyncLimiter, ConfigError, Limit, Limiter, Policy
from tidegate._runtime.clock import SystemClock
from tidegate.stores import open_store as open_url
from tidegate.stores._postgres import PostgresStore
from tidegate.stores._postgres.call import encode_name
from tidegate.testing import ManualClock

SECRET = "s3cret-w0rd"  # noqa: S105 - a test password


@cases(
    ("url", "message"),
    [
        ("postgresql://u:{}@h/d?shema=x", "unknown option 'shema': did you mean 'schema'"),
        ("postgresql://u:{}@h/d?timeout=soon", "timeout: must be a number of seconds, not 'soon'"),
        ("postgresql://u:{}@h/d?timeout=0", "timeout: must be a number of seconds above 0"),
        ("postgresql://u:{}@h/d?timeout=nan", "timeout: must be a number of seconds above 0"),
        ("postgresql://u:{}@h/d?pool_size=0", "pool_size: must be an integer of at least 1"),
        ("postgresql://u:{}@h/d?pool_size=many", "pool_size: must be an integer, not 'many'"),
        ("postgresql://u:{}@h/d?unlogged=maybe", "unlogged: must be true or false"),
        ("postgresql://u:{}@h/d?synchronous_commit=no", "synchronous_commit: must be one of on, off"),
        ("postgresql://u:{}@h/d?schema=A-B", "schema: must consist of lower-case letters"),
        ("postgresql://u:{}%zz@h/d", "cannot parse the PostgreSQL URL: write postgresql://user:password@host"),
    ],
)
def test_invalid_urls_raise_an_error_without_the_password(url, message):
    with pytest.raises(ConfigError, match=message) as raised:
        open_url(url.format(SECRET))
    assert SECRET not in str(raised.value)


def test_options_reach_the_store_and_others_reach_libpq():
    store = open_url(
        "postgres://u:p@h:5433/d?schema=mine&timeout=0.5&pool_size=3&synchronous_commit=off&unlogged=true&sslmode=require"
    )
    assert isinstance(store, PostgresStore)
    assert store.schema.name == "mine"
    assert store.target.name == "h:5433/d"
    assert store.target.conninfo == b"postgres://u:p@h:5433/d?sslmode=require&fallback_application_name=tidegate"


def test_synchronous_commit_is_set_for_the_session(open_store, schema, sql):
    open_store(synchronous_commit="off").apply_one("acquire", Policy("p", (Limit(1, "1m"),)), "k", (1,))
    assert sql("select used from tidegate.states").fetchone() == (1,)


def test_a_given_clock_decides(server, schema, open_store):
    open_store()
    clock = ManualClock(start=1_728_000_000)
    with Limiter("1/1h fixed_window", store=f"{server.url}?schema={schema}&timeout=10", clock=clock) as limiter:
        assert limiter.try_acquire("k")
        denied = limiter.try_acquire("k")
        assert (denied.allowed, denied.retry_after, denied.at) == (False, 3600.0, 1_728_000_000 * 1_000_000)
        clock.advance(3600)
        assert limiter.try_acquire("k")


class LateClock(SystemClock):
    """A clock that is a decade late."""

    ns = staticmethod(lambda: time.time_ns() - 10 * 365 * 86_400 * 10**9)


def test_the_servers_clock_decides_with_any_client_clock(open_store, monkeypatch):
    """The client computes calendar windows: with a wrong clock, it learns the server's time."""
    store = open_store()
    policy = Policy(
        "p", (Limit(5, "minute", "calendar_window"), Limit(5, "month", "calendar_window", timezone="Asia/Kolkata"))
    )
    before = store.apply_one("acquire", policy, "k", (1, 1))
    assert before.allowed
    monkeypatch.setattr("tidegate.stores._postgres.store.SYSTEM_CLOCK", LateClock())
    store = open_store()
    after = store.apply_one("acquire", policy, "k", (1, 1))
    assert after.allowed
    assert 0 <= after.at - before.at < 60_000_000
    assert after.limits[1].remaining == 3
    assert store.apply_one("acquire", policy, "k", (1, 1)).limits[1].remaining == 2


AWKWARD = [
    "a\0b",
    "a%u0000b",
    "ab",
    "\ud800",
    "%uD800",
    "x" * 10_000,
    "x" * 10_001,
    "ü" * 10_000,
    '"\\{},',
    "",
    "%~",
    "a/b",
]


def test_keys_and_names_with_special_characters_are_distinct(open_store):
    store = open_store()
    for name in ("p", "p\0", "p%u0000", '"p"'):
        policy = Policy(name, (Limit(1, "1d", "fixed_window", name=f"l{name}", unit='a "unit"'),))
        for key in [*AWKWARD, ("a", "b"), ("a/b", "\0")]:
            assert store.apply_one("acquire", policy, key, (1,)), (name, key)
            assert not store.apply_one("acquire", policy, key, (1,)), (name, key)


def test_names_stay_readable():
    assert encode_name("financialmodelingprep.com") == "financialmodelingprep.com"
    assert encode_name("ключ") == "ключ"
    assert encode_name("50%") == "50%25"


async def test_a_key_named_twice_in_a_call_is_charged_both_costs(open_store):
    store = open_store()
    policy = Policy("p", (Limit(5, "1d", "sliding_log"),))
    first = await store.apply_async("acquire", [(policy, "k", (2,)), (policy, "x", (1,)), (policy, "k", (2,))])
    assert [decision.remaining for decision in first] == [1, 4, 1]
    with pytest.raises(ConfigError, match="two limits are named '1d'"):  # of different algorithms
        store.apply("acquire", [(policy, "k", (1,)), (Policy("p", (Limit(6, "1d"),)), "k", (1,))])


async def test_sync_and_async_limiters_open_the_store(server, schema, open_store):
    open_store()
    url = f"{server.url}?schema={schema}&timeout=10"
    with Limiter(["2/1d", "500/1d sliding_log name=log"], store=url) as limiter:
        assert limiter.try_acquire("k").remaining == 1
    async with AsyncLimiter(["2/1d", "500/1d sliding_log name=log"], store=url) as limiter:
        assert (await limiter.try_acquire("k")).remaining == 0
        async with limiter.reserve("j") as reservation:
            await reservation.commit(0)
        assert (await limiter.usage("j"))["log"].used == 0
