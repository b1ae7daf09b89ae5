"""verify_bus: prove that a bus keeps what a Bus promises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tidegate.bus.base import Bus, Event, Retain
from tidegate.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Mapping

OpenBus = Callable[[], Bus]
PROMISE_TIMEOUT: Final = 20.0  # seconds after which something that was promised did not happen
MANY_MESSAGES: Final = 300


def verify_bus(
    open_bus: OpenBus,
    *,
    stop: Callable[[], object] | None = None,
    start: Callable[[], object] | None = None,
    seed: int = 0,
) -> None:
    """Prove a bus, or raise AssertionError saying which promise it broke.

    `open_bus()` gives a bus that is connected to the same place each time, where nothing is retained under the subjects
    `verify.SEED.…` yet; those opened here are closed here. `stop()` ends the server and `start()` starts it again: then
    what is promised of lost connections is tried too.
    """
    promises = PROMISES if stop is None or start is None else (*PROMISES, *of_a_server(stop, start))
    for number, promise in enumerate(promises):
        stage = BusTrial(open_bus, f"verify.{seed}.p{number}")
        try:
            promise(stage)
        except AssertionError as broken:
            name = promise.__name__.replace("_", " ")
            raise AssertionError(f"the bus broke a promise: {name}\n{promise.__doc__}\n{broken}") from None
        finally:
            stage.close()


class RecordingSubscriber:
    """A subscriber that remembers what it heard."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.events: list[Event] = []
        self.synced: list[Mapping[str, int]] = []

    def __call__(self, event: Event) -> None:
        """Hear a message."""
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def sync(self, retained: Mapping[str, int]) -> None:
        """Hear what was retained."""
        with self._changed:
            self.synced.append(dict(retained))
            self._changed.notify_all()

    @property
    def heard(self) -> list[bytes]:
        """The messages, in order."""
        return [event.payload for event in self.events]

    def until(self, done: Callable[[RecordingSubscriber], bool], what: str) -> None:
        """Wait until something is so."""
        with self._changed:
            if not self._changed.wait_for(lambda: done(self), PROMISE_TIMEOUT):
                raise AssertionError(
                    f"{what}: not within {PROMISE_TIMEOUT:g} s; heard {self.heard[-5:]}, {self.synced}"
                )


class BusTrial:
    """The buses and subject of one trial."""

    def __init__(self, open_bus: OpenBus, subject: str) -> None:
        self._open = open_bus
        self._buses: list[Bus] = []
        self.subject = subject

    def bus(self) -> Bus:
        """Open another bus."""
        bus = self._open()
        self._buses.append(bus)
        assert bus.wait(PROMISE_TIMEOUT), "the bus does not connect"  # noqa: S101 - that is what a proof does
        return bus

    def listen(self, bus: Bus, subject: str | None = None) -> RecordingSubscriber:
        """Subscribe, and wait until what is retained was told."""
        ear = RecordingSubscriber()
        bus.subscribe(subject or self.subject, ear, ear.sync)
        ear.until(lambda ear: bool(ear.synced), "synced is called")
        return ear

    def close(self) -> None:
        """Close all."""
        for bus in self._buses:
            bus.close()


def expect(found: object, wanted: object, what: str) -> None:
    """Compare, or say what differs."""
    if found != wanted:
        raise AssertionError(f"{what}: expected {wanted!r}, got {found!r}")


# ---- promises --------------------------------------------------------------------------------------------------------


def everybody_hears_everything_in_order(stage: BusTrial) -> None:
    """Each subscriber gets each message once, in order: on the same bus, on another, and twice on one."""
    first, second = stage.bus(), stage.bus()
    ears = [stage.listen(bus) for bus in (first, second, second)]
    sent = [str(number).encode() for number in range(MANY_MESSAGES)]
    for payload in sent:
        first.publish(stage.subject, payload)
    for ear in ears:
        ear.until(lambda ear: len(ear.events) >= MANY_MESSAGES, "all messages arrive")
        expect(ear.heard, sent, "the messages")
        expect({event.late for event in ear.events}, {False}, "whether new messages are late")
        expect({event.subject for event in ear.events}, {stage.subject}, "their subject")


def subjects_do_not_mix(stage: BusTrial) -> None:
    """Each subscriber gets messages of its own subject only."""
    bus = stage.bus()
    ear, other = stage.listen(bus), stage.listen(bus, stage.subject + "-other")
    bus.publish(stage.subject + "-other", b"other")
    bus.publish(stage.subject, b"mine")
    ear.until(lambda ear: bool(ear.events), "a message arrives")
    other.until(lambda ear: bool(ear.events), "a message arrives")
    expect((ear.heard, other.heard), ([b"mine"], [b"other"]), "the messages")


def any_bytes_arrive_as_they_are(stage: BusTrial) -> None:
    """Payloads are opaque: empty, binary, large."""
    bus = stage.bus()
    ear = stage.listen(stage.bus())
    sent = [b"", bytes(range(256)), b"\r\n\x00 1 2 3", b"x" * 60_000]
    for number, payload in enumerate(sent):
        bus.publish(stage.subject, payload, Retain(f"key {number}\n\xe9/*>", 1, 60))
    ear.until(lambda ear: len(ear.events) >= len(sent), "all messages arrive")
    expect(ear.heard, sent, "the messages")
    last = f"key {len(sent) - 1}\n\xe9/*>"
    late = until_retained(stage, last, 1)
    expect(sorted(late.heard), sorted(sent), "the retained messages")


def a_closed_subscription_hears_nothing(stage: BusTrial) -> None:
    """After `close`, the handler is not called."""
    bus = stage.bus()
    ear, gone = stage.listen(bus), RecordingSubscriber()
    subscription = bus.subscribe(stage.subject, gone, gone.sync)
    gone.until(lambda ear: bool(ear.synced), "synced is called")
    subscription.close()
    bus.publish(stage.subject, b"after")
    ear.until(lambda ear: bool(ear.events), "a message arrives")
    expect(gone.heard, [], "what the closed one heard")


def a_handler_that_fails_harms_nobody(stage: BusTrial) -> None:
    """If a handler raises, that is logged and counted; others, and the next message, are delivered."""
    bus = stage.bus()

    def fail(event: Event) -> None:
        message = f"a handler that fails, on purpose, at {event.payload!r}"
        raise RuntimeError(message)

    bus.subscribe(stage.subject, fail)
    ear = stage.listen(bus)
    for payload in (b"1", b"2"):
        bus.publish(stage.subject, payload)
    ear.until(lambda ear: ear.heard == [b"1", b"2"], "both messages arrive")
    expect(bus.failed, 2, "the failures counted")


def a_handler_may_publish(stage: BusTrial) -> None:
    """Publish from within a handler: that works."""
    bus = stage.bus()
    echo = stage.listen(bus, stage.subject + "-echo")
    bus.subscribe(stage.subject, lambda event: bus.publish(stage.subject + "-echo", event.payload))
    stage.listen(bus)  # so that both subscriptions are there
    bus.publish(stage.subject, b"hello")
    echo.until(lambda ear: ear.heard == [b"hello"], "the echo arrives")


def a_late_joiner_hears_what_is_retained(stage: BusTrial) -> None:
    """Retained messages come first, marked late, of each key the highest version; `synced` tells the versions."""
    bus = stage.bus()
    ear = stage.listen(bus)
    for key, version, payload in (("a", 1, b"a1"), ("a", 3, b"a3"), ("a", 2, b"a2"), ("b", 7, b"b7")):
        bus.publish(stage.subject, payload, Retain(key, version, 60))
    bus.publish(stage.subject, b"not retained")
    ear.until(lambda ear: len(ear.events) == 5, "all messages arrive")  # noqa: PLR2004 - those above
    late = until_retained(stage, "b", 7)
    expect(late.synced[0], {"a": 3, "b": 7}, "the versions retained")
    expect(sorted(late.heard), [b"a3", b"b7"], "what a late joiner hears")
    expect({event.late for event in late.events}, {True}, "whether it is late")
    bus.publish(stage.subject, b"now")
    late.until(lambda ear: ear.heard[-1] == b"now", "a new message arrives")
    expect(late.events[-1], Event(stage.subject, b"now", late=False), "a new message")


def what_is_published_as_late_is_late(stage: BusTrial) -> None:
    """Everybody is told of a message that it is not new."""
    bus = stage.bus()
    ear = stage.listen(stage.bus())
    bus.publish(stage.subject, b"old", late=True)
    ear.until(lambda ear: bool(ear.events), "the message arrives")
    expect(ear.events, [Event(stage.subject, b"old", late=True)], "the message")


def publishers_do_not_wait(stage: BusTrial) -> None:
    """If many threads publish at once, nobody waits for ever, and what is dropped is counted."""
    bus = stage.bus()
    ear = stage.listen(stage.bus())

    def publish() -> None:
        for _ in range(MANY_MESSAGES // 10):
            bus.publish(stage.subject, b"crowd")

    threads = [threading.Thread(target=publish) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROMISE_TIMEOUT)
    expect([thread.name for thread in threads if thread.is_alive()], [], "the publishers that still wait")
    ear.until(
        lambda ear: len(ear.events) >= MANY_MESSAGES - bus.metrics()["dropped"], "all that was not dropped arrives"
    )


def a_closed_bus_refuses(stage: BusTrial) -> None:
    """`close` may be called twice; afterwards publishing and subscribing raise Closed."""
    bus = stage.bus()
    bus.close()
    bus.close()
    for action in (lambda: bus.publish(stage.subject, b""), lambda: bus.subscribe(stage.subject, lambda _: None)):
        try:
            action()
        except Closed:
            continue
        raise AssertionError("no Closed from a closed bus")


PROMISES: Final = (
    everybody_hears_everything_in_order,
    subjects_do_not_mix,
    any_bytes_arrive_as_they_are,
    a_closed_subscription_hears_nothing,
    a_handler_that_fails_harms_nobody,
    a_handler_may_publish,
    a_late_joiner_hears_what_is_retained,
    what_is_published_as_late_is_late,
    publishers_do_not_wait,
    a_closed_bus_refuses,
)


def until_retained(stage: BusTrial, key: str, version: int) -> RecordingSubscriber:
    """Join again and again until a message is found retained: the server may be told after the subscribers."""
    for _ in range(100):
        bus = stage.bus()
        ear = stage.listen(bus)
        if ear.synced[0].get(key) == version:
            ear.until(lambda ear: len(ear.events) >= len(ear.synced[0]), "what is retained arrives")
            return ear
        bus.close()
    raise AssertionError(f"{key!r} is not retained")


def of_a_server(stop: Callable[[], object], start: Callable[[], object]) -> tuple[Callable[[BusTrial], None], ...]:
    """Build the promises about a server that goes away and comes back."""

    def everything_goes_on_after_a_restart(stage: BusTrial) -> None:
        """Whoever was connected is connected again; subscribers hear new messages, and are told what is retained."""
        bus, other = stage.bus(), stage.bus()
        ear = stage.listen(other)
        bus.publish(stage.subject, b"before")
        ear.until(lambda ear: ear.heard == [b"before"], "a message arrives")
        for number in range(2):
            stop()
            until_disconnected(bus, other)
            start()
            ear.until(lambda ear, number=number: len(ear.synced) > number + 1, "what is retained is told again")  # type: ignore[misc]  # bound at once
            expect(bus.wait(PROMISE_TIMEOUT) and "connected", "connected", "the publisher")
            payload = b"after %d" % number
            bus.publish(stage.subject, payload)
            ear.until(lambda ear, payload=payload: payload in ear.heard, "a message after the restart arrives")  # type: ignore[misc]  # bound at once
        expect(other.metrics()["connections"], 3, "the connections counted")

    def what_was_published_meanwhile_is_learned_afterwards(stage: BusTrial) -> None:
        """Once there is a connection again, a message to be retained reaches everybody, marked late; nobody waited."""
        bus, other = stage.bus(), stage.bus()
        ear = stage.listen(other)
        stop()
        until_disconnected(bus, other)
        bus.publish(stage.subject, b"meanwhile", Retain("key", 1, 60))
        start()
        ear.until(lambda ear: bool(ear.events), "the message arrives")
        expect(set(ear.events), {Event(stage.subject, b"meanwhile", late=True)}, "what arrived")

    return everything_goes_on_after_a_restart, what_was_published_meanwhile_is_learned_afterwards


def until_disconnected(*buses: Bus) -> None:
    """Wait until the buses have noticed."""
    waiting = threading.Event()
    for _ in range(round(PROMISE_TIMEOUT * 100)):
        if not any(bus.connected for bus in buses):
            return
        waiting.wait(0.01)
    raise AssertionError("the bus does not notice that its server is gone")
