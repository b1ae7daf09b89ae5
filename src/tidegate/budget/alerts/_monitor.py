"""What a budget reports: counters for metrics, log lines, and warnings for a webhook.

A milestone (50, 80, 95 % of a tier) is reported once, and again only after usage has fallen to three quarters of it, so
a rolling window that stays around a milestone does not report it every minute. A new fixed window reports all
milestones again. Denials by a tier are reported when they start.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.fork import fork_safe
from tidegate.budget._settings.tiers import CONCURRENCY
from tidegate.observe._histogram import Histogram
from tidegate.spending._milestones import Milestones

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from tidegate.budget._result import RateLimitResult, Usage

    SendWarning = Callable[[dict[str, Any]], None]

log: logging.Logger = logging.getLogger("tidegate.budget")

# In microseconds.
DURATION_BUCKETS: Final = (100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)
FALLBACK_DESCRIPTIONS: Final = {
    "short-term": "until it is available again, only the limits per minute and hour, and concurrency, are enforced, in "
    "memory",
    "local": "until it is available again, this process uses its local share of the limits",
    "deny": "until it is available again, every check is denied",
}


class BudgetMonitor:
    """Counts, logs and sends warnings. `send_warning` must not block."""

    def __init__(
        self,
        name: str,
        milestones: tuple[int, ...],
        send_warning: SendWarning | None,
        *,
        fixed: bool,
        on_store_error: str,
    ) -> None:
        """Report about the budget of this name; `fixed` if its windows are fixed."""
        self.name = name
        self.exceeded: dict[str, int] = {}
        self.checks: Histogram = Histogram(DURATION_BUCKETS)
        self.records: Histogram = Histogram(DURATION_BUCKETS)
        self.recorded: int = 0
        self.returned: int = 0
        self._on_store_error = on_store_error
        self._milestones = Milestones(milestones, fixed=fixed)
        self._denying: set[str] = set()
        self._lost = False
        self._send_warning = send_warning
        self._lock = fork_safe(threading.Lock())

    def record_check(self, result: RateLimitResult, microseconds: int | None) -> None:
        """Count a check, and its duration unless it waited."""
        with self._lock:
            if microseconds is not None:
                self.checks.add(microseconds)
            for tier in result.exceeded:
                self.exceeded[tier] = self.exceeded.get(tier, 0) + 1
            started = [tier for tier in result.exceeded if tier not in self._denying]
            self._denying = set(result.exceeded)
        if microseconds is not None:
            outcome = "allowed" if result.allowed else "denied"
            log.debug("checking %d tasks took %.3f ms: %s", result.task_count, microseconds / 1000, outcome)
        self.record_usage(result.usage, result.at)
        if not result.allowed:
            log.log(logging.WARNING if started else logging.DEBUG, "rate limit exceeded: %s", result.reason)
        for tier in started:
            usage = result.usage.get(tier)
            self.warn("limit_exceeded", tier=tier, wait=result.wait, **(usage_fields(usage) if usage else {}))

    def record_usage(self, usages: Mapping[str, Usage], at: datetime) -> None:
        """Report the milestones that the tiers have reached since the last call."""
        counted = {tier: usage for tier, usage in usages.items() if tier != CONCURRENCY}  # full whenever there is work
        with self._lock:
            reached = self._milestones.update(counted, at)
        for tier, milestone in reached:
            self._report_milestone(tier, milestone, usages[tier])

    def _report_milestone(self, tier: str, milestone: int, usage: Usage) -> None:
        level = logging.WARNING if milestone >= self._milestones.percents[-1] else logging.INFO
        log.log(level, "at least %d %% of the tier %s is used: %d of %d", milestone, tier, usage.used, usage.quota)
        self.warn("milestone", tier=tier, milestone=milestone, **usage_fields(usage))

    def record_database(self, *, lost: bool, reason: str | None, waiting: int) -> None:
        """Report when the database becomes unavailable, with the reason, and when it is available again."""
        with self._lock:
            changed, self._lost = lost is not self._lost, lost
        if changed:
            if lost:
                description = FALLBACK_DESCRIPTIONS[self._on_store_error]
                log.error("the database is unavailable: %s; reason: %s", description, reason)
            else:
                log.warning("the database is available again; settlements queued for it: %d", waiting)
            self.warn("database_lost" if lost else "database_restored", waiting=waiting)

    def count_record(self, tasks: int, microseconds: int) -> None:
        """Count how long it took to record tasks."""
        with self._lock:
            self.records.add(microseconds)
        log.debug("recording %d tasks took %.3f ms", tasks, microseconds / 1000)

    def count_settled(self, recorded: int, returned: int) -> None:
        """Count tasks that were recorded, and tasks that were returned."""
        with self._lock:
            self.recorded += recorded
            self.returned += returned

    def warn(self, event: str, **fields: object) -> None:
        """Send a warning to the webhook, if there is one."""
        if self._send_warning is not None:
            self._send_warning({"event": event, "budget": self.name, **fields})


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return the fields of a warning that describe the usage of a tier."""
    return {"used": usage.used, "quota": usage.quota, "unit": usage.unit, "reset_after": usage.reset_after}
