"""A few connections, shared by all threads and event loops of this process, opened when needed and kept.

Who finds none free waits in line with what they have to say. Whoever gets the next connection says it for all of them:
calls that come while the server is busy share a round trip and a transaction, and nobody ever waits to be joined.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from tidegate.errors import Closed, StoreUnavailable
from tidegate.fork import abandon, at_fork
from tidegate.stores.postgres.io_flow import SYSTEM_CLOCK, RunBlocking, Steps, WaitForSignal, drive

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.clock import Signal
    from tidegate.stores.postgres.connection import Connection

T = TypeVar("T")


class ConnectionRequest(Generic[T]):
    """Somebody who waits for a connection, with what they have to say.

    When the signal is set, either it is their turn to use this connection (or to open one), or somebody has `taken`
    along what they had to say, and it is `done`; or no connection can be opened, and `error` says why.
    """

    __slots__ = ("connection", "done", "error", "signal", "taken", "what")

    def __init__(self, signal: Signal, what: T) -> None:
        """Wait for this signal."""
        self.signal = signal
        self.what = what
        self.connection: Connection | None = None
        self.taken = False
        self.done = False
        self.error: Exception | None = None


class Pool(Generic[T]):
    """At most `size` connections. A caller that finds none free waits, first come first served.

    It waits as long as connections come back. When none has for `patience` microseconds, the server is lost.
    """

    def __init__(self, size: int, patience: int, opening: Callable[[], Steps[Connection]]) -> None:
        """Open connections with these steps."""
        self.size = size
        self._patience = patience
        self._opening = opening
        self._closed = False
        at_fork(child=self._forget)
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._open = 0
        self._openings = 0  # of these, how many are being opened
        self._line: deque[ConnectionRequest[T]] = deque()
        self._moved = SYSTEM_CLOCK.steady()  # when a connection came back last, or was taken by the first that waits

    def _forget(self) -> None:
        """Start without connections in a forked process: closing those of its parent would end its sessions."""
        abandon(self._idle)
        self._start()

    def taking(self, what: T, new_signal: Callable[[], Signal]) -> Steps[Connection | None]:
        """Take a connection for a while: `give` it back, or `drop` it. None: somebody else has said it."""
        turn, connection = self._enter(what, new_signal)
        if turn is not None:
            connection = yield from self._waiting(turn)
            if turn.done:
                return None
        if connection is not None and connection.usable():
            return connection
        if connection is not None:
            connection.close()
        opened = yield RunBlocking(self._opened)
        if isinstance(opened, Exception):
            self._refuse(opened)
            raise opened
        return opened  # type: ignore[no-any-return]  # a Connection, by _opened

    def _enter(
        self, what: T, new_signal: Callable[[], Signal]
    ) -> tuple[ConnectionRequest[T] | None, Connection | None]:
        """Take an idle connection, or the right to open one (neither is given), or stand in line."""
        with self._lock:
            if self._closed:
                raise Closed("the store is closed")
            if self._idle:
                return None, self._idle.pop()
            if self._open < self.size:
                self._open += 1
                return None, None
            turn = ConnectionRequest(new_signal(), what)
            if not self._line:
                self._moved = SYSTEM_CLOCK.steady()
            self._line.append(turn)
            return turn, None

    def _refuse(self, error: Exception) -> None:
        """Give up a connection that could not be opened; those that wait would try in vain if there is no other."""
        with self._lock:
            refused: list[ConnectionRequest[T]] = []
            if self._open <= self._openings + 1:
                refused, self._line = list(self._line), deque()
        self._pass_on(None)
        for turn in refused:
            turn.error = error
            turn.signal.set()

    def _waiting(self, turn: ConnectionRequest[T]) -> Steps[Connection | None]:
        came = False
        try:
            while not turn.signal.is_set() and SYSTEM_CLOCK.steady() < self._until(turn):
                yield WaitForSignal(turn.signal, self._until(turn), lambda: turn.taken)
            came = turn.signal.is_set()
        finally:
            if not came:  # the time is over, or the waiter was cancelled
                with self._lock:
                    ours = turn not in self._line and not turn.taken
                    if turn in self._line:
                        self._line.remove(turn)
                if ours and turn.error is None:
                    self._pass_on(turn.connection)
        if turn.done:
            return None
        if turn.error is not None:
            raise turn.error.with_traceback(None)
        if came and self._closed:
            self._pass_on(turn.connection)
            raise Closed("the store is closed")
        if not came and turn.taken:
            raise StoreUnavailable(
                "PostgreSQL did not answer in time: check the server, or raise timeout in the store's URL"
            )
        if not came:
            message = (
                f"none of the {self.size} connections to PostgreSQL became free in time: "
                "check whether the server hangs, or raise timeout or pool_size in the store's URL"
            )
            raise StoreUnavailable(message)
        return turn.connection

    def _until(self, turn: ConnectionRequest[T]) -> int:
        """Return until when to wait. Who took the call along tells when it ends, after its own deadline at the latest.

        That one may be in an event loop that stands still, so it gets some time more. Opening a connection has a
        deadline of its own.
        """
        if self._openings and not turn.taken:
            return SYSTEM_CLOCK.steady() + self._patience
        return self._moved + self._patience * (2 if turn.taken else 1)

    def companions(self, most: int) -> list[ConnectionRequest[T]]:
        """Take along what others in line have to say; they are told by `settle`."""
        if not self._line:
            return []
        with self._lock:
            self._moved = SYSTEM_CLOCK.steady()
            turns = [self._line.popleft() for _ in range(min(most, len(self._line)))]
            for turn in turns:
                turn.taken = True
        return turns

    @staticmethod
    def settle(turns: list[ConnectionRequest[T]]) -> None:
        """Tell them that it is done."""
        for turn in turns:
            turn.done = True
            turn.signal.set()

    def _opened(self) -> Connection | Exception:
        with self._lock:
            self._openings += 1
        try:
            return drive(self._opening())
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread or task, and raised there
            return error
        finally:
            with self._lock:
                self._openings -= 1
                self._moved = SYSTEM_CLOCK.steady()

    def give(self, connection: Connection) -> None:
        """Let others use the connection."""
        self._pass_on(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection whose state is unknown; another may be opened instead."""
        connection.close()
        self._pass_on(None)

    def _pass_on(self, connection: Connection | None) -> None:
        """Hand a connection, or the right to open one, to the first in line, or keep it for whoever comes."""
        with self._lock:
            self._moved = SYSTEM_CLOCK.steady()
            turn = self._line.popleft() if self._line else None
            if turn is not None:
                turn.connection = connection
            elif connection is None or self._closed:
                self._open -= 1
            else:
                self._idle.append(connection)
                connection = None
        if turn is not None:
            turn.signal.set()
        elif connection is not None:
            connection.close()

    def close(self) -> None:
        """Close what is idle now, and the rest when it comes back; wake who waits."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._open -= len(idle)
            self._open += len(self._line)  # each that is woken gives back what it was not given
            line, self._line = list(self._line), deque()
        for connection in idle:
            connection.close()
        for turn in line:
            turn.signal.set()

    def metrics(self) -> dict[str, int]:
        """Count connections, idle ones and calls that wait for one."""
        return {"connections": self._open, "idle": len(self._idle), "waiting": len(self._line)}
