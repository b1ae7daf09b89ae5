"""Charges several limiters together, all or nothing, now or after waiting; a call of one limiter is the simple case.

    acquire_flow ──► nobody waits for the keys of an alternative: ask at once
         │           denied, or somebody waits: wait_flow, in the queues of the keys that do not let it pass
         ▼
    JointCall.ask_flow ──► the first that is allowed, of the alternatives that nobody ahead waits for
         ▼
    charge_flow ──► one call of the store, if all keys are in one store and slot
                    otherwise one call per group, in a fixed order; if one denies, the earlier ones are cancelled

With several groups (several stores, several slots of a Redis Cluster), no limit is exceeded either: each group is
charged before the next is asked. But a concurrent call may be denied because of a charge that is cancelled a round
trip later, and a killed process leaves the earlier groups charged. Policies in shadow mode never deny, so each of them
is asked by itself, after the others.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate._limiter.reservation import (
    AsyncReservation,
    Reservation,
    ReservedCharge,
    Reserving,
    apply_async,
    charged_at,
)
from tidegate._limiter.waiting import ApplyStep, CallStep, Denial, Places, ReadStep, Waiter, wait_flow
from tidegate._policy.key import Key, join_key, normal_key
from tidegate._runtime.arguments import check_priority, seconds
from tidegate._runtime.clock import TaskSignal, ThreadSignal
from tidegate._runtime.flow import Flow, complete_flow, run, run_async
from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import MAX_DURATION, SECOND
from tidegate.core._decision import VERBS, Decision, join_decisions
from tidegate.errors import ConfigError, Denied, RateLimitError
from tidegate.stores._base import Alternatives, Ask
from tidegate.stores._cancellation import corrections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidegate._limiter.base_limiter import BaseLimiter
    from tidegate._limiter.limiter import AsyncLimiter, Limiter
    from tidegate._limiter.waiting import QueuePlace, Step
    from tidegate._policy.model import Cost
    from tidegate._runtime.clock import Clock, Signal
    from tidegate.stores._values import Write

    JointFlow = Flow[Step, Decision]

log: logging.Logger = logging.getLogger("tidegate")


class LimiterAsk(NamedTuple):
    """What one limiter is asked for: a cost at a key. Other code gives these as plain tuples."""

    limiter: BaseLimiter
    key: Key
    cost: Cost = 1
    conditions: tuple[Write, ...] = ()  # on values, checked in the step that decides; it also makes their changes

    def ask(self) -> Ask:
        """Return what its store is asked."""
        policy = self.limiter.policy
        return policy, self.key, policy.costs(self.cost)


class Charged(NamedTuple):
    """What one attempt charged; if it was denied, only the asks that were decided with the denying one."""

    asks: Sequence[tuple[BaseLimiter, Ask]]
    decisions: Sequence[Decision]

    @property
    def allowed(self) -> bool:
        """Whether the call may proceed."""
        return all(decision.allowed for decision in self.decisions)

    def join(self) -> Decision:
        """Return one decision about all limits."""
        return join_decisions(self.decisions)

    def denying(self) -> list[QueuePlace]:
        """Return the queues of the keys whose limits denied it."""
        rows = zip(self.asks, self.decisions, strict=True)
        places = [((limiter.queues, ask[1]), decision) for (limiter, ask), decision in rows if not decision.allowed]
        if len(places) > 1:  # a denial is about all keys of a step
            places = [(place, decision) for place, decision in places if decision.violated] or places
        return [place for place, _ in places]


def charge_flow(verb: str, asked: Sequence[LimiterAsk]) -> Flow[ApplyStep, Charged]:
    """Apply a verb to all asks or to none, and call the observers."""
    asks = [(each.limiter, each.ask()) for each in asked]
    groups = group_asks(asks)
    if len(groups) == 1:
        limiter = asks[0][0]
        own = [ask for _, ask in asks]
        conditions = join_conditions(asked)
        decisions: list[Decision] = yield ApplyStep(limiter.store, verb, own, limiter.current_time(), None, conditions)
        return Charged(asks, observe_all(verb, asks, decisions))
    if VERBS[verb].charges:
        verb = "hold"  # only a marked charge can be cancelled exactly
    found: dict[int, Decision] = {}
    made: list[tuple[ApplyStep, list[Decision]]] = []
    denied: list[int] | None = None
    try:
        for group in groups:
            limiter = asks[group[0]][0]
            conditions = join_conditions([asked[place] for place in group])
            own = [asks[place][1] for place in group]
            step = ApplyStep(limiter.store, verb, own, limiter.current_time(), None, conditions)
            decisions = yield step
            made.append((step, decisions))
            found.update(zip(group, decisions, strict=True))
            if not decisions[-1].within_limits and limiter.policy.mode == "enforce":
                denied = denied or group
                if VERBS[verb].changes:
                    break
    except BaseException as raised:
        if not isinstance(raised, GeneratorExit):
            yield from cancel_flow(made, verb)
        raise
    if denied is not None and VERBS[verb].changes:
        yield from cancel_flow(made, verb)
        found = {place: found[place] for place in denied}
    charged = [asks[place] for place in sorted(found)]
    return Charged(charged, observe_all(verb, charged, [found[place] for place in sorted(found)]))


def observe_all(
    verb: str, asks: Sequence[tuple[BaseLimiter, Ask]], decisions: Sequence[Decision]
) -> Sequence[Decision]:
    """Call the observers; return the decisions as the caller sees them."""
    if not any([limiter.observed for limiter, _ in asks]):  # noqa: C419 - a generator costs more
        return decisions
    rows = zip(asks, decisions, strict=True)
    return [limiter.observe(verb, ask, decision) for (limiter, ask), decision in rows]


def join_conditions(asked: Iterable[LimiterAsk]) -> tuple[Write, ...]:
    """Return the conditions of all asks, each once."""
    return tuple(dict.fromkeys([write for each in asked for write in each.conditions]))


def group_asks(asks: Sequence[tuple[BaseLimiter, Ask]]) -> list[list[int]]:
    """Return the places of the asks that one step can decide, in an order that is the same in every process."""
    store = asks[0][0].store
    if all([limiter.store is store and ask[0].mode == "enforce" for limiter, ask in asks]):  # noqa: C419 - as above
        slots = store.key_slots([ask for _, ask in asks])
        if slots.count(slots[0]) == len(slots):
            return [[*range(len(asks))]]
    groups: dict[tuple[int, int], list[int]] = {}
    alone: list[list[int]] = []
    for place, (limiter, ask) in enumerate(asks):
        if ask[0].mode == "shadow":
            alone.append([place])
        else:
            groups.setdefault((id(limiter.store), limiter.store.key_slots((ask,))[0]), []).append(place)
    found = list(groups.values())
    if len(found) > 1:
        found.sort(key=lambda places: min((asks[place][1][0].name, join_key(asks[place][1][1])) for place in places))
    return found + alone


def cancel_flow(made: Iterable[tuple[ApplyStep, Sequence[Decision]]], verb: str) -> Flow[ApplyStep, None]:
    """Refund what steps have charged, each even if another refund fails, or the task is cancelled."""
    yield from complete_flow(*(_cancel_step_flow(verb, step, decisions) for step, decisions in made))


def _cancel_step_flow(verb: str, step: ApplyStep, decisions: Sequence[Decision]) -> Flow[ApplyStep, None]:
    pairs = zip(step.asks, decisions, strict=True)
    charged = [(ask, decision) for ask, decision in pairs if charged_at(decision, ask[0]) is not None]
    asks = [ask for ask, _ in charged]
    for correction in corrections(verb, asks, [decision for _, decision in charged], 0):
        try:
            yield ApplyStep(step.store, "adjust", correction.asks, step.now, correction.at)
        except RateLimitError as error:
            log.error("could not refund the charge of a denied call: %s", error)  # noqa: TRY400 - the message has all details
        finally:
            step.store.wake(correction.asks)


class JointCall:
    """One call: alternatives, each of one or more asks that are charged together, and what was charged."""

    __slots__ = ("alternatives", "charged", "chosen", "denying")

    def __init__(self, alternatives: Sequence[Sequence[LimiterAsk]]) -> None:
        """Ask for the first alternative that is allowed."""
        self.alternatives: Sequence[Sequence[LimiterAsk]] = alternatives
        self.charged: Charged | None = None
        self.chosen: int = 0  # the place of the alternative that was charged
        self.denying: list[QueuePlace] = []  # the queues of the keys that denied the last ask

    def ask_flow(self, verb: str, numbers: Sequence[int]) -> JointFlow:
        """Apply a verb to the first of some alternatives that is allowed; returns it, or the soonest denial."""
        self.denying = []
        if len(numbers) == 1:
            return (yield from self._try_flow(verb, numbers[0]))
        together = self._one_step(numbers)
        if together is not None:
            return (yield from self._choose_flow(verb, numbers, *together))
        denials: list[Decision] = []
        for place in numbers:
            decision = yield from self._try_flow(verb, place)
            if decision.allowed:
                return decision
            denials.append(decision)
        return soonest(denials)

    def _try_flow(self, verb: str, place: int) -> JointFlow:
        charged = yield from charge_flow(verb, self.alternatives[place])
        if not charged.allowed:
            self.remember_denial(charged)
        elif VERBS[verb].changes:
            self.charged, self.chosen = charged, place
        return charged.join()

    def remember_denial(self, charged: Charged) -> None:
        """Remember what denied the call, in whose queues it then waits."""
        self.denying += charged.denying()

    def _one_step(self, numbers: Sequence[int]) -> tuple[BaseLimiter, Alternatives] | None:
        """Return some alternatives as one call of a store, if it can decide them in one step."""
        asked = [each for number in numbers for each in self.alternatives[number]]
        limiter = asked[0].limiter
        store = limiter.store
        if not store.decides_alternatives or any(
            each.limiter.store is not store or each.limiter.policy.mode == "shadow" for each in asked
        ):
            return None
        alternatives = Alternatives.of([each.ask() for each in self.alternatives[number]] for number in numbers)
        return (limiter, alternatives) if len(set(store.key_slots(alternatives))) == 1 else None

    def _choose_flow(self, verb: str, numbers: Sequence[int], limiter: BaseLimiter, asks: Alternatives) -> JointFlow:
        """Choose in one step of the store."""
        conditions = join_conditions(each for number in numbers for each in self.alternatives[number])
        decisions = yield ApplyStep(limiter.store, verb, asks, limiter.current_time(), None, conditions)
        groups = asks.split(decisions)
        charged: list[Charged] = []
        for number, own, found in zip(numbers, asks.groups(), groups, strict=False):
            pairs = [(each.limiter, ask) for each, ask in zip(self.alternatives[number], own, strict=True)]
            charged.append(Charged(pairs, observe_all(verb, pairs, found)))
        if not charged[-1].allowed:
            for denied in charged:
                self.remember_denial(denied)
            return soonest([each.join() for each in charged])
        if VERBS[verb].changes:
            self.charged, self.chosen = charged[-1], numbers[len(charged) - 1]
        return charged[-1].join()

    def places(self) -> Places:
        """Return the queues in which it may have to wait."""
        return Places([[(each.limiter.queues, each.key) for each in alternative] for alternative in self.alternatives])

    def is_impossible(self) -> bool:
        """Return whether each alternative has a cost above the burst of a limit, so that waiting is of no use."""
        return all(
            any(
                cost > limit.burst
                for policy, _, costs in [each.ask() for each in alternative]
                for limit, cost in zip(policy.limits, costs, strict=True)
            )
            for alternative in self.alternatives
        )

    def max_sleep(self, verb: str) -> int:
        """Return how long it may sleep at most.

        Another process may release a slot, or settle a reservation, long before the store would allow this call. It
        cannot wake this one.
        """
        for alternative in self.alternatives:
            for each in alternative:
                limits = each.limiter.policy.limits
                if not each.limiter.store.instant and (
                    VERBS[verb].marks or any(limit.rules.holds_slots for limit in limits)
                ):
                    return SECOND
        return MAX_DURATION

    def reserved(self) -> list[ReservedCharge]:
        """Return what was charged."""
        charged = self.charged
        assert charged is not None  # noqa: S101 - the call was allowed
        return [
            ReservedCharge(limiter, policy, key, costs, decision)
            for (limiter, (policy, key, costs)), decision in zip(charged.asks, charged.decisions, strict=True)
        ]


def soonest(denials: Sequence[Decision]) -> Decision:
    """Return the denial that ends first; of several, the one with the fewest reasons."""
    return min(denials, key=lambda each: (MAX_DURATION if each.retry == NEVER else each.retry, len(each.violated)))


def acquire_flow(
    call: JointCall,
    verb: str,
    timeout: float | None,
    priority: float,
    make_signal: Callable[[], Signal],
    denied: Denial | None = None,
    arrived: int | None = None,
) -> JointFlow:
    """Ask at once for what no other call waits for; if that is nothing, or if denied, wait until the deadline.

    `denied` is the answer of a caller that has asked at once. `arrived` is when the call arrived, by steady time (None:
    now): a call that waits again is queued as it was the first time.
    """
    first = call.alternatives[0][0].limiter
    timeout = None if timeout is None else seconds("timeout", timeout)
    ahead = round(check_priority(priority, first.max_priority) * first.ageing)
    places = call.places()
    numbers = () if denied is not None else places.open_to(None) or (places.everything if call.is_impossible() else ())
    if numbers:
        wakes = places.wakes
        decision: Decision = yield from call.ask_flow(verb, numbers)
        if decision.allowed:
            return decision
        denied = Denial(decision, first.clock.steady(), wakes, call.denying, numbers)
    if denied is not None and ((timeout is not None and timeout <= 0) or is_final(call, denied)):
        return raise_if_denied(call, denied.decision, timeout)
    steady = first.clock.steady
    now = steady()
    deadline = None if timeout is None else now + max(0, round(timeout * SECOND))
    waiter = Waiter((now if arrived is None else arrived) - ahead, make_signal())
    decision = yield from wait_flow(call, places, waiter, verb, deadline, steady, denied)
    return raise_if_denied(call, decision, timeout)


def is_final(call: JointCall, denied: Denial) -> bool:
    """Return whether waiting cannot help: no alternative can ever be allowed."""
    never = denied.decision.retry == NEVER
    return never and (len(denied.numbers) == len(call.alternatives) or call.is_impossible())


def raise_if_denied(call: JointCall, decision: Decision, timeout: float | None) -> Decision:
    """Return a decision that allows the call; raise Denied for one that does not."""
    if decision.allowed:
        return decision
    keys = dict.fromkeys(repr(each.key) for alternative in call.alternatives for each in alternative)
    shown, names = ", ".join(keys), ", ".join(decision.violated)
    if decision.retry == NEVER:
        message = f"{shown}: the cost exceeds what {names} can ever allow"
    elif decision.retry:
        message = f"{shown} got no permit within {timeout} s: {names} would allow it in {decision.retry_after} s"
    else:
        message = f"{shown} got no permit within {timeout} s: other calls are ahead of it in the queue"
    raise Denied(message, decision)


def reserve(
    asks: Sequence[tuple[Limiter, Key, Cost]],
    *,
    ttl: float = 60.0,
    timeout: float | None = 0.0,
    priority: float = 0,
) -> Reservation:
    """Charge several limiters in one step, all or nothing; each ask is a limiter, a key and a cost.

    Returns one reservation: `commit` the actual cost by unit, `shrink` or `cancel` it, at all limiters together. Waits
    up to `timeout` seconds, then raises Denied, whose decision is about all limits that were decided together. Limiters
    that share a Store object are charged atomically; see the module for several stores and slots of a Redis Cluster.
    """
    return reserve_first([asks], ttl=ttl, timeout=timeout, priority=priority)[1]


def reserve_async(
    asks: Sequence[tuple[AsyncLimiter, Key, Cost]],
    *,
    ttl: float = 60.0,
    timeout: float | None = 0.0,
    priority: float = 0,
) -> Reserving[AsyncReservation]:
    """Charge several AsyncLimiters in one step: await it or use it in `async with`; see `reserve`."""

    async def start() -> AsyncReservation:
        return (await reserve_first_async([asks], ttl=ttl, timeout=timeout, priority=priority))[1]

    return Reserving(start)


def reserve_first(
    alternatives: Sequence[Sequence[tuple[Limiter, Key, Cost]]],
    *,
    ttl: float = 60.0,
    timeout: float | None = 0.0,
    priority: float = 0,
) -> tuple[int, Reservation]:
    """Reserve the first of several alternatives that is allowed; returns its place and the reservation.

    Each alternative is a list of asks as for `reserve`. If none is allowed, the call waits for the first that will be.
    """
    call, clock = read_call(alternatives, tasks=False)
    ttl = seconds("ttl", ttl)
    run(acquire_flow(call, "hold", timeout, priority, ThreadSignal), performer(clock))
    return call.chosen, Reservation(call.reserved(), clock, ttl)


async def reserve_first_async(
    alternatives: Sequence[Sequence[tuple[AsyncLimiter, Key, Cost]]],
    *,
    ttl: float = 60.0,
    timeout: float | None = 0.0,  # noqa: ASYNC109 - the deadline is part of the contract
    priority: float = 0,
) -> tuple[int, AsyncReservation]:
    """Reserve the first of several alternatives that is allowed, without blocking the event loop."""
    call, clock = read_call(alternatives, tasks=True)
    ttl = seconds("ttl", ttl)
    await run_async(acquire_flow(call, "hold", timeout, priority, TaskSignal), async_performer(clock))
    return call.chosen, AsyncReservation(call.reserved(), clock, ttl)


def read_call(alternatives: Sequence[Sequence[tuple[Any, Key, Cost]]], *, tasks: bool) -> tuple[JointCall, Clock]:
    """Read the asks of a call; returns the call, and the clock by which it waits."""
    found: list[list[LimiterAsk]] = []
    for asks in alternatives:
        found.append([LimiterAsk(limiter, normal_key(key), cost) for limiter, key, cost in asks])
        if not asks:
            raise ConfigError("needs at least one limiter, key and cost", field="asks")
        for each in found[-1]:
            if each.limiter.for_tasks is not tasks:
                name, wanted = ("reserve_async", "AsyncLimiter") if tasks else ("reserve", "Limiter")
                raise ConfigError(f"{name} needs a {wanted}, not a {type(each.limiter).__name__}", field="asks")
            each.limiter.check_open()
    if not found:
        raise ConfigError("needs at least one limiter, key and cost", field="asks")
    return JointCall(found), found[0][0].limiter.clock


def performer(clock: Clock) -> Callable[[Step], Any]:
    """Return the function that executes a step in this thread."""

    def perform(step: Step) -> Any:  # noqa: ANN401 - what a step returns
        if isinstance(step, ApplyStep):
            return step.apply()
        return step.read() if isinstance(step, (ReadStep, CallStep)) else clock.wait(*step)

    return perform


def async_performer(clock: Clock) -> Callable[[Step], Any]:
    """Return the function that executes a step in a task."""

    def perform(step: Step) -> Any:  # noqa: ANN401 - what a step returns, or an awaitable of it
        if isinstance(step, ApplyStep):
            return apply_async(step)
        return step.read_async() if isinstance(step, (ReadStep, CallStep)) else clock.wait_async(*step)

    return perform
