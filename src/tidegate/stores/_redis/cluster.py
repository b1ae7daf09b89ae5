"""The slot map of a cluster: one for all threads and event loops of a store.

A server that does not answer or redirects a call makes the map stale, and so does a call for a slot without a server.
Then it is loaded again, from a server that answers; until then calls go by the map as it is, so that those for other
servers do not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import StoreUnavailable
from tidegate.stores._redis import driver

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.stores._redis.address import RedisAddress
    from tidegate.stores._redis.protocol import Script

    Node = tuple[str, int]

SLOT_COUNT: Final = 16_384
NO_SERVER: Final = "no server"  # the shard of all slots without a server
MAX_REDIRECTIONS: Final = 200  # how often a call is sent again while its slot moves, key by key; it was not run


class SlotMap:
    """The known server of each slot."""

    def __init__(self, address: RedisAddress) -> None:
        """Start with the hosts of the URL and no slots."""
        self.loaded: bool = False
        self.stale: bool = True
        self._hosts = address.hosts
        self._owners: list[Node | None] = [None] * SLOT_COUNT
        self._failed: set[Node] = set()

    def owner(self, slot: int) -> Node | None:
        """Return the server of a slot; None if no server has it."""
        return self._owners[slot]

    def candidates(self) -> list[Node]:
        """Return the servers that can be asked for the slot map, those that failed last."""
        nodes = dict.fromkeys((*filter(None, self._owners), *self._hosts))
        return sorted(nodes, key=self._failed.__contains__)

    def start_loading(self) -> bool:
        """Return whether the map is to be loaded again; then it counts as loaded, so that nobody else does it, too."""
        stale, self.stale = self.stale, False
        return stale

    def update(self, source: Node, ranges: Sequence[Sequence[Any]]) -> None:
        """Update from the reply of a server to CLUSTER SLOTS."""
        owners: list[Node | None] = [None] * SLOT_COUNT
        for first, last, primary, *_ in ranges:
            host = primary[0].decode() if isinstance(primary[0], bytes) else primary[0]
            owners[first : last + 1] = [(host or source[0], int(primary[1]))] * (last + 1 - first)
        self._owners = owners
        self._failed.discard(source)
        self.loaded, self.stale = True, False

    def node_failed(self, node: Node) -> None:
        """Record that a server did not answer."""
        self._failed.add(node)
        self.stale = True

    def by_node(self, scripts: Iterable[Script]) -> dict[Node | None, list[Script]]:
        """Group scripts by their server; None if no server has their slot."""
        nodes: dict[Node | None, list[Script]] = {}
        for script in scripts:
            nodes.setdefault(script.asking or self._owners[script.slot], []).append(script)
        return nodes

    def redirect(self, script: Script, reply: object) -> bool:
        """Return whether the reply redirects a script, which was not run, to another server; record that server."""
        if not isinstance(reply, driver.RedisError) or (script.form is not None and script.form.following(reply)):
            return False
        for call in script.calls:
            call.redirected += 1
        again = all(call.redirected <= MAX_REDIRECTIONS for call in script.calls)
        if isinstance(reply, driver.TryAgainError):
            return again
        script.asking = None
        self.stale = True
        if not isinstance(reply, driver.AskError) or not again:
            return False
        node = (reply.host or self._hosts[0][0], int(reply.port))
        if isinstance(reply, driver.MovedError):
            self._owners[script.slot] = node
        else:
            script.asking = node
        for call in script.calls:
            call.asking = script.asking
        script.form = None
        return True

    def no_server_error(self, slot: int) -> StoreUnavailable:
        """Return the error for a slot without a server; the next call loads the map again."""
        self.stale = True
        error = StoreUnavailable(f"no server of the cluster serves slot {slot}: run CLUSTER INFO on any of its servers")
        error.shard = NO_SERVER
        return error
