"""Reads settings from a YAML file, or from a mapping of the same shape. Errors name the file, line and field.

tiers: {minute: 20, hour: 100, day: 500, week: 2000, month: 7500}
concurrency: 5
strategy: rolling                 # or fixed, with timezone: Europe/Berlin
storage: data/rate_limits.db      # or redis://…, postgresql://…
types:
  embedding: {minute: 100}
costs:
  usd_micros: {day: 5_000_000}
reserved: {1: 20%}
schedule:
  - {name: night, between: "22:00-06:00", days: mon-fri, scale: 200%}
  - {name: busy, load_above: 0.8, limits: {minute: 5}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate._policy.config_value import ConfigValue, load
from tidegate._runtime.suggestions import hint
from tidegate.budget._settings.model import problems, share_of
from tidegate.budget._settings.schedule import ScheduleRule, read_between, read_days
from tidegate.budget._settings.tiers import PERIODS
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from fractions import Fraction
    from pathlib import Path

FIELDS: Final = (
    "tiers", "concurrency", "types", "costs", "reserved", "schedule", "strategy", "timezone", "storage", "enabled",
    "name", "batch_ttl", "retention_days", "on_database_error", "deadline", "milestones", "webhook_url",
    "webhook_secret", "ledger",
)  # fmt: skip


def read_config(source: str | Path | Mapping[str, object]) -> dict[str, Any]:
    """Read settings, and return them as keyword arguments of BudgetSettings."""
    section = load(source).fields(*FIELDS)
    values: dict[str, Any] = {}
    for name, setting in section.items():
        if name == "tiers":
            values |= {f"per_{period}": quota for period, quota in _read_quotas(setting).items()}
        else:
            values[name] = READERS[name](setting)
    tiers = sorted(_tier_names(values))
    for rule, setting in zip(values.get("schedule", ()), _list_items(section.get("schedule")), strict=True):
        for tier in rule.limits:
            if tier not in tiers:
                known = f"the budget has {', '.join(tiers)}" if tiers else "the budget has no tiers"
                raise setting.error(f"unknown tier {tier!r}: {known}{hint(tier, tiers)}")
    for name, message in problems(values | {"enabled": False}):
        place = section.get(name) or section.get("tiers")
        raise (place or load({})).error(message)
    return values


def _tier_names(values: Mapping[str, Any]) -> list[str]:
    names = [period for period in PERIODS if values.get(f"per_{period}")]
    for table in ("types", "costs"):
        names += [f"{period}:{name}" for name, quotas in values.get(table, {}).items() for period in quotas]
    return names + ["concurrency"] * ("concurrency" in values)


def _list_items(setting: ConfigValue | None) -> list[ConfigValue]:
    return [] if setting is None else setting.items()


def _read_quotas(setting: ConfigValue) -> dict[str, int]:
    return {period: quota.integer() for period, quota in setting.fields(*PERIODS).items()}


def _read_table(setting: ConfigValue) -> dict[str, dict[str, int]]:
    return {name: _read_quotas(quotas) for name, quotas in setting.entries().items()}


def _read_share(setting: ConfigValue) -> Fraction:
    try:
        return share_of(_read_string(setting))
    except (ValueError, ZeroDivisionError):
        raise setting.error(f"expected a share such as 0.2 or 20%, not {setting}") from None


def _read_string(setting: ConfigValue) -> str:
    """Read a number or a string, as a string."""
    try:
        return str(setting.number())
    except ConfigError:
        return setting.string()


def _read_reserved(setting: ConfigValue) -> dict[int, Fraction]:
    found = {}
    for priority, share in setting.entries().items():
        if not priority.isdecimal():
            raise share.error(f"expected an integer of at least 1 as priority, not {priority}")
        found[int(priority)] = _read_share(share)
    return found


def _read_rule(setting: ConfigValue, number: int) -> ScheduleRule:
    fields = setting.fields("name", "between", "days", "load_above", "scale", "limits")
    values: dict[str, Any] = {"name": fields["name"].string() if "name" in fields else f"rule {number}"}
    readers: dict[str, Callable[[str], object]] = {"between": read_between, "days": read_days}
    for name, read in readers.items():
        if name in fields:
            with fields[name].locate_errors(**{name: fields[name]}):
                values[name] = read(fields[name].string())
    if "load_above" in fields:
        values["load_above"] = fields["load_above"].number()
    if "scale" in fields:
        values["scale"] = _read_share(fields["scale"])
        if values["scale"] <= 0:
            raise fields["scale"].error(f"expected a scale above 0 such as 50%, not {fields['scale']}")
    if "limits" in fields:
        values["limits"] = {tier: quota.integer() for tier, quota in fields["limits"].entries().items()}
    if not {"scale", "limits"} & fields.keys():
        raise setting.error("the rule changes no quota: add scale (such as 50%) or limits (by tier)")
    if not {"between", "days", "load_above"} & fields.keys():
        raise setting.error("the rule has no condition: add between, days or load_above")
    return ScheduleRule(**values)


def _read_duration(setting: ConfigValue) -> str | float:
    text = _read_string(setting)
    return float(text) if text.replace(".", "", 1).isdecimal() else text


READERS: Final[dict[str, Callable[[ConfigValue], object]]] = {
    "concurrency": ConfigValue.integer,
    "types": _read_table,
    "costs": _read_table,
    "reserved": _read_reserved,
    "schedule": lambda setting: tuple(_read_rule(item, number) for number, item in enumerate(setting.items(), start=1)),
    "strategy": lambda setting: setting.choice("rolling", "fixed"),
    "timezone": ConfigValue.string,
    "storage": ConfigValue.string,
    "enabled": ConfigValue.boolean,
    "name": ConfigValue.string,
    "batch_ttl": _read_duration,
    "retention_days": ConfigValue.number,
    "on_database_error": lambda setting: setting.choice("short-term", "local", "deny"),
    "deadline": ConfigValue.number,
    "milestones": lambda setting: tuple(item.integer(1, 100) for item in setting.items()),
    "webhook_url": ConfigValue.string,
    "webhook_secret": ConfigValue.string,
    "ledger": ConfigValue.string,
}
