"""Notices that a server was replaced, or has lost what it kept, where that can be noticed.

A server that has run the script before and does not know it was restarted, or is another one. So is one that sentinels
name instead of the one before.

Each server holds a marker: a key with a random value, looked at four times a second by whoever uses the server, and
gone a second after the last look. Another value than a moment before means that all keys are gone (FLUSHALL, FLUSHDB, a
restart without its files): limits are as if nothing had been spent. What cannot be noticed is a replica that took over
and lacks only the last writes of its primary.
"""

from __future__ import annotations

import secrets
from itertools import count
from typing import TYPE_CHECKING, Final

from tidegate.clock import SystemClock
from tidegate.core.bounds import SECOND
from tidegate.stores.redis.protocol import Script

if TYPE_CHECKING:
    from tidegate.stores.redis.protocol import PendingCall, ScriptProtocol
    from tidegate.stores.redis.store import CallCounts

MARKER_SCRIPT: Final = b"""local value = redis.call('GET', KEYS[1])
if value then redis.call('PEXPIRE', KEYS[1], ARGV[2]) else
  value = ARGV[1]
  redis.call('SET', KEYS[1], value, 'PX', ARGV[2])
end
return value"""
CHECK_INTERVAL: Final = SECOND // 4
MARKER_TTL: Final = 1000  # milliseconds that a marker is kept which nobody looks at
RECENTLY_SEEN: Final = SECOND * 9 // 10  # a marker that was seen so long ago cannot have ended by itself
steady: Final = SystemClock.steady


class ServerWatch:
    """What this process knows of the servers of a store, in all its threads and event loops."""

    def __init__(self, wire: ScriptProtocol, counts: CallCounts) -> None:
        """Know nothing."""
        self._wire = wire
        self._counts = counts
        self._own = secrets.token_hex(8).encode()
        self._numbers = count()  # so that a marker that is made anew is another one
        self._seen: dict[bytes, tuple[bytes, int]] = {}  # by key: the value, and when it was seen
        self._looked: dict[object, int] = {}  # by who looks
        self._loaded: set[object] = set()  # places whose server has run the script
        self._primary: object = None  # whom the sentinels named last

    def connected(self, place: object) -> None:
        """Note which server the sentinels have led to."""
        before, self._primary = self._primary, place
        if before is not None and before != place:
            self._counts.server_changes += 1
            self._loaded.clear()

    def loaded(self, place: object) -> None:
        """Note that the server at a place has run the script."""
        self._loaded.add(place)

    def unloaded(self, place: object) -> None:
        """Note that the server at a place does not know the script."""
        if place in self._loaded:
            self._loaded.discard(place)
            self._counts.server_changes += 1

    def due(self, who: object) -> bool:
        """Tell whether somebody should look again, once in a while."""
        now = steady()
        if now - self._looked.get(who, -CHECK_INTERVAL) < CHECK_INTERVAL:
            return False
        self._looked[who] = now
        return True

    def look(self, number: int | None = None) -> Marker:
        """Return what looks at a marker: the only one, or in a cluster that of a number."""
        key = self._wire.marker(number)
        return Marker(self, self._wire, key, b"%s-%d" % (self._own, next(self._numbers)))

    def saw(self, key: bytes, value: bytes) -> None:
        """Compare a marker with what it was."""
        before, when = self._seen.get(key, (value, 0))
        now = steady()
        self._seen[key] = value, now
        if before != value and now - when < RECENTLY_SEEN:
            self._counts.state_losses += 1

    def forget(self, who: object) -> None:
        """Forget somebody who looks no more."""
        self._looked.pop(who, None)


class Marker(Script):
    """A look at a server's marker, on its way with other scripts."""

    __slots__ = ("_key", "_value", "_watch")

    def __init__(self, watch: ServerWatch, wire: ScriptProtocol, key: bytes, value: bytes) -> None:
        """Look at this key; if there is none, leave this value."""
        super().__init__(wire, (), wire.slot(key), 1)
        self._watch = watch
        self._key = key
        self._value = value

    def needed(self) -> bool:
        """Tell that it is to be sent."""
        return True

    def command(self) -> list[bytes]:
        """Give the command, word by word."""
        return [b"EVAL", MARKER_SCRIPT, b"1", self._key, self._value, b"%d" % MARKER_TTL]

    def receive(self, reply: bytes) -> list[PendingCall]:
        """Compare what was found with what was there before."""
        self._watch.saw(self._key, reply)
        return []
