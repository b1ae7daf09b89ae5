"""A bus through NATS: core publish and subscribe, and one JetStream key-value bucket of retained messages per subject.

A server without JetStream works too, without retained messages (a warning is logged).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.clock import SystemClock, TaskSignal
from tidegate._runtime.urls import redact, server_url, split_hosts
from tidegate.bus._network import STEP_TIMEOUT, NetworkBus, UnsendableError
from tidegate.bus._retained import MAX_RECALLED_BYTES, MAX_RETAINED_BYTES, VERSION_DIGITS, read_version
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError

try:
    import nats
    from nats.errors import Error as NatsError
    from nats.errors import MaxPayloadError
    from nats.js.api import KeyValueConfig
    from nats.js.errors import BadRequestError, KeyNotFoundError, KeyWrongLastSequenceError
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("nats:// needs nats-py: pip install 'tidegate[nats]'", field="bus") from _error

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.kv import KeyValue

    from tidegate._runtime.clock import Clock
    from tidegate.bus._base import Retain
    from tidegate.bus._network import Arrived
    from tidegate.bus._retained import RecalledMessages

PORT: Final = 4222
SCHEMES: Final = ("nats", "tls", "ws", "wss")
PING_INTERVAL: Final = SECOND  # between two checks of an idle connection
DAY_SECONDS: Final = 86_400.0
# The server refuses larger values; an existing bucket keeps its own maximum.
MAX_VALUE_BYTES: Final = MAX_RETAINED_BYTES + VERSION_DIGITS + 1
MAX_BUCKET_BYTES: Final = 4 * MAX_RECALLED_BYTES
MAX_REPLACE_ATTEMPTS: Final = 5  # if others replace a retained message at the same time


class NatsConnection:
    """One connection."""

    def __init__(self, client: Client, arrived: Arrived, unretained: Callable[[Exception], None]) -> None:
        """Wrap a connected client."""
        self._client = client
        self._arrived = arrived
        self._unretained = unretained
        self._buckets: dict[str, KeyValue] = {}
        self._gone = TaskSignal()

    async def listen(self, subject: str) -> None:
        """Subscribe, and wait until the server has processed it."""

        async def arrived(message: Msg) -> None:
            self._arrived(message.subject, message.data)

        await self._client.subscribe(subject, cb=arrived)
        await self.flush()

    async def send(self, subject: str, payload: bytes) -> None:
        """Publish."""
        if not self._client.is_connected:  # else the client would send it later, as if it were new
            raise ConnectionError("the connection is lost")
        try:
            await self._client.publish(subject, payload)
        except MaxPayloadError:
            message = f"{len(payload)} bytes exceed the server's max_payload of {self._client.max_payload}"
            raise UnsendableError(message) from None

    async def retain(self, subject: str, payload: bytes, retain: Retain) -> bool:
        """Put the message into the subject's bucket, unless a newer version is there."""
        bucket = await self._bucket(subject)
        if bucket is None:
            return False
        key, value = retain.key.encode().hex(), b"%d %s" % (retain.version, payload)
        try:
            for _ in range(MAX_REPLACE_ATTEMPTS):
                if await self._replace(bucket, key, value, retain.version):
                    return True
        except (NatsError, TimeoutError) as error:
            if not self._client.is_connected:
                raise
            self._unretained(error)
        return False

    @staticmethod
    async def _replace(bucket: KeyValue, key: str, value: bytes, version: int) -> bool:
        try:
            entry = await bucket.get(key)
        except KeyNotFoundError:
            entry = None
        try:
            if entry is None:
                await bucket.create(key, value)
            elif read_version((entry.value or b"").partition(b" ")[0]) < version:
                await bucket.update(key, value, last=entry.revision)
        except KeyWrongLastSequenceError:
            return False
        return True

    async def read_retained(self, subject: str, found: RecalledMessages) -> None:
        """Read the subject's bucket."""
        bucket = await self._bucket(subject)
        if bucket is None:
            return
        watcher: Any = await bucket.watchall(ignore_deletes=True)
        try:
            while not found.full and (entry := await watcher.updates(timeout=STEP_TIMEOUT)) is not None:
                version, _, payload = (entry.value or b"").partition(b" ")
                found.add(_key(entry.key), version, payload)
        finally:
            await watcher.stop()

    async def _bucket(self, subject: str) -> KeyValue | None:
        """Open the bucket of a subject; None if the server has no JetStream, or is not ready yet."""
        if subject not in self._buckets:
            name = "tidegate-" + subject.replace(".", "-")
            stream = self._client.jetstream(timeout=STEP_TIMEOUT)
            try:
                try:
                    bucket = await stream.create_key_value(
                        KeyValueConfig(
                            bucket=name,
                            history=1,
                            ttl=DAY_SECONDS,
                            max_value_size=MAX_VALUE_BYTES,
                            max_bytes=MAX_BUCKET_BYTES,
                        )
                    )
                except BadRequestError:  # a bucket with other settings exists
                    bucket = await stream.key_value(name)
            except (NatsError, TimeoutError) as error:
                if not self._client.is_connected:
                    raise
                self._unretained(error)
                return None
            self._buckets[subject] = bucket
        return self._buckets[subject]

    async def flush(self) -> None:
        """Wait until the server has processed everything so far.

        If this is cancelled, the flush goes on: nats-py logs an error and stops reading if the response to a cancelled
        flush arrives.
        """
        flushing = asyncio.ensure_future(self._client.flush(round(STEP_TIMEOUT)))
        flushing.add_done_callback(lambda task: task.cancelled() or task.exception())  # else asyncio would log it
        await asyncio.shield(flushing)

    async def lost(self) -> None:
        """Ping the server every second until the connection is lost; the client does not report every loss."""
        clock = SystemClock()
        while not self._gone.is_set() and self._client.is_connected:
            await clock.wait_async(self._gone, clock.steady() + PING_INTERVAL)
            if not self._gone.is_set():
                await self.flush()
        raise ConnectionError("the connection is lost")

    def end(self) -> None:
        """Record that the client has disconnected."""
        self._gone.set()

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()


class NatsBus(NetworkBus):
    """A bus through a NATS server, or a cluster of them (their URLs joined by commas)."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        """Start connecting."""
        self._servers = [part.strip() for part in url.split(",")]
        super().__init__(",".join(_display_url(server) for server in self._servers), clock)

    async def _connect(self, arrived: Arrived) -> NatsConnection:
        connections: list[NatsConnection] = []

        async def ended() -> None:
            for connection in connections:
                connection.end()

        async def ignored(_error: Exception) -> None:
            """Ignore errors of the client: the bus reconnects, and logs each loss once."""

        # The client's own reconnecting would send buffered messages as if they were new.
        settings: dict[str, Any] = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
        client = await nats.connect(
            self._servers,
            name="tidegate",
            connect_timeout=1,
            ping_interval=1,
            max_outstanding_pings=2,
            error_cb=ignored,
            disconnected_cb=ended,
            closed_cb=ended,
            **settings,
        )
        connections.append(NatsConnection(client, arrived, self._unretained))
        if not client.is_connected:
            await ended()
        return connections[0]


def _display_url(url: str) -> str:
    """Return the URL of a server without user and password."""
    parts = server_url(url, "bus")
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ConfigError(f"each server must be a URL such as nats://host:{PORT}, not {redact(url)!r}", field="bus")
    ((host, port),) = split_hosts(url, parts.netloc, "bus")
    return f"{parts.scheme}://{host}:{port or PORT}"


def _key(text: str) -> bytes:
    """Decode the key of an entry; empty if it is invalid."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def open_nats(url: str, clock: Clock | None) -> NatsBus:
    """Open a bus through the server of a URL."""
    return NatsBus(url, clock)
