"""A bus through Redis or Valkey: publish and subscribe, and one hash of retained messages per subject."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.clock import SystemClock, TaskSignal
from tidegate._runtime.urls import server_url, split_hosts
from tidegate.bus._network import STEP_TIMEOUT, NetworkBus
from tidegate.bus._retained import MAX_KEY_BYTES, MAX_RECALLED, MAX_RECALLED_BYTES, MAX_RETAINED_BYTES, VERSION_DIGITS
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError

try:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ResponseError
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("redis:// needs redis-py: pip install 'tidegate[redis]'", field="bus") from _error

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate.bus._base import Retain
    from tidegate.bus._network import Arrived
    from tidegate.bus._retained import RecalledMessages

KEY_PREFIX: Final = "tidegate:bus:"
PORT: Final = 6379
PING_INTERVAL: Final = SECOND  # between two checks of an idle connection
# A value is "version end message"; the end is by the server's clock, in milliseconds. Everything has a TTL. Other
# clients may have stored anything under these keys: `read` returns the version and end of a value, or nil.
READ_FUNCTIONS: Final = f"""
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
local kind = redis.call('TYPE', KEYS[1])['ok']
local function read(key, value)
  if #key == 0 or #key > {MAX_KEY_BYTES} or #value > {MAX_RETAINED_BYTES + 64} then return nil end
  local version, ends = string.match(value, '^(%d+) (%d+) ')
  if not version or #version > {VERSION_DIGITS} or #ends > {VERSION_DIGITS} then return nil end
  return version, tonumber(ends)
end
local function each(use)
  local cursor = '0'
  repeat
    local part = redis.call('HSCAN', KEYS[1], cursor, 'COUNT', 1000)
    cursor = part[1]
    for i = 1, #part[2], 2 do use(part[2][i], part[2][i + 1]) end
  until cursor == '0'
end
"""
READ_RETAINED_SCRIPT: Final = (
    READ_FUNCTIONS
    + f"""
local found, size, skipped = {{}}, 0, 0
if kind == 'none' then return {{0}} elseif kind ~= 'hash' then return {{1}} end
each(function(key, value)
  local version, ends = read(key, value)
  if not version or #found >= {2 * MAX_RECALLED} or size + #value > {MAX_RECALLED_BYTES} then
    skipped = skipped + 1
  elseif ends > ms then
    size = size + #key + #value
    found[#found + 1] = key
    found[#found + 1] = value
  end
end)
table.insert(found, 1, skipped)
return found
"""
)
RETAIN_SCRIPT: Final = (
    READ_FUNCTIONS
    + """
if kind ~= 'none' and kind ~= 'hash' then redis.call('DEL', KEYS[1]) end
local over = {}
each(function(key, value)
  local version, ends = read(key, value)
  if not version or ends <= ms then over[#over + 1] = key end
end)
for _, key in ipairs(over) do redis.call('HDEL', KEYS[1], key) end
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old and tonumber((read(ARGV[1], old))) >= tonumber(ARGV[2]) then return 0 end
local left = redis.call('PTTL', KEYS[1])
local ends = string.format('%.0f', ms + ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ends .. ' ' .. ARGV[4])
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.max(left, ARGV[3])))
return 1
"""
)


class RedisConnection:
    """One connection for commands and one for subscriptions."""

    def __init__(self, url: str, arrived: Arrived, unretained: Callable[[Exception], None]) -> None:
        """Create the clients; they connect on first use."""
        settings: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": STEP_TIMEOUT,
            "protocol": 2,
        }
        self._redis = Redis.from_url(url, socket_timeout=STEP_TIMEOUT, **settings)
        self._listening = Redis.from_url(url, socket_timeout=None, **settings)
        self._pubsub = self._listening.pubsub()
        self._arrived = arrived
        self._unretained = unretained
        self._reader: asyncio.Task[None] | None = None
        self._awaited: dict[bytes, TaskSignal] = {}

    async def listen(self, subject: str) -> None:
        """Subscribe, and wait until the server confirms it."""
        channel = subject.encode()
        signal = self._awaited[channel] = TaskSignal()
        await self._pubsub.subscribe(subject)
        if self._reader is None:
            self._reader = asyncio.ensure_future(self._read())
        await signal.wait(STEP_TIMEOUT)
        if not signal.is_set():
            raise TimeoutError(f"no reply to SUBSCRIBE {subject}")

    async def _read(self) -> None:
        async for message in self._pubsub.listen():
            if message["type"] == "subscribe":
                if (signal := self._awaited.pop(message["channel"], None)) is not None:
                    signal.set()
            elif message["type"] == "message":
                self._arrived(message["channel"].decode(), message["data"])

    async def send(self, subject: str, payload: bytes) -> None:
        """Publish."""
        await self._redis.publish(subject, payload)

    async def retain(self, subject: str, payload: bytes, retain: Retain) -> bool:
        """Put the message into the subject's hash, unless a newer version is there."""
        milliseconds = max(1, round(retain.ttl * 1000))
        arguments = (retain.key.encode(), str(retain.version), str(milliseconds), payload)
        try:
            await self._redis.eval(RETAIN_SCRIPT, 1, KEY_PREFIX + subject, *arguments)
        except ResponseError as error:  # out of memory, read-only, not permitted
            self._unretained(error)
            return False
        return True

    async def read_retained(self, subject: str, found: RecalledMessages) -> None:
        """Read the subject's hash; the script limits how much is returned."""
        skipped, *entries = await self._redis.eval(READ_RETAINED_SCRIPT, 1, KEY_PREFIX + subject)
        found.skipped += skipped
        for key, value in zip(entries[::2], entries[1::2], strict=True):
            version, _, payload = value.split(b" ", 2)
            found.add(key, version, payload)

    async def lost(self) -> None:
        """Ping the server every second until the connection is lost or the reader fails."""
        clock = SystemClock()
        while self._reader is None or not self._reader.done():
            if self._reader is None:
                await clock.wait_async(TaskSignal(), clock.steady() + PING_INTERVAL)
            else:
                await asyncio.wait((self._reader,), timeout=PING_INTERVAL / SECOND)
            await self._redis.ping()
        await self._reader
        raise ConnectionError("the connection is lost")

    async def close(self) -> None:
        """Close both connections."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait((self._reader,))
        await self._pubsub.aclose()  # type: ignore[no-untyped-call]  # redis-py's
        await self._listening.aclose()
        await self._redis.aclose()


class RedisBus(NetworkBus):
    """A bus through a Redis or Valkey server."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        """Start connecting."""
        parts = server_url(url, "bus")
        hosts = split_hosts(url, parts.netloc, "bus")
        if len(hosts) > 1:
            raise ConfigError("a bus uses one Redis server: expected one host", field="bus")
        self._url = f"{parts.scheme.replace('valkey', 'redis')}{url[len(parts.scheme) :]}"
        try:
            Redis.from_url(self._url)
        except ValueError as error:
            raise ConfigError(f"invalid Redis URL: {error}", field="bus") from None
        super().__init__(f"{parts.scheme}://{hosts[0][0] or '127.0.0.1'}:{hosts[0][1] or PORT}", clock)

    async def _connect(self, arrived: Arrived) -> RedisConnection:
        connection = RedisConnection(self._url, arrived, self._unretained)
        try:
            await connection._redis.ping()  # noqa: SLF001 - of the same module
        except BaseException:
            await connection.close()
            raise
        return connection


def open_redis(url: str, clock: Clock | None) -> RedisBus:
    """Open a bus through the server of a URL."""
    return RedisBus(url, clock)
