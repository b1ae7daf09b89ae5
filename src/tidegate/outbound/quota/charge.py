"""A Ticket: what a request was charged, until that is known to be right."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.bounds import MAX_INTEGER
from tidegate.limiter import Limiter
from tidegate.reservation import AsyncReservation, Reservation

if TYPE_CHECKING:
    from tidegate.core import Decision
    from tidegate.limiter import AsyncLimiter
    from tidegate.policy import Cost, Key

Flow = Generator[Callable[[], Any], Any, Any]  # steps to call, or to call and await; sent what they gave

CHARGE_TTL: Final = 600.0  # seconds within which an answer has to end for its estimate to be corrected downwards


class Charge:
    """A charge, and how to correct it: most charges never are, so the reservation for that is made when one is."""

    __slots__ = ("_cost", "_held", "_key", "_limiter", "anew", "answered", "at", "decision", "ends", "since")

    def __init__(
        self,
        limiter: Limiter | AsyncLimiter,
        key: Key,
        cost: Cost,
        decision: Decision,
        held: Reservation | AsyncReservation | None = None,
    ) -> None:
        """Know what was charged; `held` is its reservation, where there is one already."""
        self._limiter = limiter
        self._key = key
        self._cost = cost
        self._held = held
        self.decision = decision
        self.at = decision.at  # when it was charged last, by the store's clock
        self.since = limiter.clock.steady()  # ... and by ours
        self.ends = MAX_INTEGER  # when the first window ends that it was charged to, by the store's clock; see `delays`
        self.anew: Decision | None = None  # what the store said when it was charged anew
        self.answered = False

    @property
    def settled(self) -> bool:
        """Whether it was committed or cancelled."""
        return self._held is not None and self._held.settled

    @property
    def costs(self) -> tuple[int, ...]:
        """What was charged to each limit."""
        return self._reservation().costs

    def parts(self, amounts: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Tell amounts apart by the instant at which their limits were charged last."""
        return self._reservation().split_by_instant(amounts)

    def move(self, costs: tuple[int, ...], anew: Decision) -> None:
        """Take note that these costs were charged anew: they are what is settled."""
        held = self._reservation()
        held.ats = tuple(anew.at if cost else at for cost, at in zip(costs, held.ats, strict=True))
        self.at, self.anew = anew.at, anew

    def commit(self, actual: Cost | None = None) -> Any:  # noqa: ANN401 - to be awaited, or not
        """Charge the actual cost instead (None: as it was)."""
        return self._reservation().commit(actual)

    def cancel(self) -> Any:  # noqa: ANN401 - to be awaited, or not
        """Give everything back."""
        return self._reservation().cancel()

    def _reservation(self) -> Reservation | AsyncReservation:
        if self._held is None:
            limiter, decision = self._limiter, self.decision
            policy = limiter._policy_of(decision)  # noqa: SLF001 - as `reserve` itself does
            settle: Any = limiter._settle  # noqa: SLF001 - what `reserve` itself hands to a reservation
            kind = Reservation if isinstance(limiter, Limiter) else AsyncReservation
            self._held = kind(settle, limiter.clock, policy, self._key, policy.costs(self._cost), decision, CHARGE_TTL)
        return self._held
