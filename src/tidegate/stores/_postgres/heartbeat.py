"""Distinguishes a server that is down from one that is busy, or in which a call waits for a locked key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._runtime.flow import run
from tidegate._runtime.fork import abandon, at_fork
from tidegate.stores._postgres.connection import Connection, ServerError
from tidegate.stores._postgres.io_flow import SYSTEM_CLOCK, IOFlow, RunBlocking, perform

if TYPE_CHECKING:
    from tidegate.stores._postgres.connection import ConnectionTarget

CHECK_ACTION: Final = "answer a heartbeat"
CONNECT_TIMEOUT_FACTOR: Final = 5  # times `silence`: the timeout for opening the connection of the heartbeat


class Heartbeat:
    """Checks that a silent server is alive, and records when it answered last.

    A call that has waited for `silence` microseconds sends `select 1` over a separate connection, unless the server has
    answered any call meanwhile. If there is no answer, the store is unavailable.
    """

    def __init__(self, target: ConnectionTarget, silence: int, connect_timeout: int) -> None:
        """Connect with the first check."""
        self._target = target
        self._silence = silence
        self._connect_timeout = min(connect_timeout, CONNECT_TIMEOUT_FACTOR * silence)
        self._answered_at = 0
        at_fork(child=self._reset_after_fork)
        self._start()

    def _start(self) -> None:
        self._check_until = 0  # an interrupted check leaves it set; no call skips its check for longer than that
        self._connection: Connection | None = None

    def _reset_after_fork(self) -> None:
        """Start without a connection in a forked process: closing that of the parent would end its session."""
        abandon(self._connection)
        self._start()

    def record_answer(self) -> None:
        """Record that the server has answered."""
        self._answered_at = SYSTEM_CLOCK.steady()

    def due_at(self, until: int) -> int:
        """Return when to check a server that is silent from now on."""
        return min(until, SYSTEM_CLOCK.steady() + self._silence)

    def check_flow(self) -> IOFlow[None]:
        """Check the server unless it answered recently or a check is running. Raises StoreUnavailable if it fails."""
        now = SYSTEM_CLOCK.steady()
        if now - self._answered_at < self._silence or now < self._check_until:
            return
        self._check_until = now + self._silence + self._connect_timeout
        try:
            connection, self._connection = self._connection, None
            if connection is None or not connection.is_usable():
                connection = yield RunBlocking(self._open_blocking)
            if isinstance(connection, Exception):
                raise connection
            yield from connection.query_flow(CHECK_ACTION, "select 1", SYSTEM_CLOCK.steady() + self._silence)
            self._connection = connection
        except ServerError:
            pass  # the server has answered
        finally:
            self._check_until = 0
        self.record_answer()

    def _open_blocking(self) -> Connection | Exception:
        connection = Connection(self._target)
        try:
            run(connection.connect_flow(SYSTEM_CLOCK.steady() + self._connect_timeout), perform)
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread or task, and raised there
            connection.close()
            return error
        return connection

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
