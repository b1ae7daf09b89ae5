"""Reads replies that arrive after their calls have timed out.

The callers have received an error. Replies may still arrive, when the server or the network recovers; they show what
was charged, so that it can be given back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections import deque

    from tidegate.stores.redis.protocol import Script

MAX_LATE: Final = 2.0  # seconds for which a connection is read after a timeout


class LateReplies:
    """The scripts whose replies a connection still owes, in order."""

    def __init__(self, in_flight: deque[Script], *, asking_answered: bool) -> None:
        """Wait for these. `asking_answered` means that the reply to ASKING has arrived."""
        self._in_flight = in_flight
        self._asking_answered = asking_answered
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def handle_reply(self, reply: bytes | Exception) -> None:
        """Handle a reply; an error means that nothing was charged."""
        if not self._in_flight:
            self.connection_lost()
            return
        script = self._in_flight[0]
        if script.asking and not self._asking_answered:
            self._asking_answered = True
            return
        self._asking_answered = False
        self._in_flight.popleft()
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
