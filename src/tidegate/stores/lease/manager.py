"""What the leased store does, as steps that whoever can ask the store drives: a thread, a task, or a test.

Every function here that asks is a generator. It yields a Step, is sent the Decision (or thrown what went wrong), and
returns its answer. Nothing here waits, and the lock is held only between steps, in methods that are `locked`.
"""

from __future__ import annotations

import weakref
from asyncio import CancelledError
from collections import Counter, deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision
from tidegate.errors import StoreUnavailable
from tidegate.lock import Lock, locked
from tidegate.stores.cancellation import DROPPABLE
from tidegate.stores.lease.policy_leases import PolicyLeases
from tidegate.stores.lease.share import CachedDenial, LeasedShare
from tidegate.stores.lease.terms import span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Ask
    from tidegate.stores.lease.policy_leases import Leftover
    from tidegate.stores.lease.share import Costs, KeyLease
    from tidegate.stores.lease.terms import Lease

SWEEP_PER_CALL: Final = 8  # how many holders a call looks after at most, when some are due
SWEEP_PER_JOB: Final = 256  # ... and how many a chore does, before others get their turn
MAX_ASKING: Final = 10 * SECOND  # how long one call keeps others from asking for a share of the same key


class StoreRequest(NamedTuple):
    """Something to ask the inner store: what `Store.apply` takes. Shares are only for the store itself to grant."""

    verb: str
    asks: Sequence[Ask]
    now: int | None = None
    at: int | None = None
    share: bool = False


Steps = Generator[StoreRequest, Any, Any]  # sent a list of Decisions for each Step


class Renewal(NamedTuple):
    """A share that is to follow the one in use."""

    book: PolicyLeases
    holder: KeyLease


class DeferredCall(NamedTuple):
    """A correction or a reset whose task was cancelled before the store was asked: the arguments of `Desk.asking`."""

    verb: str
    asks: Sequence[Ask]
    now: int | None
    at: int | None


class LeaseManager:
    """Holds shares of keys and answers from them; asks for more, and returns what is left over.

    The steady clock of this process is all it goes by: a lease lasts from the instant its request was *sent*, so a late
    reply only makes it shorter. Work that nobody needs to wait for is put into `chores`.
    """

    def __init__(self, lease: Lease, steady: Callable[[], int], lost: Callable[[], bool] | None = None) -> None:
        """Start with nothing held. `lost` tells whether somebody else decides at present, in place of a lost store."""
        self.lease = lease
        self.steady = steady
        self.lost = lost or bool  # never
        self.guarded = lost is not None
        self.lock = Lock()
        self.books: dict[str, PolicyLeases] = {}
        self.chores: deque[Renewal | DeferredCall | Leftover] = deque()
        self.returns: list[tuple[weakref.ref[Steps], Leftover]] = []  # under way; some may have ended
        self.totals: Counter[str] = Counter()

    # ---- the verbs ---------------------------------------------------------------------------------------------------

    def asking(self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None) -> Steps:
        """Do what `Store.apply` does."""
        if len(asks) == 1:
            policy, key, costs = asks[0]
            book = self.book(policy)
            if book.length and now is None and any(costs):
                if verb == "acquire":
                    return [(yield from self.acquiring(book, key, costs))]
                if verb == "peek" and (seen := self.look(book, key, costs)) is not None:
                    return [seen]
                if verb == "hold":
                    return [(yield from self.exactly("hold", book, key, costs))]
        if not (verb == "adjust" and at is not None):  # a correction of what the store was asked for touches no share
            try:
                yield from self.clearing(verb, asks)
            except CancelledError:
                if verb not in DROPPABLE:
                    self.chores.append(DeferredCall(verb, asks, now, at))
                raise
        elif len(asks) == 1:
            self.reconsider(*asks[0][:2])
        return [told(policy, decision) for (policy, _, _), decision in zip(
            asks, (yield StoreRequest(verb, [(self.book(p).strict, k, c) for p, k, c in asks], now, at)), strict=True
        )]  # fmt: skip

    def acquiring(self, book: PolicyLeases, key: Key, costs: Costs) -> Steps:
        """Take permits for a call: from a share, or from the store together with a new share."""
        taken = self.take(book, key, costs)
        if isinstance(taken, Decision):
            return taken
        holder, want, now = taken
        if holder is not None and want != costs:
            answer = None
            try:
                answer = yield from self.holding(book, holder, want, now, costs)
            except StoreUnavailable:
                if not self.guarded:
                    raise
            if answer is not None:
                return answer
        return (yield from self.exactly("acquire", book, key, costs))

    @locked
    def take(self, book: PolicyLeases, key: Key, costs: Costs) -> Decision | tuple[KeyLease | None, Costs, int]:
        """Answer a call from here, or tell what to ask the store for, and since when."""
        now = self.steady()
        self.sweep(book, now, SWEEP_PER_CALL)
        holder = book.holder(key, now)
        want = costs
        if holder is not None:  # else there is no room for one more
            answer = self.answer(book, holder, costs, now)
            if answer is not None:
                return answer
            if holder.asking > now:
                holder.miss(costs)
            elif not self.lost():
                want = holder.wish(costs, now, book.length, self.lease.spread)
                holder.asking = now + MAX_ASKING if want != costs else 0
            holder.seen = now
        return holder, want, now

    def answer(self, book: PolicyLeases, holder: KeyLease, costs: Costs, now: int) -> Decision | None:
        """Answer a call from what is held and known here, if that is enough. The lock is ours."""
        self.leave(book.retire(holder.key, holder.advance(now)))
        share, denial = holder.take(costs, now), holder.denial
        if share is not None:
            if share is holder.share and (share.units <= share.low or now >= share.fresh):
                self.renew(book, holder, now)
            return share.decision(book.policy.limits, now)
        if denial is not None and denial.costs == costs and now < denial.until:
            return told(book.policy, denial.repeated(now))
        return None

    def holding(self, book: PolicyLeases, holder: KeyLease, want: Costs, sent: int, costs: Costs) -> Steps:
        """Take a share, and permits for a call from it; None if the store has not as much."""
        try:
            (decision,) = yield StoreRequest("hold", [(book.strict, holder.key, want)], share=True)
        except CancelledError:  # the store gives it back by itself
            self.stop_asking(holder)
            raise
        except BaseException:
            self.lose(book, holder, want)
            raise
        return self.grant(book, holder, want, sent, costs, decision)

    @locked
    def stop_asking(self, holder: KeyLease) -> None:
        """Let the next call of a key request a share."""
        holder.asking = 0

    @locked
    def lose(self, book: PolicyLeases, holder: KeyLease, want: Costs) -> None:
        """Count a share as lost: charged or not, nobody knows."""
        holder.asking = 0
        book.count("granted", want)

    @locked
    def grant(
        self, book: PolicyLeases, holder: KeyLease, want: Costs, sent: int, costs: Costs, decision: Decision
    ) -> Decision | None:
        """Hold a share that the store has granted, after taking from it what a call needs."""
        received = self.steady()
        holder.asking = 0
        holder.left = [view[0] for view in decision.views]
        if not decision.allowed:
            return None
        book.count("granted", want)
        lasts = span(book.strict.limits, want, decision.views, book.length)
        share = LeasedShare(book.policy.one, want, decision, sent, received, lasts)
        share.take(costs)
        answer = share.decision(book.policy.limits, received)
        if holder.forgotten:  # reset meanwhile, before the charge or after: not ours to return
            book.count("used", share.used)
        elif book.closed:
            self.leave(book.retire(holder.key, [share]))
        else:
            self.leave(book.retire(holder.key, holder.install(share, received)))
        return answer

    def exactly(self, verb: str, book: PolicyLeases, key: Key, costs: Costs) -> Steps:
        """Ask the store for exactly this call. A denial counts only when nothing of the key is held back here."""
        while True:
            sent = self.steady()
            (decision,) = yield StoreRequest(verb, [(book.strict, key, costs)])
            returning = self.heed(book, key, costs, sent, decision)
            if returning is None:
                return told(book.policy, decision)
            yield from returning

    @locked
    def heed(self, book: PolicyLeases, key: Key, costs: Costs, sent: int, decision: Decision) -> Steps | None:
        """Remember what the store said; after a denial, return what is held of the key."""
        received = self.steady()
        holder = book.holders.get(key)
        if holder is None:
            return None
        holder.left = [view[0] for view in decision.views]
        gone = [] if decision.allowed else book.retire(key, holder.strip())
        if not decision.allowed and not gone and not self.lost():
            wait = book.length if decision.retry == NEVER else min(book.length, decision.retry)
            holder.denial = CachedDenial(costs, decision, received, sent + wait)
        return self.begin(gone) if gone else None

    @locked
    def look(self, book: PolicyLeases, key: Key, costs: Costs) -> Decision | None:
        """Answer a peek from a share that would answer the call."""
        holder, now = book.holders.get(key), self.steady()
        if holder is not None:
            for share in (holder.share, holder.after):
                if now < share.ends and (left := share.after(costs)) is not None:
                    return share.decision(book.policy.limits, now, left)
        return None

    def clearing(self, verb: str, asks: Sequence[Ask]) -> Steps:
        """Return what is held of the keys before the store is asked about them; on reset, forget it."""
        books = [(self.book(policy), key) for policy, key, _ in asks]
        yield from self.clear(books, forget=verb == "reset")

    @locked
    def clear(self, keys: list[tuple[PolicyLeases, Key]], *, forget: bool) -> Steps:
        """Let go of what is held of keys, and return it, unless it is to be forgotten."""
        gone: list[Leftover] = []
        for book, key in keys:
            holder = book.holders.get(key)
            if holder is not None:
                holder.denial = None
                left = book.retire(key, holder.strip())
                if forget:
                    holder.forgotten = True
                    del book.holders[key]
                else:
                    gone += left
        return self.begin(gone)

    def reconsider(self, policy: Policy, key: Key) -> None:
        """Forget a denial: permits may have come back."""
        holder = self.book(policy).holders.get(key)
        if holder is not None:
            holder.denial = None

    # ---- chores ------------------------------------------------------------------------------------------------------

    def renew(self, book: PolicyLeases, holder: KeyLease, now: int) -> None:
        """Have a share follow the one that is running out. The lock is ours."""
        holder.share.low, holder.share.fresh = 0, holder.share.ends  # once is enough
        if holder.asking <= now and holder.after.ends <= holder.share.ends:
            holder.asking = now + MAX_ASKING
            self.chores.append(Renewal(book, holder))

    def renewing(self, book: PolicyLeases, holder: KeyLease) -> Steps:
        """Take the next share ahead of its need."""
        want, sent = self.plan(book, holder)
        if any(want):
            yield from self.holding(book, holder, want, sent, (0,) * len(want))

    @locked
    def plan(self, book: PolicyLeases, holder: KeyLease) -> tuple[Costs, int]:
        """Tell what to take ahead of any need, and since when; nothing where it would be of no use."""
        sent = self.steady()
        nothing = (0,) * len(book.policy.limits)
        want = holder.wish(nothing, sent, book.length, self.lease.spread)
        if book.closed or holder.forgotten or self.lost():
            want = nothing
        holder.asking = sent + MAX_ASKING if any(want) else 0
        return want, sent

    def leave(self, leftovers: Iterable[Leftover]) -> None:
        """Have leftovers returned. The lock is ours."""
        self.chores.extend(leftovers)

    def begin(self, leftovers: list[Leftover]) -> Steps:
        """Return leftovers, and know of them while that is under way. The lock is ours."""
        steps = self.returning(leftovers)
        self.returns = [each for each in self.returns if under_way(each[0])]
        self.returns += [(weakref.ref(steps), leftover) for leftover in leftovers]
        return steps

    def returning(self, leftovers: Iterable[Leftover]) -> Steps:
        """Return what is left of shares, as of the instant it was charged."""
        rest = deque(leftovers)
        while rest:
            book, key, share = rest.popleft()
            left = share.left
            try:
                yield StoreRequest(
                    "adjust", [(book.strict, key, tuple(-permits for permits in left))], None, share.charged
                )
            except CancelledError:  # the store makes a correction that was begun
                self.count(book, "returned", left)
                self.postpone(rest)
                raise
            except Exception:
                self.postpone(rest)
                raise
            self.count(book, "returned", left)

    @locked
    def postpone(self, leftovers: Iterable[Leftover]) -> None:
        """Have leftovers returned later."""
        self.leave(leftovers)

    @locked
    def count(self, book: PolicyLeases, became: str, permits: Costs) -> None:
        """Count what became of permits."""
        book.count(became, permits)

    def sweep(self, book: PolicyLeases, now: int, most: int) -> None:
        """Look after holders of a book that are due. The lock is ours."""
        if book.due and book.due[0][0] <= now:
            self.leave(book.sweep(now, most))

    @locked
    def chore(self) -> Steps | None:
        """Give something to do, if there is any."""
        now = self.steady()
        for book in self.books.values():
            self.sweep(book, now, SWEEP_PER_JOB)
        if not self.chores:
            return None
        chore = self.chores.popleft()
        if isinstance(chore, Renewal):
            return self.renewing(*chore)
        return self.asking(*chore) if isinstance(chore, DeferredCall) else self.begin([chore])

    @locked
    def due(self) -> int | None:
        """Tell when there may be something to do next; None: not before somebody calls."""
        return min((book.due[0][0] for book in self.books.values() if book.due), default=None)

    # ---- the books ---------------------------------------------------------------------------------------------------

    def book(self, policy: Policy) -> PolicyLeases:
        """Find the book of a policy; what is held under an earlier one of that name is returned."""
        book = self.books.get(policy.name)
        if book is None or (book.policy is not policy and book.policy != policy):
            book = self.open(policy)
        return book

    @locked
    def open(self, policy: Policy) -> PolicyLeases:
        """Start the book of a policy."""
        # A guard that goes on by itself when the store is lost has shares of its own kind for that.
        alone = self.guarded and policy.on_store_error == "local"
        book = PolicyLeases(policy, None if alone else self.lease, self.totals)
        before = self.books.get(policy.name)
        if before is not None:
            self.leave(before.strip())
        self.books[policy.name] = book
        return book

    @locked
    def return_all(self) -> None:
        """Have all that is left returned."""
        for book in self.books.values():
            for holder in book.holders.values():
                self.leave(book.retire(holder.key, holder.strip()))

    @locked
    def close(self) -> None:
        """Have all that is left returned, and hold nothing from now on."""
        for book in self.books.values():
            self.leave(book.strip())

    @locked
    def disown(self) -> None:
        """Forget everything, in a child process: the shares are its parent's."""
        self.chores.clear()
        self.returns.clear()
        self.totals.clear()
        for book in self.books.values():
            book.clear()

    def sums(self) -> dict[str, int]:
        """Count permits by what became of them and by unit, and keys with a holder."""
        totals, units = self.add_up()
        for unit in sorted(units):
            known = ("granted", "used", "returned", "outstanding")
            granted, *kept = (totals[f"lease_{what}_{unit}"] for what in known)
            totals.update({f"lease_{what}_{unit}": 0 for what in known})
            totals[f"lease_lost_{unit}"] = max(0, granted - sum(kept))
        return dict(totals)

    @locked
    def add_up(self) -> tuple[Counter[str], set[str]]:
        """Count what is held and what is gone; tell in which units."""
        totals = Counter({"lease_keys": sum(len(book.holders) for book in self.books.values())})
        totals.update(self.totals)
        units: set[str] = set()
        for book in self.books.values():
            if book.length:
                units.update(book.units)
                book.count_held(totals)
        leftovers = [chore for chore in self.chores if not isinstance(chore, Renewal | DeferredCall)]
        leftovers += [leftover for steps, leftover in self.returns if under_way(steps)]
        for book, _, share in leftovers:
            book.count("outstanding", share.left, totals)
        return totals, units


def under_way(steps: weakref.ref[Steps]) -> bool:
    """Tell whether somebody may still drive some steps to their end."""
    found = steps()
    return found is not None and found.gi_frame is not None  # type: ignore[attr-defined]  # a generator function made it


def told(policy: Policy, decision: Decision) -> Decision:
    """Pass on what the store said of the stricter limits as said of the policy's own."""
    if decision[2] is policy.limits:
        return decision
    return Decision((decision.allowed, decision.at, policy.limits, decision.views, None))
