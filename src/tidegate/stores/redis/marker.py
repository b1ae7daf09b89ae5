"""Notices that a server in use has lost what it kept.

Each server holds a marker: a key with a random value, looked at four times a second by whoever uses the server, and
gone a second after the last look. Another value than a moment before means that all keys are gone (FLUSHALL, FLUSHDB, a
restart without its files): limits are as if nothing had been spent. What cannot be noticed is a replica that took over
and lacks only the last writes of its primary.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from tidegate.clock import SystemClock
from tidegate.core.bounds import SECOND
from tidegate.stores.redis.wire import Script

if TYPE_CHECKING:
    from tidegate.stores.redis.store import Counts
    from tidegate.stores.redis.wire import Group, Wire

SOURCE: Final = b"""local value = redis.call('GET', KEYS[1])
if value then redis.call('PEXPIRE', KEYS[1], ARGV[2]) else
  value = ARGV[1]
  redis.call('SET', KEYS[1], value, 'PX', ARGV[2])
end
return value"""
LOOK_EVERY: Final = SECOND // 4
KEPT: Final = 1000  # milliseconds that a marker is kept which nobody looks at
RECENT: Final = SECOND // 2  # a marker that was seen so long ago cannot have ended by itself
steady: Final = SystemClock.steady


class Markers:
    """The markers of all servers that a store uses, as this process has seen them last."""

    def __init__(self, wire: Wire, counts: Counts) -> None:
        """Know none."""
        self._wire = wire
        self._counts = counts
        self._own = secrets.token_hex(8).encode()
        self._seen: dict[bytes, tuple[bytes, int]] = {}  # by key: the value, and when it was seen
        self._looked: dict[object, int] = {}  # by who looks

    def due(self, who: object) -> bool:
        """Tell whether somebody should look again, once in a while."""
        now = steady()
        if now - self._looked.get(who, -LOOK_EVERY) < LOOK_EVERY:
            return False
        self._looked[who] = now
        return True

    def look(self, number: int | None = None) -> Marker:
        """Return what looks at a marker: the only one, or in a cluster that of a number."""
        key = self._wire.marker(number)
        return Marker(self, self._wire, key, self._own)

    def saw(self, key: bytes, value: bytes) -> None:
        """Compare a marker with what it was."""
        before, when = self._seen.get(key, (value, 0))
        now = steady()
        self._seen[key] = value, now
        if before != value and now - when < RECENT:
            self._counts.state_losses += 1

    def forget(self, who: object) -> None:
        """Forget somebody who looks no more."""
        self._looked.pop(who, None)


class Marker(Script):
    """A look at a server's marker, on its way with other scripts."""

    __slots__ = ("_key", "_markers", "_value")

    def __init__(self, markers: Markers, wire: Wire, key: bytes, value: bytes) -> None:
        """Look at this key; if there is none, leave this value."""
        super().__init__(wire, (), wire.slot(key), 1)
        self._markers = markers
        self._key = key
        self._value = value

    def needed(self) -> bool:
        """Tell that it is to be sent."""
        return True

    def command(self) -> list[bytes]:
        """Give the command, word by word."""
        return [b"EVAL", SOURCE, b"1", self._key, self._value, b"%d" % KEPT]

    def receive(self, reply: bytes) -> list[Group]:
        """Compare what was found with what was there before."""
        self._markers.saw(self._key, reply)
        return []
