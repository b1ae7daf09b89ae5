"""What a call of a run was charged: settled once, where it was charged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from tidegate._limiter.joint import async_performer, performer
from tidegate._limiter.reservation import BaseReservation
from tidegate._limiter.waiting import ApplyStep, Step
from tidegate._runtime.flow import run, run_async
from tidegate.agents._carving import Carving, correction, settled_here
from tidegate.agents._limits import CALLS, read_cost
from tidegate.agents._node import counts_label
from tidegate.errors import ValueConflict

if TYPE_CHECKING:
    from tidegate._limiter.reservation import ReservedCharge
    from tidegate._policy import Cost
    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import Flow
    from tidegate.agents._charging import RunCharge
    from tidegate.agents._limits import RunCost
    from tidegate.agents._tree import Tree
    from tidegate.core._decision import Decision


class NodeCharges(BaseReservation):
    """The charges of a node and of those above it; a carve-out has been charged for its units when it was created."""

    def __init__(self, charge: RunCharge, clock: Clock, ttl: float) -> None:
        """Take what was charged, and the condition under which it is settled there."""
        super().__init__(charge.charges, clock, ttl)
        self.writes = settled_here(charge.node)
        self._paid: list[frozenset[str]] = []  # of each charge: the units that a carve-out below it pays for
        bought = charge.payment.credits
        paid: frozenset[str] = frozenset() if bought is None else frozenset((bought.unit,))
        for node in charge.node.line:
            self._paid.append(paid)
            paid |= frozenset(node.details.carved or ())
        for each in charge.charges[len(self._paid) :]:
            counted = counts_label(each.key) or (bought is not None and each.key == bought.node.key)
            self._paid.append(frozenset() if counted else paid)

    def _parts(self, cost: Cost) -> list[tuple[ReservedCharge, Cost | None]]:
        amounts = cost if isinstance(cost, Mapping) else {CALLS: cost}
        return [
            (charge, charge.part({unit: amount for unit, amount in amounts.items() if unit not in paid}))
            for charge, paid in zip(self.charges, self._paid, strict=True)
        ]


class BaseRunReservation:
    """Base class of RunReservation and AsyncRunReservation."""

    def __init__(self, tree: Tree, charge: RunCharge, clock: Clock, ttl: float) -> None:
        """Take what was charged; it expires after `ttl` seconds."""
        self._tree = tree
        self._node = charge.node
        self._clock = clock
        self.chosen: int = charge.chosen
        self.alternative: str = charge.payment.name
        self._payment = charge.payment
        self._units = {*charge.node.units, *charge.payment.cost}
        self._reserved = NodeCharges(charge, clock, ttl)

    @property
    def decision(self) -> Decision:
        """The decision about all limits of the line."""
        return self._reserved.decision

    @property
    def settled(self) -> bool:
        """Whether it was committed or cancelled."""
        return self._reserved.settled

    @property
    def node(self) -> str:
        """The names from the root to the node that was charged."""
        return self._node.title

    @property
    def reserved(self) -> dict[str, int]:
        """What was charged, by counted unit."""
        return {unit: cost for unit, cost in self._payment.cost.items() if cost}

    def _commit_flow(self, actual: RunCost | None) -> Flow[Step, None]:
        """Correct the estimate to the actual cost; units that are not given stay as estimated."""
        if actual is None:
            return self._settle_flow(self._reserved.commit_flow(None), {})
        cost = read_cost(actual, self._units)
        change = {unit: amount - self.reserved.get(unit, 0) for unit, amount in cost.items()}
        return self._settle_flow(self._reserved.commit_flow(cost), change)

    def commit_usage_flow(self, usage: Mapping[str, int] | None) -> Flow[Step, None]:
        """Correct the estimate to the usage; units that no node counts are left out."""
        known = None if usage is None else {unit: amount for unit, amount in usage.items() if unit in self._units}
        return self._commit_flow(known)

    def cancel_flow(self) -> Flow[Step, None]:
        """Refund the whole charge."""
        return self._settle_flow(self._reserved.cancel_flow(), {unit: -cost for unit, cost in self.reserved.items()})

    def _settle_flow(self, settle: Flow[Step, None], change: Mapping[str, int]) -> Flow[Step, None]:
        """Settle where it was charged, or, if that carve-out was returned meanwhile, where it counts now."""
        expired = self._reserved.expired
        try:
            yield from settle
        except ValueConflict:
            if expired:
                change = {unit: amount for unit, amount in change.items() if amount > 0}
            bought = self._payment.credits
            labels = [each for each in self._reserved.charges if counts_label(each.key)]
            if labels:
                ask = correction(labels[0].limiter, labels[0].key, change)
                yield ApplyStep(self._tree.store, "adjust", [ask], self._tree.now())
            if bought is not None:
                own = {unit: amount for unit, amount in change.items() if unit == bought.unit}
                change = {unit: amount for unit, amount in change.items() if unit != bought.unit}
                ask = correction(bought.node.limiter, bought.node.key, own)
                yield ApplyStep(self._tree.store, "adjust", [ask], self._tree.now())
            for _ in range(64):
                asks, conditions = yield from Carving(self._tree).place_flow(self._node, change)
                try:
                    yield ApplyStep(self._tree.store, "adjust", asks, self._tree.now(), None, conditions)
                except ValueConflict:
                    continue
                return
            raise

    def __repr__(self) -> str:
        """Show the node and the state."""
        return f"<{type(self).__name__} {self.node} {self.reserved} {'settled' if self.settled else 'open'}>"


class RunReservation(BaseRunReservation):
    """A call that was charged to a run before it is sent. Commit the actual cost, or cancel."""

    def commit(self, actual: RunCost | None = None) -> None:
        """Charge the actual cost instead of the estimate (None: the estimate), at every node that was charged."""
        run(self._commit_flow(actual), performer(self._clock))

    def cancel(self) -> None:
        """Refund the whole charge: nothing was sent."""
        run(self.cancel_flow(), performer(self._clock))

    def __enter__(self) -> Self:
        """Settle at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the estimate, or cancel after an exception, unless it was settled before."""
        if not self.settled:
            self.commit() if kind is None else self.cancel()


class AsyncRunReservation(BaseRunReservation):
    """A call that was charged to a run, for tasks: the methods of RunReservation as coroutines."""

    async def commit(self, actual: RunCost | None = None) -> None:
        """Charge the actual cost instead of the estimate; see RunReservation.commit."""
        await run_async(self._commit_flow(actual), async_performer(self._clock))

    async def cancel(self) -> None:
        """Refund the whole charge: nothing was sent."""
        await run_async(self.cancel_flow(), async_performer(self._clock))

    async def __aenter__(self) -> Self:
        """Settle at the end of the block."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the estimate, or cancel after an exception, unless it was settled before."""
        if not self.settled:
            await (self.commit() if kind is None else self.cancel())
