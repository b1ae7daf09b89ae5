"""When a permit counts: the time between a charge here and the arrival of its request at the provider.

The provider counts a request when it arrives, which nobody here knows exactly: after it was sent, before it was
answered. A permit is charged before the request is sent, so it could end here while it still counts there.

    quick answers    permits count a two-hundredth of the period longer: that covers them, and who is killed meanwhile
    slower ones      the permit is charged anew with the answer, and the first charge given back
    over a period    before its permit is used again, that of a request still under way is charged anew
    over a window    likewise before permits of the next window are used, however short that time was

So whatever the network delays, no window of the provider sees more than its limit. The price is the time of an answer
per period. Where answers are slow that would be much, although their requests arrive as quickly as others: an account
that has paid a whole quota for it in all (`Patience`) lets permits count a fortieth longer instead, which covers what a
network does. Limits of more than `MOST_MOVED` are never charged anew: to find one permit among so many takes longer
than it is worth. Only the process that sent a request knows that it is under way for more than a period.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from tidegate.core.bounds import MAX_INTEGER, SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.clock import Clock
    from tidegate.core import Limit
    from tidegate.outbound.quota.charge import Charge

MOVABLE_ALGORITHMS: Final = ("sliding_log", "fixed_window", "calendar_window")  # what knows when a permit was taken
MAX_MOVED_QUOTA: Final = 2000
MAX_DELAY: Final = 5 * SECOND  # of a network
REQUESTS_BETWEEN_REVIEWS: Final = 1000


class DelayAllowance:
    """How much use of a quota may still be given up for certainty, in permits times microseconds.

    A quota for one period to begin with; each answer costs its time, less a thirtieth of the period.
    """

    def __init__(self, limit: Limit) -> None:
        """Begin with all of it."""
        self._cheap = limit.length // 33
        self._most = self._left = limit.quota * limit.length
        self.lost = False

    def spend(self, flight: int) -> bool:
        """Tell whether a permit is charged anew after an answer that took so many microseconds."""
        self._left = min(self._most, self._left + self._cheap - flight)
        if self.lost and flight > self._cheap:
            self._left = min(self._left + flight, self._most // 2)  # not spent: it comes back when answers are quick
        if self._left < 0:
            self.lost, self._left = True, 0
        elif self._left > self._most // 2:
            self.lost = False
        return not self.lost


class ArrivalDelays:
    """What is known of the delays of one account's requests; `changed` is called when `stretched` has become other."""

    def __init__(
        self,
        limits: tuple[Limit, ...],
        narrow: Limit,
        clock: Clock,
        changed: Callable[[], None],
        line: deque[Charge] | None = None,
    ) -> None:
        """Begin with a `line` of requests under way, or none; `narrow` is the limit that patience is measured by."""
        self._limits = limits
        self._length = narrow.length
        self._clock = clock
        self._changed = changed
        self._flows = flows(clock)
        self._patience = DelayAllowance(narrow)
        self._moves = any(map(moved, limits))
        self._covered = min((self._cover(limit) for limit in limits if moved(limit)), default=0)
        self._windows = [place for place, limit in enumerate(limits) if windowed(limit)]
        self.line: deque[Charge] = deque() if line is None else line  # under way; those charged first stand first

    def stretched(self) -> list[Limit]:
        """Give the limits with permits that count a little longer, where they are counted one by one."""
        return [self._stretched(limit) for limit in self._limits]

    def _stretched(self, limit: Limit) -> Limit:
        if limit.algorithm != "sliding_log":
            return limit
        if self._patience.lost:
            longer = min(limit.length // 40, MAX_DELAY)
        elif self._flows or limit.quota > MAX_MOVED_QUOTA:
            longer = margin(limit)
        else:
            return limit
        return replace(limit, period=timedelta(microseconds=limit.length + longer), name=limit.name)

    def _cover(self, limit: Limit) -> int:
        """Tell how old a charge may be at its answer without being made anew."""
        return margin(limit) if self._flows and limit.algorithm == "sliding_log" else 0

    def overdue(self, ticket: Charge, at: int = 0) -> tuple[int, ...]:
        """Tell what of a charge is to count from now on, by limit; nothing: it stands where it should.

        `at` is an instant of the store's clock that is known to have come.
        """
        flight = self._clock.steady() - ticket.since
        if not self._moves or flight <= 0:
            return ()
        before = self._patience.lost
        anew = self._patience.spend(flight)
        if self._patience.lost != before:
            self._changed()
        # The permit was charged before it came here: how long before, the store's clock tells, where it is ours too.
        age = max(flight, self._clock.ns() // 1000 - ticket.at, at - ticket.at)
        return self._outlived(ticket, age, anew=anew) if (anew or self._windows) and age > self._covered else ()

    def _outlived(self, ticket: Charge, age: int, *, anew: bool) -> tuple[int, ...]:
        limits, costs, views = self._limits, ticket.costs, (ticket.anew or ticket.decision).views
        if not len(limits) == len(costs) == len(views):  # the file has changed meanwhile
            return ()
        # A window that has not ended is the right place still; to move on into the next costs no patience.
        found = tuple(
            cost if (age >= view[2] if windowed(limit) else anew and moved(limit) and age > self._cover(limit)) else 0
            for limit, cost, view in zip(limits, costs, views, strict=True)
        )
        return found if any(found) else ()

    # ---- under way ---------------------------------------------------------------------------------------------------

    def begin(self, ticket: Charge) -> None:
        """Keep an eye on a request that is about to be sent, or was charged anew."""
        if not self._moves:
            return
        if self._windows:
            views = (ticket.anew or ticket.decision).views
            ends = (ticket.at + views[place][2] for place in self._windows if place < len(views))
            ticket.ends = min(ends, default=MAX_INTEGER)
        self.line.append(ticket)

    def outlasting(self, at: int) -> Charge | None:
        """Give the request that has been under way for longest, if its permit has ended before a charge made `at`.

        That is after a period, or where a window has ended: its permits would count in a window that is over.
        """
        line = self.line
        try:
            while (ticket := line[0]).answered:
                line.remove(ticket)
        except (IndexError, ValueError):  # there is none, or another thread was quicker
            return None
        return ticket if at >= ticket.ends or self._clock.steady() - ticket.since >= self._length else None

    @property
    def busy(self) -> bool:
        """Whether any request is under way."""
        return not all(ticket.answered for ticket in self.line.copy())

    def put_back(self, ticket: Charge) -> None:
        """Keep an eye on a request as before: it could not be charged anew."""
        self.line.appendleft(ticket)

    def take(self, ticket: Charge) -> bool:
        """Take a request out of sight; tell whether no other thread has done so before."""
        try:
            self.line.remove(ticket)
        except ValueError:
            return False
        return True


def moved(limit: Limit) -> bool:
    """Tell whether a permit of a limit is charged anew after a slow answer."""
    return limit.algorithm in MOVABLE_ALGORITHMS and (
        limit.algorithm != "sliding_log" or limit.quota <= MAX_MOVED_QUOTA
    )


def windowed(limit: Limit) -> bool:
    """Tell whether the permits of a limit end all at once, with their window."""
    return limit.algorithm in MOVABLE_ALGORITHMS and limit.algorithm != "sliding_log"


def margin(limit: Limit) -> int:
    """Tell how much longer than the period the permits of a log count."""
    return min(limit.length // 200, SECOND)


def flows(clock: Clock) -> bool:
    """Tell whether time passes by itself: else it passes only where a test says so, and no margin is needed for it."""
    began = clock.steady()
    return any(clock.steady() > began for _ in range(REQUESTS_BETWEEN_REVIEWS))
