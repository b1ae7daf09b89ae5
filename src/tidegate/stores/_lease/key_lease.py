"""The lease of one key, as a state machine. Everything that affects its state is in this module. Pure.

state        share   request    a call
IDLE         -       -          asks the store: for a share if the key was called recently, else for its cost
FETCHING     -       one        asks the store for its cost
HOLDING      one     -          takes permits from the share
RENEWING     one     one        takes permits from the share
SCARCE       one     -          takes permits from the share; when it is used up, the key is EXHAUSTED
EXHAUSTED    -       -          is denied in memory; at the end of the denial, one call asks for a share
REFILLING    -       one        is denied in memory
DROPPED      -       -          (the key has another lease, or none)

The request is for a share; a call that asks for its own cost is no request. There is at most one request at a time,
unless one was interrupted: after MAX_PENDING, the next one may be sent, and a share that arrives late replaces the
current one. So every event may occur in every state.
"""

from __future__ import annotations

from enum import Enum, auto
from operator import add
from typing import TYPE_CHECKING, Final

from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import SECOND
from tidegate.stores._lease.denial import CachedDenial
from tidegate.stores._lease.share import NO_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._policy import Key, Policy
    from tidegate.core._decision import Decision
    from tidegate.stores._lease.share import Costs, LeasedShare

MAX_PENDING: Final = 10 * SECOND  # how long one request keeps other calls from requesting a share of its key
MAX_GROWTH: Final = 8  # a share is at most this many times as large as the last one
MAX_HALVINGS: Final = 4  # how often a request is halved to fit what the store has
FIRST_SHARE_CALLS: Final = 4  # size of the first share of a key, in calls
GATHER_PAUSE: Final = SECOND // 20  # between two requests for an exhausted key, if that is less than half a lease


class LeaseState(Enum):
    """The states of a key lease."""

    IDLE = auto()
    FETCHING = auto()
    HOLDING = auto()
    RENEWING = auto()
    SCARCE = auto()
    EXHAUSTED = auto()
    REFILLING = auto()
    DROPPED = auto()


class LeaseEvent(Enum):
    """What changes the state of a key lease."""

    REQUEST = auto()  # a request for a share is made
    GRANT = auto()  # a share arrives, and more permits are left in the store
    GRANT_LAST = auto()  # a share arrives, and hardly any permits are left in the store
    DENY = auto()  # the store denies, or has hardly any permits left after it served a call
    FAIL = auto()  # a request ends without a share
    END = auto()  # the share is used up, or its time is over
    LAPSE = auto()  # the store may have permits again, also because others may have returned some
    RELEASE = auto()  # the share is removed, because the store itself is asked


# An event that is not listed for a state does not change it.
TRANSITIONS: Final[dict[LeaseState, dict[LeaseEvent, LeaseState]]] = {
    LeaseState.IDLE: {
        LeaseEvent.REQUEST: LeaseState.FETCHING,
        LeaseEvent.GRANT: LeaseState.HOLDING,
        LeaseEvent.GRANT_LAST: LeaseState.SCARCE,
        LeaseEvent.DENY: LeaseState.EXHAUSTED,
    },
    LeaseState.FETCHING: {
        LeaseEvent.GRANT: LeaseState.HOLDING,
        LeaseEvent.GRANT_LAST: LeaseState.SCARCE,
        LeaseEvent.DENY: LeaseState.EXHAUSTED,
        LeaseEvent.FAIL: LeaseState.IDLE,
    },
    LeaseState.HOLDING: {
        LeaseEvent.REQUEST: LeaseState.RENEWING,
        LeaseEvent.GRANT_LAST: LeaseState.SCARCE,
        LeaseEvent.DENY: LeaseState.SCARCE,
        LeaseEvent.END: LeaseState.IDLE,
        LeaseEvent.RELEASE: LeaseState.IDLE,
    },
    LeaseState.RENEWING: {
        LeaseEvent.GRANT: LeaseState.HOLDING,
        LeaseEvent.GRANT_LAST: LeaseState.SCARCE,
        LeaseEvent.DENY: LeaseState.SCARCE,
        LeaseEvent.FAIL: LeaseState.HOLDING,
        LeaseEvent.END: LeaseState.FETCHING,
        LeaseEvent.RELEASE: LeaseState.FETCHING,
    },
    LeaseState.SCARCE: {
        LeaseEvent.REQUEST: LeaseState.RENEWING,
        LeaseEvent.GRANT: LeaseState.HOLDING,
        LeaseEvent.END: LeaseState.EXHAUSTED,
        LeaseEvent.LAPSE: LeaseState.HOLDING,
        LeaseEvent.RELEASE: LeaseState.IDLE,
    },
    LeaseState.EXHAUSTED: {
        LeaseEvent.REQUEST: LeaseState.REFILLING,
        LeaseEvent.GRANT: LeaseState.HOLDING,
        LeaseEvent.GRANT_LAST: LeaseState.SCARCE,
        LeaseEvent.LAPSE: LeaseState.IDLE,
        LeaseEvent.RELEASE: LeaseState.IDLE,
    },
    LeaseState.REFILLING: {
        LeaseEvent.GRANT: LeaseState.HOLDING,
        LeaseEvent.GRANT_LAST: LeaseState.SCARCE,
        LeaseEvent.DENY: LeaseState.EXHAUSTED,
        LeaseEvent.FAIL: LeaseState.EXHAUSTED,
        LeaseEvent.LAPSE: LeaseState.FETCHING,
        LeaseEvent.RELEASE: LeaseState.FETCHING,
    },
    LeaseState.DROPPED: {},
}
PENDING: Final = frozenset((LeaseState.FETCHING, LeaseState.RENEWING, LeaseState.REFILLING))


def pause_before_request(now: int, length: int) -> int:
    """Return how long to let permits gather before the next request for an exhausted key.

    About GATHER_PAUSE, or half a lease: a quarter more or less, by the microseconds of the clock. So processes that
    share a key do not stay in step, where one of them would always find what the others have left.
    """
    pause = min(GATHER_PAUSE, length // 2)
    return pause - pause // 4 + now % (pause // 2)


class KeyLease:
    """The lease of one key: its state, the share in use, a denial, and what the last reply of the store said."""

    __slots__ = (
        "_last_share",
        "_left",
        "_missed",
        "_pending_until",
        "_replied",
        "_waiting",
        "denial",
        "key",
        "last_call",
        "share",
        "state",
    )

    def __init__(self, key: Key) -> None:
        """Start without a share."""
        self.key: Key = key
        self.state: LeaseState = LeaseState.IDLE
        self.share: LeasedShare = NO_SHARE
        self.denial: CachedDenial | None = None
        self.last_call: int | None = None  # time of the last call that needed the manager
        self._last_share: LeasedShare = NO_SHARE  # the previous share: shows the demand
        self._pending_until: int = 0
        self._waiting: list[Callable[[], None]] = []  # called when the request has ended
        self._missed: Costs = ()  # costs of calls that found no permits while a request was pending
        self._left: Sequence[int] = ()  # permits left in the store by its last reply, at `_replied`
        self._replied: int = 0

    def on(self, event: LeaseEvent) -> None:
        """Change the state."""
        self.state = TRANSITIONS[self.state].get(event, self.state)

    def is_pending(self, now: int) -> bool:
        """Return whether a request for a share is pending."""
        return self.state in PENDING and now < self._pending_until

    def called_recently(self, now: int, length: int) -> bool:
        """Return whether a call needed the manager within the length of a lease."""
        return self.last_call is not None and now - self.last_call < length

    # ---- the share ---------------------------------------------------------------------------------------------------

    def advance(self, now: int) -> list[LeasedShare]:
        """Remove and return the share if it has ended or is used up."""
        share = self.share
        if share is NO_SHARE or not share.is_over(now):
            return []
        return self._remove(LeaseEvent.END)

    def release_share(self) -> list[LeasedShare]:
        """Remove and return the share, and discard the denial, because the store itself is asked."""
        self.denial = None
        return self._remove(LeaseEvent.RELEASE)

    def drop(self) -> None:
        """End this key lease: a share that arrives later is not kept. No event changes its state any more."""
        self.state = LeaseState.DROPPED

    def _remove(self, event: LeaseEvent) -> list[LeasedShare]:
        share = self.share
        self.on(event)
        if share is NO_SHARE:
            return []
        self._last_share, self.share = share, NO_SHARE
        return [share]

    def install(self, share: LeasedShare, now: int) -> list[LeasedShare]:
        """Use a share from now on; returns the share that it replaces, or itself if it is already over."""
        if now >= share.ends:
            self.on(LeaseEvent.FAIL)
            return [share]
        replaced = [] if self.share is NO_SHARE else [self.share]
        for other in replaced:
            share.expect_returned(other.left)
        self.share = share
        self.on(LeaseEvent.GRANT if self.denial is None else LeaseEvent.GRANT_LAST)
        if self.denial is not None:
            share.renew_no_more()
        return replaced

    # ---- requests ----------------------------------------------------------------------------------------------------

    def request(self, now: int, length: int) -> None:
        """Note that a request is made; while permits gather, other calls are denied until the next one is due."""
        self._pending_until = now + MAX_PENDING
        self.on(LeaseEvent.REQUEST)
        self.gather(now, length)

    def gather(self, now: int, length: int) -> None:
        """Deny other calls for a further pause, while permits gather."""
        if self.denial is not None and self.denial.gathers:
            self.denial.postpone(now + pause_before_request(now, length))

    def wait_for_request(self, notify: Callable[[], None]) -> int:
        """Call `notify` when the request has ended; returns how long to wait for that."""
        self._waiting.append(notify)
        return self._pending_until

    def end_request(self) -> None:
        """Note that the request has ended without a share."""
        self.on(LeaseEvent.FAIL)
        self.notify()

    def notify(self) -> None:
        """Notify the calls that wait for the request."""
        waiting, self._waiting = self._waiting, []
        for notify in waiting:
            notify()

    def add_missed(self, costs: Costs) -> None:
        """Add the costs of a call that finds no permits while a request for a share is pending."""
        self._missed = tuple(map(add, self._missed, costs)) if self._missed else costs

    def plan_request(self, costs: Costs, now: int, strict: Policy, length: int, spread: int) -> list[Costs]:
        """Return the costs to request, and what to request if the store has less; the last are those of the call.

        A share is sized by demand, and has at most 1/`spread` of the permits in the store. Of an exhausted key, it may
        have 1/`spread` of what is available again after a pause.
        """
        share = self._last_share if self.share is NO_SHARE else self.share
        missed, self._missed = self._missed or (0,) * len(costs), ()
        if share is not NO_SHARE and now - share.ends < length:
            lasted = 4 * max(1, min(now, share.ends) - share.received)
            ahead = [
                min((used + more) * length * 5 // lasted, MAX_GROWTH * (granted + more))
                for used, granted, more in zip(share.used, share.granted, missed, strict=True)
            ]
        elif self.called_recently(now, length):
            ahead = [FIRST_SHARE_CALLS * (cost + more) for cost, more in zip(costs, missed, strict=True)]
        else:
            return [costs]
        # As long as it is unknown what is left in the store, only the calls that wait are served.
        most = self._expect_left(now, strict, length, spread) if self._left else missed
        first = tuple(max(cost, min(more, left)) for cost, more, left in zip(costs, ahead, most, strict=True))
        amounts = [first]
        while amounts[-1] != costs and len(amounts) < MAX_HALVINGS:
            amounts.append(tuple(max(cost, amount // 2) for cost, amount in zip(costs, amounts[-1], strict=True)))
        return amounts if amounts[-1] == costs else [*amounts, costs]

    def _expect_left(self, now: int, strict: Policy, length: int, spread: int) -> list[int]:
        """Return 1/`spread` of what is expected to be left in the store, if nobody else takes any."""
        gathered = gathered_permits(strict, length)
        expected = []
        for limit, left, more in zip(strict.limits, self._left, gathered, strict=True):
            if limit.rules.refills:
                refilled = (now - self._replied) * limit.rate // limit.scale
                expected.append(min(limit.burst, left + refilled) // spread)
            else:
                expected.append(max(left // spread, more))
        return expected

    # ---- replies -----------------------------------------------------------------------------------------------------

    def read_reply(
        self, strict: Policy, one: Costs, costs: Costs, reply: Decision, received: int, length: int, spread: int
    ) -> None:
        """Remember what is left in the store, and a denial if that is hardly anything, or if it denied these costs.

        Hardly anything is less than what is available again in one pause. While permits of a bucket gather, it is
        `spread` times as much, because a share has 1/`spread` of what is left: as long as that is not more than what
        refills, there is no use in asking more often. Nothing gathers in a fixed or calendar window, and what is left
        in it is lost at its end: so only an empty one denies calls.
        """
        self._left = [max(0, view.remaining) for view in reply.views]
        self._replied = received
        gathers = self.denial is not None and self.denial.gathers
        self.denial = None
        scarce = []
        for limit, left, more in zip(strict.limits, self._left, gathered_permits(strict, length), strict=True):
            least = spread * more if gathers and limit.rules.refills else more
            scarce.append(left < (1 if limit.rules.windowed and not limit.rules.weighted else max(1, least)))
        if reply.within_limits:
            if not any(scarce):
                return
            costs = (0,) * len(costs)
        denial = CachedDenial(strict.limits, costs, reply, received, one, scarce)
        wait = denial.wait(one) if any(scarce) else reply.retry
        if wait is None and not reply.within_limits:
            wait = reply.retry
        if wait is None:
            return  # only the store knows when a further call would be allowed
        pause = pause_before_request(received, length)
        denial.gathers = 0 <= wait <= min(GATHER_PAUSE, length // 2)
        denial.postpone(received + max(pause, length if wait == NEVER else min(length, wait)))
        self.denial = denial

    def deny(self) -> None:
        """Note that the store has nothing more for this key now."""
        self.on(LeaseEvent.DENY)
        if self.share is not NO_SHARE:
            self.share.renew_no_more()

    def lapse(self) -> None:
        """Discard the denial: permits may be available again."""
        self.denial = None
        self.on(LeaseEvent.LAPSE)


def gathered_permits(strict: Policy, length: int) -> list[int]:
    """Return how many permits of each limit are available again in one pause, on average."""
    pause = min(GATHER_PAUSE, length // 2)
    return [limit.quota * pause // limit.length for limit in strict.limits]
