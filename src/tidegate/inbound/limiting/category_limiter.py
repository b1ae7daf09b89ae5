"""The limiter of a category, charges to it, and their correction when the response is known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.inbound.client.recent import RecentClients
from tidegate.inbound.client.request import Request
from tidegate.inbound.limiting.charges import find_next_permits_flow
from tidegate.limiter import AsyncLimiter, Limiter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.core import Limit
    from tidegate.core.decision import Decision
    from tidegate.flow import CallFlow
    from tidegate.inbound.limiting.charges import DecidedCharge, RequestCharge
    from tidegate.inbound.limiting.configured_limiter import AcquireTogether
    from tidegate.inbound.responses.prepared_fields import FieldWriter
    from tidegate.inbound.rules.charging import Charging
    from tidegate.inbound.rules.model import Category
    from tidegate.policy import Cost, Key, Policy

Counts = Callable[[Request, int], bool]  # whether a response with this status counts

log: logging.Logger = logging.getLogger("tidegate.inbound")

FIRST_SERVER_ERROR: Final = 500  # the status assumed if there is no response
MAX_RESPONSE_SECONDS: Final = 3600.0  # after this time an unsettled charge becomes final


class CategoryLimiter:
    """An active category: its limiter and its recently seen clients.

    New rules replace it, and never change it: a request uses the same rules from its decision to its response.
    """

    __slots__ = (
        "_count",
        "acquire",
        "allowed",
        "category",
        "charging",
        "decide",
        "denied",
        "is_async",
        "last_decisions",
        "limiter",
        "limits",
        "plans",
        "policy",
        "recent_clients",
        "reserves",
        "write",
    )

    def __init__(
        self,
        category: Category,
        limiter: Limiter | AsyncLimiter,
        prepare: Callable[[Policy], tuple[AcquireTogether, FieldWriter]],
        count: Counts | None = None,
        max_clients: int = 10_000,
    ) -> None:
        """Use this limiter; `count` returns whether a response counts; keep at most `max_clients` recent clients.

        `prepare` returns the fast path of a policy, and what writes the header fields of what it has charged.
        """
        self.category: Category = category
        self.limiter: Limiter | AsyncLimiter = limiter
        self.is_async: bool = isinstance(limiter, AsyncLimiter)
        self.recent_clients: RecentClients = RecentClients(max_clients)
        self.last_decisions: dict[Key, Decision] = self.recent_clients.last_decisions
        self._count = count
        self.allowed: int = 0
        self.denied: int = 0
        self.decide: Callable[[Key, Cost], Any] = limiter.try_acquire
        self.policy: Policy = limiter.policy
        self.limits: tuple[Limit, ...] = self.policy.limits
        self.acquire: AcquireTogether
        self.write: FieldWriter
        self.acquire, self.write = prepare(self.policy)
        self.plans: dict[object, Any] = {}  # for the fast path: what is charged together, by the limits of a route
        self.charging: Charging | None = category.charging
        self.reserves: bool = (
            holds_slots(category.policy.limits) or self.charging is not None or self._count is not None
        )

    def replace(self, earlier: CategoryLimiter) -> None:
        """Continue the statistics of the limiter that this one replaces."""
        self.allowed, self.denied = earlier.allowed, earlier.denied
        max_clients = self.recent_clients.max_clients
        self.share_clients(earlier)
        self.recent_clients.resize(max_clients)

    def share_clients(self, other: CategoryLimiter) -> None:
        """Use the recently seen clients of another limiter."""
        self.recent_clients, self.last_decisions = other.recent_clients, other.last_decisions

    def final_cost(self, request: Request, status: int, cost: Cost) -> Cost | None:
        """Return the final cost of a request, given the status of its response; None: the estimated cost."""
        counts = self._count is None or self._count(request, status)
        if self.charging is None:
            return None if counts else 0
        if isinstance(cost, int):
            return self.charging.cost(status, cost if counts else 0)
        return None if self.charging.cost(status, int(counts)) else 0  # several units: the full cost or none


class OpenCharge(NamedTuple):
    """A charge that is corrected when the response is known."""

    charge: RequestCharge
    reservation: Any  # sync or async
    final_cost: Callable[[Any, int, Cost], Cost | None]
    holds_slots: bool  # until the response is complete


def open_charges(decided: Iterable[DecidedCharge]) -> list[OpenCharge]:
    """Return the charges that the response may change."""
    found = []
    for charge, decision, verb in decided:
        owner = charge.category_limiter or charge.route_limit
        if charge.reserves and verb and owner is not None:
            # How long a request may hold a concurrency slot, at most until its response is complete.
            slots = [limit.length / SECOND for limit in charge.policy.limits if limit.rules.holds_slots]
            ttl = min(slots, default=MAX_RESPONSE_SECONDS)
            reservation = charge.limiter.make_reservation(charge.key, charge.cost, decision, ttl)
            found.append(OpenCharge(charge, reservation, owner.final_cost, bool(slots)))
    return found


def holds_slots(limits: Iterable[Limit]) -> bool:
    """Return whether requests hold slots of one of the limits until their responses are complete."""
    return any(limit.rules.holds_slots for limit in limits)


def correct_flow(name: str, step: Callable[[], Any]) -> CallFlow[None]:
    """Correct a charge. The client gets its response even if the store fails, whatever it raises."""
    try:
        yield step
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        log.error("%s: could not correct a charge: %s", name, error)  # noqa: TRY400 - the message has all details


class ResponseCharge:
    """The reservations of a request, settled when the status of its response is known."""

    __slots__ = ("_open", "_request", "status")

    def __init__(self, charges: list[OpenCharge], request: Request) -> None:
        """Hold the reservations of a request."""
        self._open = charges
        self._request = request
        self.status: int | None = None  # until the response starts

    @property
    def settles_at_start(self) -> bool:
        """Whether the start of the response settles everything: slots are held until the response is complete."""
        return not any(each.holds_slots for each in self._open)

    def add(self, other: ResponseCharge) -> None:
        """Settle the charges of a later decision about the same request, too."""
        self._open = [*self._open, *other.take()]

    def take(self) -> list[OpenCharge]:
        """Return the charges, which are no longer settled here."""
        charges, self._open = self._open, []
        return charges

    def settle_early_flow(self, charges: Iterable[RequestCharge]) -> CallFlow[None]:
        """Settle only these charges, before the response is known: no status changes their cost."""
        early = {id(charge) for charge in charges}
        found = [each for each in self._open if id(each.charge) in early]
        self._open = [each for each in self._open if id(each.charge) not in early]
        for each in found:
            yield from correct_flow(each.charge.policy.name, partial(each.reservation.commit, None))

    def settle_at_start_flow(self) -> CallFlow[list[tuple[RequestCharge, Decision]]]:
        """Settle, then return the new state of each charge for the headers; nothing if the store fails."""
        charges = [each.charge for each in self._open]
        yield from self.settle_flow()
        decisions: list[tuple[RequestCharge, Decision]] = []
        for charge in charges:
            try:
                decision: Decision = yield partial(charge.limiter.peek, charge.key, {})
            except GeneratorExit:
                raise
            except Exception:  # noqa: BLE001 - as in `correct_flow`
                return []  # `settle_flow` has logged the store error, or the next request will
            if charge.category_limiter is not None:
                charge.category_limiter.recent_clients.record(charge.key, decision)
            if charge.request_limiter.shows_next_permit:
                is_async = isinstance(charge.limiter, AsyncLimiter)
                decision = yield from find_next_permits_flow(charge, decision, {}, tasks=is_async)
            decisions.append((charge, decision))
        return decisions

    def settle_flow(self) -> CallFlow[None]:
        """Commit the final cost of the request, once. A missing response counts as a server error."""
        status = FIRST_SERVER_ERROR if self.status is None else self.status
        for charge, reservation, final_cost, _ in self.take():
            actual = final_cost(self._request if charge.native is None else charge.native, status, charge.cost)
            yield from correct_flow(charge.policy.name, partial(reservation.commit, actual))
