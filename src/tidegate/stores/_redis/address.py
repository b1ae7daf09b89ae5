"""Parse the URL of a server, a cluster or sentinels into a RedisAddress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import parse_qsl, unquote

from tidegate._runtime.urls import server_url, split_hosts, unknown_option
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

ServerKind = Literal["server", "cluster", "sentinel", "node"]  # node: one server of a cluster
Tag = Literal["key", "policy", "all"]

SCHEMES: Final[dict[str, tuple[ServerKind, bool]]] = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "valkey": ("server", False),
    "valkeys": ("server", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}
DEFAULT_PORTS: Final[dict[ServerKind, int]] = {"server": 6379, "cluster": 6379, "sentinel": 26379}
TLS_OPTIONS: Final = (
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_ca_data",
)
SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
OPTIONS: Final = (
    *("timeout", "connect_timeout", "db", "batch", "prefix", "hash_tag", "client_name"),
    *TLS_OPTIONS,
    *SENTINEL_OPTIONS,
)


@dataclass(frozen=True)
class RedisAddress:
    """Hosts, credentials, timeouts and options of a Redis store."""

    kind: ServerKind = "server"
    hosts: tuple[tuple[str, int], ...] = (("127.0.0.1", 6379),)
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    timeout: float = 0.05
    connect_timeout: float = 0.25
    prefix: str = "tidegate"
    hash_tag: Tag = "key"
    batch: int = 128
    driver: dict[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """Return the hosts for messages, without the password."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{self.service} of the sentinels at {hosts}" if self.kind == "sentinel" else hosts


def read_url(url: str) -> RedisAddress:
    """Parse the URL of a store. Raises ConfigError if it is invalid; the message never contains the password."""
    parts = server_url(url, "store")
    kind, tls = SCHEMES[parts.scheme]
    credentials = parts.netloc.rpartition("@")[0]
    hosts = split_hosts(url, parts.netloc, "store")
    username, _, password = credentials.partition(":")
    values: dict[str, object] = {
        "kind": kind,
        "tls": tls,
        "hosts": tuple((host or "127.0.0.1", port or DEFAULT_PORTS[kind]) for host, port in hosts),
        "username": unquote(username) or None,
        "password": unquote(password) or None,
        "driver": {},
    }
    path = [unquote(part) for part in parts.path.split("/") if part]
    if kind == "sentinel":
        if not path:
            raise _error("the service name is missing: write redis+sentinel://host:26379/mymaster")
        values["service"] = path.pop(0)
    if path:
        values["db"] = _read_number("db", path.pop(0), int, 0)
    if path or (kind == "cluster" and values.get("db")):
        raise _error("a cluster has only database 0" if kind == "cluster" else "the path must be a database number")
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        _set_option(values, name, value)
    if kind == "server" and len(hosts) > 1:
        raise _error("it names several hosts: use redis+cluster:// or redis+sentinel://")
    return RedisAddress(**values)  # type: ignore[arg-type]  # each was checked above


def _set_option(values: dict[str, object], name: str, value: str) -> None:
    driver = values["driver"]
    if name in ("timeout", "connect_timeout"):
        values[name] = _read_number(name, value, float, 0.001)
    elif name in ("db", "batch"):
        values[name] = _read_number(name, value, int, 0 if name == "db" else 1)
    elif (name == "prefix" and value and not set(value) & set("{}")) or (
        name == "hash_tag" and value in ("key", "policy", "all")
    ):
        values[name] = value
    elif name in (*TLS_OPTIONS, *SENTINEL_OPTIONS, "client_name") and isinstance(driver, dict):
        driver[name] = value
    elif name in ("prefix", "hash_tag"):
        expected = "key, policy or all" if name == "hash_tag" else "a non-empty string without braces"
        raise _error(f"{name} must be {expected}, not {value!r}")
    else:
        raise _error(unknown_option(name, OPTIONS))


def _read_number(name: str, text: str, number: Callable[[str], float], minimum: float) -> float:
    try:
        value = number(text)
    except ValueError:
        value = -1
    if not minimum <= value <= 2**31:
        kind = "an integer" if number is int else "a number"
        raise _error(f"{name} must be {kind} of at least {minimum}, not {text!r}")
    return value


def _error(message: str) -> ConfigError:
    return ConfigError(f"cannot use this Redis URL: {message}", field="store")
