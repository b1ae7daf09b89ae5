"""Keys in the server: every key expires, keys of one call share a slot, long logs are cheap."""

from __future__ import annotations

import asyncio
import threading
from struct import pack, unpack
from typing import TYPE_CHECKING

import pytest
import redis
from redis.crc import key_slot

from tests.servers.process import until
from tests.stores.redis.conftest import address_of
from tidegate import Limit, Limiter, Policy
from tidegate.core._bounds import SECOND
from tidegate.core._limit import PERIOD_UNITS
from tidegate.errors import StoreUnavailable
from tidegate.stores._base import Alternatives
from tidegate.stores._outage import open_guarded
from tidegate.stores._redis import RedisStore
from tidegate.stores._redis.protocol import FORMAT
from tidegate.stores._values import Collection, Write
from tidegate.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.valkey import ValkeyServer
    from tidegate import Decision
    from tidegate.stores._redis.address import Tag

ALGORITHMS = ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency")
MIXED = tuple(Limit(10, "1m", algorithm, name=algorithm) for algorithm in ALGORITHMS)
CALENDAR = Limit(10, "hour", "calendar_window")


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as opened:
        yield opened


def stored(client: redis.Redis) -> list[bytes]:
    """Return all keys."""
    return list(client.scan_iter())


def test_every_key_has_a_ttl_after_every_verb(server: ValkeyServer, client: redis.Redis) -> None:
    store = RedisStore(address_of(server))
    policy = Policy("p", (*MIXED, CALENDAR))
    for number, verb in enumerate(("acquire", "hold", "adjust", "peek", "reset", "acquire", "adjust")):
        store.apply(verb, [(policy, f"k{key}", (1 + number % 3,) * 6) for key in range(5)])
        for key in stored(client):
            left = client.pttl(key)
            assert 0 < left <= 3_600_000 + 2000, f"{key!r} after {verb}"
    assert len(stored(client)) == 5 * 3  # an entry, and a log for each of two limits
    store.apply("reset", [(policy, f"k{key}", (0,) * 6) for key in range(5)])
    assert stored(client) == []
    store.close()


def test_a_key_outlives_its_state_by_a_second_at_most(server: ValkeyServer, client: redis.Redis) -> None:
    store = RedisStore(address_of(server))
    for algorithm in ALGORITHMS:
        policy = Policy(algorithm, (Limit(10, "10s", algorithm),))
        [decision] = store.apply("acquire", ((policy, "k", (10,)),))
        for key in client.scan_iter(f"*{algorithm}*"):
            assert 0 <= client.pttl(key) / 1000 - decision.reset_after + 0.1 <= 1.2
    store.close()


def test_a_key_is_kept_until_the_window_of_an_earlier_limit_ends(server: ValkeyServer, client: redis.Redis) -> None:
    store = RedisStore(address_of(server))
    for period in ("1d", "1m"):
        store.apply("acquire", ((Policy("p", (Limit(100, period, "fixed_window", name="l"),)), "k", (1,)),))
    [key] = stored(client)
    assert 86_000_000 < client.pttl(key) <= 86_402_000  # what was used in that window stays used
    store.close()


def test_state_of_a_manual_clock_does_not_expire_in_real_time(server: ValkeyServer, client: redis.Redis) -> None:
    # A manual clock stands still while real time passes, which must not expire the state.
    with Limiter("1/10ms", store=RedisStore(address_of(server), clock=ManualClock(1_728_000_000))) as limiter:
        assert limiter.try_acquire("k")
        [key] = stored(client)
        assert client.pttl(key) > 600_000
        assert not limiter.try_acquire("k")
        limiter.store.clock.advance(0.01)  # type: ignore[attr-defined]  # a ManualClock
        assert limiter.try_acquire("k")
        limiter.store.close()


def test_keys_of_one_call_share_a_slot(server: ValkeyServer, client: redis.Redis) -> None:
    names = ["k", ("a", "b"), "{", "}", "{}", "a}b{c", "", ("", ""), "\udcff", "ключ"]
    store = RedisStore(address_of(server))
    for policy_name in ("p", "{}", "}", ""):
        policy = Policy(policy_name, MIXED)
        for key in names:
            client.flushall()
            store.apply("acquire", ((policy, key, (1,) * 5),))
            keys = stored(client)
            assert len(keys) == 3
            assert len({key_slot(k) for k in keys}) == 1
    store.close()


def test_a_log_of_a_hundred_thousand_entries_is_cheap(server: ValkeyServer, client: redis.Redis) -> None:
    day, now, count = PERIOD_UNITS["d"], 1_750_000_000_000_000, 100_000
    policy = Policy("log", (Limit(count, "1d", "sliding_log"),))
    store = RedisStore(address_of(server))

    def ask(at: int, cost: int = 1) -> Decision:
        return store.apply("acquire", ((policy, "k", (cost,)),), at)[0]

    ask(now)
    entry, log = sorted(stored(client), key=len)
    # Write the entries of the other 99,999 calls at once, one per microsecond.
    numbers = list(unpack("<10d", client.get(entry)))
    assert numbers[4:] == [0, 1, 0, now, now, 1]  # head, tail, base, first, last, total
    client.set(log, b"".join(pack("<2q", now + i, i + 1) for i in range(count)), keepttl=True)
    client.set(entry, pack("<10d", *numbers[:4], 0, count, 0, now, now + count - 1, count), keepttl=True)
    client.config_resetstat()
    assert ask(now + count).retry == day - count
    assert ask(now + count, 50_000).retry == day - count + 49_999
    assert ask(now + day + 49_000).remaining == 49_000
    assert ask(now + day + 80_000).remaining == 79_999
    assert server.calls("getrange") < 80  # bisections, not scans
    assert client.strlen(log) < 25_000 * 16  # old entries are removed
    assert client.strlen(entry) < 200
    store.close()


def test_a_correction_at_the_start_of_a_long_log_is_cheap(server: ValkeyServer, client: redis.Redis) -> None:
    now, count = 1_750_000_000_000_000, 50_000
    policy = Policy("log", (Limit(10**6, "1d", "sliding_log"),))
    store = RedisStore(address_of(server))
    store.apply("acquire", ((policy, "k", (3,)),), now)
    entry, log = sorted(stored(client), key=len)
    numbers = list(unpack("<10d", client.get(entry)))
    client.set(log, b"".join(pack("<2q", now + i, i + 3) for i in range(count)), keepttl=True)
    client.set(entry, pack("<10d", *numbers[:4], 0, count, 0, now, now + count - 1, count + 2), keepttl=True)
    client.config_resetstat()
    [decision] = store.apply("adjust", ((policy, "k", (-2,)),), now + count, now)
    assert decision.remaining == 10**6 - count
    assert client.get(log) == b"".join(pack("<2q", now + i, i + 1) for i in range(count))
    assert server.calls("getrange") < 60  # all following entries are read at once
    store.close()


def test_a_large_cost_is_one_entry(server: ValkeyServer, client: redis.Redis) -> None:
    with Limiter(Limit(10**9, "1h", "sliding_log"), store=RedisStore(address_of(server))) as limiter:
        limiter.try_acquire("k", cost=50_000)
        assert sum(client.strlen(key) for key in stored(client)) < 150
        limiter.store.close()


def test_an_evicted_log_counts_as_empty(server: ValkeyServer, client: redis.Redis) -> None:
    now = 1_750_000_000_000_000
    policy = Policy("log", (Limit(5, "1m", "sliding_log"),))
    store = RedisStore(address_of(server))
    for i in range(5):
        store.apply("acquire", ((policy, "k", (1,)),), now + i)
    client.delete(max(stored(client), key=len))
    [decision] = store.apply("acquire", ((policy, "k", (1,)),), now + 10)
    assert decision.allowed
    assert decision.remaining == 4
    store.close()


def test_closing_an_unused_store_in_a_thread(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server))
    thread = threading.Thread(target=store.close)
    thread.start()
    thread.join()


# ---- keys that cannot be used ----------------------------------------------------------------------------------------

LOGGED = Policy("p", (Limit(5, "1h", "sliding_log"),))
BUCKET = Policy("p", (Limit(1000, "1h"),))


@pytest.mark.parametrize("tag", ["key", "policy", "all"])
def test_no_key_is_that_of_the_log_of_another_key(server: ValkeyServer, client: redis.Redis, tag: Tag) -> None:
    store = RedisStore(address_of(server, hash_tag=tag))
    store.apply("acquire", ((LOGGED, "victim", (1,)),))
    entry, log = sorted(stored(client), key=len)
    start = {"key": b"/", "policy": b"/}", "all": b"/"}[tag]
    ends = b"}" if tag == "key" else b""
    for name in (log, log.replace(b"%l", b":")):  # ":" separated them in format 0
        hostile = name.partition(start)[2].decode()
        assert store.apply("acquire", ((LOGGED, hostile, (1,)),))[0].remaining == 4
        assert store.apply("acquire", ((LOGGED, hostile.replace("}", ""), (1,)),))[0].allowed
    assert entry.partition(start)[2] == b"victim" + ends
    assert store.apply("acquire", ((LOGGED, "victim", (1,)),))[0].remaining == 3
    store.close()


@pytest.mark.parametrize("tag", ["key", "policy", "all"])
def test_no_collection_is_that_of_the_ends_of_another(server: ValkeyServer, tag: Tag) -> None:
    store = RedisStore(address_of(server, hash_tag=tag))
    names = ("a", "a:ends", "a%e")
    collections = [Collection(name) for name in names] + [Collection("a", ("p", key)) for key in names]
    for number, collection in enumerate(collections):
        store.put_value(collection, "x", b"%d" % number, 10)
    for number, collection in enumerate(collections):
        assert {name: value.data for name, value in store.list_values(collection).items()} == {"x": b"%d" % number}
    store.close()


async def test_a_key_of_another_type_fails_only_its_own_call(server: ValkeyServer, client: redis.Redis) -> None:
    store = RedisStore(address_of(server, prefix="t"))
    await store.apply_async("peek", ((BUCKET, "k", (0,)),))
    client.lpush("t:{p/bad}", "1")
    keys = ("one", "two", "bad", "three", "four")
    scripts = store.metrics()["scripts"]
    calls = [store.apply_async("acquire", ((BUCKET, key, (1,)),)) for key in keys]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert store.metrics()["scripts"] == scripts + 1
    error = answers.pop(2)
    assert isinstance(error, StoreUnavailable)
    assert error.concerns_key
    assert "WRONGTYPE" in str(error)
    assert "set another prefix" in str(error)
    assert [answer[0].remaining for answer in answers] == [999] * 4  # type: ignore[index]  # decisions
    await store.close_async()


def test_nothing_is_charged_or_written_beside_a_key_that_cannot_be_used(
    server: ValkeyServer, client: redis.Redis
) -> None:
    store = RedisStore(address_of(server, prefix="t"))
    collection = Collection("c")
    store.put_value(collection, "a", b"1", 60)
    client.lpush("t:{p/bad}", "1")
    asks = ((BUCKET, "good", (1,)), (BUCKET, "bad", (1,)))
    with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
        store.apply("acquire", asks, writes=(Write(collection, "b", b"2", SECOND),))
    with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
        store.apply("acquire", Alternatives.of([(ask,) for ask in reversed(asks)]))
    assert store.apply("peek", ((BUCKET, "good", (0,)),))[0].used == [0]
    assert set(store.list_values(collection)) == {"a"}
    [key] = [key for key in stored(client) if b"%v/" in key and not key.endswith(b"%e")]
    client.hset(key, "a", "short")
    with pytest.raises(StoreUnavailable, match="delete the key"):
        store.list_values(collection)
    store.close()


@pytest.mark.parametrize(("count", "age"), [(-FORMAT, "an older"), (FORMAT, "a newer")])
def test_a_state_of_another_format_is_refused(server: ValkeyServer, client: redis.Redis, count: int, age: str) -> None:
    store = RedisStore(address_of(server))
    store.apply("acquire", ((LOGGED, "k", (1,)),))
    entry, _ = sorted(stored(client), key=len)
    first, *rest = unpack("<10d", client.get(entry))
    client.set(entry, pack("<10d", first + count, *rest), keepttl=True)
    with pytest.raises(StoreUnavailable, match=f"written by {age} tidegate: .*prefix"):
        store.apply("acquire", ((LOGGED, "k", (1,)),))
    store.close()


def test_a_key_that_cannot_be_used_is_no_outage(
    server: ValkeyServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    client.lpush("tidegate:{default/bad}", "1")
    with Limiter("5/1h", store=open_guarded(server.url + "?deadline=5s")) as limiter:
        for _ in range(3):
            denied = limiter.try_acquire("bad")
            assert (denied.allowed, denied.retry_after) == (False, 1.0)
            assert limiter.try_acquire("good")
        with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
            limiter.refund("bad")
        assert limiter.store.metrics()["losses"] == 0
        assert caplog.text.count("WRONGTYPE") == 1
        limiter.store.close()


def test_an_outage_that_began_at_a_key_that_cannot_be_used_ends(server: ValkeyServer, client: redis.Redis) -> None:
    client.lpush("tidegate:{default/bad}", "1")
    with Limiter("5/1h", store=open_guarded(server.url + "?deadline=5s")) as limiter:
        assert limiter.try_acquire("good")
        server.kill()
        assert not limiter.try_acquire("bad")
        assert limiter.store.unavailable
        server.start()
        client.lpush("tidegate:{default/bad}", "1")
        until(lambda: not limiter.store.unavailable, "the outage ends")
        assert limiter.try_acquire("good")
        limiter.store.close()


def test_keys_of_a_policy_that_shares_slots_are_in_the_slot_of_their_first_part(
    server: ValkeyServer, client: redis.Redis
) -> None:
    store = RedisStore(address_of(server))
    policy = Policy("runs", ("10/1h fixed_window", "10/1h sliding_log name=log"), shares_slot=True)
    values = Collection("runs", ("runs", "a/{b}"), listed=False)
    keys = [("a/{b}",), ("a/{b}", "c"), ("a/{b}", "c", "d/e")]
    asks = [(policy, key if len(key) > 1 else key[0], (1, 1)) for key in keys]
    assert store.apply("hold", asks, None, None, (Write(values, "x", b"1", SECOND, None),))[0]
    assert len(stored(client)) == 2 * 3 + 1
    assert len({key_slot(key) for key in stored(client)}) == 1
    other = Policy("runs", policy.limits)
    store.apply("hold", [(other, ("a/{b}", "c"), (1, 1))])
    unchanged = store.apply("peek", [(policy, key, (0, 0)) for _, key, _ in asks])[1]
    assert unchanged.used == [1, 1], "keys of a policy without shares_slot are other keys"
