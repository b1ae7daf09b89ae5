"""Sends the calls of threads: whoever comes while a script is under way goes along with the next one.

The first thread leads: it sends what has gathered, for all, and hands the lead to one of those that came meanwhile. So
a thread alone pays nothing, many threads pay one round trip together, and no thread works for others for long.

A server is lost when it has said nothing for `timeout` seconds while a script is under way, however long calls have
waited for their turn. Few scripts are under way at once, so that other processes get their turn at the server.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tidegate.errors import Closed, RateLimitError
from tidegate.lock import REENTERED, Lock, locked, threads_holding
from tidegate.stores.redis import driver
from tidegate.stores.redis.cluster import SlotMap, nobody
from tidegate.stores.redis.protocol import MAX_UNDER_WAY, PendingCall, Script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.decision import Decision
    from tidegate.stores.base import Ask
    from tidegate.stores.redis.address import RedisAddress
    from tidegate.stores.redis.protocol import ScriptProtocol
    from tidegate.stores.redis.server_watch import ServerWatch
    from tidegate.stores.redis.store import CallCounts

FIRST_LOOK: Final = 0.005  # seconds that a thread waits before it looks whether the leader is alive; then ever longer
MAX_LOOK: Final = 0.1  # seconds between two such looks at most


class SyncScriptCall(PendingCall):
    """A call of a thread, which waits until it is answered or leads."""

    __slots__ = ("answer", "signal")

    def __init__(self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None) -> None:
        """Wait for an answer."""
        super().__init__(verb, asks, now, at)
        self.answer: list[Decision] | RateLimitError | None = None
        self.signal: threading.Lock | None = None  # made by those that have to wait

    def settle(self, answer: list[Decision] | RateLimitError) -> None:
        """Take the answer; the thread is woken with the rest of the script."""
        self.answer = answer

    def wake(self) -> None:
        """Let its thread look whether it is answered or leads."""
        if self.signal is not None:
            with suppress(RuntimeError):  # woken already
                self.signal.release()


class SyncPipeline:
    """Where calls of threads gather.

    A signal handler may raise at any instruction, so a leader can end without handing on the lead. `_leader` is
    therefore known by its frame, which has the group as its local variable `held` (see `tidegate.lock`): those that
    wait look for it from time to time, and one of them takes over. `_batch` is what the leader has taken from the
    queue. Whatever is unanswered there when another takes over may have been charged, and fails.
    """

    def __init__(self, address: RedisAddress, wire: ScriptProtocol, counts: CallCounts, watch: ServerWatch) -> None:
        """Connect when first asked."""
        self._address = address
        self._wire = wire
        self._counts = counts
        self._watch = watch
        self.lock = Lock()
        self._queue: list[SyncScriptCall] = []
        self._batch: list[SyncScriptCall] = []
        self._leader: SyncScriptCall | None = None
        self._closed = False
        self._link: ServerConnection | ClusterConnections
        self._link = (
            ClusterConnections(address, counts, watch)
            if address.kind == "cluster"
            else ServerConnection(address, watch)
        )

    def ask(self, group: SyncScriptCall) -> list[Decision]:
        """Get an answer, together with whoever else asks."""
        self._wire.slot_of(group)
        held = group  # what `_take_over` looks for in other threads
        failed = False
        try:
            self._join(group)
            if group.signal is not None:
                self._wait(group, group.signal)
            if group.answer is None:
                failed = self._exchange(self._take_batch())
        finally:
            if self._leader is held:
                self._finish(group, failed=failed)
            elif group.answer is None:
                self._withdraw(group)
        if isinstance(group.answer, RateLimitError):
            raise group.answer.with_traceback(None)
        assert group.answer is not None  # noqa: S101 - the leader answers all it takes, and it took this one
        return group.answer

    @locked
    def _join(self, group: SyncScriptCall) -> None:
        """Lead if nobody does, or wait for the one who does."""
        if self._closed:
            raise Closed("the store is closed")
        if self._leader is not None:
            group.signal = threading.Lock()
            group.signal.acquire()
        self._queue.append(group)
        if self._leader is None:
            self._leader = group

    def _wait(self, group: SyncScriptCall, signal: threading.Lock) -> None:
        """Wait until answered, or until it is this thread's turn to lead."""
        look = FIRST_LOOK
        while group.answer is None and self._leader is not group:
            if not signal.acquire(timeout=look):
                self._take_over(group)
                look = min(2 * look, MAX_LOOK)

    def _take_over(self, group: SyncScriptCall) -> None:
        """Lead instead of a leader whose call has ended, if that is so."""
        leader = self._leader
        if leader is group:
            return
        holders = set() if leader is None else threads_holding(leader)
        if holders == {threading.get_ident()}:
            raise RuntimeError(REENTERED)
        if not holders:
            self._replace(leader, group)

    @locked
    def _replace(self, leader: SyncScriptCall | None, group: SyncScriptCall) -> None:
        if self._leader is leader and group.answer is None:
            self._leader = group

    @locked
    def _take_batch(self) -> list[SyncScriptCall]:
        """Take all that have gathered. The lead is ours."""
        self._fail_batch()
        self._batch += [group for group in self._queue if group.answer is None]
        self._queue = []
        return [group for group in self._batch if group.answer is None]

    def _fail_batch(self) -> None:
        """Answer those that a leader took and did not answer, since it was interrupted."""
        for group in self._batch:
            if group.answer is None:
                group.settle(driver.explain(self._address, ConnectionError("the call that asked was interrupted")))

    def _finish(self, leader: SyncScriptCall, *, failed: bool) -> None:
        """Hand on the lead, then wake everybody. If that is interrupted, they find out by themselves."""
        batch, following = self._hand_on(leader, failed=failed)
        for group in batch:
            group.wake()
        if following is not None:
            following.wake()

    @locked
    def _hand_on(self, leader: SyncScriptCall, *, failed: bool) -> tuple[list[SyncScriptCall], SyncScriptCall | None]:
        """Let the next one lead, once everybody in the batch is answered."""
        if leader not in self._batch and leader in self._queue:  # interrupted before it took the batch
            self._queue.remove(leader)
        if failed:  # they waited as long as those that failed, and would wait again in vain
            trouble = next((each.answer for each in self._batch if isinstance(each.answer, RateLimitError)), None)
            for group in self._queue:
                if group.answer is None and trouble is not None:
                    group.settle(trouble)
        self._fail_batch()
        batch = self._batch + [group for group in self._queue if group.answer is not None]
        self._queue = [group for group in self._queue if group.answer is None]
        following = self._queue[0] if self._queue else None
        self._batch = []
        self._leader = following
        return batch, following

    @locked
    def _withdraw(self, group: SyncScriptCall) -> None:
        """Leave the queue: the call was interrupted while it waited."""
        if group in self._queue:
            self._queue.remove(group)

    def _exchange(self, groups: Sequence[PendingCall]) -> bool:
        """Send the groups, again where the server lacked the script or a calendar window; tell whether it failed."""
        if not groups:
            return False
        scripts = list(self._wire.scripts(groups))
        if self._link.known and self._watch.due(self):
            scripts = [*self._link.markers(self._watch, self._wire), *scripts]
        while scripts:
            self._counts.sent(scripts)
            try:
                replies = self._link.exchange(scripts)
            except driver.FAILURES as error:
                self._link.drop()
                self._counts.failures += 1
                trouble = driver.explain(self._address, error)
                for script in scripts:
                    script.fail(trouble)
                return True
            scripts = [
                again for script, reply in zip(scripts, replies, strict=True) for again in self._take(script, reply)
            ]
        return False

    def _take(self, script: Script, reply: bytes | Exception) -> list[Script]:
        if isinstance(reply, driver.NoScriptError) and not script.full:
            script.full = True
            self._watch.unloaded(self._address.hosts)
            return [script]
        if self._link.redirect(script, reply):
            return [script]
        if isinstance(reply, Exception):
            if isinstance(reply, driver.ReadOnlyError):
                self._link.drop()
            script.fail(reply if isinstance(reply, RateLimitError) else driver.explain(self._address, reply))
            return []
        if script.groups:
            self._watch.loaded(self._address.hosts)
        again = script.receive(reply)
        return list(self._wire.scripts(again)) if again else []

    @locked
    def close(self) -> None:
        """Let the connection go."""
        self._closed = True
        self._link.drop()


class ServerConnection:
    """One connection to one server.

    `_unsure` is set while an exchange is under way. Whoever finds it set discards the connection: the exchange was
    interrupted, and replies to it may still come.
    """

    known = True  # where everything is

    def __init__(self, address: RedisAddress, watch: ServerWatch) -> None:
        """Connect when first used."""
        self._address = address
        self._watch = watch
        self._connection: driver.AnyConnection = None
        self._unsure = False

    def exchange(self, scripts: Sequence[Script]) -> list[bytes | Exception]:
        """Send scripts in one go and read what each of them gave."""
        connection = self._connected()
        replies: list[bytes | Exception] = []
        sent = 0
        for number, script in enumerate(scripts):
            ahead = scripts[sent : number + MAX_UNDER_WAY]
            if ahead:
                connection.send_packed_command([b"".join([each.packed() for each in ahead])], check_health=False)
                sent += len(ahead)
            try:
                with driver.patience(connection, self._address.timeout, script.patience):
                    if script.asking:
                        connection.read_response()
                    replies.append(connection.read_response())
            except driver.ResponseError as error:
                replies.append(error)
        self._unsure = False
        return replies

    def _connected(self) -> driver.AnyConnection:
        """Return a connection on which nothing is under way; it is unsure from here on."""
        if self._unsure:
            self.drop()
        self._unsure = True
        connection = self._connection
        if connection is None or driver.has_ended(connection):
            self.drop()
            self._unsure = True
            connection = self._connection = driver.connect(self._address)
            if self._address.kind == "sentinel":
                self._watch.connected((connection.host, connection.port))
        return connection

    def markers(self, watch: ServerWatch, wire: ScriptProtocol) -> list[Script]:
        """Look at the marker of the server."""
        del wire
        return [watch.look()]

    def redirect(self, script: Script, reply: object) -> bool:
        """Tell whether a script must go elsewhere: no, there is nowhere else."""
        del script, reply
        return False

    def drop(self) -> None:
        """Close the connection; the next call makes a new one. Interrupted, it is done again."""
        if self._connection is not None:
            self._connection.disconnect()
        self._connection = None
        self._unsure = False


class ClusterConnections:
    """A connection to each server of a cluster."""

    def __init__(self, address: RedisAddress, counts: CallCounts, watch: ServerWatch) -> None:
        """Connect when first used."""
        self._address = address
        self._counts = counts
        self._watch = watch
        self._router = SlotMap(address)
        self._links: dict[tuple[str, int], ServerConnection] = {}

    @property
    def known(self) -> bool:
        """Whether it is known where everything is."""
        return not self._router.stale

    def exchange(self, scripts: Sequence[Script]) -> list[bytes | Exception]:
        """Send each script to the server of its slot, all of one server in one go."""
        if self._router.stale:
            self._learn()
        replies: dict[int, bytes | Exception] = {}
        for node, some in self._router.by_node(scripts).items():
            answers: Sequence[bytes | Exception]
            if node is None:
                answers = [nobody(script) for script in some]
            else:
                link = self._links.setdefault(node, self._link_to(node))
                try:
                    answers = link.exchange(some)
                except driver.FAILURES as error:  # one server may be down, the others are not
                    link.drop()
                    self._router.stale = True
                    answers = [error] * len(some)
            replies |= {id(script): answer for script, answer in zip(some, answers, strict=True)}
        return [replies[id(script)] for script in scripts]

    def _link_to(self, node: tuple[str, int]) -> ServerConnection:
        return ServerConnection(replace(self._address, kind="server", hosts=(node,)), self._watch)

    def _learn(self) -> None:
        trouble: Exception | None = None
        for node in self._router.candidates():
            try:
                self._counts.server_changes += self._router.learn(node, driver.read_slots(self._address, node))
            except driver.FAILURES as error:
                trouble = error
            else:
                return
        if trouble is not None:
            raise trouble

    def markers(self, watch: ServerWatch, wire: ScriptProtocol) -> list[Script]:
        """Look at a marker of each server that is known."""
        found = [self._router.marker(node, wire) for node in self._router.nodes()]
        return [watch.look(number) for number in found if number is not None]

    def redirect(self, script: Script, reply: object) -> bool:
        """Tell whether a script must go to another server."""
        return self._router.redirect(script, reply)

    def drop(self) -> None:
        """Close all connections. Interrupted, it is done again."""
        for link in list(self._links.values()):
            link.drop()
        self._links = {}
