"""Builds the policies of a budget from its tiers, and chooses those that apply now."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from tidegate._policy import Policy
from tidegate._runtime.suggestions import hint
from tidegate.budget._settings.tiers import SHORT_TERM, SLOTS_UNIT
from tidegate.budget._storage.sqlite import POLICY_PREFIX
from tidegate.core._bounds import MAX_INTEGER, SECOND
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidegate._policy.model import OnStoreError
    from tidegate.budget._settings.model import BudgetSettings
    from tidegate.budget._settings.tiers import TierPlan
    from tidegate.core._limit import Limit

LOAD_CHECK_INTERVAL: Final = SECOND  # how often the load is read
# How the guarded store answers while the database is lost. Calls that it allows are then decided in memory.
STORE_ERROR_MODES: Final = {"short-term": "allow", "local": "local", "deny": "deny"}


class TierPolicy(NamedTuple):
    """The policy of a budget at certain quotas, and its variants.

    `unlimited` uses the same states and denies nothing: completed tasks count even if they exceed a quota.
    `short_term` has only the limits per minute and per hour, which are enforced while the database is unavailable.
    """

    policy: Policy
    unlimited: Policy
    short_term: Policy | None
    short_term_unlimited: Policy | None
    short_term_indexes: tuple[int, ...]  # of the limits of `short_term` in `policy`
    units: frozenset[str]
    slots: int  # how many tasks may run at the same time; 0: any number

    def costs(self, charges: Mapping[str, int]) -> tuple[int, ...]:
        """Return the cost at each limit, from charges by unit. Slots are not included."""
        return tuple(charges.get(limit.unit, 0) for limit in self.policy.limits)

    def reservation_cost(self, charges: Mapping[str, int], tasks: int) -> dict[str, int]:
        """Return the charges in units that a limit counts, and the slots of these tasks.

        A batch with more tasks than there are slots takes all slots.
        """
        cost = {unit: amount for unit, amount in charges.items() if unit in self.units}
        if self.slots:
            cost[SLOTS_UNIT] = min(tasks, self.slots)
        return cost

    def short_term_costs(self, costs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the costs at the short-term limits."""
        return tuple(costs[index] for index in self.short_term_indexes)


class TierPolicies:
    """Builds the policy for the quotas that apply now, and caches it: stores recognise limits by identity."""

    def __init__(self, settings: BudgetSettings, plan: TierPlan, load: Callable[[], float] | None) -> None:
        """Build policies from this plan; `load` returns the system load, from 0 to 1."""
        self._plan = plan
        self._schedule = settings.schedule
        self._zone = settings.timezone
        if load is None and (rule := next((each for each in settings.schedule if each.load_above is not None), None)):
            raise ConfigError(
                f"the rule {rule.name!r} has load_above, but the budget has no function that returns the load: pass "
                "load=, a function that returns it as a number from 0 to 1",
                field="schedule",
            )
        self._load = load or idle
        self._last_load: tuple[float, int | None] = (0.0, None)
        self._name = POLICY_PREFIX + settings.name
        self._on_store_error = cast("OnStoreError", STORE_ERROR_MODES[settings.on_store_error])
        self._built: dict[tuple[int, ...], TierPolicy] = {}
        self._base_quotas = {tier.name: tier.quota for tier in plan.tiers}
        plan.check_shares()
        for rule in settings.schedule:
            if unknown := sorted(set(rule.limits) - set(self._base_quotas)):
                raise ConfigError(
                    f"the rule {rule.name!r} changes the tier {unknown[0]!r}, which does not exist: the budget has "
                    f"{', '.join(sorted(self._base_quotas))}{hint(unknown[0], self._base_quotas)}",
                    field="schedule",
                )
        self._fixed = None if settings.schedule else self._for_quotas(self._base_quotas)

    def current(self, now: int, steady: int) -> TierPolicy:
        """Return the policy of an instant (microseconds), after the rules of the schedule in their order."""
        if self._fixed is not None:
            return self._fixed
        quotas = dict(self._base_quotas)
        load = self._current_load(steady)
        for rule in self._schedule:
            if rule.applies(now, self._zone, load):
                rule.change(quotas)
        return self._for_quotas(quotas)

    def _current_load(self, steady: int) -> float:
        load, read_at = self._last_load
        if read_at is None or not 0 <= steady - read_at < LOAD_CHECK_INTERVAL:
            load = self._load()
            self._last_load = load, steady
        return load

    def _for_quotas(self, quotas: Mapping[str, int]) -> TierPolicy:
        key = tuple(quotas[tier.name] for tier in self._plan.tiers)
        found = self._built.get(key)
        if found is None:
            found = self._built[key] = self._build(self._plan.limits(quotas))
        return found

    def _build(self, limits: tuple[Limit, ...]) -> TierPolicy:
        policy = Policy(self._name, limits, on_store_error=self._on_store_error)
        indexes = tuple(index for index, limit in enumerate(limits) if period_of(limit.name) in SHORT_TERM)
        short_term = tuple(limits[index] for index in indexes)
        return TierPolicy(
            policy,
            Policy(self._name, without_quotas(limits), on_store_error=self._on_store_error),
            Policy(self._name, short_term) if short_term else None,
            Policy(self._name, without_quotas(short_term)) if short_term else None,
            indexes,
            frozenset(limit.unit for limit in limits),
            next((limit.quota for limit in limits if limit.unit == SLOTS_UNIT), 0),
        )


def without_quotas(limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """Return limits that use the same states and deny nothing."""
    return tuple(replace(limit, quota=MAX_INTEGER, burst=0) for limit in limits)


def idle() -> float:
    """Return the load that budgets without a rule for it assume."""
    return 0.0


def period_of(limit: str) -> str:
    """Return the period in the name of a limit: `day` for `day:tokens<1`."""
    return limit.partition("<")[0].partition(":")[0]
