"""Sends the calls of threads: calls made while a script is in flight are sent together in the next one.

The first thread whose call joins a batch sends the batch, as soon as the thread before it has its replies. So a single
thread has no overhead, many threads share a round trip, and no thread serves others for long.

The store is unavailable if the server is silent for `timeout` seconds while a script is in flight; the time that calls
wait in a batch does not count. Few scripts are in flight at once, so that the server can serve other processes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tidegate._runtime.fork import fork_safe
from tidegate._runtime.lock import locked
from tidegate.errors import Closed, RateLimitError
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


class SyncScriptCall(PendingCall):
    """A call of a thread."""

    __slots__ = ("answer",)

    def __init__(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, values: ValueStep | None = None
    ) -> None:
        """Wait for an answer."""
        super().__init__(verb, asks, now, at, values)
        self.answer: list[Decision] | RateLimitError | None = None

    def set_answer(self, answer: list[Decision] | RateLimitError) -> None:
        """Keep the answer until the thread reads it."""
        self.answer = answer


class CallBatch:
    """Calls that are sent together, by the thread that created the batch.

    That thread holds `finished` until its call ends, with an answer or an exception. The others wait for this lock.
    """

    __slots__ = ("calls", "finished", "sent", "thread")

    def __init__(self) -> None:
        """Start without calls."""
        self.calls: list[SyncScriptCall] = []
        self.finished: threading.Lock = threading.Lock()
        self.sent: bool = False  # calls without an answer may have been charged
        self.thread: int = threading.get_ident()


class SyncPipeline:
    """The calls of all threads.

    A signal handler may raise at any instruction, so a call can end without sending its batch. `with` releases its
    locks whatever happens. The other threads of the batch then find their calls without an answer: these fail if they
    may have been sent; otherwise they join another batch.
    """

    def __init__(self, address: RedisAddress, protocol: ScriptProtocol, counts: CallCounts) -> None:
        """Connect with the first call."""
        self._address = address
        self._protocol = protocol
        self._counts = counts
        self.lock: threading.Lock = fork_safe(threading.Lock())
        self._sending = threading.Lock()  # held while a batch is sent
        self._sent: CallBatch | None = None  # the last batch that was sent
        self._next: CallBatch | None = None  # the batch that calls can join
        self._closed = False
        self._connection = ServerConnection(address)

    def ask(self, call: SyncScriptCall) -> list[Decision]:
        """Send a call with those of other threads, and return its answer."""
        try:
            while call.answer is None:
                own = CallBatch()
                with own.finished:
                    batch = self._join(call, own)
                    if batch is own:
                        with self._sending:
                            self._send(self._take(own))
                        break
                with batch.finished:
                    pass
                if call.answer is None:
                    self._interrupted(batch, call)
        finally:
            if call.answer is None:
                self._withdraw(call)
        if isinstance(call.answer, RateLimitError):
            raise call.answer.with_traceback(None)
        assert call.answer is not None  # noqa: S101 - every call that is sent is answered
        return call.answer

    @locked
    def _join(self, call: SyncScriptCall, own: CallBatch) -> CallBatch:
        """Add a call to the next batch, which is its own if there is none; return the batch."""
        if self._closed:
            raise Closed("the store is closed")
        for batch in (self._sent, self._next):  # what this thread sends, or is about to send
            if batch is not None and batch.thread == own.thread and batch.finished.locked():
                raise RuntimeError(
                    "a signal handler or finalizer called a store in the middle of a call of the same thread"
                )
        if self._next is None:
            self._next = own
        self._next.calls.append(call)
        return self._next

    @locked
    def _take(self, batch: CallBatch) -> list[SyncScriptCall]:
        """Return the calls of a batch that is about to be sent; no more calls can join it."""
        self._next = None
        self._sent = batch
        batch.sent = True
        return [call for call in batch.calls if call.answer is None]

    @locked
    def _interrupted(self, batch: CallBatch, call: SyncScriptCall) -> None:
        """Handle a call whose batch ended without answering it: the thread that sends the batch was interrupted."""
        if batch.sent:
            error = ConnectionError("the thread that sent this call was interrupted")
            call.set_answer(driver.explain(self._address, error))
        elif self._next is batch:
            self._next = None

    @locked
    def _withdraw(self, call: SyncScriptCall) -> None:
        """Remove a call that was interrupted before its batch was sent."""
        if self._next is not None and call in self._next.calls:
            self._next.calls.remove(call)

    def _send(self, calls: Sequence[PendingCall]) -> None:
        """Send calls, again if the server lacks the script or a calendar window."""
        scripts = list(self._protocol.scripts(calls)) if calls else []
        while scripts:
            self._counts.count_sent(scripts)
            try:
                replies = self._connection.exchange(scripts)
            except driver.FAILURES as error:
                self._fail(scripts, error)
                return
            scripts = [
                again
                for script, reply in zip(scripts, replies, strict=True)
                for again in self._handle_reply(script, reply)
            ]

    def _fail(self, scripts: Sequence[Script], error: Exception) -> None:
        """Close the connection, and answer calls with an error."""
        self._connection.drop()
        self._counts.failures += 1
        failure = driver.explain(self._address, error)
        for script in scripts:
            script.fail(failure)
        self._fail_next(failure)

    @locked
    def _fail_next(self, failure: RateLimitError) -> None:
        """Answer the calls of the next batch, too: they waited as long, and would fail again."""
        for call in self._next.calls if self._next is not None else ():
            call.set_answer(failure)

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
