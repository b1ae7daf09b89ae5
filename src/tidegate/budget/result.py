"""What a budget answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tidegate.budget.tiers import is_shown, tier_of
from tidegate.limiter import Usage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.core.decision import Decision

__all__ = ["RateLimitResult", "Usage"]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class RateLimitResult:
    """Whether a batch may be processed, and how every tier stands with it counted in; true when it may.

    `tier` is the tier that said no (of several, the one that keeps the batch waiting longest), `exceeded` are all that
    did. `wait` tells after how many seconds the same batch would be allowed: 0.0 if it is, None if it never will be.
    `reset_times` tell when each tier will be as if nothing had been used.
    """

    allowed: bool
    task_count: int
    tier: str | None = None
    exceeded: tuple[str, ...] = ()
    usage: Mapping[str, Usage] = field(default_factory=dict)
    wait: float | None = 0.0
    at: datetime = EPOCH
    local: bool = False  # decided without the database, which could not be asked
    batch: Any = field(default=None, repr=False, compare=False)  # what was reserved

    def __bool__(self) -> bool:
        """Tell whether the batch may be processed."""
        return self.allowed

    @property
    def retry_after(self) -> float | None:
        """The same as `wait`, as a Decision calls it."""
        return self.wait

    @property
    def violated(self) -> tuple[str, ...]:
        """The same as `exceeded`, as a Decision calls it."""
        return self.exceeded

    @property
    def current_usage(self) -> dict[str, int]:
        """How much of each tier is used, what is reserved included."""
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
        """When each tier will be as if nothing had been used."""
        return {name: self.at + timedelta(seconds=usage.reset_after) for name, usage in self.usage.items()}

    @property
    def reason(self) -> str:
        """Say in words what the answer was."""
        if self.allowed:
            return f"{self.task_count} tasks may be processed"
        usage = self.usage.get(self.tier or "")
        if self.tier is None or usage is None:
            when = "" if self.wait is None else f", try again in {self.wait:.3f} s"
            return f"the database cannot be asked: {self.task_count} tasks must wait{when}"
        what = f"{usage.used} of {usage.quota} {usage.unit.partition(':')[0]} per {self.tier} are used"
        if self.tier == "concurrency":
            what = f"{usage.used} of {usage.quota} tasks are under way"
        when = "more than can ever fit" if self.wait is None else f"try again in {self.wait:.3f} s"
        return f"{what}: {self.task_count} tasks must wait, {when}"


def instant(microseconds: int) -> datetime:
    """Read an instant of the core."""
    return EPOCH + timedelta(microseconds=microseconds)


def usage_of(decision: Decision) -> dict[str, Usage]:
    """Read how much of each tier is used."""
    return {
        said.name: Usage(said.quota, said.limit.burst - said.remaining, said.remaining, said.reset_after, said.unit)
        for said in decision.limits
        if is_shown(said.name)
    }


def result_of(
    decision: Decision, tasks: int, usage: Mapping[str, Usage], *, by_tiers: bool, **more: object
) -> RateLimitResult:
    """Read a decision on a batch; one that was not made by the tiers names none."""
    asked = decision.limits if by_tiers and not decision.allowed else ()
    refused = [said for said in asked if not said.allowed]
    never = float("inf")
    longest = max(refused, key=lambda said: never if said.retry_after is None else said.retry_after, default=None)
    return RateLimitResult(
        decision.allowed,
        tasks,
        None if longest is None else tier_of(longest.name),
        tuple(dict.fromkeys(tier_of(said.name) for said in refused)),
        usage,
        decision.retry_after,
        instant(decision.at),
        **more,  # type: ignore[arg-type]  # the fields that are left
    )
