"""Reads the values of single settings: addresses, durations, tokens, files."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.core.limit import parse_period
from tidegate.errors import ConfigError
from tidegate.headers import STYLES
from tidegate.policy.config_value import ConfigValue
from tidegate.stores.lease import Lease

MAX_PORT: Final = 65_535
MAX_BODY_BYTES: Final = 2**30
MAX_WORKERS: Final = 256
MAX_FETCHERS: Final = 10_000
MIN_TOKEN_LENGTH: Final = 16
MIN_CONNECTIONS: Final = 16
LOCAL_NAMES: Final = ("localhost",)
PERMISSIONS: Final = ("warn", "refuse", "ignore")  # as Providers accepts them
READINESS: Final = ("policies", "store", "process")  # see service/http/readiness.py
NO_TOKEN: Final = "none"  # as metrics_token: /metrics needs no token  # noqa: S105 - not a password
NO_DELAY: Final = ("0", "0s", "0ms", "0.0")


class ListenAddress(NamedTuple):
    """An address to listen on."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host in LOCAL_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        """Write host and port, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


DEFAULT_LISTEN: Final = ListenAddress("127.0.0.1", 8080)


def read_address(setting: ConfigValue) -> ListenAddress:
    """Read an address to listen on: host and port, or a port on loopback."""
    text = setting.string() if not isinstance(setting.raw, int) else str(setting.raw)
    host, colon, port = text.rpartition(":")
    if not port.isdecimal() or len(port) > len(str(MAX_PORT)) or int(port) > MAX_PORT or (colon and not host):
        raise setting.error(f"expected an address such as 127.0.0.1:8080, not {setting}")
    host = host or "127.0.0.1"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise setting.error(f"expected an IPv6 address in brackets, as in [::1]:8080, not {setting}")
    return ListenAddress(host.strip("[]"), int(port))


def read_seconds(setting: ConfigValue) -> float:
    """Read a duration, in seconds."""
    try:
        return setting.number()
    except ConfigError:
        text = setting.string()
    try:
        return parse_period(text) / SECOND
    except ConfigError:
        raise setting.error(f"expected a duration such as 30s or 250ms, not {setting}") from None


def read_lease(setting: ConfigValue) -> Lease | None:
    """Read whether the service leases permits from the store, and for how long."""
    try:
        return Lease() if setting.boolean() else None
    except ConfigError:
        pass
    try:
        seconds = read_seconds(setting)
    except ConfigError:
        raise setting.error(f"expected true, false or a duration such as 1s, not {setting}") from None
    with setting.locate_errors(**{"lease.seconds": setting}):
        return Lease(seconds)


def read_token(setting: ConfigValue) -> str:
    """Read a token; refuse a short one."""
    token = setting.string().strip()
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        # The message does not contain the value: messages are logged.
        raise setting.error(f"expected at least {MIN_TOKEN_LENGTH} printable ASCII characters without spaces")
    return token


def read_metrics_token(setting: ConfigValue) -> str:
    """Read the token for metrics, or `none` if they need no token."""
    return NO_TOKEN if setting.string() == NO_TOKEN else read_token(setting)


def read_readiness(setting: ConfigValue) -> str:
    """Read when the service is ready."""
    return setting.choice(*READINESS)


def read_delay(setting: ConfigValue) -> float:
    """Read a duration in seconds, which may be 0."""
    return 0.0 if str(setting).strip("'") in NO_DELAY else read_seconds(setting)


def read_token_file(setting: ConfigValue) -> str:
    """Read the token in a file."""
    return read_token(ConfigValue(read_text(setting), *location_of(setting)))


def read_text(setting: ConfigValue) -> str:
    """Read the file that a setting names."""
    path = read_path(setting)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise setting.error(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def read_secrets(setting: ConfigValue) -> tuple[str, ...]:
    """Read one or more secrets: a list, or a string in which white space separates them."""
    found = [ConfigValue(word, *location_of(each)) for each in setting.one_or_many() for word in each.string().split()]
    if not found:
        raise setting.error("expected at least one secret")
    return tuple(read_token(secret) for secret in found)


def read_secrets_file(setting: ConfigValue) -> tuple[str, ...]:
    """Read the secrets in a file, one on each line."""
    return read_secrets(ConfigValue(read_text(setting), *location_of(setting)))


def location_of(setting: ConfigValue) -> tuple[str | None, int | None, str | None]:
    """Return file, line and field of a setting, for an error about a part of it."""
    return setting.file, setting.line, setting.field


def read_style(setting: ConfigValue) -> str:
    """Read the style of header fields."""
    return setting.choice(*STYLES)


def read_workers(setting: ConfigValue) -> int:
    """Read the number of processes."""
    return setting.integer(1, MAX_WORKERS)


def read_bytes(setting: ConfigValue) -> int:
    """Read the maximum size of a request, in bytes."""
    return setting.integer(1024, MAX_BODY_BYTES)


def read_connections(setting: ConfigValue) -> int:
    """Read the maximum number of connections."""
    return setting.integer(MIN_CONNECTIONS)


def read_priority(setting: ConfigValue) -> int:
    """Read the maximum priority."""
    return setting.integer(0)


def read_path(setting: ConfigValue) -> Path:
    """Read a path; in a file, a relative path is relative to that file."""
    path = Path(setting.string())
    return path if setting.file is None or path.is_absolute() else Path(setting.file).parent / path


def read_paths(setting: ConfigValue) -> tuple[Path, ...]:
    """Read one or more paths."""
    if setting.is_mapping:
        raise setting.error(f"expected a path or a list of paths, not {setting}")
    return tuple(read_path(each) for each in setting.one_or_many())


def read_fetchers(setting: ConfigValue) -> int:
    """Read the maximum number of concurrent fetches."""
    return setting.integer(1, MAX_FETCHERS)


def read_permissions(setting: ConfigValue) -> str:
    """Read how to treat files that other users can read."""
    return setting.choice(*PERMISSIONS)


def read_url(setting: ConfigValue) -> str:
    """Read a URL; only its form is checked."""
    text = setting.string()
    if "://" not in text:
        raise setting.error(f"expected a URL such as nats://127.0.0.1:4222, not {setting}")
    return text


def read_namespace(setting: ConfigValue) -> str:
    """Read the namespace of a swarm."""
    from tidegate.adaptive.capacities import subject_in  # noqa: PLC0415 - most services show no swarm

    namespace = setting.string()
    try:
        subject_in(namespace, "")
    except ConfigError as error:
        raise setting.error(str(error).removeprefix("namespace: ")) from None
    return namespace


def read_budget(setting: ConfigValue) -> bool | Path:
    """Read which budget to show: true for the RATE_LIMIT_* variables, or the path of a file."""
    try:
        return setting.boolean()
    except ConfigError:
        pass
    try:
        return read_path(setting)
    except ConfigError:
        raise setting.error(f"expected true, false or the path of a YAML file, not {setting}") from None
