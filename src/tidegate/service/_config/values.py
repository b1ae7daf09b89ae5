"""Reads the values of single settings: addresses, durations, tokens, files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._policy.config_value import ConfigValue
from tidegate._policy.setting_values import (
    ListenAddress,
    location_of,
    read_path,
    read_seconds,
    read_text,
    read_token,
)
from tidegate.errors import ConfigError
from tidegate.headers import STYLES
from tidegate.service._decisions.service_directory import MAX_NAME_LENGTH
from tidegate.stores._lease import Lease

if TYPE_CHECKING:
    from pathlib import Path

MAX_BODY_BYTES: Final = 2**30
MAX_WORKERS: Final = 256
MAX_FETCHERS: Final = 10_000
MIN_CONNECTIONS: Final = 16
READINESS: Final = ("policies", "store", "process")  # see service/http/readiness.py
NO_TOKEN: Final = "none"  # as metrics_token: /metrics needs no token  # noqa: S105 - not a password
NO_DELAY: Final = ("0", "0s", "0ms", "0.0")


DEFAULT_LISTEN: Final = ListenAddress("127.0.0.1", 8080)


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


def read_metrics_token(setting: ConfigValue) -> str:
    """Read the token for metrics, or `none` if they need no token."""
    return NO_TOKEN if setting.string() == NO_TOKEN else read_token(setting)


def read_readiness(setting: ConfigValue) -> str:
    """Read when the service is ready."""
    return setting.choice(*READINESS)


def read_delay(setting: ConfigValue) -> float:
    """Read a duration in seconds, which may be 0."""
    return 0.0 if str(setting).strip("'") in NO_DELAY else read_seconds(setting)


def read_secrets(setting: ConfigValue) -> tuple[str, ...]:
    """Read one or more secrets: a list, or a string in which white space separates them."""
    found = [ConfigValue(word, *location_of(each)) for each in setting.one_or_many() for word in each.string().split()]
    if not found:
        raise setting.error("expected at least one secret")
    return tuple(read_token(secret) for secret in found)


def read_secrets_file(setting: ConfigValue) -> tuple[str, ...]:
    """Read the secrets in a file, one on each line."""
    return read_secrets(ConfigValue(read_text(setting), *location_of(setting)))


def read_style(setting: ConfigValue) -> str:
    """Read the style of header fields."""
    return setting.choice(*STYLES)


def read_name(setting: ConfigValue) -> str:
    """Read the name of the service."""
    name = setting.string()
    if len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise setting.error(f"expected at most {MAX_NAME_LENGTH} printable characters")
    return name


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


def read_fetchers(setting: ConfigValue) -> int:
    """Read the maximum number of concurrent fetches."""
    return setting.integer(1, MAX_FETCHERS)


def read_namespace(setting: ConfigValue) -> str:
    """Read the namespace of a swarm."""
    from tidegate.adaptive._capacities import subject_in  # noqa: PLC0415 - most services show no swarm

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
