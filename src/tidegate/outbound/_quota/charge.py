"""A Charge: the joint reservation of one call, with its label and what is known of its arrival at the provider."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._limiter.reservation import BaseReservation, ReservedCharge
from tidegate._policy.key import join_key
from tidegate._policy.units import is_money
from tidegate._runtime.ambient import charge_run_flow
from tidegate._runtime.flow import complete_flow
from tidegate.core._bounds import MAX_INTEGER, SECOND

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Callable, Sequence

    from tidegate._limiter.joint import LimiterAsk
    from tidegate._policy import Cost
    from tidegate._runtime.ambient import AmbientCharge
    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import CallFlow, Flow
    from tidegate.core import Decision
    from tidegate.observe import Record
    from tidegate.spending import Spending

log: logging.Logger = logging.getLogger("tidegate.outbound")

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
    units = record.policy.units
    if record.verb == "peek" or not any(map(is_money, units)):
        return
    # A correction that returns money does not end a warning: else each large reservation would warn again.
    money = (cost for unit, cost in zip(units, record.costs, strict=False) if is_money(unit))
    if record.verb == "adjust" and max(money, default=0) <= 0:
        return
    name, key = record.policy.name.removeprefix("spend:").removeprefix("provider:"), join_key(record.key)
    try:
        spending.observe(name if name == key else f"{name} {key}", record.decision)
    except Exception:
        log.exception("could not check the milestones of %s", name)


class Charge(BaseReservation):
    """What one call was charged: at its account first, then at ceilings. They are settled together, by flows."""

    # the end of the first window it was charged to, by the store's clock; see `arrival`
    window_end: int = MAX_INTEGER
    recharged: Decision | None = None  # the decision of the store when it was charged again
    recharging: Task[Any] | None = None  # charges it again
    answered: bool = False
    label: CallLabel | None = None  # if the provider has prices
    spending: Spending | None = None  # where its cost is recorded
    tracked_until: int = MAX_INTEGER  # by our clock: later, it no longer counts as in flight
    run: AmbientCharge | None = None  # what the current run was charged for it
    _charges: Sequence[ReservedCharge] = ()
    _only: tuple[LimiterAsk, Decision] | None = None
    usage: Mapping[str, int] | None = None  # its usage, also in units that its provider does not limit

    def __init__(
        self,
        charges: Sequence[ReservedCharge],
        clock: Clock,
        ttl: float = CHARGE_TTL,
        only: tuple[LimiterAsk, Decision] | None = None,
    ) -> None:
        """Take what was charged; `only` is a single ask and its decision: most of these are never corrected."""
        if only is None:
            super().__init__(charges, clock, ttl)
            self.at: int = self.decision.at  # when it was last charged, by the store's clock
        else:  # the same, without what is only needed if it is corrected
            self._clock, self._open, self._only = clock, [True], only
            self.at = only[1].at
        self.since: int = clock.steady()  # ... and by ours
        self._ends = self.since + round(ttl * SECOND)

    @property
    def charges(self) -> Sequence[ReservedCharge]:
        """What was charged: at the account, then at ceilings."""
        if not self._charges and self._only is not None:
            (limiter, key, cost, _), decision = self._only
            policy = limiter.policy_of(decision)
            self._charges = (ReservedCharge(limiter, policy, key, policy.costs(cost), decision),)
        return self._charges

    @charges.setter
    def charges(self, charges: Sequence[ReservedCharge]) -> None:
        self._charges = charges

    @property
    def decision(self) -> Decision:
        """The decision of its account."""
        return self.charges[0].decision if self._only is None else self._only[1]

    @property
    def amounts(self) -> dict[str, int]:
        """What was charged, by unit; of a unit that several count, what the account was charged."""
        found: dict[str, int] = {}
        for charge in reversed(self.charges):
            for limit, cost in zip(charge.policy.limits, charge.costs, strict=True):
                found[limit.unit] = cost
        return found

    @property
    def units(self) -> tuple[str, ...]:
        """The unit that each of its limits counts."""
        if len(self.charges) == 1:
            return self.charges[0].policy.units
        return tuple(unit for charge in self.charges for unit in charge.policy.units)

    def commit_flow(self, actual: Cost | None = None) -> CallFlow[None]:
        """Charge the actual cost instead (None: keep the estimate). Nothing happens before the flow runs."""
        if self.run is None:
            yield from super().commit_flow(actual)
            return
        usage = self.usage
        if usage is None:
            usage = actual if isinstance(actual, (Mapping, NoneType)) else dict.fromkeys(self.policy.counted, actual)
        yield from complete_flow(super().commit_flow(actual), self.run.commit_usage_flow(usage))

    def cancel_flow(self) -> CallFlow[None]:
        """Return all permits. Nothing happens before the flow runs."""
        if self.run is None:
            yield from super().cancel_flow()
            return
        yield from complete_flow(super().cancel_flow(), self.run.cancel_flow())

    def charge_run_flow(self, identify: Callable[[], bytes]) -> CallFlow[None]:
        """Charge the current run as well, if there is one; if that denies, cancel this charge."""
        try:
            model = "" if self.label is None else self.label.model
            self.run = yield from charge_run_flow(self._run_cost(), identify, f"model:{model}"[:100] if model else "")
        except GeneratorExit:
            raise
        except BaseException:
            yield from quiet_flow(self.cancel_flow())
            raise

    def _run_cost(self) -> dict[str, int]:
        """Return what it was charged, and the money that was reserved for it, which its provider may not limit."""
        label = self.label
        return self.amounts if label is None else {label.unit: label.money, **self.amounts}

    def parts(self, amounts: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Group amounts of the account's limits by the instant at which these were last charged."""
        return self.charges[0].split_by_instant(amounts)

    def move(self, costs: tuple[int, ...], recharged: Decision) -> None:
        """Record that these costs were charged to the account again: settling applies to the new charge."""
        own = self.charges[0]
        own.ats = tuple(recharged.at if cost else at for cost, at in zip(costs, own.ats, strict=True))
        self.at, self.recharged = recharged.at, recharged

    def record_spending(self, final: Mapping[str, int] | None = None) -> int:
        """Record what the call has cost: its usage by unit, or what was reserved for it if that is unknown.

        Returns the amount, in micros.
        """
        if self.label is None:
            return 0
        source, member, model, team, tag, unit, money = self.label
        amount = money if final is None else final.get(unit, money)
        over = max(0, amount - money)
        if self.spending is not None:
            self.spending.record(source, unit, amount, overrun=over, member=member, model=model, team=team, tag=tag)
        return amount


def quiet_flow(flow: Flow[Any, Any]) -> CallFlow[None]:
    """Run a flow and ignore its errors, which would only hide a response or another error."""
    with suppress(Exception):
        yield from flow
