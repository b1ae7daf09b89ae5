"""verify_bus: the conformance test for buses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tidegate.bus._base import Bus, Event, Retain
from tidegate.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Mapping

OpenBus = Callable[[], Bus]
GUARANTEE_TIMEOUT: Final = 20.0  # seconds to wait for something that a bus guarantees
MESSAGE_COUNT: Final = 300


def verify_bus(
    open_bus: OpenBus,
    *,
    stop: Callable[[], object] | None = None,
    start: Callable[[], object] | None = None,
    seed: int = 0,
) -> None:
    """Test a bus; raise AssertionError with the violated guarantee.

    `open_bus()` returns a new bus that is connected to the same server each time, with no messages retained under the
    subjects `verify.SEED.…`; the buses are closed at the end. `stop()` stops the server and `start()` starts it again:
    if both are given, the guarantees for lost connections are tested too.
    """
    guarantees = GUARANTEES if stop is None or start is None else (*GUARANTEES, *restart_guarantees(stop, start))
    for number, guarantee in enumerate(guarantees):
        trial = BusTrial(open_bus, f"verify.{seed}.p{number}")
        try:
            guarantee(trial)
        except AssertionError as broken:
            name = guarantee.__name__.replace("_", " ")
            raise AssertionError(f"the bus violates a guarantee: {name}\n{guarantee.__doc__}\n{broken}") from None
        finally:
            trial.close()


class RecordingSubscriber:
    """A subscriber that records the messages it receives."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.events: list[Event] = []
        self.synced: list[Mapping[str, int]] = []

    def __call__(self, event: Event) -> None:
        """Record a message."""
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def sync(self, retained: Mapping[str, int]) -> None:
        """Record the retained versions."""
        with self._changed:
            self.synced.append(dict(retained))
            self._changed.notify_all()

    @property
    def payloads(self) -> list[bytes]:
        """The payloads received, in order."""
        return [event.payload for event in self.events]

    def wait_until(self, done: Callable[[RecordingSubscriber], bool], what: str) -> None:
        """Wait until a condition holds."""
        with self._changed:
            if not self._changed.wait_for(lambda: done(self), GUARANTEE_TIMEOUT):
                raise AssertionError(
                    f"{what}: not within {GUARANTEE_TIMEOUT:g} s; received {self.payloads[-5:]}, {self.synced}"
                )


class BusTrial:
    """The buses and the subject for the test of one guarantee."""

    def __init__(self, open_bus: OpenBus, subject: str) -> None:
        self._open = open_bus
        self._buses: list[Bus] = []
        self.subject = subject

    def bus(self) -> Bus:
        """Open another bus."""
        bus = self._open()
        self._buses.append(bus)
        assert bus.wait(GUARANTEE_TIMEOUT), "the bus does not connect"  # noqa: S101 - a failure of the test
        return bus

    def listen(self, bus: Bus, subject: str | None = None) -> RecordingSubscriber:
        """Subscribe, and wait until the retained messages were delivered."""
        subscriber = RecordingSubscriber()
        bus.subscribe(subject or self.subject, subscriber, subscriber.sync)
        subscriber.wait_until(lambda each: bool(each.synced), "synced is called")
        return subscriber

    def close(self) -> None:
        """Close all buses."""
        for bus in self._buses:
            bus.close()


def expect(found: object, wanted: object, what: str) -> None:
    """Raise AssertionError with the difference unless two values are equal."""
    if found != wanted:
        raise AssertionError(f"{what}: expected {wanted!r}, got {found!r}")


# ---- guarantees ------------------------------------------------------------------------------------------------------


def every_subscriber_gets_every_message_in_order(trial: BusTrial) -> None:
    """Each subscriber gets each message once, in order: on the same bus, on another, and twice on one."""
    first, second = trial.bus(), trial.bus()
    subscribers = [trial.listen(bus) for bus in (first, second, second)]
    sent = [str(number).encode() for number in range(MESSAGE_COUNT)]
    for payload in sent:
        first.publish(trial.subject, payload)
    for subscriber in subscribers:
        subscriber.wait_until(lambda subscriber: len(subscriber.events) >= MESSAGE_COUNT, "all messages arrive")
        expect(subscriber.payloads, sent, "the messages")
        expect({event.late for event in subscriber.events}, {False}, "whether new messages are late")
        expect({event.subject for event in subscriber.events}, {trial.subject}, "their subject")


def subjects_are_separate(trial: BusTrial) -> None:
    """Each subscriber gets only messages of its own subject."""
    bus = trial.bus()
    subscriber, other = trial.listen(bus), trial.listen(bus, trial.subject + "-other")
    bus.publish(trial.subject + "-other", b"other")
    bus.publish(trial.subject, b"mine")
    subscriber.wait_until(lambda subscriber: bool(subscriber.events), "a message arrives")
    other.wait_until(lambda subscriber: bool(subscriber.events), "a message arrives")
    expect((subscriber.payloads, other.payloads), ([b"mine"], [b"other"]), "the messages")


def payloads_are_delivered_unchanged(trial: BusTrial) -> None:
    """Payloads are opaque: empty, binary, large."""
    bus = trial.bus()
    subscriber = trial.listen(trial.bus())
    sent = [b"", bytes(range(256)), b"\r\n\x00 1 2 3", b"x" * 60_000]
    for number, payload in enumerate(sent):
        bus.publish(trial.subject, payload, Retain(f"key {number}\n\xe9/*>", 1, 60))
    subscriber.wait_until(lambda subscriber: len(subscriber.events) >= len(sent), "all messages arrive")
    expect(subscriber.payloads, sent, "the messages")
    last = f"key {len(sent) - 1}\n\xe9/*>"
    late = wait_until_retained(trial, last, 1)
    expect(sorted(late.payloads), sorted(sent), "the retained messages")


def a_closed_subscription_gets_nothing(trial: BusTrial) -> None:
    """After `close`, the handler is not called."""
    bus = trial.bus()
    subscriber, gone = trial.listen(bus), RecordingSubscriber()
    subscription = bus.subscribe(trial.subject, gone, gone.sync)
    gone.wait_until(lambda subscriber: bool(subscriber.synced), "synced is called")
    subscription.close()
    bus.publish(trial.subject, b"after")
    subscriber.wait_until(lambda subscriber: bool(subscriber.events), "a message arrives")
    expect(gone.payloads, [], "what the closed subscription got")


def a_failing_handler_does_not_affect_others(trial: BusTrial) -> None:
    """If a handler raises, the bus logs and counts the exception; other handlers and messages are not affected."""
    bus = trial.bus()

    def fail(event: Event) -> None:
        message = f"this handler fails on purpose, at {event.payload!r}"
        raise RuntimeError(message)

    bus.subscribe(trial.subject, fail)
    subscriber = trial.listen(bus)
    for payload in (b"1", b"2"):
        bus.publish(trial.subject, payload)
    subscriber.wait_until(lambda subscriber: subscriber.payloads == [b"1", b"2"], "both messages arrive")
    expect(bus.failed, 2, "the failures counted")


def a_handler_may_publish(trial: BusTrial) -> None:
    """Publish from within a handler: the message is delivered."""
    bus = trial.bus()
    echo = trial.listen(bus, trial.subject + "-echo")
    bus.subscribe(trial.subject, lambda event: bus.publish(trial.subject + "-echo", event.payload))
    trial.listen(bus)  # so that both subscriptions exist
    bus.publish(trial.subject, b"hello")
    echo.wait_until(lambda subscriber: subscriber.payloads == [b"hello"], "the echo arrives")


def a_late_subscriber_gets_retained_messages(trial: BusTrial) -> None:
    """Retained messages come first, marked late, the highest version of each key; `synced` gets the versions."""
    bus = trial.bus()
    subscriber = trial.listen(bus)
    for key, version, payload in (("a", 1, b"a1"), ("a", 3, b"a3"), ("a", 2, b"a2"), ("b", 7, b"b7")):
        bus.publish(trial.subject, payload, Retain(key, version, 60))
    bus.publish(trial.subject, b"not retained")
    subscriber.wait_until(lambda subscriber: len(subscriber.events) == 5, "all messages arrive")  # noqa: PLR2004 - those above
    late = wait_until_retained(trial, "b", 7)
    expect(late.synced[0], {"a": 3, "b": 7}, "the versions retained")
    expect(sorted(late.payloads), [b"a3", b"b7"], "what a late subscriber gets")
    expect({event.late for event in late.events}, {True}, "whether it is late")
    bus.publish(trial.subject, b"now")
    late.wait_until(lambda subscriber: subscriber.payloads[-1] == b"now", "a new message arrives")
    expect(late.events[-1], Event(trial.subject, b"now", late=False), "a new message")


def messages_published_as_late_are_marked_late(trial: BusTrial) -> None:
    """Every subscriber gets a message that was published as late marked late."""
    bus = trial.bus()
    subscriber = trial.listen(trial.bus())
    bus.publish(trial.subject, b"old", late=True)
    subscriber.wait_until(lambda subscriber: bool(subscriber.events), "the message arrives")
    expect(subscriber.events, [Event(trial.subject, b"old", late=True)], "the message")


def publishers_do_not_block(trial: BusTrial) -> None:
    """Many threads that publish at once do not block, and dropped messages are counted."""
    bus = trial.bus()
    subscriber = trial.listen(trial.bus())

    def publish() -> None:
        for _ in range(MESSAGE_COUNT // 10):
            bus.publish(trial.subject, b"message")

    threads = [threading.Thread(target=publish) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARANTEE_TIMEOUT)
    expect([thread.name for thread in threads if thread.is_alive()], [], "the publishers that still block")
    subscriber.wait_until(
        lambda subscriber: len(subscriber.events) >= MESSAGE_COUNT - bus.metrics()["dropped"],
        "every message that was not dropped arrives",
    )


def a_closed_bus_raises_closed(trial: BusTrial) -> None:
    """`close` may be called twice; afterwards publishing and subscribing raise Closed."""
    bus = trial.bus()
    bus.close()
    bus.close()
    for action in (lambda: bus.publish(trial.subject, b""), lambda: bus.subscribe(trial.subject, lambda _: None)):
        try:
            action()
        except Closed:
            continue
        raise AssertionError("a closed bus did not raise Closed")


GUARANTEES: Final = (
    every_subscriber_gets_every_message_in_order,
    subjects_are_separate,
    payloads_are_delivered_unchanged,
    a_closed_subscription_gets_nothing,
    a_failing_handler_does_not_affect_others,
    a_handler_may_publish,
    a_late_subscriber_gets_retained_messages,
    messages_published_as_late_are_marked_late,
    publishers_do_not_block,
    a_closed_bus_raises_closed,
)


def wait_until_retained(trial: BusTrial, key: str, version: int) -> RecordingSubscriber:
    """Subscribe repeatedly until a message is retained: the server may store it after delivering it."""
    for _ in range(100):
        bus = trial.bus()
        subscriber = trial.listen(bus)
        if subscriber.synced[0].get(key) == version:
            subscriber.wait_until(
                lambda subscriber: len(subscriber.events) >= len(subscriber.synced[0]), "the retained messages arrive"
            )
            return subscriber
        bus.close()
    raise AssertionError(f"{key!r} is not retained")


def restart_guarantees(
    stop: Callable[[], object], start: Callable[[], object]
) -> tuple[Callable[[BusTrial], None], ...]:
    """Return the tests of the guarantees for a server that stops and starts again."""

    def connections_recover_after_a_restart(trial: BusTrial) -> None:
        """After a restart, buses reconnect; subscribers get new messages, and the retained ones again."""
        bus, other = trial.bus(), trial.bus()
        subscriber = trial.listen(other)
        bus.publish(trial.subject, b"before")
        subscriber.wait_until(lambda subscriber: subscriber.payloads == [b"before"], "a message arrives")
        for number in range(2):
            stop()
            wait_until_disconnected(bus, other)
            start()
            subscriber.wait_until(lambda sub, count=number + 2: len(sub.synced) >= count, "synced is called again")  # type: ignore[misc]  # bound at once
            expect(bus.wait(GUARANTEE_TIMEOUT) and "connected", "connected", "the publisher")
            payload = b"after %d" % number
            bus.publish(trial.subject, payload)
            subscriber.wait_until(lambda sub, payload=payload: payload in sub.payloads, "a new message arrives")  # type: ignore[misc]  # bound at once
        expect(other.metrics()["connections"], 3, "the connections counted")

    def messages_published_during_an_outage_are_delivered_later(trial: BusTrial) -> None:
        """Once reconnected, a retained message reaches every subscriber, marked late; publishing did not block."""
        bus, other = trial.bus(), trial.bus()
        subscriber = trial.listen(other)
        stop()
        wait_until_disconnected(bus, other)
        bus.publish(trial.subject, b"meanwhile", Retain("key", 1, 60))
        start()
        subscriber.wait_until(lambda subscriber: bool(subscriber.events), "the message arrives")
        expect(set(subscriber.events), {Event(trial.subject, b"meanwhile", late=True)}, "what arrived")

    return connections_recover_after_a_restart, messages_published_during_an_outage_are_delivered_later


def wait_until_disconnected(*buses: Bus) -> None:
    """Wait until the buses have noticed the lost connection."""
    waiting = threading.Event()
    for _ in range(round(GUARANTEE_TIMEOUT * 100)):
        if not any(bus.connected for bus in buses):
            return
        waiting.wait(0.01)
    raise AssertionError("the bus did not notice that its server stopped")
