"""Reloads the limits of a budget while it is in use: the quotas of its tiers, its shares and its schedule.

Usage is kept, as when a schedule changes a quota. The tiers themselves stay the same: batches that are open, and calls
that wait, were built for them. All other settings are used once, when the budget is opened.
"""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from tidegate.budget._settings.model import BudgetSettings
from tidegate.budget._settings.tiers import PERIODS
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.budget._operations import BudgetOperations
    from tidegate.budget._settings.tiers import TierPlan

log: logging.Logger = logging.getLogger("tidegate.budget")

LIMIT_FIELDS: Final = (
    *(f"per_{period}" for period in PERIODS),
    "concurrency",
    "types",
    "costs",
    "reserved",
    "schedule",
)
RESTART_FIELDS: Final = tuple(each.name for each in fields(BudgetSettings) if each.name not in LIMIT_FIELDS)


def reload_limits(operations: BudgetOperations, read: Callable[[], BudgetSettings]) -> bool:
    """Read the settings again, and use their limits; returns whether new limits took effect.

    If the settings are invalid, or have other tiers, an error is logged and the previous limits stay in effect.
    """
    current = operations.settings
    try:
        found = read()
        changed = [name for name in RESTART_FIELDS if getattr(found, name) != getattr(current, name)]
        settings = replace(current, **{name: getattr(found, name) for name in LIMIT_FIELDS})
        adopted = settings != current
        if adopted:
            operations.use_limits(settings, same_tiers(operations.plan, settings.plan))
    except ConfigError as error:
        log.error("reload refused, the previous limits of the budget stay in effect: %s", error)  # noqa: TRY400 - it says where, not a traceback
        return False
    if changed:
        log.warning("changed settings of the budget that need a restart: %s", ", ".join(changed))
    if adopted:
        limits = ", ".join(f"{tier.quota} per {tier.name}" for tier in operations.plan.tiers)
        log.info("new limits of the budget %s are in effect: %s", settings.name, limits)
    return adopted


def same_tiers(current: TierPlan, new: TierPlan) -> TierPlan:
    """Return the new plan with its tiers in the current order; raises ConfigError if it has other tiers."""
    tiers = {tier.name: tier for tier in new.tiers}
    names = [tier.name for tier in current.tiers]
    added, removed = [name for name in tiers if name not in names], [name for name in names if name not in tiers]
    if added or removed:
        changes = [*(f"adds the tier {name}" for name in added), *(f"removes the tier {name}" for name in removed)]
        raise ConfigError(f"the file {', '.join(changes)}: restart the programs that use the budget", field="tiers")
    if [priority for priority, _ in current.reserved] != [priority for priority, _ in new.reserved]:
        message = "the priorities with a share are not the same as before: restart the programs that use the budget"
        raise ConfigError(message, field="reserved")
    return replace(new, tiers=tuple(tiers[name] for name in names))
