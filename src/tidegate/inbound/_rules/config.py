"""Reads Rules from `config.yaml`: the format of the API limiting spec, with extensions.

    rate_limiting:
      enabled: true
      categories:
        expensive: {limit: 5, window_minutes: 60}      # the spec's form; omitted settings have the spec's defaults
        uploads:                                       # a custom category
          limits: [10/1m, 100/1d]                      # several; all must allow the request
          endpoints: [/upload/*, {path: /import, methods: [POST], cost: 5}]
          mode: shadow
      cleanup_interval_minutes: 5
      max_entries: 10000

The file may have other sections, for the application: only `rate_limiting` is read. Every mistake raises ConfigError
with file, line and field. SECTION_FIELDS, CATEGORY_FIELDS, LIMIT_FIELDS and ENDPOINT_FIELDS list all settings.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar, cast, get_args

from tidegate._policy import Cost, Policy
from tidegate._policy.config_value import ConfigValue, load
from tidegate._policy.model import Mode, OnStoreError
from tidegate._runtime.suggestions import closest, hint
from tidegate.core import Limit
from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._limit import default_algorithm
from tidegate.errors import ConfigError
from tidegate.inbound._client.address import AddressSet
from tidegate.inbound._rules.block_rule import read_block
from tidegate.inbound._rules.charging import Charging, statuses_of
from tidegate.inbound._rules.closed_limit import close, is_closed, parse_inbound_limit
from tidegate.inbound._rules.extra_limits import make_category, with_default_algorithm
from tidegate.inbound._rules.model import (
    ADMIN_PATH,
    APPLICATION_LIMITS,
    DEFAULT_LIMITS,
    RESET_TIMES,
    Category,
    Endpoint,
    ResetTime,
    Rules,
)
from tidegate.inbound._rules.paths import PathTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

T = TypeVar("T")
D = TypeVar("D")
Fields = dict[str, ConfigValue]

LIMIT_FIELDS: Final = (
    "limit",
    "window_minutes",
    "window",
    "algorithm",
    "unit",
    "burst",
    "timezone",
    "reset_day",
    "reset_hour",
)
ENDPOINT_FIELDS: Final = ("path", "methods", "cost")
INHERITED_FIELDS: Final = (
    "algorithm",
    "mode",
    "on_store_error",
)  # the section sets defaults for the categories
CATEGORY_FIELDS: Final = (
    *LIMIT_FIELDS,
    "limits",
    "endpoints",
    "methods",
    "cost",
    "mode",
    "on_store_error",
    "count",
    "refund",
    "penalty",
    "plans",
)
SECTION_FIELDS: Final = (
    "enabled",
    "categories",
    "unmatched",
    "defaults",
    "exempt",
    "exempt_methods",
    "exempt_clients",
    "blocked_clients",
    *INHERITED_FIELDS,
    "cleanup_interval_minutes",
    "max_entries",
    "ipv4_prefix",
    "ipv6_prefix",
    "block_after",
    "block_for",
    "reset_time",
    APPLICATION_LIMITS,
    DEFAULT_LIMITS,
)

# The spec's categories: limit, minutes, endpoints.
DEFAULT_CATEGORIES: Final[dict[str, tuple[int, int, tuple[str, ...]]]] = {
    "expensive": (5, 60, ("/api/cluster", "/api/recluster")),
    "moderately": (10, 60, ("/api/refresh", "/api/clear-cache")),
    "read": (
        60,
        1,
        ("/api/feeds", "/api/clusters", "/api/timeline", "/api/timeline/*", "/api/status", "/api/feed/*"),
    ),
    "very_expensive": (3, 60, ("/api/cleanup-orphaned",)),
}
DEFAULT_WINDOW_MINUTES: Final = 60  # of a category without a window
DEFAULT_UNMATCHED: Final = "read"  # the category of requests that no endpoint matches
EMPTY_CONFIG: Final[Mapping[str, object]] = {}


def load_rules(config: str | Path | Mapping[str, object] | None = None, *, may_be_empty: bool = True) -> Rules:
    """Read the rules from a file or mapping. None, or no section `rate_limiting`, means the spec's defaults."""
    whole = load(EMPTY_CONFIG if config is None else config)
    if whole.is_null and not may_be_empty:
        raise whole.error("is empty: expected rate_limiting, with its settings")
    return _Reader(_section(whole)).rules()


def _section(whole: ConfigValue) -> ConfigValue:
    """Find the section; a mapping that has only its settings is the section itself."""
    entries = {} if whole.is_null else whole.entries()
    if "rate_limiting" in entries:
        section = entries["rate_limiting"]
        return section if not section.is_null else ConfigValue(EMPTY_CONFIG, section.file, section.line, section.field)
    if entries and all(name in SECTION_FIELDS for name in entries):
        return whole
    for name, entry in entries.items():
        if closest(name.lower().replace("-", "_"), ["rate_limiting"], cutoff=0.75):
            raise entry.error("unknown setting: did you mean 'rate_limiting'?")
    return ConfigValue(EMPTY_CONFIG, whole.file, whole.line)


class _Reader:
    """Reads one section: first its own categories, then the default ones, for the remaining endpoints."""

    def __init__(self, section: ConfigValue) -> None:
        self.section = section
        self.fields = section.fields(*SECTION_FIELDS)
        self.written: PathTree[tuple[str, int | None]] = PathTree()  # the owner and line of each endpoint
        self.defaults = self._defaults()
        unmatched = self.fields.get("unmatched")
        self.unmatched = DEFAULT_UNMATCHED if unmatched is None or unmatched.is_null else unmatched.string()

    def _defaults(self) -> dict[str, tuple[int, int, tuple[str, ...]]]:
        """Return the default categories that apply.

        All of them, if the section has no limits of its own: no categories, or, as in the spec, only the limits of
        default ones. Otherwise those that it names without endpoints. `defaults` states it explicitly.
        """
        if "defaults" in self.fields:
            return dict(DEFAULT_CATEGORIES) if self.fields["defaults"].boolean() else {}
        written: dict[str, ConfigValue] = _get(self.fields, "categories", ConfigValue.entries, default={})
        changed = [name for name, section in written.items() if _changes_default(name, section)]
        if not written and (APPLICATION_LIMITS in self.fields or DEFAULT_LIMITS in self.fields):
            return {}
        if len(changed) == len(written):
            return dict(DEFAULT_CATEGORIES)
        return {name: DEFAULT_CATEGORIES[name] for name in changed}

    def rules(self) -> Rules:
        """Read the whole section."""
        fields = self.fields
        exempt = [self._endpoint(entry) for entry in _get(fields, "exempt", ConfigValue.one_or_many, default=[])]
        written: dict[str, ConfigValue] = _get(fields, "categories", ConfigValue.entries, default={})
        categories = {name: self._category(name, section) for name, section in written.items()}
        if self.written.add(ADMIN_PATH, (), ("exempt", None)) is None:
            exempt.append(Endpoint(ADMIN_PATH))
        for name, (_, _, paths) in self.defaults.items():
            if name not in written or "endpoints" not in written[name].entries():
                category = categories.get(name) or self._category(name, ConfigValue(EMPTY_CONFIG, self.section.file))
                categories[name] = replace(category, endpoints=self._default_endpoints(name, category, paths))
        with self.section.locate_errors(**fields):
            block = read_block(
                _get(fields, "block_after", _block_after, default=None),
                _get(fields, "block_for", ConfigValue.string, default=None),
            )
        return Rules(
            categories=tuple(categories.values()),
            unmatched=self._unmatched(categories),
            exempt=tuple(exempt),
            exempt_methods=frozenset(_get(fields, "exempt_methods", _methods, default=())),
            exempt_clients=_get(fields, "exempt_clients", _clients, default=AddressSet()),
            blocked_clients=_get(fields, "blocked_clients", _clients, default=AddressSet()),
            enabled=_get(fields, "enabled", ConfigValue.boolean, default=True),
            cleanup_interval=60 * _get(fields, "cleanup_interval_minutes", ConfigValue.number, default=5),
            max_entries=_get(fields, "max_entries", ConfigValue.integer, default=10_000),
            ipv4_prefix=fields["ipv4_prefix"].integer(high=32) if "ipv4_prefix" in fields else 32,
            ipv6_prefix=fields["ipv6_prefix"].integer(high=128) if "ipv6_prefix" in fields else 64,
            block=block,
            reset_time=_get(fields, "reset_time", _reset_time, default="full"),
            application_limits=self._extra(APPLICATION_LIMITS),
            default_limits=self._extra(DEFAULT_LIMITS),
            defaulted=tuple(name for name in self.defaults if name not in written),
        )

    def _default_endpoints(self, name: str, category: Category, paths: Iterable[str]) -> tuple[Endpoint, ...]:
        """Return the default endpoints of a category that the file does not assign to another one."""
        free = [path for path in paths if self.written.add(path, (), (name, None)) is None]
        return tuple(Endpoint(path, (), category.cost) for path in free)

    def _unmatched(self, categories: dict[str, Category]) -> Category | None:
        """Find the category of requests that no endpoint matches: `read` by default; null means none."""
        setting = self.fields.get("unmatched")
        if setting is None:
            return categories.get(self.unmatched)
        return None if setting.is_null else categories[setting.choice(*categories)]

    def _extra(self, name: str) -> Category | None:
        """Read limits that apply besides the categories: a string, or a list."""
        if name not in self.fields:
            return None
        section = self.fields[name]
        algorithm = self._choice({}, "algorithm", ALGORITHMS, "sliding_log")
        limits = tuple(
            _limit_of_list(entry, algorithm, name.removesuffix("_limits")) for entry in section.one_or_many()
        )
        with section.locate_errors():
            return make_category(name, limits)

    # ---- a category --------------------------------------------------------------------------------------------------

    def _category(self, name: str, section: ConfigValue) -> Category:
        fields = section.fields(*CATEGORY_FIELDS)
        limits = self._limits(name, section, fields)
        mode = cast("Mode", self._choice(fields, "mode", get_args(Mode), "enforce"))
        on_error = cast("OnStoreError", self._choice(fields, "on_store_error", get_args(OnStoreError), "local"))
        with section.locate_errors(**fields):
            policy = _policy(name, limits, mode, on_error)
        cost = _get(fields, "cost", _cost, default=1)
        _check_cost(policy, cost, fields.get("cost", section))
        plans = self._plans(name, policy, fields)
        category = Category(name, policy, (), cost, _charging(fields, cost), plans)
        methods = _get(fields, "methods", _methods, default=())
        if "endpoints" not in fields:
            self._check_endpoints_missing(name, section, fields)
            return category
        entries = fields["endpoints"].one_or_many()
        return replace(
            category, endpoints=tuple(self._endpoint(entry, name, policy, methods, cost) for entry in entries)
        )

    def _plans(self, name: str, policy: Policy, fields: Fields) -> dict[str, Policy]:
        """Read the limits of each plan: a string, a list, or a mapping with the settings of a limit."""
        algorithm = self._choice(fields, "algorithm", ALGORITHMS, "sliding_log")
        plans = {}
        for plan, value in _get(fields, "plans", ConfigValue.entries, default={}).items():
            if value.is_mapping:
                limits = self._limits(name, value, value.fields(*LIMIT_FIELDS, "limits"), algorithm)
            else:
                limits = tuple(_limit_of_list(entry, algorithm, name) for entry in value.one_or_many())
            if len(limits) == len(policy.limits) == 1:  # a client that changes its plan keeps its usage
                limits = (replace(limits[0], name=policy.limits[0].name),)
            on_error = cast("OnStoreError", self._choice(fields, "on_store_error", get_args(OnStoreError), "local"))
            with value.locate_errors():
                plans[plan] = _policy(name, limits, policy.mode, on_error)
            _check_cost(plans[plan], _get(fields, "cost", _cost, default=1), value)
        return plans

    def _check_endpoints_missing(self, name: str, section: ConfigValue, fields: Fields) -> None:
        """Raise if no request could match the category: it has no endpoints, not even by default."""
        if "methods" in fields:
            raise fields["methods"].error("requires endpoints, a list of paths such as [/login, /api/*]")
        if name in self.defaults or name == self.unmatched:
            return
        near = hint(name, DEFAULT_CATEGORIES)
        raise section.error(f"needs endpoints, a list of paths such as [/login, /api/*]{near}")

    def _choice(self, fields: Fields, name: str, choices: Iterable[str], default: str) -> str:
        """Read a setting of the category, or of the section."""
        setting = fields.get(name) or self.fields.get(name)
        return setting.choice(*choices) if setting else default

    def _limits(
        self, name: str, section: ConfigValue, fields: Fields, algorithm: str = "sliding_log"
    ) -> tuple[Limit, ...]:
        algorithm = self._choice(fields, "algorithm", ALGORITHMS, algorithm)
        if "limits" not in fields:
            quota, minutes, _ = self.defaults.get(name, (None, DEFAULT_WINDOW_MINUTES, ()))
            return (_limit(section, fields, algorithm, name, quota, minutes),)
        for other in LIMIT_FIELDS:
            if other in fields and other != "algorithm":
                raise fields[other].error(
                    "cannot be combined with limits: move it into an entry of that list, or remove limits"
                )
        return tuple(_limit_of_list(entry, algorithm, name) for entry in fields["limits"].items())

    # ---- an endpoint -------------------------------------------------------------------------------------------------

    def _endpoint(
        self,
        entry: ConfigValue,
        owner: str = "exempt",
        policy: Policy | None = None,
        methods: tuple[str, ...] = (),
        cost: Cost = 1,
    ) -> Endpoint:
        """Read an endpoint: a path, or a mapping with one. Exempt endpoints have no policy and no cost."""
        value = entry
        if entry.is_mapping:
            fields = entry.fields(*(ENDPOINT_FIELDS if policy else ENDPOINT_FIELDS[:2]))
            if "path" not in fields:
                raise entry.error("needs a path")
            value = fields["path"]
            methods = _get(fields, "methods", _methods, default=methods)
            if policy is not None and "cost" in fields:
                cost = _cost(fields["cost"])
                _check_cost(policy, cost, fields["cost"])
        path = value.string()
        with value.locate_errors():
            taken = self.written.add(path, methods, (owner, value.line))
        if taken is not None:
            where = f" (line {taken[1]})" if taken[1] else ""
            description = "exempt" if taken[0] == "exempt" else f"an endpoint of category {taken[0]!r}"
            raise value.error(f"{path} is already {description}{where}")
        return Endpoint(path, methods, cost)


def _policy(name: str, limits: tuple[Limit, ...], mode: Mode, on_store_error: OnStoreError) -> Policy:
    """Make the policy of a category; a limit of 0 stays closed while the store is unavailable."""
    return Policy(name, limits, mode, "deny" if is_closed(limits) else on_store_error)


def _changes_default(name: str, section: ConfigValue) -> bool:
    """Return whether a category only changes settings of a default one: it has no endpoints of its own."""
    return name in DEFAULT_CATEGORIES and "endpoints" not in section.entries()


def _block_after(value: ConfigValue) -> str | dict[str, str]:
    """Read denials per period, or a mapping from these to the time of the block."""
    if not value.is_mapping:
        return value.string()
    return {denials: length.string() for denials, length in value.entries().items()}


def _reset_time(value: ConfigValue) -> ResetTime:
    return cast("ResetTime", value.choice(*RESET_TIMES))


def _get(fields: Fields, name: str, read: Callable[[ConfigValue], T], *, default: D) -> T | D:
    """Read a field, or return the default if it is missing."""
    return read(fields[name]) if name in fields else default


def _limit(
    value: ConfigValue,
    fields: Fields,
    algorithm: str,
    name: str,
    quota: int | None = None,
    minutes: float = DEFAULT_WINDOW_MINUTES,
) -> Limit:
    """Read one limit in the spec's form."""
    quota = _get(fields, "limit", _quota, default=quota)
    if quota is None:
        raise value.error("needs a limit, the number of requests per window (or limits, a list such as [60/1m])")
    if "window" in fields and "window_minutes" in fields:
        raise fields["window_minutes"].error("cannot be combined with window: remove one of them")
    period: str | float = 60 * _get(fields, "window_minutes", ConfigValue.number, default=minutes)
    if "window" in fields:
        period = fields["window"].string()
    default = default_algorithm(period, algorithm)
    algorithm = fields["algorithm"].choice(*ALGORITHMS) if "algorithm" in fields else default
    strings = {option: fields[option].string() for option in ("unit", "timezone") if option in fields}
    numbers = {option: fields[option].integer(0) for option in ("burst", "reset_day", "reset_hour") if option in fields}
    window = fields.get("window") or fields.get("window_minutes")
    with value.locate_errors(**{**fields, "quota": fields.get("limit"), "period": window}):
        limit = Limit(quota or 1, period, algorithm, name=name, **strings, **numbers)  # type: ignore[arg-type]  # by name
        return limit if quota else close(limit)


def _quota(setting: ConfigValue) -> int:
    """Read the number of requests per window; 0 closes the category."""
    with suppress(ConfigError):
        return setting.integer(0, 0)
    return setting.integer()


def _limit_of_list(entry: ConfigValue, algorithm: str, category: str) -> Limit:
    """Read one of several limits, a string or in the spec's form; its default name is category and period."""
    if entry.is_mapping:
        fields = entry.fields(*LIMIT_FIELDS, "name")
        name = _get(fields, "name", ConfigValue.string, default="")
        limit = _limit(entry, fields, algorithm, name)
    else:
        text = entry.string()
        with entry.locate_errors():
            limit = with_default_algorithm(parse_inbound_limit(text), text, algorithm)
        name = limit.name if "name=" in text else ""
    return limit if name else replace(limit, name=f"{category}-{limit.name}")


def _methods(setting: ConfigValue) -> tuple[str, ...]:
    methods = []
    for entry in setting.one_or_many():
        method = entry.string().upper()
        if not method.isascii() or not method.isalpha():
            raise entry.error(f"expected a method such as GET or POST, not {entry}")
        methods.append(method)
    if not methods:
        raise setting.error(
            "expected methods such as [GET, POST], not an empty list: remove the setting to match all methods"
        )
    return tuple(methods)


def _cost(setting: ConfigValue) -> Cost:
    if setting.is_mapping:
        return {unit: amount.integer(0) for unit, amount in setting.entries().items()}
    return setting.integer(0)


def _check_cost(policy: Policy, cost: Cost, value: ConfigValue) -> None:
    """Raise for a cost in units that no limit counts, or above the maximum of a limit."""
    with value.locate_errors(cost=value):
        costs = policy.costs(cost)
    for limit, amount in zip(policy.limits, costs, strict=True):
        if amount > limit.burst and limit.quota:
            raise value.error(f"{amount} exceeds the maximum of limit {limit.name!r} ({limit.burst})")


def _charging(fields: Fields, cost: Cost) -> Charging | None:
    """Read the charges by status: `count`, `refund` and `penalty`."""
    if "count" in fields and "refund" in fields:
        raise fields["refund"].error("cannot be combined with count: statuses that do not count are refunded anyway")
    counted = _get(fields, "count", _statuses, default=None)
    refunded = _get(fields, "refund", _statuses, default=frozenset())
    penalties: dict[int, int] = {}
    for text, amount in _get(fields, "penalty", ConfigValue.entries, default={}).items():
        penalties.update(dict.fromkeys(_status(amount, text), amount.integer()))
    if counted is None and not refunded and not penalties:
        return None
    if not isinstance(cost, int):
        value = next(fields[name] for name in ("count", "refund", "penalty") if name in fields)
        raise value.error("needs a cost that is an integer, not a mapping")
    return Charging(counted, refunded, penalties)


def _statuses(setting: ConfigValue) -> frozenset[int]:
    entries = setting.one_or_many()
    if not entries:
        raise setting.error("expected statuses such as [401, 403] or [5xx], not an empty list")
    return frozenset().union(*(_status(entry, _status_text(entry)) for entry in entries))


def _status_text(setting: ConfigValue) -> str:
    return str(setting.integer()) if isinstance(setting.raw, int) else setting.string()


def _status(value: ConfigValue, text: str) -> frozenset[int]:
    found = statuses_of(text)
    if found is None:
        raise value.error(f"expected a status such as 401 or 5xx, not {text}")
    return found


def _clients(setting: ConfigValue) -> AddressSet:
    addresses = [entry.string() for entry in setting.one_or_many()]
    name = (setting.field or "clients").rpartition(".")[2]
    with setting.locate_errors(**{name: setting}):
        return AddressSet(addresses, field=name)
