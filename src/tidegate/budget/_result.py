"""The result of a check, and how it is built from a decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

from tidegate._limiter.limiter import Usage
from tidegate._limiter.limiter import usage_of as limiter_usage_of
from tidegate.budget._settings.tiers import CONCURRENCY, TASKS_UNIT, is_tier, tier_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.core._decision import Decision

__all__ = ["BudgetHealth", "DatabaseHealth", "RateLimitResult", "Usage"]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class DatabaseHealth(TypedDict):
    """The state of the database of a budget. `connected` is None if the budget is disabled."""

    connected: bool | None
    losses: NotRequired[int]  # how often it became unavailable
    waiting: NotRequired[int]  # settlements that are queued for it
    on_error: NotRequired[str]


class BudgetHealth(TypedDict):
    """The state of a budget, for a health endpoint."""

    status: Literal["ok", "limited", "degraded", "disabled"]
    database: DatabaseHealth
    exhausted: NotRequired[list[str]]  # the tiers that have nothing left
    tiers: dict[str, dict[str, object]]  # the fields of Usage, by tier


@dataclass(frozen=True)
class RateLimitResult:
    """Whether a batch may be processed, and the usage of every tier including it; truthy if it is allowed.

    `tier` is the tier that denied the batch (of several, the one with the longest wait); `exceeded` are all tiers that
    did. `wait` is the number of seconds after which the same batch would be allowed: 0.0 if it is, None if never, or if
    only `concurrency` denied it: nobody knows when a running task ends. `fits` is how many tasks of the batch would be
    allowed now.
    `reset_times` are the times at which each tier will be completely unused.
    """

    allowed: bool
    task_count: int
    tier: str | None = None
    exceeded: tuple[str, ...] = ()
    usage: Mapping[str, Usage] = field(default_factory=dict)
    wait: float | None = 0.0
    at: datetime = EPOCH
    local: bool = False  # decided without the database, which was unavailable
    fits: int = 0
    cost: Mapping[str, int] = field(default_factory=dict)  # the estimate that was given
    reserved: tuple[int, int] | None = None  # how much of `tier` is kept for priorities from which one on
    batch: object = field(default=None, repr=False, compare=False)  # the open batch, for `result=` of a record

    def __bool__(self) -> bool:
        """Return whether the batch may be processed."""
        return self.allowed

    @property
    def retry_after(self) -> float | None:
        """Alias of `wait`, with the name that Decision uses."""
        return self.wait

    @property
    def violated(self) -> tuple[str, ...]:
        """Alias of `exceeded`, with the name that Decision uses."""
        return self.exceeded

    @property
    def current_usage(self) -> dict[str, int]:
        """How much of each tier is used, including reservations."""
        return {name: usage.used for name, usage in self.usage.items()}

    @property
    def limits(self) -> dict[str, int]:
        """How much each tier allows."""
        return {name: usage.quota for name, usage in self.usage.items()}

    @property
    def remaining(self) -> dict[str, int]:
        """How much of each tier is left."""
        return {name: usage.remaining for name, usage in self.usage.items()}

    @property
    def reset_times(self) -> dict[str, datetime]:
        """When each tier will be completely unused."""
        return {name: self.at + timedelta(seconds=usage.reset_after) for name, usage in self.usage.items()}

    @property
    def reason(self) -> str:
        """The result as a sentence, for logs and errors."""
        one = self.task_count == 1
        tasks = "1 task" if one else f"{self.task_count} tasks"
        if self.allowed:
            return f"{tasks} may be processed"
        usage = self.usage.get(self.tier or "")
        if self.tier is None or usage is None:
            when = "" if self.wait is None else f", try again in {self.wait:.3f} s"
            return f"the database is unavailable: {tasks} must wait{when}"
        if self.tier == CONCURRENCY:
            running = f"{usage.used} of {usage.quota} tasks are running"
            return f"{running}: {tasks} must wait until a running task ends"
        unit = usage.unit.partition(":")[0]
        period = self.tier if unit == TASKS_UNIT else self.tier.partition(":")[0]
        what = f"{usage.used} of {usage.quota} {unit} per {period} are used"
        if self.reserved is not None:
            kept, priority = self.reserved
            what = f"{what}, and {kept} are reserved for priority {priority} and above"
        if unit != TASKS_UNIT:
            tasks = f"{tasks} for {self.cost.get(unit, 0)} {unit}"
        if self.wait is None:
            return f"{what}: {tasks} {'is' if one else 'are'} more than the limit can ever allow"
        return f"{what}: {tasks} must wait, try again in {self.wait:.3f} s"


def instant(microseconds: int) -> datetime:
    """Convert an instant of the core, in microseconds since 1970."""
    return EPOCH + timedelta(microseconds=microseconds)


def usage_of(decision: Decision) -> dict[str, Usage]:
    """Read the usage of each tier from a decision."""
    return {name: usage for name, usage in limiter_usage_of(decision).items() if is_tier(name)}


def result_of(
    decision: Decision,
    tasks: int,
    usage: Mapping[str, Usage],
    *,
    by_tiers: bool,
    costs: tuple[int, ...],
    **more: object,
) -> RateLimitResult:
    """Build the result of a check; a decision that was not made by the tiers names none of them.

    `costs` is what the batch costs at each limit of the decision.
    """
    if decision.allowed or not by_tiers:
        fits = tasks if decision.allowed else 0
        wait, at = decision.retry_after, instant(decision.at)
        return RateLimitResult(decision.allowed, tasks, usage=usage, wait=wait, at=at, fits=fits, **more)  # type: ignore[arg-type]  # the remaining fields
    denied_by = [limit for limit in decision.limits if not limit.allowed]
    # The lease of a slot ends after `batch_ttl`, but its task long before that: the wait for a slot is unknown.
    known = [limit for limit in denied_by if limit.name != CONCURRENCY]
    longest = max(
        known or denied_by, key=lambda limit: float("inf") if limit.retry_after is None else limit.retry_after
    )
    tier = tier_of(longest.name)
    reserved = None
    if not is_tier(longest.name):
        reserved = usage[tier].quota - longest.quota, int(longest.name.partition("<")[2])
    return RateLimitResult(
        allowed=False,
        task_count=tasks,
        tier=tier,
        exceeded=tuple(dict.fromkeys(tier_of(limit.name) for limit in denied_by)),
        usage=usage,
        wait=longest.retry_after if known else None,
        at=instant(decision.at),
        fits=count_fitting(decision, tasks, costs),
        reserved=reserved,
        **more,  # type: ignore[arg-type]  # the remaining fields
    )


def count_fitting(decision: Decision, tasks: int, costs: tuple[int, ...]) -> int:
    """Return how many tasks of a denied batch would be allowed now, each at an equal share of the cost."""
    fits = tasks
    for limit, cost in zip(decision.limits, costs, strict=True):
        if limit.remaining < cost:
            fits = min(fits, limit.remaining if limit.name == CONCURRENCY else limit.remaining * tasks // cost)
    return max(0, fits)
