"""Sends the calls of threads: calls made while a script is in flight are sent together in the next one.

The first thread is the leader: it sends all queued calls, then one of the threads that queued meanwhile becomes the
leader. So a single thread has no overhead, many threads share a round trip, and no thread serves others for long.

The store is unavailable if the server is silent for `timeout` seconds while a script is in flight; the time that calls
wait in the queue does not count. Few scripts are in flight at once, so that the server can serve other processes.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tidegate._runtime.fork import fork_safe
from tidegate._runtime.lock import locked
from tidegate.errors import Closed, RateLimitError, StoreUnavailable
from tidegate.stores._redis import driver
from tidegate.stores._redis.library import Form
from tidegate.stores._redis.protocol import MAX_IN_FLIGHT, PendingCall, Script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask
    from tidegate.stores._redis.address import RedisAddress
    from tidegate.stores._redis.protocol import ScriptProtocol
    from tidegate.stores._redis.store import CallCounts
    from tidegate.stores._redis.value_steps import ValueStep

FIRST_CHECK: Final = 0.005  # seconds after which a waiting thread checks whether the leader is alive; then longer
MAX_CHECK: Final = 0.1  # maximum seconds between two such checks


class SyncScriptCall(PendingCall):
    """A call of a thread, which waits until it is answered or becomes the leader."""

    __slots__ = ("answer", "running", "signal", "thread")

    def __init__(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, values: ValueStep | None = None
    ) -> None:
        """Wait for an answer."""
        super().__init__(verb, asks, now, at, values)
        self.answer: list[Decision] | RateLimitError | None = None
        self.signal: threading.Lock | None = None  # only for threads that have to wait
        self.running: threading.Lock = threading.Lock()  # held while the thread is in `ask`
        self.thread: int = threading.get_ident()

    def set_answer(self, answer: list[Decision] | RateLimitError) -> None:
        """Keep the answer; the leader wakes the thread."""
        self.answer = answer

    def start_again(self) -> None:
        """Forget the answer, so that the call can be sent again."""
        self.answer = self.signal = None

    def wake(self) -> None:
        """Wake the thread, which checks whether its call is answered or has become the leader."""
        if self.signal is not None:
            with suppress(RuntimeError):  # already woken
                self.signal.release()


class SyncPipeline:
    """The queue of the calls of all threads.

    A signal handler may raise at any instruction, so a leader can end without making the next thread the leader. Each
    call therefore holds a lock while it is running: waiting threads check from time to time whether the leader still
    holds its own; if not, one of them takes over.
    `_batch` holds the calls that the leader has taken from the queue. Those without an answer when another thread takes
    over may have been charged, and fail.
    """

    def __init__(self, address: RedisAddress, protocol: ScriptProtocol, counts: CallCounts) -> None:
        """Connect with the first call."""
        self._address = address
        self._protocol = protocol
        self._counts = counts
        self.lock: threading.Lock = fork_safe(threading.Lock())
        self._queue: list[SyncScriptCall] = []
        self._batch: list[SyncScriptCall] = []
        self._leader: SyncScriptCall | None = None
        self._closed = False
        self._connection = ServerConnection(address)

    def ask(self, call: SyncScriptCall) -> list[Decision]:
        """Queue a call and wait for its answer."""
        failed = False
        with call.running:
            try:
                self._join(call)
                if call.signal is not None:
                    self._wait(call, call.signal)
                if call.answer is None:
                    failed = self._exchange(self._take_batch())
            finally:
                if self._leader is call:
                    self._finish(call, failed=failed)
                elif call.answer is None:
                    self._withdraw(call)
        if isinstance(call.answer, RateLimitError):
            raise call.answer.with_traceback(None)
        assert call.answer is not None  # noqa: S101 - the leader answers all calls that it takes
        return call.answer

    @locked
    def _join(self, call: SyncScriptCall) -> None:
        """Queue a call; it becomes the leader if there is none."""
        if self._closed:
            raise Closed("the store is closed")
        if self._leader is not None:
            call.signal = threading.Lock()
            call.signal.acquire()
        self._queue.append(call)
        if self._leader is None:
            self._leader = call

    def _wait(self, call: SyncScriptCall, signal: threading.Lock) -> None:
        """Wait until the call is answered or becomes the leader."""
        interval = FIRST_CHECK
        while call.answer is None and self._leader is not call:
            if not signal.acquire(timeout=interval):
                self._replace_lost_leader(call)
                interval = min(2 * interval, MAX_CHECK)

    def _replace_lost_leader(self, call: SyncScriptCall) -> None:
        """Make a call the leader if the leader's call has ended."""
        leader = self._leader
        if leader is call:
            return
        if leader is None or not leader.running.locked():
            self._replace(leader, call)
        elif leader.thread == call.thread:
            raise RuntimeError(
                "a signal handler or finalizer called a store in the middle of a call of the same thread"
            )

    @locked
    def _replace(self, leader: SyncScriptCall | None, call: SyncScriptCall) -> None:
        if self._leader is leader and call.answer is None:
            self._leader = call

    @locked
    def _take_batch(self) -> list[SyncScriptCall]:
        """Take all queued calls. Only the leader calls this."""
        self._fail_batch()
        self._batch += [call for call in self._queue if call.answer is None]
        self._queue = []
        return [call for call in self._batch if call.answer is None]

    def _fail_batch(self) -> None:
        """Fail the calls that a leader took but did not answer, since it was interrupted."""
        for call in self._batch:
            if call.answer is None:
                call.set_answer(
                    driver.explain(self._address, ConnectionError("the thread that sent this call was interrupted"))
                )

    def _finish(self, leader: SyncScriptCall, *, failed: bool) -> None:
        """Make the next thread the leader, then wake all. If this is interrupted, they find out when they check."""
        batch, following = self._hand_on(leader, failed=failed)
        for call in batch:
            call.wake()
        if following is not None:
            following.wake()

    @locked
    def _hand_on(self, leader: SyncScriptCall, *, failed: bool) -> tuple[list[SyncScriptCall], SyncScriptCall | None]:
        """Make the next call the leader, after all calls of the batch are answered."""
        if leader not in self._batch and leader in self._queue:  # interrupted before it took the batch
            self._queue.remove(leader)
        if failed:  # queued calls waited as long, and would fail again
            failure = next((each.answer for each in self._batch if isinstance(each.answer, StoreUnavailable)), None)
            for call in self._queue:
                if call.answer is None and failure is not None:
                    call.set_answer(failure)
        self._fail_batch()
        batch = self._batch + [call for call in self._queue if call.answer is not None]
        self._queue = [call for call in self._queue if call.answer is None]
        following = self._queue[0] if self._queue else None
        self._batch = []
        self._leader = following
        return batch, following

    @locked
    def _withdraw(self, call: SyncScriptCall) -> None:
        """Remove a call from the queue that was interrupted while it waited."""
        if call in self._queue:
            self._queue.remove(call)

    def _exchange(self, calls: Sequence[PendingCall]) -> bool:
        """Send calls, again if the server lacks the script or a calendar window; return whether that failed."""
        if not calls:
            return False
        scripts = list(self._protocol.scripts(calls))
        while scripts:
            self._counts.count_sent(scripts)
            try:
                replies = self._connection.exchange(scripts)
            except driver.FAILURES as error:
                self._fail(scripts, error)
                return True
            scripts = [
                again
                for script, reply in zip(scripts, replies, strict=True)
                for again in self._handle_reply(script, reply)
            ]
        return False

    def _fail(self, scripts: Sequence[Script], error: Exception) -> None:
        """Close the connection, and answer calls with an error."""
        self._connection.drop()
        self._counts.failures += 1
        failure = driver.explain(self._address, error)
        for script in scripts:
            script.fail(failure)

    def _handle_reply(self, script: Script, reply: bytes | Exception) -> list[Script]:
        """Answer the calls of a script; return the scripts to be sent next."""
        if isinstance(reply, driver.ReadOnlyError):
            self._connection.drop()
        return script.handle_reply(reply, self._address)

    @locked
    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        self._connection.drop()


class ServerConnection:
    """The connection to one server, from a pool of redis-py, which checks it before each exchange.

    `_in_use` is set during an exchange. An exchange that finds it set closes the pool: the previous exchange was
    interrupted, and its replies may still arrive.
    """

    def __init__(self, address: RedisAddress) -> None:
        """Connect with the first exchange."""
        self._address = address
        self._form = Form.FUNCTION  # in which scripts are sent
        self._pool: driver.AnyPool = None
        self._in_use = False

    def exchange(self, scripts: Sequence[Script]) -> list[bytes | Exception]:
        """Send scripts and read their replies."""
        if self._in_use:
            self.drop()
        self._in_use = True
        if self._pool is None:
            self._form = Form.FUNCTION
            self._pool = driver.open_pool(self._address)
        pool = self._pool
        connection = pool.get_connection()
        replies: list[bytes | Exception] = []
        sent = 0
        for number, script in enumerate(scripts):
            ahead = scripts[sent : number + MAX_IN_FLIGHT]
            if ahead:
                packed = b"".join([each.pack(self._form) for each in ahead])
                connection.send_packed_command([packed], check_health=False)
                sent += len(ahead)
            timeout = self._address.timeout + script.extra_timeout
            for _ in range(script.preceding_replies):
                script.receive_preceding(driver.read_reply(connection, timeout))
            replies.append(driver.read_reply(connection, timeout))
            if script.form is not self._form and script.form is not None and isinstance(replies[-1], bytes):
                self._form = script.form.next_calls
        pool.release(connection)
        self._in_use = False
        return replies

    def drop(self) -> None:
        """Close the connection; the next call opens a new one. If this is interrupted, it can be repeated."""
        if self._pool is not None:
            driver.close_pool(self._pool)
        self._pool = None
        self._in_use = False
