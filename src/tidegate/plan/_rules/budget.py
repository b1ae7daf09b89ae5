"""Replays tasks against a budget: its tiers decide about each request, or each row of a usage log, as one batch.

A request costs a task, or as many as its column `cost` says; tokens and money are charged to the tiers that count them.
The task type is the model or the policy of the row, if the budget has that type.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Final

from tidegate.budget import BudgetSettings, TaskBudget
from tidegate.budget._operations import KEY
from tidegate.budget._settings.file import read_config
from tidegate.errors import ConfigError, Denied
from tidegate.plan._rules.base import Outcome, PolicyDecision
from tidegate.plan._rules.endpoints import endpoint_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tidegate._limiter.limiter import Limiter
    from tidegate._limiter.reservation import Reservation
    from tidegate._policy import Cost
    from tidegate.core._limit import Limit
    from tidegate.plan._clock import ReplayClock
    from tidegate.plan._logs.batch import LogSender, LogSubject

SLOT_SECONDS: Final = 35 * 86_400.0  # the reservation of a task that takes longer is not corrected


class BudgetRules:
    """The tiers of a task budget, which all clients share."""

    def __init__(
        self, source: str | Path | Mapping[str, object], clock: ReplayClock, *, has_durations: bool = True
    ) -> None:
        """Open the budget of a file in memory: nothing is read from its store, and nothing is sent."""
        self.clock: ReplayClock = clock
        settings = BudgetSettings(**read_config(source))
        self.budget: TaskBudget = TaskBudget(
            replace(settings, store="memory://", ledger=None, webhook=None, enabled=True), clock=clock, load=lambda: 0.0
        )
        self.policy: str = settings.name
        limits = self.budget.operations.refresh_policy().policy.limits
        if not has_durations and any(limit.rules.holds_slots for limit in limits):
            raise ConfigError("a limit of concurrent tasks can only be replayed from a log with durations")
        self.limits: Mapping[str, tuple[Limit, ...]] = {self.policy: limits}
        self.patterns: dict[str, list[str]] = {}
        self.notes: list[str] = ["every task is completed; tiers that depend on the system load are as without load"]
        self._open: list[tuple[int, int, Reservation]] = []
        self._order = count()

    @property
    def due(self) -> int | None:
        """When the next task ends."""
        return self._open[0][0] if self._open else None

    def settle(self) -> None:
        """Free the slots of tasks that have ended."""
        now = self.clock.steady()
        while self._open and self._open[0][0] <= now:
            heapq.heappop(self._open)[2].commit()

    def settle_later(self, reservation: Reservation, duration: int) -> None:
        """Settle a task when it has ended; without a duration, at once."""
        if duration <= 0:
            reservation.commit()
        else:
            heapq.heappush(self._open, (self.clock.steady() + duration, next(self._order), reservation))

    def find_key(self, sender: LogSender) -> str:
        """Return who asked; the budget does not depend on it."""
        return sender.name or "all"

    def name_of(self, key: object) -> str:
        """Return the name of a client."""
        return str(key)

    def find(self, subject: LogSubject) -> BudgetSubject:
        """Return the task type of a request."""
        return BudgetSubject(self, subject)

    def close(self) -> None:
        """Close the budget."""
        self.budget.close()


class BudgetSubject:
    """Tasks of one type."""

    limited = True

    def __init__(self, rules: BudgetRules, subject: LogSubject) -> None:
        """Find the task type."""
        self._rules = rules
        self._limiter: Limiter = rules.budget.operations.limiter  # type: ignore[assignment]  # of a TaskBudget
        self._units = rules.budget.settings.costs.keys()
        types = rules.budget.settings.types
        self._type: str | None = subject.path if not subject.method and subject.path in types else None
        self.policies: tuple[str, ...] = (rules.policy,)
        self.endpoint: str = endpoint_name(*subject, ()) if subject.method else subject.path or rules.policy

    def decide(self, key: object, status: int, duration: int, cost: Cost) -> Outcome:
        """Reserve a batch on all tiers, as `check_all_limits` does."""
        del key, status
        rules, operations = self._rules, self._rules.budget.operations
        tasks = cost if isinstance(cost, int) else 1
        estimate = {} if isinstance(cost, int) else {unit: cost[unit] for unit in cost if unit in self._units}
        tier_policy = operations.refresh_policy()
        charges = operations.plan.charges(tasks, self._type, estimate, 0)
        try:
            reservation = self._limiter.reserve(KEY, tier_policy.reservation_cost(charges, tasks), SLOT_SECONDS)
        except Denied as denied:
            charged = (PolicyDecision(rules.policy, denied.decision),)
            return Outcome(False, charged, charged)  # noqa: FBT003 - as a decision
        rules.settle_later(reservation, duration)
        return Outcome(True, (PolicyDecision(rules.policy, reservation.decision),))  # noqa: FBT003 - as above
