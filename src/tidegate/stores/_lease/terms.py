"""The terms of a lease: how long it lasts, and the stricter limits that the store applies. Pure functions.

The store charges a permit at g, and a process uses it at some u with g <= u < g + L. So permits used within [s, e] were
charged within (s - L, e], and the store must apply a stricter limit:

token_bucket     burst' = burst - ceil(rate * L). Charged in (s - L, e]: at most burst' + rate * (e - s + L), which is
                 no more than burst + rate * (e - s).
sliding_log      period' = period + L. Permits used in a rolling period were charged in a rolling period'.
fixed_window, calendar_window, sliding_window
                 the limit itself: a lease ends no later than the window that it was charged to. (Until then, the
                 weight of the previous window only falls.)
concurrency      not leased: slots are held, not used up.

Unused permits are returned with `adjust` at the time of their charge, which leaves the store as if they had never been
charged. So only used permits count, and the proof above is about those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._bounds import MAX_DURATION, MAX_INTEGER, SECOND, ceil_div
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy import Policy
    from tidegate.core._algorithms import View
    from tidegate.core._limit import Limit

MIN_QUOTA: Final = 20  # limits of fewer permits are not leased
MIN_DURATION: Final = 1000  # microseconds; a shorter lease could end before the store's reply arrives
DRIFT_DIVISOR: Final = 1000  # a lease ends earlier by 1/1000, since clocks drift


@dataclass(frozen=True, slots=True)
class Lease:
    """Options of leases: how a process takes permits in advance.

    `seconds` is the longest time between charging a permit and using it. The default is one second, or a twentieth of
    the policy's shortest limit (its period, or the time in which its burst refills) if that is less. A given value is
    reduced to half of the shortest limit if it is longer. All processes that share a limit should use the same value.

    A share is at most 1/`spread` of the permits left in the store, so that other processes can get some. At most
    `max_keys` keys of a policy have a lease; calls for further keys ask the store each time.
    """

    seconds: float | None = None
    spread: int = 4
    max_keys: int = 10_000

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is invalid."""
        seconds = self.seconds
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (number and 0 < seconds <= MAX_DURATION // SECOND):
            raise ConfigError(
                f"must be a number of seconds greater than 0, or None, not {seconds!r}", field="lease.seconds"
            )
        for name, value in (("spread", self.spread), ("max_keys", self.max_keys)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_INTEGER:
                raise ConfigError(f"must be an integer of at least 1, not {value!r}", field=f"lease.{name}")


def read_lease(lease: bool | float | Lease | None) -> Lease | None:  # noqa: FBT001 - the value of `lease=`
    """Return the Lease that `lease=` means: True, seconds, or a Lease; None for None and False."""
    if lease is None or lease is False:
        return None
    if lease is True:
        return Lease()
    return lease if isinstance(lease, Lease) else Lease(seconds=lease)


class LeaseTerms(NamedTuple):
    """The stricter policy that the store applies, and the length of a lease in microseconds; 0: not leased."""

    strict: Policy
    length: int


def compute_terms(policy: Policy, lease: Lease) -> LeaseTerms:
    """Compute the terms of a policy."""
    limits = policy.limits
    if any(not limit.rules.leasable or limit.burst < MIN_QUOTA for limit in limits):
        return LeaseTerms(policy, 0)
    shortest = min(_refill_time(limit) for limit in limits)
    length = min(SECOND, shortest // 20) if lease.seconds is None else min(round(lease.seconds * SECOND), shortest // 2)
    if length < MIN_DURATION or max(limit.length for limit in limits) > MAX_DURATION - length:
        return LeaseTerms(policy, 0)
    stricter = tuple(make_stricter(limit, length) for limit in limits)
    if stricter == limits:
        return LeaseTerms(policy, length)
    return LeaseTerms(policy.with_limits(stricter), length)


def _refill_time(limit: Limit) -> int:
    return limit.burst * limit.length // limit.quota


def make_stricter(limit: Limit, length: int) -> Limit:
    """Return the stricter limit for the store, so that its permits may be used up to `length` microseconds later."""
    if limit.rules.refills:
        return replace(limit, burst=limit.burst - ceil_div(limit.quota * length, limit.length))
    if limit.rules.rolling:
        return replace(limit, period=timedelta(microseconds=limit.length + length))
    return limit


def share_lifetime(limits: Sequence[Limit], costs: Sequence[int], views: Sequence[View], length: int) -> int:
    """Return how many microseconds after its charge a share may be used: it ends with the first charged window."""
    for limit, cost, (_, _, reset) in zip(limits, costs, views, strict=True):
        if cost and limit.rules.windowed:
            length = min(length, reset)
        elif cost and limit.rules.weighted:
            length = min(length, reset - limit.length)
    return length - ceil_div(length, DRIFT_DIVISOR)
