"""The fast path for common requests: a known client, at most one plain category, and plain limits on the route.

If all of them allow a request, it makes the same decision as `RequestState.charge_flow`, in one step of a store in
memory, without a flow. That flow handles all other requests; for these, nothing was charged here. All that does not
depend on the client is prepared once for each category and stack of limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.core.decision import Decision
from tidegate.inbound.limiting.charges import DecidedCharge, RequestCharge
from tidegate.inbound.limiting.configured_limiter import charge_nothing
from tidegate.inbound.limiting.request_state import STATE_KEY, RequestState

if TYPE_CHECKING:
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter
    from tidegate.inbound.limiting.configured_limiter import AcquireTogether
    from tidegate.inbound.limiting.limited_functions import LimitStack
    from tidegate.inbound.limiting.request_limiter import RequestLimiter
    from tidegate.inbound.limiting.route_limit import RouteLimit
    from tidegate.inbound.responses.prepared_fields import FieldWriter
    from tidegate.limiter import AsyncLimiter, Limiter
    from tidegate.policy import Key


class ChargePlan:
    """The limits of a route, prepared, with a category or without one."""

    __slots__ = ("acquire", "category_limiter", "is_simple", "limits", "request_limiter", "write")

    def __init__(
        self, stack: LimitStack, request_limiter: RequestLimiter, category_limiter: CategoryLimiter | None
    ) -> None:
        """Prepare the limits of a stack."""
        self.request_limiter: RequestLimiter = request_limiter
        self.category_limiter: CategoryLimiter | None = category_limiter
        self.limits: tuple[tuple[Limiter | AsyncLimiter, RouteLimit], ...] = ()
        # Whether there is one limit on the route, and it counts by the client's key.
        self.is_simple: bool = len(stack.uses) == 1 and not stack.uses[0].limit.has_key
        self.acquire: AcquireTogether = charge_nothing
        self.write: FieldWriter | None = None
        has_key_function = request_limiter.client_identifier.key_function is not None
        if stack.is_plain and not has_key_function and not (category_limiter is not None and category_limiter.reserves):
            self.limits = tuple((use.limit.plain_limiter(request_limiter, use), use.limit) for use in stack.uses)
            policies = [limiter.policy for limiter, _ in self.limits]
            self.acquire, self.write = request_limiter.prepare_fast_path(
                *(() if category_limiter is None else (category_limiter.policy,)), *policies
            )

    def find_client(self, stack: LimitStack, native: Any, mapping: Any) -> RequestClient:  # noqa: ANN401 - any request
        """Return the client of a request that no middleware has identified."""
        peer, headers = stack.framework.sender(native, mapping)
        return self.request_limiter.client_identifier.find(peer, headers)

    def choose_keys(self, client: RequestClient, native: Any, mapping: Any) -> tuple[Key | None, ...]:  # noqa: ANN401 - any request
        """Return the key of each limit of the route; None for a limit that does not limit this request."""
        return tuple(limit.choose_key(native, mapping, client, self.request_limiter) for _, limit in self.limits)

    def charges(self, request_state: RequestState) -> list[DecidedCharge]:
        """Return the charges of a request that the plan has decided, and the decisions about them."""
        limiters: list[tuple[Any, Any, Any]] = [(limiter, None, limit) for limiter, limit in self.limits]
        if self.category_limiter is not None:
            limiters.insert(0, (self.category_limiter.limiter, self.category_limiter, None))
        now, views = request_state.written
        return [
            DecidedCharge(
                RequestCharge(self.request_limiter, limiter, key, 1, category, limit),
                Decision.of_views(now, limiter.policy.limits, (view,), within_limits=True),
            )
            for (limiter, category, limit), key, view in zip(limiters, request_state.keys, views, strict=True)
        ]


def decide_fast(stack: LimitStack, request_state: RequestState, native: Any) -> bool:  # noqa: ANN401 - any request
    """Decide what is pending and the limits of a stack; returns whether they were decided and allow the request."""
    category_limiter = request_state.deferred
    if category_limiter is None and request_state.by_route and stack.is_plain:
        request_state.override_defaults(stack.uses, "")
        category_limiter = request_state.deferred
    if category_limiter is None:
        return decide_route_limits(stack, request_state, native)
    plan = category_limiter.plans.get(stack)
    if plan is None:
        plan = category_limiter.plans[stack] = ChargePlan(stack, request_state.request_limiter, category_limiter)
    key, client = request_state.key, request_state.client
    assert client is not None  # noqa: S101 - a client that is charged is known
    keys: Any = (key, client.key)
    if not plan.is_simple:
        keys = (key, *plan.choose_keys(client, native, stack.framework.mapping(native)))
        if None in keys:
            return False
    charged = plan.acquire(keys)
    if charged is None:
        return False
    now, views = charged
    decision = Decision((True, now, category_limiter.limits, views[:1], None))
    last_decisions = category_limiter.last_decisions
    if now < request_state.request_limiter.fast_path_until and key in last_decisions:
        last_decisions[key] = decision
        category_limiter.allowed += 1
    else:
        request_state.request_limiter.record_decision(category_limiter, key, 1, decision, "", "")
    request_state.deferred = None
    request_state.plan = plan
    request_state.keys = keys
    request_state.written = charged
    if not request_state.nested:
        request_state.write = plan.write
    return True


def decide_deferred(request_state: RequestState) -> bool:
    """Decide a pending category at a route without limits; returns whether it was decided and allows the request."""
    category_limiter = request_state.deferred
    charged = None if category_limiter is None else category_limiter.acquire((request_state.key,))
    if category_limiter is None or charged is None:
        return False
    decision = Decision((True, charged[0], category_limiter.limits, charged[1], None))
    request_state.request_limiter.record_decision(category_limiter, request_state.key, 1, decision, "", "")
    request_state.deferred, request_state.charged, request_state.decision = None, category_limiter, decision
    if not request_state.nested:
        request_state.write, request_state.written = category_limiter.write, charged
    return True


def decide_route_limits(stack: LimitStack, request_state: RequestState, native: Any) -> bool:  # noqa: ANN401 - any request
    """Decide the limits of a stack, if the request has no pending charges and no decisions so far."""
    request_limiter = request_state.request_limiter
    if request_state.is_pending or request_state.has_decisions or request_state.covered is not None:
        return False
    if request_state.standalone or (request_limiter.special and request_state.client is None):
        return False
    plan = stack.plans.get(request_limiter)
    if plan is None:
        plan = stack.plans[request_limiter] = ChargePlan(stack, request_limiter, None)
    client = request_state.client or plan.find_client(stack, native, stack.framework.mapping(native))
    return decide_plan(plan, stack, request_state, client, native)


def decide_standalone(
    stack: LimitStack,
    native: Any,  # noqa: ANN401 - any request
    mapping: Any,  # noqa: ANN401 - its scope or environ
) -> RequestState | None:
    """Decide the limits of a stack without a middleware in front; returns the state, None if it was not decided."""
    plan = stack.plans.get(None)
    if plan is None:
        request_limiters = [use.limit.own_request_limiter() for use in stack.uses]
        if request_limiters.count(request_limiters[0]) < len(request_limiters):
            return None
        plan = stack.plans[None] = ChargePlan(stack, request_limiters[0], None)
    request_state = mapping[STATE_KEY] = RequestState()
    request_state.request_limiter = plan.request_limiter
    request_state.standalone = True
    request_state.client = client = plan.find_client(stack, native, mapping)
    if decide_plan(plan, stack, request_state, client, native):
        return request_state
    del mapping[STATE_KEY]
    return None


def decide_plan(
    plan: ChargePlan,
    stack: LimitStack,
    request_state: RequestState,
    client: RequestClient,
    native: Any,  # noqa: ANN401 - any request
) -> bool:
    """Decide a plan without a category; returns whether it was decided and allows the request."""
    key = client.key
    request_limiter = plan.request_limiter
    if client.special or not request_limiter.rules.enabled or request_limiter.shows_next_permit:
        return False
    keys: Any = (key,)
    if not plan.is_simple:
        keys = plan.choose_keys(client, native, stack.framework.mapping(native))
        if None in keys:
            return False
    charged = plan.acquire(keys)
    if charged is None:
        return False
    request_state.plan = plan
    request_state.keys = keys
    request_state.written = charged
    if not request_state.nested:
        request_state.write = plan.write
    return True
