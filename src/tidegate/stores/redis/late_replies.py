"""Hears what a server says that was silent for too long, and was given up.

Those who called have been told that there is no answer. The answers may come all the same, when a server wakes up or a
network recovers: then it is known what was charged, and it can be given back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections import deque

    from tidegate.stores.redis.protocol import Script

MAX_LATE: Final = 2.0  # seconds for which a connection is heard after it was given up


class LateReplies:
    """The scripts that a connection still has to answer, in their order."""

    def __init__(self, flights: deque[Script], *, asked: bool) -> None:
        """Wait for these. `asked` tells that the first of two replies to ASKING has come."""
        self._flights = flights
        self._asked = asked
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, reply: bytes | Exception) -> None:
        """Take an answer; errors mean that nothing was charged."""
        if not self._flights:
            self.lost()
            return
        script = self._flights[0]
        if script.asking and not self._asked:
            self._asked = True
            return
        self._asked = False
        self._flights.popleft()
        if isinstance(reply, bytes):
            script.receive(reply)
        if not self._flights:
            self.lost()

    def lost(self, error: BaseException | None = None) -> None:
        """Note that nothing more will come."""
        del error
        if not self._ended.done():
            self._ended.set_result(None)

    async def finish(self) -> None:
        """Wait for all answers, but not for long."""
        await asyncio.wait((self._ended,), timeout=MAX_LATE)
