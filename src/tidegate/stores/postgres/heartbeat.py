"""Tells a server that is silent from one that is busy, or that lets a call wait for its key."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from tidegate.fork import abandon, at_fork
from tidegate.stores.postgres.connection import Connection, ServerError
from tidegate.stores.postgres.io_flow import SYSTEM_CLOCK, RunBlocking, Steps, drive

if TYPE_CHECKING:
    from tidegate.stores.postgres.connection import ConnectionTarget

CHECK: Final = "answer a heartbeat"
CONNECTING: Final = 5  # times its silence: what a server is given to accept a connection for that


class Heartbeat:
    """When the server was heard last, by anybody here; and whether it still says something when asked.

    A call that has waited for `silence` microseconds asks for a sign of life over a connection of its own, unless the
    server has been heard meanwhile. A server that gives none is lost.
    """

    def __init__(self, target: ConnectionTarget, silence: int, connect_timeout: int) -> None:
        """Know nothing yet."""
        self._target = target
        self._silence = silence
        self._connect_timeout = min(connect_timeout, CONNECTING * silence)
        self._heard = 0
        at_fork(child=self._forget)
        self._start()

    def _start(self) -> None:
        self._checking = threading.Lock()
        self._connection: Connection | None = None

    def _forget(self) -> None:
        """Start without a connection in a forked process: closing that of its parent would end its session."""
        abandon(self._connection)
        self._start()

    def note(self) -> None:
        """Note that the server has said something."""
        self._heard = SYSTEM_CLOCK.steady()

    def expected(self, until: int) -> int:
        """Return when to become suspicious of a server that says nothing from now on."""
        return min(until, SYSTEM_CLOCK.steady() + self._silence)

    def checking(self) -> Steps[None]:
        """Ask for a sign of life, if there was none of late and nobody asks already; raise if there is none."""
        if SYSTEM_CLOCK.steady() - self._heard < self._silence or not self._checking.acquire(blocking=False):
            return
        try:
            connection, self._connection = self._connection, None
            if connection is None or not connection.usable():
                connection = yield RunBlocking(self._opened)
            if isinstance(connection, Exception):
                raise connection
            yield from connection.asking(CHECK, "select 1", SYSTEM_CLOCK.steady() + self._silence)
            self._connection = connection
        except ServerError:
            pass  # that is a sign of life, too
        finally:
            self._checking.release()
        self.note()

    def _opened(self) -> Connection | Exception:
        connection = Connection(self._target)
        try:
            drive(connection.connecting(SYSTEM_CLOCK.steady() + self._connect_timeout))
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread or task, and raised there
            connection.close()
            return error
        return connection

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
