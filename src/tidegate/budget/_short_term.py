"""The short-term limits of a budget in memory, which decide while the database is unavailable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.budget._result import usage_of
from tidegate.core._decision import Decision
from tidegate.stores import MemoryStore

if TYPE_CHECKING:
    from tidegate._policy import Key
    from tidegate._runtime.clock import Clock
    from tidegate.budget._result import Usage
    from tidegate.budget._settings.tier_policies import TierPolicy


class ShortTermLimits:
    """The limits per minute and hour, and concurrency. Every charge in the database is also made here."""

    def __init__(self, key: Key, clock: Clock) -> None:
        """Keep the states of this key."""
        self._key = key
        self._clock = clock
        self._store = MemoryStore(clock=clock)

    def charge(self, tier_policy: TierPolicy, costs: tuple[int, ...]) -> int:
        """Charge costs, even beyond a quota; returns the instant of the charge."""
        if tier_policy.short_term_unlimited is None:
            return 0
        costs = tier_policy.short_term_costs(costs)
        return self._store.apply_one("acquire", tier_policy.short_term_unlimited, self._key, costs).at

    def correct(self, tier_policy: TierPolicy, corrections: tuple[int, ...], at: int) -> None:
        """Correct the charge of the instant `at`."""
        if tier_policy.short_term is not None:
            corrections = tier_policy.short_term_costs(corrections)
            self._store.apply_one("adjust", tier_policy.short_term, self._key, corrections, None, at)

    def reserve(self, tier_policy: TierPolicy, costs: tuple[int, ...], tasks: int) -> Decision:
        """Decide on a batch of `tasks` tasks."""
        if tier_policy.short_term is None or not tasks:
            return Decision.of_views(self._clock.ns() // 1000, (), (), within_limits=True)
        costs = tier_policy.short_term_costs(costs)
        return self._store.apply_one("hold", tier_policy.short_term, self._key, costs)

    def usage(self, tier_policy: TierPolicy) -> dict[str, Usage]:
        """Return the usage of each short-term tier."""
        if tier_policy.short_term is None:
            return {}
        no_costs = (0,) * len(tier_policy.short_term_indexes)
        return usage_of(self._store.apply_one("peek", tier_policy.short_term, self._key, no_costs))
