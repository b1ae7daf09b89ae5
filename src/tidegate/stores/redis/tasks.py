"""Sends the calls of tasks: all that come in one turn of the event loop go out together.

Scripts follow each other on one connection without waiting for answers, which come back in order. No task stands
between a call and the wire: the loop calls `_flush` at the end of a turn, and whatever reads the answers wakes those
who wait. A call that is cancelled while under way is answered all the same, and gives back what it took.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.bounds import SECOND
from tidegate.errors import Closed
from tidegate.stores.redis import driver
from tidegate.stores.redis.cluster import Router, nobody
from tidegate.stores.redis.replies import Replies
from tidegate.stores.redis.wire import Group, Script

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.errors import RateLimitError
    from tidegate.stores.base import Ask
    from tidegate.stores.redis.address import Address
    from tidegate.stores.redis.store import Counts
    from tidegate.stores.redis.wire import Wire

LISTENING: Final = 2  # turns of a loop in which a server that has hung up is heard
TURNS: Final = 3  # turns of a loop that was late itself in which an answer that has come may still be read
IDLE: Final = 0.01  # seconds of silence after which it is worth a look whether a connection still lives
CHARGES: Final = ("acquire", "hold")


class TaskGroup(Group):
    """A call of a task."""

    __slots__ = ("future", "line")

    def __init__(self, line: TaskLine, verb: str, asks: Sequence[Ask], now: int | None, at: int | None) -> None:
        """Wait for an answer."""
        super().__init__(verb, asks, now, at)
        self.line = line
        self.future: asyncio.Future[list[Decision]] = line.create_future()

    @property
    def dropped(self) -> bool:
        """Whether the call was cancelled before it was sent, and nothing is lost without it."""
        return self.future.cancelled() and self.verb in (*CHARGES, "peek")

    def settle(self, answer: list[Decision] | RateLimitError) -> None:
        """Wake the task; if it went away, give back what it took."""
        if self.future.done():
            charged = self.future.cancelled() and self.verb in CHARGES
            if charged and isinstance(answer, list) and answer[0].allowed:
                self.line.give_back(self, answer)
        elif isinstance(answer, list):
            self.future.set_result(answer)
        else:
            self.future.set_exception(answer)


class TaskLine:
    """Where the calls of one event loop gather: what a server and a cluster have in common."""

    def __init__(self, address: Address, wire: Wire, counts: Counts) -> None:
        """Belong to the running loop; connect when first asked."""
        self.loop = asyncio.get_running_loop()
        self.create_future = partial(asyncio.Future, loop=self.loop)  # what the loop's own method does
        self.address = address
        self.wire = wire
        self.counts = counts
        self._queue: list[TaskGroup] = []
        self._waiting: list[Script] | None = None  # for a connection, or for what is needed to make one
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    def ask(self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None) -> asyncio.Future[list[Decision]]:
        """Get an answer to come, together with whoever else asks."""
        group = TaskGroup(self, verb, asks, now, at)
        if self.wire.slotted:
            self.wire.slot_of(group)
        self.put(group)
        return group.future

    def put(self, group: TaskGroup) -> None:
        """Let a call go out with the others of this turn."""
        if self._closed:
            group.settle(Closed("the store is closed"))
            return
        self._queue.append(group)
        if len(self._queue) == 1:
            self.loop.call_soon(self._flush)

    def give_back(self, group: TaskGroup, decisions: list[Decision]) -> None:
        """Undo a charge whose caller went away.

        Windows and logs correct exactly what was charged. A bucket does not remember a charge, but gets it back while
        it cannot have been full since; one that fills up within a second needs nothing back.
        """
        buckets, others = [], []
        for (policy, key, costs), decision in zip(group.asks, decisions, strict=True):
            rows = list(zip(policy.limits, costs, decision.views, strict=True))
            slow = [limit.algorithm == "token_bucket" and view[2] > SECOND for limit, _, view in rows]
            kept = [limit.algorithm != "token_bucket" for limit, _, _ in rows]
            buckets.append((policy, key, tuple(-c if yes else 0 for c, yes in zip(costs, slow, strict=True))))
            others.append((policy, key, tuple(-c if yes else 0 for c, yes in zip(costs, kept, strict=True))))
        at = decisions[0].at
        if group.verb == "hold":  # marked, so that the bucket does remember
            buckets, others = [], [(policy, key, tuple(-c for c in costs)) for policy, key, costs in group.asks]
        for asks, charged in ((buckets, None), (others, at)):
            if any(any(costs) for _, _, costs in asks):
                self.counts.given_back += 1
                self.put(TaskGroup(self, "adjust", asks, group.now, charged))

    def _flush(self) -> None:
        """Send what has gathered in a turn of the loop."""
        groups, self._queue = [group for group in self._queue if not group.dropped], []
        if not groups:
            return
        try:
            self._send(self.wire.scripts(groups))
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            trouble = driver.explain(self.address, error)
            for group in groups:
                group.settle(trouble)

    def _send(self, scripts: Iterable[Script]) -> None:
        raise NotImplementedError

    def _end(self, error: RateLimitError) -> None:
        for group in self._queue:
            group.settle(error)
        self._queue = []

    def _fail_waiting(self, error: RateLimitError) -> None:
        waiting, self._waiting = self._waiting or [], None
        for script in waiting:
            script.fail(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _take(self, script: Script, reply: bytes | Exception) -> list[Script]:
        """Answer a script's calls; give the scripts that must follow."""
        if isinstance(reply, driver.NoScriptError) and not script.full:
            script.full = True
            return [script]
        if isinstance(reply, Exception):
            script.fail(driver.explain(self.address, reply))
            return []
        again = script.receive(reply)
        return list(self.wire.scripts(again)) if again else []

    def close_soon(self) -> None:
        """Let everything go when the loop gets to it."""
        self._closing = self.loop.create_task(self.close())

    async def close(self) -> None:
        """Let everything go."""
        self._closed = True
        self._end(Closed("the store was closed"))
        self._fail_waiting(Closed("the store was closed"))
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ServerLine(TaskLine):
    """Calls to one server, over one connection."""

    def __init__(self, address: Address, wire: Wire, counts: Counts) -> None:
        """Connect when first asked."""
        super().__init__(address, wire, counts)
        self._transport: asyncio.Transport | None = None
        self._keeper: asyncio.Task[None] | None = None  # closes the connection, at the latest when the loop ends
        self._flights: deque[tuple[Script, float]] = deque()  # with the loop's time until which each is waited for
        self._timer: asyncio.Handle | None = None  # looks whether the first of them is late
        self._asked = False  # the first of two replies to a script that says ASKING has come
        self._heard = 0.0  # when the server answered last, by the loop's time

    def _send(self, scripts: Iterable[Script]) -> None:
        if self._waiting is not None:
            self._waiting += scripts
        elif self._transport is None:
            self._waiting = list(scripts)
            self._start(self._connect())
        elif not self._flights and self.loop.time() - self._heard > IDLE:
            self._waiting = list(scripts)
            self.loop.call_soon(self._listen, LISTENING)
        else:
            self._write(scripts)

    def _listen(self, turns: int) -> None:
        """Hear whether the server has hung up while this loop was busy or stood still; then write what waits."""
        if turns:
            self.loop.call_soon(self._listen, turns - 1)
        elif self._transport is None and self._waiting:
            self._start(self._connect())
        else:
            self._write_waiting()

    def _write(self, scripts: Iterable[Script]) -> None:
        for script in scripts:
            self.counts.sent((script,))
            self._flights.append((script, self.loop.time() + self.address.timeout))
            if self._transport is None:  # it broke while these were written
                self._break(ConnectionError("Connection closed by server."))
            else:
                self._transport.write(script.packed())
        if self._timer is None:
            self._timer = self.loop.call_later(self.address.timeout, self._look, TURNS)

    async def _connect(self) -> None:
        """Connect, write what waited for that, and close the connection in the end: when told, or with the loop."""
        try:
            async with asyncio.timeout(self.address.connect_timeout):
                connection = await driver.connect_async(self.address)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self.counts.failures += 1
            trouble = driver.explain(self.address, error)
            self._fail_waiting(trouble)
            self._end(trouble)  # they waited for the same connection
            self._break(error)
            return
        transport = self._transport = driver.take_over(connection, Replies(self._receive, self._hung_up))
        self._keeper = asyncio.current_task()
        try:
            self._write_waiting()
            await self.loop.create_future()
        finally:
            if self._transport is transport:
                self._keeper = None
                self._break(ConnectionError("the event loop or the store was closed"))
            await connection.disconnect(nowait=True)

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        self._write(waiting)

    def _receive(self, reply: bytes | Exception) -> None:
        """Hand an answer to those who wait for it: they come in the order they were asked."""
        if not self._flights:  # said without being asked: a farewell
            self._break(ConnectionError("Connection closed by server."))
            return
        script, _ = self._flights[0]
        if script.asking and not self._asked:
            self._asked = True
            return
        self._asked = False
        self._flights.popleft()
        self._heard = self.loop.time()
        again = self._take(script, reply)
        if isinstance(reply, (driver.ReadOnlyError, ConnectionError)):
            self._break(reply)
        if again:
            self._send(again)

    def _hung_up(self, error: BaseException) -> None:
        if self._transport is not None:
            self.counts.failures += bool(self._flights)
            self._break(error)

    def _look(self, turns: int) -> None:
        """Give up on a server that does not answer; but not because this loop itself was held up."""
        self._timer = None
        if not self._flights:
            return
        until = self._flights[0][1]
        if self.loop.time() < until:
            self._timer = self.loop.call_at(until, self._look, TURNS)
        elif turns:
            self._timer = self.loop.call_soon(self._look, turns - 1)
        else:
            self.counts.failures += 1
            self._break(TimeoutError())

    def _break(self, error: BaseException) -> None:
        """Close the connection; whoever waits for an answer on it gets none."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.set_protocol(asyncio.Protocol())  # what it still says is for nobody
            transport.abort()
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._asked = False
        flights, self._flights = self._flights, deque()
        trouble = driver.explain(self.address, error)
        for script, _ in flights:
            script.fail(trouble)

    async def close(self) -> None:
        """Close the connection."""
        self._break(ConnectionError("the store was closed"))
        await super().close()


class NodeLine(ServerLine):
    """Scripts to one server of a cluster; what it does not keep any more goes back to the cluster's line."""

    def __init__(self, cluster: ClusterLine, node: tuple[str, int]) -> None:
        """Connect when first asked."""
        self._cluster = cluster
        super().__init__(replace(cluster.address, kind="server", hosts=(node,)), cluster.wire, cluster.counts)

    def _take(self, script: Script, reply: bytes | Exception) -> list[Script]:
        if not isinstance(reply, driver.NoScriptError) and self._cluster.router.redirect(script, reply):
            self._cluster.send_again([script])
            return []
        return super()._take(script, reply)

    def _break(self, error: BaseException) -> None:
        self._cluster.router.stale = True
        super()._break(error)


class ClusterLine(TaskLine):
    """Calls to a cluster: a script for each slot, and a connection to each server on which they follow each other."""

    def __init__(self, address: Address, wire: Wire, counts: Counts) -> None:
        """Connect when first asked."""
        super().__init__(address, wire, counts)
        self.router = Router(address)
        self._nodes: dict[tuple[str, int], NodeLine] = {}

    def _send(self, scripts: Iterable[Script]) -> None:
        if self._waiting is not None:
            self._waiting += scripts
        elif self.router.stale:
            self._waiting = list(scripts)
            self._start(self._send_anew())
        else:
            self._distribute(scripts)

    async def _send_anew(self) -> None:
        """Find out where everything is, then send."""
        try:
            await self._learn()
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self.counts.failures += 1
            self._fail_waiting(driver.explain(self.address, error))
        else:
            waiting, self._waiting = self._waiting or [], None
            self._distribute(waiting)

    def _distribute(self, scripts: Iterable[Script]) -> None:
        for node, some in self.router.by_node(scripts).items():
            if node is None:
                for script in some:
                    script.fail(nobody(script))
            else:
                if node not in self._nodes:
                    self._nodes[node] = NodeLine(self, node)
                self._nodes[node]._send(some)  # noqa: SLF001 - of the same family

    def send_again(self, scripts: list[Script]) -> None:
        """Send scripts that were not run to where they belong."""
        self._send(scripts)

    async def _learn(self) -> None:
        trouble: Exception | None = None
        for node in self.router.candidates():
            try:
                self.router.learn(node, await driver.read_slots_async(self.address, node))
            except driver.FAILURES as error:
                trouble = error
            else:
                return
        if trouble is not None:
            raise trouble

    async def close(self) -> None:
        """Close all connections."""
        await super().close()
        for node in self._nodes.values():
            await node.close()
