"""Sends the calls of threads to a cluster: one pipeline per server, so that no server delays the calls to others."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from tidegate.errors import Closed, StoreUnavailable
from tidegate.stores._redis import driver
from tidegate.stores._redis.sync_pipeline import SyncPipeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core._decision import Decision
    from tidegate.stores._redis.address import RedisAddress
    from tidegate.stores._redis.cluster import SlotMap
    from tidegate.stores._redis.protocol import Script, ScriptProtocol
    from tidegate.stores._redis.store import CallCounts
    from tidegate.stores._redis.sync_pipeline import SyncScriptCall


class Redirected(StoreUnavailable):
    """The answer to a call that was not run, since another server has its slot."""


class SyncNodePipeline(SyncPipeline):
    """Calls to one server of a cluster; those for slots that moved are answered with Redirected."""

    def __init__(self, cluster: SyncCluster, node: tuple[str, int]) -> None:
        """Connect with the first call."""
        super().__init__(replace(cluster.address, kind="node", hosts=(node,)), cluster.protocol, cluster.counts)
        self._slot_map = cluster.slot_map
        self._node = node

    def _handle_reply(self, script: Script, reply: bytes | Exception) -> list[Script]:
        if self._slot_map.redirect(script, reply):
            script.fail(Redirected("another server of the cluster has this slot"))
            return []
        return super()._handle_reply(script, reply)

    def _fail(self, scripts: Sequence[Script], error: Exception) -> None:
        self._slot_map.node_failed(self._node)
        super()._fail(scripts, error)


class SyncCluster:
    """The calls of all threads."""

    def __init__(self, address: RedisAddress, protocol: ScriptProtocol, counts: CallCounts, slot_map: SlotMap) -> None:
        """Connect with the first call."""
        self.address = address
        self.protocol = protocol
        self.counts = counts
        self.slot_map = slot_map
        self._pipelines: dict[tuple[str, int], SyncNodePipeline] = {}
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, call: SyncScriptCall) -> list[Decision]:
        """Send a call to the server of its slot and wait for its answer."""
        call.slot = self.protocol.slot_of(call)
        while True:
            if not self.slot_map.loaded:
                with self._lock:  # all calls wait for the first map
                    if not self.slot_map.loaded:
                        self._load_slots()
            elif self.slot_map.start_loading():
                self._load_slots()
            node = call.asking or self.slot_map.owner(call.slot)
            if node is None:
                raise self.slot_map.no_server_error(call.slot)
            try:
                return self._pipeline(node).ask(call)
            except Redirected:
                call.answer = None

    def _pipeline(self, node: tuple[str, int]) -> SyncNodePipeline:
        if self._closed:
            raise Closed("the store is closed")
        pipeline = self._pipelines.get(node)
        if pipeline is None:
            pipeline = self._pipelines.setdefault(node, SyncNodePipeline(self, node))
        return pipeline

    def _load_slots(self) -> None:
        """Load the slot map; if no server answers, the known one stays."""
        failure: Exception | None = None
        for node in self.slot_map.candidates():
            try:
                self.slot_map.update(node, driver.read_slots(self.address, node))
            except driver.FAILURES as error:
                self.slot_map.node_failed(node)
                failure = error
            else:
                return
        if failure is not None and not self.slot_map.loaded:
            self.counts.failures += 1
            raise driver.explain(self.address, failure)

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        for pipeline in list(self._pipelines.values()):
            pipeline.close()
