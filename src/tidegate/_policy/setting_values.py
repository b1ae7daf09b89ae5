"""Reads the values of settings that several interfaces have: addresses, durations, tokens, files, URLs."""

from __future__ import annotations

import errno
import ipaddress
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import yaml

from tidegate._policy.config_value import ConfigValue
from tidegate._runtime.urls import redact, split_url
from tidegate.core._bounds import SECOND
from tidegate.core._calendar import find_zone
from tidegate.core._limit import parse_period
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")  # of the environment
MAX_PORT: Final = 65_535
MIN_TOKEN_LENGTH: Final = 16
FULL_PERCENT: Final = 100
DURATION_EXAMPLES: Final = "500ms, 30s, 5m or 1h30m"  # in messages and help
LOCAL_NAMES: Final = ("localhost",)
PERMISSIONS: Final = ("warn", "refuse", "ignore")  # as Providers accepts them


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


def listen_error(address: ListenAddress, name: str, error: OSError) -> ConfigError:
    """Return the error of an address that cannot be used; `name` is its setting, and its command-line option."""
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:  # the text of asyncio and of socket.create_server repeats the address
        reason = f"Address already in use: stop the other program, or choose another address with --{name}"
    return ConfigError(f"cannot listen on {address}: {reason}", field=name)


def read_seconds(setting: ConfigValue) -> float:
    """Read a duration, in seconds."""
    with suppress(ConfigError):
        return setting.number()
    try:
        return parse_period(setting.string()) / SECOND
    except ConfigError:
        raise setting.error(f"expected a duration such as {DURATION_EXAMPLES}, not {setting}") from None


def expand_variables(setting: ConfigValue, environment: Mapping[str, str]) -> ConfigValue:
    """Replace each `${NAME}` in a string, or in the strings of a list, with an environment variable."""
    if setting.is_list:
        parts = setting.one_or_many()
        expanded = [expand_variables(each, environment) for each in parts]
        return setting if expanded == parts else replace(setting, raw=[each.string() for each in expanded])
    node = setting.raw if isinstance(setting.raw, yaml.ScalarNode) else None
    text = setting.raw if node is None else node.value
    if not isinstance(text, str) or "${" not in text:
        return setting

    def find(match: re.Match[str]) -> str:
        if not (found := environment.get(match[1])):
            raise setting.error(f"the environment variable {match[1]} is not set")
        return found

    expanded_text = VARIABLE.sub(find, text)
    # An unquoted value may be a number or a boolean, as in `workers: ${WORKERS}`.
    raw = expanded_text if node is None else yaml.ScalarNode(node.tag, expanded_text, style=node.style)
    return replace(setting, raw=raw)


def read_variable(name: str, environment: Mapping[str, str]) -> str | None:
    """Return an environment variable, or the content of the file that NAME_FILE names; None if neither is set."""
    value, path = environment.get(name, "").strip(), environment.get(f"{name}_FILE", "").strip()
    if not path:
        return value or None
    setting = ConfigValue(path, field=f"{name}_FILE")
    if value:
        raise setting.error(f"cannot be combined with {name}: unset one of them")
    return read_string_file(setting)


def read_token(setting: ConfigValue) -> str:
    """Read a token; refuse a short one."""
    token = setting.string().strip()
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        # The message does not contain the value: messages are logged.
        raise setting.error(f"expected at least {MIN_TOKEN_LENGTH} printable ASCII characters without spaces")
    return token


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


def location_of(setting: ConfigValue) -> tuple[str | None, int | None, str | None]:
    """Return file, line and field of a setting, for an error about a part of it."""
    return setting.file, setting.line, setting.field


def read_path(setting: ConfigValue) -> Path:
    """Read a path; in a file, a relative path is relative to that file."""
    path = Path(setting.string())
    return path if setting.file is None or path.is_absolute() else Path(setting.file).parent / path


def read_paths(setting: ConfigValue) -> tuple[Path, ...]:
    """Read one or more paths."""
    if setting.is_mapping:
        raise setting.error(f"expected a path or a list of paths, not {setting}")
    return tuple(read_path(each) for each in setting.one_or_many())


def read_string_file(setting: ConfigValue) -> str:
    """Read the only line of a file, such as a URL with a password."""
    if not (text := read_text(setting).strip()) or "\n" in text:
        raise setting.error(f"expected one line in {read_path(setting)}")
    return text


def read_url_file(setting: ConfigValue) -> str:
    """Read the URL in a file."""
    return read_url(ConfigValue(read_string_file(setting), *location_of(setting)))


def read_url(setting: ConfigValue) -> str:
    """Read a URL; only its form is checked."""
    text = setting.string()
    if "://" not in text:
        raise setting.error(f"expected a URL such as nats://127.0.0.1:4222, not {setting}")
    return text


def read_timezone(setting: ConfigValue) -> str:
    """Read the name of a time zone."""
    name = setting.string()
    with setting.locate_errors(timezone=setting):
        find_zone(name)
    return name


def read_webhook(setting: ConfigValue) -> str:
    """Read the URL to which warnings are posted."""
    url = setting.string()
    if not url.startswith(("http://", "https://")):
        raise setting.error(f"expected an http or https URL such as https://example.com/hook, not {redact(url)!r}")
    with setting.locate_errors():
        split_url(url, "")
    return url


def read_secret(setting: ConfigValue) -> str:
    """Read a secret, which no message contains."""
    try:
        return setting.string()
    except ConfigError:
        raise setting.error("expected a non-empty string") from None


def read_milestones(setting: ConfigValue) -> tuple[int, ...]:
    """Read percentages of a limit."""
    return tuple(each.integer(1, FULL_PERCENT) for each in setting.one_or_many())


def read_permissions(setting: ConfigValue) -> str:
    """Read how to treat files that other users can read."""
    return setting.choice(*PERMISSIONS)
