"""A few connections, shared by all threads and event loops of this process, opened when needed and kept.

A call that finds no free connection waits in a queue. The next caller that gets a connection sends the queued calls,
too: calls made while the server is busy share a round trip and a transaction. A task that gets a connection lets the
other tasks of its event loop run once before it sends, so that calls of one iteration share a statement: one statement
for 32 calls takes a quarter of the server's time of 32 statements. No call waits longer for others to join it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import ref

from tidegate._runtime.flow import run
from tidegate._runtime.fork import abandon, at_fork, fork_safe
from tidegate._runtime.lock import locked
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


class ConnectionSlot:
    """One of the connections of a pool. Whoever refers to it owns it: a caller, or the pool if it is idle.

    A signal handler may raise at any instruction, so a call can end without releasing its connection. Then nothing
    refers to the slot any more: the connection is closed, and another one may be opened. If the program keeps the
    exception, whose frames refer to the slot, that happens when the exception is released.
    """

    __slots__ = ("__weakref__", "connection")

    def __init__(self) -> None:
        """Not opened yet."""
        self.connection: Connection | None = None


class ConnectionRequest(Generic[T]):
    """A queued call that waits for a connection. Without a `call`, its caller needs the connection for itself.

    When the signal is set, the caller may use a connection (or open one), or the call was `taken` by another caller and
    is `done`, or no connection could be opened because of `error`. It is set too if a caller ended without releasing
    its connection.
    """

    __slots__ = ("call", "caller", "done", "error", "signal", "taken")

    def __init__(self, caller: Caller, call: T | None) -> None:
        """Wait for a signal."""
        self.caller: Caller = caller
        self.signal: CallSignal = caller.new_signal()
        self.call: T | None = call
        self.taken: bool = False
        self.done: bool = False
        self.error: Exception | None = None


class ConnectionPool(Generic[T]):
    """At most `size` connections. A caller that finds none free waits in a FIFO queue.

    It waits as long as connections become free. If none has for `stall_timeout` microseconds, the store is unavailable.
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
        self._idle: list[ConnectionSlot] = []
        self._slots: list[ref[ConnectionSlot]] = []  # those that are in use or idle
        self._queue: deque[ConnectionRequest[T]] = deque()
        self._gathering: dict[asyncio.AbstractEventLoop, Caller] = {}  # will take the queued calls of their loop
        # When a connection last became free, or the queue got its first call.
        self._last_progress = SYSTEM_CLOCK.steady()

    def _reset_after_fork(self) -> None:
        """Start without connections in a forked process: closing those of the parent would end its sessions."""
        abandon(self._open_slots())
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
        assert caller.slot is not None  # noqa: S101 - otherwise _wait_flow raises
        connection = caller.slot.connection
        if connection is not None and connection.is_usable():
            return connection
        if connection is not None:
            caller.slot.connection = None
            connection.close()
        opened = yield RunBlocking(self._open_blocking)
        if isinstance(opened, Exception):
            self._open_failed(caller, opened)
            raise opened
        caller.slot.connection = opened
        return opened  # type: ignore[no-any-return]  # a Connection, by _open_blocking

    @locked
    def _take_or_queue(self, call: T | None, caller: Caller) -> ConnectionRequest[T] | None:
        """Take an idle connection, or the right to open one, or join the queue."""
        if self._closed:
            raise Closed("the store is closed")
        if (call is None or caller.loop not in self._gathering) and self._take(caller):
            return None
        request = ConnectionRequest(caller, call)
        if not self._queue:
            self._last_progress = SYSTEM_CLOCK.steady()
        self._queue.append(request)
        return request

    def _open_slots(self) -> list[ConnectionSlot]:
        return [slot for reference in self._slots if (slot := reference()) is not None]

    def _take(self, caller: Caller) -> bool:
        """Give a caller a slot, if there is a free one. The lock is held."""
        if self._idle:
            caller.slot = self._idle.pop()
        elif len(self._open_slots()) < self.size:
            slot = ConnectionSlot()
            self._slots = [each for each in self._slots if each() is not None]
            self._slots.append(ref(slot, self._slot_lost))
            caller.slot = slot
        return caller.slot is not None

    def _slot_lost(self, _: object) -> None:
        """Let waiting callers look for a free slot. Takes no lock: the garbage collector may call it anywhere."""
        for request in tuple(self._queue):
            request.signal.set_soon()

    def _grant(self) -> list[ConnectionRequest[T]]:
        """Assign free slots to the first calls in the queue; return the requests to wake. The lock is held."""
        granted = []
        while self._queue:
            request = self._queue[0]
            if not request.taken and request.caller.slot is None and not self._take(request.caller):
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
        caller.slot = None
        if not any(slot.connection for slot in self._open_slots()):
            failed, self._queue = list(self._queue), deque()
            for request in failed:
                request.error = error
        return failed + self._grant()

    def _wait_flow(self, request: ConnectionRequest[T]) -> IOFlow[None]:
        try:
            while not self._is_settled(request) and SYSTEM_CLOCK.steady() < (until := self._until(request)):
                yield WaitForSignal(request.signal, until, lambda: request.taken)
                if request.signal.is_set() and not self._is_settled(request):  # a slot was lost
                    request.signal = request.caller.new_signal()
                    self._wake(self._granted())
        finally:
            if not self._is_settled(request):  # it timed out, or the caller was cancelled
                self._leave(request)
        if request.done:
            return
        if request.error is not None:
            raise request.error.with_traceback(None)
        if self._closed and not request.taken:
            self._leave(request)
            raise Closed("the store is closed")
        if request.taken:
            raise StoreUnavailable(
                "PostgreSQL did not respond in time: check the server, or raise timeout in the store's URL"
            )
        if request.caller.slot is None:
            message = (
                f"none of the {self.size} connections to PostgreSQL became free in time: "
                "check whether the server hangs, or raise timeout or pool_size in the store's URL"
            )
            raise StoreUnavailable(message)

    def _is_settled(self, request: ConnectionRequest[T]) -> bool:
        """Return whether the call need not wait any longer."""
        if request.done or request.error is not None or request.caller.slot is not None:
            return True
        return self._closed and not request.taken

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
    def _granted(self) -> list[ConnectionRequest[T]]:
        return self._grant()

    @staticmethod
    def _wake(requests: list[ConnectionRequest[T]]) -> None:
        for request in requests:
            request.signal.set()

    def _until(self, request: ConnectionRequest[T]) -> int:
        """Return until when to wait. A caller that took the call reports its end, by its own deadline at the latest.

        That caller may be in a blocked event loop, so it gets more time. Opening a connection has its own deadline.
        """
        if not request.taken and any(slot.connection is None for slot in self._open_slots()):
            return SYSTEM_CLOCK.steady() + self._stall_timeout
        return self._last_progress + self._stall_timeout * (1 if not request.taken else 2)

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
        requests = self._take_queued(maximum) if self._queue else []
        if self._queue:
            self._wake(self._granted())
        return requests

    @locked
    def _take_queued(self, maximum: int) -> list[ConnectionRequest[T]]:
        self._last_progress = SYSTEM_CLOCK.steady()
        requests: list[ConnectionRequest[T]] = []
        while self._queue and len(requests) < maximum:
            request = self._queue[0]
            if request.call is None:
                break
            if request.caller.slot is None:
                request.taken = True
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
        slot, caller.slot = caller.slot, None
        if slot is not None and self._closed and slot.connection is not None:
            slot.connection.close()
        elif slot is not None:
            self._idle.append(slot)

    def drop(self, caller: Caller) -> None:
        """Close the caller's connection, whose state is unknown; another may be opened instead."""
        if caller.slot is not None and caller.slot.connection is not None:
            caller.slot.connection.close()
        caller.slot = None
        self.release(caller)

    def close(self) -> None:
        """Close idle connections now, and the others when they are released; wake all callers in the queue."""
        idle, queue = self._close()
        for slot in idle:
            if slot.connection is not None:
                slot.connection.close()
        self._wake(queue)

    @locked
    def _close(self) -> tuple[list[ConnectionSlot], list[ConnectionRequest[T]]]:
        self._closed = True
        idle, self._idle = self._idle, []
        queue, self._queue = list(self._queue), deque()
        return idle, queue

    def metrics(self) -> dict[str, int]:
        """Return the numbers of connections, idle connections and waiting calls."""
        return {
            "connections": len(self._open_slots()),
            "idle": len(self._idle),
            "waiting": len(self._queue),
        }
