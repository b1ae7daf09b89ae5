"""Reads Rules from `config.yaml`, as the API limiting spec has it, with what it leaves open.

    rate_limiting:
      enabled: true
      categories:
        expensive: {limit: 5, window_minutes: 60}      # the spec's form; what is left out has the spec's defaults
        uploads:                                       # a category of one's own
          limits: [10/1m, 100/1d]                      # several, all of which must pass
          endpoints: [/upload/*, {path: /import, methods: [POST], cost: 5}]
          mode: shadow
      cleanup_interval_minutes: 5
      max_entries: 10000

The file may hold other sections, of the application: only `rate_limiting` is read. Every mistake is refused with file,
line and field. All settings stand in SECTION, CATEGORY, LIMIT and ENDPOINT below.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, TypeVar, cast, get_args

from tidegate.core import Limit
from tidegate.core.algorithms import ALGORITHMS
from tidegate.inbound.client.address import AddressSet
from tidegate.inbound.rules.charging import Charging, statuses_of
from tidegate.inbound.rules.model import ADMIN_PATH, Category, Endpoint, Rules
from tidegate.inbound.rules.paths import PathTree
from tidegate.policy import Cost, Policy
from tidegate.policy.config_value import ConfigValue, load
from tidegate.policy.model import Mode, OnStoreError

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
)  # what a category does not say, the section may say for all
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
DEFAULT_WINDOW_MINUTES: Final = 60  # of a category that says nothing of its window
DEFAULT_UNMATCHED: Final = "read"  # the category of requests that no endpoint names
EMPTY_CONFIG: Final[Mapping[str, object]] = {}


def load_rules(config: str | Path | Mapping[str, object] | None = None) -> Rules:
    """Read the rules from a file or mapping; None, or no section `rate_limiting`: the spec's defaults."""
    return _Reader(_section(load(EMPTY_CONFIG if config is None else config))).rules()


def _section(whole: ConfigValue) -> ConfigValue:
    """Find the section; a mapping that holds nothing but its settings is the section itself."""
    entries = {} if whole.is_nothing else whole.entries()
    if "rate_limiting" in entries:
        section = entries["rate_limiting"]
        return (
            section if not section.is_nothing else ConfigValue(EMPTY_CONFIG, section.file, section.line, section.field)
        )
    if entries and all(name in SECTION_FIELDS for name in entries):
        return whole
    for name, entry in entries.items():
        if get_close_matches(name.lower().replace("-", "_"), ["rate_limiting"], cutoff=0.75):
            raise entry.error("unknown setting: did you mean 'rate_limiting'?")
    return ConfigValue(EMPTY_CONFIG, whole.file, whole.line)


class _Reader:
    """Reads one section. What was written comes first, then the defaults that it leaves room for."""

    def __init__(self, section: ConfigValue) -> None:
        self.section = section
        self.fields = section.fields(*SECTION_FIELDS)
        self.written: PathTree[tuple[str, int | None]] = PathTree()  # whose each endpoint is, and in which line
        self.defaults = (
            dict(DEFAULT_CATEGORIES) if _get(self.fields, "defaults", ConfigValue.flag, default=True) else {}
        )
        unmatched = self.fields.get("unmatched")
        self.unmatched = DEFAULT_UNMATCHED if unmatched is None or unmatched.is_nothing else unmatched.text()

    def rules(self) -> Rules:
        """Read everything."""
        fields = self.fields
        exempt = [self._endpoint(entry) for entry in _get(fields, "exempt", ConfigValue.one_or_many, default=[])]
        written: dict[str, ConfigValue] = _get(fields, "categories", ConfigValue.entries, default={})
        categories = {name: self._category(name, section) for name, section in written.items()}
        if self.written.add(ADMIN_PATH, (), ("exempt", None)) is None:
            exempt.append(Endpoint(ADMIN_PATH))
        for name, (_, _, paths) in self.defaults.items():
            if name not in written or "endpoints" not in written[name].entries():
                category = categories.get(name) or self._category(name, ConfigValue(EMPTY_CONFIG, self.section.file))
                categories[name] = replace(category, endpoints=self._free(name, category, paths))
        return Rules(
            categories=tuple(categories.values()),
            unmatched=self._unmatched(categories),
            exempt=tuple(exempt),
            exempt_methods=frozenset(_get(fields, "exempt_methods", _methods, default=())),
            exempt_clients=_get(fields, "exempt_clients", _clients, default=AddressSet()),
            blocked_clients=_get(fields, "blocked_clients", _clients, default=AddressSet()),
            enabled=_get(fields, "enabled", ConfigValue.flag, default=True),
            cleanup_interval=60 * _get(fields, "cleanup_interval_minutes", ConfigValue.number, default=5),
            max_entries=_get(fields, "max_entries", ConfigValue.whole, default=10_000),
        )

    def _free(self, name: str, category: Category, paths: Iterable[str]) -> tuple[Endpoint, ...]:
        """Keep of the spec's endpoints those that the file has not given to anybody."""
        free = [path for path in paths if self.written.add(path, (), (name, None)) is None]
        return tuple(Endpoint(path, (), category.cost) for path in free)

    def _unmatched(self, categories: dict[str, Category]) -> Category | None:
        """Find the category of requests that no endpoint names: `read` if there is one; nothing: none."""
        setting = self.fields.get("unmatched")
        if setting is None:
            return categories.get(self.unmatched)
        return None if setting.is_nothing else categories[setting.choice(*categories)]

    # ---- a category --------------------------------------------------------------------------------------------------

    def _category(self, name: str, section: ConfigValue) -> Category:
        fields = section.fields(*CATEGORY_FIELDS)
        limits = self._limits(name, section, fields)
        mode = cast("Mode", self._choice(fields, "mode", get_args(Mode), "enforce"))
        on_error = cast("OnStoreError", self._choice(fields, "on_store_error", get_args(OnStoreError), "local"))
        with section.blame(**fields):
            policy = Policy(name, limits, mode, on_error)
        cost = _get(fields, "cost", _cost, default=1)
        _check_cost(policy, cost, fields.get("cost", section))
        charging = _charging(fields, cost)
        methods = _get(fields, "methods", _methods, default=())
        if "endpoints" not in fields:
            self._check_endpoints_missing(name, section, fields)
            return Category(name, policy, (), cost, charging)
        entries = fields["endpoints"].one_or_many()
        endpoints = tuple(self._endpoint(entry, name, policy, methods, cost) for entry in entries)
        return Category(name, policy, endpoints, cost, charging)

    def _check_endpoints_missing(self, name: str, section: ConfigValue, fields: Fields) -> None:
        """Refuse a category that no request would ever fall into, unless it has endpoints by default."""
        if "methods" in fields:
            raise fields["methods"].error("is for endpoints: list these too")
        if name in self.defaults or name == self.unmatched:
            return
        near = get_close_matches(name, self.defaults, n=1)
        hint = f"; is {near[0]!r} meant?" if near else ""
        raise section.error(f"needs endpoints, a list of paths such as [/login, /api/*]{hint}")

    def _choice(self, fields: Fields, name: str, choices: Iterable[str], default: str) -> str:
        """Read a setting of the category, or else of the section."""
        setting = fields.get(name) or self.fields.get(name)
        return setting.choice(*choices) if setting else default

    def _limits(self, name: str, section: ConfigValue, fields: Fields) -> tuple[Limit, ...]:
        algorithm = self._choice(fields, "algorithm", ALGORITHMS, "sliding_log")
        if "limits" not in fields:
            quota, minutes, _ = self.defaults.get(name, (None, DEFAULT_WINDOW_MINUTES, ()))
            return (_limit(section, fields, algorithm, name, quota, minutes),)
        for other in LIMIT_FIELDS:
            if other in fields and other != "algorithm":
                raise fields[other].error(
                    "stands beside limits: put it into an entry of that list, or leave limits out"
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
        """Read an endpoint: a path, or a mapping with one. Exempt ones have no policy, and so no cost."""
        place = entry
        if entry.is_mapping:
            fields = entry.fields(*(ENDPOINT_FIELDS if policy else ENDPOINT_FIELDS[:2]))
            if "path" not in fields:
                raise entry.error("needs a path")
            place = fields["path"]
            methods = _get(fields, "methods", _methods, default=methods)
            if policy is not None and "cost" in fields:
                cost = _cost(fields["cost"])
                _check_cost(policy, cost, fields["cost"])
        path = place.text()
        with place.blame():
            taken = self.written.add(path, methods, (owner, place.line))
        if taken is not None:
            where = f", in line {taken[1]}" if taken[1] else ""
            what = "exempt" if taken[0] == "exempt" else f"an endpoint of category {taken[0]!r}"
            raise place.error(f"{path} is {what} already{where}")
        return Endpoint(path, methods, cost)


def _get(fields: Fields, name: str, read: Callable[[ConfigValue], T], *, default: D) -> T | D:
    """Read a field if it is there."""
    return read(fields[name]) if name in fields else default


def _limit(
    place: ConfigValue,
    fields: Fields,
    algorithm: str,
    name: str,
    quota: int | None = None,
    minutes: float = DEFAULT_WINDOW_MINUTES,
) -> Limit:
    """Read one limit in the form of the spec."""
    quota = _get(fields, "limit", ConfigValue.whole, default=quota)
    if quota is None:
        raise place.error("needs a limit, the number of requests per window (or limits, a list such as [60/1m])")
    if "window" in fields and "window_minutes" in fields:
        raise fields["window_minutes"].error("stands beside window: leave one of them out")
    period: str | float = 60 * _get(fields, "window_minutes", ConfigValue.number, default=minutes)
    if "window" in fields:
        period = fields["window"].text()
    algorithm = fields["algorithm"].choice(*ALGORITHMS) if "algorithm" in fields else algorithm
    texts = {option: fields[option].text() for option in ("unit", "timezone") if option in fields}
    numbers = {option: fields[option].whole(0) for option in ("burst", "reset_day", "reset_hour") if option in fields}
    window = fields.get("window") or fields.get("window_minutes")
    with place.blame(**{**fields, "quota": fields.get("limit"), "period": window}):
        return Limit(quota, period, algorithm, name=name, **texts, **numbers)  # type: ignore[arg-type]  # by name


def _limit_of_list(entry: ConfigValue, algorithm: str, category: str) -> Limit:
    """Read one of several limits, as text or in the form of the spec; it is called after its category and period."""
    if entry.is_mapping:
        fields = entry.fields(*LIMIT_FIELDS, "name")
        name = _get(fields, "name", ConfigValue.text, default="")
        limit = _limit(entry, fields, algorithm, name)
    else:
        text = entry.text()
        with entry.blame():
            limit = by_default(Limit.parse(text), text, algorithm)
        name = limit.name if "name=" in text else ""
    return limit if name else replace(limit, name=f"{category}-{limit.name}")


def by_default(limit: Limit, text: str, algorithm: str) -> Limit:
    """Count by the category's algorithm where the text names none."""
    words = text.split()
    named = limit.algorithm in words or limit.calendar is not None or limit.burst != limit.quota
    return limit if named else replace(limit, algorithm=algorithm)


def _methods(setting: ConfigValue) -> tuple[str, ...]:
    methods = []
    for entry in setting.one_or_many():
        method = entry.text().upper()
        if not method.isascii() or not method.isalpha():
            raise entry.error(f"expected a method such as GET or POST, not {entry}")
        methods.append(method)
    if not methods:
        raise setting.error("expected methods such as [GET, POST], not an empty list: leave it out to mean all")
    return tuple(methods)


def _cost(setting: ConfigValue) -> Cost:
    if setting.is_mapping:
        return {unit: amount.whole(0) for unit, amount in setting.entries().items()}
    return setting.whole(0)


def _check_cost(policy: Policy, cost: Cost, place: ConfigValue) -> None:
    """Refuse a cost that the category's limits do not count, or that no limit can ever hold."""
    with place.blame(cost=place):
        costs = policy.costs(cost)
    for limit, amount in zip(policy.limits, costs, strict=True):
        if amount > limit.burst:
            raise place.error(f"{amount} is more than limit {limit.name!r} can ever hold ({limit.burst})")


def _charging(fields: Fields, cost: Cost) -> Charging | None:
    """Read what is charged by status: `count` only some, `refund` some, a `penalty` on top."""
    if "count" in fields and "refund" in fields:
        raise fields["refund"].error("stands beside count: what is not counted is given back anyway")
    counted = _get(fields, "count", _statuses, default=None)
    refunded = _get(fields, "refund", _statuses, default=frozenset())
    penalties: dict[int, int] = {}
    for text, amount in _get(fields, "penalty", ConfigValue.entries, default={}).items():
        penalties.update(dict.fromkeys(_status(amount, text), amount.whole()))
    if counted is None and not refunded and not penalties:
        return None
    if not isinstance(cost, int):
        place = next(fields[name] for name in ("count", "refund", "penalty") if name in fields)
        raise place.error("needs a cost that is a plain number")
    return Charging(counted, refunded, penalties)


def _statuses(setting: ConfigValue) -> frozenset[int]:
    entries = setting.one_or_many()
    if not entries:
        raise setting.error("expected statuses such as [401, 403] or [5xx], not an empty list")
    return frozenset().union(*(_status(entry, _word(entry)) for entry in entries))


def _word(setting: ConfigValue) -> str:
    return str(setting.whole()) if isinstance(setting.raw, int) else setting.text()


def _status(place: ConfigValue, text: str) -> frozenset[int]:
    found = statuses_of(text)
    if found is None:
        raise place.error(f"expected a status such as 401 or 5xx, not {text}")
    return found


def _clients(setting: ConfigValue) -> AddressSet:
    addresses = [entry.text() for entry in setting.one_or_many()]
    name = (setting.field or "clients").rpartition(".")[2]
    with setting.blame(**{name: setting}):
        return AddressSet(addresses, field=name)
