"""Sends the calls of threads: whoever comes while a script is under way goes along with the next one.

The first thread leads: it sends what has gathered, for all, and hands the lead to one of those that came meanwhile. So
a thread alone pays nothing, many threads pay one round trip together, and no thread works for others for long.

A server is lost when it has said nothing for `timeout` seconds while a script is under way, however long calls have
waited for their turn. Few scripts are under way at once, so that other processes get their turn at the server.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from tidegate.errors import Closed, RateLimitError
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


class SyncPipeline:
    """Where calls of threads gather."""

    def __init__(self, address: RedisAddress, wire: ScriptProtocol, counts: CallCounts, watch: ServerWatch) -> None:
        """Connect when first asked."""
        self._address = address
        self._wire = wire
        self._counts = counts
        self._watch = watch
        self._lock = threading.Lock()
        self._queue: list[SyncScriptCall] = []
        self._led = False
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
        with self._lock:
            if self._closed:
                raise Closed("the store is closed")
            self._queue.append(group)
            leads, self._led = not self._led, True
            if not leads:
                group.signal = threading.Lock()
                group.signal.acquire()
        if group.signal is not None:
            group.signal.acquire()  # until answered, or told to lead
        if group.answer is None:
            self._lead()
        if isinstance(group.answer, RateLimitError):
            raise group.answer.with_traceback(None)
        assert group.answer is not None  # noqa: S101 - the leader answers all it takes, and it took this one
        return group.answer

    def _lead(self) -> None:
        """Ask for all that have gathered, wake them, and let the next one lead."""
        with self._lock:
            groups, self._queue = self._queue, []
        failed = True
        try:
            failed = self._exchange(groups)
        finally:
            with self._lock:
                if failed:  # they waited as long as those that failed, and would wait again in vain
                    groups, self._queue = groups + self._queue, []
                following = self._queue[0] if self._queue else None
                self._led = following is not None
            for group in groups:
                if group.answer is None:
                    group.answer = next((g.answer for g in groups if isinstance(g.answer, RateLimitError)), None)
                    group.answer = group.answer or driver.explain(self._address, ConnectionError("interrupted"))
                if group.signal is not None:
                    group.signal.release()
            if following is not None and following.signal is not None:
                following.signal.release()

    def _exchange(self, groups: Sequence[PendingCall]) -> bool:
        """Send the groups, again where the server lacked the script or a calendar window; tell whether it failed."""
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

    def close(self) -> None:
        """Let the connection go."""
        with self._lock:
            self._closed = True
            self._link.drop()


class ServerConnection:
    """One connection to one server."""

    known = True  # where everything is

    def __init__(self, address: RedisAddress, watch: ServerWatch) -> None:
        """Connect when first used."""
        self._address = address
        self._watch = watch
        self._connection: driver.AnyConnection = None

    def exchange(self, scripts: Sequence[Script]) -> list[bytes | Exception]:
        """Send scripts in one go and read what each of them gave."""
        connection = self._connection
        if connection is None or driver.has_ended(connection):
            self.drop()
            connection = self._connection = driver.connect(self._address)
            if self._address.kind == "sentinel":
                self._watch.connected((connection.host, connection.port))
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
        return replies

    def markers(self, watch: ServerWatch, wire: ScriptProtocol) -> list[Script]:
        """Look at the marker of the server."""
        del wire
        return [watch.look()]

    def redirect(self, script: Script, reply: object) -> bool:
        """Tell whether a script must go elsewhere: no, there is nowhere else."""
        del script, reply
        return False

    def drop(self) -> None:
        """Close the connection; the next call makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()


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
        """Close all connections."""
        links, self._links = self._links, {}
        for link in links.values():
            link.drop()
