"""A Charge: what a request was charged, until its actual cost is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.core.bounds import MAX_INTEGER

if TYPE_CHECKING:
    from tidegate.core import Decision
    from tidegate.limiter import AsyncLimiter, Limiter
    from tidegate.policy import Cost, Key
    from tidegate.reservation import AsyncReservation, Reservation

CHARGE_TTL: Final = 600.0  # seconds within which a response must end for its estimate to be corrected downwards


class Charge:
    """A charge that can be corrected; its reservation is created only when needed, since most charges never change."""

    __slots__ = (
        "_cost",
        "_key",
        "_limiter",
        "_reservation",
        "answered",
        "at",
        "decision",
        "recharged",
        "since",
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
        self._limiter = limiter
        self._key = key
        self._cost = cost
        self._reservation = reservation
        self.decision: Decision = decision
        self.at: int = decision.at  # when it was last charged, by the store's clock
        self.since: int = limiter.clock.steady()  # ... and by ours
        # the end of the first window it was charged to, by the store's clock; see `arrival`
        self.window_end: int = MAX_INTEGER
        self.recharged: Decision | None = None  # the decision of the store when it was charged again
        self.answered: bool = False
        self.tracked_until: int = MAX_INTEGER  # by our clock: later, it no longer counts as in flight

    @property
    def settled(self) -> bool:
        """Whether it was committed or cancelled."""
        return self._reservation is not None and self._reservation.settled

    @property
    def costs(self) -> tuple[int, ...]:
        """What was charged to each limit."""
        return self.reservation.costs

    def parts(self, amounts: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Group amounts by the instant at which their limits were last charged."""
        return self.reservation.split_by_instant(amounts)

    def move(self, costs: tuple[int, ...], recharged: Decision) -> None:
        """Record that these costs were charged again: settling applies to the new charge."""
        reservation = self.reservation
        reservation.ats = tuple(recharged.at if cost else at for cost, at in zip(costs, reservation.ats, strict=True))
        self.at, self.recharged = recharged.at, recharged

    def shrink(self, costs: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Reduce what counts as charged; returns what to give back, by the instant at which it was charged."""
        reservation = self.reservation
        parts = self.parts(costs)
        reservation.costs = tuple(old - less for old, less in zip(reservation.costs, costs, strict=True))
        return parts

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
            self._reservation = self._limiter.make_reservation(self._key, self._cost, self.decision, CHARGE_TTL)
        return self._reservation
