"""A share: permits of one key that a process may use for a while. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, overload

from tidegate.core._algorithms import View
from tidegate.core._decision import Decision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.core._limit import Limit

Costs = tuple[int, ...]
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
        "offset",
        "one",
        "received",
        "renew_at",
        "renew_below",
        "spare",
        "store_views",
        "units",
    )
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
        self.received = received
        self.ends: int = sent + lifetime
        # Renewed early enough for two round trips as long as this one.
        margin = min(max(lifetime // RENEW_DIVISOR, 2 * (received - sent)), lifetime // 2)
        self.renew_at: int = self.ends - margin
        self.renew_below: int = self.units * margin // lifetime if lifetime > 0 else 0

    def renew_no_more(self) -> None:
        """Use it up: its renewal was scheduled, or the store has nothing to renew it with."""
        self.renew_below, self.renew_at = 0, self.ends

    def expect_returned(self, permits: Costs) -> None:
        """Show permits as available that are about to be returned to the store."""
        pairs = zip(self.store_views, permits, strict=True)
        self.store_views = tuple(View((left + more, retry, reset)) for (left, retry, reset), more in pairs)

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
        pairs = zip(left, share.store_views, strict=True)
        return [View((here + view.remaining, 0, max(0, view.reset - ago))) for here, view in pairs]

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


NO_SHARE: Final = LeasedShare((), (), Decision.of_views(0, (), (View((0, 0, 0)),), within_limits=True), 0, 0, 0)
