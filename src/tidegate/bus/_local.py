"""A bus within this process: `local://NAME`. All buses with the same name are connected."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote
from weakref import WeakValueDictionary

from tidegate._runtime.clock import Clock, SystemClock
from tidegate._runtime.fork import fork_safe
from tidegate.bus._base import (
    Bus,
    Event,
    Handler,
    Retain,
    Subscription,
    Synced,
    check_message,
    check_subject,
    closed_bus,
)
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_RETAINED: Final = 10_000  # messages per hub


class LocalHub:
    """Connects all buses of one name; deleted with the last of them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock  # of the first bus: expiry is measured by one clock
        self.lock: threading.Lock = fork_safe(threading.Lock())
        self.subscriptions: list[Subscription] = []
        self.retained: dict[tuple[str, str], tuple[int, int, bytes]] = {}  # version, end in steady time, message

    def retain(self, subject: str, payload: bytes, retain: Retain) -> None:
        """Retain a message, unless a newer version is retained."""
        now = self.clock.steady()
        with self.lock:
            self.retained = {place: kept for place, kept in self.retained.items() if kept[1] > now}
            kept = self.retained.pop((subject, retain.key), None)
            if kept is None or kept[0] < retain.version:
                kept = (retain.version, now + round(retain.ttl * SECOND), payload)
            self.retained[subject, retain.key] = kept
            while len(self.retained) > MAX_RETAINED:
                del self.retained[next(iter(self.retained))]

    def join(self, subscription: Subscription) -> tuple[dict[str, int], list[bytes]]:
        """Add a subscription; returns the versions and payloads retained before it."""
        now = self.clock.steady()
        with self.lock:
            self.subscriptions = [*self.subscriptions, subscription]
            kept = {
                key: value
                for (subject, key), value in self.retained.items()
                if subject == subscription.subject and value[1] > now
            }
        return {key: value[0] for key, value in kept.items()}, [value[2] for value in kept.values()]


HUBS: Final[WeakValueDictionary[str, LocalHub]] = WeakValueDictionary()
HUBS_LOCK: Final = fork_safe(threading.Lock())


class LocalBus(Bus):
    """Delivers within `publish`, on the publisher's thread."""

    def __init__(self, name: str = "", clock: Clock | None = None) -> None:
        """Join the hub of that name."""
        self.clock: Clock = clock or SystemClock()
        self.name = name
        with HUBS_LOCK:
            self._hub = HUBS.setdefault(name, LocalHub(self.clock))
        self._own: list[Subscription] = []
        self._closed = False
        self._published = 0
        self._received = 0

    def publish(self, subject: str, payload: bytes, retain: Retain | None = None, *, late: bool = False) -> None:
        """Call every handler of the subject."""
        self._check()
        check_message(payload, retain)
        event = Event(check_subject(subject), bytes(payload), late)
        self._published += 1
        if retain is not None:
            self._hub.retain(subject, event.payload, retain)
        for subscription in self._hub.subscriptions:
            if subscription.subject == subject:
                subscription.deliver(event)

    def subscribe(self, subject: str, handler: Handler, synced: Synced | None = None) -> Subscription:
        """Call a handler for each message, immediately for retained ones."""
        self._check()

        def counted(event: Event) -> None:
            self._received += 1
            handler(event)

        subscription = Subscription(self, check_subject(subject), counted, synced)
        self._own.append(subscription)
        versions: Mapping[str, int]
        versions, payloads = self._hub.join(subscription)
        for payload in payloads:
            subscription.deliver(Event(subject, payload, late=True))
        subscription.sync(versions)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        """Remove a subscription."""
        with self._hub.lock:
            self._hub.subscriptions = [other for other in self._hub.subscriptions if other is not subscription]
        self._own = [other for other in self._own if other is not subscription]

    @property
    def connected(self) -> bool:
        """Whether the bus is open."""
        return not self._closed

    def wait(self, seconds: float) -> bool:  # noqa: ARG002 - there is nothing to wait for
        """Return whether the bus is open."""
        return not self._closed

    def metrics(self) -> dict[str, int]:
        """Return counters of messages sent and received."""
        return {
            "published": self._published,
            "received": self._received,
            "dropped": 0,
            "failed": self.failed,
            "connections": 1,
            "retained": len(self._hub.retained),
        }

    def close(self) -> None:
        """Close this bus's subscriptions."""
        self._closed = True
        for subscription in list(self._own):
            subscription.close()

    def _check(self) -> None:
        if self._closed:
            raise closed_bus()


def open_local(url: str, clock: Clock | None) -> LocalBus:
    """Open the bus of a URL, whose host part is the name."""
    return LocalBus(unquote(url.partition(":")[2].removeprefix("//")), clock)
