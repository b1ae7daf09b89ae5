"""Reading what a request carries, bounded in size and time.

A timer for each request would cost as much as its decision. So one timer looks after all of them: it goes off twice in
the time that reading may take, and ends those that have been at it for too long.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.bounds import SECOND
from tidegate.service.http.problems import ProblemError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from tidegate.clock import Clock

    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

DIGITS: Final = 20  # no length has more


class Bodies:
    """Reads the bodies of all requests of an app."""

    def __init__(self, clock: Clock, most: int, within: float) -> None:
        """Read at most so many bytes, within so many seconds."""
        self._steady = clock.steady
        self._most = most
        self._within = within
        self._reading: dict[asyncio.Task[Any], int] = {}
        self._overdue: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, headers: dict[bytes, bytes], receive: Receive, start: int) -> bytes:
        """Read all of it, or refuse; the request began at `start`, by the steady clock."""
        length = headers.get(b"content-length", b"0")
        if len(length) > DIGITS or not length.isdigit() or int(length) > self._most:
            raise self._too_large()
        task: Any = asyncio.current_task()
        self._reading[task] = start
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._within / 2, self._look)
        try:
            message = await receive()
            body: bytes = message.get("body", b"")
            # A server may end a body by an empty piece; one that is as long as it was said to be is all there.
            if message["type"] == "http.request" and (not message.get("more_body") or b"%d" % len(body) == length):
                if len(body) > self._most:
                    raise self._too_large()
                return body
            return await self._rest(message, receive)
        except asyncio.CancelledError:
            if task not in self._overdue:
                raise
            self._overdue.discard(task)
            task.uncancel()
            raise ProblemError("timeout", f"not received within {self._within:g} s") from None
        finally:
            del self._reading[task]

    async def _rest(self, message: MutableMapping[str, Any], receive: Receive) -> bytes:
        """Read a body that comes in pieces."""
        body = bytearray()
        while True:
            if message["type"] == "http.disconnect":
                raise ConnectionAbortedError
            body += message.get("body", b"")
            if len(body) > self._most:
                raise self._too_large()
            if not message.get("more_body"):
                return bytes(body)
            message = await receive()

    def _too_large(self) -> ProblemError:
        return ProblemError("too-large", f"a request may have {self._most} bytes")

    def _look(self) -> None:
        """End those that take too long; look again while there are any."""
        self._timer = None
        late = self._steady() - round(self._within * SECOND)
        for task, start in list(self._reading.items()):
            if start <= late:
                self._overdue.add(task)
                task.cancel()
        if self._reading:
            self._timer = asyncio.get_running_loop().call_later(self._within / 2, self._look)

    def close(self) -> None:
        """Let the timer go."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
