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
`Settings` has the full list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._limiter.waiting import MAX_PRIORITY
from tidegate._policy.config_value import ConfigValue, load, parse
from tidegate._policy.declared_settings import (
    ADDRESS,
    BOOLEAN,
    BYTES,
    COMMON_GROUP,
    DURATION,
    INTEGER,
    PATH,
    PATHS,
    STORE_GROUP,
    STRING_SCHEMA,
    STRINGS_SCHEMA,
    URL,
    DeclaredSetting,
    Kind,
    choice,
    options_of,
    setting,
)
from tidegate._policy.setting_values import (
    PERMISSIONS,
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
    read_url_file,
)
from tidegate.errors import ConfigError
from tidegate.headers import STYLES
from tidegate.service._config.policy_file import read_domains, read_policies, read_policy
from tidegate.service._config.values import (
    DEFAULT_LISTEN,
    MAX_BODY_BYTES,
    MAX_FETCHERS,
    MAX_WORKERS,
    MIN_CONNECTIONS,
    READINESS,
    read_budget,
    read_bytes,
    read_connections,
    read_delay,
    read_fetchers,
    read_lease,
    read_metrics_token,
    read_name,
    read_namespace,
    read_priority,
    read_readiness,
    read_secrets,
    read_secrets_file,
    read_style,
    read_workers,
)
from tidegate.service._decisions.policies import ConfiguredPolicy, ServicePolicies
from tidegate.spending._settings import SPENDING_SCHEMA, read_spending
from tidegate.stores._registry import check_scheme

if TYPE_CHECKING:
    from tidegate.service._decisions.descriptors import DescriptorDomain
    from tidegate.spending._settings import SpendingSettings
    from tidegate.stores._lease import Lease

ENVIRONMENT_PREFIX: Final = "TIDEGATE_"
LIST_SEPARATOR: Final = ";"  # between several values in one variable
Flag = str | Sequence[str]  # the value of a command-line option: several strings if the setting is a list
DATA_FOLDER: Final = Path("tidegate-data")
LOCAL_HOSTS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to reach a service on all addresses
SECTIONS: Final = ("policies", "domains")
SOURCES_GROUP: Final = "sources and providers"
DASHBOARD_GROUP: Final = "shown on the dashboard"


class SettingOrigin(NamedTuple):
    """Where a setting was set: a line of a file, an environment variable or an option."""

    file: str | None
    line: int | None
    field: str


DEFAULT_STORE_ORIGIN: Final = SettingOrigin(None, None, "store")


@dataclass(frozen=True)
class Settings:
    """All settings of the service, read and checked. Each is declared here, and nowhere else: see `options`."""

    # fmt: off
    store: str = setting(
        "memory://", ConfigValue.string,
        "URL of the store; sources use a file in the data folder instead of memory://", URL, private=True,
        group=COMMON_GROUP, file="file with the URL of the store",
    )
    listen: ListenAddress = setting(
        DEFAULT_LISTEN, read_address, "address of the HTTP server", ADDRESS, group=COMMON_GROUP,
    )
    grpc: ListenAddress | None = setting(
        None, read_address, "address of the gRPC server for Envoy", ADDRESS, group=COMMON_GROUP,
        link="../howto/proxies.md",
    )
    resp: ListenAddress | None = setting(
        None, read_address, "address of the server for Redis clients", ADDRESS, group=COMMON_GROUP,
        link="resp.md",
    )
    egress: ListenAddress | None = setting(
        None, read_address, "address of the egress gateway, through which programs call the providers", ADDRESS,
        group=COMMON_GROUP, link="../howto/egress.md",
    )
    egress_config: Path | None = setting(
        None, read_path, "YAML file of the egress gateway: callers, upstreams, bounds", PATH, group="addresses",
    )
    resp_tls_cert: Path | None = setting(
        None, read_path, "file with the TLS certificate of the resp address", PATH, group="addresses",
    )
    resp_tls_key: Path | None = setting(
        None, read_path, "file with the private key of the certificate", PATH, group="addresses",
    )
    open: bool = setting(
        False,  # noqa: FBT003 - the default comes first
        ConfigValue.boolean, "accept clients on other machines without a token", BOOLEAN, group="addresses",
    )
    decision_token: str | None = setting(
        None, read_token, "token for decisions", secret=True, group="tokens",
        file=(read_token_file, "file with the token for decisions"),
    )
    admin_token: str | None = setting(
        None, read_token, "token for refund, reset and block, and for all that the token for decisions allows",
        secret=True, group="tokens", file=(read_token_file, "file with the admin token"),
    )
    metrics_token: str | None = setting(
        None, read_metrics_token, "token for /metrics; none: it needs no token", shown="the token for decisions",
        secret=True, group="tokens", file=(read_token_file, "file with the token for /metrics"),
    )
    reservation_secret: tuple[str, ...] = setting(
        (), read_secrets, "secret that signs reservation ids; a list: the first one signs, all of them verify",
        Kind(STRINGS_SCHEMA), shown="generated, kept in the store", secret=True, group="tokens",
        file=(read_secrets_file, "file with the secrets for reservation ids, one per line"),
    )
    lease: Lease | None = setting(
        None, read_lease,
        "take permits from the store in advance: true, false, or the duration of a lease such as 1s",
        Kind({"type": ["boolean", "string", "number"]}, "TIME"), shown="false", group=STORE_GROUP,
        link="../concepts/leases.md",
    )
    name: str = setting(
        "", read_name, "name of the service among those that share its store; its history is stored under this name",
        Kind(STRING_SCHEMA, "NAME"), shown="host name and port; for the history, the port",
    )
    workers: int = setting(
        1, read_workers, "number of processes", INTEGER.with_bounds(maximum=MAX_WORKERS), group=COMMON_GROUP,
    )
    headers: str = setting(
        "x", read_style, "header fields of /v1/check: x, ietf, both or none", choice(*STYLES, metavar="STYLE"),
    )
    max_wait: float = setting(30.0, read_seconds, "maximum time that a call may wait for a permit", DURATION)
    max_priority: int = setting(
        MAX_PRIORITY, read_priority, "highest priority that a call may have; the lowest is -N",
        INTEGER.with_bounds(minimum=0),
    )
    max_body: int = setting(
        2**20, read_bytes, "maximum size of a request, in bytes", BYTES.with_bounds(maximum=MAX_BODY_BYTES),
    )
    max_concurrency: int = setting(
        4096, ConfigValue.integer,
        "maximum number of concurrent requests per process; seven eighths of them may wait for a permit", INTEGER,
    )
    max_connections: int = setting(
        8192, read_connections,
        "maximum number of connections per process; fewer if the limit on open files is too low",
        INTEGER.with_bounds(minimum=MIN_CONNECTIONS),
    )
    read_timeout: float = setting(
        5.0, read_seconds, "time within which a client must send a complete request", DURATION,
    )
    idle_timeout: float = setting(
        75.0, read_seconds, "time after which an idle connection is closed", DURATION, shown="75s",
    )
    stop_within: float = setting(
        10.0, read_seconds, "time for active requests to finish when the service stops", DURATION,
    )
    drain_for: float = setting(
        1.0, read_delay, "time after SIGTERM to accept connections while /readyz responds with 503; may be 0",
        DURATION,
    )
    readiness: str = setting(
        "policies", read_readiness,
        "when /readyz responds with 503 during a store outage: if a policy denies calls (policies), always (store), "
        "or never (process)",
        choice(*READINESS), link="service.md#readiness",
    )
    reload_every: float = setting(1.0, read_seconds, "how often the file is checked for changes", DURATION)
    providers: tuple[Path, ...] = setting(
        (), read_paths, "YAML file of a provider", PATHS, many=True, group=COMMON_GROUP, link="../howto/outbound.md",
    )
    provider_dirs: tuple[Path, ...] = setting(
        (), read_paths, "folder of provider files", PATHS._replace(metavar="DIR"), many=True, group=SOURCES_GROUP,
    )
    profiles: tuple[Path, ...] = setting(
        (), read_paths, "YAML file or folder of profiles that provider files can name",
        PATHS._replace(metavar="PATH"), many=True, group=SOURCES_GROUP, link="../reference/outbound.md#profiles",
    )
    spending: SpendingSettings | None = setting(
        None, read_spending, "file in which the costs of providers with prices are recorded, or a mapping",
        Kind(SPENDING_SCHEMA, "FILE"), link="../howto/money.md#reports-and-warnings",
    )
    sources: tuple[Path, ...] = setting(
        (), read_paths, "YAML file of a source", PATHS, many=True, group=SOURCES_GROUP, link="../howto/sources.md",
    )
    source_dirs: tuple[Path, ...] = setting(
        (), read_paths, "folder of source files", PATHS._replace(metavar="DIR"), many=True, group=SOURCES_GROUP,
    )
    data: Path | None = setting(
        None, read_path, "data folder of the sources; sources run if --data, a source or a provider is set",
        PATH._replace(metavar="DIR"), shown=str(DATA_FOLDER), group=SOURCES_GROUP,
    )
    fetchers: int = setting(
        8, read_fetchers, "maximum number of concurrent fetches of sources",
        INTEGER.with_bounds(maximum=MAX_FETCHERS), group=SOURCES_GROUP,
    )
    source_interval: float = setting(
        3600.0, read_seconds, "time between fetches of sources without an interval or cron expression", DURATION,
        group=SOURCES_GROUP,
    )
    permissions: str = setting(
        "warn", read_permissions, "for provider files that other users can read: warn, refuse or ignore",
        choice(*PERMISSIONS), group=SOURCES_GROUP,
    )
    bus: str | None = setting(
        None, read_url, "URL of the bus on which sources share capacity reductions", URL, private=True,
        group=SOURCES_GROUP, link="bus.md", file=(read_url_file, "file with the URL of the bus"),
    )
    budget: bool | Path = setting(
        False,  # noqa: FBT003 - the default comes first
        read_budget, "task budget to show: a YAML file, or true to read the RATE_LIMIT_* variables",
        Kind({"type": ["boolean", "string"]}, "FILE"), group=DASHBOARD_GROUP, link="../howto/budgets.md",
    )
    swarm: str | None = setting(
        None, read_url, "URL of the bus of a swarm, whose agents the dashboard shows", URL, private=True,
        group=DASHBOARD_GROUP, link="../howto/swarm.md",
        file=(read_url_file, "file with the URL of the bus of the swarm"),
    )
    swarm_namespace: str = setting(
        "", read_namespace, "namespace of the agents that the dashboard shows", Kind(STRING_SCHEMA, "NAME"),
        shown="agents without a namespace", group=DASHBOARD_GROUP,
    )
    telemetry: bool = setting(
        False,  # noqa: FBT003 - the default comes first
        ConfigValue.boolean, "export metrics to OpenTelemetry", BOOLEAN,
    )
    # fmt: on
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


OPTIONS: Final = options_of(Settings)
OPTIONS_BY_NAME: Final = {option.name: option for option in OPTIONS}


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
    for name, given_value in chosen.items():
        target = name.removesuffix("_file")
        if name != target and target in chosen:
            raise given_value.error(f"cannot be combined with {target}: remove one of them")
        values[target] = OPTIONS_BY_NAME[name].read(given_value)
    entries, domains = _read_policies(in_file, policies, environment)
    settings = Settings(
        **values,
        policies=ServicePolicies(entries, domains),
        file=None if source is None or isinstance(source, Mapping) else Path(source),
        flags=flags,
        policy_flags=policies,
        secrets=tuple(read_path(chosen[name]) for name in chosen if OPTIONS_BY_NAME[name].in_file),
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
    values: Mapping[str, Flag], name_of: Callable[[DeclaredSetting], str], *, flags: bool
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
        plain = option.kind.schema in (STRING_SCHEMA, ADDRESS.schema) or option.secret
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
