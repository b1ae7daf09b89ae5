"""The callers' own limits, counted by limiters on the store of the gate.

A call reserves from them in the same step as from the limits of its provider, and keeps that through all attempts.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._limiter.joint import LimiterAsk
from tidegate._limiter.limiter import AsyncLimiter
from tidegate._limiter.reservation import AsyncReservation
from tidegate._policy.units import is_money
from tidegate.core._bounds import MAX_INTEGER
from tidegate.errors import StoreUnavailable
from tidegate.outbound._providers.profile import TOKEN_UNITS, WEBSOCKET
from tidegate.outbound._quota.charge import CHARGE_TTL
from tidegate.outbound._quota.cost import check_keys, has_fixed_body, may_be_unreported, read_call
from tidegate.outbound._quota.exchange import SenderLimits
from tidegate.outbound._quota.request_tokens import largest_output, units_of
from tidegate.outbound._quota.unbounded import unknown_cost, unreadable_body, unset_bound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidegate.core import Decision
    from tidegate.egress._callers import EgressCaller
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._quota.exchange import OutboundRequest
    from tidegate.outbound._quota.request_tokens import RequestTokens
    from tidegate.stores import Store

PER_REQUEST: Final = ("requests", "concurrent-requests")


class CallerPlan(NamedTuple):
    """What a call reserves from its caller's limits, and the body that is sent instead of its own, if any.

    Its output is truncated at `output_tokens` then.
    """

    cost: dict[str, int]
    body: bytes | None = None
    output_tokens: int = 0


class CallerLimits:
    """Decides what a call costs its caller."""

    def __init__(self, callers: Iterable[EgressCaller], store: Store) -> None:
        """Open a limiter for each caller that has limits."""
        self._store = store
        self._limiters: dict[str, AsyncLimiter] = {}
        self.update(callers)

    def update(self, callers: Iterable[EgressCaller]) -> None:
        """Use the limits of these callers; usage is kept, even of a caller that is removed and added again."""
        for caller in callers:
            limiter = self._limiters.get(caller.name)
            if not caller.limits:
                continue
            if limiter is None:
                self._limiters[caller.name] = AsyncLimiter(caller.policy, store=self._store)
            elif limiter.policy != caller.policy:
                limiter.update(caller.policy)

    def units_of(self, caller: EgressCaller) -> frozenset[str]:
        """Return the units that a caller's limits count."""
        return frozenset(limit.unit for limit in caller.limits)

    def counts_tokens(self, caller: EgressCaller) -> bool:
        """Return whether a caller's limits count tokens, or money that depends on them."""
        return any(unit in TOKEN_UNITS or is_money(unit) for unit in self.units_of(caller))

    def charge(self, caller: EgressCaller, cost: Mapping[str, int]) -> SenderLimits | None:
        """Return what a call is charged at its caller's limits, together with its provider's; None: it has none."""
        limiter = self._limiters.get(caller.name)
        if limiter is None or not caller.limits:
            return None
        return SenderLimits((LimiterAsk(limiter, caller.name, cost),))

    def reservation(self, sender: SenderLimits | None) -> AsyncReservation | None:
        """Return the reservation of what was charged; None: nothing was."""
        if sender is None or not sender.charged:
            return None
        return AsyncReservation(sender.charged, self._store.clock, CHARGE_TTL)

    async def peek(self, caller: EgressCaller, provider: Provider, call: OutboundRequest) -> Decision | None:
        """Return the decision of a caller's own limits for a call now; None: it has none."""
        limiter = self._limiters.get(caller.name)
        if limiter is None or not caller.limits:
            return None
        request = self.read(caller, provider, call)
        return await limiter.peek(caller.name, self.plan(caller, provider, call, request).cost)

    def read(self, caller: EgressCaller, provider: Provider, call: OutboundRequest) -> RequestTokens | None:
        """Read a call whose caller's limits count tokens or money, and check that something bounds its cost.

        None: they do not, and the gate reads what it needs. Raises UnboundedCost.
        """
        own = self.counts_tokens(caller)
        if not own and not (provider.limits_usage and may_be_unreported(provider, call)):
            return None
        request = read_call(provider, call)
        # A batch has a quota of its own at the provider, but costs money, and tokens of the caller.
        counts = own or provider.limits_money or request.endpoint.counted or request.hidden == WEBSOCKET
        if counts and request.unbounded and (request.unreported or provider.strict):
            raise unknown_cost(provider, request.unbounded[0])
        if own and provider.strict and not request.readable:
            raise unreadable_body(provider)
        if (own and provider.strict) or may_be_unreported(provider, call):
            check_keys(provider, call, request)
        return request

    def plan(
        self, caller: EgressCaller, provider: Provider, call: OutboundRequest, request: RequestTokens | None
    ) -> CallerPlan:
        """Decide what a call costs its caller, by unit.

        A lenient call reserves an estimate, at most what the limits can ever allow. A strict one reserves all that it
        can cost; its output is bounded by that.
        """
        cost = self.cost_of_tunnel(caller)
        if request is None or not self.counts_tokens(caller):
            return CallerPlan(cost)
        input_tokens = paid_input = request.estimate_input()
        output_tokens, body = request.bound, None
        if provider.strict:
            paid_input = request.largest_input
            most = largest_output(request, caller.limits, input_tokens, paid_input)
            output_tokens, body = self._bound_output(provider, call, request, most)
        found = units_of(request, input_tokens, output_tokens)
        if request.price is not None:
            tokens = request.price.estimate(paid_input, output_tokens * request.times)
            found[request.price.unit] = min(MAX_INTEGER, tokens + request.fee)
        for limit in caller.limits:
            if limit.unit in found and limit.unit not in PER_REQUEST:
                most = found[limit.unit] if provider.strict else min(found[limit.unit], limit.burst)
                cost[limit.unit] = min(most, cost.get(limit.unit, most))
        return CallerPlan(cost, body, output_tokens)

    @staticmethod
    def _bound_output(
        provider: Provider, call: OutboundRequest, request: RequestTokens, most: int
    ) -> tuple[int, bytes | None]:
        """Return how long the output of a strict call may become, and the body that says so, if it is another one."""
        if not request.endpoint.has_output or (request.stated and request.bound <= most):
            return request.bound, None
        output_tokens = max(1, min(request.bound, most))
        body = request.clamped(output_tokens) if call.rewrites and not has_fixed_body(call) else None
        if body is not None:
            return output_tokens, body
        if request.document and not request.stated and request.profile.bounds:
            raise unset_bound(provider, request.bound_name)
        return request.bound, None

    def cost_of_tunnel(self, caller: EgressCaller) -> dict[str, int]:
        """Return what a tunnel costs its caller: one request."""
        units = self.units_of(caller)
        return {unit: 1 for unit in PER_REQUEST if unit in units}

    async def close(self) -> None:
        """Wake the calls that wait."""
        for limiter in self._limiters.values():
            await limiter.close()


async def settle_quietly(own: AsyncReservation, *, arrived: bool) -> None:
    """Commit the reservation of a call that arrived, or cancel it; if the store is unavailable, it stays charged."""
    with suppress(StoreUnavailable):
        await (own.commit() if arrived else own.cancel())
