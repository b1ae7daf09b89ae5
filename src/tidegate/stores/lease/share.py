"""Permits that a process holds: the share of a key, and what is known of the key besides. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import TYPE_CHECKING, Final, overload

from tidegate.core.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.core.algorithms import View
    from tidegate.core.limit import Limit
    from tidegate.policy import Key

Costs = tuple[int, ...]
MAX_GROWTH: Final = 8  # a share is at most so many times the last one
FIRST_SHARE_CALLS: Final = 4  # the first share of a key that was asked twice, in calls
RENEW_DIVISOR: Final = 8  # a share is renewed when one part in so many is left of it, or of its time


class LeasedShare:
    """Permits charged at `charged` by the store's clock, to be used before `ends` by the steady clock of this process.

    What is left is `units` times what a usual call costs (`one`), and `spare` beside: so that a usual call takes one
    number down, however many limits there are. Above `low` units and before `fresh` nothing needs to be looked at.
    """

    __slots__ = (
        "charged", "ends", "fresh", "granted", "low", "offset", "one", "received", "since", "spare", "told", "units"
    )  # fmt: skip

    def __init__(self, one: Costs, granted: Costs, decision: Decision, sent: int, received: int, span: int) -> None:
        """Hold what was granted by a decision, asked for at `sent`, for `span` microseconds after that."""
        self.one = one
        self.granted = granted
        self.units = min((permits // o for permits, o in zip(granted, one, strict=True) if o), default=0)
        self.spare = tuple(permits - self.units * o for permits, o in zip(granted, one, strict=True))
        self.told = decision.views
        self.charged = decision.at
        self.offset = decision.at - received  # steady time plus this is about the time by the store's clock
        self.received = self.since = received  # `since`: when it came into use
        self.ends = sent + span
        # Renewed while there is time for two more round trips like this one.
        late = min(max(span // RENEW_DIVISOR, 2 * (received - sent)), span // 2)
        self.fresh = self.ends - late
        self.low = self.units * late // span if span > 0 else 0

    @property
    def ahead(self) -> bool:
        """Whether it was taken ahead of any need: nothing of it is used yet."""
        return self.left == self.granted

    def over(self, now: int) -> bool:
        """Tell whether nothing can be taken from it any more."""
        return now >= self.ends or not (self.units or any(self.spare))

    @property
    def left(self) -> Costs:
        """Permits left, for each limit."""
        return tuple(self.units * o + spare for o, spare in zip(self.one, self.spare, strict=True))

    @property
    def used(self) -> Costs:
        """Permits used, for each limit."""
        return tuple(permits - left for permits, left in zip(self.granted, self.left, strict=True))

    def after(self, costs: Costs) -> tuple[int, Costs] | None:
        """Tell what units and spare permits a call would leave; None if not all of its permits are here."""
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
        """Take permits for a call, if all of them are here. Interrupted in between, less is left than there was."""
        left = self.after(costs)
        if left is None:
            return False
        self.units = left[0]
        self.spare = left[1]
        return True

    def decision(self, limits: tuple[Limit, ...], now: int, left: tuple[int, Costs] | None = None) -> Decision:
        """Allow a call that was just taken from here, or that would leave so many units and spare permits."""
        units, spares = left or (self.units, self.spare)
        permits = tuple(units * o + spare for o, spare in zip(self.one, spares, strict=True))
        return Decision((True, self.offset + now, limits, LazyViews(self, permits, now), None))


class LazyViews(Sequence["View"]):
    """What each limit says while a share lasts, worked out when somebody asks: permits here and in the store."""

    __slots__ = ("left", "now", "share")

    def __init__(self, share: LeasedShare, left: Costs | int, now: int) -> None:
        """Remember what was `left` at `now`: for each limit, or as units of the share."""
        self.share = share
        self.left = left
        self.now = now

    def _views(self) -> list[View]:
        share, left = self.share, self.left
        if isinstance(left, int):
            left = tuple(left * o + spare for o, spare in zip(share.one, share.spare, strict=True))
        ago = self.now - share.received
        return [(here + view[0], 0, max(0, view[2] - ago)) for here, view in zip(left, share.told, strict=True)]

    def __iter__(self) -> Iterator[View]:
        """Give the views in order."""
        return iter(self._views())

    def __len__(self) -> int:
        """Count the limits."""
        return len(self.share.told)

    @overload
    def __getitem__(self, index: int) -> View: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[View]: ...
    def __getitem__(self, index: int | slice) -> View | Sequence[View]:
        """Give one view, or some."""
        return self._views()[index]


class CachedDenial:
    """A denial by the store, remembered until it may have become wrong by itself, and no longer than a lease."""

    __slots__ = ("costs", "decision", "received", "until")

    def __init__(self, costs: Costs, decision: Decision, received: int, until: int) -> None:
        """Deny the same call until `until`."""
        self.costs = costs
        self.decision = decision
        self.received = received
        self.until = until

    def repeated(self, now: int) -> Decision:
        """Say no again, a little later."""
        ago = now - self.received
        views = [(left, max(1, retry - ago) if retry > 0 else retry, max(0, reset - ago))
                 for left, retry, reset in self.decision.views]  # fmt: skip
        return Decision((False, self.decision.at + ago, self.decision[2], views, None))


NO_SHARE: Final = LeasedShare((), (), Decision((True, 0, (), ((0, 0, 0),), None)), 0, 0, 0)


class KeyLease:
    """All that is held and known of one key: a share in use, a second one, a denial, how much the store had."""

    __slots__ = ("after", "asking", "denial", "forgotten", "key", "left", "missed", "past", "seen", "share")

    def __init__(self, key: Key) -> None:
        """Know nothing."""
        self.key = key
        self.share = NO_SHARE
        self.after = NO_SHARE
        self.past = NO_SHARE  # the last one that was in use: it shows the demand
        self.asking = 0  # until then nobody else asks the store for a share: somebody is doing so
        self.missed: Costs = ()  # what calls asked the store for meanwhile
        self.forgotten = False  # what is still on its way for this holder is void
        self.denial: CachedDenial | None = None
        self.left: Sequence[int] = ()  # what the store had left when last heard of
        self.seen: int | None = None  # when last asked about, but for calls that a share answered

    def take(self, costs: Costs, now: int) -> LeasedShare | None:
        """Find permits for a call, and tell from which share. `advance` comes before."""
        for share in (self.share, self.after):
            if now < share.ends and share.take(costs):
                return share
        return None

    def advance(self, now: int) -> list[LeasedShare]:
        """Let go of shares that have ended or are used up, and give them; the second takes the place of the first."""
        gone = []
        if self.after.over(now) and self.after is not NO_SHARE:
            gone.append(self.after)
            self.after = NO_SHARE
        if self.share.over(now) and self.share is not NO_SHARE:
            gone.append(self.share)
            self.past, self.share, self.after = self.share, self.after, NO_SHARE
            if self.share is not NO_SHARE:
                self.share.since = now
        return gone

    def install(self, share: LeasedShare, now: int) -> list[LeasedShare]:
        """Hold one more share; give those that are of no more use.

        One that was taken ahead waits until the present one is over. One that a call needed, since neither had as much
        as it asked for, goes first.
        """
        self.denial = None
        gone = self.advance(now)
        if now >= share.ends:
            return [*gone, share]
        if self.after is not NO_SHARE:
            gone.append(self.after)
        if self.share is NO_SHARE:
            self.share, self.after = share, NO_SHARE
        elif share.ahead:
            self.after = share
        else:
            self.share, self.after = share, self.share
        return gone

    def strip(self) -> list[LeasedShare]:
        """Let go of every share."""
        gone = [share for share in (self.share, self.after) if share is not NO_SHARE]
        if gone:
            self.past = self.share
            self.share = self.after = NO_SHARE
        return gone

    def miss(self, costs: Costs) -> None:
        """Note what a call asks the store for, while a share is on its way."""
        self.missed = tuple(map(add, self.missed, costs)) if self.missed else costs

    def wish(self, costs: Costs, now: int, length: int, spread: int) -> Costs:
        """Tell what to ask the store for: the call's costs, with as much ahead as demand shows and others can spare."""
        share = self.past if self.share is NO_SHARE else self.share
        missed, self.missed = self.missed or (0,) * len(costs), ()
        if share is not NO_SHARE and now - share.ends < length:
            lasted = 4 * max(1, min(now, share.ends) - share.since)
            triples = zip(share.used, share.granted, missed, strict=True)
            ahead = [
                min((used + more) * length * 5 // lasted, MAX_GROWTH * (granted + more))
                for used, granted, more in triples
            ]
        elif self.seen is not None and now - self.seen < length:
            ahead = [FIRST_SHARE_CALLS * (cost + more) for cost, more in zip(costs, missed, strict=True)]
        else:
            return costs
        triples = zip(costs, ahead, self.left or costs, strict=True)
        return tuple(max(cost, min(more, left // spread)) for cost, more, left in triples)
