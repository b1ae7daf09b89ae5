"""A few connections, shared by all threads and event loops of this process, opened when needed and kept.

A call that finds no free connection waits in a queue. The next caller that gets a connection sends the queued calls,
too: calls made while the server is busy share a round trip and a transaction. A task that gets a connection lets the
other tasks of its event loop run once before it sends, so that calls of one iteration share a statement: one statement
for 32 calls takes a quarter of the server's time of 32 statements. No call waits longer for others to join it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from tidegate._runtime.flow import run
from tidegate._runtime.fork import abandon, at_fork, fork_safe
from tidegate._runtime.lock import locked
from tidegate.core._bounds import SECOND
from tidegate.errors import Closed, StoreUnavailable
from tidegate.stores._postgres.io_flow import (
    SYSTEM_CLOCK,
    Caller,
    GatherCalls,
    IOFlow,
    RunBlocking,
    WaitForSignal,
    perform,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from tidegate.stores._postgres.connection import Connection
    from tidegate.stores._postgres.io_flow import CallSignal

T = TypeVar("T")

FIRST_CHECK: Final = SECOND // 20  # after which a waiting call checks whether a caller was interrupted; then longer


class ConnectionRequest(Generic[T]):
    """A queued call that waits for a connection. Without a `call`, its caller needs the connection for itself.

    When the signal is set, the caller may use a connection (or open one), or the call was `taken_by` another caller and
    is `done`, or no connection could be opened because of `error`.
    """

    __slots__ = ("call", "caller", "done", "error", "signal", "taken_by")

    def __init__(self, caller: Caller, call: T | None) -> None:
        """Wait for a signal."""
        self.caller: Caller = caller
        self.signal: CallSignal = caller.new_signal()
        self.call: T | None = call
        self.taken_by: Caller | None = None
        self.done: bool = False
        self.error: Exception | None = None

    @property
    def abandoned(self) -> bool:
        """Whether the caller that took the call was interrupted before it was done."""
        return self.taken_by is not None and not self.done and not self.taken_by.alive


class ConnectionPool(Generic[T]):
    """At most `size` connections. A caller that finds none free waits in a FIFO queue.

    It waits as long as connections become free. If none has for `stall_timeout` microseconds, the store is unavailable.

    A signal handler may raise at any instruction, so a call can end without releasing its connection. `_used` maps each
    caller to its connection (None: it is opening one). Connections of callers that are no longer alive are closed by a
    call that finds none free, and from time to time by waiting calls.
    """

    def __init__(self, size: int, stall_timeout: int, open_flow: Callable[[], IOFlow[Connection]]) -> None:
        """Open connections with these steps."""
        self.size = size
        self._stall_timeout = stall_timeout
        self._open_flow = open_flow
        self._closed = False
        at_fork(child=self._reset_after_fork)
        self._start()

    def _start(self) -> None:
        self.lock: threading.Lock = fork_safe(threading.Lock())
        self._idle: list[Connection] = []
        self._used: dict[Caller, Connection | None] = {}
        self._queue: deque[ConnectionRequest[T]] = deque()
        self._gathering: dict[asyncio.AbstractEventLoop, Caller] = {}  # will take the queued calls of their loop
        # When a connection last became free, or the queue got its first call.
        self._last_progress = SYSTEM_CLOCK.steady()

    def _reset_after_fork(self) -> None:
        """Start without connections in a forked process: closing those of the parent would end its sessions."""
        abandon(self._idle, self._used)
        self._start()

    def acquire_flow(self, call: T | None, caller: Caller) -> IOFlow[Connection | None]:
        """Acquire a connection, to be released or dropped. Returns None if another caller has sent the call.

        Without a call, the connection is for the caller alone.
        """
        request = self._take_or_queue(call, caller)
        if request is not None:
            yield from self._wait_flow(request)
            if request.done:
                return None
        connection = self._used[caller]
        if connection is not None and connection.is_usable():
            return connection
        if connection is not None:
            self._used[caller] = None
            connection.close()
        opened = yield RunBlocking(self._open_blocking)
        if isinstance(opened, Exception):
            self._open_failed(caller, opened)
            raise opened
        self._used[caller] = opened
        return opened  # type: ignore[no-any-return]  # a Connection, by _open_blocking

    @locked
    def _take_or_queue(self, call: T | None, caller: Caller) -> ConnectionRequest[T] | None:
        """Take an idle connection, or the right to open one, or join the queue."""
        if self._closed:
            raise Closed("the store is closed")
        if not self._idle and len(self._used) >= self.size:
            self._reclaim()
        if call is None or caller.loop not in self._gathering:
            if self._idle:
                self._used[caller] = self._idle.pop()
                return None
            if len(self._used) < self.size:
                self._used[caller] = None
                return None
        request = ConnectionRequest(caller, call)
        if not self._queue:
            self._last_progress = SYSTEM_CLOCK.steady()
        self._queue.append(request)
        return request

    def _reclaim(self) -> None:
        """Close the connections of callers that were interrupted. The lock is held."""
        for caller, connection in list(self._used.items()):
            if not caller.alive:
                if connection is not None:
                    connection.close()
                self._used.pop(caller, None)

    def _grant(self) -> list[ConnectionRequest[T]]:
        """Assign free connections to the first calls in the queue; return the requests to wake. The lock is held."""
        granted = []
        while self._queue:
            request = self._queue[0]
            if request.caller.alive and request.taken_by is None and request.caller not in self._used:
                if self._idle:
                    self._used[request.caller] = self._idle.pop()
                elif len(self._used) < self.size:
                    self._used[request.caller] = None
                else:
                    break
            self._queue.popleft()
            granted.append(request)
        return granted

    def _open_failed(self, caller: Caller, error: Exception) -> None:
        """Handle a connection that could not be opened; without any other connection, all queued calls fail too."""
        self._wake(self._fail_queue(caller, error))

    @locked
    def _fail_queue(self, caller: Caller, error: Exception) -> list[ConnectionRequest[T]]:
        failed: list[ConnectionRequest[T]] = []
        self._last_progress = SYSTEM_CLOCK.steady()
        self._used.pop(caller, None)
        if not self._idle and not any(self._used.values()):
            failed, self._queue = list(self._queue), deque()
            for request in failed:
                request.error = error
        return failed + self._grant()

    def _wait_flow(self, request: ConnectionRequest[T]) -> IOFlow[None]:
        interval = FIRST_CHECK
        try:
            while (
                not self._is_settled(request)
                and not request.abandoned
                and (now := SYSTEM_CLOCK.steady()) < (until := self._until(request))
            ):
                yield WaitForSignal(request.signal, min(until, now + interval), lambda: request.taken_by is not None)
                if not request.signal.is_set():
                    interval *= 2
                    self._wake(self._reclaim_and_grant())
        finally:
            if not self._is_settled(request):  # it timed out, or the caller was cancelled
                self._leave(request)
        if request.done:
            return
        if request.error is not None:
            raise request.error.with_traceback(None)
        if self._closed and request.taken_by is None:
            self._leave(request)
            raise Closed("the store is closed")
        if request.taken_by is not None:
            raise StoreUnavailable(
                "PostgreSQL did not respond in time: check the server, or raise timeout in the store's URL"
            )
        if request.caller not in self._used:
            message = (
                f"none of the {self.size} connections to PostgreSQL became free in time: "
                "check whether the server hangs, or raise timeout or pool_size in the store's URL"
            )
            raise StoreUnavailable(message)

    def _is_settled(self, request: ConnectionRequest[T]) -> bool:
        """Return whether the call need not wait any longer."""
        if request.done or request.error is not None or request.caller in self._used:
            return True
        return self._closed and request.taken_by is None

    def _leave(self, request: ConnectionRequest[T]) -> None:
        """Leave the queue, and release a connection that was granted meanwhile."""
        self._wake(self._withdraw(request))

    @locked
    def _withdraw(self, request: ConnectionRequest[T]) -> list[ConnectionRequest[T]]:
        if request in self._queue:
            self._queue.remove(request)
        self._free(request.caller)
        return self._grant()

    @locked
    def _reclaim_and_grant(self) -> list[ConnectionRequest[T]]:
        self._reclaim()
        return self._grant()

    @staticmethod
    def _wake(requests: list[ConnectionRequest[T]]) -> None:
        for request in requests:
            request.signal.set()

    def _until(self, request: ConnectionRequest[T]) -> int:
        """Return until when to wait. A caller that took the call reports its end, by its own deadline at the latest.

        That caller may be in a blocked event loop, so it gets more time. Opening a connection has its own deadline.
        """
        if request.taken_by is None and None in self._used.copy().values():
            return SYSTEM_CLOCK.steady() + self._stall_timeout
        return self._last_progress + self._stall_timeout * (1 if request.taken_by is None else 2)

    def gather_flow(self, caller: Caller, maximum: int) -> IOFlow[list[ConnectionRequest[T]]]:
        """Take queued calls, to be sent with the caller's own; `settle` wakes their callers.

        A task lets the other tasks of its event loop queue their calls first: these do not take other connections.
        """
        if caller.loop is not None and caller.loop not in self._gathering:
            self._gathering[caller.loop] = caller
            try:
                yield GatherCalls()
            finally:
                self._gathering.pop(caller.loop, None)
        requests = self._take_queued(caller, maximum) if self._queue else []
        if self._queue:
            self._wake(self._reclaim_and_grant())
        return requests

    @locked
    def _take_queued(self, caller: Caller, maximum: int) -> list[ConnectionRequest[T]]:
        self._last_progress = SYSTEM_CLOCK.steady()
        requests: list[ConnectionRequest[T]] = []
        while self._queue and len(requests) < maximum:
            request = self._queue[0]
            if request.call is None:
                break
            if request.caller.alive and request.caller not in self._used:
                request.taken_by = caller
                requests.append(request)
            self._queue.popleft()
        return requests

    @staticmethod
    def settle(requests: list[ConnectionRequest[T]]) -> None:
        """Wake the callers of calls that were taken."""
        for request in requests:
            request.done = True
            request.signal.set()

    def _open_blocking(self) -> Connection | Exception:
        try:
            return run(self._open_flow(), perform)
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread or task, and raised there
            return error
        finally:
            self._last_progress = SYSTEM_CLOCK.steady()

    def release(self, caller: Caller) -> None:
        """Return the caller's connection to the pool."""
        self._wake(self._release(caller))

    @locked
    def _release(self, caller: Caller) -> list[ConnectionRequest[T]]:
        self._last_progress = SYSTEM_CLOCK.steady()
        self._free(caller)
        return self._grant()

    def _free(self, caller: Caller) -> None:
        """Make the caller's connection idle. The lock is held."""
        connection = self._used.pop(caller, None)
        if connection is not None:
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)

    def drop(self, caller: Caller) -> None:
        """Close the caller's connection, whose state is unknown; another may be opened instead."""
        connection = self._used.get(caller)
        if connection is not None:
            self._used[caller] = None
            connection.close()
        self._wake(self._release(caller))

    def close(self) -> None:
        """Close idle connections now, and the others when they are released; wake all callers in the queue."""
        idle, queue = self._close()
        for connection in idle:
            connection.close()
        self._wake(queue)

    @locked
    def _close(self) -> tuple[list[Connection], list[ConnectionRequest[T]]]:
        self._closed = True
        idle, self._idle = self._idle, []
        queue, self._queue = list(self._queue), deque()
        return idle, queue

    def metrics(self) -> dict[str, int]:
        """Return the numbers of connections, idle connections and waiting calls."""
        return {
            "connections": len(self._idle) + len(self._used),
            "idle": len(self._idle),
            "waiting": len(self._queue),
        }
