"""A JointCharge: what one call was charged at several policies in one step, such as an account and a team's ceiling."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from tidegate.limiter import AsyncLimiter
from tidegate.outbound.quota.charge import Charge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.observe import Observer
    from tidegate.policy import Cost


class JointCharge(Charge):
    """The charge of an account, and the `others` that were made with it. Settling it settles all of them."""

    __slots__ = ("others",)

    def __init__(self, main: Charge, others: Sequence[Charge]) -> None:
        """Join charges that were made in one step."""
        reservation = main.reservation if main.has_reservation else None
        super().__init__(main.limiter, main.key, main.cost, main.decision, reservation)
        self.others: tuple[Charge, ...] = tuple(others)

    @property
    def amounts(self) -> dict[str, int]:
        """What was charged, by unit."""
        found = super().amounts
        for other in self.others:
            found = {**other.amounts, **found}
        return found

    @property
    def units(self) -> tuple[str, ...]:
        """The unit that each of its limits counts."""
        return tuple(unit for charge in (self, *self.others) for unit in Charge.units.__get__(charge))

    def commit(self, actual: Cost | None = None) -> Any:  # noqa: ANN401 - to be awaited, or not
        """Charge the actual cost instead, everywhere."""
        return self._settle_all(lambda charge: Charge.commit(charge, part_of(charge, actual)))

    def cancel(self) -> Any:  # noqa: ANN401 - to be awaited, or not
        """Return all permits, everywhere."""
        return self._settle_all(Charge.cancel)

    def _settle_all(self, settle: Callable[[Charge], Any]) -> Any:  # noqa: ANN401 - to be awaited, or not
        """Settle all that are not settled yet, even if one of them fails; the failed ones can be settled again."""
        unsettled = [charge for charge in (*self.others, self) if not charge.settled] or [self]
        steps = [partial(settle, charge) for charge in unsettled]
        if isinstance(self.limiter, AsyncLimiter):
            return _await_all(steps[0](), steps[1:])
        with ExitStack() as stack:
            for step in reversed(steps):
                stack.callback(step)
        return None

    def watch(self, observer: Observer) -> None:
        """Call an observer with each later correction of these charges."""
        super().watch(observer)
        for other in self.others:
            other.watch(observer)


async def _await_all(first: Any, steps: Sequence[Callable[[], Any]]) -> None:  # noqa: ANN401 - an awaitable
    """Settle the others even if the first fails, or its task is cancelled."""
    async with AsyncExitStack() as stack:
        for step in reversed(steps):
            stack.push_async_callback(step)
        await first


def part_of(charge: Charge, cost: Cost | None) -> Cost | None:
    """Return the part of a cost in the units that a charge's limits count; None: nothing is known about them."""
    if not isinstance(cost, Mapping):
        return cost
    units = Charge.units.__get__(charge)
    return {unit: amount for unit, amount in cost.items() if unit in units} or None
