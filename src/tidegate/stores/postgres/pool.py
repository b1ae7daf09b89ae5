"""A few connections, shared by all threads and event loops of this process, opened when needed and kept.

A call that finds no free connection waits in a queue. The next caller that gets a connection sends the queued calls,
too: calls made while the server is busy share a round trip and a transaction, and no call waits for others to join it.
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
    """A queued call that waits for a connection.

    When the signal is set, the caller may use `connection` (or open one if that is None), or another caller has `taken`
    the call and it is `done`, or no connection could be opened because of `error`.
    """

    __slots__ = ("call", "connection", "done", "error", "signal", "taken")

    def __init__(self, signal: Signal, call: T) -> None:
        """Wait for this signal."""
        self.signal = signal
        self.call = call
        self.connection: Connection | None = None
        self.taken = False
        self.done = False
        self.error: Exception | None = None


class Pool(Generic[T]):
    """At most `size` connections. A caller that finds none free waits in a FIFO queue.

    It waits as long as connections become free. If none has for `patience` microseconds, the store is unavailable.
    """

    def __init__(self, size: int, patience: int, open_flow: Callable[[], Steps[Connection]]) -> None:
        """Open connections with these steps."""
        self.size = size
        self._patience = patience
        self._open_flow = open_flow
        self._closed = False
        at_fork(child=self._reset_after_fork)
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._open = 0
        self._openings = 0  # how many of these are being opened
        self._queue: deque[ConnectionRequest[T]] = deque()
        # When a connection last became free, or the queue got its first call.
        self._last_progress = SYSTEM_CLOCK.steady()

    def _reset_after_fork(self) -> None:
        """Start without connections in a forked process: closing those of the parent would end its sessions."""
        abandon(self._idle)
        self._start()

    def acquire_flow(self, call: T, new_signal: Callable[[], Signal]) -> Steps[Connection | None]:
        """Acquire a connection, to be released or dropped. Returns None if another caller has sent the call."""
        request, connection = self._take_or_queue(call, new_signal)
        if request is not None:
            connection = yield from self._wait_flow(request)
            if request.done:
                return None
        if connection is not None and connection.is_usable():
            return connection
        if connection is not None:
            connection.close()
        opened = yield RunBlocking(self._open_blocking)
        if isinstance(opened, Exception):
            self._open_failed(opened)
            raise opened
        return opened  # type: ignore[no-any-return]  # a Connection, by _open_blocking

    def _take_or_queue(
        self, call: T, new_signal: Callable[[], Signal]
    ) -> tuple[ConnectionRequest[T] | None, Connection | None]:
        """Take an idle connection, or the right to open one (both are None), or join the queue."""
        with self._lock:
            if self._closed:
                raise Closed("the store is closed")
            if self._idle:
                return None, self._idle.pop()
            if self._open < self.size:
                self._open += 1
                return None, None
            request = ConnectionRequest(new_signal(), call)
            if not self._queue:
                self._last_progress = SYSTEM_CLOCK.steady()
            self._queue.append(request)
            return request, None

    def _open_failed(self, error: Exception) -> None:
        """Handle a connection that could not be opened; without any other connection, all queued calls fail, too."""
        with self._lock:
            refused: list[ConnectionRequest[T]] = []
            if self._open <= self._openings + 1:
                refused, self._queue = list(self._queue), deque()
        self._pass_on(None)
        for request in refused:
            request.error = error
            request.signal.set()

    def _wait_flow(self, request: ConnectionRequest[T]) -> Steps[Connection | None]:
        signalled = False
        try:
            while not request.signal.is_set() and SYSTEM_CLOCK.steady() < self._until(request):
                yield WaitForSignal(request.signal, self._until(request), lambda: request.taken)
            signalled = request.signal.is_set()
        finally:
            if not signalled:  # the time is over, or the caller was cancelled
                with self._lock:
                    is_ours = request not in self._queue and not request.taken
                    if request in self._queue:
                        self._queue.remove(request)
                if is_ours and request.error is None:
                    self._pass_on(request.connection)
        if request.done:
            return None
        if request.error is not None:
            raise request.error.with_traceback(None)
        if signalled and self._closed:
            self._pass_on(request.connection)
            raise Closed("the store is closed")
        if not signalled and request.taken:
            raise StoreUnavailable(
                "PostgreSQL did not answer in time: check the server, or raise timeout in the store's URL"
            )
        if not signalled:
            message = (
                f"none of the {self.size} connections to PostgreSQL became free in time: "
                "check whether the server hangs, or raise timeout or pool_size in the store's URL"
            )
            raise StoreUnavailable(message)
        return request.connection

    def _until(self, request: ConnectionRequest[T]) -> int:
        """Return until when to wait. A caller that took the call reports its end, by its own deadline at the latest.

        That caller may be in a blocked event loop, so it gets more time. Opening a connection has its own deadline.
        """
        if self._openings and not request.taken:
            return SYSTEM_CLOCK.steady() + self._patience
        return self._last_progress + self._patience * (2 if request.taken else 1)

    def take_queued(self, maximum: int) -> list[ConnectionRequest[T]]:
        """Take queued calls, to be sent with the caller's own; `settle` wakes their callers."""
        if not self._queue:
            return []
        with self._lock:
            self._last_progress = SYSTEM_CLOCK.steady()
            requests = [self._queue.popleft() for _ in range(min(maximum, len(self._queue)))]
            for request in requests:
                request.taken = True
        return requests

    @staticmethod
    def settle(requests: list[ConnectionRequest[T]]) -> None:
        """Wake the callers of calls that were taken."""
        for request in requests:
            request.done = True
            request.signal.set()

    def _open_blocking(self) -> Connection | Exception:
        with self._lock:
            self._openings += 1
        try:
            return drive(self._open_flow())
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread or task, and raised there
            return error
        finally:
            with self._lock:
                self._openings -= 1
                self._last_progress = SYSTEM_CLOCK.steady()

    def release(self, connection: Connection) -> None:
        """Return a connection to the pool."""
        self._pass_on(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection whose state is unknown; another may be opened instead."""
        connection.close()
        self._pass_on(None)

    def _pass_on(self, connection: Connection | None) -> None:
        """Pass a connection, or the right to open one, to the first in the queue; else keep it."""
        with self._lock:
            self._last_progress = SYSTEM_CLOCK.steady()
            request = self._queue.popleft() if self._queue else None
            if request is not None:
                request.connection = connection
            elif connection is None or self._closed:
                self._open -= 1
            else:
                self._idle.append(connection)
                connection = None
        if request is not None:
            request.signal.set()
        elif connection is not None:
            connection.close()

    def close(self) -> None:
        """Close idle connections now, and the others when they are released; wake all callers in the queue."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._open -= len(idle)
            self._open += len(self._queue)  # each caller that is woken releases a connection
            queue, self._queue = list(self._queue), deque()
        for connection in idle:
            connection.close()
        for request in queue:
            request.signal.set()

    def metrics(self) -> dict[str, int]:
        """Return the numbers of connections, idle connections and waiting calls."""
        return {"connections": self._open, "idle": len(self._idle), "waiting": len(self._queue)}
