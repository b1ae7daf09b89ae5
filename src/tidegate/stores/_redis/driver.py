"""The adapter to redis-py: opens connections and translates exceptions.

The defaults of redis-py do not fit (a hung server costs 5 s and several attempts), so all are set: no retries, since a
script whose reply was lost may have run; timeouts from the address; RESP2, whose replies are parsed fastest.
"""

from __future__ import annotations

import ssl
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.stores._deadline import wait_for

try:
    from redis.asyncio import connection as asyncio_connection
    from redis.asyncio import retry as asyncio_retry
    from redis.asyncio import sentinel as asyncio_sentinel
    from redis.backoff import NoBackoff
    from redis.connection import Connection, ConnectionPool, SSLConnection
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
    from redis.sentinel import Sentinel, SentinelConnectionPool
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("redis:// needs redis-py: pip install 'tidegate[redis]'", field="store") from _error

if TYPE_CHECKING:
    from tidegate.stores._redis.address import RedisAddress

__all__ = [
    "FAILURES",
    "AnyConnection",
    "AnyPool",
    "AskError",
    "MovedError",
    "NoScriptError",
    "ReadOnlyError",
    "RedisError",
    "ResponseError",
    "TryAgainError",
    "close_pool",
    "explain",
    "explain_refused",
    "find_server",
    "handshake",
    "key_slot",
    "open_pool",
    "read_error",
    "read_reply",
    "read_slots",
    "read_slots_async",
    "tls_context",
]

AnyConnection = Any  # a connection of redis-py, plain or TLS, whose methods are untyped
AnyPool = Any  # a pool of redis-py, as above
FALSE: Final = ("0", "no", "false", "False")
VERIFY_MODES: Final = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
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
    ("older tidegate", "delete the keys of the older program, or set another prefix (?prefix=)"),
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
    advice = find_advice(reason, "check that the server runs and is reachable")
    unavailable = StoreUnavailable(f"Redis at {address} could not decide: {reason}: {advice}")
    if address.kind == "node":
        unavailable.shard = address.hosts[0]
    return unavailable


def explain_refused(address: RedisAddress, reason: str) -> StoreUnavailable:
    """Return the error of a call that the server refused because of one of its keys."""
    advice = find_advice(reason, "delete the key")
    refused = StoreUnavailable(f"Redis at {address} cannot use a key of this call: {reason}: {advice}")
    refused.concerns_key = True
    return refused


def find_advice(reason: str, default: str) -> str:
    """Return what to do about an error."""
    return next((text for part, text in ADVICE if part in reason), default)


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
        arguments["ssl_check_hostname"] = arguments["ssl_check_hostname"] not in FALSE
    return arguments


# ---- for threads -----------------------------------------------------------------------------------------------------


def open_pool(address: RedisAddress) -> AnyPool:
    """Return a pool that connects to a server; with sentinels, to the primary that they name at that time.

    The handshake may take as long as connecting does; `read_reply` has a timeout of its own.
    """
    retry = Retry(NoBackoff(), 0)
    if address.kind == "sentinel":
        arguments = settings(address) | {"retry": retry, "db": address.db, "ssl": address.tls}
        manager = _sentinel(address, Sentinel, Retry)
        return SentinelConnectionPool(address.service, manager, **arguments)  # type: ignore[no-untyped-call]  # redis-py
    host, port = address.hosts[0]
    kind = SSLConnection if address.tls else Connection
    arguments = settings(address) | {"retry": retry, "db": address.db, "host": host, "port": port}
    return ConnectionPool(connection_class=kind, **arguments)


def close_pool(pool: AnyPool) -> None:
    """Close the connections of a pool, also one that was interrupted while it was in use."""
    pool.disconnect()
    if isinstance(pool, SentinelConnectionPool):
        for client in pool.sentinel_manager.sentinels:
            client.close()


def read_reply(connection: AnyConnection, timeout: float) -> bytes | Exception:
    """Read one reply; an error reply is returned."""
    try:
        reply: bytes = connection.read_response(timeout=timeout)
    except ResponseError as error:
        return error
    return reply


def read_slots(address: RedisAddress, node: tuple[str, int]) -> list[Any]:
    """Read the slot map from one server of a cluster."""
    pool = open_pool(replace(address, kind="node", hosts=(node,)))
    try:
        connection = pool.get_connection()
        connection.send_command("CLUSTER", "SLOTS", check_health=False)
        slots: list[Any] = connection.read_response()
    finally:
        close_pool(pool)
    return slots


# ---- for tasks -------------------------------------------------------------------------------------------------------


async def find_server(address: RedisAddress) -> tuple[str, int]:
    """Return the server of an address; with sentinels, the primary that they name now."""
    if address.kind != "sentinel":
        return address.hosts[0]
    sentinel = _sentinel(address, asyncio_sentinel.Sentinel, asyncio_retry.Retry)
    try:
        primary: tuple[str, int] = await sentinel.discover_master(address.service)
    finally:
        for client in sentinel.sentinels:
            await client.aclose()
    return primary


def tls_context(address: RedisAddress) -> ssl.SSLContext | None:
    """Return what the TLS options of an address mean, as in redis-py; None without TLS."""
    if not address.tls:
        return None
    options = address.driver
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"), cadata=options.get("ssl_ca_data"))
    if "ssl_certfile" in options:
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    required = VERIFY_MODES[options.get("ssl_cert_reqs", "required")]
    context.check_hostname = required is not ssl.CERT_NONE and options.get("ssl_check_hostname") not in FALSE
    context.verify_mode = required
    return context


def handshake(address: RedisAddress) -> list[tuple[bytes, ...]]:
    """Return the commands that precede all others on a connection."""
    commands: list[tuple[bytes, ...]] = []
    if address.password is not None:
        names = () if address.username is None else (address.username.encode(),)
        commands.append((b"AUTH", *names, address.password.encode()))
    if address.db:
        commands.append((b"SELECT", b"%d" % address.db))
    if "client_name" in address.driver:
        commands.append((b"CLIENT", b"SETNAME", address.driver["client_name"].encode()))
    return commands


def read_error(reply: bytes) -> ResponseError:
    """Return the exception for an error reply."""
    code, _, rest = reply.decode(errors="replace").partition(" ")
    kind = ERRORS.get(code)
    return ResponseError(f"{code} {rest}") if kind is None else kind(rest)


async def read_slots_async(address: RedisAddress, node: tuple[str, int]) -> list[Any]:
    """Read the slot map from one server of a cluster."""

    async def read() -> list[Any]:
        kind: Any = asyncio_connection.SSLConnection if address.tls else asyncio_connection.Connection
        host, port = node
        connection = kind(host=host, port=port, retry=asyncio_retry.Retry(NoBackoff(), 0), **settings(address))
        try:
            await connection.connect()
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
