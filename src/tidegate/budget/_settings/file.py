"""Reads settings from a YAML file, or from a mapping of the same shape. Errors name the file, line and field.

tiers: {minute: 20, hour: 100, day: 500, week: 2000, month: 7500}
concurrency: 5
strategy: rolling                 # or fixed, with timezone: Europe/Berlin
store: data/rate_limits.db      # or redis://…, postgresql://…
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

import os
from typing import TYPE_CHECKING, Any, Final

from tidegate._policy.config_value import ConfigValue, load
from tidegate._policy.setting_values import expand_variables
from tidegate._runtime.suggestions import hint
from tidegate.budget._settings.model import SETTINGS, problems
from tidegate.budget._settings.tiers import PERIODS
from tidegate.budget._settings.values import read_quotas

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TIERS: Final = "tiers"  # holds the settings per_minute, per_hour, …
FIELDS: Final = (TIERS, *(name for name in SETTINGS if not name.startswith("per_")))


def read_config(source: str | Path | Mapping[str, object]) -> dict[str, Any]:
    """Read settings, and return them as keyword arguments of BudgetSettings."""
    section = load(source).fields(*FIELDS)
    values: dict[str, Any] = {}
    for name, given in section.items():
        found = expand_variables(given, os.environ)
        if name == TIERS:
            values |= {f"per_{period}": quota for period, quota in read_quotas(found).items()}
            continue
        target = name.removesuffix("_file") if SETTINGS[name].in_file else name
        if target != name and target in section:
            raise found.error(f"cannot be combined with {target}: remove one of them")
        values[target] = SETTINGS[name].read(found)
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
