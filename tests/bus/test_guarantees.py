"""Every bus keeps the guarantees of Bus, and verify_bus detects one that does not."""

import itertools
from contextlib import closing
from typing import ClassVar

import pytest

from tests.servers.process import until
from tidegate.bus import Retain, open_bus
from tidegate.bus._local import LocalBus
from tidegate.testing import verify_bus

numbers = itertools.count()


def test_the_local_bus_keeps_the_guarantees():
    verify_bus(lambda: open_bus("local://guarantees"))


def test_network_buses_keep_the_guarantees(server):
    verify_bus(lambda: open_bus(server.url), stop=server.kill, start=server.start)


def test_of_messages_with_one_version_the_first_is_retained(server):
    """Whatever the bus, so that a message which is sent again replaces nothing."""
    for url in ("local://one-version", server.url):
        with closing(open_bus(url)) as bus, closing(open_bus(url)) as other:
            bus.publish("one.version", b"first", Retain("k", 7, 60))
            bus.publish("one.version", b"second", Retain("k", 7, 60))
            bus.publish("one.version", b"last", Retain("another", 1, 60))
            until(lambda bus=bus: not bus.metrics().get("queued"), "sending")
            heard = []
            other.subscribe("one.version", lambda event, heard=heard: heard.append(event.payload))
            until(lambda heard=heard: len(heard) == 2, "both retained messages")
            assert sorted(heard) == [b"first", b"last"]


class Forgetful(LocalBus):
    def publish(self, subject, payload, retain=None, *, late=False):
        super().publish(subject, payload, None, late=late)


class Doubling(LocalBus):
    def publish(self, subject, payload, retain=None, *, late=False):
        super().publish(subject, payload, retain, late=late)
        super().publish(subject, payload, retain, late=late)


class Fresh(LocalBus):
    def publish(self, subject, payload, retain=None, *, late=False):
        super().publish(subject, payload, retain)


class Newest(LocalBus):
    def publish(self, subject, payload, retain=None, *, late=False):
        retain = None if retain is None else Retain(retain.key, next(numbers) + 1000, retain.ttl)
        super().publish(subject, payload, retain, late=late)


class Fragile(LocalBus):
    """An error of a handler is raised by `publish`."""

    raised: ClassVar = []

    def subscribe(self, subject, handler, synced=None):
        def told(event):
            try:
                handler(event)
            except Exception as error:
                self.raised.append(error)
                raise

        return super().subscribe(subject, told, synced)

    def publish(self, subject, payload, retain=None, *, late=False):
        super().publish(subject, payload, retain, late=late)
        if self.raised:
            raise self.raised.pop()


class NeverClosed(LocalBus):
    def _check(self):
        """Refuse nothing."""


@pytest.mark.parametrize(
    ("kind", "guarantee"),
    [
        (Forgetful, "payloads are delivered unchanged"),
        (Doubling, "every subscriber gets every message in order"),
        (Fresh, "messages published as late are marked late"),
        (Newest, "payloads are delivered unchanged|late subscriber"),
        (Fragile, "on purpose"),
        (NeverClosed, "a closed bus raises closed"),
    ],
)
def test_verify_bus_detects_a_broken_guarantee(kind, guarantee):
    with pytest.raises((AssertionError, RuntimeError), match=guarantee):
        verify_bus(lambda: kind(f"broken {kind.__name__}"))
