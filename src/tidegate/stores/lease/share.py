"""Shares of permits of one key, and what else a process knows of the key. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import TYPE_CHECKING, Final, overload

from tidegate.core.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tidegate.core.algorithms import View
    from tidegate.core.limit import Limit
    from tidegate.policy import Key

Costs = tuple[int, ...]
MAX_GROWTH: Final = 8  # a share is at most this many times as large as the last one
FIRST_SHARE_CALLS: Final = 4  # size of the first share of a key, in calls
RENEW_DIVISOR: Final = 8  # a share is renewed when 1/8 of its permits or its time is left


class LeasedShare:
    """Permits charged at `charged` by the store's clock, usable before `ends` by the steady clock of this process.

    The permits left are `units` times the cost of a common call (`one`), plus `spare`: a common call decrements one
    integer, however many limits there are. The share is to be renewed at `renew_below` units, or at `renew_at`.
    """

    __slots__ = (
        "charged",
        "ends",
        "granted",
        "in_use_since",
        "offset",
        "one",
        "received",
        "renew_at",
        "renew_below",
        "spare",
        "store_views",
        "units",
    )
    in_use_since: int
    received: int

    def __init__(self, one: Costs, granted: Costs, decision: Decision, sent: int, received: int, lifetime: int) -> None:
        """Keep the permits granted by a decision for `lifetime` microseconds after `sent`, the time of the request."""
        self.one: Costs = one
        self.granted: Costs = granted
        self.units: int = min((permits // o for permits, o in zip(granted, one, strict=True) if o), default=0)
        self.spare: tuple[int, ...] = tuple(permits - self.units * o for permits, o in zip(granted, one, strict=True))
        self.store_views: Sequence[View] = decision.views
        self.charged: int = decision.at
        self.offset: int = decision.at - received  # steady time plus this is about the time of the store's clock
        self.received = self.in_use_since = received  # `in_use_since` changes when it becomes the current share
        self.ends: int = sent + lifetime
        # Renewed early enough for two round trips as long as this one.
        margin = min(max(lifetime // RENEW_DIVISOR, 2 * (received - sent)), lifetime // 2)
        self.renew_at: int = self.ends - margin
        self.renew_below: int = self.units * margin // lifetime if lifetime > 0 else 0

    @property
    def unused(self) -> bool:
        """Whether none of its permits is used."""
        return self.left == self.granted

    def is_over(self, now: int) -> bool:
        """Return whether it has ended or has no permits left."""
        return now >= self.ends or not (self.units or any(self.spare))

    @property
    def left(self) -> Costs:
        """Permits left, for each limit."""
        return tuple(self.units * o + spare for o, spare in zip(self.one, self.spare, strict=True))

    @property
    def used(self) -> Costs:
        """Permits used, for each limit."""
        return tuple(permits - left for permits, left in zip(self.granted, self.left, strict=True))

    def remaining_after(self, costs: Costs) -> tuple[int, Costs] | None:
        """Return the units and spare permits that a call would leave; None if there are not enough permits."""
        units = 0
        for cost, spare, o in zip(costs, self.spare, self.one, strict=True):
            if cost > spare:
                if not o:
                    return None
                units = max(units, cost - spare)  # `one` is 1 where it is not 0
        if units > self.units:
            return None
        pairs = zip(costs, self.spare, self.one, strict=True)
        return self.units - units, tuple(spare + units * o - cost for cost, spare, o in pairs)

    def take(self, costs: Costs) -> bool:
        """Take the permits of a call if there are enough. An interrupted call loses permits, never gains any."""
        left = self.remaining_after(costs)
        if left is None:
            return False
        self.units = left[0]
        self.spare = left[1]
        return True

    def decision(self, limits: tuple[Limit, ...], now: int, left: tuple[int, Costs] | None = None) -> Decision:
        """Build the Decision that allows a call, with the permits left now, or as given by `left`."""
        units, spares = left or (self.units, self.spare)
        permits = tuple(units * o + spare for o, spare in zip(self.one, spares, strict=True))
        return Decision.of_views(self.offset + now, limits, LazyViews(self, permits, now), within_limits=True)


class LazyViews(Sequence["View"]):
    """The views of a policy's limits, computed on access: the permits of a share plus those in the store."""

    __slots__ = ("left", "now", "share")

    def __init__(self, share: LeasedShare, left: Costs | int, now: int) -> None:
        """Keep the permits `left` at `now`: one integer per limit, or units of the share."""
        self.share: LeasedShare = share
        self.left: Costs | int = left
        self.now: int = now

    def _views(self) -> list[View]:
        share, left = self.share, self.left
        if isinstance(left, int):
            left = tuple(left * o + spare for o, spare in zip(share.one, share.spare, strict=True))
        ago = self.now - share.received
        return [(here + view[0], 0, max(0, view[2] - ago)) for here, view in zip(left, share.store_views, strict=True)]

    def __iter__(self) -> Iterator[View]:
        """Iterate over the views."""
        return iter(self._views())

    def __len__(self) -> int:
        """Return the number of limits."""
        return len(self.share.store_views)

    @overload
    def __getitem__(self, index: int) -> View: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[View]: ...
    def __getitem__(self, index: int | slice) -> View | Sequence[View]:
        """Return one view, or a slice."""
        return self._views()[index]


class CachedDenial:
    """A denial by the store, cached until permits may be available again, at most for the length of a lease."""

    __slots__ = ("costs", "decision", "received", "until")

    def __init__(self, costs: Costs, decision: Decision, received: int, until: int) -> None:
        """Deny the same call until `until`."""
        self.costs: Costs = costs
        self.decision: Decision = decision
        self.received: int = received
        self.until: int = until

    def repeat(self, now: int) -> Decision:
        """Return the denial as of `now`."""
        ago = now - self.received
        views = [(left, max(1, retry - ago) if retry > 0 else retry, max(0, reset - ago))
                 for left, retry, reset in self.decision.views]  # fmt: skip
        return Decision.of_views(self.decision.at + ago, self.decision.policy_limits, views, within_limits=False)


NO_SHARE: Final = LeasedShare((), (), Decision.of_views(0, (), ((0, 0, 0),), within_limits=True), 0, 0, 0)


class KeyLease:
    """The lease of one key: the current share, the next one, a cached denial, the permits left in the store."""

    __slots__ = (
        "denial",
        "forgotten",
        "key",
        "last_call",
        "last_share",
        "missed",
        "next_share",
        "pending_until",
        "share",
        "store_remaining",
        "waiting",
    )

    def __init__(self, key: Key) -> None:
        """Start without shares."""
        self.key: Key = key
        self.share: LeasedShare = NO_SHARE
        self.next_share: LeasedShare = NO_SHARE
        self.last_share: LeasedShare = NO_SHARE  # the previous current share: shows the demand
        self.pending_until: int = 0  # a request for a share is pending; no other call requests one before this time
        self.waiting: list[Callable[[], None]] = []  # called when the pending request has ended
        self.missed: Costs = ()  # costs of calls that found no permits while a request was pending
        self.forgotten: bool = False  # dropped: a share that arrives later is not kept
        self.denial: CachedDenial | None = None
        self.store_remaining: Sequence[int] = ()  # permits left in the store by its last decision
        self.last_call: int | None = None  # time of the last call that the fast path did not answer

    def take(self, costs: Costs, now: int) -> LeasedShare | None:
        """Take the permits of a call, after `advance`; returns the share they come from, None if none has enough."""
        for share in (self.share, self.next_share):
            if now < share.ends and share.take(costs):
                return share
        return None

    def advance(self, now: int) -> list[LeasedShare]:
        """Remove and return shares that have ended or are used up; the next share becomes the current one."""
        removed = []
        if self.next_share.is_over(now) and self.next_share is not NO_SHARE:
            removed.append(self.next_share)
            self.next_share = NO_SHARE
        if self.share.is_over(now) and self.share is not NO_SHARE:
            removed.append(self.share)
            self.last_share, self.share, self.next_share = self.share, self.next_share, NO_SHARE
            if self.share is not NO_SHARE:
                self.share.in_use_since = now
        return removed

    def install(self, share: LeasedShare, now: int) -> list[LeasedShare]:
        """Add a share; returns the shares that it replaces.

        A share without used permits, requested in advance, becomes the next share. One that a call has already used,
        since the others had too few permits, becomes the current share.
        """
        self.denial = None
        removed = self.advance(now)
        if now >= share.ends:
            return [*removed, share]
        if self.next_share is not NO_SHARE:
            removed.append(self.next_share)
        if self.share is NO_SHARE:
            self.share, self.next_share = share, NO_SHARE
        elif share.unused:
            self.next_share = share
        else:
            self.share, self.next_share = share, self.share
        return removed

    def release_shares(self) -> list[LeasedShare]:
        """Remove and return all shares."""
        removed = [share for share in (self.share, self.next_share) if share is not NO_SHARE]
        if removed:
            self.last_share = self.share
            self.share = self.next_share = NO_SHARE
        return removed

    def end_request(self) -> None:
        """Allow the next call to request a share, and notify the calls that wait for the pending one."""
        self.pending_until = 0
        waiting, self.waiting = self.waiting, []
        for notify in waiting:
            notify()

    def add_missed(self, costs: Costs) -> None:
        """Add the costs of a call that finds no permits while a request for a share is pending."""
        self.missed = tuple(map(add, self.missed, costs)) if self.missed else costs

    def plan_request(self, costs: Costs, now: int, length: int, spread: int) -> Costs:
        """Return the costs to request: those of the call, and in advance what demand suggests and `spread` permits."""
        share = self.last_share if self.share is NO_SHARE else self.share
        missed, self.missed = self.missed or (0,) * len(costs), ()
        if share is not NO_SHARE and now - share.ends < length:
            lasted = 4 * max(1, min(now, share.ends) - share.in_use_since)
            triples = zip(share.used, share.granted, missed, strict=True)
            ahead = [
                min((used + more) * length * 5 // lasted, MAX_GROWTH * (granted + more))
                for used, granted, more in triples
            ]
        elif self.last_call is not None and now - self.last_call < length:
            ahead = [FIRST_SHARE_CALLS * (cost + more) for cost, more in zip(costs, missed, strict=True)]
        else:
            return costs
        # As long as it is unknown what is left in the store, only the calls that wait are served.
        most = [left // spread for left in self.store_remaining] or missed
        return tuple(max(cost, min(more, left)) for cost, more, left in zip(costs, ahead, most, strict=True))
