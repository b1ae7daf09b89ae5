"""A Charge: what a request was charged, until its actual cost is known."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import MAX_INTEGER
from tidegate.limiter import AsyncLimiter
from tidegate.outbound.providers.money import is_money
from tidegate.policy.key import join_key

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Callable, Mapping

    from tidegate.core import Decision
    from tidegate.flow import CallFlow
    from tidegate.limiter import Limiter
    from tidegate.observe import Observer, Record
    from tidegate.policy import Cost, Key
    from tidegate.reservation import AsyncReservation, Reservation
    from tidegate.spending import Spending

CHARGE_TTL: Final = 600.0  # seconds within which a response must end for its estimate to be corrected downwards


class CallLabel(NamedTuple):
    """What the cost of a call is recorded under; `money` is what was reserved for it, in `unit`."""

    source: str
    member: str
    model: str
    team: str
    tag: str
    unit: str
    money: int


def observe_money(spending: Spending, record: Record) -> None:
    """Warn if a decision shows that spending approaches a money limit."""
    # A correction that returns money does not end a warning: else each large reservation would warn again.
    money = (cost for unit, cost in zip(record.policy.units, record.costs, strict=False) if is_money(unit))
    if record.verb != "adjust" or max(money, default=0) > 0:
        name, key = record.policy.name.removeprefix("spend:").removeprefix("provider:"), join_key(record.key)
        spending.observe(name if name == key else f"{name} {key}", record.decision)


class Charge:
    """A charge that can be corrected; its reservation is created only when needed, since most charges never change."""

    __slots__ = (
        "_reservation",
        "answered",
        "at",
        "cost",
        "decision",
        "key",
        "label",
        "limiter",
        "observer",
        "recharged",
        "recharging",
        "since",
        "spending",
        "tracked_until",
        "window_end",
    )

    def __init__(
        self,
        limiter: Limiter | AsyncLimiter,
        key: Key,
        cost: Cost,
        decision: Decision,
        reservation: Reservation | AsyncReservation | None = None,
    ) -> None:
        """Store what was charged; `reservation` is its reservation, if there is one already."""
        self.limiter: Limiter | AsyncLimiter = limiter
        self.key: Key = key
        self.cost: Cost = cost
        self._reservation = reservation
        self.decision: Decision = decision
        self.at: int = decision.at  # when it was last charged, by the store's clock
        self.since: int = limiter.clock.steady()  # ... and by ours
        # the end of the first window it was charged to, by the store's clock; see `arrival`
        self.window_end: int = MAX_INTEGER
        self.recharged: Decision | None = None  # the decision of the store when it was charged again
        self.recharging: Task[Any] | None = None  # charges it again
        self.answered: bool = False
        self.label: CallLabel | None = None  # if the provider has prices
        self.spending: Spending | None = None  # where its cost is recorded
        self.observer: Observer | None = None  # of its corrections and extensions
        self.tracked_until: int = MAX_INTEGER  # by our clock: later, it no longer counts as in flight

    @property
    def has_reservation(self) -> bool:
        """Whether its reservation was created."""
        return self._reservation is not None

    @property
    def settled(self) -> bool:
        """Whether it was committed or cancelled."""
        return self._reservation is not None and self._reservation.settled

    @property
    def costs(self) -> tuple[int, ...]:
        """What was charged to each limit."""
        return self.reservation.costs

    @property
    def amounts(self) -> dict[str, int]:
        """What was charged, by unit."""
        reservation = self._reservation
        if reservation is None:
            if isinstance(self.cost, dict):
                return self.cost
            reservation = self.reservation
        return {limit.unit: cost for limit, cost in zip(reservation.policy.limits, reservation.costs, strict=True)}

    @property
    def units(self) -> tuple[str, ...]:
        """The unit that each of its limits counts."""
        policy, limits = self.limiter.policy, self.decision.policy_limits
        return policy.units if policy.limits is limits else tuple(limit.unit for limit in limits)

    @property
    def apply(self) -> Callable[..., Any]:
        """The function that calls the store, to be awaited or not."""
        store = self.limiter.store
        return store.apply_async if isinstance(self.limiter, AsyncLimiter) else store.apply

    def extend_flow(self, cost: Mapping[str, int]) -> CallFlow[Any]:
        """Try to charge more; returns the decision, and the new charge or None."""
        decision = yield partial(self.limiter.try_acquire, self.key, cost)
        return decision, Charge(self.limiter, self.key, cost, decision) if decision.allowed else None

    def set_label(self, label: CallLabel | None, spending: Spending | None) -> None:
        """Record what the call costs under a label, and watch its money limits; None: the provider has no prices."""
        self.label, self.spending = label, spending
        if label is not None and spending is not None:
            self.watch(partial(observe_money, spending))

    def watch(self, observer: Observer) -> None:
        """Call an observer with each later correction of this charge."""
        self.observer = observer
        if self._reservation is not None:
            self._reservation.observer = observer

    def parts(self, amounts: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Group amounts by the instant at which their limits were last charged."""
        return self.reservation.charges[0].split_by_instant(amounts)

    def move(self, costs: tuple[int, ...], recharged: Decision) -> None:
        """Record that these costs were charged again: settling applies to the new charge."""
        reserved = self.reservation.charges[0]
        reserved.ats = tuple(recharged.at if cost else at for cost, at in zip(costs, reserved.ats, strict=True))
        self.at, self.recharged = recharged.at, recharged

    def shrink(self, costs: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Reduce what counts as charged; returns what to give back, by the instant at which it was charged."""
        reserved = self.reservation.charges[0]
        parts = self.parts(costs)
        reserved.costs = tuple(old - less for old, less in zip(reserved.costs, costs, strict=True))
        return parts

    def record_spending(self, final: Mapping[str, int] | None = None, topped_up: int = 0) -> int:
        """Record what the call has cost: its usage by unit, or what was reserved for it if that is unknown.

        Returns the amount, in micros.
        """
        if self.label is None:
            return 0
        source, member, model, team, tag, unit, money = self.label
        reserved = money + topped_up
        amount = reserved if final is None else final.get(unit, reserved)
        over = max(0, amount - reserved)
        if self.spending is not None:
            self.spending.record(source, unit, amount, over, member=member, model=model, team=team, tag=tag)
        return amount

    def commit(self, actual: Cost | None = None) -> Any:  # noqa: ANN401 - to be awaited, or not
        """Charge the actual cost instead (None: keep the estimate)."""
        return self.reservation.commit(actual)

    def cancel(self) -> Any:  # noqa: ANN401 - to be awaited, or not
        """Return all permits."""
        return self.reservation.cancel()

    @property
    def reservation(self) -> Reservation | AsyncReservation:
        """The reservation that settles it."""
        if self._reservation is None:
            self._reservation = self.limiter.make_reservation(self.key, self.cost, self.decision, CHARGE_TTL)
            self._reservation.observer = self.observer
        return self._reservation
