"""Client leases: permits that a client takes in advance and uses for a while without a request, within all limits.

A permit is charged when it is leased and used later. What has to be prevented depends on the algorithm:

token_bucket       The bucket refills while a permit is unused, so another client could take the permit again. So leased
                   permits expire at the rate of the refill: after t seconds, `decay` * t of them have expired.
                   Of n leased at a, at most n - rate * (s - a) are used from s on. All leased from a to e are at most
                   burst + rate * (e - a), so all clients use at most burst + rate * (e - s) from s to e.
fixed_window,      A permit used after its window would count in no window. So a lease ends with the window.
calendar_window
sliding_log,       A charge expires one period after the lease, but the permit may have been used later than the charge;
sliding_window,    a client that has crashed cannot report when. So there are no leases: each call needs a request, and
concurrency        `seconds` is 0. The same applies to slots, policies in shadow mode, costs by unit, and an unavailable
                   store.

The client settles a lease by `commit`, with the number of permits that have to stay charged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._bounds import SECOND
from tidegate.core._decision import LocalDecision

if TYPE_CHECKING:
    from tidegate._policy import Cost, Policy
    from tidegate.core._decision import Decision

MAX_LEASE_SECONDS: Final = 60.0  # seconds
MAX_LEASE_PERMITS: Final = 100_000  # permits
BURST_DIVISOR: Final = 4  # a lease takes at most a quarter of a burst
SETTLE_GRACE: Final = 60.0  # seconds after its end within which a lease can be settled


class GrantedLease(NamedTuple):
    """A lease: `permits` that may be used for `seconds`, of which `decay` expire per second; `id` settles it."""

    decision: Decision | None
    id: str | None
    permits: int
    seconds: float
    decay: float


def can_lease(policy: Policy, cost: Cost) -> bool:
    """Return whether permits of a policy can be leased at all."""
    plain = cost.__class__ is int and cost
    return (
        bool(plain)
        and policy.mode == "enforce"
        and all(limit.rules.refills or limit.rules.windowed for limit in policy.limits)
    )


def lease_terms(policy: Policy, decision: Decision, duration: float) -> tuple[float, float]:
    """Return for how many seconds the permits may be used, and how many of them expire per second."""
    seconds, decay = duration, 0.0
    for limit, one, (_, _, reset) in zip(policy.limits, policy.one, decision.views, strict=True):
        if limit.rules.windowed:
            seconds = min(seconds, reset / SECOND)
        elif one:
            decay = max(decay, limit.rate * SECOND / limit.scale)
    return seconds, decay


def was_charged(decision: Decision) -> bool:
    """Return whether the store has charged the call: not if it denied the call or was unavailable."""
    return decision.within_limits and not isinstance(decision, LocalDecision)
