"""`on_store_error: local`: decides by this process's part of a limit, and charges it to the store afterwards.

A part is the quota and burst of the limit times the part of the process, rounded down to permits; there is none if
that is 0. Its usage is kept in memory, also after the outage, until it leaves its window: however often the store is
lost and found again, a process admits at most its part in any period without the store. So all processes together admit
at most one more limit per period.

    limit                            part decided by
    token_bucket                     token_bucket
    fixed_window, sliding_log        sliding_log: at most the part in any period
    calendar_window, sliding_window  the same algorithm
    concurrency                      none, calls are denied: the slots of other processes are unknown
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tidegate._policy import Policy
from tidegate.core._algorithms import NEVER, View
from tidegate.core._bounds import SECOND, ceil_div
from tidegate.core._decision import LocalDecision
from tidegate.errors import ConfigError
from tidegate.stores._outage.process_share import WHOLE_PARTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy import Key
    from tidegate.core._decision import Decision
    from tidegate.core._limit import Limit
    from tidegate.stores._memory.store import MemoryStore

WINDOW_ALGORITHM: Final = "sliding_log"  # counts the part of a limit with fixed windows
MAX_KEYS: Final = 100_000  # keys whose spending is remembered until it is charged; further keys are denied
MAX_CACHED_POLICIES: Final = 1024
LONGER_WINDOW: Final = 4 * 86_400 * SECOND  # by how much a calendar window may be longer than another of its kind


class AskStore(Protocol):
    """Calls the store itself, within its deadline."""

    def __call__(self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], at: int | None = None) -> Decision:
        """Apply a verb at one key."""


class SharePolicy(NamedTuple):
    """This process's part of a policy, as a policy of its own."""

    policy: Policy
    limits: tuple[Limit | None, ...]  # None: there is no part of this limit
    share: Policy | None


@dataclass(slots=True)
class LocalUsage:
    """What was admitted for one key without the store and has not been charged to the store yet."""

    share_policy: SharePolicy
    uncharged: list[int]  # for each limit of the policy
    instants: set[int] = field(default_factory=set)  # of the charges, so that their corrections find them


@lru_cache(MAX_CACHED_POLICIES)
def divide_policy(policy: Policy, part: int) -> SharePolicy:
    """Compute a part of a policy."""
    limits = tuple(divide_limit(limit, part) for limit in policy.limits)
    shared = tuple(limit for limit in limits if limit is not None)
    return SharePolicy(policy, limits, Policy(policy.name, shared) if shared else None)


def divide_limit(limit: Limit, part: int) -> Limit | None:
    """Return a part of a limit; None if that is less than a permit."""
    quota, burst = limit.quota * part // WHOLE_PARTS, limit.burst * part // WHOLE_PARTS
    if not limit.rules.leasable or not quota or not burst:
        return None
    algorithm = WINDOW_ALGORITHM if limit.rules.windowed and limit.calendar is None else limit.algorithm
    try:
        return replace(limit, quota=quota, algorithm=algorithm, burst=burst if limit.rules.refills else 0)
    except ConfigError:
        return None  # the fraction is too small to be counted


def longest_window(policy: Policy, now: int) -> int:
    """Return for how long, at most, a policy remembers a charge made around now."""
    return max((lifetime(limit, now) for limit in policy.limits if limit.rules.leasable), default=0)


def lifetime(limit: Limit, now: int) -> int:
    """Return for how long, at most, a limit remembers a charge made around now."""
    if limit.calendar is not None:
        start, end = limit.calendar.window(now)
        return end - start + LONGER_WINDOW
    if limit.rules.refills:
        return ceil_div(limit.capacity, limit.rate)
    return 2 * limit.length if limit.rules.weighted else limit.length


def has_share(share_policy: SharePolicy, costs: Sequence[int]) -> bool:
    """Return whether there is a part of every limit that is charged."""
    return all(limit is not None or not cost for limit, cost in zip(share_policy.limits, costs, strict=True))


def shared_costs(share_policy: SharePolicy, costs: Sequence[int]) -> tuple[int, ...]:
    """Return the costs for the limits that have a part."""
    return tuple(cost for limit, cost in zip(share_policy.limits, costs, strict=True) if limit is not None)


def share_decision(share_policy: SharePolicy, costs: Sequence[int], decision: Decision, wait: int) -> LocalDecision:
    """Return the decision of the part; a cost above the part may be retried after the outage."""
    shared = iter(decision.views)
    limits, views = [], []
    for original, limit, cost in zip(share_policy.policy.limits, share_policy.limits, costs, strict=True):
        if limit is None:
            limits.append(original)
            views.append(View((0, wait if cost else 0, wait)))
        else:
            remaining, retry, reset = next(shared)
            limits.append(limit)
            views.append(View((remaining, wait if retry == NEVER and cost <= original.burst else retry, reset)))
    return LocalDecision.of_views(decision.at, tuple(limits), views, within_limits=decision.within_limits)


def deny_locally(policy: Policy, costs: Sequence[int], at: int, wait: int) -> LocalDecision:
    """Return a denial for this number of microseconds, or permanent if a cost exceeds the burst of its limit."""
    views: list[View] = [
        View((0, (NEVER if cost > limit.burst else wait) if cost else 0, wait))
        for limit, cost in zip(policy.limits, costs, strict=True)
    ]
    if not any(view.retry for view in views):  # it costs nothing, and is denied with the rest of its batch
        views = [View((0, wait, wait))] * len(views)
    return LocalDecision.of_views(at, policy.limits, views, within_limits=False)


def allow_locally(policy: Policy, costs: Sequence[int], at: int) -> LocalDecision:
    """Return a permit, as from a limit that is unused."""
    views: list[View] = [
        View((max(0, limit.burst - cost), 0, 0)) for limit, cost in zip(policy.limits, costs, strict=True)
    ]
    return LocalDecision.of_views(at, policy.limits, views, within_limits=True)


def read_usage(memory: MemoryStore, key: Key, share_policy: SharePolicy, now: int) -> list[int]:
    """Return how much of each limit was spent here and is still in its window."""
    if share_policy.share is None:
        return [0] * len(share_policy.limits)
    nothing = (0,) * len(share_policy.share.limits)
    used = iter(memory.apply_one("peek", share_policy.share, key, nothing, now).used)
    return [0 if limit is None else next(used) for limit in share_policy.limits]


def charge_store(ask: AskStore, key: Key, policy: Policy, costs: Sequence[int]) -> None:
    """Charge spending to the store as of now, even beyond the limit. If it fails half-way, it may be charged twice."""
    plain = tuple(0 if limit.rules.logged else cost for limit, cost in zip(policy.limits, costs, strict=True))
    if any(plain):
        ask("adjust", policy, key, plain)
    for index, (limit, cost) in enumerate(zip(policy.limits, costs, strict=True)):
        if limit.rules.logged and cost:
            charge_log(ask, policy, key, index, cost)


def charge_log(ask: AskStore, policy: Policy, key: Key, index: int, cost: int) -> None:
    """Charge a log. Only a decision adds an entry: one permit is acquired, and then the cost of that entry is raised.

    If the log is full, the cost of its latest entry is raised.
    """

    def costs_of(number: int) -> tuple[int, ...]:
        return tuple(number if place == index else 0 for place in range(len(policy.limits)))

    entry = ask("acquire", policy, key, costs_of(1))
    rest = cost - entry.within_limits
    if rest:
        ask("adjust", policy, key, costs_of(rest), entry.at if entry.within_limits else None)
