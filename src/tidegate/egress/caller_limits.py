"""The callers' own limits, counted by limiters on the store of the gate."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tidegate.errors import StoreUnavailable
from tidegate.limiter import AsyncLimiter
from tidegate.outbound.providers.money import is_money
from tidegate.outbound.providers.profile import TOKEN_UNITS
from tidegate.outbound.quota.charge import CHARGE_TTL
from tidegate.outbound.quota.cost import request_of
from tidegate.outbound.quota.request_tokens import read_request, units_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidegate.core import Decision
    from tidegate.egress.callers import EgressCaller
    from tidegate.outbound.providers.provider import Provider
    from tidegate.outbound.quota.exchange import OutboundRequest
    from tidegate.reservation import AsyncReservation
    from tidegate.stores import Store

PER_REQUEST: Final = ("requests", "concurrent-requests")


class CallerLimits:
    """Reserves what a call costs its caller, until the call is settled."""

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

    async def reserve(
        self,
        caller: EgressCaller,
        cost: Mapping[str, int],
        timeout: float,  # noqa: ASYNC109 - the deadline of the call
        priority: float,
    ) -> AsyncReservation | None:
        """Reserve a cost, waiting up to `timeout` seconds; raises Denied. None: the caller has no limits."""
        limiter = self._limiters.get(caller.name)
        if limiter is None or not caller.limits:
            return None
        return await limiter.reserve(caller.name, cost, CHARGE_TTL, timeout, priority)

    async def peek(self, caller: EgressCaller, provider: Provider, call: OutboundRequest) -> Decision | None:
        """Return the decision of a caller's own limits for a call now; None: it has none."""
        limiter = self._limiters.get(caller.name)
        if limiter is None or not caller.limits:
            return None
        return await limiter.peek(caller.name, self.cost_of(caller, provider, call))

    def cost_of(self, caller: EgressCaller, provider: Provider, call: OutboundRequest) -> dict[str, int]:
        """Estimate what a call costs its caller, by unit; estimates are at most what the limits can ever allow."""
        cost = self.cost_of_tunnel(caller)
        if self.counts_tokens(caller):
            request = request_of(provider, call) or read_request(provider.counting, call.url, call.body())
            found = units_of(request, request.estimate_input(), request.bound)
            for limit in caller.limits:
                if limit.unit in found and limit.unit not in PER_REQUEST:
                    cost[limit.unit] = min(found[limit.unit], limit.burst, cost.get(limit.unit, limit.burst))
        return cost

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
