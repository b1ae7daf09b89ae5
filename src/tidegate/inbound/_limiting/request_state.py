"""What a request was charged so far, and by whom.

The middleware stores it in the ASGI scope or WSGI environ under STATE_KEY. Limits of routes read it there: they use the
middleware's store and client, and add their charges, so that the headers show the tightest of all limits.

    made      what the request was charged: settled when the response is known, refunded if a later limit denies it
    pending   what a denial has not charged: if another route than the denied one runs, its limits are decided with this
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.inbound._limiting.charges import ALLOWED, NO_CHARGES, ChargeResult, MadeCharge, has_slots
from tidegate.inbound._limiting.decide import decide_flow
from tidegate.inbound._limiting.settle import final_costs, refund_flow, settle_flow
from tidegate.inbound._responses.response import BlockedDecision, combine_decisions, fit_to_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate._runtime.flow import Flow
    from tidegate.core._decision import Decision
    from tidegate.inbound._client.identify import RequestClient
    from tidegate.inbound._client.request import Request
    from tidegate.inbound._limiting.charges import RequestCharge
    from tidegate.inbound._limiting.request_limiter import RequestLimiter
    from tidegate.inbound._limiting.request_targets import RequestTarget
    from tidegate.inbound._responses.response import Response

STATE_KEY: Final = "tidegate"
OK: Final = 200
FORBIDDEN: Final = 403


def settled(made: MadeCharge) -> MadeCharge:
    """Return a charge that the response does not change any more."""
    return made._replace(charge=made.charge._replace(reserves=False)) if made.charge.reserves else made


class RequestState:
    """The client of a request and the decisions about it.

    If middlewares are nested, the outer one writes the headers for both.
    """

    # Defaults that most requests never change: attributes of the class cost nothing for each request. For the same
    # reason there is no constructor: the middlewares set the others themselves.
    request_limiter: RequestLimiter
    client: RequestClient | None = None  # None: the middleware does not limit the request
    result: ChargeResult | None = None  # of prepared charges, in one or two steps: `made`, if nothing else was charged
    is_open: bool = False  # a charge depends on the response
    pending: Sequence[RequestCharge] = NO_CHARGES
    denied: ChargeResult | None = None  # by limits of the route: its endpoint answers the request
    covers: tuple[object, ...] = ()  # the limits that are decided and were not asked for yet
    unreached: bool = False  # the middleware has charged the limits of a route, and its endpoint has not asked for them
    chosen_client: RequestClient | None = None  # the client with the key that the middleware's `key` function chooses
    inner: list[Decision | RequestState] | None = None  # decisions that are only shown
    sees_response: bool = True  # something settles what depends on the response
    standalone: bool = False  # no middleware has seen the request: a route limit writes the headers
    outer: RequestState | None = None
    nested: bool = False
    replaced: bool = False  # ASGI: the response of the application was replaced by a denial
    started: bool = False  # WSGI: the response is started
    status: int | None = None  # of the response, once it is known
    raised: Response | None = None  # Django: of a block that was denied; Django itself sends a 403
    denial: Response | None = None  # WSGI: the Response that replaces that of the application
    _made: Sequence[MadeCharge] = NO_CHARGES

    @classmethod
    def of(
        cls, request_limiter: RequestLimiter, client: RequestClient | None, outer: RequestState | None
    ) -> RequestState:
        """Create the state of a request; without a client, the middleware does not limit it."""
        state = cls()
        state.request_limiter = request_limiter
        state.client = client
        if outer is not None:
            state.nest(outer)
        return state

    def nest(self, outer: RequestState) -> None:
        """Let an outer middleware write the headers."""
        self.outer, self.nested = outer, True
        outer.add(self)

    def add(self, decision: Decision | RequestState) -> None:
        """Show a decision, or those of an inner middleware, in the headers."""
        self.inner = [*(self.inner or ()), decision]

    # ---- what was charged --------------------------------------------------------------------------------------------

    @property
    def made(self) -> Sequence[MadeCharge]:
        """What was charged so far."""
        result, self.result = self.result, None
        if result is not None:
            before = result.before
            self._made = result.decided if before is None else [*before.decided, *result.decided]
            if not self.is_open:  # it is settled
                self._made = list(map(settled, self._made))
        return self._made

    @made.setter
    def made(self, charges: Sequence[MadeCharge]) -> None:
        self._made, self.result = charges, None
        self.is_open = any([each.charge.reserves for each in charges])  # noqa: C419 - a generator costs more

    @property
    def address(self) -> str | None:
        """The address of the client, if it is known."""
        return None if self.client is None else self.client.address

    @property
    def limited(self) -> bool:
        """Whether a limit in shadow mode is exceeded."""
        return any(each.charge.policy.mode == "shadow" and not each.decision.within_limits for each in self.made)

    @property
    def combined_decision(self) -> Decision | None:
        """All decisions combined, as the headers show them."""
        decisions = [each.decision for each in self.made]
        for part in self.inner or ():
            decision = part.combined_decision if isinstance(part, RequestState) else part
            if decision is not None:
                decisions.append(decision)
        return combine_decisions(decisions) if decisions else None

    def fields(self, status: int, *, raw: bool = False) -> list[Any]:
        """Return the header fields of a response with this status; nested: the outer middleware adds them."""
        if self.nested:
            return []
        result = self.result
        if result is not None and result.prepared is not None and self.inner is None:
            return result.write()
        decision = self.combined_decision
        if decision is None:
            return []
        writer = self.request_limiter.response_writer
        fields: list[Any] = writer.raw_fields(decision) if raw else writer.fields(decision)
        return fields if decision else fit_to_status(fields, status)

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def start(self, result: ChargeResult, target: RequestTarget | None) -> None:
        """Take the decision of the middleware, before the application runs."""
        if target is not None and target.route is not None and target.route.covers:
            self.covers, self.unreached = target.route.covers, True
        if not result.allowed:
            self.denied = result
            self.pending = [each.charge for each in result.decided if not each.charge.owner.limits_routes]
            self._show(result)
        elif result.prepared is None:
            if result is not ALLOWED:
                self.made = result.decided
        else:
            self.result, self.is_open = result, result.prepared.reserves

    def take_denial_flow(self) -> Flow[Any, ChargeResult | None]:
        """Return the denial by limits of the route, if nobody has answered it yet; an outer middleware is refunded."""
        denied, self.denied = self.denied, None
        if denied is not None:
            yield from self.refund_flow()
        return denied

    def replacement_flow(self, status: int, request: Request) -> Flow[Any, Response | None]:
        """Return the denial that replaces a response with this status; None, the usual case: the response is sent.

        So if the request was denied by its route and the endpoint was not reached, or if Django has answered the
        exception of a denied block.
        """
        denied = yield from self.take_denial_flow()
        if denied is not None:
            return denied.write_denial(request, request)
        return self.raised if status == FORBIDDEN else None

    def take(self, limits: object) -> bool:
        """Return whether these limits of a function were decided already; valid for one call."""
        covers = self.covers
        if limits not in covers:
            return False
        self.covers = () if len(covers) == 1 else tuple([each for each in covers if each != limits])
        self.unreached = False
        return True

    def cover(self, limits: Iterable[object]) -> None:
        """Mark limits of other functions as decided."""
        self.covers = (*self.covers, *limits)

    def charge_flow(
        self,
        charges: Sequence[RequestCharge],
        request: Request,
        *,
        more: bool = False,
        client: RequestClient | None = None,
    ) -> Flow[Any, ChargeResult]:
        """Charge these and what is pending together. If one denies the request, all its charges are refunded.

        `client` is the client of a request that no middleware has identified.
        """
        if self.unreached:
            yield from self._leave_route_flow()
        pending, self.pending = self.pending, NO_CHARGES
        result = None
        if (self.client is None or self.standalone) and client is not None and charges:
            result = yield from self._check_block_flow(charges, request, client)
        if result is None:
            result = yield from decide_flow((*pending, *charges), more=more)
            result.record(request.method, request.path)
            if not result.allowed:
                result = yield from self._count_denial_flow(result, request, self.client or client)
        yield from self.keep_flow(result)
        return result

    def keep_flow(self, result: ChargeResult) -> Flow[Any, None]:
        """Keep what was charged; if the request is denied, refund all of its charges."""
        if result.allowed:
            self.add_result(result)
        else:
            self._show(result)
            yield from self.refund_flow()

    def add_result(self, result: ChargeResult) -> None:
        """Add what was charged."""
        first = self.result
        if result.prepared is not None and not self._made and (first is None or first.before is None):
            result.before = first
            self.result, self.is_open = result, self.is_open or result.prepared.reserves
        else:
            self.made = [*self.made, *result.decided]

    def deny_flow(self, decision: Decision) -> Flow[Any, None]:
        """Add a denial that was decided elsewhere, and refund all charges of the request."""
        self.add(decision)
        yield from self.refund_flow()

    def refund_flow(self) -> Flow[Any, None]:
        """Refund all charges of the request, because another limit has denied it."""
        self.pending = NO_CHARGES
        yield from refund_flow(self._take_charges())

    def _join_steps(self) -> None:
        """Keep what two steps have charged as one list."""
        if self.result is not None and self.result.before is not None:
            self.made = self.made

    def settle_flow(self, request: object) -> Flow[Any, None]:
        """Settle what depends on the response, by its status; without one, the application has failed."""
        if not self.is_open:
            return
        self._join_steps()
        prepared = None if self.result is None else self.result.prepared
        charges = [each.charge for each in self._made] if prepared is None else prepared.charges
        costs = final_costs(charges, request, self.status)
        if prepared is not None and not prepared.holds_slots and not any([cost is not None for cost in costs]):  # noqa: C419 - a generator costs more
            self.is_open = False
            return
        made = self.made
        self.made = list(map(settled, made))  # not settled twice
        self.made = yield from settle_flow(made, costs)

    def settle_start_flow(self, request: object, status: int) -> Flow[Any, None]:
        """Settle at the start of a response, so that its headers show it, unless the request holds slots to its end."""
        self.status = status
        self._join_steps()
        prepared = None if self.result is None else self.result.prepared
        if prepared is None:
            holds = any(each.charge.reserves and has_slots(each.charge.policy) for each in self._made)
        else:
            holds = prepared.holds_slots
        if not holds:
            yield from self.settle_flow(request)

    def settle_block_flow(self, charges: Sequence[RequestCharge]) -> Flow[Any, None]:
        """Settle only the charges of a block that is left: no status changes their cost."""
        early = {id(charge) for charge in charges}
        own = [each for each in self.made if id(each.charge) in early and each.charge.reserves]
        if own:
            self.made = [each for each in self.made if each not in own]
            settled = yield from settle_flow(own, final_costs([each.charge for each in own], None, OK))
            self.made = [*self.made, *settled]

    def _leave_route_flow(self) -> Flow[Any, None]:
        """Refund the limits of the route that was charged: another one runs, because the path was rewritten."""
        self.covers, self.unreached, self.denied = (), False, None
        own = [each for each in self.made if each.charge.owner.limits_routes]
        if own:
            self.made = [each for each in self.made if not each.charge.owner.limits_routes]
            yield from refund_flow(own)
        if self.pending:
            self.inner = None  # the denial is decided again

    def _show(self, result: ChargeResult) -> None:
        for each in result.decided:
            self.add(each.decision)
        if result.block is not None:
            self.add(result.block)

    def _check_block_flow(
        self, charges: Sequence[RequestCharge], request: Request, client: RequestClient
    ) -> Flow[Any, ChargeResult | None]:
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
        decision = BlockedDecision.until(now, charges[0].policy.limits, until)
        limiter.notify(charges[0].policy, key, {}, decision, request.method, request.path)
        return ChargeResult.of_block(charges[0], decision)

    def _count_denial_flow(
        self, result: ChargeResult, request: Request, client: RequestClient | None
    ) -> Flow[Any, ChargeResult]:
        """Count a denied request, once for each middleware that has denied it; this one counts for route limits."""
        if client is None or client.key is None:
            return result
        for reporter in dict.fromkeys(
            self.request_limiter if each.charge.owner.limits_routes else each.charge.reporter for each in result.denials
        ):
            limiter: Any = reporter
            key = limiter.client_identifier.choose_key(request, client.key)
            result = yield from limiter.count_denial_flow(result, key)
        return result

    def _take_charges(self) -> list[MadeCharge]:
        """Return everything that this request was charged so far, by all middlewares: the first caller refunds it.

        The headers still show these decisions.
        """
        charged = list(self.made)
        for each in charged:
            self.add(each.decision)
        self.made = NO_CHARGES
        return charged if self.outer is None else [*charged, *self.outer._take_charges()]  # noqa: SLF001 - its own kind
