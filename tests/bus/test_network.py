"""Buses over a network: what happens when the server hangs, is cut off, lacks something or refuses."""

import asyncio
import itertools
import logging
import threading

import nats
import pytest

from tests.cases import cases
from tests.servers.nats import NatsServer
from tests.servers.process import until
from tests.servers.tcp_proxy import TcpProxy
from tests.servers.valkey import ValkeyServer
from tidegate import ConfigError
from tidegate.bus import Retain, open_bus
from tidegate.bus import _network as network
from tidegate.bus._nats import NatsConnection
from tidegate.bus._redis import KEY_PREFIX

subjects = (f"linked.{number}" for number in itertools.count())


@pytest.fixture
def subject():
    return next(subjects)


def joined(bus, subject):
    """Subscribe, and give what is heard, once the server knows."""
    heard, synced = [], threading.Event()
    bus.subscribe(subject, heard.append, lambda _: synced.set())
    assert synced.wait(20)
    return heard


def test_a_hanging_server_does_not_block_publishers(server, subject):
    """Publishing goes on into a queue; what was queued arrives once the server goes on."""
    with open_bus(server.url) as bus, open_bus(server.url) as other:
        heard = joined(other, subject)
        with server.frozen():
            for number in range(100):
                bus.publish(subject, b"%d" % number, Retain(str(number), 1, 60))
            until(lambda: not bus.connected and not other.connected, "noticing that the server hangs")
        until(lambda: {event.payload for event in heard} >= {b"%d" % n for n in range(100)}, "arrival")


def test_lost_connections_are_reestablished(server, subject):
    with TcpProxy(server.port) as proxy:
        url = f"{server.url.partition(':')[0]}://127.0.0.1:{proxy.port}"
        with open_bus(url) as bus:
            heard = joined(bus, subject)
            for cut in range(3):
                proxy.reset()
                until(lambda cut=cut: bus.metrics()["connections"] >= cut + 2, "a new connection", 10)
                assert bus.wait(20)
                bus.publish(subject, b"%d" % cut)
                until(lambda cut=cut: any(e.payload == b"%d" % cut for e in heard), "arrival")
            proxy.faults.blackhole = True
            until(lambda: not bus.connected, "noticing that nothing comes back")
            proxy.faults.blackhole = False
            assert bus.wait(20)


def test_a_slow_handler_does_not_block_publishers_and_its_queue_is_bounded(server, subject, monkeypatch):
    monkeypatch.setattr(network, "MAX_QUEUED_MESSAGES", 50)
    go_on, begun, heard = threading.Event(), threading.Event(), []

    def slow(event):
        begun.set()
        assert go_on.wait(20)
        heard.append(event.payload)

    with open_bus(server.url) as bus, open_bus(server.url) as other:
        synced = threading.Event()
        bus.subscribe(subject, slow, lambda _: synced.set())
        assert synced.wait(20)
        for number in range(200):
            other.publish(subject, b"%d" % number)
            until(lambda: other.metrics()["queued"] < 10, "sending")
        assert begun.wait(20)
        until(lambda: bus.metrics()["dropped"] == 149, "dropping what is too much")
        go_on.set()
        until(lambda: len(heard) == 51, "handling the rest")
        assert heard == [b"0", *(b"%d" % number for number in range(150, 200))]


@pytest.mark.parametrize("scheme", ["nats", "redis"])
def test_without_a_server_calls_return_immediately_and_the_queue_is_bounded(scheme, monkeypatch, caplog):
    monkeypatch.setattr(network, "MAX_QUEUED_MESSAGES", 10)
    with caplog.at_level(logging.WARNING), open_bus(f"{scheme}://someone:hidden@127.0.0.1:1") as bus:
        for _ in range(50):
            bus.publish("a.b", b"x")
        assert bus.wait(0.01) is False
        until(lambda: caplog.records, "a warning")
        metrics = bus.metrics()
        assert (metrics["published"], metrics["queued"], metrics["dropped"]) == (50, 10, 40)
        until(lambda: len(caplog.records) == 1, "no more than one")
    assert "cannot connect to the bus at" in caplog.text
    assert "hidden" not in caplog.text


def test_queued_messages_are_sent_in_order_after_connecting(subject):
    server = ValkeyServer()
    try:
        with open_bus(server.url) as bus, open_bus(server.url) as other:
            heard, synced = [], threading.Event()
            other.subscribe(subject, heard.append, lambda _: synced.set())
            server.start()
            assert synced.wait(20)
            until(lambda: bus.connected, "a connection")
            for number in range(20):
                bus.publish(subject, b"%d" % number)
            until(lambda: len(heard) == 20, "arrival")
            assert [event.payload for event in heard] == [b"%d" % number for number in range(20)]
    finally:
        server.close()


def test_nats_without_jetstream(subject, caplog):
    with NatsServer(jetstream=False) as server, open_bus(server.url) as bus, open_bus(server.url) as other:
        heard = joined(other, subject)
        with caplog.at_level(logging.WARNING):
            bus.publish(subject, b"one", Retain("key", 1, 60))
            bus.publish(subject, b"two", Retain("key", 2, 60))
            until(lambda: len(heard) == 2, "arrival")
            until(lambda: bus.metrics()["unretained"], "counting what is not retained")
        assert caplog.text.count("cannot retain messages for later subscribers") <= 2
        assert bus.connected
        assert joined(bus, subject) == []


def test_a_message_the_server_could_not_retain_is_retained_later(subject):
    """As after a start: it takes messages before it can keep any."""
    with NatsServer(jetstream=False) as server, open_bus(server.url) as bus:
        assert bus.wait(20)
        bus.publish(subject, b"one", Retain("key", 1, 60))
        bus.publish(subject, b"two", Retain("key", 2, 60))
        bus.subscribe(subject, print)  # who publishes also listens, as agents do
        until(lambda: bus.metrics()["unretained"] >= 2, "counting what is not retained")
        server.kill()
        server.jetstream = True
        server.start()
        with open_bus(server.url) as late:
            heard = joined(late, subject)
            until(lambda: heard, "the message")
            assert {(event.payload, event.late) for event in heard} == {(b"two", True)}


def test_all_redis_keys_have_a_ttl_and_expire(subject):
    def retained():
        with open_bus(server.url) as late:
            versions, synced = [], threading.Event()
            late.subscribe(subject, print, lambda received: (versions.append(received), synced.set()))
            assert synced.wait(20)
            return versions[0]

    with ValkeyServer() as server, open_bus(server.url) as bus:
        joined(bus, subject)
        key = KEY_PREFIX + subject
        bus.publish(subject, b"short", Retain("short", 1, 0.05))
        bus.publish(subject, b"long", Retain("long", 1, 500))
        until(lambda: server.ask("HEXISTS", key, "long") == b":1\r\n", "retaining")
        assert 400_000 < int(server.ask("PTTL", key)[1:]) <= 500_000
        until(lambda: retained() == {"long": 1}, "the end of the short one")
        bus.publish(subject, b"newer", Retain("long", 2, 1))
        until(lambda: b" newer" in server.ask("HGET", key, "long"), "replacing")
        assert server.ask("HEXISTS", key, "short") == b":0\r\n", "what ended is gone"
        assert int(server.ask("PTTL", key)[1:]) > 300_000, "no shorter than what else is retained"


def test_redis_with_a_password(subject):
    with ValkeyServer(None, "--requirepass", "hidden") as server:
        with open_bus(f"redis://:hidden@127.0.0.1:{server.port}") as bus:
            assert bus.wait(20)
        with open_bus(f"valkey://127.0.0.1:{server.port}") as bus:
            assert bus.wait(0.3) is False


@cases(
    ("url", "message"),
    [
        ("", "bus: must be a URL"),
        ("nats", "bus: must be a URL"),
        (None, "bus: must be a URL"),
        ("pigeon://x", "bus: unknown scheme pigeon://: expected one of local://, nats://"),
        ("redis://host:port", "bus: malformed URL 'redis://host:…'"),
        ("nats://host:port", "bus: malformed URL 'nats://host:…'"),
        ("redis://[", "bus: malformed URL"),
        ("redis://host/0?db=x", "bus: invalid Redis URL"),
        ("redis://one,two", "bus: a bus uses one Redis server"),
        ("nats://", "bus: each server must be a URL such as nats://host:4222"),
        ("nats:host", "bus: each server must be a URL such as nats://host:4222"),
        ("nats://one,", "bus: expected a URL"),
        ("nats://one:4222,two:4222", "bus: each server must be a URL such as nats://host:4222"),
    ],
)
def test_invalid_bus_urls_are_refused(url, message):
    with pytest.raises(ConfigError, match=message):
        open_bus(url)


@cases("subject", ["", ".", "a..b", "a b", "a.*", ">", "ä", "a.", None, 5])
def test_invalid_subjects_are_refused(subject):
    with open_bus("local://subjects") as bus:
        with pytest.raises(ConfigError, match="subject: must be words joined by dots"):
            bus.publish(subject, b"")
        with pytest.raises(ConfigError, match="subject: must be words joined by dots"):
            bus.subscribe(subject, print)


async def test_a_flush_that_is_cancelled_leaves_the_connection_usable(caplog):
    """A bus cancels its ping when it is closed; nats-py logged a traceback if the response was on its way."""
    with NatsServer() as server:
        client = await nats.connect(server.url)
        connection = NatsConnection(client, lambda *_: None, lambda _: None)
        flushing = asyncio.create_task(connection.flush())
        for _ in range(5):  # the ping is sent, and its response not yet read
            await asyncio.sleep(0)
        flushing.cancel()
        await connection.flush()
        assert flushing.cancelled()
        await connection.close()
    assert [record.message for record in caplog.records] == []
