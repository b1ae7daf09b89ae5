"""The settings of a budget, each declared once, and what is wrong with them: one error lists everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypedDict, get_args

from tidegate._policy.config_value import ConfigValue
from tidegate._policy.declared_settings import (
    BOOLEAN,
    DURATION,
    INTEGER,
    PATH,
    PERCENTS,
    URL,
    choice,
    options_of,
    setting,
)
from tidegate._policy.setting_values import read_milestones, read_path, read_secret, read_timezone, read_webhook
from tidegate._runtime.suggestions import hint
from tidegate._runtime.urls import redact
from tidegate.budget._settings import values
from tidegate.budget._settings.tiers import CONCURRENCY, PERIODS, SLOTS_UNIT, TASKS_UNIT, Tier, TierPlan
from tidegate.budget._settings.values import BudgetFallback, Strategy
from tidegate.core._bounds import SECOND
from tidegate.core._limit import parse_period
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tidegate.budget._settings.schedule import ScheduleRule

Quotas = Mapping[str, int]
RETENTION_DAYS: Final = 35.0
MILESTONES: Final = (50, 80, 95)
NO_TIERS: Final = "set at least one of per_minute, per_hour, per_day, per_week, per_month"


def _quota(summary: str, variable: str) -> Any:  # noqa: ANN401 - as `setting`
    return setting(None, ConfigValue.integer, summary, INTEGER, variable=variable)


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
    store: str | Path
    enabled: bool
    name: str
    batch_ttl: str | float | None
    retention_days: float
    on_store_error: BudgetFallback
    deadline: float
    milestones: tuple[int, ...]
    webhook: str | None
    secret: str | None
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
    quotas by time of day and load. `store` is the path of an SQLite file, or the URL of any store.
    """

    # fmt: off
    per_minute: int | None = _quota("tasks per minute", "RATE_LIMIT_PER_MINUTE")
    per_hour: int | None = _quota("tasks per hour", "RATE_LIMIT_PER_HOUR")
    per_day: int | None = _quota("tasks per day", "RATE_LIMIT_PER_DAY")
    per_week: int | None = _quota("tasks per week", "RATE_LIMIT_PER_WEEK")
    per_month: int | None = _quota("tasks per month", "RATE_LIMIT_PER_MONTH")
    concurrency: int | None = _quota(
        "maximum number of tasks at the same time; a larger batch takes all slots", "CONCURRENCY_LIMIT"
    )
    types: Mapping[str, Quotas] = setting(
        {}, values.read_table, "quotas by task type", values.QUOTA_TABLE, check=values.check_quotas_by("task type"),
    )
    costs: Mapping[str, Quotas] = setting(
        {}, values.read_table, "quotas by unit", values.QUOTA_TABLE, check=values.check_quotas_by("unit"),
    )
    reserved: Mapping[int, float] = setting(
        {}, values.read_reserved, "shares of each tier that are reserved for tasks of a priority and above",
        values.SHARES, check=values.check_reserved,
    )
    schedule: tuple[ScheduleRule, ...] = setting(
        (), values.read_schedule, "rules that change quotas by time of day and load", values.RULES,
        check=values.check_schedule,
    )
    strategy: Strategy = setting(
        "rolling", lambda found: found.choice(*get_args(Strategy)), "`rolling` or `fixed` windows",
        choice(*get_args(Strategy)), variable="RATE_LIMIT_STRATEGY",
    )
    timezone: str = setting(
        "UTC", read_timezone, "time zone of fixed windows and the schedule", variable="RATE_LIMIT_TIMEZONE",

    )
    store: str | Path = setting(
        "rate_limits.db", ConfigValue.string, "the path of an SQLite file, or a store URL", private=True,
        file="file with the path or URL of the store", variable="RATE_LIMIT_STORAGE_PATH", check=values.check_store,
    )
    enabled: bool = setting(
        True,  # noqa: FBT003 - the default comes first
        ConfigValue.boolean, "whether the budget limits anything", BOOLEAN, variable="RATE_LIMIT_ENABLED",
        shown="true; false with `from_env`",
    )
    name: str = setting(
        "tasks", ConfigValue.string, "distinguishes budgets in the same store",
    )
    batch_ttl: str | float | None = setting(
        None, values.read_duration, "time after which an unsettled batch of a running process is returned", DURATION,
        shown="1h", variable="RATE_LIMIT_BATCH_TTL",
    )
    retention_days: float = setting(
        RETENTION_DAYS, ConfigValue.number, "how long completions are kept", values.NUMBER, shown="35",

    )
    on_store_error: BudgetFallback = setting(
        "short-term", lambda found: found.choice(*get_args(BudgetFallback)),
        "what decides while the store is unavailable", choice(*get_args(BudgetFallback)),
        variable="RATE_LIMIT_ON_STORE_ERROR",
    )
    deadline: float = setting(
        5.0, ConfigValue.number, "how long a check waits for the store", values.NUMBER, shown="5 s",

    )
    milestones: tuple[int, ...] = setting(
        MILESTONES, read_milestones, "percentages of a tier that are logged and posted when they are reached",
        PERCENTS, shown="50, 80, 95",
    )
    webhook: str | None = setting(
        None, read_webhook, "the URL to which warnings are posted", URL, private=True,
        file="file with the URL of the webhook", variable="RATE_LIMIT_WEBHOOK",
    )
    secret: str | None = setting(
        None, read_secret, "the secret that signs them", secret=True, file="file with this secret",
        variable="RATE_LIMIT_SECRET",
    )
    ledger: str | Path | None = setting(
        None, read_path, "a file for reports", PATH, check=values.check_optional_path,
    )
    # fmt: on

    def __post_init__(self) -> None:
        """Raise one ConfigError for all settings that are wrong."""
        refuse(list(problems({each.name: getattr(self, each.name) for each in fields(self)})))

    @property
    def plan(self) -> TierPlan:
        """The tiers, as the limits of one policy are built from them."""
        shares = tuple((priority, values.share_of(share)) for priority, share in sorted(self.reserved.items()))
        return TierPlan(
            tuple(self._tiers()), self.strategy, self.timezone, shares, self.batch_ttl_microseconds / SECOND
        )

    @property
    def shown_store(self) -> str:
        """The store, for messages: a path, or a URL without its password."""
        text = str(self.store)
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


SETTINGS: Final = {option.name: option for option in options_of(BudgetSettings)}
DEFAULTS: Final[dict[str, Any]] = {
    each.name: {} if each.default is MISSING else each.default for each in fields(BudgetSettings)
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
    found = DEFAULTS | dict(given)
    for name, value in found.items():
        if value is not DEFAULTS[name] and (message := SETTINGS[name].problem(value)) is not None:
            yield name, message
    if isinstance(found["types"], Mapping) and isinstance(found["costs"], Mapping):
        for name in sorted(set(map(str, found["types"])) & set(map(str, found["costs"]))):
            yield "types", f"{name!r} is a task type and a unit of costs: rename one of them"
    quotas = [found[f"per_{period}"] for period in PERIODS]
    has_limits = any(quota is not None for quota in (*quotas, found["concurrency"]))
    tables = [found[name] for name in ("types", "costs") if isinstance(found[name], Mapping)]
    has_limits = has_limits or any(quotas for table in tables for quotas in table.values())
    if found["enabled"] is True and not has_limits:
        yield "per_minute", f"the budget is enabled but has no limits: {NO_TIERS}"
