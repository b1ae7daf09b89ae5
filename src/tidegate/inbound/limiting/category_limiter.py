"""The limiter of a category, charges to it, and their correction when the response is known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.errors import Denied, RateLimitError
from tidegate.inbound.client.recent import RecentClients
from tidegate.inbound.client.request import Request
from tidegate.inbound.responses.response import combine_decisions
from tidegate.limiter import AsyncLimiter, Limiter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.core.decision import Decision
    from tidegate.flow import CallFlow
    from tidegate.inbound.responses.response import ResponseWriter
    from tidegate.inbound.rules.charging import Charging
    from tidegate.inbound.rules.model import Category
    from tidegate.policy import Cost, Key

Counts = Callable[[Request, int], bool]  # whether a response with this status counts

log: logging.Logger = logging.getLogger("tidegate.inbound")

FIRST_SERVER_ERROR: Final = 500  # the status assumed if there is no response
MAX_RESPONSE_SECONDS: Final = 3600.0  # after this time an unsettled charge becomes final


class CategoryLimiter:
    """An active category: its limiter and its recently seen clients."""

    __slots__ = (
        "_count",
        "_response_writer",
        "allowed",
        "category",
        "charging",
        "decide",
        "denied",
        "fields",
        "is_async",
        "last_decisions",
        "limiter",
        "recent_clients",
        "reserves",
        "slot_seconds",
    )

    def __init__(
        self,
        category: Category,
        limiter: Limiter | AsyncLimiter,
        response_writer: ResponseWriter,
        count: Counts | None = None,
        max_clients: int = 10_000,
    ) -> None:
        """Use this limiter; `count` returns whether a response counts; keep at most `max_clients` recent clients."""
        self.limiter: Limiter | AsyncLimiter = limiter
        self._response_writer = response_writer
        self.is_async: bool = isinstance(limiter, AsyncLimiter)
        self.recent_clients: RecentClients = RecentClients(max_clients)
        self.last_decisions: dict[Key, Decision] = self.recent_clients.last_decisions
        self._count = count
        self.allowed: int = 0
        self.denied: int = 0
        self.update_category(category)

    def update_category(self, category: Category) -> None:
        """Use the policy and charging rules of this category from now on."""
        self.category: Category = category
        if self.limiter.policy != category.policy:
            self.limiter.update(category.policy)
        self.decide: Callable[[Key, Cost], Any] = self.limiter.try_acquire  # it changes with the policy
        self.fields: Callable[[Decision], list[tuple[bytes, bytes]]] = self._response_writer.writer(self.limiter.policy)
        self.charging: Charging | None = category.charging
        # How long a request may hold a concurrency slot, at most until its response is complete; None: no slots.
        slots = [limit.length for limit in category.policy.limits if limit.rules.holds_slots]
        self.slot_seconds: float | None = min(slots) / SECOND if slots else None
        self.reserves: bool = bool(slots) or self.charging is not None or self._count is not None

    def reserve(self, key: Key, cost: Cost) -> Any:  # noqa: ANN401 - a reservation, or an awaitable of one
        """Reserve the cost of a request, to be corrected later."""
        return self.limiter.reserve(key, cost, ttl=self.slot_seconds or MAX_RESPONSE_SECONDS, timeout=0)

    def final_cost(self, request: Request, status: int, cost: Cost) -> Cost | None:
        """Return the final cost of a request, given the status of its response; None: the estimated cost."""
        counts = self._count is None or self._count(request, status)
        if self.charging is None:
            return None if counts else 0
        if isinstance(cost, int):
            return self.charging.cost(status, cost if counts else 0)
        return None if self.charging.cost(status, int(counts)) else 0  # several units: the full cost or none


class CategoryCharge(NamedTuple):
    """The decision of a category about a request; with a reservation if the charge can be corrected."""

    category_limiter: CategoryLimiter
    cost: Cost
    decision: Decision
    reservation: Any = None  # sync or async


def charge_flow(category_limiter: CategoryLimiter, key: Key, cost: Cost, *, reserve: bool) -> CallFlow[CategoryCharge]:
    """Charge a category; `reserve`: as a reservation that can be corrected."""
    try:
        if reserve:
            reservation = yield partial(category_limiter.reserve, key, cost)
            return CategoryCharge(category_limiter, cost, reservation.decision, reservation)
        decision = yield partial(category_limiter.decide, key, cost)
    except Denied as denied:
        decision = denied.decision
    return CategoryCharge(category_limiter, cost, decision)


def cancel_flow(charged: Iterable[CategoryCharge]) -> CallFlow[None]:
    """Cancel the reservations of a request that another category has denied."""
    for charge in charged:
        if charge.reservation is not None:
            yield from _correct_flow(charge.category_limiter, charge.reservation.cancel)


def refund_flow(charged: Iterable[CategoryCharge], key: Key) -> CallFlow[None]:
    """Refund charges that have no reservation."""
    for charge in charged:
        if charge.decision.within_limits:
            yield from _correct_flow(
                charge.category_limiter, partial(charge.category_limiter.limiter.refund, key, charge.cost)
            )


def _correct_flow(category_limiter: CategoryLimiter, step: Callable[[], Any]) -> CallFlow[None]:
    """Correct a charge. The client gets its response even if the store fails."""
    try:
        yield step
    except RateLimitError as error:
        log.error("category %s: could not correct a charge: %s", category_limiter.category.name, error)  # noqa: TRY400 - the message has all details


class ResponseCharge:
    """The reservations of a request, settled when the status of its response is known."""

    __slots__ = ("_charged", "_key", "_request", "settles_at_start", "status")

    def __init__(self, charged: list[CategoryCharge], key: Key, request: Request) -> None:
        """Hold the reservations of a request."""
        self._charged = charged
        self._key = key
        self._request = request
        self.status: int = FIRST_SERVER_ERROR
        # Slots are held until the response is complete.
        self.settles_at_start: bool = all(charge.category_limiter.slot_seconds is None for charge in charged)

    def settle_at_start_flow(self) -> CallFlow[Decision | None]:
        """Settle, then return the client's new state for the headers; None if the store fails."""
        category_limiters = [charge.category_limiter for charge in self._charged]
        yield from self.settle_flow()
        decisions: list[Decision] = []
        for category_limiter in category_limiters:
            try:
                decision: Decision = yield partial(category_limiter.limiter.peek, self._key, {})
            except RateLimitError:
                return None  # `settle_flow` has logged the store error, or the next request will
            category_limiter.recent_clients.record(self._key, decision)
            decisions.append(decision)
        return combine_decisions(decisions) if decisions else None

    def settle_flow(self) -> CallFlow[None]:
        """Commit the final cost of the request, once."""
        charged, self._charged = self._charged, []
        for charge in charged:
            actual = charge.category_limiter.final_cost(self._request, self.status, charge.cost)
            yield from _correct_flow(charge.category_limiter, partial(charge.reservation.commit, actual))
