"""The fast path for common requests: a known client, one plain category and plain limits on the route, all allowed.

It makes the same decision as `RequestState.charge_flow`, in one step of a store in memory, without a flow. That flow
handles all other requests, including denials; for these, nothing was charged here. All that does not depend on the
client is prepared once for each category and stack of limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.inbound.limiting.charges import DecidedCharge, RequestCharge
from tidegate.inbound.limiting.request_state import NO_CHARGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.decision import Decision
    from tidegate.inbound.limiting.limited_functions import LimitStack
    from tidegate.inbound.limiting.request_state import RequestState
    from tidegate.inbound.limiting.route_limit import RouteLimit
    from tidegate.inbound.responses.prepared_fields import TightestWriter
    from tidegate.limiter import AsyncLimiter, Limiter
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import AcquireTogether

make_together = tuple.__new__  # faster than the constructor of a NamedTuple


class ChargePlan(NamedTuple):
    """A category and the limits of a route, prepared."""

    acquire: AcquireTogether | None  # None: the fast path cannot decide them
    policy: Policy  # of the category: a reload replaces it
    limits: tuple[tuple[Limiter | AsyncLimiter, RouteLimit], ...] = ()
    has_keys: bool = False  # whether there are several limits on the route, or one that chooses its own key
    writer: TightestWriter | None = None  # None: the fields need all decisions


class MadeTogether(NamedTuple):
    """What the fast path has charged."""

    plan: ChargePlan
    category_charge: RequestCharge
    keys: Sequence[Key]
    decisions: Sequence[Decision]

    def charges(self) -> list[DecidedCharge]:
        """Return the charges and the decisions about them."""
        request_limiter = self.category_charge.request_limiter
        charges = [
            RequestCharge(request_limiter, limiter, key, 1, None, limit)
            for (limiter, limit), key in zip(self.plan.limits, self.keys[1:], strict=True)
        ]
        return list(map(DecidedCharge, (self.category_charge, *charges), self.decisions))


def decide_fast(stack: LimitStack, request_state: RequestState, native: Any) -> bool:  # noqa: ANN401 - any request
    """Decide what is pending and the limits of a stack; returns whether they were decided and allow the request."""
    if request_state.by_route and stack.is_plain:
        request_state.override_defaults(stack.uses, "")
    if len(request_state.pending) != 1:
        return False
    charge = request_state.pending[0]
    request_limiter, limiter, key, cost, category_limiter, _, _, _ = charge
    plan = stack.plans.get(limiter)
    if plan is None or plan[1] is not limiter.policy:
        plan = stack.plans[limiter] = make_plan(stack, charge)
    acquire = plan[0]
    client = request_state.client
    if acquire is None or category_limiter is None or cost != 1 or client is None or request_state.has_charges:
        return False
    keys: Any = (key, client[0])
    if plan[3]:  # several limits on the route, or keys of their own
        keys = (key, *[each.choose_key(native, client, request_limiter) for _, each in plan[2]])
        if None in keys:
            return False
    decisions = acquire(keys)
    if decisions is None:
        return False
    decision = decisions[0]
    last_decisions = category_limiter.last_decisions
    if decision[1] < request_limiter.fast_path_until and key in last_decisions:
        last_decisions[key] = decision
        category_limiter.allowed += 1
    else:
        request_limiter.record_decision(category_limiter, key, cost, decision, "", "")
    request_state.pending = NO_CHARGES
    request_state.together = make_together(MadeTogether, (plan, charge, keys, decisions))
    return True


def make_plan(stack: LimitStack, charge: RequestCharge) -> ChargePlan:
    """Prepare a category and the limits of a stack; without a function if the fast path cannot be used."""
    request_limiter, policy = charge.request_limiter, charge.policy
    usable = (
        stack.is_plain
        and charge.category_limiter is not None
        and not charge.reserves
        and policy.mode == "enforce"
        and request_limiter.store.instant
        and request_limiter.own_clock is None
        and not request_limiter.observed
    )
    if not usable:
        return ChargePlan(None, policy)
    limits = tuple((use.limit.plain_limiter(request_limiter, use), use.limit) for use in stack.uses)
    policies = (policy, *(limiter.policy for limiter, _ in limits))
    acquire = request_limiter.store.fast_together(policies)
    has_keys = len(limits) > 1 or limits[0][1].has_key
    return ChargePlan(acquire, policy, limits, has_keys, request_limiter.response_writer.prepare_tightest(policies))
