"""On what terms permits are held ahead of their use: for how long, under which limits, and how many. Pure.

A permit is charged when it is taken from the store, at g, and used by a process at some u with g <= u < g + L. So what
is used within [s, e] was charged within (s - L, e], and the store must be asked a little less than the limit allows:

token_bucket     burst' = burst - ceil(rate * L). Charged in (s - L, e]: at most burst' + rate * (e - s + L), which is
                 no more than burst + rate * (e - s).
sliding_log      period' = period + L. What is used in a rolling period was charged in a rolling period'.
fixed_window, calendar_window, sliding_window
                 the limit itself: no lease outlasts the window that it was charged to. (The weight of the previous
                 window only falls until then.)
concurrency      not leased: a slot is held, not used.

Unused permits go back as `adjust` at the instant of their charge, which leaves the store as if they had never been
taken. Hence what is left to count are those that were used, and the lines above speak of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import MAX_DURATION, MAX_INTEGER, SECOND, ceil_div
from tidegate.errors import ConfigError
from tidegate.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.algorithms import View
    from tidegate.core.limit import Limit

MIN_QUOTA: Final = 20  # a limit of fewer permits is not worth sharing out
MIN_DURATION: Final = 1000  # microseconds: a lease that a round trip may outlast is none
DRIFT_DIVISOR: Final = 1000  # a lease ends by this part early, since no two clocks run at quite the same rate


@dataclass(frozen=True, slots=True)
class Lease:
    """How a process may take permits ahead.

    `seconds` is the longest that a permit may be held before it is used. By default a second, or a twentieth of what
    the shortest limit lasts (its period, or the time its burst takes to refill) where that is less; when given, it is
    cut to half of that. All processes that share a limit should hold for the same time.

    A share is at most one `spread`-th of what the store has left, so that other processes find some. At most `max_keys`
    keys of a policy have one; further keys ask the store for each call.
    """

    seconds: float | None = None
    spread: int = 4
    max_keys: int = 10_000

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        seconds = self.seconds
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (number and 0 < seconds <= MAX_DURATION // SECOND):
            raise ConfigError(f"must be a number of seconds above 0, or None, not {seconds!r}", field="lease.seconds")
        for name, value in (("spread", self.spread), ("max_keys", self.max_keys)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_INTEGER:
                raise ConfigError(f"must be a whole number from 1, not {value!r}", field=f"lease.{name}")


def read_lease(lease: bool | float | Lease | None) -> Lease | None:  # noqa: FBT001 - as people write it: lease=True
    """Take a lease in any of the forms people give one: True, seconds, or a Lease; None and False mean none."""
    if lease is None or lease is False:
        return None
    if lease is True:
        return Lease()
    return lease if isinstance(lease, Lease) else Lease(seconds=lease)


class LeaseTerms(NamedTuple):
    """What a policy is asked as (`strict`), and how many microseconds a lease under it lasts; 0: it is not leased."""

    strict: Policy
    length: int


def terms(policy: Policy, lease: Lease) -> LeaseTerms:
    """Work out the terms of a policy."""
    limits = policy.limits
    if any(limit.algorithm == "concurrency" or limit.burst < MIN_QUOTA for limit in limits):
        return LeaseTerms(policy, 0)
    lasts = min(_lasts(limit) for limit in limits)
    length = min(SECOND, lasts // 20) if lease.seconds is None else min(round(lease.seconds * SECOND), lasts // 2)
    if length < MIN_DURATION or max(limit.length for limit in limits) > MAX_DURATION - length:
        return LeaseTerms(policy, 0)
    stricter = tuple(strict(limit, length) for limit in limits)
    if stricter == limits:
        return LeaseTerms(policy, length)
    return LeaseTerms(Policy(policy.name, stricter, policy.mode, policy.on_store_error), length)


def _lasts(limit: Limit) -> int:
    return limit.burst * limit.length // limit.quota


def strict(limit: Limit, length: int) -> Limit:
    """Give the limit that the store is asked, so that what it grants may be used up to `length` later."""
    if limit.algorithm == "token_bucket":
        return replace(limit, burst=limit.burst - ceil_div(limit.quota * length, limit.length))
    if limit.algorithm == "sliding_log":
        return replace(limit, period=timedelta(microseconds=limit.length + length))
    return limit


def span(limits: Sequence[Limit], costs: Sequence[int], views: Sequence[View], length: int) -> int:
    """Tell for how long after its charge a share may be used: no window that was charged may end before."""
    for limit, cost, (_, _, reset) in zip(limits, costs, views, strict=True):
        if cost and limit.algorithm in ("fixed_window", "calendar_window"):
            length = min(length, reset)
        elif cost and limit.algorithm == "sliding_window":
            length = min(length, reset - limit.length)
    return length - ceil_div(length, DRIFT_DIVISOR)
