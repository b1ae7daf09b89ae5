"""Sends the calls of tasks: calls made in one iteration of the event loop are sent together.

Scripts are pipelined on one connection, and their replies arrive in order. No task is needed to send a call: the loop
calls `_flush` at the end of an iteration, and the ReplyReader wakes the callers. The reply to a call that is cancelled
in flight is still read, and its charge is refunded.

At most MAX_IN_FLIGHT scripts are in flight on a connection, so that the server can serve other processes. The others
wait in batches, one per iteration of the loop, which are served in rotation, so that a batch of thousands does not
delay the single call behind it.

The store is unavailable if the server is silent for `timeout` seconds while a script is in flight. The time that calls
wait here does not count, nor the time for which the event loop was blocked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.core._bounds import SECOND
from tidegate.core._decision import VERBS
from tidegate.errors import Closed
from tidegate.stores._cancellation import MAX_CLOSING, corrections, report_lost
from tidegate.stores._deadline import DeadlineTimer, wait_for
from tidegate.stores._redis import driver
from tidegate.stores._redis.late_replies import LateReplies, ScriptsInFlight
from tidegate.stores._redis.library import Form
from tidegate.stores._redis.protocol import MAX_IN_FLIGHT, PendingCall, Script
from tidegate.stores._redis.reply_reader import check_open, discard, open_connection
from tidegate.stores._values import changes_values

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from tidegate.core._decision import Decision
    from tidegate.errors import RateLimitError
    from tidegate.stores._base import Ask, Store
    from tidegate.stores._redis.address import RedisAddress
    from tidegate.stores._redis.protocol import ScriptProtocol
    from tidegate.stores._redis.reply_reader import ReplyReader
    from tidegate.stores._redis.store import CallCounts
    from tidegate.stores._redis.value_steps import ValueStep

CHECK_ITERATIONS: Final = 2  # iterations of the loop after which a closed connection is noticed
MAX_POSTPONED: Final = 10_000  # refunds that wait for the next connection; further ones are dropped
IDLE_SECONDS: Final = 0.01  # seconds of silence after which a connection is checked before it is used


class AsyncScriptCall(PendingCall):
    """A call of a task."""

    __slots__ = ("created_at", "failed", "future", "pipeline")

    def __init__(
        self,
        pipeline: AsyncPipeline,
        verb: str,
        asks: Sequence[Ask],
        now: int | None,
        at: int | None,
        values: ValueStep | None = None,
    ) -> None:
        """Wait for an answer."""
        super().__init__(verb, asks, now, at, values)
        self.pipeline: AsyncPipeline = pipeline
        self.created_at: float = pipeline.loop.time()
        self.failed: bool = False  # it was answered with an error; a reply may still arrive
        self.future: asyncio.Future[list[Decision]] = pipeline.create_future()

    @property
    def dropped(self) -> bool:
        """Whether the call was cancelled before it was sent, and need not be sent."""
        return self.future.cancelled() and VERBS[self.verb].asks and not self.writes

    @property
    def writes(self) -> bool:
        """Whether the call changes values: then it is made, and keeps its charge, although its task was cancelled."""
        return self.values is not None and changes_values(self.values.writes)

    async def wait(self) -> list[Decision]:
        """Wait for the answer; the pipeline handles the answer of a cancelled task."""
        try:
            return await self.future
        except asyncio.CancelledError:
            # Cancelled after the answer arrived and before the task read it: the future is done, and not cancelled.
            if not self.future.cancelled():
                error = self.future.exception()
                if error is None:
                    self.pipeline.give_back(self, self.future.result())
                else:
                    self._report_lost(error)
            raise

    def _report_lost(self, error: object) -> None:
        if not self.writes:
            report_lost(self.pipeline.store, self.verb, self.asks, self.now, self.at, error)

    def set_answer(self, answer: list[Decision] | RateLimitError) -> None:
        """Wake the task; if it was cancelled or has timed out, refund the charge."""
        if isinstance(answer, list):
            if self.future.done():
                self.pipeline.give_back(self, answer)
            else:
                self.future.set_result(answer)
        elif not self.future.done():
            self.future.set_exception(answer)
        elif self.future.cancelled() and not self.failed:
            self._report_lost(answer)
        if not self.failed:
            self.pipeline.call_answered()
        self.failed = not isinstance(answer, list)


class CorrectionCall(PendingCall):
    """A correction in the background."""

    __slots__ = ("failed", "pipeline")

    def __init__(self, pipeline: AsyncPipeline, asks: Sequence[Ask], now: int | None, at: int | None) -> None:
        """Refund what was charged at `at`."""
        super().__init__("adjust", asks, now, at)
        self.pipeline: AsyncPipeline = pipeline
        self.failed: bool = False

    def set_answer(self, answer: list[Decision] | RateLimitError) -> None:
        """Wake waiters of these permits; without an answer, the charge may stay."""
        if isinstance(answer, list):
            self.pipeline.counts.refunded += 1
            self.pipeline.counts.refunds_failed -= self.failed
            self.pipeline.store.wake(self.asks)
        else:
            self.pipeline.counts.refunds_failed += 1
        if not self.failed:
            self.pipeline.call_answered()
        self.failed = not isinstance(answer, list)


class AsyncPipeline:
    """The queue of the calls of one event loop: the base of ServerPipeline and ClusterPipeline."""

    def __init__(self, address: RedisAddress, protocol: ScriptProtocol, counts: CallCounts, store: Store) -> None:
        """Serve the running event loop; connect with the first call."""
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        # as loop.create_future does, but faster
        self.create_future: Callable[[], asyncio.Future[Any]] = partial(asyncio.Future, loop=self.loop)
        self.address = address
        self.protocol = protocol
        self.counts = counts
        self.store = store
        self._queue: list[PendingCall] = []
        self._postponed: list[PendingCall] = []  # refunds that could not be sent, for the next connection
        self._unanswered = 0  # calls that have no answer yet
        self._drained: asyncio.Future[None] | None = None  # done when there are none
        self._running: set[asyncio.Task[Any]] = set()
        self._closing = False  # new calls are rejected, refunds are not
        self._closed = False

    def ask(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, values: ValueStep | None = None
    ) -> AsyncScriptCall:
        """Queue a call, to be sent with the others of this iteration."""
        if self._closing:
            raise Closed("the store is closed")
        call = AsyncScriptCall(self, verb, asks, now, at, values)
        if self.protocol.slotted:
            call.slot = self.protocol.slot_of(call)
        self.enqueue(call)
        return call

    def enqueue(self, call: PendingCall) -> None:
        """Add a call to the queue of this iteration."""
        self._unanswered += 1
        if self._closed:
            call.set_answer(Closed("the store is closed"))
            return
        self._queue.append(call)
        if len(self._queue) == 1:
            self.loop.call_soon(self._flush)

    def give_back(self, call: AsyncScriptCall, decisions: list[Decision]) -> None:
        """Refund the charge of a cancelled call, unless it wrote values; a correction stays, and wakes waiters.

        A call that was answered with an error counts as denied, unless its policy has `on_store_error: allow`.
        """
        if call.writes and VERBS[call.verb].charges:
            return
        if VERBS[call.verb].charges:
            passed = round((self.loop.time() - call.created_at) * SECOND)
            for asks, at in corrections(call.verb, call.asks, decisions, passed):
                back = [ask for ask in asks if call.future.cancelled() or ask[0].on_store_error != "allow"]
                if back:
                    correction = CorrectionCall(self, back, call.now, at)
                    correction.slot = call.slot
                    self.enqueue(correction)
        elif VERBS[call.verb].changes:
            self.store.wake(call.asks)

    def postpone(self, call: PendingCall, error: RateLimitError) -> None:
        """Keep a refund that was not sent for the next connection; answer other calls with the error."""
        if isinstance(call, CorrectionCall) and len(self._postponed) < MAX_POSTPONED and not self._closing:
            self._postponed.append(call)
        else:
            call.set_answer(error)

    def resume(self) -> None:
        """Send postponed refunds."""
        if self._postponed:
            self._queue, self._postponed = self._queue + self._postponed, []
            self.loop.call_soon(self._flush)

    def call_answered(self) -> None:
        """Record that a call was answered."""
        self._unanswered -= 1
        if not self._unanswered and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def drain(self) -> None:
        """Wait until all calls are answered and cancelled ones refunded, for MAX_CLOSING seconds at most."""
        if self._unanswered:
            self._drained = self._drained or self.loop.create_future()
            await asyncio.wait((self._drained,), timeout=MAX_CLOSING)
            self._drained = None

    def _flush(self) -> None:
        """Send the calls of one iteration of the loop."""
        calls, self._queue = self._queue, []
        if not calls:
            return
        try:
            self.send_scripts(list(self.protocol.scripts(calls)))
        except Exception as error:  # noqa: BLE001 - any exception must reach the callers
            failure = driver.explain(self.address, error)
            for call in calls:
                call.set_answer(failure)

    def send_scripts(self, scripts: Iterable[Script]) -> None:
        """Send scripts, or queue them until the server can be reached."""
        raise NotImplementedError

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _handle_reply(self, script: Script, reply: bytes | Exception) -> list[Script]:
        """Answer the calls of a script; return the scripts to be sent next."""
        return script.handle_reply(reply, self.address)

    def close_soon(self) -> None:
        """Schedule `close` in the event loop."""
        self._closing = True
        self._closer = self.loop.create_task(self.close())

    async def close(self) -> None:
        """Wait for calls in flight, then close the connection."""
        self._closing = True
        postponed, self._postponed = self._postponed, []
        for call in postponed:
            call.set_answer(Closed("the store was closed"))
        await self.drain()
        self._closed = True
        queue, self._queue = self._queue, []
        for call in queue:
            call.set_answer(Closed("the store was closed"))
        self._fail_unsent(Closed("the store was closed"))
        self._disconnect()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail_unsent(self, error: RateLimitError) -> None:
        """Answer all calls that were not sent yet with an error."""
        raise NotImplementedError

    def _disconnect(self) -> None:
        """Close the connection, if this pipeline has one."""


class ServerPipeline(AsyncPipeline):
    """Calls to one server, over one connection."""

    def __init__(self, address: RedisAddress, protocol: ScriptProtocol, counts: CallCounts, store: Store) -> None:
        """Connect with the first call."""
        super().__init__(address, protocol, counts, store)
        self._transport: asyncio.Transport | None = None
        self._opening = False  # a connection is being opened or checked: calls wait
        # Closes the connection, at the latest when the loop ends.
        self._connection_task: asyncio.Task[None] | None = None
        self._batches: deque[deque[Script]] = deque()  # not sent yet, one batch per iteration of the loop
        self._in_flight = ScriptsInFlight()
        self._timeout_timer = DeadlineTimer(self.loop, self._timed_out)
        self._replies: ReplyReader | None = None  # of the connection
        self._late: asyncio.Future[LateReplies] | None = None  # done when the connection timed out but is still read
        self._answered = False  # this connection has received a reply
        self._form = Form.FUNCTION  # in which scripts are sent
        self._last_data_at = 0.0  # loop time of the last data from the server

    def send_scripts(self, scripts: Iterable[Script]) -> None:
        """Send scripts, or queue them until the server can be reached."""
        batch = deque(scripts)
        if not batch:
            return
        self._batches.append(batch)
        if self._opening:
            return
        if self._transport is None:
            self._open()
        elif not self._in_flight and self.loop.time() - self._last_data_at > IDLE_SECONDS:
            self._opening = True
            self.loop.call_soon(self._check_connection, CHECK_ITERATIONS)
        else:
            self._send_batches()

    def _open(self) -> None:
        self._opening = True
        self._start(self._connect())

    def _check_connection(self, iterations: int) -> None:
        """Check whether the server closed the connection while the loop was busy; then send what waits."""
        if iterations:
            self.loop.call_soon(self._check_connection, iterations - 1)
        elif self._transport is None:
            self._open()
        else:
            self._opening = False
            self._send_batches()

    def _send_batches(self) -> None:
        """Send scripts while few are in flight, one of each batch in rotation."""
        while self._batches and len(self._in_flight) < MAX_IN_FLIGHT and self._transport is not None:
            batch = self._batches.popleft()
            script = batch.popleft()
            if batch:
                self._batches.append(batch)
            if script.drop_cancelled():
                self._send_script(script, self._transport)

    def _send_script(self, script: Script, transport: asyncio.Transport) -> None:
        try:
            packed = script.pack(self._form)
        except Exception as error:  # noqa: BLE001 - any exception must reach the callers
            script.fail(driver.explain(self.address, error))
            return
        self.counts.count_sent((script,))
        self._in_flight.append(script)
        if len(self._in_flight) == 1:
            self._restart_timeout()
        transport.write(packed)

    def _restart_timeout(self) -> None:
        """Restart the timeout for the next reply."""
        self._timeout_timer.start(self.address.timeout + self._in_flight[0].extra_timeout)

    async def _connect(self) -> None:
        """Connect, send what waits, and close the connection when cancelled or when the loop ends."""
        try:
            opening = open_connection(self.address)
            connection = await wait_for(opening, self.address.connect_timeout, discard)
            check_open(connection)
        except BaseException as error:
            self.counts.failures += 1
            self._opening = False
            self._fail_connection(error)
            if isinstance(error, Exception):
                return
            raise
        transport, self._replies = connection
        self._transport = transport
        self._replies.set_callbacks(self._data_received, self._receive, self._connection_lost)
        self._connection_task = asyncio.current_task()
        self._opening = self._answered = False
        self._form = Form.FUNCTION
        late = self._late = self.loop.create_future()
        try:
            self._owner.resume()
            self._send_batches()
            await (await late).finish()
        except asyncio.CancelledError:
            if self._transport is transport:  # the loop ends: cancelled calls are refunded first
                await self.drain()
            raise
        finally:
            if self._transport is transport:
                self._connection_task = None
                self._fail_connection(ConnectionError("the event loop or the store was closed"))
            transport.abort()

    def _data_received(self) -> None:
        """Record that data arrived, and restart the timeout."""
        self._last_data_at = self.loop.time()
        self._answered = True
        if self._in_flight:
            self._restart_timeout()

    def _receive(self, reply: bytes | Exception) -> None:
        """Pass a reply to the oldest script in flight."""
        if self._transport is None:  # the reply before has closed the connection
            return
        if not self._in_flight:  # an unexpected reply: the server closes the connection
            self._fail_connection(ConnectionError("Connection closed by server."))
            return
        script = self._in_flight.take_answered(reply)
        if script is None:
            return
        if self._in_flight:
            self._restart_timeout()
        else:
            self._timeout_timer.stop()
        if script.form is not self._form and script.form is not None and isinstance(reply, bytes):
            self._form = script.form.next_calls
        again = self._handle_reply(script, reply)
        if isinstance(reply, (driver.ReadOnlyError, ConnectionError)):
            self._fail_connection(reply, again=True)
        if again:
            self._batches.appendleft(deque(again))  # they have waited already
        self._send_batches()

    def _connection_lost(self, error: BaseException) -> None:
        if self._transport is not None:
            self.counts.failures += bool(self._in_flight)
            self._fail_connection(error, again=self._answered)

    def _timed_out(self) -> None:
        """Time out; late replies are still read, so that their charges can be refunded."""
        self.counts.failures += 1
        replies, given_up = self._replies, self._late
        if replies is not None and given_up is not None and not given_up.done():
            late = LateReplies(self._in_flight)
            replies.set_callbacks(lambda: None, late.handle_reply, late.connection_lost)
            given_up.set_result(late)
            # The task continues until the late replies have arrived or MAX_LATE has passed.
            self._transport = self._connection_task = None
        self._fail_connection(TimeoutError())

    def _fail_connection(self, error: BaseException, *, again: bool = False) -> None:
        """Close the connection; scripts in flight are answered with the error.

        With `again`, scripts that were not sent yet are sent over a new connection; otherwise they fail too.
        """
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.set_protocol(asyncio.Protocol())  # ignore further data
            transport.abort()
        if self._connection_task is not None:
            self._connection_task.cancel()
            self._connection_task = None
        self._timeout_timer.stop()
        in_flight, self._in_flight = self._in_flight, ScriptsInFlight()
        failure = driver.explain(self.address, error)
        for script in in_flight:
            script.fail(failure)
        if not again or self._closed:
            self._fail_unsent(failure)
        elif self._batches and not self._opening:
            self._resend()

    def _resend(self) -> None:
        """Send over a new connection what was not sent."""
        self._open()

    def _fail_unsent(self, error: RateLimitError) -> None:
        batches, self._batches = self._batches, deque()
        for batch in batches:
            for call in [call for script in batch for call in script.calls]:
                self._owner.postpone(call, error)

    @property
    def _owner(self) -> AsyncPipeline:
        """The pipeline that queued the calls."""
        return self

    def _disconnect(self) -> None:
        self._fail_connection(ConnectionError("the store was closed"))
