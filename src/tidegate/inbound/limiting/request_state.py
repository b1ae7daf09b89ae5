"""The decisions about a request while the application handles it.

The middleware stores it in the ASGI scope or WSGI environ under STATE_KEY. Route limits read it there: they use the
middleware's store and client, and add their decisions, so that the headers show the tightest of all limits.

If the application has limits on routes, the middleware does not decide: it leaves its charges here as `pending`. They
are decided together with the limits of the matched route, before its endpoint runs, in one step of the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.inbound.client.address import UNKNOWN
from tidegate.inbound.limiting.charges import (
    ChargeResult,
    DecidedCharge,
    RequestCharge,
    charge_all_flow,
    give_back_flow,
)
from tidegate.inbound.limiting.request_limiter import make_response_charge
from tidegate.inbound.responses.response import BlockedDecision, combine_decisions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.decision import Decision
    from tidegate.flow import CallFlow
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.client.request import Request
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter, ResponseCharge
    from tidegate.inbound.limiting.fast_decision import ChargePlan
    from tidegate.inbound.limiting.limited_functions import RouteUse
    from tidegate.inbound.limiting.request_limiter import RequestLimiter
    from tidegate.inbound.responses.prepared_fields import FieldWriter
    from tidegate.inbound.responses.response import Response
    from tidegate.policy import Cost, Key

STATE_KEY: Final = "tidegate"
NO_CHARGES: Final[tuple[Any, ...]] = ()


class RequestState:
    """The client of a request and the decisions about it; `make_state` creates one.

    If middlewares are nested, the outer one writes the headers for both, and leaves its pending charges to the inner.
    """

    # Defaults that most requests never change: attributes of the class cost nothing for each request. For the same
    # reason there is no constructor: the middlewares set the others themselves.
    request_limiter: RequestLimiter
    client: RequestClient | None = None  # None: the middleware does not limit the request
    decision: Decision | None = None  # of the middleware, if it has decided at once
    charged: CategoryLimiter | None = None  # what that decision has charged: `cost` to `key`
    cost: Cost = 1
    key: Key = UNKNOWN
    deferred: CategoryLimiter | None = None  # a charge of 1 to `key` in this category is pending
    _pending: Sequence[RequestCharge] = NO_CHARGES  # what else is pending
    plan: ChargePlan | None = None  # what the fast path has charged: `written`, to these keys
    keys: Sequence[Key] = ()
    # Writes the header fields of `written`, if nothing else was decided, is pending or depends on the response.
    write: FieldWriter | None = None
    written: Any = None  # a decision, or what was charged
    _made: Sequence[DecidedCharge] = NO_CHARGES
    exceeded: bool = False  # a limit of the route with `block=False` is
    chosen_client: RequestClient | None = None  # the client with the key that the middleware's `key` function chooses
    covered: set[object] | None = None  # limits on functions that were decided before their wrappers ran
    response_charge: ResponseCharge | None = None
    inner: list[Decision | RequestState] | None = None
    sees_response: bool = True  # something settles what depends on the response
    standalone: bool = False  # no middleware has seen the request: a route limit writes the headers
    outer: RequestState | None = None
    nested: bool = False
    by_route: bool = False  # default limits are pending, whose count depends on the route
    replaced: bool = False  # ASGI: the response of the application was replaced by a denial
    started: bool = False  # WSGI: the response is started
    denial: Response | None = None  # WSGI: replaces the response of the application

    def nest(self, outer: RequestState) -> None:
        """Take over what an outer middleware has left pending; it writes the headers."""
        self.outer, self.nested, self.write = outer, True, None
        outer.add(self)
        if outer.is_pending:
            self.pending = (*outer.pending, *self.pending)
            self.by_route = self.by_route or outer.by_route
            outer.pending = NO_CHARGES

    @property
    def pending(self) -> Sequence[RequestCharge]:
        """What is still to be charged."""
        category_limiter = self.deferred
        if category_limiter is not None:
            charge = RequestCharge(self.request_limiter, category_limiter.limiter, self.key, 1, category_limiter)
            self.pending = (charge, *self._pending)
        return self._pending

    @pending.setter
    def pending(self, charges: Sequence[RequestCharge]) -> None:
        self._pending, self.deferred = charges, None

    @property
    def is_pending(self) -> bool:
        """Whether something is still to be charged; `pending` creates the charges."""
        return self.deferred is not None or bool(self._pending)

    def add(self, decision: Decision | RequestState) -> None:
        """Add the decision of a route limit, or the state of an inner middleware."""
        self.write = None
        self.inner = [*(self.inner or ()), decision]

    def override_defaults(self, uses: Sequence[RouteUse], method: str) -> None:
        """Drop pending default limits: the limits of the route replace them, unless they are declared not to.

        Limits that do not apply to the method of the request replace nothing.
        """
        if self.by_route:
            replaced = any(use.limit.override_defaults and use.limit.applies_to(method) for use in uses)
            self.choose_route(None if replaced else uses[0].route)

    def choose_route(self, route: str | None) -> None:
        """Charge pending default limits to the count of a route; None: drop them."""
        if self.by_route:
            self.by_route = False
            charges = []
            for charge in self.pending:
                limiters = charge.request_limiter.route_limiters
                if not limiters.has(charge):
                    charges.append(charge)
                elif route is not None:
                    charges.append(limiters.at_route(charge, route))
            self.defer(charges)

    def defer(self, charges: Sequence[RequestCharge]) -> None:
        """Leave these charges pending; a single plain one for the fast path."""
        if len(charges) == 1 and charges[0].is_plain:
            self._pending, self.deferred, self.key = NO_CHARGES, charges[0].category_limiter, charges[0].key
        else:
            self.pending = charges

    @property
    def made(self) -> Sequence[DecidedCharge]:
        """What was charged so far, apart from the decision of the middleware (`charged`)."""
        plan, self.plan = self.plan, None
        if plan is not None:
            self._made = [*self._made, *plan.charges(self)]
        return self._made

    @made.setter
    def made(self, charges: Sequence[DecidedCharge]) -> None:
        self._made, self.plan, self.write = charges, None, None

    @property
    def has_charges(self) -> bool:
        """Whether `made` has any charges."""
        return bool(self._made) or self.plan is not None

    @property
    def has_decisions(self) -> bool:
        """Whether something was decided."""
        return self.decision is not None or self.inner is not None or self.has_charges

    def replace_decisions(self, decisions: Sequence[tuple[RequestCharge, Decision]]) -> None:
        """Replace decisions after their charges were corrected."""
        for charge, decision in decisions:
            self.made = [each._replace(decision=decision) if each.charge is charge else each for each in self.made]

    @property
    def shown_decision(self) -> Decision | None:
        """What the headers show: all decisions combined."""
        return self.combined_decision if self.inner is not None or self.has_charges else self.decision

    @property
    def combined_decision(self) -> Decision | None:
        """All decisions combined, as the headers show them."""
        if self.inner is None and not self.made:
            return self.decision
        inner = [part.combined_decision if isinstance(part, RequestState) else part for part in self.inner or ()]
        decided = [each.decision for each in self.made]
        decisions = [decision for decision in (self.decision, *decided, *inner) if decision is not None]
        return combine_decisions(decisions) if decisions else None

    def charge_flow(
        self,
        charges: Sequence[RequestCharge],
        request: Request,
        *,
        tasks: bool,
        more: bool = False,
        client: RequestClient | None = None,
    ) -> CallFlow[ChargeResult]:
        """Charge the pending limits and these together. If one denies the request, all its charges are refunded.

        `client` is the client of a request that no middleware has identified.
        """
        pending, self.pending = self.pending, NO_CHARGES
        client = self.client or client
        result = None
        if self.client is None and client is not None and charges:
            result = yield from self._check_block_flow(charges, request, client)
        if result is None:
            result = yield from charge_all_flow((*pending, *charges), tasks=tasks, more=more)
            result.record(request.method, request.path)
            if not result.allowed:
                if pending and self.request_limiter.route_hooks is not None:
                    self.request_limiter.route_hooks.record_denial(request.method, request.path)
                result = yield from self._count_denial_flow(result, request, client)
        if result.allowed:
            self.made = [*self.made, *result.decided]
            self._add_response_charge(make_response_charge(result, request))
            return result
        for each in result.decided:
            self.add(each.decision)
        if result.block is not None:
            self.add(result.block)
        yield from self.give_back_flow(tasks=tasks)
        return result

    def deny_flow(self, decision: Decision, *, tasks: bool) -> CallFlow[None]:
        """Add a denial that was decided elsewhere, and refund all charges of the request."""
        self.add(decision)
        yield from self.give_back_flow(tasks=tasks)

    def give_back_flow(self, *, tasks: bool) -> CallFlow[None]:
        """Refund all charges of the request, because another limit has denied it; drop pending charges."""
        self.pending = NO_CHARGES
        yield from give_back_flow(self._take_charges(), tasks=tasks)

    def _check_block_flow(
        self, charges: Sequence[RequestCharge], request: Request, client: RequestClient
    ) -> CallFlow[ChargeResult | None]:
        """Return the denial of a blocked client, which no middleware has checked; None for all others."""
        limiter = self.request_limiter
        if not limiter.has_special_clients or client.key is None:
            return None
        key, now = limiter.client_identifier.choose_key(request, client.key), limiter.now()
        if limiter.allowed_clients.expires_at(key, client.address, now):
            return None
        until = yield from limiter.blocked_until_flow(key, client, now)
        if not until:
            return None
        denied = DecidedCharge(charges[0], BlockedDecision.until(now, charges[0].policy.limits, until), "")
        limiter.notify(charges[0].policy, key, {}, denied.decision, request.method, request.path)
        return ChargeResult(allowed=False, decided=[], denials=[denied], block=denied.decision)

    def _count_denial_flow(
        self, result: ChargeResult, request: Request, client: RequestClient | None
    ) -> CallFlow[ChargeResult]:
        """Count a denied request, once for each middleware that has denied it; this one counts for route limits."""
        for limiter in dict.fromkeys(
            self.request_limiter if each.charge.category_limiter is None else each.charge.request_limiter
            for each in result.denials
        ):
            if limiter.denial_blocks is not None and client is not None and client.key is not None:
                key = limiter.client_identifier.choose_key(request, client.key)
                result = yield from limiter.count_denial_flow(result, key)
        return result

    def _take_charges(self) -> list[DecidedCharge]:
        """Return everything that this request was charged so far, by all middlewares: the first caller refunds it.

        The headers still show these decisions.
        """
        charged = [*self._charged_by_middleware(), *self.made]
        for each in self.made:
            self.add(each.decision)
        self.charged, self.made = None, NO_CHARGES
        if self.response_charge is not None:
            self.response_charge.take()
        return charged if self.outer is None else [*charged, *self.outer._take_charges()]  # noqa: SLF001 - its own kind

    def _charged_by_middleware(self) -> list[DecidedCharge]:
        """Return what the middleware has charged before the request reached the application."""
        category_limiter = self.charged
        if category_limiter is None or self.decision is None:
            return []
        charge = RequestCharge(self.request_limiter, category_limiter.limiter, self.key, self.cost, category_limiter)
        return [DecidedCharge(charge, self.decision)]

    def _add_response_charge(self, response_charge: ResponseCharge | None) -> None:
        if response_charge is None:
            return
        if self.response_charge is None:
            self.response_charge = response_charge
        else:
            self.response_charge.add(response_charge)


def make_state(
    request_limiter: RequestLimiter,
    client: RequestClient | None,
    decision: Decision | None = None,
    outer: RequestState | None = None,
    pending: Sequence[RequestCharge] = NO_CHARGES,
) -> RequestState:
    """Create the state of a request; client and decision are None if the middleware does not limit it."""
    request_state = RequestState()
    request_state.request_limiter = request_limiter
    request_state.client = client
    request_state.decision = decision
    if pending and request_limiter.route_limiters:
        request_state.pending, request_state.by_route = pending, True
    elif pending:
        request_state.defer(pending)
    if outer is not None:
        request_state.nest(outer)
    return request_state
