"""The fast path for common requests: a known client, one plain category and plain limits on the route, all allowed.

It makes the same decision as `RequestState.charge_flow`, in one step of a store in memory, without a flow. That flow
handles all other requests, including denials; for these, nothing was charged here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.inbound.limiting.charges import DecidedCharge, RequestCharge

if TYPE_CHECKING:
    from tidegate.inbound.limiting.limited_functions import LimitStack
    from tidegate.inbound.limiting.request_limiter import RequestLimiter
    from tidegate.inbound.limiting.request_state import RequestState
    from tidegate.inbound.limiting.route_limit import RouteLimit
    from tidegate.limiter import AsyncLimiter, Limiter
    from tidegate.stores import Store

    # The request limiter, its store, and for each limit of the stack: its limiter, and itself if it chooses the key.
    Plan = tuple[RequestLimiter, Store, list[tuple[Limiter | AsyncLimiter, RouteLimit, bool]]]

NEW_TUPLE = tuple.__new__  # faster than the constructor of a NamedTuple


def decide_fast(stack: LimitStack, request_state: RequestState, native: Any) -> bool:  # noqa: ANN401 - any request
    """Decide what is pending and the limits of a stack; returns whether they were decided and allow the request."""
    pending = request_state.pending
    if len(pending) != 1 or not stack.is_plain or request_state.made:
        return False
    charge = pending[0]
    request_limiter, limiter, key, cost, category_limiter, _, reserves, _ = charge
    plan = stack.plans.get(id(request_limiter))
    if plan is None:
        plan = stack.plans[id(request_limiter)] = make_plan(stack, request_limiter)
    client = request_state.client
    if plan[1] is None or reserves or cost != 1 or category_limiter is None or client is None:
        return False
    policy = limiter.policy
    if policy.mode != "enforce":
        return False
    asks = [(policy, key, policy.one)]
    charges = [charge]
    for route_limiter, limit, has_key in plan[2]:
        route_key = limit.choose_key(native, client, request_limiter) if has_key else client[0]
        if route_key is None:
            return False
        asks.append((route_limiter.policy, route_key, route_limiter.policy.one))
        charges.append(
            NEW_TUPLE(RequestCharge, (request_limiter, route_limiter, route_key, 1, None, limit, False, None))
        )
    decisions = plan[1].acquire_known(asks)
    if decisions is None:
        return False
    decision = decisions[0]
    last_decisions = category_limiter.last_decisions
    if decision[1] >= request_limiter.fast_path_until or key not in last_decisions:
        request_limiter.record_decision(category_limiter, key, cost, decision, "", "")
    else:
        last_decisions[key] = decision
        category_limiter.allowed += 1
    request_state.pending = ()
    request_state.made = [
        NEW_TUPLE(DecidedCharge, (each, decision, "acquire")) for each, decision in zip(charges, decisions, strict=True)
    ]
    return True


def make_plan(stack: LimitStack, request_limiter: RequestLimiter) -> Any:  # noqa: ANN401 - a Plan
    """Prepare the limits of a stack for a request limiter; without a store if the fast path cannot be used."""
    store = request_limiter.store
    usable = store.instant and request_limiter.own_clock is None and not request_limiter.observed
    limiters = [(use.limit.plain_limiter(request_limiter, use), use.limit, use.limit.has_key) for use in stack.uses]
    return request_limiter, store if usable else None, limiters if usable else []
