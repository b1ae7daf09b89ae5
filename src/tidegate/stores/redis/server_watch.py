"""Detects that a server was replaced or has lost its keys, if that is possible.

A server that has run the script before and no longer knows it was restarted or replaced. If the sentinels name another
server, the primary was replaced.

Each server has a marker: a key with a random value, which clients check four times a second, and which expires a second
after the last check. If the value has changed since the last check, all keys are gone (FLUSHALL, FLUSHDB, a restart
without persistence), and limits are as if nothing had been used. A replica that took over and lacks only the last
writes of its primary cannot be detected.
"""

from __future__ import annotations

import secrets
from itertools import count
from typing import TYPE_CHECKING, Final

from tidegate.clock import SystemClock
from tidegate.core.bounds import SECOND
from tidegate.errors import RateLimitError
from tidegate.stores.redis import driver
from tidegate.stores.redis.protocol import Script

if TYPE_CHECKING:
    from tidegate.stores.redis.address import RedisAddress
    from tidegate.stores.redis.protocol import PendingCall, ScriptProtocol
    from tidegate.stores.redis.store import CallCounts

MARKER_SCRIPT: Final = b"""local value = redis.call('GET', KEYS[1])
if value then redis.call('PEXPIRE', KEYS[1], ARGV[2]) else
  value = ARGV[1]
  redis.call('SET', KEYS[1], value, 'PX', ARGV[2])
end
return value"""
CHECK_INTERVAL: Final = SECOND // 4
MARKER_TTL: Final = 1000  # milliseconds after which an unchecked marker expires
RECENTLY_SEEN: Final = SECOND * 9 // 10  # a marker checked within this time cannot have expired
steady: Final = SystemClock.steady


class ServerWatch:
    """The state of the servers of a store, shared by all threads and event loops of this process."""

    def __init__(self, protocol: ScriptProtocol, counts: CallCounts) -> None:
        """Start without any server."""
        self._protocol = protocol
        self._counts = counts
        self._token = secrets.token_hex(8).encode()
        self._numbers = count()  # so that every new marker has another value
        self._seen: dict[bytes, tuple[bytes, int]] = {}  # by key: the value, and when it was read
        self._checked_at: dict[object, int] = {}  # when each connection checked last
        self._loaded: set[object] = set()  # addresses whose server has run the script
        self._primary: object = None  # the primary that the sentinels named last

    def primary_connected(self, address: object) -> None:
        """Record which server the sentinels named."""
        before, self._primary = self._primary, address
        if before is not None and before != address:
            self._counts.server_changes += 1
            self._loaded.clear()

    def script_loaded(self, address: object) -> None:
        """Record that the server at an address has run the script."""
        self._loaded.add(address)

    def script_missing(self, address: object) -> None:
        """Record that the server at an address does not know the script."""
        if address in self._loaded:
            self._loaded.discard(address)
            self._counts.server_changes += 1

    def handle_reply(
        self, script: Script, reply: bytes | Exception, address: RedisAddress, protocol: ScriptProtocol
    ) -> list[Script]:
        """Answer the calls of a script; return the scripts to be sent next."""
        if isinstance(reply, driver.NoScriptError) and not script.full:
            script.full = True
            self.script_missing(address.hosts)
            return [script]
        if isinstance(reply, Exception):
            script.fail(reply if isinstance(reply, RateLimitError) else driver.explain(address, reply))
            return []
        if script.calls:
            self.script_loaded(address.hosts)
        again = script.receive(reply)
        return list(protocol.scripts(again)) if again else []

    def due(self, owner: object) -> bool:
        """Return whether a connection should check its marker now."""
        now = steady()
        if now - self._checked_at.get(owner, -CHECK_INTERVAL) < CHECK_INTERVAL:
            return False
        self._checked_at[owner] = now
        return True

    def check_marker(self, number: int | None = None) -> Marker:
        """Return a script that checks the marker, or in a cluster the marker of this number."""
        key = self._protocol.marker(number)
        return Marker(self, self._protocol, key, b"%s-%d" % (self._token, next(self._numbers)))

    def compare_marker(self, key: bytes, value: bytes) -> None:
        """Compare a marker with its last value."""
        before, when = self._seen.get(key, (value, 0))
        now = steady()
        self._seen[key] = value, now
        if before != value and now - when < RECENTLY_SEEN:
            self._counts.state_losses += 1

    def forget(self, owner: object) -> None:
        """Forget a connection that was closed."""
        self._checked_at.pop(owner, None)


class Marker(Script):
    """A script that checks a marker, sent with other scripts."""

    __slots__ = ("_key", "_value", "_watch")

    def __init__(self, watch: ServerWatch, protocol: ScriptProtocol, key: bytes, value: bytes) -> None:
        """Read this key; if it does not exist, set this value."""
        super().__init__(protocol, (), protocol.slot(key), 1)
        self._watch = watch
        self._key = key
        self._value = value

    def drop_cancelled(self) -> bool:
        """Return that it must be sent."""
        return True

    def command(self) -> list[bytes]:
        """Return the words of the command."""
        return [b"EVAL", MARKER_SCRIPT, b"1", self._key, self._value, b"%d" % MARKER_TTL]

    def receive(self, reply: bytes) -> list[PendingCall]:
        """Compare the value with the last one."""
        self._watch.compare_marker(self._key, reply)
        return []
