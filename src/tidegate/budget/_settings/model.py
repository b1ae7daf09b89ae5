"""The settings of a budget, and their checks. One error lists everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, get_args

from tidegate._limiter.waiting import MAX_PRIORITY
from tidegate._runtime.suggestions import hint
from tidegate._runtime.urls import redact, split_url
from tidegate.budget._settings.tiers import CONCURRENCY, PERIODS, SLOTS_UNIT, TASKS_UNIT, Tier, TierPlan
from tidegate.core._bounds import MAX_INTEGER, SECOND
from tidegate.core._calendar import find_zone
from tidegate.core._limit import parse_period
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tidegate.budget._settings.schedule import ScheduleRule

Strategy = Literal["rolling", "fixed"]
OnDatabaseError = Literal["short-term", "local", "deny"]
Quotas = Mapping[str, int]
RETENTION_DAYS: Final = 35.0
MILESTONES: Final = (50, 80, 95)
NO_TIERS: Final = "set at least one of per_minute, per_hour, per_day, per_week, per_month"


class BudgetOptions(TypedDict, total=False):
    """The fields of BudgetSettings, as keyword arguments of a budget."""

    per_minute: int | None
    per_hour: int | None
    per_day: int | None
    per_week: int | None
    per_month: int | None
    concurrency: int | None
    types: Mapping[str, Quotas]
    costs: Mapping[str, Quotas]
    reserved: Mapping[int, float]
    schedule: tuple[ScheduleRule, ...]
    strategy: Strategy
    timezone: str
    storage: str | Path
    enabled: bool
    name: str
    batch_ttl: str | float | None
    retention_days: float
    on_database_error: OnDatabaseError
    deadline: float
    milestones: tuple[int, ...]
    webhook_url: str | None
    webhook_secret: str | None
    ledger: str | Path | None


def storable(name: str, text: object) -> str:
    """Return a string that a store can keep; raise ConfigError for other values."""
    if not isinstance(text, str):
        raise ConfigError(f"must be a string, not {text!r}", field=name)
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"contains half of a character (a lone surrogate), which no store can keep: {text!r}"
        raise ConfigError(message, field=name) from None
    return text


@dataclass(frozen=True, kw_only=True)
class BudgetSettings:
    """The settings of a budget. A tier that is None does not exist.

    `costs` and `types` set quotas by unit (`{"tokens": {"day": 2_000_000}}`) and by task type; an entry may be empty
    (`{"tokens": {}}`) to allow a name without a limit. `reserved` maps
    priorities to shares: `{1: 0.2}` reserves a fifth of each tier for tasks of priority 1 and above. `schedule` changes
    quotas by time of day and load. `storage` is the path of an SQLite file, or the URL of any store.
    """

    per_minute: int | None = None
    per_hour: int | None = None
    per_day: int | None = None
    per_week: int | None = None
    per_month: int | None = None
    concurrency: int | None = None
    types: Mapping[str, Quotas] = field(default_factory=dict)
    costs: Mapping[str, Quotas] = field(default_factory=dict)
    reserved: Mapping[int, float] = field(default_factory=dict)
    schedule: tuple[ScheduleRule, ...] = ()
    strategy: Strategy = "rolling"
    timezone: str = "UTC"
    storage: str | Path = field(default="rate_limits.db", repr=False)
    enabled: bool = True
    name: str = "tasks"
    batch_ttl: str | float | None = None  # an unsettled batch is returned after this time
    retention_days: float = RETENTION_DAYS  # how long completions are kept
    on_database_error: OnDatabaseError = "short-term"
    deadline: float = 5.0  # seconds: how long a check waits for the database
    milestones: tuple[int, ...] = MILESTONES  # percentages of a tier that are logged when usage reaches them
    webhook_url: str | None = field(default=None, repr=False)
    webhook_secret: str | None = field(default=None, repr=False)
    ledger: str | Path | None = None  # a file of tidegate.spending, for reports

    def __post_init__(self) -> None:
        """Raise one ConfigError for all settings that are wrong."""
        refuse(list(problems({each.name: getattr(self, each.name) for each in fields(self)})))

    @property
    def plan(self) -> TierPlan:
        """The tiers, as the limits of one policy are built from them."""
        shares = tuple((priority, share_of(share)) for priority, share in sorted(self.reserved.items()))
        return TierPlan(
            tuple(self._tiers()), self.strategy, self.timezone, shares, self.batch_ttl_microseconds / SECOND
        )

    @property
    def shown_storage(self) -> str:
        """The storage, for messages: a path, or a URL without its password."""
        text = str(self.storage)
        return redact(text) if "://" in text else text

    @property
    def unreachable_tiers(self) -> list[str]:
        """Messages about tiers that have no effect, because a longer tier allows less."""
        pairs = [(short, long) for short in self._tiers() for long in self._tiers() if short.unit == long.unit]
        return [
            f"the limit of {short.quota} per {short.name} has no effect: {long.quota} per {long.name} is lower"
            for short, long in pairs
            if short.period in PERIODS
            and PERIODS.index(short.period) < PERIODS.index(long.period)
            and short.quota > long.quota
        ]

    @property
    def batch_ttl_microseconds(self) -> int:
        """Microseconds after which an unsettled batch is returned.

        Batches of a process that ended are found without it: this is for those that a running process forgot.
        """
        return 3600 * SECOND if self.batch_ttl is None else parse_period(self.batch_ttl)

    def check_task(self, task_type: str | None, cost: Mapping[str, int]) -> None:
        """Refuse names that nothing counts: a unit without an entry in `costs`, and a type if there are `types`.

        A unit that is not similar to one in `costs` is accepted if there is a ledger, which records it.
        """
        if task_type is not None:
            storable("task_type", task_type)
        if task_type is not None and self.types and task_type not in self.types:
            known = f"the types of the budget are {', '.join(self.types)}; add one without limits as {task_type}: {{}}"
            message = f"unknown task type {task_type!r}: {known}{hint(task_type, self.types)}"
            raise ConfigError(message, field="task_type")
        for unit in cost:
            near = hint(unit, self.costs)
            if unit in self.costs or (self.ledger is not None and not near and unit != TASKS_UNIT):
                continue
            known = f"counts {', '.join(self.costs)}" if self.costs else "counts no costs"
            message = f"unknown unit {unit!r}: the budget {known}; add one without limits as costs: {{{unit}: {{}}}}"
            raise ConfigError(message + near, field="cost")

    def _tiers(self) -> Iterator[Tier]:
        for period in PERIODS:
            if (quota := getattr(self, f"per_{period}")) is not None:
                yield Tier(period, period, TASKS_UNIT, quota)
        for task_type, quotas in self.types.items():
            for period in (period for period in PERIODS if period in quotas):
                yield Tier(f"{period}:{task_type}", period, f"{TASKS_UNIT}:{task_type}", quotas[period])
        for unit, quotas in self.costs.items():
            for period in (period for period in PERIODS if period in quotas):
                yield Tier(f"{period}:{unit}", period, unit, quotas[period])
        if self.concurrency is not None:
            yield Tier(CONCURRENCY, CONCURRENCY, SLOTS_UNIT, self.concurrency)


DEFAULTS: Final[dict[str, Any]] = {
    each.name: each.default if each.default is not MISSING else {} for each in fields(BudgetSettings)
}
Problem = tuple[str, str]  # a field, and the message about it


def refuse(found: list[Problem]) -> None:
    """Raise one error that lists every problem."""
    if not found:
        return
    if len(found) == 1:
        ((name, message),) = found
        raise ConfigError(message, field=name)
    lines = "".join(f"\n  {name}: {message}" for name, message in found)
    raise ConfigError(f"{len(found)} settings of the budget are invalid:{lines}")


def problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Find everything that is wrong with some settings; missing ones have their defaults."""
    values = DEFAULTS | dict(given)
    for name, check in CHECKS.items():
        if (message := check(values[name])) is not None:
            yield name, message
    if isinstance(values["types"], Mapping) and isinstance(values["costs"], Mapping):
        for name in sorted(set(map(str, values["types"])) & set(map(str, values["costs"]))):
            yield "types", f"{name!r} is a task type and a unit of costs: rename one of them"
    quotas = [values[f"per_{period}"] for period in PERIODS]
    has_limits = any(quota is not None for quota in (*quotas, values["concurrency"]))
    tables = [values[name] for name in ("types", "costs") if isinstance(values[name], Mapping)]
    has_limits = has_limits or any(quotas for table in tables for quotas in table.values())
    if values["enabled"] is True and not has_limits:
        yield "per_minute", f"the budget is enabled but has no limits: {NO_TIERS}"


def _quota(value: object) -> str | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_INTEGER):
        return None
    return f"expected an integer of at least 1, not {value!r}; leave it out for no limit"


def _quotas_by(what: str) -> Callable[[object], str | None]:
    def check(table: object) -> str | None:
        if not isinstance(table, Mapping):
            return f"expected a mapping of each {what} to its quotas, not {table!r}"
        found = (_tier_quotas(what, name, quotas) for name, quotas in table.items())
        return next((message for message in found if message is not None), None)

    return check


def _tier_quotas(what: str, name: object, quotas: object) -> str | None:
    if not isinstance(name, str) or not name or set(name) & set(":<"):
        return f"expected a {what} without ':' and '<', not {name!r}"
    if name in (TASKS_UNIT, SLOTS_UNIT, *PERIODS, CONCURRENCY):
        return f"{name!r} cannot be a {what}: it is a reserved name"
    if not isinstance(quotas, Mapping):
        return f"{name}: expected quotas such as {{'day': 1000}}, not {quotas!r}"
    for period, quota in quotas.items():
        if period not in PERIODS:
            return f"{name}: unknown period {period!r}: use {', '.join(PERIODS)}{hint(period, PERIODS)}"
        if quota is None or _quota(quota) is not None:
            return f"{name}.{period}: expected an integer of at least 1, not {quota!r}"
    return None


def share_of(value: object) -> Fraction:
    """Read a share, such as 0.2 or 20%."""
    text = str(value).strip()
    return Fraction(text.removesuffix("%")) / 100 if text.endswith("%") else Fraction(text)


def _reserved(shares: object) -> str | None:
    if not isinstance(shares, Mapping):
        return f"expected a mapping of priorities to shares such as {{1: 0.2}}, not {shares!r}"
    total = Fraction()
    for priority, share in shares.items():
        if not isinstance(priority, int) or isinstance(priority, bool) or priority < 1:
            return f"expected priorities that are integers of at least 1 (tasks have 0 by default), not {priority!r}"
        if priority > MAX_PRIORITY:
            return f"expected priorities up to {MAX_PRIORITY}, the largest that a task may have, not {priority}"
        try:
            part = share_of(share)
        except (ValueError, ZeroDivisionError):
            part = Fraction()
        if not 0 < part < 1:
            return f"expected a share such as 0.2 or 20% for priority {priority}, not {share!r}"
        total += part
    return f"the shares add up to {float(total):g}: expected a sum below 1" if total >= 1 else None


def _choice(kind: Any) -> Callable[[object], str | None]:  # noqa: ANN401 - a Literal
    words = get_args(kind)

    def check(value: object) -> str | None:
        if value in words:
            return None
        return f"expected {', '.join(words[:-1])} or {words[-1]}, not {value!r}{hint(value, words)}"

    return check


def _zone(value: Any) -> str | None:  # noqa: ANN401 - any value
    try:
        find_zone(value)
    except ConfigError as error:
        return str(error).removeprefix("timezone: ")
    return None


def _string(value: object) -> str | None:
    return None if isinstance(value, str) and value else f"expected a non-empty string, not {value!r}"


def _storage(value: object) -> str | None:
    if isinstance(value, (str, Path)) and str(value).strip():
        return None
    return (
        f"expected the path of a file such as data/rate_limits.db, or a store URL such as redis://host, not {value!r}"
    )


def _boolean(value: object) -> str | None:
    return None if isinstance(value, bool) else f"expected true or false, not {value!r}"


def _duration(value: Any) -> str | None:  # noqa: ANN401 - any value
    try:
        parse_period(1 if value is None else value)
    except ConfigError:
        return f"expected a duration such as 10m, or a number of seconds, not {value!r}"
    return None


def _positive(value: object) -> str | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return None
    return f"expected a number above 0, not {value!r}"


def _milestones(value: object) -> str | None:
    if isinstance(value, (tuple, list)) and all(isinstance(each, int) and 1 <= each <= 100 for each in value):  # noqa: PLR2004 - percent
        return None
    return f"expected percentages such as (50, 80, 95), not {value!r}"


def _url(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        return f"expected an http or https URL such as https://example.com/hook, not {redact(value)!r}"
    try:
        split_url(value, "")
    except ConfigError as error:
        return str(error)
    return None


def _secret(value: object) -> str | None:
    return None if value is None or (isinstance(value, str) and value) else "expected a non-empty string"


def _optional_path(value: object) -> str | None:
    return None if value is None or isinstance(value, (str, Path)) else f"expected a path, not {value!r}"


def _schedule(value: object) -> str | None:
    return None if isinstance(value, (tuple, list)) else f"expected a list of rules, not {value!r}"


CHECKS: Final[dict[str, Callable[[Any], str | None]]] = {
    **{f"per_{period}": _quota for period in PERIODS},
    "concurrency": _quota,
    "types": _quotas_by("task type"),
    "costs": _quotas_by("unit"),
    "reserved": _reserved,
    "schedule": _schedule,
    "strategy": _choice(Strategy),
    "timezone": _zone,
    "storage": _storage,
    "enabled": _boolean,
    "name": _string,
    "batch_ttl": _duration,
    "retention_days": _positive,
    "on_database_error": _choice(OnDatabaseError),
    "deadline": _positive,
    "milestones": _milestones,
    "webhook_url": _url,
    "webhook_secret": _secret,
    "ledger": lambda value: (
        None if value is None or isinstance(value, (str, Path)) else f"expected a path, not {value!r}"
    ),
}
