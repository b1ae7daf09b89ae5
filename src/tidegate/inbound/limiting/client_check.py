"""Decides about a client in a category, without an HTTP request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.core.algorithms import View
from tidegate.core.decision import Decision
from tidegate.errors import ConfigError
from tidegate.inbound.client.request import Request
from tidegate.inbound.limiting.charges import decide_flow, has_slots
from tidegate.suggestions import did_you_mean

if TYPE_CHECKING:
    from tidegate.flow import Flow
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter
    from tidegate.inbound.limiting.request_limiter import RequestLimiter
    from tidegate.policy import Cost

CHECK_METHOD: Final = "CHECK"  # the method in log lines and records: there is no request


def check_client_flow(
    request_limiter: RequestLimiter, address: str | None, category: str, cost: Cost
) -> Flow[Any, Decision]:
    """Charge a client in a category, as a request of the client would; raises ConfigError for an unknown category.

    The lists of exempt and blocked clients and `block_after` apply. Functions of a request (`key`, `plan`,
    `exempt_when`) and limits of other categories do not.
    """
    if request_limiter.idle:
        request_limiter.run_idle_maintenance()  # first: it may replace the rules
    category_limiter = find_category(request_limiter, category)
    category_limiter.policy.costs(cost)  # raises ConfigError: in a charge, it would be an error of the store
    client = request_limiter.client_identifier.find(address, ())
    if not request_limiter.rules.enabled or client.key is None:
        return allow_freely(request_limiter, category_limiter)
    charges = request_limiter.make_charges(((category_limiter, cost),), client.key)
    request = Request(CHECK_METHOD, category, client.address, {}, lambda _: None)
    result = None
    if request_limiter.has_special_clients or client.blocked:
        result = yield from request_limiter.special_client_flow(request, charges[0], client, client.key)
    if result is None:
        result = yield from decide_flow(charges)
        result.record(CHECK_METHOD, category)
        result = yield from request_limiter.count_denial_flow(result, client.key)
    decision = result.decision
    return allow_freely(request_limiter, category_limiter) if decision is None else decision


def find_category(request_limiter: RequestLimiter, name: str) -> CategoryLimiter:
    """Return the limiter of a category; raises ConfigError if there is none, or if it needs a request."""
    names = [category.name for category in request_limiter.rules.categories]
    if name not in names:
        expected = did_you_mean(name, names) or f"expected one of {', '.join(names)}"
        raise ConfigError(f"unknown category {name!r}: {expected}", field="category")
    found = request_limiter.category_limiters[name]
    if has_slots(found.policy):
        raise ConfigError(
            f"category {name!r} limits concurrent requests, which hold a slot until their response ends: "
            "a check has no response",
            field="category",
        )
    return found


def allow_freely(request_limiter: RequestLimiter, category_limiter: CategoryLimiter) -> Decision:
    """Return a decision that allows a call without a charge: the limits are unused."""
    limits = category_limiter.limits
    views = [View(limit.burst, 0, 0) for limit in limits]
    return Decision.of_views(request_limiter.now(), limits, views, within_limits=True)
