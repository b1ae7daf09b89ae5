"""A category in force, charges to it, and their correction when a response is known."""

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

FIRST_SERVER_ERROR: Final = 500  # the status of a response that never came
MAX_RESPONSE_SECONDS: Final = 3600.0  # seconds after which a response that never came counts as the request did


class CategoryLimiter:
    """A category in force: its limiter, and whom it has met."""

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
        """Decide by this limiter; `count` tells which responses count; remember `most` clients."""
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
        """Decide by the rules of this category from now on."""
        self.category = category
        if self.limiter.policy != category.policy:
            self.limiter.update(category.policy)
        self.decide: Callable[[Key, Cost], Any] = self.limiter.try_acquire  # another one with each policy
        self.fields: Callable[[Decision], list[tuple[bytes, bytes]]] = self._answers.writer(self.limiter.policy)
        self.charging: Charging | None = category.charging
        # How long a request may hold slots, which it needs until its response is complete; None: it holds none.
        slots = [limit.length for limit in category.policy.limits if limit.algorithm == "concurrency"]
        self.slots: float | None = min(slots) / SECOND if slots else None
        self.held = bool(slots) or self.charging is not None or self._count is not None

    def reserve(self, key: Key, cost: Cost) -> Any:  # noqa: ANN401 - a reservation, perhaps to be awaited
        """Charge what a request costs, to be corrected later."""
        return self.limiter.reserve(key, cost, ttl=self.slots or MAX_RESPONSE_SECONDS, timeout=0)

    def charge(self, request: Request, status: int, cost: Cost) -> Cost | None:
        """Tell what a request is charged, now that the status of its response is known; None: as estimated."""
        counts = self._count is None or self._count(request, status)
        if self.charging is None:
            return None if counts else 0
        if isinstance(cost, int):
            return self.charging.cost(status, cost if counts else 0)
        return None if self.charging.cost(status, int(counts)) else 0  # of several units, all or nothing


class Charged(NamedTuple):
    """What a gate decided about a request, at this cost; `held` is the reservation, if the charge can be corrected."""

    gate: CategoryLimiter
    cost: Cost
    decision: Decision
    held: Any = None  # of either colour


def charging(gate: CategoryLimiter, key: Key, cost: Cost, *, held: bool) -> Steps[Charged]:
    """Charge a gate; `held`: such that it can be corrected."""
    try:
        if held:
            reservation = yield partial(gate.reserve, key, cost)
            return Charged(gate, cost, reservation.decision, reservation)
        decision = yield partial(gate.decide, key, cost)
    except Denied as denied:
        decision = denied.decision
    return Charged(gate, cost, decision)


def cancelling(charged: Iterable[Charged]) -> Steps[None]:
    """Give back what was charged for a request that another gate has denied."""
    for charge in charged:
        if charge.held is not None:
            yield from _correcting(charge.gate, charge.held.cancel)


def refunding(charged: Iterable[Charged], key: Key) -> Steps[None]:
    """Give back charges that were made for good."""
    for charge in charged:
        if charge.decision[0]:
            yield from _correcting(charge.gate, partial(charge.gate.limiter.refund, key, charge.cost))


def _correcting(gate: CategoryLimiter, step: Callable[[], Any]) -> Steps[None]:
    """Correct a charge. A store that is lost must not cost the client its response."""
    try:
        yield step
    except RateLimitError as error:
        log.error("category %s: a charge could not be corrected: %s", gate.category.name, error)  # noqa: TRY400 - the message says it all


class ResponseCharge:
    """A request whose charges are corrected when the status of its response is known."""

    __slots__ = ("_charged", "_key", "_request", "at_the_start", "status")

    def __init__(self, charged: list[Charged], key: Key, request: Request) -> None:
        """Begin with what is reserved."""
        self._charged = charged
        self._key = key
        self._request = request
        self.status = FIRST_SERVER_ERROR
        # Slots are held until the response is complete.
        self.at_the_start = all(charge.gate.slots is None for charge in charged)

    def starting(self) -> Steps[Decision | None]:
        """Charge what the request costs after all, and tell how its client stands then, if the store can tell."""
        gates = [charge.gate for charge in self._charged]
        yield from self.ending()
        decisions: list[Decision] = []
        for gate in gates:
            try:
                decision: Decision = yield partial(gate.limiter.peek, self._key, {})
            except RateLimitError:
                return None  # `ending` has logged that the store is lost, or the next request will
            gate.census.note(self._key, decision)
            decisions.append(decision)
        return together(decisions) if decisions else None

    def ending(self) -> Steps[None]:
        """Charge what the request costs after all; once."""
        charged, self._charged = self._charged, []
        for charge in charged:
            actual = charge.gate.charge(self._request, self.status, charge.cost)
            yield from _correcting(charge.gate, partial(charge.held.commit, actual))
