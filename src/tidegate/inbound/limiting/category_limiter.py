"""The limiter of a category, charges to it, and their correction when the response is known."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.errors import Denied, RateLimitError
from tidegate.inbound.client.recent import RecentClients
from tidegate.inbound.responses.response import together
from tidegate.limiter import AsyncLimiter, Limiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tidegate.core.decision import Decision
    from tidegate.inbound.client.request import Request
    from tidegate.inbound.limiting.flow import Steps
    from tidegate.inbound.responses.response import ResponseWriter
    from tidegate.inbound.rules.charging import Charging
    from tidegate.inbound.rules.model import Category
    from tidegate.policy import Cost, Key

    Counts = Callable[[Request, int], bool]  # whether a response with this status counts

log = logging.getLogger("tidegate.inbound")

FIRST_SERVER_ERROR: Final = 500  # the status assumed if there is no response
MAX_RESPONSE_SECONDS: Final = 3600.0  # after this time an unsettled charge becomes final


class CategoryLimiter:
    """An active category: its limiter and its recently seen clients."""

    __slots__ = (
        "_answers", "_count", "allowed", "awaited", "category", "census", "charging", "decide", "denied", "fields",
        "held", "limiter", "seen", "slots",
    )  # fmt: skip

    def __init__(
        self,
        category: Category,
        limiter: Limiter | AsyncLimiter,
        answers: ResponseWriter,
        count: Counts | None = None,
        most: int = 10_000,
    ) -> None:
        """Use this limiter; `count` returns whether a response counts; keep at most `most` recent clients."""
        self.limiter = limiter
        self._answers = answers
        self.awaited = isinstance(limiter, AsyncLimiter)
        self.census = RecentClients(most)
        self.seen = self.census.seen
        self._count = count
        self.allowed = 0
        self.denied = 0
        self.take_over(category)

    def take_over(self, category: Category) -> None:
        """Use the policy and charging rules of this category from now on."""
        self.category = category
        if self.limiter.policy != category.policy:
            self.limiter.update(category.policy)
        self.decide: Callable[[Key, Cost], Any] = self.limiter.try_acquire  # it changes with the policy
        self.fields: Callable[[Decision], list[tuple[bytes, bytes]]] = self._answers.writer(self.limiter.policy)
        self.charging: Charging | None = category.charging
        # How long a request may hold a concurrency slot, at most until its response is complete; None: no slots.
        slots = [limit.length for limit in category.policy.limits if limit.algorithm == "concurrency"]
        self.slots: float | None = min(slots) / SECOND if slots else None
        self.held = bool(slots) or self.charging is not None or self._count is not None

    def reserve(self, key: Key, cost: Cost) -> Any:  # noqa: ANN401 - a reservation, or an awaitable of one
        """Reserve the cost of a request, to be corrected later."""
        return self.limiter.reserve(key, cost, ttl=self.slots or MAX_RESPONSE_SECONDS, timeout=0)

    def charge(self, request: Request, status: int, cost: Cost) -> Cost | None:
        """Return the final cost of a request, given the status of its response; None: the estimated cost."""
        counts = self._count is None or self._count(request, status)
        if self.charging is None:
            return None if counts else 0
        if isinstance(cost, int):
            return self.charging.cost(status, cost if counts else 0)
        return None if self.charging.cost(status, int(counts)) else 0  # several units: the full cost or none


class Charged(NamedTuple):
    """The decision of a category about a request; with a reservation if the charge can be corrected."""

    gate: CategoryLimiter
    cost: Cost
    decision: Decision
    held: Any = None  # sync or async


def charging(gate: CategoryLimiter, key: Key, cost: Cost, *, held: bool) -> Steps[Charged]:
    """Charge a category; `held`: as a reservation that can be corrected."""
    try:
        if held:
            reservation = yield partial(gate.reserve, key, cost)
            return Charged(gate, cost, reservation.decision, reservation)
        decision = yield partial(gate.decide, key, cost)
    except Denied as denied:
        decision = denied.decision
    return Charged(gate, cost, decision)


def cancelling(charged: Iterable[Charged]) -> Steps[None]:
    """Cancel the reservations of a request that another category has denied."""
    for charge in charged:
        if charge.held is not None:
            yield from _correcting(charge.gate, charge.held.cancel)


def refunding(charged: Iterable[Charged], key: Key) -> Steps[None]:
    """Refund charges that have no reservation."""
    for charge in charged:
        if charge.decision[0]:
            yield from _correcting(charge.gate, partial(charge.gate.limiter.refund, key, charge.cost))


def _correcting(gate: CategoryLimiter, step: Callable[[], Any]) -> Steps[None]:
    """Correct a charge. The client gets its response even if the store fails."""
    try:
        yield step
    except RateLimitError as error:
        log.error("category %s: could not correct a charge: %s", gate.category.name, error)  # noqa: TRY400 - the message has all details


class ResponseCharge:
    """The reservations of a request, settled when the status of its response is known."""

    __slots__ = ("_charged", "_key", "_request", "at_the_start", "status")

    def __init__(self, charged: list[Charged], key: Key, request: Request) -> None:
        """Hold the reservations of a request."""
        self._charged = charged
        self._key = key
        self._request = request
        self.status = FIRST_SERVER_ERROR
        # Slots are held until the response is complete.
        self.at_the_start = all(charge.gate.slots is None for charge in charged)

    def starting(self) -> Steps[Decision | None]:
        """Settle, then return the client's new state for the headers; None if the store fails."""
        gates = [charge.gate for charge in self._charged]
        yield from self.ending()
        decisions: list[Decision] = []
        for gate in gates:
            try:
                decision: Decision = yield partial(gate.limiter.peek, self._key, {})
            except RateLimitError:
                return None  # `ending` has logged the store error, or the next request will
            gate.census.note(self._key, decision)
            decisions.append(decision)
        return together(decisions) if decisions else None

    def ending(self) -> Steps[None]:
        """Commit the final cost of the request, once."""
        charged, self._charged = self._charged, []
        for charge in charged:
            actual = charge.gate.charge(self._request, self.status, charge.cost)
            yield from _correcting(charge.gate, partial(charge.held.commit, actual))
