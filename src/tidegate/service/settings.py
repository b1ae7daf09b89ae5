"""The settings of the service: one YAML file, and every setting also by flag and environment.

    store: sqlite:///limits.db
    listen: 127.0.0.1:8080
    policies:
      api: 100/1m                                    # just limits, or all that can be said:
      login:
        limits: [5/1m, 20/1h sliding_log]
        rollout: 25%                                 # enforced for a quarter of the keys, shadow for the others
        overrides: [{key: "partner:*", limits: 50/1m}]
    domains:                                         # as Envoy's rate limit service has them
      - domain: edge
        descriptors: [{key: remote_address, rate_limit: {unit: minute, requests_per_unit: 60}}]

What a flag says goes before the environment (`TIDEGATE_` and the name in capitals), and that before the file. OPTIONS
is the whole list; the flags, the variables, the schema for editors and the documentation are made from it or checked
against it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.core.limit import parse_period
from tidegate.errors import ConfigError
from tidegate.headers import STYLES
from tidegate.policy.settings import Setting, load, parse
from tidegate.service.reading import read_domains, read_entries, read_entry
from tidegate.service.rulebook import Entry, Rulebook
from tidegate.stores.lease import Lease

if TYPE_CHECKING:
    from tidegate.service.domains import Domain

PREFIX: Final = "TIDEGATE_"
PORTS: Final = 65_535
LONGEST_BODY: Final = 2**30
MOST_WORKERS: Final = 256
SHORTEST_TOKEN: Final = 16
LOCAL_NAMES: Final = ("localhost",)


class Address(NamedTuple):
    """Where to listen."""

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
        """Write it as people do."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


DEFAULT: Final = Address("127.0.0.1", 8080)

# ---- how single values are read --------------------------------------------------------------------------------------


def _address(setting: Setting) -> Address:
    text = setting.text() if not isinstance(setting.raw, int) else str(setting.raw)
    host, colon, port = text.rpartition(":")
    if not port.isdecimal() or len(port) > len(str(PORTS)) or int(port) > PORTS or (colon and not host):
        raise setting.error(f"expected an address such as 127.0.0.1:8080, not {setting}")
    host = host or "127.0.0.1"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise setting.error(f"an IPv6 address stands in brackets, as in [::1]:8080, not {setting}")
    return Address(host.strip("[]"), int(port))


def _seconds(setting: Setting) -> float:
    try:
        return setting.number()
    except ConfigError:
        text = setting.text()
    try:
        return parse_period(text) / SECOND
    except ConfigError:
        raise setting.error(f"expected a time such as 30s or 250ms, not {setting}") from None


def _lease(setting: Setting) -> Lease | None:
    try:
        return Lease() if setting.flag() else None
    except ConfigError:
        pass
    seconds = _seconds(setting)
    with setting.blame(**{"lease.seconds": setting}):
        return Lease(seconds)


def _token(setting: Setting) -> str:
    token = setting.text().strip()
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        # The value itself is not repeated: messages end in logs.
        raise setting.error(f"a token has at least {SHORTEST_TOKEN} printable ASCII characters and no spaces")
    return token


def _token_file(setting: Setting) -> str:
    path = Path(setting.text())
    if setting.file is not None and not path.is_absolute():
        path = Path(setting.file).parent / path  # beside the file that names it
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise setting.error(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return _token(Setting(text, setting.file, setting.line, setting.field))


def _style(setting: Setting) -> str:
    return setting.choice(*STYLES)


def _workers(setting: Setting) -> int:
    return setting.whole(1, MOST_WORKERS)


def _bytes(setting: Setting) -> int:
    return setting.whole(1024, LONGEST_BODY)


class Option(NamedTuple):
    """One setting that is a single value. `schema` is what an editor is told of it."""

    name: str
    read: Callable[[Setting], Any]
    help: str
    schema: Mapping[str, object]
    metavar: str = "TEXT"
    secret: bool = False  # not by flag: the command line of a process is public


TEXT: Final = {"type": "string", "minLength": 1}
TIME: Final = {"type": ["string", "number"]}
FLAG: Final = {"type": "boolean"}
WHOLE: Final = {"type": "integer", "minimum": 1}
OPTIONS: Final = (
    Option("store", Setting.text, "where states are kept, by URL (memory://)", TEXT, "URL"),
    Option(
        "listen", _address, "address of the HTTP service (127.0.0.1:8080)", {"type": ["string", "integer"]}, "ADDRESS"
    ),
    Option("grpc", _address, "address of the service for Envoy (none)", {"type": ["string", "integer"]}, "ADDRESS"),
    Option("open", Setting.flag, "listen beyond this machine without a token (false)", FLAG, "FLAG"),
    Option("decision_token", _token, "token that decisions need", TEXT, secret=True),
    Option("decision_token_file", _token_file, "file that holds that token", TEXT, "FILE"),
    Option("admin_token", _token, "token that resets and the like need", TEXT, secret=True),
    Option("admin_token_file", _token_file, "file that holds that token", TEXT, "FILE"),
    Option(
        "lease", _lease, "take permits ahead, for so long (false)", {"type": ["boolean", "string", "number"]}, "TIME"
    ),
    Option("workers", _workers, "processes that serve (1)", {**WHOLE, "maximum": MOST_WORKERS}, "N"),
    Option("headers", _style, "header fields of /v1/check: x, ietf, both or none (x)", {"enum": list(STYLES)}, "STYLE"),
    Option("max_wait", _seconds, "longest that a call may wait for a permit (30s)", TIME, "TIME"),
    Option("max_body", _bytes, "largest request, in bytes (1048576)", {**WHOLE, "maximum": LONGEST_BODY}, "BYTES"),
    Option("max_concurrency", Setting.whole, "requests under way at most, in each process (4096)", WHOLE, "N"),
    Option("read_timeout", _seconds, "longest that reading a request may take (5s)", TIME, "TIME"),
    Option("stop_within", _seconds, "how long requests under way may take when stopping (10s)", TIME, "TIME"),
    Option("reload_every", _seconds, "how often the file is looked at (1s)", TIME, "TIME"),
)
BY_NAME: Final = {option.name: option for option in OPTIONS}
SECTIONS: Final = ("policies", "domains")


@dataclass(frozen=True)
class Settings:
    """All settings of the service, read and checked."""

    store: str = "memory://"
    listen: Address = DEFAULT
    grpc: Address | None = None
    open: bool = False
    decision_token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    lease: Lease | None = None
    workers: int = 1
    headers: str = "x"
    max_wait: float = 30.0
    max_body: int = 2**20
    max_concurrency: int = 4096
    read_timeout: float = 5.0
    stop_within: float = 10.0
    reload_every: float = 1.0
    rules: Rulebook = field(default_factory=Rulebook)
    file: Path | None = None
    flags: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    policies: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def restart_needed(self, other: Settings) -> tuple[str, ...]:
        """Name the settings that differ and are only read at the start."""
        kept = ("rules", "file", "flags", "policies")
        names = [each.name for each in fields(self) if each.name not in kept]
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))


def load_settings(
    source: str | Path | Mapping[str, object] | None = None,
    *,
    flags: Mapping[str, str] | None = None,
    policies: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Read the settings: of a file or mapping, of `environment`, of `flags` by name, and `policies` as NAME=LIMITS."""
    environment = environment or {}
    flags = flags or {}
    whole = Setting({}) if source is None else load(source)
    written = {} if whole.is_nothing else whole.fields(*BY_NAME, *SECTIONS)
    chosen = {name: written[name] for name in BY_NAME if name in written and not written[name].is_nothing}
    chosen |= _given(environment, lambda option: f"{PREFIX}{option.name.upper()}", ())
    chosen |= _given(flags, lambda option: option.name, ("--",))
    values: dict[str, Any] = {}
    for name, setting in chosen.items():
        target = name.removesuffix("_file")
        value = BY_NAME[name].read(setting)
        if name != target and target in chosen:
            raise setting.error(f"stands beside {target}: leave one of them out")
        values[target] = value
    entries, domains = _rules(written, policies, environment)
    settings = Settings(
        **values,
        rules=Rulebook(entries, domains),
        file=None if source is None or isinstance(source, Mapping) else Path(source),
        flags=flags,
        policies=policies,
    )
    _check(settings, {**{option.name: whole for option in OPTIONS}, **chosen})
    return settings


def _rules(
    written: Mapping[str, Setting], policies: tuple[str, ...], environment: Mapping[str, str]
) -> tuple[dict[str, Entry], dict[str, Domain]]:
    entries: dict[str, Entry] = {}
    if "policies" in written and not written["policies"].is_nothing:
        entries = read_entries(written["policies"])
    several = [text for text in environment.get(f"{PREFIX}POLICIES", "").split(";") if text.strip()]
    for place, text in (*((f"{PREFIX}POLICIES", text) for text in several), *(("--policy", text) for text in policies)):
        name, equals, limits = text.partition("=")
        setting = Setting(limits.strip(), field=place)
        if not equals:
            raise setting.error(f"expected NAME=LIMITS such as 'api=100/1m, 1000/1h', not {text}")
        entries[name.strip()] = read_entry(name.strip(), setting)
    domains: dict[str, Domain] = {}
    if "domains" in written and not written["domains"].is_nothing:
        domains = read_domains(written["domains"])
    for domain in domains.values():
        for variant in domain.variants():
            if variant.policy.name in entries:  # they would be counted together
                raise written["domains"].error(f"the descriptor {variant.policy.name!r} has the name of a policy")
    return entries, domains


def _given(values: Mapping[str, str], name_of: Callable[[Option], str], prefix: tuple[str, ...]) -> dict[str, Setting]:
    """Read what the environment or flags say, with their names as the place."""
    found = {}
    for option in OPTIONS:
        name = name_of(option)
        text = values.get(name)
        if not text:
            continue
        place = f"{prefix[0]}{name.replace('_', '-')}" if prefix else name
        plain = option.read is Setting.text or "token" in option.name
        setting = Setting(text) if plain else parse(text)
        found[option.name] = replace(setting, file=None, line=None, field=place)
    return found


def _check(settings: Settings, places: Mapping[str, Setting]) -> None:
    """Refuse what is unsafe or cannot work together."""
    for name in ("listen", "grpc"):
        address: Address | None = getattr(settings, name)
        if address is None or address.loopback or settings.open:
            continue
        if name == "listen" and settings.decision_token is not None:
            continue
        wish = "a decision_token, or open: true" if name == "listen" else "open: true (Envoy sends no token)"
        message = f"{address} is reachable from other machines, which needs {wish}, for a trusted network"
        raise ConfigError(message, file=places[name].file, line=places[name].line, field=places[name].field or name)
    if settings.workers > 1 and settings.store.startswith("memory:"):
        place = places["workers"]
        message = f"{settings.workers} processes share no memory: use a store such as sqlite:///limits.db"
        raise ConfigError(message, file=place.file, line=place.line, field=place.field or "workers")
    if settings.decision_token is not None and settings.decision_token == settings.admin_token:
        given = ("admin_token", "admin_token_file")
        place = next(places[name] for name in given if places[name].field)
        raise place.error("is the decision token too: they have to differ")
