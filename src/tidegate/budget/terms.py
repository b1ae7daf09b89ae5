"""The policies that a budget's tiers become, each made once."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from tidegate.budget.ledger import PREFIX
from tidegate.budget.tiers import SHORT, SLOTS
from tidegate.core.bounds import MAX, SECOND
from tidegate.errors import ConfigError
from tidegate.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidegate.budget.settings import BudgetSettings
    from tidegate.budget.tiers import Plan
    from tidegate.core.limit import Limit
    from tidegate.policy.model import OnStoreError

LOOKED_AT: Final = SECOND  # how often the load is looked at
# What calls get from the guard while the database is lost. Allowed ones are then asked of the limits in memory.
MODES: Final = {"short-term": "allow", "local": "local", "deny": "deny"}


class Terms(NamedTuple):
    """A policy at certain quotas, and what is made of it.

    `vast` keeps the same states and refuses nothing: what was done counts, whether or not there was room. `short` has
    the limits of minutes and hours only, which stay in force in memory while the database is lost.
    """

    policy: Policy
    vast: Policy
    short: Policy | None
    short_vast: Policy | None
    places: tuple[int, ...]  # of the limits of `short` in `policy`
    units: frozenset[str]
    slots: int  # tasks that may be under way; 0: any number

    def costs(self, charges: Mapping[str, int]) -> tuple[int, ...]:
        """Spread charges by unit over the limits; they hold no slots."""
        return tuple(charges.get(limit.unit, 0) for limit in self.policy.limits)

    def known(self, charges: Mapping[str, int], tasks: int) -> dict[str, int]:
        """Keep the charges that a limit counts, and add the slots of so many tasks.

        A batch of more tasks than there are slots works through them in turn.
        """
        known = {unit: amount for unit, amount in charges.items() if unit in self.units}
        if self.slots:
            known[SLOTS] = min(tasks, self.slots)
        return known

    def short_costs(self, costs: tuple[int, ...]) -> tuple[int, ...]:
        """Keep the costs of the short-term limits."""
        return tuple(costs[place] for place in self.places)


class Book:
    """Makes the terms for the quotas of the moment, and remembers them: stores know limits by their identity."""

    def __init__(self, settings: BudgetSettings, plan: Plan, load: Callable[[], float] | None) -> None:
        """Make terms of this plan; `load` tells how busy the system is, from 0 to 1."""
        self._plan = plan
        self._schedule = settings.schedule
        self._zone = settings.timezone
        self._load = load or machine_load
        self._load_seen: tuple[float, int | None] = (0.0, None)
        self._name = PREFIX + settings.name
        self._mode = cast("OnStoreError", MODES[settings.on_database_error])
        self._made: dict[tuple[int, ...], Terms] = {}
        self._usual = {tier.name: tier.quota for tier in plan.tiers}
        plan.check_shares()
        for rule in settings.schedule:
            if unknown := sorted(set(rule.limits) - set(self._usual)):
                raise ConfigError(
                    f"the rule {rule.name!r} changes a tier that is not there: {unknown[0]}", field="schedule"
                )
        self._always = None if settings.schedule else self._terms(self._usual)

    def now(self, now: int, steady: int) -> Terms:
        """Give the terms of an instant (microseconds), by the rules of the schedule in their order."""
        if self._always is not None:
            return self._always
        quotas = dict(self._usual)
        load = self._load_now(steady)
        for rule in self._schedule:
            if rule.applies(now, self._zone, load):
                rule.change(quotas)
        return self._terms(quotas)

    def _load_now(self, steady: int) -> float:
        load, seen = self._load_seen
        if seen is None or not 0 <= steady - seen < LOOKED_AT:
            load = self._load()
            self._load_seen = load, steady
        return load

    def _terms(self, quotas: Mapping[str, int]) -> Terms:
        key = tuple(quotas[tier.name] for tier in self._plan.tiers)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._make(self._plan.limits(quotas))
        return found

    def _make(self, limits: tuple[Limit, ...]) -> Terms:
        policy = Policy(self._name, limits, on_store_error=self._mode)
        places = tuple(i for i, limit in enumerate(limits) if period_of(limit.name) in SHORT)
        short = tuple(limits[place] for place in places)
        return Terms(
            policy,
            Policy(self._name, vast(limits), on_store_error=self._mode),
            Policy(self._name, short) if short else None,
            Policy(self._name, vast(short)) if short else None,
            places,
            frozenset(limit.unit for limit in limits),
            next((limit.quota for limit in limits if limit.unit == SLOTS), 0),
        )


def vast(limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """Give limits that keep the same states and refuse nothing."""
    return tuple(replace(limit, quota=MAX, burst=0) for limit in limits)


def machine_load() -> float:
    """Tell the machine's load of the last minute, for each of its processors."""
    if not hasattr(os, "getloadavg"):
        return 0.0
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def period_of(limit: str) -> str:
    """Name the period of a limit: `day` of `day:tokens<1`."""
    return limit.partition("<")[0].partition(":")[0]
