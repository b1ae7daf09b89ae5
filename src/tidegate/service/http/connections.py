"""Bounds on the open connections of one process: how many there are, and how long a client may keep one waiting.

Time is counted in ticks of one timer, not read from a clock for each request. A connection has a number of ticks left;
each tick takes one away, and a connection that has none left is expired. An event loop that was blocked for a while
thus expires nobody whose bytes are still unread.

A connection is *waiting* while no request on it is being answered: the client is silent, is still sending the head of
a request, or is idle between two requests. If there are too many connections, the one that has waited longest is
closed. So connections that ask nothing never keep out those that do. Requests that are being answered can only fill
`for_requests` of the connections; the rest is left for health checks, metrics and the admin's requests.
"""

from __future__ import annotations

import asyncio
import logging
from math import ceil
from typing import Final, Protocol

from tidegate.service.config.values import MIN_CONNECTIONS

log = logging.getLogger("tidegate.service")

NEVER_TICKS: Final = 2**62  # ticks
MIN_TICKS: Final = 4  # at least, in the shortest of the times
MAX_TICK: Final = 1.0  # seconds
RESERVED_CONNECTIONS: Final = 32  # for health, metrics and admin
BACKLOG: Final = 1024  # connections that the system holds until they are accepted
OTHER_DESCRIPTORS: Final = 128  # files, stores, pipes
REPORT_TICKS: Final = 30  # between two log lines about closed connections


class BoundedConnection(Protocol):
    """What is asked of a connection."""

    ticks_left: int

    def expire(self) -> None:
        """End it, or give it more ticks: its client took too long."""

    def drop(self) -> None:
        """Close it at once."""

    def shutdown(self) -> None:
        """Close it when what is under way is answered."""


class Connections:
    """The open connections of one process."""

    def __init__(self, max_connections: int, read_timeout: float, idle_timeout: float) -> None:
        """Allow this many, and these times in seconds."""
        self.max_connections = max_connections
        self.read_timeout = read_timeout
        self.tick_seconds = min(MAX_TICK, read_timeout / MIN_TICKS, idle_timeout / MIN_TICKS)
        self.read_ticks = ceil(read_timeout / self.tick_seconds)
        self.idle_ticks = ceil(idle_timeout / self.tick_seconds)
        self.none_open = asyncio.Event()
        self.none_open.set()
        self._open: set[BoundedConnection] = set()
        self._waiting: dict[BoundedConnection, None] = {}  # in the order in which they began to wait
        self._made_room = 0  # connections closed to make room, since the last report
        self._since_report = REPORT_TICKS

    def __len__(self) -> int:
        """Count those that are open."""
        return len(self._open)

    def add(self, connection: BoundedConnection) -> None:
        """Take a new connection; if there are too many, close the one that has waited longest: maybe this one."""
        self._open.add(connection)
        self.none_open.clear()
        self._waiting[connection] = None
        if len(self._open) > self.max_connections:
            oldest = next(iter(self._waiting))
            self.remove(oldest)
            self._made_room += 1
            oldest.drop()

    def remove(self, connection: BoundedConnection) -> None:
        """Forget a connection; one that is forgotten already is fine."""
        self._waiting.pop(connection, None)
        self._open.discard(connection)
        if not self._open:
            self.none_open.set()

    def begin_answer(self, connection: BoundedConnection) -> None:
        """Note that a request on this connection is being answered."""
        self._waiting.pop(connection, None)

    def begin_wait(self, connection: BoundedConnection) -> None:
        """Note that this connection waits for its client."""
        if connection in self._open:
            self._waiting.setdefault(connection)

    def tick(self) -> None:
        """Take one tick from each connection and expire those that have none left."""
        late = []
        for connection in self._open:
            connection.ticks_left -= 1
            if connection.ticks_left < 0:
                late.append(connection)
        for connection in late:
            try:
                connection.expire()
            except Exception:
                log.exception("a connection cannot be ended: it is not counted any more")
                self.remove(connection)
        self._report()

    def _report(self) -> None:
        """Tell the log now and then that connections were closed to make room."""
        self._since_report += 1
        if self._made_room and self._since_report > REPORT_TICKS:
            log.warning(
                "closed %d waiting connections to make room: max_connections is %d",
                self._made_room,
                self.max_connections,
            )
            self._made_room = self._since_report = 0

    def snapshot(self) -> list[BoundedConnection]:
        """List those that are open now."""
        return list(self._open)


def fit_connections(max_connections: int, descriptors: int | None, addresses: int = 1) -> int:
    """Lower a number of connections such that they fit below the limit of descriptors (None: there is none).

    Each of the addresses that the process listens on may have so many.
    """
    if descriptors is None:
        return max_connections
    return max(MIN_CONNECTIONS, min(max_connections, (descriptors - OTHER_DESCRIPTORS) // addresses))


def connections_for_requests(max_connections: int) -> int:
    """Tell how many connections requests may fill: some are reserved for health checks, metrics and admin requests."""
    return max_connections - min(RESERVED_CONNECTIONS, max_connections // 4)
