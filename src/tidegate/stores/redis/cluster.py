"""Which server of a cluster keeps what: one map for threads and one for each event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import StoreUnavailable
from tidegate.stores.redis import driver

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.stores.redis.address import RedisAddress
    from tidegate.stores.redis.protocol import Script, ScriptProtocol

    Node = tuple[str, int]

SLOT_COUNT: Final = 16_384
MARKERS: Final = 1000  # numbers of markers, of which every server should keep one (see server_watch.py)
MAX_REDIRECTIONS: Final = 3  # how often a script is sent on; each time it was not run


class SlotMap:
    """Knows the server of each slot, as far as it was told."""

    def __init__(self, address: RedisAddress) -> None:
        """Know only whom to ask."""
        self.stale = True
        self._hosts = address.hosts
        self._owners: list[Node | None] = [None] * SLOT_COUNT

    def candidates(self) -> list[Node]:
        """List whom to ask where everything is."""
        return list(dict.fromkeys((*filter(None, self._owners), *self._hosts)))

    def learn(self, asked: Node, ranges: Sequence[Sequence[Any]]) -> bool:
        """Take over the answer to CLUSTER SLOTS that a server gave; tell whether any slot has moved."""
        owners: list[Node | None] = [None] * SLOT_COUNT
        for first, last, primary, *_ in ranges:
            host = primary[0].decode() if isinstance(primary[0], bytes) else primary[0]
            owners[first : last + 1] = [(host or asked[0], int(primary[1]))] * (last + 1 - first)
        moved = any(new != old for new, old in zip(owners, self._owners, strict=True) if new and old)
        self._owners = owners
        self.stale = False
        return moved

    def nodes(self) -> list[Node]:
        """List the servers that keep anything."""
        return list(dict.fromkeys(filter(None, self._owners)))

    def marker(self, node: Node, wire: ScriptProtocol) -> int | None:
        """Find the number of a marker that a server keeps."""
        return next((n for n in range(MARKERS) if self._owners[wire.slot(wire.marker(n))] == node), None)

    def by_node(self, scripts: Iterable[Script]) -> dict[Node | None, list[Script]]:
        """Divide scripts by the server that they go to; None: nobody has their slot."""
        nodes: dict[Node | None, list[Script]] = {}
        for script in scripts:
            nodes.setdefault(script.asking or self._owners[script.slot], []).append(script)
        return nodes

    def redirect(self, script: Script, reply: object) -> bool:
        """Tell whether the reply means that a script was not run and is to be sent elsewhere; note where."""
        script.asking = None
        if not isinstance(reply, driver.ResponseError) and not isinstance(reply, driver.RedisError):
            return False
        self.stale = self.stale or not isinstance(reply, driver.NoScriptError)
        if not isinstance(reply, driver.AskError) or script.redirected >= MAX_REDIRECTIONS:
            return False
        script.redirected += 1
        node = (reply.host or self._hosts[0][0], int(reply.port))
        if isinstance(reply, driver.MovedError):
            self._owners[script.slot] = node
        else:
            script.asking = node
        return True


def nobody(script: Script) -> StoreUnavailable:
    """Explain that a slot has no server."""
    return StoreUnavailable(
        f"no server of the cluster serves slot {script.slot}: run CLUSTER INFO on any of its servers"
    )
