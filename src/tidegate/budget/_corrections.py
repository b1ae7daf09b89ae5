"""Corrections by an operator: refunds at the tiers of a budget, for `tidegate budget add`, `refund` and `reset`.

A correction refunds what a tier counts, the latest tasks first, but never what open batches have reserved: their own
settlements correct that. If it were refunded here too, the settlement of a failed batch would refund tasks of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.budget._operations import KEY
from tidegate.budget._result import usage_of
from tidegate.budget._settings.tiers import CONCURRENCY, is_tier
from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._limiter.limiter import Usage
    from tidegate.budget._budget import TaskBudget
    from tidegate.core._limit import Limit


class TierRefund(NamedTuple):
    """What a correction changed at a tier."""

    wanted: int
    refunded: int
    usage: Usage  # after the correction


def refund(budget: TaskBudget, wanted: Callable[[Limit], int]) -> dict[str, TierRefund]:
    """Refund what is `wanted` at each limit, at most what it counts; returns the tiers at which something was wanted.

    Slots of `concurrency` belong to open batches: they are never refunded. Raises StoreUnavailable if the store does
    not answer; it is not queued.
    """
    operations = budget.operations
    budget.get_current_usage()  # returns the batches of processes that have ended
    if budget.lost:
        raise StoreUnavailable(f"cannot reach the store {budget.settings.shown_store}; nothing was changed")
    policy, now = operations.refresh_policy().policy, operations.given_now()
    amounts = [0 if limit.name == CONCURRENCY else wanted(limit) for limit in policy.limits]
    [before] = operations.store.ask_store("peek", ((policy, KEY, (0,) * len(amounts)),), now)
    open_batches = operations.settlements.list_open(policy)
    refunded = []
    for index, (limit, amount, used) in enumerate(zip(policy.limits, amounts, before.used, strict=True)):
        reserved = sum(costs[index] for at, costs in open_batches if counts(limit, at, before.at))
        refunded.append(max(0, min(amount, used - reserved)))
    [after] = operations.store.ask_store("adjust", ((policy, KEY, tuple(-each for each in refunded)),), now)
    usage = usage_of(after)
    return {
        limit.name: TierRefund(amount, done, usage[limit.name])
        for limit, amount, done in zip(policy.limits, amounts, refunded, strict=True)
        if amount and is_tier(limit.name)
    }


def counts(limit: Limit, at: int, now: int) -> bool:
    """Return whether the window of a limit at `now` includes a charge at `at`."""
    if limit.calendar is not None:
        return at >= limit.calendar.window(now)[0]
    return at > now - limit.length
