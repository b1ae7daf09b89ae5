"""Reads what a server answers to scripts, and to nothing else: a string, OK, or an error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tidegate.stores.redis import driver

if TYPE_CHECKING:
    from collections.abc import Callable

STRING, STATUS, ERROR = b"$+-"
END: Final = b"\r\n"


class ReplyReader(asyncio.Protocol):
    """Hands replies to `take` in the order they come, and calls `lost` when there will be no more.

    `heard` is called whenever any byte has come.
    """

    def __init__(
        self,
        heard: Callable[[], None],
        take: Callable[[bytes | Exception], None],
        lost: Callable[[BaseException], None],
    ) -> None:
        """Begin with the next byte that comes."""
        self.hand_to(heard, take, lost)
        self._rest = b""

    def hand_to(
        self,
        heard: Callable[[], None],
        take: Callable[[bytes | Exception], None],
        lost: Callable[[BaseException], None],
    ) -> None:
        """Hand everything to others from now on."""
        self._heard = heard
        self._take = take
        self._lost = lost

    def data_received(self, data: bytes) -> None:
        """Take what is complete; keep the rest."""
        self._heard()
        data = self._rest + data if self._rest else data
        place = 0
        while (end := data.find(END, place)) >= 0:
            reply: bytes | Exception = data[place + 1 : end]
            kind, following = data[place], end + 2
            if kind == STRING:
                start, following = following, following + int(data[place + 1 : end]) + 2
                if len(data) < following:
                    break
                reply = data[start : following - 2]
            elif kind == ERROR:
                reply = driver.read_error(data[place + 1 : end])
            elif kind != STATUS:
                reply = ConnectionError(f"unexpected reply to a script: {data[place:end]!r}")
            self._take(reply)
            place = following
        self._rest = data[place:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell that the server hung up, or that we did."""
        self._lost(exc or ConnectionError("Connection closed by server."))
