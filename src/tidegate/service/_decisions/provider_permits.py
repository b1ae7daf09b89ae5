"""Permits of providers over the network: workers in any language ask for them by name, domain or URL.

The gate of the service counts them, together with the requests of its sources and of transports on the same store.
Each permit has a signed id that settles it, as reservations do (see `reservation_ids`).

    acquire   the permit counts from now on; `commit` makes it count from the response on, if that was slow
    reserve   it also counts for as long as its request may be in flight: until it is settled, or for `ttl` seconds
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tidegate._policy import normal_key
from tidegate.core._bounds import SECOND
from tidegate.errors import Denied
from tidegate.outbound._quota.charge import CHARGE_TTL, CallLabel, Charge
from tidegate.outbound._quota.pending_charge import AsyncPendingCharge, find_target
from tidegate.service._decisions.policy_limiters import ReserveResult
from tidegate.service._decisions.reservation_ids import PROVIDER_SLOT, UnknownReservationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._limiter.limiter import Usage
    from tidegate._limiter.reservation import ReservedCharge
    from tidegate._policy import Cost, Key, Policy
    from tidegate.core import Decision
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.exchange import OutboundRequest
    from tidegate.outbound._quota.gate import AsyncGate
    from tidegate.service._decisions.reservation_ids import ReservationId, ReservationIds
    from tidegate.stores._cancellation import BackgroundTasks

MAX_TRACKED: Final = 100_000  # reserved permits that are tracked while their requests are in flight


class ProviderPermits:
    """Grants and settles permits of the providers of a gate."""

    def __init__(self, gate: AsyncGate, reservation_ids: ReservationIds, background: BackgroundTasks) -> None:
        """Ask this gate; the ids settle what it charged. Permits without an id are returned in the `background`."""
        self.gate = gate
        self._ids = reservation_ids
        self._background = background
        self._tracked: dict[str, AsyncPendingCharge] = {}  # by the number of the id
        self._ends: list[tuple[int, str]] = []  # a heap, by the time at which tracking ends

    async def acquire(
        self,
        target: str,
        cost: Cost | None = None,
        timeout: float = 0.0,  # noqa: ASYNC109 - the deadline is part of the contract
        priority: float = 0.0,
        ttl: float | None = None,
    ) -> tuple[ReserveResult, Account | None]:
        """Take permits, waiting up to `timeout` seconds; with a `ttl`, track the request for that long.

        Returns the result, and the account that was asked (None: no provider limits the target).
        """
        try:
            pending = await self.gate.acquire(target, cost, timeout, priority)
        except Denied as denied:
            return ReserveResult(denied.decision, None), self._find(target)[0]
        account, charge = pending.account, pending.charge
        if account is None or charge is None:
            return ReserveResult(None, None), None
        pending.owned = False  # its id settles it
        charge.answered = ttl is None
        try:
            slot = f"{PROVIDER_SLOT}{account.provider.domain}"
            number = secrets.token_hex(8)
            reservation_id = await self._ids.write(slot, charge, ttl or CHARGE_TTL, number, charge.label or ())
        except BaseException:  # nobody gets the id, so nobody can settle the permit
            self._background.start(pending.cancel())
            raise
        if ttl is not None:
            charge.tracked_until = self.gate.clock.steady() + round(ttl * SECOND)
            if not self._track(number, pending, charge.tracked_until):
                charge.answered = True
        return ReserveResult(pending.decision, reservation_id, pending.member), account

    def _track(self, number: str, pending: AsyncPendingCharge, end: int) -> bool:
        """Keep a charge, whose request may be in flight, until `end`; returns whether there is room for it."""
        now = self.gate.clock.steady()
        while self._ends and self._ends[0][0] <= now:
            self._tracked.pop(heapq.heappop(self._ends)[1], None)
        if len(self._ends) >= MAX_TRACKED:
            return False
        heapq.heappush(self._ends, (end, number))
        self._tracked[number] = pending
        return True

    def restore(self, content: ReservationId) -> tuple[AsyncPendingCharge, Policy]:
        """Return the charge of an id, and its policy; another process may have charged it."""
        domain = content.slot.removeprefix(PROVIDER_SLOT)
        provider = self.gate.providers.match_host(domain)
        if provider is None or provider.domain != domain:
            raise UnknownReservationError(f"the provider of this reservation no longer exists: {domain!r}")
        tracked = self._tracked.get(content.number)
        if tracked is not None:
            return tracked, provider.policy
        key: Key = normal_key(content.key)
        provider = provider.for_key(key)
        account = self.gate.planner.open_account(provider, key)
        own = content.restore_charge(account.limiter, account.limiter.policy)  # counts as long as when it was charged
        ceilings = [made for each in content.others if (made := self._restore_ceiling(provider, content, each))]
        charge = Charge([own, *ceilings], self.gate.clock, content.time_left(self.gate.clock))
        charge.since -= max(0, self.gate.clock.ns() // 1000 - content.at)
        if content.label:
            charge.label, charge.spending = CallLabel(*content.label), self.gate.spending
        return AsyncPendingCharge(self.gate.run, account, charge), provider.policy

    def _restore_ceiling(
        self, provider: Provider, content: ReservationId, made: Sequence[Any]
    ) -> ReservedCharge | None:
        """Return what was charged to a ceiling; None: the ceiling no longer exists."""
        name, key, costs, at, charged = made
        ceiling = next((each for each in provider.ceilings if each.policy.name == name), None)
        if ceiling is None:
            return None
        limiter: Any = self.gate.planner.open_ceiling(ceiling)
        own = content._replace(key=key, costs=costs, at=at, charged=charged)
        return own.restore_charge(limiter, ceiling.policy)

    @staticmethod
    def check_cost(pending: AsyncPendingCharge, policy: Policy, actual: Cost) -> None:
        """Refuse a cost that no limit of a charge counts; money may be counted by ceilings only."""
        others = () if pending.charge is None else pending.charge.charges[1:]
        for other in others:
            other.policy.costs(other.part(actual) or {} if isinstance(actual, Mapping) else {})
        if isinstance(actual, Mapping):
            counted = frozenset(unit for other in others for unit in other.policy.units).difference(policy.units)
            actual = {unit: amount for unit, amount in actual.items() if unit not in counted}
        policy.costs(actual)

    # ---- inspection --------------------------------------------------------------------------------------------------

    def _find(self, target: str) -> tuple[Account, OutboundRequest] | tuple[None, None]:
        found = find_target(self.gate.providers, target)
        return (None, None) if found is None else (self.gate.planner.account(*found), found[1])

    async def peek(self, target: str, cost: Cost | None = None) -> Decision | None:
        """Return the decision that `acquire` would return, without changing anything; None: not limited."""
        return await self.gate.peek_target(target, cost)

    async def usage(self, target: str) -> dict[str, Usage]:
        """Return how much of each limit of a provider is used, by its name; empty: not limited.

        The limits of a pool's members are named `member/limit`.
        """
        found = find_target(self.gate.providers, target)
        if found is None:
            return {}
        provider, call = found
        if provider.pool is None:
            account = self.gate.planner.account(provider, call)
            return await account.limiter.usage(account.key)  # type: ignore[no-any-return]  # an AsyncLimiter
        usages: dict[str, Usage] = {}
        for member in provider.pool.members:
            account = self.gate.planner.account(member.provider, call)
            for name, usage in (await account.limiter.usage(account.key)).items():
                usages[f"{member.name}/{name}"] = usage
        return usages

    async def close(self) -> None:
        """Wake the calls that wait; the owner of the gate closes it."""
        for account in self.gate.accounts:
            await account.limiter.close()
