"""Sends the calls of tasks to a cluster: a line for each of its servers, as tasks.py has it for one."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from tidegate.stores.redis import driver
from tidegate.stores.redis.async_pipeline import AsyncPipeline, ServerPipeline
from tidegate.stores.redis.cluster import SlotMap, nobody

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.errors import RateLimitError
    from tidegate.stores.redis.address import RedisAddress
    from tidegate.stores.redis.async_pipeline import Wake
    from tidegate.stores.redis.protocol import Script, ScriptProtocol
    from tidegate.stores.redis.server_watch import ServerWatch
    from tidegate.stores.redis.store import CallCounts


class NodePipeline(ServerPipeline):
    """Scripts to one server of a cluster; what it does not keep any more goes back to the cluster's line."""

    def __init__(self, cluster: ClusterPipeline, node: tuple[str, int]) -> None:
        """Connect when first asked."""
        self._cluster = cluster
        address = replace(cluster.address, kind="server", hosts=(node,))
        super().__init__(address, cluster.wire, cluster.counts, cluster.watch, cluster.wake)

    def _take(self, script: Script, reply: bytes | Exception) -> list[Script]:
        if not isinstance(reply, driver.NoScriptError) and self._cluster.router.redirect(script, reply):
            self._cluster.send_again([script])
            return []
        return super()._take(script, reply)

    def _break(self, error: BaseException, *, again: bool = False) -> None:
        self._cluster.router.stale = True
        super()._break(error, again=again)

    @property
    def _root(self) -> AsyncPipeline:
        return self._cluster

    def _marker(self) -> Script | None:
        number = self._cluster.router.marker(self.address.hosts[0], self.wire)
        return None if number is None else self.watch.look(number)

    def _resend(self) -> None:
        batches, self._batches = self._batches, deque()
        self._cluster.send_again([script for batch in batches for script in batch])

    async def drain(self) -> None:
        """Wait for the calls of the whole cluster: they are its, wherever they were sent."""
        await self._cluster.drain()


class ClusterPipeline(AsyncPipeline):
    """Calls to a cluster: a script for each slot, and a connection to each server on which they follow each other."""

    def __init__(
        self, address: RedisAddress, wire: ScriptProtocol, counts: CallCounts, watch: ServerWatch, wake: Wake
    ) -> None:
        """Connect when first asked."""
        super().__init__(address, wire, counts, watch, wake)
        self.router = SlotMap(address)
        self._nodes: dict[tuple[str, int], NodePipeline] = {}
        self._waiting: list[Script] | None = None  # until it is known where everything is

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
        except BaseException as error:
            self.counts.failures += 1
            self._end(driver.explain(self.address, error))
            if not isinstance(error, Exception):
                raise
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
                    self._nodes[node] = NodePipeline(self, node)
                self._nodes[node]._send(some)  # noqa: SLF001 - of the same family

    def send_again(self, scripts: list[Script]) -> None:
        """Send scripts that were not run to where they belong."""
        self._send(scripts)

    async def _learn(self) -> None:
        trouble: Exception | None = None
        for node in self.router.candidates():
            try:
                moved = self.router.learn(node, await driver.read_slots_async(self.address, node))
            except driver.FAILURES as error:
                trouble = error
            else:
                self.counts.server_changes += moved
                return
        if trouble is not None:
            raise trouble

    def _end(self, error: RateLimitError) -> None:
        waiting, self._waiting = self._waiting or [], None
        for script in waiting:
            script.fail(error)

    async def close(self) -> None:
        """Close all connections."""
        await super().close()
        for node in self._nodes.values():
            await node.close()
