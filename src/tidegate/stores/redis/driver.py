"""The adapter to redis-py: opens connections and translates exceptions.

The defaults of redis-py do not fit (a hung server costs 5 s and several attempts), so all are set: no retries, since a
script whose reply was lost may have run; timeouts from the address; RESP2, whose replies are parsed fastest.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.stores.deadline import wait_for

try:
    from redis.asyncio import connection as asyncio_connection
    from redis.asyncio import retry as asyncio_retry
    from redis.asyncio import sentinel as asyncio_sentinel
    from redis.backoff import NoBackoff
    from redis.connection import Connection, SSLConnection
    from redis.crc import key_slot
    from redis.exceptions import (
        AskError,
        MovedError,
        NoScriptError,
        ReadOnlyError,
        RedisError,
        ResponseError,
        TryAgainError,
    )
    from redis.retry import Retry
    from redis.sentinel import Sentinel
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("redis:// needs redis-py: pip install 'tidegate[redis]'", field="store") from error

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from tidegate.stores.redis.address import RedisAddress

__all__ = [
    "FAILURES",
    "AnyConnection",
    "AskError",
    "MovedError",
    "NoScriptError",
    "ReadOnlyError",
    "RedisError",
    "ResponseError",
    "TryAgainError",
    "connect",
    "connect_async",
    "discard",
    "explain",
    "extended_timeout",
    "is_closed_by_server",
    "key_slot",
    "read_error",
    "read_slots",
    "read_slots_async",
    "take_over",
]

AnyConnection = Any  # a connection of redis-py, plain or TLS, whose methods are untyped
MIN_EXTENSION: Final = 0.5  # of a timeout: a smaller extension is not worth a system call
FAILURES: Final = (RedisError, OSError, EOFError, TimeoutError)
ERRORS: Final[dict[str, type[ResponseError]]] = {
    "ASK": AskError,
    "MOVED": MovedError,
    "NOSCRIPT": NoScriptError,
    "READONLY": ReadOnlyError,
    "TRYAGAIN": TryAgainError,
}
COMMANDS: Final = (
    "allow the user the commands fcall, function|load, time, get, set, getrange, setrange, pexpire, pttl, del, hget, "
    "hset, hdel, hlen, hscan, zadd, zrem, zcard, zscore and zrangebyscore on its keys; eval and evalsha can replace "
    "fcall and function|load"
)
ADVICE: Final = (  # the first entry whose text is part of the message applies
    ("NOAUTH", "add the user and password to the URL: redis://user:password@host"),
    ("Authentication required", "add the user and password to the URL: redis://user:password@host"),
    ("WRONGPASS", "check the user and password in the URL"),
    ("invalid username-password", "check the user and password in the URL"),
    ("AUTH", "check the user and password in the URL"),
    ("NOPERM", COMMANDS),
    ("o permissions", COMMANDS),
    ("READONLY", "this is a replica: name the primary, or use redis+sentinel:// or redis+cluster://"),
    ("read only replica", "this is a replica: name the primary, or use redis+sentinel:// or redis+cluster://"),
    ("MOVED", "this server is part of a cluster: use redis+cluster://"),
    ("CLUSTERDOWN", "a part of the cluster is down; calls succeed again after a replica has taken over"),
    ("CROSSSLOT", "this server is part of a cluster: use redis+cluster://"),
    ("OOM", "the server is out of memory: raise maxmemory, or use a separate server for rate limits"),
    ("maxmemory", "the server is out of memory: raise maxmemory, or use a separate server for rate limits"),
    ("MISCONF", "the server cannot write its files: check its log"),
    ("LOADING", "the server is loading its data; calls succeed when it has finished"),
    ("BUSY", "another script keeps the server busy: find it with SLOWLOG, stop it with SCRIPT KILL or FUNCTION KILL"),
    ("newer tidegate", "upgrade this program, or set another prefix (?prefix=)"),
    ("WRONGTYPE", "another program uses these keys: set another prefix (?prefix=)"),
    ("unknown command", "the store needs functions or scripts: use Redis 7 or Valkey, and allow FCALL or EVALSHA"),
    ("MASTERDOWN", "the sentinels have not elected a primary yet"),
    ("No master found", "check the service name and the sentinels in the URL"),
    ("max number of clients", "raise maxclients, or connect fewer processes"),
    ("certificate", "check ssl_ca_certs in the URL"),
    ("imeout", "the server hangs or is overloaded: check it, or raise ?timeout= (seconds)"),
    ("timed out", "the server hangs or is overloaded: check it, or raise ?timeout= (seconds)"),
)


def explain(address: RedisAddress, error: BaseException, load_error: Exception | None = None) -> StoreUnavailable:
    """Return an error that names the server, the driver's message and what to do.

    `load_error` is why functions could not be loaded, so that a script was sent.
    """
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TimeoutError) and not error.args:
        reason = f"no reply within {address.timeout} s (timeout)"
    if load_error is not None:
        reason = f"{reason} (and FUNCTION LOAD failed: {' '.join(str(load_error).split())})"
    secrets = (address.password, address.driver.get("sentinel_password"))
    for secret in filter(None, secrets):
        reason = reason.replace(secret, "***")
    reason = reason.rstrip(".")
    advice = next((text for part, text in ADVICE if part in reason), "check that the server runs and is reachable")
    unavailable = StoreUnavailable(f"Redis at {address} could not decide: {reason}: {advice}")
    if address.kind == "node":
        unavailable.shard = address.hosts[0]
    return unavailable


def settings(address: RedisAddress) -> dict[str, Any]:
    """Return the arguments of every connection, except the host."""
    arguments: dict[str, Any] = {
        "username": address.username,
        "password": address.password,
        "protocol": 2,
        "socket_connect_timeout": address.connect_timeout,
        "socket_timeout": address.connect_timeout,
    }
    arguments |= {name: value for name, value in address.driver.items() if not name.startswith("sentinel_")}
    if arguments.get("ssl_check_hostname") is not None:
        arguments["ssl_check_hostname"] = arguments["ssl_check_hostname"] not in ("0", "no", "false", "False")
    return arguments


# ---- for threads -----------------------------------------------------------------------------------------------------


def connect(address: RedisAddress) -> AnyConnection:
    """Open a connection, to be used by one thread at a time."""
    host, port = address.hosts[0]
    if address.kind == "sentinel":
        sentinel = _sentinel(address, Sentinel, Retry)
        try:
            host, port = sentinel.discover_master(address.service)
        finally:
            for client in sentinel.sentinels:
                client.close()
    kind: Any = SSLConnection if address.tls else Connection
    connection = kind(host=host, port=port, db=address.db, retry=Retry(NoBackoff(), 0), **settings(address))
    try:
        connection.connect()
        # The handshake may take as long as connecting does; a script may not.
        connection._sock.settimeout(address.timeout)  # noqa: SLF001 - redis-py 8 has a public method, 7 has none
    except BaseException:  # a signal handler may raise
        connection.disconnect()
        raise
    return connection


@contextmanager
def extended_timeout(connection: AnyConnection, timeout: float, more: float) -> Iterator[None]:
    """Extend the timeout while an expensive script is answered."""
    if more < MIN_EXTENSION * timeout:
        yield
        return
    socket = connection._sock  # noqa: SLF001 - as above
    socket.settimeout(timeout + more)
    try:
        yield
    finally:
        socket.settimeout(timeout)


def is_closed_by_server(connection: AnyConnection) -> bool:
    """Return whether the server closed an idle connection: data on it can only mean that."""
    try:
        return bool(connection.can_read(timeout=0))
    except FAILURES:
        return True


def read_slots(address: RedisAddress, node: tuple[str, int]) -> list[Any]:
    """Read the slot map from one server of a cluster."""
    connection = connect(replace(address, kind="node", hosts=(node,), timeout=address.connect_timeout))
    try:
        connection.send_command("CLUSTER", "SLOTS", check_health=False)
        slots: list[Any] = connection.read_response()
    finally:
        connection.disconnect()
    return slots


# ---- for tasks -------------------------------------------------------------------------------------------------------


async def connect_async(address: RedisAddress) -> AnyConnection:
    """Open a connection in the running event loop; the reader enforces the timeout."""
    host, port = address.hosts[0]
    if address.kind == "sentinel":
        sentinel = _sentinel(address, asyncio_sentinel.Sentinel, asyncio_retry.Retry)
        try:
            host, port = await sentinel.discover_master(address.service)
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
    kind: Any = asyncio_connection.SSLConnection if address.tls else asyncio_connection.Connection
    arguments = settings(address) | {"socket_timeout": None, "socket_connect_timeout": None}
    connection = kind(host=host, port=port, db=address.db, retry=asyncio_retry.Retry(NoBackoff(), 0), **arguments)
    try:
        await connection.connect()
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    return connection


def discard(connection: AnyConnection) -> None:
    """Abort a connection that is no longer needed."""
    connection._writer.transport.abort()  # noqa: SLF001 - as below


def take_over(connection: AnyConnection, protocol: asyncio.Protocol) -> asyncio.Transport:
    """Make `protocol` read a connection from now on; redis-py has opened it and will close it.

    A stream would wake a task for each reply, which costs more than all else.
    """
    transport: asyncio.Transport = connection._writer.transport  # noqa: SLF001 - redis-py has no public method
    transport.set_protocol(protocol)
    return transport


def read_error(reply: bytes) -> ResponseError:
    """Return the exception for an error reply."""
    code, _, rest = reply.decode(errors="replace").partition(" ")
    kind = ERRORS.get(code)
    return ResponseError(f"{code} {rest}") if kind is None else kind(rest)


async def read_slots_async(address: RedisAddress, node: tuple[str, int]) -> list[Any]:
    """Read the slot map from one server of a cluster."""

    async def read() -> list[Any]:
        connection = await connect_async(replace(address, kind="node", hosts=(node,)))
        try:
            await connection.send_command("CLUSTER", "SLOTS", check_health=False)
            slots: list[Any] = await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)
        return slots

    return await wait_for(read(), address.connect_timeout, list)


def _sentinel(address: RedisAddress, kind: Any, retry: Any) -> Any:  # noqa: ANN401 - two classes that share no base
    own = {name.removeprefix("sentinel_"): v for name, v in address.driver.items() if name.startswith("sentinel_")}
    arguments = {
        "socket_timeout": address.connect_timeout,
        "socket_connect_timeout": address.connect_timeout,
        "retry": retry(NoBackoff(), 0),
        "protocol": 2,
        **own,
    }
    return kind(address.hosts, sentinel_kwargs=arguments)
