"""An Account: one quota at a provider, how much of it we may use right now, and what its answers have taught.

**When a permit counts.** The provider counts a request when it arrives, which nobody here knows exactly: after it was
sent, before it was answered. So a permit is charged before the request is sent and, when the answer is there, charged
anew and the first charge given back: it counts until a period after the answer. So whatever the network delays, by up
to a period, no window of the provider sees more than its limit. The price is the time of an answer per period. Where
answers are slow that would be much, although their requests arrive as quickly as others: an account that has paid a
whole quota for it in all (`Patience`) lets permits count a fortieth longer instead, which covers what a network does.
So do limits of more than `MOST_MOVED`, by less: to find one permit among so many takes longer than it is worth.

**Refusals.** A 429 gives its permit back and lowers the capacity to what is in use then, which is what the provider has
let through, though not below half at once; a 503 lowers it to half. Nothing is sent before Retry-After has passed or,
where that is not said, for a while that doubles with each refusal. Capacity recovers by a twentieth at a time; where it
is refused again and again at the same level, that level is held for longer and longer before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.adaptive import GatedStore, RecoveringClock, Terms
from tidegate.core.bounds import MAX, SECOND, ceil_div
from tidegate.outbound.learning import REFUSED, Correction, corrections
from tidegate.outbound.provider import CALLS, SLOTS
from tidegate.outbound.tokens import UNITS
from tidegate.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.core import Decision, Limit
    from tidegate.headers import Advice
    from tidegate.limiter import AsyncLimiter, Limiter
    from tidegate.outbound.pressure import Pressure
    from tidegate.outbound.provider import Provider
    from tidegate.policy import Cost, Key
    from tidegate.reservation import AsyncReservation, Reservation
    from tidegate.stores import Store

    Ticket = Reservation | AsyncReservation

Flow = Generator[Callable[[], Any], Any, Any]  # steps to call, or to call and await; sent what they gave

MOVED: Final = ("sliding_log", "fixed_window", "calendar_window")  # what knows when a permit was taken
FREE: Final = 4  # periods between two steps of recovery
PROBES: Final = 200  # of a small quota, more periods: a step too far costs a refusal, which should stay rare
MOST_HELD: Final = 8  # steps of recovery for which a level is held at most
SLOWEST: Final = 900 * SECOND
FIRST_PAUSE: Final = SECOND  # after the first refusal that says nothing of when; less where the period is short
LONGEST_PAUSE: Final = 60 * SECOND
MOST_MOVED: Final = 2000
LONGEST_DELAY: Final = 5 * SECOND  # of a network


class Patience:
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


class Lesson(NamedTuple):
    """A charge that only the provider's word stands for: which limit, how much, when."""

    place: int
    amount: int
    at: int


def terms(provider: Provider) -> Terms:
    """Tell how the capacity of a provider recovers."""
    limit = provider.limits[narrowest(provider.limits)]
    interval = limit.length * max(FREE, ceil_div(PROBES, limit.quota))
    return Terms(Fraction(1, 2), Fraction(21, 20), min(interval, max(SLOWEST, limit.length)))


def moved(limit: Limit) -> bool:
    """Tell whether a permit of a limit is charged anew after the answer."""
    return limit.algorithm in MOVED and (limit.algorithm != "sliding_log" or limit.quota <= MOST_MOVED)


def narrowest(limits: tuple[Limit, ...]) -> int:
    """Tell which limit a refusal is about, as far as one can guess: the shortest that counts requests."""
    return min(range(len(limits)), key=lambda i: (limits[i].unit != CALLS, limits[i].unit == SLOTS, limits[i].length))


class Account:
    """One quota: a limiter of its own, whose capacity follows what the provider says."""

    def __init__(
        self,
        provider: Provider,
        key: Key,
        resource: str,
        store: Store,
        pressure: Pressure,
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
        self._strikes = 0
        self._paused = 0  # no refusal of what was sent before then counts as another one
        self._level = 0  # of the last refusals, held until then
        self._hold = 0
        self._hold_until = 0
        self._empty = 0  # until then the provider has nothing left
        self._episode: tuple[int, int] | None = None
        self._lessons: list[Lesson] = []
        self._patience: Patience | None = None
        self._set(provider)
        self.limiter: Any = limiter(provider.policy, store=self.store)
        pressure.set(resource, self._narrow.quota, self.refresh)
        self.refresh()

    def _set(self, provider: Provider) -> None:
        self.provider = provider
        limits = provider.limits
        self._index = narrowest(limits)
        self._narrow = limits[self._index]
        self.moves = any(map(moved, limits))
        self.settles = any(limit.algorithm == "concurrency" or limit.unit in UNITS for limit in limits)
        self.units = frozenset(limit.unit for limit in limits)
        self._patience = Patience(self._narrow)
        # The same limits without an end: what must be charged whether it fits or not.
        wide = [replace(each, quota=MAX, burst=0) if each.algorithm in MOVED else each for each in limits]
        self._wide = Policy(provider.policy.name, tuple(wide), "enforce", provider.policy.on_store_error)

    def take_over(self, provider: Provider) -> None:
        """Follow a changed file."""
        before = self._narrow
        self._set(provider)
        if self._narrow.quota != before.quota:
            self.pressure.set(self.resource, self._narrow.quota, self.refresh)
        self.limiter.update(provider.policy)
        self.refresh()

    def refresh(self) -> None:
        """Keep to the capacity of this moment."""
        look = self.pressure.look(self.resource)
        if look is None:
            return
        if look.current > self._level and self.clock.steady() < self._hold_until:
            self.pressure.say(self.resource, self._level, 0, "refused at more than this before")  # calls refresh again
            return
        until = max(look.frozen_until or 0, self._empty)
        if until > self.clock.steady():
            self.store.shut(self.provider.policy.name, until)
        else:
            self.store.open(self.provider.policy.name)
        limits = [self._stretched(limit) for limit in self.provider.limits]
        if look.current < self._narrow.quota:
            least = max((costs[self._index] for costs in self._costs()), default=1)  # each must fit still
            burst = 0 if self._narrow.burst == self._narrow.quota else min(self._narrow.burst, look.current)
            limits[self._index] = replace(limits[self._index], quota=max(look.current, least), burst=burst)
        if self.limiter.policy.limits != tuple(limits):
            self.limiter.update(replace(self.provider.policy, limits=tuple(limits)))

    def _stretched(self, limit: Limit) -> Limit:
        """Let permits count a little longer, where they are not charged anew."""
        if limit.algorithm != "sliding_log":
            return limit
        if self._patience is not None and self._patience.lost:
            longer = min(limit.length // 40, LONGEST_DELAY)
        elif limit.quota > MOST_MOVED:
            longer = min(limit.length // 200, SECOND)
        else:
            return limit
        return replace(limit, period=timedelta(microseconds=limit.length + longer), name=limit.name)

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
                found[unit] = min(amount, most) if unit in UNITS else amount
        return found

    # ---- after an answer ---------------------------------------------------------------------------------------------

    def moving(self, ticket: Ticket, sent: int) -> Flow:
        """Let a permit count from now instead of from when it was asked for."""
        flight = self.clock.steady() - sent
        if not self.moves or flight <= 0 or self._patience is None:
            return
        before = self._patience.lost
        anew = self._patience.spend(flight)
        if self._patience.lost != before:
            self.refresh()
        if not anew:
            return
        pairs = zip(self.provider.limits, ticket.costs, strict=False)
        costs = tuple(cost if moved(limit) else 0 for limit, cost in pairs)
        if len(costs) == len(self._wide.limits) and any(costs):
            (again,) = yield self._asking("acquire", costs)
            if again.allowed:  # else the store could not be asked, and the first charge must do
                yield from self._giving_back(costs, ticket.decision.at)

    def charging_again(self, amount: int, earlier: int | None) -> Flow:
        """Count requests of which nobody knows when they arrived, if at all, as if they arrived now.

        In place of the charge made `earlier` for the same, if there was one. Gives the instant of the charge.
        """
        pairs = ((limit.algorithm in MOVED, limit.unit == CALLS) for limit in self.provider.limits)
        costs = tuple(amount if all(pair) else 0 for pair in pairs)
        if not any(costs):
            return None
        (decision,) = yield self._asking("acquire", costs)
        if not decision.allowed:
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
        (looked,) = yield self._asking("peek", (0,) * len(self._wide.limits))
        for each in said:
            limit = self.provider.limits[each.place]
            left = limit.burst - self._used(looked, each.place)
            if limit.algorithm in MOVED:
                changed += yield from self._correcting(each, left)
            if not each.remaining and each.reset:
                self._empty = max(self._empty, self.clock.steady() + each.reset)
                self.refresh()
        return changed

    def _correcting(self, said: Correction, left: int) -> Flow:
        costs = [0] * len(self._wide.limits)
        if said.remaining < left:
            costs[said.place] = left - said.remaining
            (decision,) = yield self._asking("acquire", tuple(costs))
            self._lessons.append(Lesson(said.place, left - said.remaining, decision.at))
            return 1
        free = said.remaining - left
        for lesson in [each for each in self._lessons if each.place == said.place]:
            if not free:
                return 1
            self._lessons.remove(lesson)
            back = min(free, lesson.amount)
            free -= back
            costs[said.place] = back
            yield from self._giving_back(tuple(costs), lesson.at)
            if back < lesson.amount:
                self._lessons.append(lesson._replace(amount=lesson.amount - back))
        return 0

    def using(self) -> Flow:
        """Tell how much of the narrowest limit is in use, over all who share the store."""
        (looked,) = yield self._asking("peek", (0,) * len(self._wide.limits))
        return self._used(looked, self._index)

    def _used(self, looked: Decision, index: int) -> int:
        limit = looked[2][index]
        return limit.burst - looked.views[index][0] if index < len(looked.views) else 0

    def refused(self, status: int, used: int, sent: int, retry_after: float | None) -> None:
        """Send less, and nothing for a while; others hear of it over the bus."""
        now = self.clock.steady()
        current = self.capacity
        if self._episode is None or sent >= self._episode[0] + self._narrow.length:
            self._episode = (now, current)
            again = self._level * 9 < current * 10 and current * 9 < self._level * 11
            self._hold = min(MOST_HELD, self._hold * 2 or 1) if again else 0
        value = max(1, self._episode[1] // 2, used if status == REFUSED else 0)
        self._level = min(value, current)
        self._hold_until = now + self._hold * (self.pressure.interval or 0)
        if retry_after is not None:
            pause = round(retry_after * SECOND)
        elif sent >= self._paused:
            self._strikes += 1
            first = min(FIRST_PAUSE, self._narrow.length // 20)
            pause = min(first << min(self._strikes - 1, 20), self._narrow.length, LONGEST_PAUSE)
        else:
            pause = 0  # an answer to something sent before the pause began
        self._paused = max(self._paused, now + pause)
        if value < current or pause:
            said = "answered 429 Too Many Requests" if status == REFUSED else "answered 503 Service Unavailable"
            self.pressure.say(self.resource, min(value, current), pause, said)

    def worked(self) -> None:
        """Take note of an answer that was no refusal: the next refusal is a first one."""
        self._strikes = 0

    # ---- asking the store --------------------------------------------------------------------------------------------

    def _asking(self, verb: str, costs: tuple[int, ...], at: int | None = None) -> Callable[[], Any]:
        return partial(self._apply, verb, ((self._wide, self.key, costs),), None, at)

    def _giving_back(self, costs: tuple[int, ...], at: int) -> Flow:
        yield self._asking("adjust", tuple(-cost for cost in costs), at)
        for lines in tuple(self.store.waited_on):
            lines.wake(self.key)
