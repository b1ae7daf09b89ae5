"""The settings of the service, from one YAML file, environment variables and command-line options.

    store: sqlite:///limits.db
    listen: 127.0.0.1:8080
    policies:
      api: 100/1m                                    # only limits, or a mapping:
      login:
        limits: [5/1m, 20/1h sliding_log]
        rollout: 25%                                 # enforced for a quarter of the keys, shadow for the others
        overrides: [{key: "partner:*", limits: 50/1m}]
    domains:                                         # as in a file of Envoy's rate limit service
      - domain: edge
        descriptors: [{key: remote_address, rate_limit: {unit: minute, requests_per_unit: 60}}]

An option overrides the environment variable (`TIDEGATE_` and the name in capitals), which overrides the file.
`options` has the full list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.errors import ConfigError
from tidegate.policy.config_value import ConfigValue, load, parse
from tidegate.policy.setting_values import ListenAddress, expand_variables, read_path
from tidegate.service.config.options import ADDRESS, OPTIONS, STRING, ServiceOption
from tidegate.service.config.policy_file import read_domains, read_policies, read_policy
from tidegate.service.config.values import DEFAULT_LISTEN
from tidegate.service.decisions.policies import ConfiguredPolicy, ServicePolicies
from tidegate.stores.registry import check_scheme
from tidegate.waiting import MAX_PRIORITY

if TYPE_CHECKING:
    from tidegate.service.decisions.descriptors import DescriptorDomain
    from tidegate.spending.settings import SpendingSettings
    from tidegate.stores.lease import Lease

ENVIRONMENT_PREFIX: Final = "TIDEGATE_"
LIST_SEPARATOR: Final = ";"  # between several values in one variable
Flag = str | Sequence[str]  # the value of a command-line option: several strings if the setting is a list
DATA_FOLDER: Final = Path("tidegate-data")
LOCAL_HOSTS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to reach a service on all addresses
OPTIONS_BY_NAME: Final = {option.name: option for option in OPTIONS}
SECTIONS: Final = ("policies", "domains")
SECRET_FILES: Final = ("_token_file", "_secret_file", "store_file", "bus_file", "swarm_file")


class SettingOrigin(NamedTuple):
    """Where a setting was set: a line of a file, an environment variable or an option."""

    file: str | None
    line: int | None
    field: str


DEFAULT_STORE_ORIGIN: Final = SettingOrigin(None, None, "store")


@dataclass(frozen=True)
class Settings:
    """All settings of the service, read and checked."""

    store: str = field(default="memory://", repr=False)
    listen: ListenAddress = DEFAULT_LISTEN
    grpc: ListenAddress | None = None
    resp: ListenAddress | None = None
    egress: ListenAddress | None = None
    egress_config: Path | None = None
    resp_tls_cert: Path | None = None
    resp_tls_key: Path | None = None
    open: bool = False
    decision_token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    metrics_token: str | None = field(default=None, repr=False)
    reservation_secret: tuple[str, ...] = field(default=(), repr=False)  # the first one signs, all verify
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
    drain_for: float = 1.0
    readiness: str = "policies"
    reload_every: float = 1.0
    providers: tuple[Path, ...] = ()
    provider_dirs: tuple[Path, ...] = ()
    profiles: tuple[Path, ...] = ()
    spending: SpendingSettings | None = None
    sources: tuple[Path, ...] = ()
    source_dirs: tuple[Path, ...] = ()
    data: Path | None = None
    fetchers: int = 8
    source_interval: float = 3600.0
    permissions: str = "warn"
    bus: str | None = field(default=None, repr=False)
    budget: bool | Path = False
    swarm: str | None = field(default=None, repr=False)
    swarm_namespace: str = ""
    applications: tuple[str, ...] = ()
    applications_token: str | None = field(default=None, repr=False)
    telemetry: bool = False
    demo: bool = False  # generate demonstration traffic; only set by `start --demo`
    policies: ServicePolicies = field(default_factory=ServicePolicies)
    file: Path | None = None
    flags: Mapping[str, Flag] = field(default_factory=dict, repr=False, compare=False)
    policy_flags: tuple[str, ...] = field(default=(), repr=False, compare=False)  # NAME=LIMITS
    secrets: tuple[Path, ...] = field(default=(), repr=False, compare=False)  # files that hold tokens or secrets
    store_origin: SettingOrigin = field(default=DEFAULT_STORE_ORIGIN, repr=False, compare=False)

    @property
    def runs_sources(self) -> bool:
        """Whether the service runs sources: a source, a provider or the data folder is configured."""
        named = (self.providers, self.provider_dirs, self.sources, self.source_dirs, self.data)
        return any(each for each in named)

    @property
    def has_providers(self) -> bool:
        """Whether the service grants permits of providers."""
        return bool(self.providers or self.provider_dirs)

    @property
    def data_folder(self) -> Path:
        """The folder in which sources keep their data."""
        return DATA_FOLDER if self.data is None else self.data

    @property
    def local_url(self) -> str:
        """The URL of the HTTP API for programs on this machine."""
        host = LOCAL_HOSTS.get(self.listen.host, self.listen.host)
        return f"http://{self.listen._replace(host=host)}"

    def restart_needed(self, other: Settings) -> tuple[str, ...]:
        """Return the names of the settings that differ and only take effect after a restart."""
        skipped = ("demo", "policies", "file", "flags", "policy_flags", "secrets", "store_origin")
        names = [each.name for each in fields(self) if each.name not in skipped]
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))


def load_settings(
    source: str | Path | Mapping[str, object] | None = None,
    *,
    flags: Mapping[str, Flag] | None = None,
    policies: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Read the settings from a file or mapping, `environment`, `flags` by name, and `policies` as NAME=LIMITS.

    Raises ConfigError, with file, line and field, if a setting is invalid.
    """
    environment = environment or {}
    flags = flags or {}
    document = ConfigValue({}) if source is None else load(source)
    in_file = {} if document.is_null else document.fields(*OPTIONS_BY_NAME, *SECTIONS)
    given = [name for name in OPTIONS_BY_NAME if name in in_file and not in_file[name].is_null]
    chosen = {name: expand_variables(in_file[name], environment) for name in given}
    chosen |= _read_strings(environment, lambda option: f"{ENVIRONMENT_PREFIX}{option.name.upper()}", flags=False)
    chosen |= _read_strings(flags, lambda option: option.name, flags=True)
    values: dict[str, Any] = {}
    for name, setting in chosen.items():
        target = name.removesuffix("_file")
        if name != target and target in chosen:
            raise setting.error(f"cannot be combined with {target}: remove one of them")
        values[target] = OPTIONS_BY_NAME[name].read(setting)
    entries, domains = _read_policies(in_file, policies, environment)
    settings = Settings(
        **values,
        policies=ServicePolicies(entries, domains),
        file=None if source is None or isinstance(source, Mapping) else Path(source),
        flags=flags,
        policy_flags=policies,
        secrets=tuple(read_path(chosen[name]) for name in chosen if name.endswith(SECRET_FILES)),
        store_origin=_find_origin(chosen.get("store", chosen.get("store_file"))),
    )
    _check_store(settings)
    _check(settings, {**{option.name: document for option in OPTIONS}, **chosen})
    return settings


def _read_policies(
    in_file: Mapping[str, ConfigValue], policies: tuple[str, ...], environment: Mapping[str, str]
) -> tuple[dict[str, ConfiguredPolicy], dict[str, DescriptorDomain]]:
    entries: dict[str, ConfiguredPolicy] = {}
    if "policies" in in_file and not in_file["policies"].is_null:
        entries = read_policies(in_file["policies"])
    in_environment = [
        text for text in environment.get(f"{ENVIRONMENT_PREFIX}POLICIES", "").split(LIST_SEPARATOR) if text.strip()
    ]
    entries |= _read_policy_texts(in_environment, f"{ENVIRONMENT_PREFIX}POLICIES")
    entries |= _read_policy_texts(policies, "--policy")
    domains: dict[str, DescriptorDomain] = {}
    if "domains" in in_file and not in_file["domains"].is_null:
        domains = read_domains(in_file["domains"])
    for domain in domains.values():
        for variant in domain.variants():
            if variant.policy.name in entries:  # they would share their counts
                message = f"the descriptor {variant.policy.name!r} has the name of a policy: rename the policy"
                raise in_file["domains"].error(message)
    return entries, domains


def _read_policy_texts(texts: Sequence[str], place: str) -> dict[str, ConfiguredPolicy]:
    """Read policies that are written as NAME=LIMITS; errors name the option or the variable."""
    found: dict[str, ConfiguredPolicy] = {}
    for text in texts:
        name, equals, limits = text.partition("=")
        name = name.strip()
        setting = ConfigValue(limits.strip(), field=place)
        if not equals:
            raise setting.error(f"expected NAME=LIMITS such as 'api=100/1m, 1000/1h', not {text!r}")
        if name in found:
            raise setting.error(f"the policy {name!r} is set twice: separate its limits with commas, or remove one")
        found[name] = read_policy(name, setting)
    return found


def _find_origin(store: ConfigValue | None) -> SettingOrigin:
    """Return where the store was set."""
    return DEFAULT_STORE_ORIGIN if store is None else SettingOrigin(store.file, store.line, store.field or "store")


def _read_strings(
    values: Mapping[str, Flag], name_of: Callable[[ServiceOption], str], *, flags: bool
) -> dict[str, ConfigValue]:
    """Read environment variables or command-line options; errors name the variable or option."""
    found = {}
    for option in OPTIONS:
        name = name_of(option)
        text = values.get(name)
        if not text:
            continue
        place = option.flag if flags else name
        if option.many:
            texts = text.split(LIST_SEPARATOR) if isinstance(text, str) else text
            found[option.name] = ConfigValue([each.strip() for each in texts if each.strip()], field=place)
            continue
        # A string stays a string, even if YAML would read it as another type. An IPv6 address is not valid YAML.
        plain = option.schema in (STRING, ADDRESS) or option.secret
        is_yaml = isinstance(text, str) and not plain
        found[option.name] = _parse_value(str(text), place) if is_yaml else ConfigValue(text, field=place)
    return found


def _parse_value(text: str, place: str) -> ConfigValue:
    """Parse the YAML of an environment variable or option; errors name it."""
    try:
        return replace(parse(text), file=None, line=None, field=place)
    except ConfigError as error:
        raise ConfigError(error.detail, field=place) from None


def _check_store(settings: Settings) -> None:
    """Refuse a store that cannot exist; only opening it tells the rest."""
    try:
        check_scheme(settings.store)
    except ConfigError as error:
        origin = settings.store_origin
        raise ConfigError(error.detail, file=origin.file, line=origin.line, field=origin.field) from None


def _check(settings: Settings, places: Mapping[str, ConfigValue]) -> None:
    """Refuse unsafe settings, and settings that do not work together."""
    for name in ("listen", "grpc", "resp"):
        address: ListenAddress | None = getattr(settings, name)
        if address is None or address.loopback or settings.open:
            continue
        if name != "grpc" and settings.decision_token is not None:
            continue
        trusted = "open: true if the network is trusted"
        advice = f"set decision_token, or {trusted}" if name != "grpc" else f"set {trusted} (Envoy sends no token)"
        message = f"{address} is reachable from other machines: {advice}"
        raise ConfigError(message, file=places[name].file, line=places[name].line, field=places[name].field or name)
    if (settings.resp_tls_cert is None) != (settings.resp_tls_key is None):
        name = "resp_tls_cert" if settings.resp_tls_key is None else "resp_tls_key"
        raise places[name].error("requires both files: set resp_tls_cert and resp_tls_key")
    if settings.spending is not None and not settings.has_providers:
        raise places["spending"].error("needs a provider, whose costs it records: set providers or provider_dirs")
    if settings.workers > 1 and settings.store.startswith("memory:"):
        place = places["workers"]
        message = f"{settings.workers} processes cannot share a store in memory: use a shared store such as sqlite:///limits.db"
        raise ConfigError(message, file=place.file, line=place.line, field=place.field or "workers")
    if settings.decision_token is not None and settings.decision_token == settings.admin_token:
        given = ("admin_token", "admin_token_file")
        place = next(places[name] for name in given if places[name].field)
        raise place.error("must differ from the decision token")
    if settings.metrics_token is not None and settings.metrics_token in (settings.decision_token, settings.admin_token):
        given = ("metrics_token", "metrics_token_file")
        place = next(places[name] for name in given if places[name].field)
        raise place.error("must differ from the other tokens")
    tokens = {settings.decision_token, settings.admin_token, settings.metrics_token}
    if tokens.intersection(settings.reservation_secret):
        given = ("reservation_secret", "reservation_secret_file")
        place = next(places[name] for name in given if places[name].field)
        raise place.error("must differ from the tokens: clients know the tokens, and could sign ids with them")


__all__ = ["DATA_FOLDER", "OPTIONS", "SECTIONS", "ListenAddress", "Settings", "load_settings"]
