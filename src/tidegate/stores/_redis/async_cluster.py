"""Sends the calls of tasks to a cluster: one pipeline per server."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from tidegate.stores._redis import driver
from tidegate.stores._redis.async_pipeline import AsyncPipeline, ServerPipeline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.errors import RateLimitError
    from tidegate.stores._base import Store
    from tidegate.stores._redis.address import RedisAddress
    from tidegate.stores._redis.cluster import SlotMap
    from tidegate.stores._redis.protocol import Script, ScriptProtocol
    from tidegate.stores._redis.store import CallCounts


class NodePipeline(ServerPipeline):
    """Scripts to one server of a cluster; scripts for slots that moved go back to the ClusterPipeline."""

    def __init__(self, cluster: ClusterPipeline, node: tuple[str, int]) -> None:
        """Connect with the first call."""
        self._cluster = cluster
        address = replace(cluster.address, kind="node", hosts=(node,))
        super().__init__(address, cluster.protocol, cluster.counts, cluster.store)

    def _handle_reply(self, script: Script, reply: bytes | Exception) -> list[Script]:
        if self._cluster.slot_map.redirect(script, reply):
            self._cluster.send_again([script])
            return []
        return super()._handle_reply(script, reply)

    def _fail_connection(self, error: BaseException, *, again: bool = False) -> None:
        self._cluster.slot_map.node_failed(self.address.hosts[0])
        super()._fail_connection(error, again=again)

    @property
    def _owner(self) -> AsyncPipeline:
        return self._cluster

    def _resend(self) -> None:
        batches, self._batches = self._batches, deque()
        self._cluster.send_again([script for batch in batches for script in batch])

    async def drain(self) -> None:
        """Wait for the calls of the whole cluster."""
        await self._cluster.drain()


class ClusterPipeline(AsyncPipeline):
    """Calls to a cluster: scripts of one slot each, pipelined on one connection per server."""

    def __init__(
        self, address: RedisAddress, protocol: ScriptProtocol, counts: CallCounts, store: Store, slot_map: SlotMap
    ) -> None:
        """Connect with the first call."""
        super().__init__(address, protocol, counts, store)
        self.slot_map = slot_map
        self._nodes: dict[tuple[str, int], NodePipeline] = {}
        self._waiting: list[Script] | None = None  # scripts that wait until the slots are known

    def send_scripts(self, scripts: Iterable[Script]) -> None:
        """Send scripts, or queue them until the server can be reached."""
        if self._waiting is not None:
            self._waiting += scripts
        elif not self.slot_map.loaded:
            self._waiting = list(scripts)
            self._start(self._load_slots_and_send())
        else:
            if self.slot_map.start_loading():
                self._start(self._load_slots())
            self._distribute(scripts)

    async def _load_slots_and_send(self) -> None:
        """Load the slot map, then send the waiting scripts."""
        try:
            await self._load_slots()
        except BaseException as error:
            self.counts.failures += 1
            self._fail_unsent(driver.explain(self.address, error))
            if not isinstance(error, Exception):
                raise
        else:
            waiting, self._waiting = self._waiting or [], None
            self._distribute(waiting)

    def _distribute(self, scripts: Iterable[Script]) -> None:
        for node, node_scripts in self.slot_map.by_node(scripts).items():
            if node is None:
                for script in node_scripts:
                    script.fail(self.slot_map.no_server_error(script.slot))
            else:
                if node not in self._nodes:
                    self._nodes[node] = NodePipeline(self, node)
                self._nodes[node].send_scripts(node_scripts)

    def send_again(self, scripts: list[Script]) -> None:
        """Send scripts that were not run to the server of their slot."""
        self.send_scripts(scripts)

    async def _load_slots(self) -> None:
        """Load the slot map; if no server answers, the known one stays."""
        failure: Exception | None = None
        for node in self.slot_map.candidates():
            try:
                self.slot_map.update(node, await driver.read_slots_async(self.address, node))
            except driver.FAILURES as error:
                self.slot_map.node_failed(node)
                failure = error
            else:
                return
        if failure is not None and not self.slot_map.loaded:
            raise failure

    def _fail_unsent(self, error: RateLimitError) -> None:
        waiting, self._waiting = self._waiting or [], None
        for script in waiting:
            script.fail(error)

    async def close(self) -> None:
        """Close all connections."""
        await super().close()
        for node in self._nodes.values():
            await node.close()
