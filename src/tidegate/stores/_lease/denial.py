"""Denials in memory: what the last reply of the store says about calls until the store is asked again. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.core._algorithms import NEVER, View
from tidegate.core._decision import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core._limit import Limit
    from tidegate.stores._lease.share import Costs


class CachedDenial:
    """Denies calls in memory before `until`, because the store denied one or has hardly any permits left.

    A limit is `scarce` if it has fewer permits left than are available again in one `pause` on average. Calls that need
    one of these wait until the store is asked again, so that permits gather. Other calls are denied if they cost more
    than was left. The `retry` of a denial is the later of `until` and what the store said: it may be later than in the
    store, but it is never too early.

    `gathers` is true if permits come back sooner than within a pause: then one call asks the store at `until`, and the
    others are denied for a further pause. If it is false, they come back all at once, and the denial has lapsed.
    """

    __slots__ = ("_costs", "_limits", "_received", "_scarce", "_views", "gathers", "offset", "one", "only", "until")

    def __init__(
        self,
        limits: tuple[Limit, ...],
        costs: Costs,
        reply: Decision,
        received: int,
        one: Costs,
        scarce: Sequence[bool],
    ) -> None:
        """Keep a reply of the store: a denial of `costs`, or not a denial if these are 0. Most calls cost `one`."""
        self._limits: tuple[Limit, ...] = limits
        self._costs: Costs = costs
        self._views: Sequence[View] = tuple(reply.views)
        self.offset: int = reply.at - received  # steady time plus this is about the time of the store's clock
        self._received: int = received
        self._scarce: Sequence[bool] = scarce
        self.one: Costs = one
        self.until: int = received
        self.gathers: bool = False
        self.only: View | None = None  # of a policy with one limit: permits left, and when to retry and to reset

    def wait(self, costs: Costs) -> int | None:
        """Return how long after the reply a call would be allowed; NEVER if it cannot be, None if it is unknown."""
        waits = [wait_of(*each) for each in zip(self._limits, costs, self._costs, self._views, strict=True)]
        if None in waits:
            return None
        return NEVER if NEVER in waits else max(wait for wait in waits if wait is not None)

    def postpone(self, until: int) -> None:
        """Deny calls until then."""
        self.until = until
        self.only = None
        if len(self._limits) == 1:
            views = self._deny(self.one, 0)
            self.only = views[0] if views else None

    def decide(self, costs: Costs, now: int, limits: tuple[Limit, ...]) -> Decision | None:
        """Deny a call before `until`, with the limits of the policy; None if the store has to decide it."""
        views = self._deny(costs, now) if now < self.until else None
        if views is None:
            return None
        return Decision.of_views(self.offset + now, limits, views, within_limits=False)

    def decide_one(self, now: int, limits: tuple[Limit, ...]) -> Decision | None:
        """Do what `decide` does for the cost of most calls, faster."""
        if self.only is None:
            return self.decide(self.one, now, limits)
        if now >= self.until:
            return None
        left, retry, reset = self.only
        views = (View((left, retry - now, reset - now if reset > now else 0)),)
        return Decision((False, self.offset + now, limits, views, None))  # of_views, inlined

    def _deny(self, costs: Costs, now: int) -> list[View] | None:
        views, denied = [], False
        for limit, cost, was, scarce, view in zip(
            self._limits, costs, self._costs, self._scarce, self._views, strict=True
        ):
            left, _, reset = view
            wait = wait_of(limit, cost, was, view)
            if wait is None:
                return None
            retry = 0
            if wait or (scarce and cost):
                denied = True
                left = min(left, cost - 1)
                retry = NEVER if wait == NEVER else max(self._received + wait, self.until) - now
            views.append(View((left, retry, max(0, self._received + reset - now))))
        return views if denied else None


def wait_of(limit: Limit, cost: int, denied: int, view: View) -> int | None:
    """Return how long after a reply a limit would allow a cost, by its view for the cost `denied`; None if unknown.

    Rounded up where it is not known to the microsecond.
    """
    left, retry, reset = view
    if cost <= left or not cost:
        return 0
    if cost == denied:
        return retry
    if cost > limit.burst:
        return NEVER
    if limit.rules.refills:  # it is full after `reset`, earlier by the time that refills what is above the cost
        return max(1, reset - (limit.burst - cost) * limit.scale // limit.rate)
    if limit.rules.windowed:
        return reset
    return retry if cost < denied <= limit.burst else None
