"""Small values in Redis: one script with their charge, a TTL on every key, kept when a task is cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import redis

from tests.servers.valkey import ValkeyCluster
from tests.stores.redis.conftest import address_of
from tidegate import ConfigError, Limit, Policy, StoreUnavailable
from tidegate.core._bounds import SECOND
from tidegate.errors import CollectionFull, ValueConflict
from tidegate.stores._base import Alternatives
from tidegate.stores._redis import RedisStore
from tidegate.stores._redis.driver import key_slot
from tidegate.stores._values import MAX_BYTES, MAX_LISTED, MAX_WRITES, Collection, Value, Write
from tidegate.testing import verify_store
from tidegate.testing._value_guarantees import VALUE_GUARANTEES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.servers.valkey import ValkeyServer
    from tidegate.stores import Store
    from tidegate.stores._redis.address import Tag

HOUR = 3600 * SECOND
NOW = 1_750_000_000_000_000
POLICY = Policy("p", (Limit(10, "1h"), Limit(10, "1h", "sliding_log", name="log")))
CALENDAR = Policy("month", (Limit(10, "month", "calendar_window"),))
KEYS = ("k", ("a", "b/c"), "{", "}{", "a%v/", "\udcff", "")
LISTED = Collection("listed")
UNLISTED = Collection("unlisted", listed=False)


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as opened:
        yield opened


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as running:
        yield running


def open_cluster(cluster: ValkeyCluster, **options: object) -> RedisStore:
    hosts = tuple(("127.0.0.1", server.port) for server in cluster.servers)
    return RedisStore(address_of(cluster.servers[0], kind="cluster", hosts=hosts, **options))


def own_keys(store: RedisStore, client: redis.Redis) -> list[bytes]:
    """Return the keys of a store, without its marker."""
    keys = client.scan_iter(f"*{store.address.prefix}*")
    return sorted(keys)


# ---- one server ------------------------------------------------------------------------------------------------------


def test_a_charge_and_its_values_are_one_script(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server))
    store.get_value(LISTED, "warm")
    server.ask("CONFIG", "RESETSTAT")
    scripts = store.metrics()["scripts"]
    writes = (Write(LISTED, "a", b"1", HOUR, None), Write(UNLISTED, "b", b"2", HOUR, None), Write(LISTED, "c", None))
    assert store.apply("acquire", ((POLICY, "k", (1, 1)),), None, None, writes)[0].remaining == 9
    assert (store.metrics()["scripts"] - scripts, server.calls("fcall")) == (1, 1)
    assert {name: value.data for name, value in store.list_values(LISTED).items()} == {"a": b"1"}
    store.close()


def test_every_key_has_a_ttl_that_is_only_raised(server: ValkeyServer, client: redis.Redis) -> None:
    store = RedisStore(address_of(server))
    for ttl in (60, 3600, 1):
        store.put_value(LISTED, f"{ttl}", b"x", ttl)
        store.put_value(UNLISTED, f"{ttl}", b"x", ttl)
    left = {key: client.pttl(key) for key in own_keys(store, client)}
    assert len(left) == 5  # three strings, a hash and its ends
    assert all(0 < pttl <= 3_601_000 for pttl in left.values())
    assert min(left.values()) <= 2_000
    listed = store.protocol.value_keys(LISTED, "")
    assert [3_590_000 < left[key] <= 3_601_000 for key in listed] == [True, True]
    for name in ("60", "3600", "1"):
        store.delete_value(LISTED, name)
        store.delete_value(UNLISTED, name)
    assert own_keys(store, client) == []
    store.close()


def test_ended_values_are_removed_by_the_next_write(server: ValkeyServer, client: redis.Redis) -> None:
    store = RedisStore(address_of(server))
    values, ends = store.protocol.value_keys(LISTED, "")
    store.apply("acquire", (), NOW, None, [Write(LISTED, f"{number}", b"x", SECOND + number) for number in range(64)])
    store.put_value(LISTED, "other", b"x", 3600, now=NOW + SECOND + 10)  # eleven have ended
    assert (client.hlen(values), client.zcard(ends)) == (54, 54)
    store.close()


@pytest.mark.parametrize("evicted", [0, 1], ids=["values", "ends"])
def test_an_evicted_key_of_a_collection_is_repaired(server: ValkeyServer, client: redis.Redis, evicted: int) -> None:
    store = RedisStore(address_of(server))
    keys = store.protocol.value_keys(LISTED, "")
    store.apply("acquire", (), NOW, None, [Write(LISTED, f"{number}", b"x", SECOND) for number in range(60)])
    store.put_value(LISTED, "long", b"x", 60, now=NOW)
    client.delete(keys[evicted])
    store.put_value(LISTED, "new", b"y", 30, now=NOW + 2 * SECOND)
    live = {"new", "long"} if evicted else {"new"}
    assert set(store.list_values(LISTED, NOW + 2 * SECOND)) == live
    assert (client.hlen(keys[0]), client.zcard(keys[1])) == (len(live), len(live))
    assert all(client.pttl(key) > 0 for key in keys)
    store.close()


def test_a_full_collection_charges_nothing(store: RedisStore) -> None:
    for start in range(0, MAX_LISTED, MAX_WRITES):
        names = range(start, min(start + MAX_WRITES, MAX_LISTED))
        store.apply("acquire", (), NOW, None, [Write(LISTED, f"{name}", b"x", HOUR) for name in names])
    asks = ((POLICY, "k", (1, 1)),)
    with pytest.raises(CollectionFull) as caught:
        store.apply("acquire", asks, NOW, None, (Write(LISTED, "1", b"y", HOUR), Write(LISTED, "new", b"y", HOUR)))
    assert caught.value.write.name == "new"
    assert store.apply("peek", ((POLICY, "k", (0, 0)),), NOW)[0].remaining == 10
    assert store.get_value(LISTED, "1", NOW + 1).data == b"x"  # type: ignore[union-attr]  # it exists


def test_a_collection_of_large_values_is_listed_in_pages(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server))
    data = bytes(range(256)) * (MAX_BYTES // 256)
    for number in range(96):
        store.put_value(LISTED, f"{number}", data, 3600)
    scripts = store.metrics()["scripts"]
    found = store.list_values(LISTED)
    assert len(found) == 96
    assert {value.data for value in found.values()} == {data}
    assert store.metrics()["scripts"] - scripts >= 4  # a page is about 1 MiB at the most
    assert asyncio.run(list_in_task(store)) == found
    store.close()


async def list_in_task(store: RedisStore) -> object:
    return await store.list_values_async(LISTED)


def test_values_of_alternatives_are_written_with_the_one_that_is_charged(store: RedisStore) -> None:
    small = Policy("small", (Limit(1, "1h"),))
    asks = Alternatives.of([[(small, "k", (1,))], [(POLICY, "k", (1, 1))]])
    for number in range(12):
        write = Write(LISTED, f"{number}", b"x", HOUR, None)
        decisions = store.apply("acquire", asks, NOW, None, (write,))
        assert [decision.within_limits for decision in decisions] == [[True], [False, number < 11]][number > 0]
    assert sorted(map(int, store.list_values(LISTED, NOW))) == list(range(11))
    store.apply("reset", ((small, "k", (0,)),), NOW)
    with pytest.raises(ValueConflict):
        store.apply("acquire", asks, NOW, None, (Write(LISTED, "0", b"y", HOUR, None),))
    assert store.apply("peek", ((small, "k", (1,)),), NOW)[0].within_limits


async def test_calls_with_and_without_values_share_a_script(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server))
    await store.get_value_async(LISTED, "warm", NOW)
    server.ask("CONFIG", "RESETSTAT")
    asks = ((POLICY, "k", (1, 1)),)
    answers = await asyncio.gather(
        store.apply_async("acquire", asks, NOW, None, (Write(LISTED, "a", b"1" * 9, HOUR, None),)),
        store.apply_async("acquire", asks, NOW, None, (Write(LISTED, "a", b"2", HOUR, None),)),
        store.get_value_async(LISTED, "a", NOW),
        store.apply_async("acquire", asks, NOW),
        store.get_value_async(UNLISTED, "none", NOW),
        store.put_value_async(UNLISTED, "b", b"", 60, None, NOW),
        store.list_values_async(LISTED, NOW),
        store.apply_async("acquire", ((CALENDAR, "k", (1,)),), NOW, None, (Write(UNLISTED, "c", b"3", HOUR),)),
        store.get_value_async(UNLISTED, "b", NOW),
        return_exceptions=True,
    )
    assert server.calls("fcall") == 1
    first, conflict, found, plain, none, _, listed, calendar, empty = answers
    assert isinstance(conflict, ValueConflict)
    assert found == conflict.found == Value(b"1" * 9, NOW, NOW + HOUR)
    assert listed == {"a": found}
    assert [remaining_of(answer) for answer in (first, plain, calendar)] == [9, 8, 9]
    assert none is None
    assert empty == Value(b"", NOW, NOW + 60 * SECOND)
    await store.close_async()


def remaining_of(answer: object) -> int:
    assert isinstance(answer, list)
    return int(answer[0].remaining)


def test_a_missing_calendar_window_does_not_write_before_the_charge(server: ValkeyServer) -> None:
    # A state whose charge is in a window that the client does not send: the call is sent again with that window.
    store = RedisStore(address_of(server))
    later = NOW + 400 * 24 * HOUR
    store.apply("acquire", ((CALENDAR, "k", (1,)),), later)
    calls = store.metrics()["calls"]
    write = Write(UNLISTED, "a", b"1", 2 * HOUR, None)
    assert store.apply("acquire", ((CALENDAR, "k", (1,)),), NOW, None, (write,))[0].within_limits
    assert store.metrics()["calls"] - calls == 2
    assert store.get_value(UNLISTED, "a", NOW) is not None
    store.close()


@pytest.mark.parametrize("verb", ["acquire", "hold"])
async def test_a_cancelled_call_with_writes_keeps_its_charge_and_values(server: ValkeyServer, verb: str) -> None:
    store = RedisStore(address_of(server))
    await store.get_value_async(LISTED, "warm")
    with server.frozen():
        call = store.apply_async(verb, ((POLICY, "k", (4, 4)),), None, None, (Write(LISTED, "a", b"1", HOUR),))
        task = asyncio.ensure_future(call)
        sent = store.metrics()["scripts"] + 1
        while store.metrics()["scripts"] < sent:
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert (await store.get_value_async(LISTED, "a")) is not None
    assert (await store.apply_async("peek", ((POLICY, "k", (0, 0)),)))[0].remaining == 6
    await store.close_async()
    assert store.metrics()["refunded"] == 0


async def test_a_call_with_writes_that_is_cancelled_before_it_was_sent_is_made(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server))
    await store.get_value_async(LISTED, "warm")
    asks = ((POLICY, "k", (4, 4)),)
    writing = asyncio.ensure_future(store.apply_async("hold", asks, None, None, (Write(LISTED, "a", b"1", HOUR),)))
    reading = asyncio.ensure_future(store.get_value_async(LISTED, "a"))
    await asyncio.sleep(0)
    calls = store.metrics()["calls"]
    writing.cancel()
    reading.cancel()
    assert (await store.apply_async("peek", ((POLICY, "k", (0, 0)),)))[0].remaining == 6
    assert (await store.get_value_async(LISTED, "a")) is not None
    assert store.metrics()["calls"] - calls == 3  # the cancelled read was not sent
    await store.close_async()
    assert store.metrics()["refunded"] == 0


async def test_a_late_reply_to_a_call_with_writes_is_not_refunded(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server, timeout=0.05))
    await store.get_value_async(LISTED, "warm")
    with server.frozen(), pytest.raises(StoreUnavailable):
        await store.apply_async("hold", ((POLICY, "k", (4, 4)),), None, None, (Write(LISTED, "a", b"1", HOUR),))
    await store.close_async()
    again = RedisStore(store.address)
    assert again.get_value(LISTED, "a") is not None
    assert again.apply("peek", ((POLICY, "k", (0, 0)),))[0].remaining == 6
    assert store.metrics()["refunded"] == 0
    again.close()


def test_a_user_with_the_named_commands_can_use_all_of_it(server: ValkeyServer, client: redis.Redis) -> None:
    def open_with(*commands: str) -> RedisStore:
        allowed = [f"+{command}" for command in commands]
        client.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=allowed, reset=True)
        return RedisStore(address_of(server, username="limited", password="any"))  # noqa: S106 - the user has none

    store = open_with("fcall", "function|load", "time")
    with pytest.raises(StoreUnavailable, match="allow the user the commands") as caught:
        store.put_value(LISTED, "a", b"1", 60)
    store.close()
    named = str(caught.value).partition("the commands ")[2].partition(" on its keys")[0]
    verify_store(lambda: open_with(*named.replace(" and ", ", ").split(", ")), rounds=4)


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["key", "policy", "all"])
def test_values_have_the_slot_of_the_key_beside_them_and_never_its_name(store: RedisStore, tag: Tag) -> None:
    opened = RedisStore(replace(store.address, hash_tag=tag))
    names: set[bytes] = set()
    for policy_name in ("p", "%v/", "{}", "l/kit", "%v/l/kit"):
        policy = Policy(policy_name, POLICY.limits)
        for key in KEYS:
            encoded = opened.protocol.encode_policy(policy)
            own = [encoded.key(key), *[encoded.key(key) + log for log in encoded.logs]]
            for listed in (True, False):
                for name in ("a", "{", "a/b", "a%2Fb"):
                    found = opened.protocol.value_keys(Collection("kit", (policy_name, key), listed), name)
                    assert {key_slot(each) for each in found} == {key_slot(own[0])}
                    own += found if not listed or name == "a" else []
            assert len(set(own)) == len(own)
            assert not names & set(own)
            names |= set(own)
    opened.close()


# ---- a cluster -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", VALUE_GUARANTEES, ids=lambda guarantee: guarantee.__name__)
def test_values_on_a_cluster(cluster: ValkeyCluster, guarantee: Callable[[Store], None]) -> None:
    store = open_cluster(cluster)
    guarantee(store)
    store.close()


@pytest.mark.parametrize("tag", ["key", "policy", "all"])
@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_a_charge_and_a_value_beside_it_are_one_round_trip(cluster: ValkeyCluster, tag: Tag, *, tasks: bool) -> None:
    with asyncio.Runner() as runner:
        store = open_cluster(cluster, hash_tag=tag)
        for number in range(20):
            asks = ((POLICY, f"k{number}", (1, 1)),)
            collections = [Collection("open", ("p", f"k{number}"), listed) for listed in (True, False)]
            for step in range(2):
                writes = [Write(collection, "batch", b"%d" % step, HOUR) for collection in collections]
                server_calls = sum(server.calls("fcall") for server in cluster.servers[:3])
                if tasks:
                    runner.run(store.apply_async("acquire", asks, None, None, writes))
                else:
                    store.apply("acquire", asks, None, None, writes)
                if number and step:  # the first calls may have to send the source
                    assert sum(server.calls("fcall") for server in cluster.servers[:3]) - server_calls == 1
            for collection in collections:
                assert store.get_value(collection, "batch").data == b"1"  # type: ignore[union-attr]  # it exists
            assert store.apply("peek", ((POLICY, f"k{number}", (0, 0)),))[0].remaining == 8
        runner.run(store.close_async())


def test_values_in_another_slot_than_the_keys_are_refused(cluster: ValkeyCluster) -> None:
    store = open_cluster(cluster)
    asks = ((POLICY, "k", (1, 1)),)
    with pytest.raises(ConfigError, match="beside"):
        store.apply("acquire", asks, None, None, (Write(LISTED, "a", b"1", HOUR),))
    with pytest.raises(ConfigError, match="beside"):
        store.apply("acquire", (), None, None, [Write(UNLISTED, f"{name}", b"1", HOUR) for name in range(9)])
    with pytest.raises(ConfigError, match="hash_tag=all"):
        asyncio.run(store.apply_async("acquire", asks, None, None, (Write(LISTED, "a", b"1", HOUR),)))
    assert store.apply("peek", ((POLICY, "k", (0, 0)),))[0].remaining == 10
    assert store.list_values(LISTED) == {}
    store.close()


def test_unlisted_values_are_spread_over_the_servers(cluster: ValkeyCluster) -> None:
    store = open_cluster(cluster)
    for name in range(64):
        store.put_value(UNLISTED, f"{name}", b"1", 60)
    for server in cluster.servers[:3]:
        with redis.Redis(port=server.port) as client:
            found = own_keys(store, client)
            assert len(found) > 5
            assert all(client.pttl(key) > 0 for key in found)
    store.close()


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_values_follow_their_slot(*, tasks: bool) -> None:
    """A script is sent to the server that MOVED or ASK names."""
    with ValkeyCluster() as cluster, asyncio.Runner() as runner:
        store = open_cluster(cluster)

        def put(collection: Collection, data: bytes) -> None:
            if tasks:
                runner.run(store.put_value_async(collection, "a", data, 60))
            else:
                store.put_value(collection, "a", data, 60)

        for collection in (LISTED, UNLISTED):
            slot = key_slot(store.protocol.value_keys(collection, "a")[0])
            put(collection, b"1")
            store.delete_value(collection, "a")
            nodes = {server: server.ask("CLUSTER", "MYID").split(b"\r\n")[1].decode() for server in cluster.servers[:3]}
            source, target = cluster.servers[slot // 5462], cluster.servers[(slot // 5462 + 1) % 3]
            if collection is UNLISTED:  # one key, so that the importing server accepts it
                target.ask("CLUSTER", "SETSLOT", f"{slot}", "IMPORTING", nodes[source])
                source.ask("CLUSTER", "SETSLOT", f"{slot}", "MIGRATING", nodes[target])
                put(collection, b"2")
                assert keys_in(target, slot) == 1
                assert keys_in(source, slot) == 0
            for server in (target, source, *nodes):
                server.ask("CLUSTER", "SETSLOT", f"{slot}", "NODE", nodes[target])
            put(collection, b"3")
            assert keys_in(target, slot) == (2 if collection.listed else 1)
            assert store.get_value(collection, "a").data == b"3"  # type: ignore[union-attr]  # it exists
        runner.run(store.close_async())


def keys_in(server: ValkeyServer, slot: int) -> int:
    """Return the number of keys of a slot."""
    return int(server.ask("CLUSTER", "COUNTKEYSINSLOT", f"{slot}").strip(b":\r\n"))
