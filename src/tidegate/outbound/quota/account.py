"""An Account: one quota at a provider, how much of it we may use right now, and what its answers have taught.

**When a permit counts.** See `delays`: no window of the provider sees more than its limit, whatever the network delays.

**Refusals.** See `refusals` for what they teach and `board` for how processes on one store hear of each other's.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.adaptive import GatedStore, RecoveringClock, RecoverySettings
from tidegate.core.bounds import MAX_INTEGER, SECOND, ceil_div
from tidegate.errors import StoreUnavailable
from tidegate.fork import fork_safe
from tidegate.outbound.capacity.learning import (
    TOO_MANY_REQUESTS,
    LimitCorrection,
    ProviderCharge,
    ProviderCharges,
    corrections,
)
from tidegate.outbound.capacity.refusals import Refusals
from tidegate.outbound.capacity.shared_notices import SharedNotices
from tidegate.outbound.providers.provider import CONCURRENCY_UNIT, REQUESTS_UNIT
from tidegate.outbound.quota.arrival import MOVABLE_ALGORITHMS, ArrivalDelays
from tidegate.outbound.quota.tokens import TOKEN_UNITS
from tidegate.policy import Policy
from tidegate.reservation import charged_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidegate.adaptive.capacities import CapacitySnapshot
    from tidegate.core import Decision, Limit
    from tidegate.headers import Advice
    from tidegate.limiter import AsyncLimiter, Limiter
    from tidegate.outbound.capacity.shared_capacity import SharedCapacity
    from tidegate.outbound.capacity.shared_notices import SharedNotice
    from tidegate.outbound.providers.provider import Provider
    from tidegate.outbound.quota.charge import Charge, Flow
    from tidegate.policy import Cost, Key
    from tidegate.stores import Store

RECOVERY_STEP_PERIODS: Final = 4  # periods between two steps of recovery
SMALL_QUOTA_PERIODS: Final = (
    200  # of a small quota, more periods: a step too far costs a refusal, which should stay rare
)
IDLE_AFTER: Final = 600 * SECOND
MAX_RECOVERY_STEP: Final = 900 * SECOND


def terms(provider: Provider) -> RecoverySettings:
    """Tell how the capacity of a provider recovers."""
    limit = provider.limits[narrowest(provider.limits)]
    interval = limit.length * max(RECOVERY_STEP_PERIODS, ceil_div(SMALL_QUOTA_PERIODS, limit.quota))
    return RecoverySettings(Fraction(1, 2), Fraction(21, 20), min(interval, max(MAX_RECOVERY_STEP, limit.length)))


def narrowest(limits: tuple[Limit, ...]) -> int:
    """Tell which limit a refusal is about, as far as one can guess: the shortest that counts requests."""
    return min(
        range(len(limits)),
        key=lambda i: (limits[i].unit != REQUESTS_UNIT, limits[i].unit == CONCURRENCY_UNIT, limits[i].length),
    )


class Account:
    """One quota: a limiter of its own, whose capacity follows what the provider says."""

    def __init__(
        self,
        provider: Provider,
        key: Key,
        resource: str,
        store: Store,
        pressure: SharedCapacity,
        limiter: Callable[..., Limiter | AsyncLimiter],
        apply: Callable[..., Any],
    ) -> None:
        """Share a store with other accounts; `limiter` makes a limiter, `apply` asks the store, awaited or not."""
        self.key = key
        self.resource = resource
        self.pressure = pressure
        self.store = GatedStore(store)
        self.store.clock = RecoveringClock(store.clock, partial(pressure.due, resource), self.refresh)
        self.clock = self.store.clock
        self._apply = apply
        self._lock = fork_safe(threading.RLock())
        self.used = self.clock.steady()  # when it was last asked for
        self._empty = 0  # until then the provider has nothing left
        self._lessons = ProviderCharges()
        self._set(provider)
        self.delays = ArrivalDelays(provider.limits, self._narrow, self.clock, self.refresh)
        self._begin()
        self.limiter: Any = limiter(provider.policy, store=self.store)
        pressure.set(resource, self._narrow.quota, self.refresh, self._told)
        self.refresh()

    def _set(self, provider: Provider) -> None:
        self.provider = provider
        limits = provider.limits
        self._index = narrowest(limits)
        self._narrow = limits[self._index]
        self.settles = any(limit.algorithm == "concurrency" or limit.unit in TOKEN_UNITS for limit in limits)
        # Nothing that will be corrected as a rule, nor needs a mark in case it is.
        self.plain = not self.settles and all(limit.algorithm in MOVABLE_ALGORITHMS for limit in limits)
        self.units = frozenset(limit.unit for limit in limits)
        self.guessed = tuple(unit for unit in TOKEN_UNITS if unit in self.units)
        self.usual_cost = self._usual_cost()
        self._wide = self._without_end(limits)

    def _begin(self) -> None:
        """Know nothing yet of how its narrowest limit is kept."""
        self._refusals = Refusals(self._narrow, self.pressure.interval or 0)
        self._board = SharedNotices(self.provider.domain, self.key, self._apply, self._narrow.length)
        self._look_at = self.clock.steady()

    def _without_end(self, limits: tuple[Limit, ...]) -> Policy:
        """Give the same limits without an end: what must be charged whether it fits or not."""
        wide = [
            replace(each, quota=MAX_INTEGER, burst=0) if each.algorithm in MOVABLE_ALGORITHMS else each
            for each in limits
        ]
        return Policy(self.provider.policy.name, tuple(wide), "enforce", self.provider.policy.on_store_error)

    def _usual_cost(self) -> Cost | None:
        """Tell what every request costs; None: that depends on the request."""
        policy, cost = self.provider.policy, self.fit(self.provider.cost(None))
        if self.provider.endpoints or self.guessed:
            return None
        return 1 if policy.counted and policy.costs(cost) == policy.one else cost

    def take_over(self, provider: Provider) -> None:
        """Follow a changed file."""
        with self._lock:
            before, limits = self._narrow, self.provider.limits
            self._set(provider)
            if provider.limits != limits:
                self.delays = ArrivalDelays(provider.limits, self._narrow, self.clock, self.refresh, self.delays.line)
                self._lessons.clear()
            if self._narrow != before:
                self._begin()
            if self._narrow.quota != before.quota:
                self.pressure.set(self.resource, self._narrow.quota, self.refresh, self._told)
            self.limiter.update(provider.policy)
            self.refresh()

    def refresh(self) -> None:
        """Keep to the capacity of this moment; of two threads, the second looks after the first is done."""
        with self._lock:
            look = self.pressure.look(self.resource)
            if look is None:
                return
            held = self._refusals.held(self.clock.steady(), look.current)
            if held is None:
                self._keep_to(look)
            else:
                self.pressure.hold(self.resource, held)  # calls refresh again

    def _keep_to(self, look: CapacitySnapshot) -> None:
        until = max(look.frozen_until or 0, self._empty)
        if until > self.clock.steady():
            self.store.shut(self.provider.policy.name, until)
        else:
            self.store.open(self.provider.policy.name)
        limits = self.delays.stretched()
        self._longer = self._without_end(tuple(limits))
        if look.current < self._narrow.quota:
            least = max((costs[self._index] for costs in self._costs()), default=1)  # each must fit still
            burst = 0 if self._narrow.burst == self._narrow.quota else min(self._narrow.burst, look.current)
            limits[self._index] = replace(limits[self._index], quota=max(look.current, least), burst=burst)
        if self.limiter.policy.limits != tuple(limits):
            self.limiter.update(replace(self.provider.policy, limits=tuple(limits)))

    def recover(self) -> None:
        """Take a step of recovery that is due: who waits sees to that, but not everybody waits."""
        due = self.pressure.due(self.resource)
        if due is not None and self.clock.steady() >= due:
            self.refresh()

    def idle(self) -> bool:
        """Tell whether it knows nothing that one opened anew would not: nothing is under way, reduced or in use."""
        now = self.clock.steady()
        quiet = max(IDLE_AFTER, 2 * max(limit.length for limit in self.provider.limits))  # a lease is a length too
        if now - self.used < quiet or self._empty > now or self.limiter.waiting or self.delays.busy:
            return False
        look = self.pressure.look(self.resource)
        return look is None or (look.current >= look.original and look.frozen_until is None)

    def _costs(self) -> list[tuple[int, ...]]:
        return [self.provider.policy.costs(self.provider.cost(endpoint)) for endpoint in self.provider.endpoints]

    @property
    def capacity(self) -> int:
        """What may be used of the narrowest limit at present."""
        look = self.pressure.look(self.resource)
        return self._narrow.quota if look is None else look.current

    def fit(self, cost: Mapping[str, int]) -> Cost:
        """Cut an estimate down to what can ever be allowed; requests are counted as they are."""
        found = {}
        for unit, amount in cost.items():
            if unit in self.units:
                most = min(limit.burst for limit in self.provider.limits if limit.unit == unit)
                found[unit] = min(amount, most) if unit in TOKEN_UNITS else amount
        return found

    # ---- after an answer ---------------------------------------------------------------------------------------------

    def moving(self, ticket: Charge) -> Flow:
        """Let a permit count from now instead of from when it was asked for, if need be."""
        try:
            yield from self._moving(ticket, self.delays.overdue(ticket))
        except StoreUnavailable:
            return  # the first charge must do

    def _moving(self, ticket: Charge, costs: tuple[int, ...]) -> Flow:
        """Charge anew, and give the first charge back; tell whether that could be done."""
        if not costs:
            return True
        (anew,) = yield self._asking("acquire", costs)
        if charged_at(anew, self._longer) is None:
            return False
        if ticket.settled:  # answered meanwhile: the first charge was dealt with
            parts = [(anew.at, costs)]
        else:
            parts = ticket.parts(costs)
            ticket.move(costs, anew)
        for at, part in parts:
            if any(part):
                yield from self._giving_back(part, at)
        return True

    def renewing(self, ticket: Charge, at: int) -> Flow:
        """Charge a request anew that may yet arrive, as long as there is patience for that; tell whether it was.

        It is to count beside a permit that was charged `at`.
        """
        if not self.delays.take(ticket):
            return True  # another thread does it
        costs = self.delays.overdue(ticket, at)
        try:
            charged = yield from self._moving(ticket, costs)
        except BaseException:
            self.delays.put_back(ticket)
            raise
        if not charged:  # nor will the next permit be used where that must not be
            self.delays.put_back(ticket)
            return self.provider.policy.on_store_error == "deny"
        if costs or ticket.ends < MAX_INTEGER:  # else there is no patience left, and no window to end
            ticket.since = self.clock.steady()
            self.delays.begin(ticket)
        return bool(costs)

    def charging_again(self, amount: int, earlier: int | None) -> Flow:
        """Count requests of which nobody knows when they arrived, if at all, as if they arrived now.

        In place of the charge made `earlier` for the same, if there was one. Gives the instant of the charge.
        """
        pairs = ((limit.algorithm in MOVABLE_ALGORITHMS, limit.unit == REQUESTS_UNIT) for limit in self.provider.limits)
        costs = tuple(amount if all(pair) else 0 for pair in pairs)
        if not any(costs):
            return None
        (decision,) = yield self._asking("acquire", costs)
        if charged_at(decision, self._longer) is None:
            return earlier
        if earlier is not None:
            yield from self._giving_back(costs, earlier)
        return decision.at

    def learning(self, advice: Advice) -> Flow:
        """Take over what the provider says is left, where that is less than we thought; or take that back."""
        said = corrections(self.provider.limits, advice)
        if not said:
            return 0
        changed = 0
        looked = yield from self._looking()
        for each in said:
            limit = self.provider.limits[each.place]
            if limit.algorithm in MOVABLE_ALGORITHMS and looked is not None:
                changed += yield from self._correcting(each, limit.burst - self._used(looked, each.place), looked.at)
            if not each.remaining and each.reset:
                self._empty = max(self._empty, self.clock.steady() + each.reset)
                self.refresh()
        return changed

    def _correcting(self, said: LimitCorrection, left: int, now: int) -> Flow:
        costs = [0] * len(self._wide.limits)
        self._lessons.forget(self.provider.limits, now)
        try:
            if said.remaining < left:
                costs[said.place] = left - said.remaining
                (decision,) = yield self._asking("acquire", tuple(costs))
                at = charged_at(decision, self._longer)
                if at is not None:
                    self._lessons.add(ProviderCharge(said.place, left - said.remaining, at))
                return int(at is not None)
            for lesson in self._lessons.take(said.place, said.remaining - left):
                costs[said.place] = lesson.amount
                yield from self._giving_back(tuple(costs), lesson.at)
        except StoreUnavailable:
            pass  # what others use will be denied by the provider, and learned from that
        return 0

    def _looking(self) -> Flow:
        """Look at what is in use, over all who share the store; None: it cannot be asked."""
        try:
            (looked,) = yield partial(self._apply, "peek", ((self._wide, self.key, (0,) * len(self._wide.limits)),))
        except StoreUnavailable:
            return None
        return looked

    def _used(self, looked: Decision, index: int) -> int:
        limit = looked[2][index]
        return limit.burst - looked.views[index][0] if index < len(looked.views) else 0

    # ---- refusals ----------------------------------------------------------------------------------------------------

    def refusing(self, status: int, ticket: Charge, sent: int, retry_after: float | None) -> Flow:
        """Send less, and nothing for a while; others hear of it through the store and over the bus."""
        yield from self.noticing()
        used = (yield from self._let_through(ticket)) if status == TOO_MANY_REQUESTS else 0
        current = self.capacity
        notice = self._refusals.refused(self.clock.steady(), sent, current, used, retry_after)
        if notice.value < current or notice.pause:
            said = (
                "answered 429 Too Many Requests" if status == TOO_MANY_REQUESTS else "answered 503 Service Unavailable"
            )
            self.pressure.say(self.resource, *notice, said)
            self._hear((yield from self._board.writing(notice)))

    def _let_through(self, ticket: Charge) -> Flow:
        """Tell how much of the narrowest limit was in use when a refused request arrived.

        That is what was in use when it was charged. But if much less is now, then because others were refused with it.
        """
        own, charged = ticket.costs[self._index], self._used(ticket.decision, self._index)
        looked = yield from self._looking()
        now = charged if looked is None else self._used(looked, self._index)
        return (charged if charged * 7 <= now * 8 else now) - own

    def stale(self) -> bool:
        """Tell whether it is time to look what other processes were told."""
        now = self.clock.steady()
        if now < self._look_at:
            return False
        self._look_at = now + self._board.every
        return True

    def noticing(self) -> Flow:
        """Look what other processes were told; tell whether that changes what may be sent."""
        return self._hear((yield from self._board.looking()))

    def _hear(self, news: SharedNotice | None) -> bool:
        if news is None:
            return False
        self._told(news.notice.value, news.age)
        return self.pressure.hear(self.resource, *news.notice, news.age)

    def _told(self, value: int, age: int = 0) -> None:
        now = self.clock.steady()
        self._refusals.heard(now, now - age, self.capacity, value)

    def worked(self) -> None:
        """Take note of an answer that was no refusal."""
        self._refusals.worked()

    # ---- asking the store --------------------------------------------------------------------------------------------

    def _asking(self, verb: str, costs: tuple[int, ...], at: int | None = None) -> Callable[[], Any]:
        return partial(self._apply, verb, ((self._longer, self.key, costs),), None, at)

    def _giving_back(self, costs: tuple[int, ...], at: int) -> Flow:
        yield self._asking("adjust", tuple(-cost for cost in costs), at)
        for lines in tuple(self.store.wait_queues):
            lines.wake(self.key)
