"""Shared by buses over a network: a connection that is retried without limit, and bounded queues.

One thread runs an event loop that sends and receives; another calls handlers, so that a slow handler delays neither the
connection nor a publisher. An adapter (nats.py, redis.py) provides a BusConnection, which is used until it is lost.

Messages published without a connection are sent later on `SUBJECT.late`, so that subscribers know that they may be old.
After each connect the retained messages are read again.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tidegate._runtime.background_thread import BackgroundThread
from tidegate._runtime.clock import Clock, SystemClock, TaskSignal, ThreadSignal
from tidegate._runtime.fork import abandon, at_fork, fork_safe
from tidegate._runtime.urls import redact_text
from tidegate.bus._base import (
    MAX_MESSAGE_BYTES,
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
from tidegate.bus._inbox import Inbox
from tidegate.bus._retained import RecalledMessages, RetainedMessage
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable

log: logging.Logger = logging.getLogger("tidegate.bus")
MAX_QUEUED_MESSAGES: Final = 10_000  # to send, and to handle
RECONNECT_PAUSE: Final = SECOND // 10  # between two attempts to connect
STEP_TIMEOUT: Final = 2.0  # seconds per operation on a server
CANCELLATION_TIMEOUT: Final = 0.1  # seconds after which a task that goes on is cancelled again
EXIT_TIMEOUT: Final = 2.0  # seconds for which the end of the process waits for a connection, and then for sending
LATE_SUFFIX: Final = ".late"
REREAD_RETAINED_AFTER: Final = (1, 3, 10)  # seconds after connecting


class UnsendableError(Exception):
    """A message that the server will never accept; the connection is intact."""


class BusConnection(Protocol):
    """One connection of an adapter. Each call may raise any exception of the driver: then the connection is closed."""

    async def listen(self, subject: str) -> None:
        """Pass messages of a subject to `arrived`, from the return of this call on."""

    async def send(self, subject: str, payload: bytes) -> None:
        """Send a message; raises UnsendableError if the server will never accept it."""

    async def retain(self, subject: str, payload: bytes, retain: Retain) -> bool:
        """Retain a message, unless a newer version is retained; returns whether the server could."""

    async def read_retained(self, subject: str, found: RecalledMessages) -> None:
        """Add the retained messages of a subject to `found`."""

    async def lost(self) -> None:
        """Wait until the connection is lost."""

    async def close(self) -> None:
        """Close the connection."""


Arrived = Callable[[str, bytes], None]


COUNTS: Final = ("published", "received", "dropped", "malformed", "unretained", "connections")


class _Message(NamedTuple):
    subject: str
    payload: bytes
    retain: Retain | None
    late: bool


class NetworkBus(Bus):
    """A bus over a network; see `Bus` for its guarantees."""

    def __init__(self, address: str, clock: Clock | None = None) -> None:
        """Start connecting to `address`, which is used in log messages."""
        self.clock: Clock = clock or SystemClock()
        self.address = address
        self._subscriptions: list[Subscription] = []
        self._closing = False
        self._starting = fork_safe(threading.Lock())
        name = f"tidegate bus {address}"
        self._connector = BackgroundThread(self._run, name)
        self._handling = BackgroundThread(self._run_handlers, f"{name} handlers")
        self._reset()
        at_fork(child=self._restart_after_fork)
        atexit.register(self._at_exit)
        self._start()

    def _reset(self) -> None:
        self._running = False
        self._outbox: deque[_Message] = deque()
        self._inbox = Inbox()
        self._lock = threading.Lock()
        self._new: list[Subscription] = []
        self._counts = dict.fromkeys(COUNTS, 0)
        self._connected = False
        self._waiting: set[ThreadSignal] = set()  # of callers that wait for a connection
        self._ready = ThreadSignal()
        self._loss_logged = False
        self._refusal_logged = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signal: TaskSignal | None = None
        self._listening: set[str] = set()  # on this connection
        self._checks: set[asyncio.Future[None]] = set()
        self._not_retained: dict[tuple[str, str], _Message] = {}
        self._recent: dict[int, None] = {}  # received messages, so that they are not delivered again as retained

    def _start(self) -> None:
        """Start the threads, unless they are running."""
        with self._starting:
            if self._running or self._closing:
                return
            if self._loop is None:  # else an exception ended an earlier attempt
                self._loop = asyncio.new_event_loop()
            self._connector.start()
            self._handling.start()
            self._ready.wait()
            self._running = True

    def _restart_after_fork(self) -> None:
        """Start new threads and a new connection in a forked process: now if there are subscriptions, else when needed.

        Messages queued before the fork are sent by the parent.
        """
        abandon(self._loop, self._checks, self._signal)
        self._reset()
        if self._subscriptions:
            self._start()

    @abstractmethod
    async def _connect(self, arrived: Arrived) -> BusConnection:
        """Connect, or raise."""

    # ---- for any thread ----------------------------------------------------------------------------------------------

    def publish(self, subject: str, payload: bytes, retain: Retain | None = None, *, late: bool = False) -> None:
        """Queue a message for sending."""
        if self._closing:
            raise closed_bus()
        check_message(payload, retain)
        message = _Message(check_subject(subject), bytes(payload), retain, late or not self._connected)
        if not self._running:
            self._start()
        with self._lock:
            self._counts["published"] += 1
            self._outbox.append(message)
            if len(self._outbox) > MAX_QUEUED_MESSAGES:
                self._outbox.popleft()
                self._counts["dropped"] += 1
        self._wake()

    def subscribe(self, subject: str, handler: Handler, synced: Synced | None = None) -> Subscription:
        """Call a handler on the bus's thread."""
        if self._closing:
            raise closed_bus()
        subscription = Subscription(self, check_subject(subject), handler, synced)
        if not self._running:
            self._start()
        with self._lock:
            self._subscriptions = [*self._subscriptions, subscription]
            self._new.append(subscription)
        self._wake()
        return subscription

    def forget(self, subscription: Subscription) -> None:
        """Remove a subscription."""
        with self._lock:
            self._subscriptions = [other for other in self._subscriptions if other is not subscription]

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._connected

    def wait(self, seconds: float) -> bool:
        """Wait for a connection."""
        if not self._running:
            self._start()
        signal = ThreadSignal()
        self._waiting.add(signal)  # before the check: `_report_connection` takes the opposite order
        try:
            return self._connected or signal.wait(seconds)
        finally:
            self._waiting.discard(signal)

    def _report_connection(self) -> None:
        """Wake the callers that wait for a connection."""
        self._connected = True
        for signal in tuple(self._waiting):
            signal.set()

    def metrics(self) -> dict[str, int]:
        """Return counters of messages sent, received, dropped, malformed and not retained, and of connections made."""
        with self._lock:
            return {**self._counts, "failed": self.failed, "queued": len(self._outbox), "waiting": len(self._inbox)}

    def close(self) -> None:
        """Send queued messages if connected, and end the threads."""
        atexit.unregister(self._at_exit)
        self._stop(STEP_TIMEOUT * 3, self._connector, self._handling)

    def _stop(self, timeout: float, *threads: BackgroundThread) -> None:
        self._closing = True
        self._wake()
        for thread in threads:
            thread.stop(timeout)

    def _at_exit(self) -> None:
        """Send queued messages at the end of a process that did not close the bus: it would end the threads abruptly.

        Handlers are not waited for.
        """
        if self._outbox:
            self.wait(EXIT_TIMEOUT)
        self._stop(EXIT_TIMEOUT, self._connector)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed: so is the bus
            if self._signal is not None and self._loop is not None:
                self._loop.call_soon_threadsafe(self._signal.set)

    # ---- the thread that calls handlers ------------------------------------------------------------------------------

    def _arrived(self, subject: str, payload: bytes) -> None:
        if len(payload) > MAX_MESSAGE_BYTES:
            self._skip(1, f"a message of {len(payload)} bytes")
            return
        late = subject.endswith(LATE_SUFFIX)
        event = Event(subject.removesuffix(LATE_SUFFIX), payload, late)
        self._recent[hash((event.subject, payload))] = None
        if len(self._recent) > MAX_QUEUED_MESSAGES:
            del self._recent[next(iter(self._recent))]
        for subscription in self._subscriptions:
            if subscription.subject == event.subject:
                self._enqueue(subscription.deliver, event)

    def _enqueue(self, deliver: Callable[..., None], item: object) -> None:
        self._counts["dropped"] += self._inbox.put(deliver, item, MAX_QUEUED_MESSAGES)

    def _run_handlers(self) -> None:
        while (delivery := self._inbox.take()) is not None:
            deliver, item = delivery
            self._counts["received"] += isinstance(item, Event)
            if not self._closing:
                deliver(item)

    # ---- the thread that talks to the server -------------------------------------------------------------------------

    def _run(self) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._stay_connected())
        finally:
            self._inbox.close()  # ends the other thread

    async def _stay_connected(self) -> None:
        self._signal = TaskSignal()
        self._ready.set()
        while not self._closing:
            connection = None
            try:
                async with asyncio.timeout(STEP_TIMEOUT * 2):
                    connection = await self._connect(self._arrived)
                await self._serve(connection)
            except Exception as error:  # noqa: BLE001 - on any exception of a driver, reconnect
                self._log_connection_loss(error)
            finally:
                self._connected = False
                if connection is not None:
                    await _close_quietly(connection.close)
            if not self._closing:
                await self._pause()

    async def _pause(self) -> None:
        clock = SystemClock()
        await clock.wait_async(TaskSignal(), clock.steady() + RECONNECT_PAUSE)

    def _log_connection_loss(self, error: Exception) -> None:
        if not self._loss_logged:
            self._loss_logged = True
            reason = redact_text(error) or type(error).__name__
            log.warning("cannot connect to the bus at %s, retrying: %s", self.address, reason)

    async def _serve(self, connection: BusConnection) -> None:
        """Use a connection until it is lost."""
        lost = asyncio.ensure_future(connection.lost())
        self._listening.clear()
        try:
            with self._lock:
                self._new.clear()
                subscriptions = self._subscriptions
            await self._join(connection, subscriptions)
            self._counts["connections"] += 1
            self._loss_logged = False
            self._report_connection()
            while not lost.done():
                assert self._signal is not None  # noqa: S101 - set before the first connection
                self._signal.clear()
                if await self._send_one(connection):
                    continue
                if self._closing:
                    return
                woken = asyncio.ensure_future(self._signal.wait(None))
                await asyncio.wait((lost, woken), return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
            await lost
        finally:
            await _cancel_all([lost, *self._checks])
            self._checks.clear()

    async def _send_one(self, connection: BusConnection) -> bool:
        """Handle new subscriptions or send one message; returns whether there was anything to do."""
        with self._lock:
            new, self._new = self._new, []
            message = self._outbox.popleft() if self._outbox and not new else None
        if new:
            await self._join(connection, new)
        if message is None:
            return bool(new)
        try:
            async with asyncio.timeout(STEP_TIMEOUT):
                # A new message is sent first. One that waited for a connection is retained first: other buses connect
                # at the same time, and those that miss the message itself must find it retained.
                if message.late:
                    await self._retain(connection, message)
                await connection.send(message.subject + LATE_SUFFIX * message.late, message.payload)
                if not message.late:
                    await self._retain(connection, message)
        except UnsendableError as error:
            self._drop(error)
        except Exception:
            with self._lock:
                self._outbox.appendleft(message._replace(late=True))
            raise
        return True

    def _drop(self, error: UnsendableError) -> None:
        """Drop a message that the server will never accept."""
        if not self._refusal_logged:
            self._refusal_logged = True
            log.warning("the bus at %s refused a message, which was dropped: %s", self.address, error)
        with self._lock:
            self._counts["dropped"] += 1

    async def _retain(self, connection: BusConnection, message: _Message) -> None:
        """Retain a message; if the server is not ready, try again at the next check."""
        retain = message.retain
        if retain is None or await connection.retain(message.subject, message.payload, retain):
            return
        place = message.subject, retain.key
        older = self._not_retained.pop(place, message)
        self._not_retained[place] = max(older, message, key=lambda each: each.retain.version if each.retain else 0)
        while len(self._not_retained) > MAX_QUEUED_MESSAGES:
            del self._not_retained[next(iter(self._not_retained))]

    async def _join(self, connection: BusConnection, subscriptions: list[Subscription]) -> None:
        """Subscribe to the subjects, then deliver retained messages."""
        for subject in dict.fromkeys(subscription.subject for subscription in subscriptions):
            async with asyncio.timeout(STEP_TIMEOUT * 2):
                if subject not in self._listening:
                    await connection.listen(subject)
                    await connection.listen(subject + LATE_SUFFIX)
                    self._listening.add(subject)
            kept = await self._read_retained(connection, subject)
            versions = {key: version for key, version, _ in kept}
            joined = [subscription for subscription in subscriptions if subscription.subject == subject]
            for subscription in joined:
                self._enqueue_retained(subscription, kept)
                self._enqueue(subscription.sync, dict(versions))
            self._checks.add(asyncio.ensure_future(self._reread_retained(connection, subject, joined, versions)))

    async def _reread_retained(
        self, connection: BusConnection, subject: str, joined: list[Subscription], versions: dict[str, int]
    ) -> None:
        """Read retained messages again later: one sent just before we subscribed may have been retained just after.

        A server that was just started may not have been ready to retain or list messages.
        """
        clock = SystemClock()
        for seconds in REREAD_RETAINED_AFTER:
            await clock.wait_async(TaskSignal(), clock.steady() + seconds * SECOND)
            for place in [place for place in self._not_retained if place[0] == subject]:
                await self._retain(connection, self._not_retained.pop(place))
            more = [
                kept
                for kept in await self._read_retained(connection, subject)
                if versions.get(kept.key, 0) < kept.version and hash((subject, kept.payload)) not in self._recent
            ]
            versions.update({kept.key: kept.version for kept in more})
            for subscription in joined:
                self._enqueue_retained(subscription, more)

    async def _read_retained(self, connection: BusConnection, subject: str) -> list[RetainedMessage]:
        """Read the retained messages; errors do not prevent subscribers from joining."""
        found = RecalledMessages()
        try:
            async with asyncio.timeout(STEP_TIMEOUT * 2):
                await connection.read_retained(subject, found)
        except Exception as error:  # noqa: BLE001 - if the connection is lost, `lost` reports it
            self._unretained(error)
        if found.skipped:
            self._skip(found.skipped, f"{found.skipped} retained entries of {subject}")
        return found.messages

    def _skip(self, count: int, item: str) -> None:
        """Count and skip messages that are malformed or too large."""
        with self._lock:
            first = not self._counts["malformed"]
            self._counts["malformed"] += count
        if first:
            message = "skipped a malformed or oversized message on the bus at %s: %s. Further ones are only counted"
            log.warning(message, self.address, item)

    def _enqueue_retained(self, subscription: Subscription, kept: Iterable[RetainedMessage]) -> None:
        for _, _, payload in kept:
            self._enqueue(subscription.deliver, Event(subscription.subject, payload, late=True))

    def _unretained(self, error: Exception) -> None:
        """Count and log that messages could not be retained or read."""
        if not self._counts["unretained"]:
            reason = redact_text(error) or type(error).__name__
            log.warning("the bus at %s cannot retain messages for later subscribers: %s", self.address, reason)
        self._counts["unretained"] += 1


async def _cancel_all(tasks: list[asyncio.Future[None]]) -> None:
    """Cancel until each task has ended: redis-py loses a cancellation that arrives when its connection fails."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCELLATION_TIMEOUT)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _close_quietly(close: Callable[[], Awaitable[None]]) -> None:
    with suppress(Exception):
        async with asyncio.timeout(STEP_TIMEOUT):
            await close()
