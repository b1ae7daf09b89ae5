"""A category in force, and the correction of a charge when a response is known."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.bounds import SECOND
from tidegate.errors import RateLimitError
from tidegate.inbound.census import Census
from tidegate.limiter import AsyncLimiter, Limiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.core.decision import Decision
    from tidegate.inbound.answers import Answers
    from tidegate.inbound.charging import Charging
    from tidegate.inbound.request import Request
    from tidegate.inbound.rules import Category
    from tidegate.inbound.steps import Steps
    from tidegate.policy import Cost, Key

    Counts = Callable[[Request, int], bool]  # whether a response with this status counts

log = logging.getLogger("tidegate.inbound")

FAILED: Final = 500  # the status of a response that never came
LONGEST_RESPONSE: Final = 3600.0  # seconds after which a response that never came counts as the request did


class Gate:
    """A category in force: its limiter, and whom it has met."""

    __slots__ = (
        "_answers", "_count", "allowed", "awaited", "category", "census", "charging", "decide", "denied", "fields",
        "held", "limiter", "seen", "slots",
    )  # fmt: skip

    def __init__(
        self,
        category: Category,
        limiter: Limiter | AsyncLimiter,
        answers: Answers,
        count: Counts | None = None,
        most: int = 10_000,
    ) -> None:
        """Decide by this limiter; `count` tells which responses count; remember `most` clients."""
        self.limiter = limiter
        self._answers = answers
        self.awaited = isinstance(limiter, AsyncLimiter)
        self.census = Census(most)
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
        return self.limiter.reserve(key, cost, ttl=self.slots or LONGEST_RESPONSE, timeout=0)

    def charge(self, request: Request, status: int, cost: Cost) -> Cost | None:
        """Tell what a request is charged, now that the status of its response is known; None: as estimated."""
        counts = self._count is None or self._count(request, status)
        if self.charging is None:
            return None if counts else 0
        if isinstance(cost, int):
            return self.charging.cost(status, cost if counts else 0)
        return None if self.charging.cost(status, int(counts)) else 0  # of several units, all or nothing


class Settlement:
    """A request whose charge is corrected when the status of its response is known."""

    __slots__ = ("_cost", "_gate", "_held", "_key", "_request", "at_the_start", "status")

    def __init__(self, gate: Gate, key: Key, cost: Cost, held: Any, request: Request) -> None:  # noqa: ANN401 - a reservation of either colour
        """Begin with what is reserved."""
        self._gate = gate
        self._key = key
        self._cost = cost
        self._held = held
        self._request = request
        self.status = FAILED
        self.at_the_start = gate.slots is None  # slots are held until the response is complete

    def starting(self) -> Steps[Decision | None]:
        """Charge what the request costs after all, and tell how its client stands then, if the store can tell."""
        yield from self.ending()
        try:
            decision: Decision = yield partial(self._gate.limiter.peek, self._key, {})
        except RateLimitError:
            return None  # `ending` has logged that the store is lost, or the next request will
        self._gate.census.note(self._key, decision)
        return decision

    def ending(self) -> Steps[None]:
        """Charge what the request costs after all; once. A store that is lost must not cost the client its response."""
        held, self._held = self._held, None
        if held is None:
            return
        actual = self._gate.charge(self._request, self.status, self._cost)
        try:
            yield partial(held.commit, actual)
        except RateLimitError as error:
            log.error("category %s: a charge could not be corrected: %s", self._gate.category.name, error)  # noqa: TRY400 - the message says it all
