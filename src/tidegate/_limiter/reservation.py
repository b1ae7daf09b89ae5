"""Reservations: estimated costs are charged first, and settled when the actual cost is known.

A reservation has one or more charges, each at one policy and key. They were charged together and are settled together,
with one call of the store for all charges of one store, slot and instant.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from tidegate._limiter.waiting import ApplyStep
from tidegate._runtime.entered import EnteredBlocks
from tidegate._runtime.flow import run, run_async
from tidegate._runtime.suggestions import hint
from tidegate.core._bounds import SECOND
from tidegate.core._decision import LocalDecision, join_decisions
from tidegate.errors import ConfigError, RateLimitError, StoreUnavailable, ValueConflict

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from tidegate._limiter.base_limiter import BaseLimiter
    from tidegate._policy import Cost, Key, Policy
    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import Flow
    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask
    from tidegate.stores._values import Write

    Correction = tuple[ApplyStep, list["ReservedCharge"]]


def charged_at(decision: Decision, policy: Policy) -> int | None:
    """Return when a decision charged its cost, or None if it charged nothing.

    Nothing is charged if a shadow policy allows a call that did not fit, or if `on_store_error: allow` allows a call
    while the store is unavailable.
    """
    free = isinstance(decision, LocalDecision) and policy.on_store_error == "allow"
    return decision.at if decision.within_limits and not free else None


class ReservedCharge:
    """What one policy and key were charged: the cost at each limit, and when, by the store's clock (None: not)."""

    __slots__ = ("ats", "costs", "decision", "key", "limiter", "policy")

    def __init__(
        self, limiter: BaseLimiter, policy: Policy, key: Key, costs: tuple[int, ...], decision: Decision
    ) -> None:
        """Take what a decision has charged."""
        self.limiter: BaseLimiter = limiter
        self.policy: Policy = policy
        self.key: Key = key
        self.costs: tuple[int, ...] = costs
        self.decision: Decision = decision
        self.ats: tuple[int | None, ...] = (charged_at(decision, policy),) * len(costs)

    def part(self, cost: Cost) -> Cost | None:
        """Return the part of a cost that these limits count; None: nothing of it."""
        if cost.__class__ is dict or isinstance(cost, Mapping):  # the usual type first: faster
            units = self.policy.units
            return {unit: amount for unit, amount in cost.items() if unit in units} or None
        return cost if self.policy.counted else None

    def split_by_instant(self, amounts: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Split amounts by the instant at which their limits were charged; limits never charged are left out."""
        ats = self.ats
        if ats[0] is not None and ats.count(ats[0]) == len(ats):  # the usual case
            return [(ats[0], tuple(amounts))]
        instants = {at for at in ats if at is not None} or {self.decision.at}
        return [
            (at, tuple(amount if own == at else 0 for own, amount in zip(ats, amounts, strict=True)))
            for at in sorted(instants)
        ]

    def changes(
        self, actual: tuple[int, ...], given: Container[str] | None, *, expired: bool
    ) -> list[tuple[int | None, tuple[int, ...]]]:
        """Return the corrections from the reserved to the actual cost, each with the instant of its charge.

        `given` are the units whose actual cost is known, by default all. There is usually one correction; more if
        limits were charged again later, or if a limit has a cost that was not charged before: it is charged now (None),
        like all that is above an estimate which was charged while the store was unavailable: its charge in the store is
        made at another instant.
        """
        deltas, unplanned, late = [], [], False
        local = isinstance(self.decision, LocalDecision)
        for limit, new, old, at in zip(self.policy.limits, actual, self.costs, self.ats, strict=True):
            change = new - old if given is None or limit.unit in given else 0
            if limit.rules.holds_slots:  # the work is over: its slots are free again
                change = -old
            elif expired and change < 0:
                change = 0
            fresh = at is not None and (not old or (local and change > 0))
            deltas.append(0 if fresh else change)
            unplanned.append(change if fresh else 0)
            late = late or (fresh and change != 0)
        found: list[tuple[int | None, tuple[int, ...]]] = [*self.split_by_instant(deltas)]
        if late:
            found.append((None, tuple(unplanned)))
        return found


class BaseReservation:
    """Base class of Reservation and AsyncReservation: computes and sends the corrections of a settlement, as flows."""

    writes: Sequence[Write] = ()  # values to write when it is settled, in the first step
    _unsettled: Sequence[Correction] = ()  # of a settlement that has begun

    def __init__(self, charges: Sequence[ReservedCharge], clock: Clock, ttl: float) -> None:
        """Take what was charged; it expires after `ttl` seconds."""
        self.charges: Sequence[ReservedCharge] = charges
        self._clock = clock
        self._ends = clock.steady() + round(ttl * SECOND)
        self._open = [True]  # emptied by the one call that settles

    @property
    def decision(self) -> Decision:
        """The decision that charged it: about all limits of all its charges."""
        return join_decisions([charge.decision for charge in self.charges])

    @property
    def decisions(self) -> list[Decision]:
        """The decision about each charge, in the order in which they were asked for."""
        return [charge.decision for charge in self.charges]

    @property
    def key(self) -> Key:
        """The key of its first charge."""
        return self.charges[0].key

    @property
    def policy(self) -> Policy:
        """The policy of its first charge."""
        return self.charges[0].policy

    @property
    def costs(self) -> tuple[int, ...]:
        """What each limit of its first charge was charged."""
        return self.charges[0].costs

    @property
    def settled(self) -> bool:
        """Whether it was committed or cancelled."""
        return not self._open

    @property
    def expired(self) -> bool:
        """Whether `ttl` has passed: then the estimate stays charged, and a commit charges only the amount above it."""
        return self._clock.steady() >= self._ends

    def commit_flow(self, actual: Cost | None) -> Flow[ApplyStep, None]:
        """Correct the estimate to the actual cost (None: keep it); units that are not given stay as estimated."""
        if actual is None:
            return self._settle_flow([(charge, charge.costs, None) for charge in self.charges])
        parts = self._parts(actual)
        return self._settle_flow(
            [
                (charge, charge.costs, ())
                if part is None
                else (charge, charge.policy.costs(part), part if isinstance(part, Mapping) else charge.policy.counted)
                for charge, part in parts
            ]
        )

    def cancel_flow(self) -> Flow[ApplyStep, None]:
        """Refund the whole charge."""
        return self._settle_flow([(charge, (0,) * len(charge.costs), None) for charge in self.charges])

    def _parts(self, cost: Cost) -> list[tuple[ReservedCharge, Cost | None]]:
        """Divide a cost by charges; raises ConfigError if no charge counts one of its units."""
        charges = self.charges
        if len(charges) == 1:
            return [(charges[0], cost)]
        parts = [(charge, charge.part(cost)) for charge in charges]
        known = sorted({unit for charge in charges for unit in charge.policy.units})
        for unit in cost if isinstance(cost, Mapping) else ():
            if unit not in known:
                message = f"no limit of this reservation counts {unit!r}: its limits count " + ", ".join(known)
                raise ConfigError(message + hint(unit, known), field="cost")
        if all(part is None for _, part in parts) and cost != {}:
            return [(charge, cost) for charge in charges]  # raises what the policy says about it
        return parts

    def _settle_flow(
        self, actual: Sequence[tuple[ReservedCharge, tuple[int, ...], Container[str] | None]]
    ) -> Flow[ApplyStep, None]:
        expired = self._clock.steady() >= self._ends
        try:
            self._open.pop()
        except IndexError:
            raise RateLimitError(f"the reservation for {self.key!r} is already settled") from None
        unsettled = self._unsettled
        if not unsettled:
            changes = [
                (charge, costs, at)
                for charge, new, given in actual
                for at, costs in charge.changes(new, given, expired=expired)
            ]
            unsettled = _steps(changes, self.writes)
        return self._finish_flow(unsettled)

    def _finish_flow(self, unsettled: Sequence[Correction]) -> Flow[ApplyStep, None]:
        """Make the corrections of a settlement; those that fail because a store is unavailable can be made again."""
        failed: list[Correction] = []
        try:
            yield from self._correct_flow(unsettled, failed)
        finally:
            if failed:
                self._unsettled = failed
                self._open.append(True)

    def shrink_flow(self, cost: Cost) -> Flow[ApplyStep, None]:
        """Reduce what is reserved; units that are not given stay as they are."""
        if self.settled:
            raise RateLimitError(f"the reservation for {self.key!r} is already settled")
        changes: list[tuple[ReservedCharge, tuple[int, ...], int | None]] = []
        kept: list[tuple[ReservedCharge, tuple[int, ...]]] = []
        for charge, part in self._parts(cost):
            if part is None:
                continue
            given = part if isinstance(part, Mapping) else charge.policy.counted
            rows = zip(charge.policy.limits, charge.policy.costs(part), charge.costs, strict=True)
            left = tuple([new if limit.unit in given else old for limit, new, old in rows])
            if any(new > old for new, old in zip(left, charge.costs, strict=True)):
                raise ConfigError(f"{cost!r} is more than what is reserved: reserve the difference", field="cost")
            less = [new - old for new, old in zip(left, charge.costs, strict=True)]
            changes += [(charge, costs, at) for at, costs in charge.split_by_instant(less) if any(costs)]
            kept.append((charge, left))
        if self.expired:  # the estimate stays charged
            changes = []
        for charge, left in kept if changes else ():
            charge.costs = left
        return self._correct_flow(_steps(changes), [])

    def _correct_flow(self, steps: Sequence[Correction], failed: list[Correction]) -> Flow[ApplyStep, None]:
        """Make corrections; add those that an unavailable store has not made to `failed`.

        Each is made even if another one fails, unless that one has values to write: these make the step exact.
        """
        error: BaseException | None = None
        for number, (step, charges) in enumerate(steps):
            try:
                for charge in charges:
                    charge.limiter.check_open()
                decisions = yield step
            except GeneratorExit:
                raise
            except BaseException as raised:
                lost = isinstance(raised, StoreUnavailable)
                if step.writes and (lost or isinstance(raised, ValueConflict)):
                    failed += steps[number:] if lost else ()
                    raise
                if lost:
                    failed.append((step, charges))
                error = error or raised
                continue
            for charge, ask, decision in zip(charges, step.asks, decisions, strict=True):
                if charge.limiter.observed:
                    charge.limiter.observe("adjust", ask, decision)
            step.store.wake(step.asks)
        if error is not None:
            try:
                raise error
            finally:
                error = None  # its traceback refers to this frame: no reference cycle

    def __repr__(self) -> str:
        """Show the keys, the costs and the state."""
        state = "settled" if self.settled else "expired" if self.expired else "open"
        shown = ", ".join(f"{charge.key!r} {charge.costs}" for charge in self.charges)
        return f"<{type(self).__name__} {shown} {state}>"


def _steps(
    changes: Sequence[tuple[ReservedCharge, tuple[int, ...], int | None]], writes: Sequence[Write] = ()
) -> list[Correction]:
    """Return the calls of stores that make corrections, and the charges that each of them corrects.

    There is one call for the corrections of one store, slot and instant. The first call writes the values.
    """
    if len(changes) == 1:  # the usual case
        charge, costs, at = changes[0]
        limiter = charge.limiter
        ask = charge.policy, charge.key, costs
        step = ApplyStep(limiter.store, "adjust", (ask,), limiter.current_time(), at, writes)
        return [(step, [charge])]
    groups: dict[tuple[int, int, int | None], list[tuple[ReservedCharge, Ask]]] = {}
    for charge, costs, at in changes:
        ask = charge.policy, charge.key, costs
        store = charge.limiter.store
        groups.setdefault((id(store), store.key_slots((ask,))[0], at), []).append((charge, ask))
    steps: list[Correction] = []
    for (_, _, at), rows in groups.items():
        limiter, asks = rows[0][0].limiter, [ask for _, ask in rows]
        step = ApplyStep(limiter.store, "adjust", asks, limiter.current_time(), at, () if steps else writes)
        steps.append((step, [charge for charge, _ in rows]))
    return steps


class Reservation(BaseReservation):
    """Permits reserved for a running call. Commit the actual cost, or cancel."""

    def commit(self, actual: Cost | None = None) -> None:
        """Charge the actual cost instead of the estimate (None: the estimate).

        Units that a mapping does not contain stay as estimated. If it raises StoreUnavailable, call it or `cancel`
        again: that makes the corrections that were not made, of the first of these calls.
        """
        run(self.commit_flow(actual), ApplyStep.apply)

    def cancel(self) -> None:
        """Refund the whole charge."""
        run(self.cancel_flow(), ApplyStep.apply)

    def shrink(self, cost: Cost) -> None:
        """Reserve less than before, and refund the difference; the reservation stays open."""
        run(self.shrink_flow(cost), ApplyStep.apply)

    def __enter__(self) -> Self:
        """Settle at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the estimate, or cancel after an exception, unless it was settled before."""
        if not self.settled:
            self.commit() if kind is None else self.cancel()


def apply_async(step: ApplyStep) -> Any:  # noqa: ANN401 - the decisions, or an awaitable of them
    """Call the store of a step, from a task."""
    return step.apply() if step.store.instant else step.store.apply_async(*step.arguments)


class AsyncReservation(BaseReservation):
    """Permits reserved for a running call, for tasks: the methods of Reservation as coroutines."""

    async def commit(self, actual: Cost | None = None) -> None:
        """Charge the actual cost instead of the estimate (None: the estimate); see `Reservation.commit`."""
        await run_async(self.commit_flow(actual), apply_async)

    async def cancel(self) -> None:
        """Refund the whole charge."""
        await run_async(self.cancel_flow(), apply_async)

    async def shrink(self, cost: Cost) -> None:
        """Reserve less than before, and refund the difference; the reservation stays open."""
        await run_async(self.shrink_flow(cost), apply_async)

    async def __aenter__(self) -> Self:
        """Settle at the end of the block."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the estimate, or cancel after an exception, unless it was settled before."""
        if not self.settled:
            await (self.commit() if kind is None else self.cancel())


R = TypeVar("R", bound="AbstractAsyncContextManager[Any, Any]")


class Reserving(Generic[R]):
    """What `AsyncLimiter.reserve`, `reserve_async` and `AsyncGate.acquire` return: `await` it, or use `async with`."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, R]]) -> None:
        """Keep the function that reserves."""
        self._start = start
        self._entered: EnteredBlocks[R] = EnteredBlocks()

    def __await__(self) -> Generator[Any, Any, R]:
        """Reserve."""
        return self._start().__await__()

    async def __aenter__(self) -> R:
        """Reserve, and settle at the end of the block."""
        return self._entered.add(await self._start())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Settle, unless it was settled before."""
        reservation = self._entered.remove()
        if reservation is not None:
            await reservation.__aexit__(kind, error, traceback)
