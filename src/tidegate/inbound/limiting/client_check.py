"""Decides about a client in a category, without an HTTP request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.core.decision import Decision, shadow
from tidegate.errors import ConfigError
from tidegate.inbound.client.request import Request
from tidegate.inbound.limiting.category_limiter import holds_slots
from tidegate.inbound.limiting.charges import RequestCharge, charge_all_flow
from tidegate.suggestions import did_you_mean

if TYPE_CHECKING:
    from tidegate.flow import CallFlow
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter
    from tidegate.inbound.limiting.request_limiter import RequestLimiter
    from tidegate.policy import Cost, Key

CHECK_METHOD: Final = "CHECK"  # the method in log lines and records: there is no request


def check_client_flow(
    request_limiter: RequestLimiter, address: str | None, category: str, cost: Cost
) -> CallFlow[Decision]:
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
    return (yield from _charge_flow(request_limiter, category_limiter, client, client.key, cost))


def _charge_flow(
    request_limiter: RequestLimiter, category_limiter: CategoryLimiter, client: RequestClient, key: Key, cost: Cost
) -> CallFlow[Decision]:
    """Charge a client that is not exempt, unless it is on a list."""
    category = category_limiter.category.name
    if request_limiter.has_special_clients or client.blocked:
        request = Request(CHECK_METHOD, category, client.address, {}, lambda _: None)
        known = yield from request_limiter.special_client_flow(request, category_limiter, client, key)
        if known is not None:
            return allow_freely(request_limiter, category_limiter) if known.decision is None else known.decision
    charge = RequestCharge(request_limiter, category_limiter.limiter, key, cost, category_limiter)
    result = yield from charge_all_flow([charge], tasks=request_limiter.tasks)
    result.record(CHECK_METHOD, category)
    if not result.allowed:
        result = yield from request_limiter.count_denial_flow(result, key)
    decision = result.decision
    if decision is None:  # the store failed, and `on_store_error` is "allow"
        return allow_freely(request_limiter, category_limiter)
    return decision if decision.allowed == result.allowed else shadow(decision)  # `unknown` may allow it


def find_category(request_limiter: RequestLimiter, name: str) -> CategoryLimiter:
    """Return the limiter of a category; raises ConfigError if there is none, or if it needs a request."""
    names = [category.name for category in request_limiter.rules.categories]
    if name not in names:
        expected = did_you_mean(name, names) or f"expected one of {', '.join(names)}"
        raise ConfigError(f"unknown category {name!r}: {expected}", field="category")
    found = request_limiter.category_limiters[name]
    if holds_slots(found.limits):
        raise ConfigError(
            f"category {name!r} limits concurrent requests, which hold a slot until their response ends: "
            "a check has no response",
            field="category",
        )
    return found


def allow_freely(request_limiter: RequestLimiter, category_limiter: CategoryLimiter) -> Decision:
    """Return a decision that allows a call without a charge: the limits are unused."""
    limits = category_limiter.limits
    views = [(limit.burst, 0, 0) for limit in limits]
    return Decision.of_views(request_limiter.now(), limits, views, within_limits=True)
