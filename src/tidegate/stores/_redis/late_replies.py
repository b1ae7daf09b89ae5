"""Reads replies that arrive after their calls have timed out.

The callers have received an error. Replies may still arrive, when the server or the network recovers; they show what
was charged, so that it can be refunded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidegate.stores._redis.protocol import Script

MAX_LATE: Final = 2.0  # seconds for which a connection is read after a timeout


class ScriptsInFlight(deque["Script"]):
    """Scripts that were sent over a connection, in the order of their replies."""

    preceding: int = 0  # replies that have arrived of those that precede the reply to the first script

    def take_answered(self, reply: object) -> Script | None:
        """Remove and return the script that a reply answers; None if it precedes the reply to the script."""
        script = self[0]
        if self.preceding < script.preceding_replies:
            self.preceding += 1
            script.receive_preceding(reply)
            return None
        self.preceding = 0
        return self.popleft()


class LateReplies:
    """Receives the replies that are still due on a connection."""

    def __init__(self, in_flight: ScriptsInFlight) -> None:
        """Wait for the replies to a copy of these."""
        self._in_flight = ScriptsInFlight(in_flight)
        self._in_flight.preceding = in_flight.preceding
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def handle_reply(self, reply: bytes | Exception) -> None:
        """Handle a reply; an error means that nothing was charged."""
        if not self._in_flight:
            self.connection_lost()
            return
        script = self._in_flight.take_answered(reply)
        if script is None:
            return
        if isinstance(reply, bytes):
            script.receive(reply)
        if not self._in_flight:
            self.connection_lost()

    def connection_lost(self, error: BaseException | None = None) -> None:
        """Record that no more replies will arrive."""
        del error
        if not self._ended.done():
            self._ended.set_result(None)

    async def finish(self) -> None:
        """Wait for all replies, for MAX_LATE seconds at most."""
        await asyncio.wait((self._ended,), timeout=MAX_LATE)
