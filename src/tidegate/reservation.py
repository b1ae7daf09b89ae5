"""A Reservation: an estimate charged now, to be settled when the actual cost is known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from tidegate.core.bounds import SECOND
from tidegate.core.decision import LocalDecision
from tidegate.errors import RateLimitError, StoreUnavailable
from tidegate.stores.cancellation import BackgroundTasks
from tidegate.waiting import Ask

if TYPE_CHECKING:
    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.policy import Cost, Key, Policy


SETTLING: Final = BackgroundTasks()  # settlements in several parts whose task was cancelled between two of them


def charged_at(decision: Decision, policy: Policy) -> int | None:
    """Tell when a decision has charged its cost; None: it has not.

    In shadow mode a call may proceed although it did not fit, and under `allow` although the store could not be asked.
    """
    free = isinstance(decision, LocalDecision) and policy.on_store_error == "allow"
    return decision.at if decision[0] and not free else None


class _Reservation:
    """What the two kinds of reservation share: which corrections a settlement takes."""

    def __init__(
        self, clock: Clock, policy: Policy, key: Key, costs: tuple[int, ...], decision: Decision, ttl: float
    ) -> None:
        self.policy = policy
        self.key = key
        self.costs = costs
        self.decision = decision
        # When each limit was charged, by the store's clock; None: it never was.
        self.ats: tuple[int | None, ...] = (charged_at(decision, policy),) * len(costs)
        self._clock = clock
        self._ends = clock.steady() + round(ttl * SECOND)
        self._open = [True]  # emptied by whoever settles, and only by one

    @property
    def settled(self) -> bool:
        """Whether it was committed or cancelled."""
        return not self._open

    @property
    def expired(self) -> bool:
        """Whether the time to settle is over: then the estimate stands, and only what was used beyond it is charged."""
        return self._clock.steady() >= self._ends

    def _committing(self, actual: Cost | None) -> list[Ask]:
        """Word the correction from the estimate to the actual cost; units not named stay as estimated."""
        costs = self.costs
        if isinstance(actual, Mapping):
            named = self.policy.costs(actual)
            costs = tuple(
                new if limit.unit in actual else old
                for limit, new, old in zip(self.policy.limits, named, self.costs, strict=True)
            )
        elif actual is not None:
            named = self.policy.costs(actual)
            costs = tuple(
                new if limit.unit in self.policy.counted else old
                for limit, new, old in zip(self.policy.limits, named, self.costs, strict=True)
            )
        return self._settling(costs)

    def _settling(self, actual: tuple[int, ...]) -> list[Ask]:
        """Word a correction for each instant of a charge: there is one, unless some of it was charged anew."""
        expired = self.expired
        try:
            self._open.pop()
        except IndexError:
            raise RateLimitError(f"the reservation for {self.key!r} is already settled") from None
        deltas, unplanned = [], []
        for limit, new, old, at in zip(self.policy.limits, actual, self.costs, self.ats, strict=True):
            change = max(0, new - old) if expired else new - old
            if limit.algorithm == "concurrency":  # the work is over: its slots are free again
                change = -old
            # Where nothing was charged there is nothing to correct: what was used is charged as of now.
            fresh = not old and at is not None
            deltas.append(0 if fresh else change)
            unplanned.append(change if fresh else 0)
        asks = [Ask("adjust", self.policy, self.key, part, at) for at, part in self.parts(deltas)]
        return [*asks, Ask("adjust", self.policy, self.key, tuple(unplanned))] if any(unplanned) else asks

    def parts(self, amounts: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Tell amounts apart by the instant at which their limits were charged; what never was is left out."""
        instants = {at for at in self.ats if at is not None} or {self.decision.at}
        return [
            (at, tuple(amount if own == at else 0 for own, amount in zip(self.ats, amounts, strict=True)))
            for at in sorted(instants)
        ]

    def _cancelling(self) -> list[Ask]:
        return self._settling((0,) * len(self.costs))

    def _reopen(self) -> None:
        """Let it be settled again: the store could not be told."""
        self._open.append(True)

    def __repr__(self) -> str:
        """Show what is held, and whether it still is."""
        state = "settled" if self.settled else "expired" if self.expired else "open"
        return f"<{type(self).__name__} {self.key!r} {self.costs} {state}>"


class Reservation(_Reservation):
    """Permits held for a call under way. Commit what it really cost, or cancel."""

    def __init__(self, settle: Callable[[Ask], object], *held: Any) -> None:  # noqa: ANN401 - those of _Reservation
        """Made by `Limiter.reserve`."""
        super().__init__(*held)
        self._settle = settle

    def commit(self, actual: Cost | None = None) -> None:
        """Charge the actual cost instead of the estimate (None: as estimated)."""
        self._tell(self._committing(actual))

    def cancel(self) -> None:
        """Give everything back."""
        self._tell(self._cancelling())

    def _tell(self, asks: list[Ask]) -> None:
        for ask in asks:
            try:
                self._settle(ask)
            except StoreUnavailable:
                if ask is asks[0]:  # of what was told in part, the rest stays as it was charged
                    self._reopen()
                raise

    def __enter__(self) -> Self:
        """Settle at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the estimate, or cancel after an exception, unless settled before."""
        if not self.settled:
            self._tell(self._committing(None) if kind is None else self._cancelling())


class AsyncReservation(_Reservation):
    """Permits held for a call under way, for tasks: the names of Reservation, awaited."""

    def __init__(self, settle: Callable[[Ask], Awaitable[object]], *held: Any) -> None:  # noqa: ANN401 - as above
        """Made by `AsyncLimiter.reserve`."""
        super().__init__(*held)
        self._settle = settle

    async def commit(self, actual: Cost | None = None) -> None:
        """Charge the actual cost instead of the estimate (None: as estimated)."""
        await self._tell(self._committing(actual))

    async def cancel(self) -> None:
        """Give everything back."""
        await self._tell(self._cancelling())

    async def _tell(self, asks: list[Ask]) -> None:
        for number, ask in enumerate(asks):
            try:
                await self._settle(ask)
            except StoreUnavailable:
                if ask is asks[0]:  # of what was told in part, the rest stays as it was charged
                    self._reopen()
                raise
            except asyncio.CancelledError:  # the store makes this correction all the same; so must the others be
                if asks[number + 1 :]:
                    SETTLING.start(self._tell(asks[number + 1 :]))
                raise

    async def __aenter__(self) -> Self:
        """Settle at the end of the block."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the estimate, or cancel after an exception, unless settled before."""
        if not self.settled:
            await self._tell(self._committing(None) if kind is None else self._cancelling())


class Reserving:
    """A reservation to come: `await` it, or enter it with `async with`."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, AsyncReservation]]) -> None:
        """Made by `AsyncLimiter.reserve`."""
        self._start = start
        self._reservation: AsyncReservation | None = None

    def __await__(self) -> Generator[Any, Any, AsyncReservation]:
        """Reserve."""
        return self._start().__await__()

    async def __aenter__(self) -> AsyncReservation:
        """Reserve, and settle at the end of the block."""
        self._reservation = await self._start()
        return self._reservation

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Commit the estimate, or cancel after an exception, unless settled before."""
        if self._reservation is not None:
            await self._reservation.__aexit__(kind, *rest)
