"""The slot map of a cluster: one for threads and one for each event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import StoreUnavailable
from tidegate.stores.redis import driver

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.stores.redis.address import RedisAddress
    from tidegate.stores.redis.protocol import Script

    Node = tuple[str, int]

SLOT_COUNT: Final = 16_384
MAX_REDIRECTIONS: Final = 3  # how often a script is redirected; each time it was not run


class SlotMap:
    """The known server of each slot."""

    def __init__(self, address: RedisAddress) -> None:
        """Start with the hosts of the URL and no slots."""
        self.stale: bool = True
        self._hosts = address.hosts
        self._owners: list[Node | None] = [None] * SLOT_COUNT

    def candidates(self) -> list[Node]:
        """Return the servers that can be asked for the slot map."""
        return list(dict.fromkeys((*filter(None, self._owners), *self._hosts)))

    def update(self, source: Node, ranges: Sequence[Sequence[Any]]) -> None:
        """Update from the reply of a server to CLUSTER SLOTS."""
        owners: list[Node | None] = [None] * SLOT_COUNT
        for first, last, primary, *_ in ranges:
            host = primary[0].decode() if isinstance(primary[0], bytes) else primary[0]
            owners[first : last + 1] = [(host or source[0], int(primary[1]))] * (last + 1 - first)
        self._owners = owners
        self.stale = False

    def by_node(self, scripts: Iterable[Script]) -> dict[Node | None, list[Script]]:
        """Group scripts by their server; None if no server has their slot."""
        nodes: dict[Node | None, list[Script]] = {}
        for script in scripts:
            nodes.setdefault(script.asking or self._owners[script.slot], []).append(script)
        return nodes

    def redirect(self, script: Script, reply: object) -> bool:
        """Return whether the reply redirects a script, which was not run, to another server; record that server."""
        script.asking = None
        if not isinstance(reply, driver.RedisError) or (script.form is not None and script.form.following(reply)):
            return False
        self.stale = True
        if not isinstance(reply, driver.AskError) or script.redirected >= MAX_REDIRECTIONS:
            return False
        script.redirected += 1
        node = (reply.host or self._hosts[0][0], int(reply.port))
        if isinstance(reply, driver.MovedError):
            self._owners[script.slot] = node
        else:
            script.asking = node
        script.form = None
        return True


def no_server_error(script: Script) -> StoreUnavailable:
    """Return the error for a slot without a server."""
    return StoreUnavailable(
        f"no server of the cluster serves slot {script.slot}: run CLUSTER INFO on any of its servers"
    )
