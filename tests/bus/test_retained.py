"""Retained entries that another program wrote are skipped and counted, and do not prevent subscribers from joining."""

import asyncio
import itertools
import logging
import threading
from contextlib import suppress

import nats
import pytest
import redis
from nats.js.api import KeyValueConfig
from nats.js.errors import BadRequestError

from tests.servers.nats import NatsServer
from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tidegate import ConfigError
from tidegate.bus import Retain, open_bus
from tidegate.bus._redis import KEY_PREFIX
from tidegate.swarm import SwarmLimiter

subjects = (f"retained.{number}" for number in itertools.count())
FAR = b"99999999999999"  # an end in milliseconds, thousands of years ahead
HEX = b"good".hex()
SECRET = "a secret"  # noqa: S105 - of a test

IN_REDIS = {
    "no numbers": (b"k", b"garbage"),
    "empty": (b"k", b""),
    "JSON": (b"k", b'{"a": 1}'),
    "one number": (b"k", b"1"),
    "no message": (b"k", b"1 " + FAR),
    "a version that is no number": (b"k", b"x " + FAR + b" m"),
    "a negative version": (b"k", b"-1 " + FAR + b" m"),
    "a version beyond every number": (b"k", b"9" * 5000 + b" " + FAR + b" m"),
    "a version as a float": (b"k", b"1e999 " + FAR + b" m"),
    "not a number": (b"k", b"nan " + FAR + b" m"),
    "an end that is no number": (b"k", b"1 x m"),
    "an end beyond every number": (b"k", b"1 " + b"9" * 5000 + b" m"),
    "a key that is not UTF-8": (b"\xff\xfe", b"1 " + FAR + b" m"),
    "a long key": (b"k" * 100_000, b"1 " + FAR + b" m"),
    "huge": (b"k", b"1 " + FAR + b" " + b"x" * 50_000_000),
    "huge and malformed": (b"k", b"x" * 50_000_000),
    "spaces": (b"k", b"   "),
    "nothing but NUL": (b"\0", b"\0\0\0"),
    "digits of another script": (b"k", b"\xd9\xa1 \xd9\xa2 m"),
}
IN_NATS = {
    "no number": ("ff", b"garbage"),
    "empty": ("ff", b""),
    "JSON": ("ff", b'{"a": 1}'),
    "a version that is no number": ("6b", b"x m"),
    "a version beyond every number": ("6b", b"9" * 5000 + b" m"),
    "a version as a float": ("6b", b"1e999 m"),
    "a key that is not hexadecimal": ("hello", b"1 m"),
    "a key of odd length": ("abc", b"1 m"),
    "a key that is not UTF-8": ("fffe", b"1 m"),
    "a key of several words": ("6b.6b", b"1 m"),
    "huge": ("6b", b"1 " + b"x" * 900_000),
}


@pytest.fixture
def subject():
    return next(subjects)


def in_redis(server, subject, key, value):
    with redis.Redis(port=server.port) as client:
        client.hset(KEY_PREFIX + subject, key, value)


def in_nats(server, subject, key, value):
    """Put an entry into the bucket of a subject; one without bounds, made by somebody else, if there is none."""

    async def put():
        client = await nats.connect(server.url)
        bucket, stream = "tidegate-" + subject.replace(".", "-"), client.jetstream()
        with suppress(BadRequestError):  # there is one
            await stream.create_key_value(KeyValueConfig(bucket=bucket, history=1, ttl=86_400))
        if key:
            await stream.publish(f"$KV.{bucket}.{key}", value)
        await client.close()

    asyncio.run(put())


class NewSubscriber:
    """A new bus with a subscription that has received the retained messages."""

    def __init__(self, url, subject):
        self.bus = open_bus(url)
        self.events, self.versions, self._synced = [], None, threading.Event()
        self.bus.subscribe(subject, self.events.append, self._sync)
        assert self._synced.wait(20), self.bus.metrics()
        assert self.bus.wait(20)

    def _sync(self, versions):
        self.versions = versions
        self._synced.set()

    @property
    def heard(self):
        return [event.payload for event in self.events]


def check_that_all_works(url, subject, caplog, *, plant):
    """Retain something, plant an entry, and see that a new agent joins, hears, is heard and can retain."""
    with open_bus(url) as first:
        first.publish(subject, b"good", Retain("good", 5, 60))
        first.subscribe(subject, print)

        def retained():
            late = NewSubscriber(url, subject)
            late.bus.close()
            return late.versions.get("good")

        until(lambda: retained() == 5, "retaining")
        plant()
        with caplog.at_level(logging.WARNING):
            late = NewSubscriber(url, subject)
            until(lambda: late.heard, "what is retained")
            assert late.heard == [b"good"]
            assert late.versions == {"good": 5}
            assert late.bus.metrics()["malformed"] == 1
            late.bus.publish(subject, b"hello", Retain("good", 6, 60))
            until(lambda: b"hello" in late.heard, "a live message")
            until(lambda: retained() == 6, "retaining a newer one")
            assert late.bus.connected
            assert late.bus.metrics()["connections"] == 1
        said = [record for record in caplog.records if record.threadName.startswith(f"tidegate bus {late.bus.address}")]
        assert len([record for record in said if "malformed" in record.getMessage()]) <= 3  # once for each bus opened
        late.bus.close()


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def nats_server():
    with NatsServer() as server:
        yield server


@pytest.mark.parametrize("entry", IN_REDIS)
def test_a_malformed_entry_in_redis_is_skipped(valkey, subject, entry, caplog):
    check_that_all_works(valkey.url, subject, caplog, plant=lambda: in_redis(valkey, subject, *IN_REDIS[entry]))


@pytest.mark.parametrize("entry", IN_NATS)
def test_a_malformed_entry_in_nats_is_skipped(nats_server, subject, entry, caplog):
    in_nats(nats_server, subject, "", b"")
    check_that_all_works(nats_server.url, subject, caplog, plant=lambda: in_nats(nats_server, subject, *IN_NATS[entry]))


@pytest.mark.parametrize("entry", ["string", "list", "set", "stream"])
def test_a_redis_key_of_another_type_does_not_prevent_joining(valkey, subject, entry):
    with redis.Redis(port=valkey.port) as client:
        put = {
            "string": lambda key: client.set(key, "x"),
            "list": lambda key: client.rpush(key, "x"),
            "set": lambda key: client.sadd(key, "x"),
            "stream": lambda key: client.xadd(key, {"a": "b"}),
        }
        put[entry](KEY_PREFIX + subject)
    late = NewSubscriber(valkey.url, subject)
    late.bus.publish(subject, b"hello", Retain("good", 1, 60))
    until(lambda: late.heard == [b"hello"], "a live message")

    def retained():
        with open_bus(valkey.url):
            again = NewSubscriber(valkey.url, subject)
            again.bus.close()
            return again.versions

    until(lambda: retained() == {"good": 1}, "retaining in its place")
    assert late.bus.metrics()["connections"] == 1
    late.bus.close()


def test_a_malformed_message_under_the_key_of_a_valid_one_is_skipped(valkey, nats_server, subject):
    in_redis(valkey, subject, b"good", b"garbage")
    in_nats(nats_server, subject, HEX, b"garbage")
    for server in (valkey, nats_server):
        late = NewSubscriber(server.url, subject)
        late.bus.publish(subject, b"mine", Retain("good", 1, 60))
        until(lambda late=late: late.heard == [b"mine"], "a live message")

        def retained(server=server):
            again = NewSubscriber(server.url, subject)
            again.bus.close()
            return again.versions

        until(lambda retained=retained: retained() == {"good": 1}, "replacing the malformed one")
        late.bus.close()


def test_the_number_of_retained_entries_read_is_bounded(valkey, subject):
    """A hundred thousand entries of a kilobyte: what is read is bounded, and a new agent joins all the same."""
    with redis.Redis(port=valkey.port) as client:
        for start in range(0, 100_000, 10_000):
            entries = {b"k%d" % n: b"1 " + FAR + b" " + b"x" * 1000 for n in range(start, start + 10_000)}
            client.hset(KEY_PREFIX + subject, mapping=entries)
    late = NewSubscriber(valkey.url, subject)
    until(lambda: late.bus.metrics()["waiting"] == 0, "handling")
    assert len(late.events) <= 10_000
    assert late.bus.metrics()["malformed"] >= 90_000
    late.bus.close()
    with redis.Redis(port=valkey.port) as client:
        client.delete(KEY_PREFIX + subject)


def test_a_message_that_the_server_refuses_is_dropped(nats_server, subject, caplog):
    """A server with a smaller limit than ours: the message is lost, the bus is not."""
    with NatsServer() as server:
        server.kill()
        (server.folder / "small.conf").write_text("max_payload: 1000\n")
        server.command = lambda: [*NatsServer.command(server), "-c", str(server.folder / "small.conf")]  # type: ignore[method-assign]  # this one only
        server.start()
        with caplog.at_level(logging.WARNING):
            late = NewSubscriber(server.url, subject)
            late.bus.publish(subject, b"x" * 5000, Retain("key", 1, 60))
            late.bus.publish(subject, b"hello")
            until(lambda: late.heard == [b"hello"], "the next message")
        assert late.bus.metrics()["connections"] == 1
        assert late.bus.metrics()["dropped"] == 1
        assert caplog.text.count("refused a message") == 1
        late.bus.close()


@pytest.mark.parametrize("scheme", ["local://bounds", "nats", "redis"])
def test_messages_that_no_bus_can_carry_are_refused_immediately(scheme, valkey, nats_server):
    url = {"nats": nats_server.url, "redis": valkey.url}.get(scheme, scheme)
    with open_bus(url) as bus:
        with pytest.raises(ConfigError, match="payload: must be at most 1000000 bytes, not 1000001"):
            bus.publish("a.b", b"x" * 1_000_001)
        with pytest.raises(ConfigError, match="payload: must be at most 65536 bytes to be retained, not 65537"):
            bus.publish("a.b", b"x" * 65_537, Retain("key", 1, 60))
        for key in ("", "x" * 513, "\ud800", b"key", None):
            with pytest.raises(ConfigError, match="key: must be a string of 1 to 512 bytes in UTF-8"):
                bus.publish("a.b", b"x", Retain(key, 1, 60))
        for version in (0, -1, 2**53, 1.5, "1", None):
            with pytest.raises(ConfigError, match="version: must be an integer from 1 to"):
                bus.publish("a.b", b"x", Retain("key", version, 60))
        for ttl in (0, -1, float("nan"), float("inf"), "60", None):
            with pytest.raises(ConfigError, match="ttl: must be a positive number of seconds"):
                bus.publish("a.b", b"x", Retain("key", 1, ttl))
        with pytest.raises(ConfigError, match="subject: must be words joined by dots"):
            bus.publish("a" * 300, b"x")


def test_a_huge_message_is_dropped_on_arrival(valkey, subject):
    late = NewSubscriber(valkey.url, subject)
    with redis.Redis(port=valkey.port) as client:
        client.publish(subject, b"x" * 5_000_000)
        client.publish(subject, b"hello")
    until(lambda: late.heard == [b"hello"], "the next message")
    assert late.bus.metrics()["malformed"] == 1
    late.bus.close()


@pytest.mark.parametrize("kind", ["redis", "nats"])
def test_with_a_secret_unsigned_entries_are_ignored(kind, valkey, nats_server, caplog):
    """Entries that look retained, but hold what nobody signed: JSON of every bad shape."""
    server, plant = {"redis": (valkey, in_redis), "nats": (nats_server, in_nats)}[kind]
    payloads = [
        b"[" * 60_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"resource": "api", "agent_id": "x", "new_capacity": 1e999, "timestamp": "2026-01-01T00:00:00Z"}',
        b'{"resource": "api", "agent_id": "x", "new_capacity": NaN}',
        b'{"resource": "api", "agent_id": "x", "new_capacity": ' + b"9" * 10_000 + b"}",
        b'{"resource": "\\ud800", "agent_id": "x", "new_capacity": 1, "timestamp": "2026-01-01T00:00:00Z"}',
        b"\xff\xfe\x00",
        b"null",
        b'{"signature": ["x"]}',
        b'{"signature": "\\ud800"}',
    ]
    with open_bus(server.url) as bus, SwarmLimiter(bus=bus, agent_id="first", secret=SECRET) as first:
        first.set_capacity("api", 100, 60)
        first.announce_reduced("api", "received 429 response")
        for number, payload in enumerate(payloads):
            value = b"1 " + (FAR + b" " if kind == "redis" else b"") + payload
            plant(server, "ratelimit.capacity", f"{number:02}" if kind == "nats" else f"bad {number}", value)
        caplog.set_level(logging.WARNING)
        with open_bus(server.url) as other, SwarmLimiter(bus=other, agent_id="late", secret=SECRET) as late:
            late.set_capacity("api", 100, 60)
            until(lambda: late.get_capacity("api").total == 50, "what the first one announced")
            first.announce_reduced("api", "received 429 response")
            until(lambda: late.get_capacity("api").total == 25, "a live update")
            until(lambda: late.metrics()["malformed"] == len(payloads), "counting them")
            assert other.metrics()["failed"] == 0
            assert other.wait(20)
            assert other.metrics()["connections"] == 1
        assert "Traceback" not in caplog.text
