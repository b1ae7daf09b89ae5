"""The egress file: where the gateway listens, who may call, which hosts it reaches, and its bounds.

    listen: 127.0.0.1:8090
    store: sqlite:///quota.db
    provider_dirs: [providers]
    callers:
      research: {token: "${RESEARCH_TOKEN}", providers: [openai], limits: [100/1m], max_priority: 5}

docs/howto/egress.md lists all fields.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from tidegate._limiter.waiting import MAX_PRIORITY
from tidegate._policy.config_value import ConfigValue, load
from tidegate._policy.setting_values import (
    ListenAddress,
    expand_variables,
    read_address,
    read_path,
    read_paths,
    read_permissions,
    read_seconds,
    read_token,
    read_token_file,
    read_url,
)
from tidegate._policy.units import is_money
from tidegate._runtime.suggestions import did_you_mean
from tidegate.egress._callers import DEFAULT_CALLER_CONNECTIONS, LOCAL_CALLER, EgressCaller, digest_of
from tidegate.errors import ConfigError
from tidegate.outbound._providers.file import read_limit
from tidegate.outbound._providers.hosts import normal_host
from tidegate.outbound._providers.profile import TOKEN_UNITS
from tidegate.spending._settings import read_spending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from tidegate.core._limit import Limit
    from tidegate.outbound._providers.provider import Provider
    from tidegate.spending._settings import SpendingSettings

DEFAULT_EGRESS: Final = ListenAddress("127.0.0.1", 8090)
HTTP_PORTS: Final = {"http": 80, "https": 443}
CALLER_FIELDS: Final = ("token", "token_file", "providers", "limits", "max_priority", "connections", "tags", "runs")
CALLER_UNITS: Final = ("requests", "concurrent-requests", *TOKEN_UNITS)  # that calls are charged in; also money
TAG_NAME = re.compile(r"[A-Za-z0-9_.:@/+-]{1,64}")
CALLER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
STANDARD_OUTPUT: Final = "-"
MAX_CLIENT_PAUSE: Final = 60.0  # seconds
NAMING_FIELDS: Final = ("upstreams", "callers")  # whose entries name providers


class Upstream(NamedTuple):
    """Where the requests of a provider are sent: scheme, host, port, and path prefix."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def origin(self) -> str:
        """The URL without its path; the default port is left out."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + ("" if self.port == HTTP_PORTS[self.scheme] else f":{self.port}")


@dataclass(frozen=True)
class EgressSettings:
    """All settings of a gateway, read and checked."""

    listen: ListenAddress = DEFAULT_EGRESS
    store: str = field(default="memory://", repr=False)
    bus: str | None = field(default=None, repr=False)
    providers: tuple[Path, ...] = ()
    provider_dirs: tuple[Path, ...] = ()
    permissions: str = "warn"
    spending: SpendingSettings | None = None
    callers: tuple[EgressCaller, ...] = field(default=(), repr=False)
    run_secrets: tuple[str, ...] = field(default=(), repr=False)
    open: bool = False
    metrics_token: str | None = field(default=None, repr=False)
    upstreams: Mapping[str, Upstream] = field(default_factory=dict)
    allow_private: frozenset[str] = frozenset()
    tunnels: bool = False
    timeout: float = 30.0
    max_body: int = 2**30
    max_metered_body: int = 2**23
    max_held_bodies: int = 2**28
    max_header: int = 16_384
    max_connections: int = 4096
    connect_timeout: float = 10.0
    first_byte_timeout: float = 300.0
    whole_timeout: float = 3600.0
    stop_within: float = 10.0
    access_log: str | None = None
    telemetry: bool = False
    file: str | None = field(default=None, compare=False)
    lines: Mapping[str, int | None] = field(default_factory=dict, compare=False, repr=False)  # by field, for errors

    @property
    def client_timeout(self) -> float:
        """For how long a client may send or read nothing while it is answered, in seconds."""
        return min(self.first_byte_timeout, MAX_CLIENT_PAUSE)

    @property
    def token_files(self) -> tuple[Path, ...]:
        """The files that contain tokens of callers."""
        return tuple(caller.token_file for caller in self.callers if caller.token_file is not None)


def load_egress(
    source: str | Path | Mapping[str, object] | None, listen: ListenAddress | None = None
) -> EgressSettings:
    """Read an egress file or a mapping (None: the defaults); `listen` replaces its address.

    Raises ConfigError, with file, line and field, if a setting is invalid.
    """
    document = ConfigValue({}) if source is None else load(source)
    found = {} if document.is_null else document.fields(*READERS)
    values: dict[str, Any] = {name: READERS[name](setting) for name, setting in found.items() if not setting.is_null}
    if listen is not None:
        values["listen"] = listen
    lines = {
        f"{name}.{key}": each.line
        for name in NAMING_FIELDS
        if name in values
        for key, each in found[name].entries().items()
    }
    settings = EgressSettings(**values, file=document.file, lines=lines)
    check_open(settings, found.get("listen", document).line)
    return settings


def check_open(settings: EgressSettings, line: int | None = None) -> None:
    """Refuse an address that other machines can reach, if no caller needs a token."""
    if not settings.listen.loopback and not settings.callers and not settings.open:
        message = (
            f"{settings.listen} is reachable from other machines: set callers, or open: true if the network is trusted"
        )
        raise ConfigError(message, file=settings.file, line=line, field="listen")


def check_names(settings: EgressSettings, providers: Iterable[Provider]) -> None:
    """Refuse settings that name an unknown provider."""
    known = {provider.name for provider in providers}
    named = [(f"upstreams.{name}", name) for name in settings.upstreams]
    named += [(f"callers.{caller.name}", name) for caller in settings.callers for name in caller.providers or ()]
    for place, name in named:
        if name not in known:
            advice = did_you_mean(name, known) or f"expected one of {', '.join(sorted(known))}"
            message = f"there is no provider {name!r}: {advice}"
            raise ConfigError(message, file=settings.file, line=settings.lines.get(place), field=place)


# ---- callers ---------------------------------------------------------------------------------------------------------


def _read_callers(setting: ConfigValue) -> tuple[EgressCaller, ...]:
    callers: list[EgressCaller] = []
    known: dict[bytes, str] = {}
    for name, entry in setting.entries().items():
        if not CALLER_NAME.fullmatch(name) or name == LOCAL_CALLER:
            raise entry.error(f"expected a name of letters, digits, _ . @ and - other than {LOCAL_CALLER!r}")
        caller = _read_caller(name, entry)
        if caller.runs and any(each.runs for each in callers):
            raise entry.error("only one caller may have runs: true")
        for digest in caller.digests:
            if digest in known:
                raise entry.error(f"has the token of {known[digest]}: each caller needs a token of its own")
            known[digest] = name
        callers.append(caller)
    return tuple(callers)


def _read_caller(name: str, entry: ConfigValue) -> EgressCaller:
    parts = entry.fields(*CALLER_FIELDS)
    runs = "runs" in parts and parts["runs"].boolean()
    given = ("token" in parts) + ("token_file" in parts)
    if given > 1 or (not given and not runs):
        raise entry.error("needs either a token or a token_file")
    token_file = None
    tokens: tuple[str, ...] = ()
    if not given:
        pass  # its requests have tokens of runs
    elif "token" in parts:
        tokens = tuple(_read_caller_token(each) for each in parts["token"].one_or_many())
    else:
        tokens, token_file = (read_token_file(parts["token_file"]),), read_path(parts["token_file"])
    providers = parts["providers"].one_or_many() if "providers" in parts else None
    limits = parts["limits"].one_or_many() if "limits" in parts else ()
    caller = EgressCaller(
        name,
        tuple(map(digest_of, tokens)),
        None if providers is None else frozenset(each.string() for each in providers),
        tuple(_read_caller_limit(each) for each in limits),
        parts["max_priority"].integer(0, MAX_PRIORITY) if "max_priority" in parts else 0,
        parts["connections"].integer(1) if "connections" in parts else DEFAULT_CALLER_CONNECTIONS,
        token_file,
        frozenset(_read_tag(each) for each in parts["tags"].one_or_many()) if "tags" in parts else frozenset(),
        runs,
    )
    if caller.limits:
        with parts["limits"].locate_errors():
            _ = caller.policy  # raises if two limits have the same name
    return caller


def _read_tag(setting: ConfigValue) -> str:
    if not TAG_NAME.fullmatch(setting.string()):
        raise setting.error(f"expected at most 64 letters, digits and _ . : @ / + -, not {setting}")
    return setting.string()


def _read_caller_limit(setting: ConfigValue) -> Limit:
    """Read a limit of a caller; a unit that no call is charged in would limit nothing."""
    limit = read_limit(setting)
    if limit.unit not in CALLER_UNITS and not is_money(limit.unit):
        advice = did_you_mean(limit.unit, CALLER_UNITS) or f"use {', '.join(CALLER_UNITS)} or usd_micros"
        raise setting.error(f"calls are not charged in the unit {limit.unit!r}: {advice}")
    return limit


def _read_caller_token(setting: ConfigValue) -> str:
    """Read a token, which may be in a variable: `${NAME}`."""
    return read_token(expand_variables(setting, os.environ))


def _read_run_secrets(setting: ConfigValue) -> tuple[str, ...]:
    return tuple(_read_caller_token(each) for each in setting.one_or_many())


# ---- hosts -----------------------------------------------------------------------------------------------------------


def _read_upstreams(setting: ConfigValue) -> dict[str, Upstream]:
    return {name: _read_upstream(each) for name, each in setting.entries().items()}


def _read_upstream(setting: ConfigValue) -> Upstream:
    text = setting.string()
    try:
        parts = urlsplit(text)
        host, port = normal_host(parts.hostname or ""), parts.port
    except ValueError:
        host = port = None
    if host is None or parts.scheme not in HTTP_PORTS or parts.query or parts.fragment or "@" in parts.netloc:
        raise setting.error(f"expected a URL such as https://api.example.com or http://127.0.0.1:11434, not {setting}")
    return Upstream(parts.scheme, host, port or HTTP_PORTS[parts.scheme], parts.path.rstrip("/"))


def _read_private_hosts(setting: ConfigValue) -> frozenset[str]:
    found = set()
    for each in setting.one_or_many():
        host = normal_host(each.string().strip("[]"))
        if host is None:
            raise each.error(f"expected a host such as llm.internal or 127.0.0.1, not {each}")
        found.add(host)
    return frozenset(found)


def _read_tunnels(setting: ConfigValue) -> bool:
    return setting.choice("allow", "refuse") == "allow"


def _read_access_log(setting: ConfigValue) -> str:
    text = setting.string()
    return text if text == STANDARD_OUTPUT else str(read_path(setting))


def _read_size(setting: ConfigValue) -> int:
    return setting.integer(1024, 2**40)


READERS: Final[dict[str, Callable[[ConfigValue], Any]]] = {
    "listen": read_address,
    "store": ConfigValue.string,
    "bus": read_url,
    "providers": read_paths,
    "provider_dirs": read_paths,
    "permissions": read_permissions,
    "spending": read_spending,
    "callers": _read_callers,
    "run_secrets": _read_run_secrets,
    "open": ConfigValue.boolean,
    "metrics_token": _read_caller_token,
    "upstreams": _read_upstreams,
    "allow_private": _read_private_hosts,
    "tunnels": _read_tunnels,
    "timeout": read_seconds,
    "max_body": _read_size,
    "max_metered_body": _read_size,
    "max_held_bodies": _read_size,
    "max_header": _read_size,
    "max_connections": ConfigValue.integer,
    "connect_timeout": read_seconds,
    "first_byte_timeout": read_seconds,
    "whole_timeout": read_seconds,
    "stop_within": read_seconds,
    "access_log": _read_access_log,
    "telemetry": ConfigValue.boolean,
}
EGRESS_FIELDS: Final = tuple(READERS)
