"""Permits that a client takes ahead and uses for a while without asking: by which terms no limit is ever exceeded.

A permit is charged when it is taken and used later. What that may do wrong depends on the algorithm:

token_bucket       The charge is refilled while the permit is not used yet, so that others take it a second time. So
                   permits taken ahead decay: after t seconds, `decay` * t of them are void, at the pace of the refill.
                   Of n taken at a, at most n - rate * (s - a) are used from s on; all taken from a to e are at most
                   burst + rate * (e - a), so from s to e at most burst + rate * (e - s) are used, whoever took them.
fixed_window,      A permit used after its window would count in none. So a lease ends with the window.
calendar_window
sliding_log,       A charge leaves before the permit's own time is over, and nobody could be told if the client died. So
sliding_window,    there is no lease: each call is asked for, and `seconds` is 0. The same goes for slots, policies in
concurrency        shadow mode, costs by unit, and a store that is lost.

What was not used is given back by `commit` with what was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.core.decision import LocalDecision

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.policy import Cost, Policy

MAX_LEASE_SECONDS: Final = 60.0  # seconds
MAX_LEASE_PERMITS: Final = 100_000  # permits
BURST_DIVISOR: Final = 4  # of a burst, at most a fourth is taken at once
SETTLE_GRACE: Final = 60.0  # seconds after its end within which a lease can be settled
WINDOW_ALGORITHMS: Final = ("fixed_window", "calendar_window")
LEASABLE_ALGORITHMS: Final = ("token_bucket", *WINDOW_ALGORITHMS)


class GrantedLease(NamedTuple):
    """What a client was given: `permits` for so many `seconds`, of which `decay` a second become void; its `id`."""

    decision: Decision | None
    id: str | None
    permits: int
    seconds: float
    decay: float


def may_lease(policy: Policy, cost: Cost) -> bool:
    """Tell whether permits of a policy can be taken ahead at all."""
    plain = cost.__class__ is int and cost
    return (
        bool(plain)
        and policy.mode == "enforce"
        and all(limit.algorithm in LEASABLE_ALGORITHMS for limit in policy.limits)
    )


def terms(policy: Policy, decision: Decision, lasting: float) -> tuple[float, float]:
    """Give the seconds that permits may be used for, and how many a second become void."""
    seconds, decay = lasting, 0.0
    for limit, one, (_, _, reset) in zip(policy.limits, policy.one, decision.views, strict=True):
        if limit.algorithm in WINDOW_ALGORITHMS:
            seconds = min(seconds, reset / SECOND)
        elif one:
            decay = max(decay, limit.rate * SECOND / limit.scale)
    return seconds, decay


def was_charged(decision: Decision) -> bool:
    """Tell whether the store has charged for it: not if it was lost, nor where it denied."""
    return bool(decision[0]) and not isinstance(decision, LocalDecision)
