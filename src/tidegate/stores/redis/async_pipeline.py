"""Sends the calls of tasks: all that come in one turn of the event loop go out together.

Scripts follow each other on one connection without waiting for answers, which come back in order. No task stands
between a call and the wire: the loop calls `_flush` at the end of a turn, and whatever reads the answers wakes those
who wait. A call that is cancelled while under way is answered all the same, and gives back what it took.

At most MAX_UNDER_WAY scripts are under way on a connection, so that other processes get their turn at the server; the
others wait here, and the turns of the loop that they came in are served in rotation, so that a batch of thousands does
not hold up the single call behind it.

A server is lost when it has said nothing for `timeout` seconds while a script is under way. Time that calls spend
waiting here does not count, nor does time for which this event loop stood still.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.bounds import SECOND
from tidegate.errors import Closed
from tidegate.stores.cancellation import CHARGING, DROPPABLE, MAX_CLOSING, corrections
from tidegate.stores.deadline import DeadlineTimer, wait_for
from tidegate.stores.redis import driver
from tidegate.stores.redis.late_replies import LateReplies
from tidegate.stores.redis.protocol import MAX_UNDER_WAY, PendingCall, Script
from tidegate.stores.redis.reply_reader import ReplyReader

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.errors import RateLimitError
    from tidegate.stores.base import Ask
    from tidegate.stores.redis.address import RedisAddress
    from tidegate.stores.redis.protocol import ScriptProtocol
    from tidegate.stores.redis.server_watch import ServerWatch
    from tidegate.stores.redis.store import CallCounts

    Wake = Callable[[Sequence[Ask]], None]

LISTEN_TURNS: Final = 2  # turns of a loop in which a server that has hung up is heard
MAX_POSTPONED: Final = 10_000  # give-backs that wait for the next connection; further ones are not given back
IDLE_SECONDS: Final = 0.01  # seconds of silence after which it is worth a look whether a connection still lives


class AsyncScriptCall(PendingCall):
    """A call of a task."""

    __slots__ = ("failed", "future", "line", "made")

    def __init__(self, line: AsyncPipeline, verb: str, asks: Sequence[Ask], now: int | None, at: int | None) -> None:
        """Wait for an answer."""
        super().__init__(verb, asks, now, at)
        self.line = line
        self.made = line.loop.time()
        self.failed = False  # it was told that there is no answer, which may come all the same
        self.future: asyncio.Future[list[Decision]] = line.create_future()

    @property
    def dropped(self) -> bool:
        """Whether the call was cancelled before it was sent, and nothing is lost without it."""
        return self.future.cancelled() and self.verb in DROPPABLE

    async def answered(self) -> list[Decision]:
        """Wait for the answer; a task that is cancelled meanwhile leaves it to the line."""
        try:
            return await self.future
        except asyncio.CancelledError:
            # Cancelled between the answer and the moment the task would have read it: it is done, and not cancelled.
            if not self.future.cancelled() and self.future.exception() is None:
                self.line.abandoned(self, self.future.result())
            raise

    def settle(self, answer: list[Decision] | RateLimitError) -> None:
        """Wake the task; if it went away or could not wait that long, undo what the answer tells of."""
        if isinstance(answer, list):
            if self.future.done():
                self.line.abandoned(self, answer)
            else:
                self.future.set_result(answer)
        elif not self.future.done():
            self.future.set_exception(answer)
        if not self.failed:
            self.line.settled()
        self.failed = not isinstance(answer, list)


class GiveBackCall(PendingCall):
    """A correction that nobody waits for."""

    __slots__ = ("failed", "line")

    def __init__(self, line: AsyncPipeline, asks: Sequence[Ask], now: int | None, at: int | None) -> None:
        """Give back what was charged at `at`."""
        super().__init__("adjust", asks, now, at)
        self.line = line
        self.failed = False

    def settle(self, answer: list[Decision] | RateLimitError) -> None:
        """Wake those who wait for these permits; without an answer, the charge may stay."""
        if isinstance(answer, list):
            self.line.counts.given_back += 1
            self.line.counts.not_given_back -= self.failed
            self.line.wake(self.asks)
        else:
            self.line.counts.not_given_back += 1
        if not self.failed:
            self.line.settled()
        self.failed = not isinstance(answer, list)


class AsyncPipeline:
    """Where the calls of one event loop gather: what a server and a cluster have in common."""

    def __init__(
        self, address: RedisAddress, wire: ScriptProtocol, counts: CallCounts, watch: ServerWatch, wake: Wake
    ) -> None:
        """Belong to the running loop; connect when first asked. `wake` lets waiters of keys ask again."""
        self.loop = asyncio.get_running_loop()
        self.create_future = partial(asyncio.Future, loop=self.loop)  # what the loop's own method does
        self.address = address
        self.wire = wire
        self.counts = counts
        self.watch = watch
        self.wake = wake
        self._queue: list[PendingCall] = []
        self._postponed: list[PendingCall] = []  # give-backs that could not be sent, for the next connection
        self._unsettled = 0  # calls that have no answer yet
        self._drained: asyncio.Future[None] | None = None  # done when there are none
        self._running: set[asyncio.Task[Any]] = set()
        self._closing = False  # new calls are refused, give-backs are not
        self._closed = False

    def ask(self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None) -> AsyncScriptCall:
        """Ask, together with whoever else does in this turn."""
        if self._closing:
            raise Closed("the store is closed")
        group = AsyncScriptCall(self, verb, asks, now, at)
        if self.wire.slotted:
            self.wire.slot_of(group)
        self.put(group)
        return group

    def put(self, group: PendingCall) -> None:
        """Let a call go out with the others of this turn."""
        self._unsettled += 1
        if self._closed:
            group.settle(Closed("the store is closed"))
            return
        self._queue.append(group)
        if len(self._queue) == 1:
            self.loop.call_soon(self._flush)

    def abandoned(self, group: AsyncScriptCall, decisions: list[Decision]) -> None:
        """Undo what was decided for a task that was cancelled; corrections stand, and free permits for others.

        A task that was told that there is no answer counts as denied, unless its policy allows then.
        """
        if group.verb in CHARGING:
            passed = round((self.loop.time() - group.made) * SECOND)
            for asks, at in corrections(group.verb, group.asks, decisions, passed):
                back = [ask for ask in asks if group.future.cancelled() or ask[0].on_store_error != "allow"]
                if back:
                    self.put(GiveBackCall(self, back, group.now, at))
        elif group.verb != "peek":
            self.wake(group.asks)

    def postpone(self, group: PendingCall, error: RateLimitError) -> None:
        """Keep a give-back that was not sent for the next connection; other calls get no answer."""
        if isinstance(group, GiveBackCall) and len(self._postponed) < MAX_POSTPONED and not self._closing:
            self._postponed.append(group)
        else:
            group.settle(error)

    def resume(self) -> None:
        """Send what was postponed."""
        if self._postponed:
            self._queue, self._postponed = self._queue + self._postponed, []
            self.loop.call_soon(self._flush)

    def settled(self) -> None:
        """Note that a call has its answer, whatever it is."""
        self._unsettled -= 1
        if not self._unsettled and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def drain(self) -> None:
        """Wait until every call has its answer and what was cancelled is given back, but not for long."""
        if self._unsettled:
            self._drained = self._drained or self.loop.create_future()
            await asyncio.wait((self._drained,), timeout=MAX_CLOSING)
            self._drained = None

    def _flush(self) -> None:
        """Send what has gathered in a turn of the loop."""
        groups, self._queue = self._queue, []
        if not groups:
            return
        try:
            self._send(list(self.wire.scripts(groups)))
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            trouble = driver.explain(self.address, error)
            for group in groups:
                group.settle(trouble)

    def _send(self, scripts: Iterable[Script]) -> None:
        raise NotImplementedError

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _take(self, script: Script, reply: bytes | Exception) -> list[Script]:
        """Answer a script's calls; give the scripts that must follow."""
        if isinstance(reply, driver.NoScriptError) and not script.full:
            script.full = True
            self.watch.unloaded(self.address.hosts)
            return [script]
        if isinstance(reply, Exception):
            script.fail(driver.explain(self.address, reply))
            return []
        if script.groups:
            self.watch.loaded(self.address.hosts)
        again = script.receive(reply)
        return list(self.wire.scripts(again)) if again else []

    def close_soon(self) -> None:
        """Let everything go when the loop gets to it."""
        self._closing = True
        self._closer = self.loop.create_task(self.close())

    async def close(self) -> None:
        """Wait for what is under way, then let everything go."""
        self._closing = True
        postponed, self._postponed = self._postponed, []
        for group in postponed:
            group.settle(Closed("the store was closed"))
        await self.drain()
        self._closed = True
        queue, self._queue = self._queue, []
        for group in queue:
            group.settle(Closed("the store was closed"))
        self._end(Closed("the store was closed"))
        self._hang_up()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, error: RateLimitError) -> None:
        """Answer everything that was not sent yet with an error."""
        raise NotImplementedError

    def _hang_up(self) -> None:
        """Close a connection of one's own."""


class ServerPipeline(AsyncPipeline):
    """Calls to one server, over one connection."""

    def __init__(
        self, address: RedisAddress, wire: ScriptProtocol, counts: CallCounts, watch: ServerWatch, wake: Wake
    ) -> None:
        """Connect when first asked."""
        super().__init__(address, wire, counts, watch, wake)
        self._transport: asyncio.Transport | None = None
        self._opening = False  # a connection is being made, or looked at: what comes meanwhile waits
        self._keeper: asyncio.Task[None] | None = None  # closes the connection, at the latest when the loop ends
        self._batches: deque[deque[Script]] = deque()  # not sent yet, those of one turn together
        self._flights: deque[Script] = deque()  # sent, in the order of their answers
        self._silence = DeadlineTimer(self.loop, self._silent)
        self._replies: ReplyReader | None = None  # of the connection
        self._late: asyncio.Future[LateReplies] | None = None  # done when it is given up, but still heard
        self._asked = False  # the first of two replies to a script that says ASKING has come
        self._answered = False  # this connection has answered something
        self._heard = 0.0  # when the server said something last, by the loop's time

    def _send(self, scripts: Iterable[Script]) -> None:
        batch = deque(scripts)
        if not batch:
            return
        self._batches.append(batch)
        if self._opening:
            return
        if self._transport is None:
            self._open()
        elif not self._flights and self.loop.time() - self._heard > IDLE_SECONDS:
            self._opening = True
            self.loop.call_soon(self._listen, LISTEN_TURNS)
        else:
            self._fill()

    def _open(self) -> None:
        self._opening = True
        self._start(self._connect())

    def _listen(self, turns: int) -> None:
        """Hear whether the server has hung up while this loop was busy or stood still; then write what waits."""
        if turns:
            self.loop.call_soon(self._listen, turns - 1)
        elif self._transport is None:
            self._open()
        else:
            self._opening = False
            self._fill()

    def _fill(self) -> None:
        """Write scripts while few are under way, one of each batch in turn."""
        if self._batches and self._transport is not None and self.watch.due(self):
            marker = self._marker()
            if marker is not None:
                self._write(marker, self._transport)
        while self._batches and len(self._flights) < MAX_UNDER_WAY and self._transport is not None:
            batch = self._batches.popleft()
            script = batch.popleft()
            if batch:
                self._batches.append(batch)
            if script.needed():
                self._write(script, self._transport)

    def _marker(self) -> Script | None:
        return self.watch.look()

    def _write(self, script: Script, transport: asyncio.Transport) -> None:
        try:
            packed = script.packed()
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            script.fail(driver.explain(self.address, error))
            return
        self.counts.sent((script,))
        self._flights.append(script)
        if len(self._flights) == 1:
            self._expect()
        transport.write(packed)

    def _expect(self) -> None:
        """Give the server its time for the script that it has to answer next."""
        self._silence.start(self.address.timeout + self._flights[0].patience)

    async def _connect(self) -> None:
        """Connect, write what waited for that, and close the connection in the end: when told, or with the loop."""
        try:
            opening = driver.connect_async(self.address)
            connection = await wait_for(opening, self.address.connect_timeout, driver.discard)
        except BaseException as error:
            self.counts.failures += 1
            self._opening = False
            self._break(error)
            if isinstance(error, Exception):
                return
            raise
        if self.address.kind == "sentinel":
            self.watch.connected((connection.host, connection.port))
        self._replies = ReplyReader(self._hear, self._receive, self._hung_up)
        transport = self._transport = driver.take_over(connection, self._replies)
        self._keeper = asyncio.current_task()
        self._opening = self._answered = False
        late = self._late = self.loop.create_future()
        try:
            self._root.resume()
            self._fill()
            await (await late).finish()
        except asyncio.CancelledError:
            if self._transport is transport:  # the loop ends: what was cancelled with it is given back first
                await self.drain()
            raise
        finally:
            if self._transport is transport:
                self._keeper = None
                self._break(ConnectionError("the event loop or the store was closed"))
            await connection.disconnect(nowait=True)

    def _hear(self) -> None:
        """Note that the server has said something; it has its time again for what is still to be answered."""
        self._heard = self.loop.time()
        self._answered = True
        if self._flights:
            self._expect()

    def _receive(self, reply: bytes | Exception) -> None:
        """Hand an answer to those who wait for it: they come in the order they were asked."""
        if self._transport is None:  # the answer before has ended the connection
            return
        if not self._flights:  # said without being asked: a farewell
            self._break(ConnectionError("Connection closed by server."))
            return
        script = self._flights[0]
        if script.asking and not self._asked:
            self._asked = True
            return
        self._asked = False
        self._flights.popleft()
        if self._flights:
            self._expect()
        else:
            self._silence.stop()
        again = self._take(script, reply)
        if isinstance(reply, (driver.ReadOnlyError, ConnectionError)):
            self._break(reply, again=True)
        if again:
            self._batches.appendleft(deque(again))  # they have waited once
        self._fill()

    def _hung_up(self, error: BaseException) -> None:
        if self._transport is not None:
            self.counts.failures += bool(self._flights)
            self._break(error, again=self._answered)

    def _silent(self) -> None:
        """Give up on a server that does not answer; what it says later tells what is to be given back."""
        self.counts.failures += 1
        flights, replies, given_up = self._flights, self._replies, self._late
        if replies is not None and given_up is not None and not given_up.done():
            late = LateReplies(deque(flights), asked=self._asked)
            replies.hand_to(lambda: None, late.take, late.lost)
            given_up.set_result(late)
            self._transport = self._keeper = None  # the keeper goes on until the answers are there, or too late
        self._break(TimeoutError())

    def _break(self, error: BaseException, *, again: bool = False) -> None:
        """Close the connection; whoever waits for an answer on it gets none.

        What was not sent yet goes over another connection, if it is worth trying `again`; else it gets no answer, too.
        """
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.set_protocol(asyncio.Protocol())  # what it still says is for nobody
            transport.abort()
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        self._silence.stop()
        self._asked = False
        flights, self._flights = self._flights, deque()
        trouble = driver.explain(self.address, error)
        for script in flights:
            script.fail(trouble)
        if not again or self._closed:
            self._end(trouble)
        elif self._batches and not self._opening:
            self._resend()

    def _resend(self) -> None:
        """Send what was not sent over a new connection."""
        self._open()

    def _end(self, error: RateLimitError) -> None:
        batches, self._batches = self._batches, deque()
        for batch in batches:
            for group in [group for script in batch for group in script.groups]:
                self._root.postpone(group, error)

    @property
    def _root(self) -> AsyncPipeline:
        """The line that calls were put into."""
        return self

    def _hang_up(self) -> None:
        self.watch.forget(self)
        self._break(ConnectionError("the store was closed"))
