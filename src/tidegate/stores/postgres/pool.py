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
from tidegate.stores.postgres.steps import CLOCK, Sleep, Steps, Work, drive

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.clock import Signal
    from tidegate.stores.postgres.connection import Connection

T = TypeVar("T")


class Turn(Generic[T]):
    """Somebody who waits for a connection, with what they have to say.

    When the signal is set, either it is their turn to use this connection (or to open one), or somebody has `taken`
    along what they had to say, and it is `done`.
    """

    __slots__ = ("connection", "done", "signal", "taken", "what")

    def __init__(self, signal: Signal, what: T) -> None:
        """Wait for this signal."""
        self.signal = signal
        self.what = what
        self.connection: Connection | None = None
        self.taken = False
        self.done = False


class Pool(Generic[T]):
    """At most `size` connections. Who finds none free waits, first come first served, until its deadline."""

    def __init__(self, size: int, opening: Callable[[], Steps[Connection]]) -> None:
        """Open connections with these steps."""
        self.size = size
        self._opening = opening
        self._closed = False
        at_fork(child=self._forget)
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._open = 0
        self._line: deque[Turn[T]] = deque()

    def _forget(self) -> None:
        """Start without connections in a forked process: closing those of its parent would end its sessions."""
        abandon(self._idle)
        self._start()

    def taking(self, what: T, until: int, new_signal: Callable[[], Signal]) -> Steps[Connection | None]:
        """Take a connection for a while: `give` it back, or `drop` it. None: somebody else has said it."""
        turn = None
        connection = None
        with self._lock:
            if self._closed:
                raise Closed("the store is closed")
            if self._idle:
                connection = self._idle.pop()
            elif self._open < self.size:
                self._open += 1
            else:
                turn = Turn(new_signal(), what)
                self._line.append(turn)
        if turn is not None:
            connection = yield from self._waiting(turn, until)
            if turn.done:
                return None
        if connection is not None and connection.usable():
            return connection
        if connection is not None:
            connection.close()
        opened = yield Work(self._opened)
        if isinstance(opened, Exception):
            self._pass_on(None)
            raise opened
        return opened  # type: ignore[no-any-return]  # a Connection, by _opened

    def _waiting(self, turn: Turn[T], until: int) -> Steps[Connection | None]:
        came = False
        try:
            while not turn.signal.is_set() and CLOCK.steady() < until:
                yield Sleep(turn.signal, until, lambda: turn.taken)
            came = turn.signal.is_set()
        finally:
            if not came:  # the time is over, or the waiter was cancelled
                with self._lock:
                    ours = turn not in self._line and not turn.taken
                    if turn in self._line:
                        self._line.remove(turn)
                if ours:
                    self._pass_on(turn.connection)
        if turn.done:
            return None
        if came and self._closed:
            self._pass_on(turn.connection)
            raise Closed("the store is closed")
        if not came and turn.taken:
            raise StoreUnavailable("PostgreSQL did not answer in time: check it, or raise timeout in the store's URL")
        if not came:
            message = f"all {self.size} connections to PostgreSQL were in use: raise pool_size in the store's URL"
            raise StoreUnavailable(message)
        return turn.connection

    def companions(self, most: int) -> list[Turn[T]]:
        """Take along what others in line have to say; they are told by `settle`."""
        if not self._line:
            return []
        with self._lock:
            turns = [self._line.popleft() for _ in range(min(most, len(self._line)))]
            for turn in turns:
                turn.taken = True
        return turns

    @staticmethod
    def settle(turns: list[Turn[T]]) -> None:
        """Tell them that it is done."""
        for turn in turns:
            turn.done = True
            turn.signal.set()

    def _opened(self) -> Connection | Exception:
        try:
            return drive(self._opening())
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread or task, and raised there
            return error

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
