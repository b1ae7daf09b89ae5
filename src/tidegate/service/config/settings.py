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

What a flag says goes before the environment (`TIDEGATE_` and the name in capitals), and that before the file.
`options` has the whole list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import ConfigError
from tidegate.policy.config_value import ConfigValue, load, parse
from tidegate.service.config.options import OPTIONS, STRING, ServiceOption
from tidegate.service.config.policy_file import read_domains, read_entries, read_entry
from tidegate.service.config.values import DEFAULT_LISTEN, ListenAddress, read_path
from tidegate.service.decisions.policies import ConfiguredPolicy, ServicePolicies
from tidegate.waiting import MAX_PRIORITY

if TYPE_CHECKING:
    from tidegate.service.decisions.descriptors import DescriptorDomain
    from tidegate.stores.lease import Lease

ENVIRONMENT_PREFIX: Final = "TIDEGATE_"
LIST_SEPARATOR: Final = ";"  # between several values in one variable
Flag = str | Sequence[str]  # what a command line says of a setting: several texts of one that is a list
DATA_FOLDER: Final = Path("tidegate-data")
OPTIONS_BY_NAME: Final = {option.name: option for option in OPTIONS}
SECTIONS: Final = ("policies", "domains")
SECRET_FILES: Final = ("_token_file", "_secret_file")


@dataclass(frozen=True)
class Settings:
    """All settings of the service, read and checked."""

    store: str = field(default="memory://", repr=False)
    listen: ListenAddress = DEFAULT_LISTEN
    grpc: ListenAddress | None = None
    open: bool = False
    decision_token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    reservation_secret: tuple[str, ...] = field(default=(), repr=False)  # the first signs, all verify
    lease: Lease | None = None
    workers: int = 1
    headers: str = "x"
    max_wait: float = 30.0
    max_priority: int = MAX_PRIORITY
    max_body: int = 2**20
    max_concurrency: int = 4096
    max_connections: int = 8192
    read_timeout: float = 5.0
    idle_timeout: float = 75.0
    stop_within: float = 10.0
    reload_every: float = 1.0
    providers: tuple[Path, ...] = ()
    provider_dirs: tuple[Path, ...] = ()
    sources: tuple[Path, ...] = ()
    source_dirs: tuple[Path, ...] = ()
    data: Path | None = None
    fetchers: int = 8
    permissions: str = "warn"
    bus: str | None = field(default=None, repr=False)
    budget: bool | Path = False
    swarm: str | None = field(default=None, repr=False)
    telemetry: bool = False
    demo: bool = False  # make demonstration traffic; only by the command `start --demo`
    rules: ServicePolicies = field(default_factory=ServicePolicies)
    file: Path | None = None
    flags: Mapping[str, Flag] = field(default_factory=dict, repr=False, compare=False)
    policies: tuple[str, ...] = field(default=(), repr=False, compare=False)
    secrets: tuple[Path, ...] = field(default=(), repr=False, compare=False)  # files that hold tokens or secrets

    @property
    def fetches(self) -> bool:
        """Whether sources are run: one of them, a provider or their folder is named."""
        named = (self.providers, self.provider_dirs, self.sources, self.source_dirs, self.data)
        return any(each for each in named)

    @property
    def folder(self) -> Path:
        """Where sources keep what they need."""
        return DATA_FOLDER if self.data is None else self.data

    def restart_needed(self, other: Settings) -> tuple[str, ...]:
        """Name the settings that differ and are only read at the start."""
        kept = ("demo", "rules", "file", "flags", "policies", "secrets")
        names = [each.name for each in fields(self) if each.name not in kept]
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))


def load_settings(
    source: str | Path | Mapping[str, object] | None = None,
    *,
    flags: Mapping[str, Flag] | None = None,
    policies: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Read the settings: of a file or mapping, of `environment`, of `flags` by name, and `policies` as NAME=LIMITS."""
    environment = environment or {}
    flags = flags or {}
    whole = ConfigValue({}) if source is None else load(source)
    written = {} if whole.is_nothing else whole.fields(*OPTIONS_BY_NAME, *SECTIONS)
    chosen = {name: written[name] for name in OPTIONS_BY_NAME if name in written and not written[name].is_nothing}
    chosen |= _given(environment, lambda option: f"{ENVIRONMENT_PREFIX}{option.name.upper()}", ())
    chosen |= _given(flags, lambda option: option.name, ("--",))
    values: dict[str, Any] = {}
    for name, setting in chosen.items():
        target = name.removesuffix("_file")
        value = OPTIONS_BY_NAME[name].read(setting)
        if name != target and target in chosen:
            raise setting.error(f"stands beside {target}: leave one of them out")
        values[target] = value
    entries, domains = _rules(written, policies, environment)
    settings = Settings(
        **values,
        rules=ServicePolicies(entries, domains),
        file=None if source is None or isinstance(source, Mapping) else Path(source),
        flags=flags,
        policies=policies,
        secrets=tuple(read_path(chosen[name]) for name in chosen if name.endswith(SECRET_FILES)),
    )
    _check(settings, {**{option.name: whole for option in OPTIONS}, **chosen})
    return settings


def _rules(
    written: Mapping[str, ConfigValue], policies: tuple[str, ...], environment: Mapping[str, str]
) -> tuple[dict[str, ConfiguredPolicy], dict[str, DescriptorDomain]]:
    entries: dict[str, ConfiguredPolicy] = {}
    if "policies" in written and not written["policies"].is_nothing:
        entries = read_entries(written["policies"])
    several = [
        text for text in environment.get(f"{ENVIRONMENT_PREFIX}POLICIES", "").split(LIST_SEPARATOR) if text.strip()
    ]
    for place, text in (
        *((f"{ENVIRONMENT_PREFIX}POLICIES", text) for text in several),
        *(("--policy", text) for text in policies),
    ):
        name, equals, limits = text.partition("=")
        setting = ConfigValue(limits.strip(), field=place)
        if not equals:
            raise setting.error(f"expected NAME=LIMITS such as 'api=100/1m, 1000/1h', not {text}")
        entries[name.strip()] = read_entry(name.strip(), setting)
    domains: dict[str, DescriptorDomain] = {}
    if "domains" in written and not written["domains"].is_nothing:
        domains = read_domains(written["domains"])
    for domain in domains.values():
        for variant in domain.variants():
            if variant.policy.name in entries:  # they would be counted together
                raise written["domains"].error(f"the descriptor {variant.policy.name!r} has the name of a policy")
    return entries, domains


def _given(
    values: Mapping[str, Flag], name_of: Callable[[ServiceOption], str], prefix: tuple[str, ...]
) -> dict[str, ConfigValue]:
    """Read what the environment or flags say, with their names as the place."""
    found = {}
    for option in OPTIONS:
        name = name_of(option)
        text = values.get(name)
        if not text:
            continue
        place = option.flag if prefix else name
        if option.many:
            texts = text.split(LIST_SEPARATOR) if isinstance(text, str) else text
            found[option.name] = ConfigValue([each.strip() for each in texts if each.strip()], field=place)
            continue
        # A text is a text, even if YAML would take it for something else.
        plain = option.schema is STRING or option.secret
        setting = ConfigValue(text) if plain or not isinstance(text, str) else parse(text)
        found[option.name] = replace(setting, file=None, line=None, field=place)
    return found


def _check(settings: Settings, places: Mapping[str, ConfigValue]) -> None:
    """Refuse what is unsafe or cannot work together."""
    for name in ("listen", "grpc"):
        address: ListenAddress | None = getattr(settings, name)
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
    tokens = {settings.decision_token, settings.admin_token}
    if tokens.intersection(settings.reservation_secret):
        given = ("reservation_secret", "reservation_secret_file")
        place = next(places[name] for name in given if places[name].field)
        raise place.error("is a token too: clients know that, and could sign ids")


__all__ = ["DATA_FOLDER", "OPTIONS", "SECTIONS", "ListenAddress", "Settings", "load_settings"]
