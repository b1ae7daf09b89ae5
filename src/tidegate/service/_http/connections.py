"""Bounds the open connections of one process: their number, and how long a client may keep one waiting.

Time is counted in ticks of one timer, not read from a clock for each request. A connection has a number of ticks left.
Each tick subtracts one, and a connection without ticks expires. So if the event loop was blocked for a while, clients
whose bytes are still unread do not expire.

A connection is *waiting* while no request on it is being handled: the client is silent, is still sending the head of a
request, or is idle between two requests. If there are too many connections, the one that has waited longest is closed.
So connections without requests never block those with requests. Active requests can only fill
`connections_for_requests` of the connections; the rest is reserved for health checks, metrics and admin requests.
"""

from __future__ import annotations

import asyncio
import logging
from math import ceil
from typing import Final, Protocol

from tidegate.service._config.values import MIN_CONNECTIONS

log: logging.Logger = logging.getLogger("tidegate.service")

NEVER_TICKS: Final = 2**62  # ticks
MIN_TICKS: Final = 4  # in the shorter of the two timeouts
MAX_TICK: Final = 1.0  # seconds
RESERVED_CONNECTIONS: Final = 32  # for health, metrics and admin
BACKLOG: Final = 1024  # connections that the system holds until they are accepted
OTHER_DESCRIPTORS: Final = 128  # files, stores, pipes
REPORT_TICKS: Final = 30  # between two log lines about closed connections


class BoundedConnection(Protocol):
    """The interface of a connection."""

    ticks_left: int

    def expire(self) -> None:
        """Close it or add ticks: its client took too long."""

    def drop(self) -> None:
        """Close it at once."""

    def shutdown(self) -> None:
        """Close it after the active requests."""


class Connections:
    """The open connections of one process."""

    def __init__(self, max_connections: int, read_timeout: float, idle_timeout: float) -> None:
        """Allow at most `max_connections`, and these timeouts in seconds."""
        self.max_connections = max_connections
        self.read_timeout = read_timeout
        self.tick_seconds: float = min(MAX_TICK, read_timeout / MIN_TICKS, idle_timeout / MIN_TICKS)
        self.read_ticks: int = ceil(read_timeout / self.tick_seconds)
        self.idle_ticks: int = ceil(idle_timeout / self.tick_seconds)
        self.none_open: asyncio.Event = asyncio.Event()
        self.none_open.set()
        self._open: set[BoundedConnection] = set()
        self._waiting: dict[BoundedConnection, None] = {}  # in the order in which they began to wait
        self._made_room = 0  # connections closed to make room, since the last report
        self._since_report = REPORT_TICKS

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def add(self, connection: BoundedConnection) -> None:
        """Add a new connection; if there are too many, close the one that has waited longest, which may be this one."""
        self._open.add(connection)
        self.none_open.clear()
        self._waiting[connection] = None
        if len(self._open) > self.max_connections:
            oldest = next(iter(self._waiting))
            self.remove(oldest)
            self._made_room += 1
            oldest.drop()

    def remove(self, connection: BoundedConnection) -> None:
        """Remove a connection, if it is there."""
        self._waiting.pop(connection, None)
        self._open.discard(connection)
        if not self._open:
            self.none_open.set()

    def begin_request(self, connection: BoundedConnection) -> None:
        """Record that a request on this connection is being handled."""
        self._waiting.pop(connection, None)

    def begin_wait(self, connection: BoundedConnection) -> None:
        """Record that this connection waits for its client."""
        if connection in self._open:
            self._waiting.setdefault(connection)

    def renew_wait(self, connection: BoundedConnection) -> None:
        """Record that a request was handled at once: from now on, the connection waits for its client again."""
        if self._waiting.pop(connection, connection) is None:
            self._waiting[connection] = None

    def tick(self) -> None:
        """Subtract one tick from each connection, and expire those that have none left."""
        late = []
        for connection in self._open:
            connection.ticks_left -= 1
            if connection.ticks_left < 0:
                late.append(connection)
        for connection in late:
            try:
                connection.expire()
            except Exception:
                log.exception("could not close a connection; it no longer counts towards max_connections")
                self.remove(connection)
        self._report()

    def _report(self) -> None:
        """Log, at most every REPORT_TICKS, that connections were closed because there were too many."""
        self._since_report += 1
        if self._made_room and self._since_report > REPORT_TICKS:
            log.warning(
                "closed %d idle or incomplete connections: max_connections (%d) was reached",
                self._made_room,
                self.max_connections,
            )
            self._made_room = self._since_report = 0

    def snapshot(self) -> list[BoundedConnection]:
        """Return a list of the open connections."""
        return list(self._open)


def fit_connections(max_connections: int, descriptors: int | None, addresses: int = 1) -> int:
    """Lower a number of connections to fit the limit of file descriptors (None: no limit).

    Each address that the process listens on may have that many connections.
    """
    if descriptors is None:
        return max_connections
    return max(MIN_CONNECTIONS, min(max_connections, (descriptors - OTHER_DESCRIPTORS) // addresses))


def connections_for_requests(max_connections: int) -> int:
    """Return how many connections requests may fill: some are reserved for health checks, metrics and the admin."""
    return max_connections - min(RESERVED_CONNECTIONS, max_connections // 4)
