"""Reads the values of settings from YAML, and checks those that are given in Python."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tidegate._limiter.waiting import MAX_PRIORITY
from tidegate._policy.declared_settings import INTEGER, Kind
from tidegate._runtime.suggestions import hint
from tidegate.budget._settings.schedule import ScheduleRule, read_between, read_days
from tidegate.budget._settings.tiers import CONCURRENCY, PERIODS, SLOTS_UNIT, TASKS_UNIT
from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._limit import parse_period
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._policy.config_value import ConfigValue

Strategy = Literal["rolling", "fixed"]
BudgetFallback = Literal["short-term", "local", "deny"]


def closed(properties: Mapping[str, object]) -> dict[str, object]:
    """Return the schema of a mapping that has only these keys."""
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


QUOTAS: Final = Kind(closed(dict.fromkeys(PERIODS, INTEGER.schema)))
QUOTA_TABLE: Final = Kind({"type": "object", "additionalProperties": QUOTAS.schema})
SHARES: Final = Kind({"type": "object", "additionalProperties": {"type": ["string", "number"]}})
NUMBER: Final = Kind({"type": "number"}, unit="s")
RULES: Final = Kind(
    {
        "type": "array",
        "items": closed(
            {
                "name": {"type": "string", "minLength": 1},
                "between": {"type": "string", "minLength": 1},
                "days": {"type": "string", "minLength": 1},
                "load_above": {"type": "number"},
                "scale": {"type": ["string", "number"]},
                "limits": {"type": "object", "additionalProperties": INTEGER.schema},
            }
        ),
    }
)

# ---- readers of YAML -------------------------------------------------------------------------------------------------


def read_quotas(setting: ConfigValue) -> dict[str, int]:
    """Read the quota of each tier."""
    return {period: quota.integer() for period, quota in setting.fields(*PERIODS).items()}


def read_table(setting: ConfigValue) -> dict[str, dict[str, int]]:
    """Read the quotas of each unit or task type."""
    return {name: read_quotas(quotas) for name, quotas in setting.entries().items()}


def _read_share(setting: ConfigValue) -> Fraction:
    try:
        return share_of(_number_or_string(setting))
    except (ValueError, ZeroDivisionError):
        raise setting.error(f"expected a share such as 0.2 or 20%, not {setting}") from None


def _number_or_string(setting: ConfigValue) -> float | str:
    try:
        return setting.number()
    except ConfigError:
        return setting.string()


def read_reserved(setting: ConfigValue) -> dict[int, Fraction]:
    """Read the share of each priority."""
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


def read_schedule(setting: ConfigValue) -> tuple[ScheduleRule, ...]:
    """Read the rules of a schedule."""
    return tuple(_read_rule(item, number) for number, item in enumerate(setting.items(), start=1))


def read_duration(setting: ConfigValue) -> str | float:
    """Read a duration; a number is one of seconds."""
    value: Any = setting.raw if isinstance(setting.raw, timedelta) else _number_or_string(setting)
    try:
        parse_period(value)
    except ConfigError:
        raise setting.error(f"expected a duration such as 10m, or a number of seconds, not {setting}") from None
    return value  # type: ignore[no-any-return]  # checked above


# ---- checks of Python values -----------------------------------------------------------------------------------------


def check_quotas_by(what: str) -> Callable[[object], str | None]:
    """Check the quotas of each unit or task type."""

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
        if not isinstance(quota, int) or isinstance(quota, bool) or not 1 <= quota <= MAX_INTEGER:
            return f"{name}.{period}: expected an integer of at least 1, not {quota!r}"
    return None


def share_of(value: object) -> Fraction:
    """Read a share, such as 0.2 or 20%."""
    text = str(value).strip()
    return Fraction(text.removesuffix("%")) / 100 if text.endswith("%") else Fraction(text)


def check_reserved(shares: object) -> str | None:
    """Check the share of each priority."""
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


def check_store(value: object) -> str | None:
    """Check the form of a path or URL."""
    if isinstance(value, (str, Path)) and str(value).strip():
        return None
    return (
        f"expected the path of a file such as data/rate_limits.db, or a store URL such as redis://host, not {value!r}"
    )


def check_optional_path(value: object) -> str | None:
    """Check a path."""
    return None if value is None or isinstance(value, (str, Path)) else f"expected a path, not {value!r}"


def check_schedule(value: object) -> str | None:
    """Check that there are rules."""
    return None if isinstance(value, (tuple, list)) else f"expected a list of rules, not {value!r}"
