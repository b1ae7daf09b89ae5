"""A few connections, shared by all threads and event loops of this process, opened when needed and kept.

Who finds none free waits in line with what they have to say. Whoever gets the next connection says it for all of them:
calls that come while the server is busy share a round trip and a transaction, and nobody ever waits to be joined.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from tidegate.core.bounds import SECOND
from tidegate.errors import Closed, StoreUnavailable
from tidegate.fork import abandon, at_fork
from tidegate.lock import Lock, locked
from tidegate.stores.postgres.io_flow import SYSTEM_CLOCK, Caller, RunBlocking, Steps, WaitForSignal, drive

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.stores.postgres.connection import Connection

T = TypeVar("T")

FIRST_LOOK: Final = SECOND // 20  # who waits looks after this long whether a call was interrupted; then ever later


class ConnectionRequest(Generic[T]):
    """Somebody who waits for a connection, with what they have to say.

    When the signal is set, either it is their turn to use a connection (or to open one), or `taken_by` another caller
    what they had to say is `done`; or no connection can be opened, and `error` says why.
    """

    __slots__ = ("caller", "done", "error", "signal", "taken_by", "what")

    def __init__(self, caller: Caller, what: T) -> None:
        """Wait for a signal."""
        self.caller = caller
        self.signal = caller.new_signal()
        self.what = what
        self.taken_by: Caller | None = None
        self.done = False
        self.error: Exception | None = None

    @property
    def lost(self) -> bool:
        """Whether the call that took it along has ended without telling."""
        return self.taken_by is not None and not self.done and not self.taken_by.alive


class Pool(Generic[T]):
    """At most `size` connections. A caller that finds none free waits, first come first served.

    It waits as long as connections come back. When none has for `patience` microseconds, the server is lost.

    A signal handler may raise at any instruction, so a call can end without giving its connection back. `_used` says
    which caller has which connection (None: it opens one). What callers have that are no longer alive is closed by
    whoever finds no connection free, and from time to time by those who wait.
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
        self.lock = Lock()
        self._idle: list[Connection] = []
        self._used: dict[Caller, Connection | None] = {}
        self._line: deque[ConnectionRequest[T]] = deque()
        self._moved = SYSTEM_CLOCK.steady()  # when a connection came back last, or was taken by the first that waits

    def _forget(self) -> None:
        """Start without connections in a forked process: closing those of its parent would end its sessions."""
        abandon(self._idle, self._used)
        self._start()

    def taking(self, what: T, caller: Caller) -> Steps[Connection | None]:
        """Take a connection for a while: `give` it back, or `drop` it. None: somebody else has said it."""
        turn = self._enter(what, caller)
        if turn is not None:
            yield from self._waiting(turn)
            if turn.done:
                return None
        connection = self._used[caller]
        if connection is not None and connection.usable():
            return connection
        if connection is not None:
            self._used[caller] = None
            connection.close()
        opened = yield RunBlocking(self._opened)
        if isinstance(opened, Exception):
            self._refuse(caller, opened)
            raise opened
        self._used[caller] = opened
        return opened  # type: ignore[no-any-return]  # a Connection, by _opened

    @locked
    def _enter(self, what: T, caller: Caller) -> ConnectionRequest[T] | None:
        """Take an idle connection, or the right to open one, or stand in line."""
        if self._closed:
            raise Closed("the store is closed")
        if not self._idle and len(self._used) >= self.size:
            self._reclaim()
        if self._idle:
            self._used[caller] = self._idle.pop()
            return None
        if len(self._used) < self.size:
            self._used[caller] = None
            return None
        turn = ConnectionRequest(caller, what)
        if not self._line:
            self._moved = SYSTEM_CLOCK.steady()
        self._line.append(turn)
        return turn

    def _reclaim(self) -> None:
        """Close the connections of callers that have ended without giving them back. The lock is ours."""
        for caller, connection in list(self._used.items()):
            if not caller.alive:
                if connection is not None:
                    connection.close()
                self._used.pop(caller, None)

    def _grant(self) -> list[ConnectionRequest[T]]:
        """Give what is free to the first in line; return whom to wake. The lock is ours."""
        woken = []
        while self._line:
            turn = self._line[0]
            if turn.caller.alive and turn.taken_by is None and turn.caller not in self._used:
                if self._idle:
                    self._used[turn.caller] = self._idle.pop()
                elif len(self._used) < self.size:
                    self._used[turn.caller] = None
                else:
                    break
            self._line.popleft()
            woken.append(turn)
        return woken

    def _refuse(self, caller: Caller, error: Exception) -> None:
        """Give up a connection that could not be opened; those that wait would try in vain if there is no other."""
        for turn in self._refused(caller, error):
            turn.signal.set()

    @locked
    def _refused(self, caller: Caller, error: Exception) -> list[ConnectionRequest[T]]:
        woken: list[ConnectionRequest[T]] = []
        self._moved = SYSTEM_CLOCK.steady()
        self._used.pop(caller, None)
        if not self._idle and not any(self._used.values()):
            woken, self._line = list(self._line), deque()
            for turn in woken:
                turn.error = error
        return woken + self._grant()

    def _waiting(self, turn: ConnectionRequest[T]) -> Steps[None]:
        look = FIRST_LOOK
        try:
            while (
                not self._came(turn) and not turn.lost and (now := SYSTEM_CLOCK.steady()) < (until := self._until(turn))
            ):
                yield WaitForSignal(turn.signal, min(until, now + look), lambda: turn.taken_by is not None)
                if not turn.signal.is_set():
                    look *= 2
                    self._wake(self._look())
        finally:
            if not self._came(turn):  # the time is over, or the waiter was cancelled
                self._leave(turn)
        if turn.done:
            return
        if turn.error is not None:
            raise turn.error.with_traceback(None)
        if self._closed and turn.taken_by is None:
            self._leave(turn)
            raise Closed("the store is closed")
        if turn.taken_by is not None:
            raise StoreUnavailable("PostgreSQL did not answer in time: check it, or raise timeout in the store's URL")
        if turn.caller not in self._used:
            message = (
                f"none of the {self.size} connections to PostgreSQL came back in time: check whether the server hangs, "
                "or raise timeout or pool_size in the store's URL"
            )
            raise StoreUnavailable(message)

    def _came(self, turn: ConnectionRequest[T]) -> bool:
        """Tell whether the wait is over."""
        if turn.done or turn.error is not None or turn.caller in self._used:
            return True
        return self._closed and turn.taken_by is None

    def _leave(self, turn: ConnectionRequest[T]) -> None:
        self._wake(self._withdraw(turn))

    @locked
    def _withdraw(self, turn: ConnectionRequest[T]) -> list[ConnectionRequest[T]]:
        """Leave the line, and what was granted meanwhile to others."""
        if turn in self._line:
            self._line.remove(turn)
        self._release(turn.caller)
        return self._grant()

    @locked
    def _look(self) -> list[ConnectionRequest[T]]:
        """Look for what callers that were interrupted have left."""
        self._reclaim()
        return self._grant()

    @staticmethod
    def _wake(turns: list[ConnectionRequest[T]]) -> None:
        for turn in turns:
            turn.signal.set()

    def _until(self, turn: ConnectionRequest[T]) -> int:
        """Return until when to wait. Who took the call along tells when it ends, after its own deadline at the latest.

        That one may be in an event loop that stands still, so it gets some time more. Opening a connection has a
        deadline of its own.
        """
        if turn.taken_by is None and None in self._used.copy().values():
            return SYSTEM_CLOCK.steady() + self._patience
        return self._moved + self._patience * (1 if turn.taken_by is None else 2)

    def companions(self, caller: Caller, most: int) -> list[ConnectionRequest[T]]:
        """Take along what others in line have to say; they are told by `settle`."""
        return self._take_along(caller, most) if self._line else []

    @locked
    def _take_along(self, caller: Caller, most: int) -> list[ConnectionRequest[T]]:
        self._moved = SYSTEM_CLOCK.steady()
        turns: list[ConnectionRequest[T]] = []
        while self._line and len(turns) < most:
            turn = self._line[0]
            if turn.caller.alive and turn.caller not in self._used:
                turn.taken_by = caller
                turns.append(turn)
            self._line.popleft()
        return turns

    @staticmethod
    def settle(turns: list[ConnectionRequest[T]]) -> None:
        """Tell them that it is done."""
        for turn in turns:
            turn.done = True
            turn.signal.set()

    def _opened(self) -> Connection | Exception:
        try:
            return drive(self._opening())
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread or task, and raised there
            return error
        finally:
            self._moved = SYSTEM_CLOCK.steady()

    def give(self, caller: Caller) -> None:
        """Let others use the connection."""
        self._wake(self._give(caller))

    @locked
    def _give(self, caller: Caller) -> list[ConnectionRequest[T]]:
        self._moved = SYSTEM_CLOCK.steady()
        self._release(caller)
        return self._grant()

    def _release(self, caller: Caller) -> None:
        """Keep what a caller has for whoever comes. The lock is ours."""
        connection = self._used.pop(caller, None)
        if connection is not None:
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)

    def drop(self, caller: Caller) -> None:
        """Close a connection whose state is unknown; another may be opened instead."""
        connection = self._used.get(caller)
        if connection is not None:
            self._used[caller] = None
            connection.close()
        self._wake(self._give(caller))

    def close(self) -> None:
        """Close what is idle now, and the rest when it comes back; wake who waits."""
        idle, line = self._close()
        for connection in idle:
            connection.close()
        self._wake(line)

    @locked
    def _close(self) -> tuple[list[Connection], list[ConnectionRequest[T]]]:
        self._closed = True
        idle, self._idle = self._idle, []
        line, self._line = list(self._line), deque()
        return idle, line

    def metrics(self) -> dict[str, int]:
        """Count connections, idle ones and calls that wait for one."""
        return {
            "connections": len(self._idle) + len(self._used),
            "idle": len(self._idle),
            "waiting": len(self._line),
        }
