"""Reservations: an estimated cost is charged first and settled when the actual cost is known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from tidegate.core.bounds import SECOND
from tidegate.core.decision import LocalDecision
from tidegate.entered import EnteredBlocks
from tidegate.errors import RateLimitError, StoreUnavailable
from tidegate.observe import Record
from tidegate.stores.cancellation import BackgroundTasks
from tidegate.waiting import AskStep

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.observe import Observer
    from tidegate.policy import Cost, Key, Policy

log: logging.Logger = logging.getLogger(__name__)
S = TypeVar("S")  # the function that corrects a charge
SETTLEMENTS: Final = BackgroundTasks()  # settlements of several steps whose task was cancelled between two steps


def charged_at(decision: Decision, policy: Policy) -> int | None:
    """Return when a decision charged its cost, or None if it charged nothing.

    Nothing is charged if a shadow policy allows a call that did not fit, or if `on_store_error: allow` allows a call
    while the store is unavailable.
    """
    free = isinstance(decision, LocalDecision) and policy.on_store_error == "allow"
    return decision.at if decision.within_limits and not free else None


class _Reservation(Generic[S]):
    """Shared by Reservation and AsyncReservation: computes the corrections of a settlement."""

    def __init__(
        self, settle: S, clock: Clock, policy: Policy, key: Key, costs: tuple[int, ...], decision: Decision, ttl: float
    ) -> None:
        """Take what `reserve` charged; `settle` corrects the charge."""
        self.policy = policy
        self.key = key
        self.costs = costs
        self.decision = decision
        # When each limit was charged, by the store's clock; None if it was not charged.
        self.ats: tuple[int | None, ...] = (charged_at(decision, policy),) * len(costs)
        self._settle = settle
        self._clock = clock
        self._ends = clock.steady() + round(ttl * SECOND)
        self._open = [True]  # emptied by the one call that settles
        self.observer: Observer | None = None  # called with a Record of each correction

    @property
    def settled(self) -> bool:
        """Whether it was committed or cancelled."""
        return not self._open

    @property
    def expired(self) -> bool:
        """Whether `ttl` has passed: then the estimate stays charged, and a commit charges only the amount above it."""
        return self._clock.steady() >= self._ends

    def _commit_asks(self, actual: Cost | None) -> list[AskStep]:
        """Build the correction from the estimate to the actual cost; units that are not given stay as estimated."""
        if actual is None:
            return self._settle_asks(self.costs)
        policy = self.policy
        return self._settle_asks(policy.costs(actual), actual if isinstance(actual, Mapping) else policy.counted)

    def _settle_asks(self, actual: tuple[int, ...], given: Container[str] | None = None) -> list[AskStep]:
        """Build one correction per instant of the charge: usually one, more if limits were charged again later.

        `given` are the units whose actual cost is known, by default all.
        """
        expired = self._clock.steady() >= self._ends
        try:
            self._open.pop()
        except IndexError:
            raise RateLimitError(f"the reservation for {self.key!r} is already settled") from None
        policy, key = self.policy, self.key
        deltas, unplanned, late = [], [], False
        for limit, new, old, at in zip(policy.limits, actual, self.costs, self.ats, strict=True):
            change = new - old if given is None or limit.unit in given else 0
            if limit.rules.holds_slots:  # the work is over: its slots are free again
                change = -old
            elif expired and change < 0:
                change = 0
            # A limit that was not charged has nothing to correct: its usage is charged now.
            fresh = not old and at is not None
            deltas.append(0 if fresh else change)
            unplanned.append(change if fresh else 0)
            late = late or (fresh and change != 0)
        asks = [AskStep("adjust", policy, key, part, at) for at, part in self.split_by_instant(deltas)]
        if late:
            asks.append(AskStep("adjust", policy, key, tuple(unplanned)))
        return asks

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

    def _cancel_asks(self) -> list[AskStep]:
        return self._settle_asks((0,) * len(self.costs))

    def _reopen(self) -> None:
        """Allow another attempt to settle: the store was unavailable."""
        self._open.append(True)

    def _observe(self, ask: AskStep, decision: Decision) -> None:
        """Call the observer; an error in it is logged, because the charge was corrected."""
        if self.observer is not None:
            try:
                self.observer(Record(ask.verb, ask.policy, ask.key, ask.costs, decision))
            except Exception:
                log.exception("the observer of a reservation failed")

    def __repr__(self) -> str:
        """Show the key, the costs and the state."""
        state = "settled" if self.settled else "expired" if self.expired else "open"
        return f"<{type(self).__name__} {self.key!r} {self.costs} {state}>"


class Reservation(_Reservation[Callable[[AskStep], "Decision"]]):
    """Permits reserved for a running call. Commit the actual cost, or cancel."""

    def commit(self, actual: Cost | None = None) -> None:
        """Charge the actual cost instead of the estimate (None: the estimate)."""
        self._send(self._commit_asks(actual))

    def cancel(self) -> None:
        """Refund the whole charge."""
        self._send(self._cancel_asks())

    def _send(self, asks: list[AskStep]) -> None:
        for ask in asks:
            try:
                decision = self._settle(ask)
            except StoreUnavailable:
                if ask is asks[0]:  # once some corrections were made, the rest stays as charged
                    self._reopen()
                raise
            self._observe(ask, decision)

    def __enter__(self) -> Self:
        """Settle at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the estimate, or cancel after an exception, unless it was settled before."""
        if not self.settled:
            self._send(self._commit_asks(None) if kind is None else self._cancel_asks())


class AsyncReservation(_Reservation[Callable[[AskStep], Awaitable["Decision"]]]):
    """Permits reserved for a running call, for tasks: the methods of Reservation as coroutines."""

    async def commit(self, actual: Cost | None = None) -> None:
        """Charge the actual cost instead of the estimate (None: the estimate)."""
        await self._send(self._commit_asks(actual))

    async def cancel(self) -> None:
        """Refund the whole charge."""
        await self._send(self._cancel_asks())

    async def _send(self, asks: list[AskStep]) -> None:
        for number, ask in enumerate(asks):
            try:
                decision = await self._settle(ask)
            except StoreUnavailable:
                if ask is asks[0]:  # once some corrections were made, the rest stays as charged
                    self._reopen()
                raise
            except asyncio.CancelledError:  # the store still makes this correction; make the others too
                if asks[number + 1 :]:
                    SETTLEMENTS.start(self._send(asks[number + 1 :]))
                raise
            self._observe(ask, decision)

    async def __aenter__(self) -> Self:
        """Settle at the end of the block."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the estimate, or cancel after an exception, unless it was settled before."""
        if not self.settled:
            await self._send(self._commit_asks(None) if kind is None else self._cancel_asks())


R = TypeVar("R", bound="AbstractAsyncContextManager[Any, Any]")


class Reserving(Generic[R]):
    """What `AsyncLimiter.reserve` and `AsyncGate.acquire` return: `await` it, or use it in `async with`."""

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
