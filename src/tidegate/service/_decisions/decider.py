"""Implements every verb of the service, independent of the protocol: HTTP, gRPC and proxy checks all call `Decider`.

A Decider has one store and, for each policy that the configuration can select, one AsyncLimiter on it. Its verbs take
plain values and return Decisions. Errors are raised: `ConfigError` and `ResourceUnknown` for invalid requests, and
`StoreUnavailable` if the store is unavailable and the policy's `on_store_error` is `deny`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tidegate._limiter.limiter import check_priority
from tidegate._limiter.reservation import AsyncReservation
from tidegate._limiter.waiting import MAX_PRIORITY
from tidegate.core._decision import LocalDecision
from tidegate.errors import ResourceUnknown, StoreUnavailable
from tidegate.service._decisions.audit import NO_ORIGIN, AuditLog, Origin
from tidegate.service._decisions.base_decider import BaseDecider
from tidegate.service._decisions.blocks import DEFAULT_BLOCK_SECONDS, Block
from tidegate.service._decisions.idempotency import forget_call, was_repeated
from tidegate.service._decisions.leases import (
    BURST_DIVISOR,
    MAX_LEASE_SECONDS,
    SETTLE_GRACE,
    GrantedLease,
    can_lease,
    lease_terms,
    was_charged,
)
from tidegate.service._decisions.policy_limiters import (
    MAX_BATCH,
    MAX_KEY_LENGTH,
    MAX_KEY_PARTS,
    PROBE_POLICY,
    ReserveResult,
    Subject,
    check_key,
)
from tidegate.service._decisions.reservation_ids import PROVIDER_SLOT, ReservationIds, UnknownReservationError
from tidegate.service._decisions.signing import SigningKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._limiter.limiter import Usage
    from tidegate._policy import Cost, Key, Policy
    from tidegate.core._decision import Decision
    from tidegate.observe import Observer
    from tidegate.outbound._quota.gate import AsyncGate
    from tidegate.outbound._quota.pending_charge import AsyncPendingCharge
    from tidegate.service._decisions.idempotency import KeyedCall, KeyedStore
    from tidegate.service._decisions.policies import ServicePolicies
    from tidegate.service._decisions.policy_limiters import PolicyLimiter
    from tidegate.service._decisions.provider_permits import ProviderPermits
    from tidegate.service._decisions.reservation_ids import ReservationId
    from tidegate.service._decisions.stats import Stats
    from tidegate.stores import Store


class Decider(BaseDecider):
    """Implements the verbs for one set of policies over one store; see the module."""

    def __init__(
        self,
        policies: ServicePolicies,
        store: Store,
        *,
        secrets: Sequence[str] = (),
        max_wait: float = 30.0,
        max_priority: float = MAX_PRIORITY,
        observers: Sequence[Observer] = (),
        on_denial: Sequence[Observer] = (),
        stats: Stats | None = None,
    ) -> None:
        """Decide by these policies. `secrets` sign reservation ids (see `signing`); by default, the store keeps one.

        `observers` are called for every decision, which adds their cost; `on_denial` only for denials.
        """
        super().__init__(
            policies,
            store,
            max_wait=max_wait,
            max_priority=max_priority,
            observers=observers,
            on_denial=on_denial,
            stats=stats,
        )
        self._reservation_ids = ReservationIds(store, SigningKeys(store, secrets), self._background)
        self._provider_permits: ProviderPermits | None = None
        self.audit: AuditLog = AuditLog(store)
        self.secrets: tuple[str, ...] = tuple(secrets)  # that sign ids, and tokens of runs

    # ---- providers ---------------------------------------------------------------------------------------------------

    def open_providers(self, gate: AsyncGate) -> None:
        """Grant permits of the providers of a gate."""
        from tidegate.service._decisions.provider_permits import ProviderPermits  # noqa: PLC0415 - most services have none

        self._provider_permits = ProviderPermits(gate, self._reservation_ids, self._background)

    @property
    def provider_permits(self) -> ProviderPermits:
        """The permits of providers; raises if no providers are loaded."""
        if self._provider_permits is None:
            raise ResourceUnknown("the service has loaded no providers: start it with --provider or --provider-dir")
        return self._provider_permits

    async def acquire_provider(
        self,
        target: str,
        cost: Cost | None = None,
        timeout: float = 0.0,  # noqa: ASYNC109 - the deadline is part of the contract
        priority: float = 0.0,
        ttl: float | None = None,
    ) -> ReserveResult:
        """Take permits of a provider: `target` is its name, its domain or a URL; `cost` None is the provider's own.

        The id settles them with `commit` or `cancel`. With a `ttl`, they count for as long as the request may be in
        flight: until it is settled, or for `ttl` seconds.
        """
        check_priority(priority, self.max_priority)
        ttl = None if ttl is None else self._reservation_ids.check_ttl(ttl)
        timeout = self._bound_timeout(timeout)
        result, account = await self.provider_permits.acquire(target, cost, timeout, priority, ttl)
        if result.decision is not None and account is not None:
            self._finish(self._counted(account.provider.policy), account.key, 1, result.decision, "hold")
        return result

    # ---- reservations and leases -------------------------------------------------------------------------------------

    async def reserve(
        self,
        subject: Subject,
        cost: Cost = 1,
        ttl: float = 60.0,
        timeout: float = 0.0,  # noqa: ASYNC109 - the deadline is part of the contract
        priority: float = 0.0,
        call: KeyedCall | None = None,
    ) -> ReserveResult:
        """Charge an estimate; the returned id settles it within `ttl` seconds.

        A `call` is charged once and gets the same reservation each time. Its id may be written differently, but can be
        settled only once.
        """
        ttl = self._reservation_ids.check_ttl(ttl)
        check_priority(priority, self.max_priority)
        found = self.find(subject)
        if found is None:
            return ReserveResult(None, None)
        policy_limiter, key = found
        if self.blocks.active:
            denial = await self._deny_if_blocked(policy_limiter, key, cost, "hold")
            if denial is not None:
                return ReserveResult(denial, None)
        keyed_store = self._keyed_store(call, policy_limiter, key)
        decision = await policy_limiter.charge("hold", key, cost, self._bound_timeout(timeout), priority, keyed_store)
        if not decision.allowed:
            return ReserveResult(self._finish(policy_limiter, key, cost, decision, "hold"), None)
        reservation = policy_limiter.make_reservation(key, cost, ttl, decision)
        denial = None
        if timeout:
            denial = await self._deny_if_blocked_meanwhile(policy_limiter, key, cost, decision, call, "hold")
        if denial is not None:
            if not was_repeated(call):
                await reservation.cancel()
                await forget_call(keyed_store)
            return ReserveResult(denial, None)
        if not was_repeated(call):
            self._finish(policy_limiter, key, cost, decision, "hold")
        number = "" if call is None else call.number_at(decision.at)
        return ReserveResult(decision, await self._write_id(policy_limiter, reservation, ttl, number))

    async def lease(
        self,
        subject: Subject,
        cost: Cost = 1,
        max_permits: int = 1,
        duration: float = 1.0,
        call: KeyedCall | None = None,
    ) -> GrantedLease:
        """Take permits in advance: for a call of this cost and for later ones, up to `max_permits`, for some seconds.

        Where `leases` has no safe terms, this is an acquire. A `call` that was charged before gets no further permits:
        the permits that it leased the first time stay charged.
        """
        duration = min(MAX_LEASE_SECONDS, self._reservation_ids.check_ttl(duration))
        found = self.find(subject)
        if found is None:
            return GrantedLease(None, None, max_permits, duration, 0.0)
        policy_limiter, key = found
        policy = policy_limiter.policy
        if self.blocks.active or not can_lease(policy, cost):
            return GrantedLease(await self.acquire(subject, cost, call=call), None, 0, 0.0, 0.0)
        policy.costs(cost)  # raises if the cost is invalid
        needed = cost if isinstance(cost, int) else 1
        # Only a part of each burst: other clients need permits too.
        bursts = (limit.burst // BURST_DIVISOR for limit, one in zip(policy.limits, policy.one, strict=True) if one)
        wanted = max(needed, min((max_permits, *bursts)))
        keyed_store = self._keyed_store(call, policy_limiter, key)
        decision, permits = await self._charge_up_to(policy_limiter, key, needed, wanted, keyed_store)
        if was_repeated(call):
            return GrantedLease(decision, None, 0, duration, 0.0)
        self._finish(policy_limiter, key, cost, decision, "hold")
        if not decision.allowed:
            return GrantedLease(decision, None, 0, duration, 0.0)
        if not was_charged(decision):
            return GrantedLease(decision, None, 0, 0.0, 0.0)
        reservation = policy_limiter.make_reservation(key, permits, duration + SETTLE_GRACE, decision)
        lease_id = await self._write_id(policy_limiter, reservation, duration + SETTLE_GRACE)
        return GrantedLease(decision, lease_id, permits, *lease_terms(policy, decision, duration))

    async def _write_id(
        self, policy_limiter: PolicyLimiter, reservation: AsyncReservation, ttl: float, number: str = ""
    ) -> str:
        """Write the id of a reservation; cancel the reservation if the caller is cancelled meanwhile."""
        try:
            return await self._reservation_ids.write(policy_limiter.slot, reservation, ttl, number)
        except asyncio.CancelledError:
            if not number:  # a call with an idempotency key stays charged for its repetition
                self._background.start(reservation.cancel())
            raise

    async def _charge_up_to(
        self, policy_limiter: PolicyLimiter, key: Key, needed: int, wanted: int, keyed_store: KeyedStore | None
    ) -> tuple[Decision, int]:
        """Charge as many permits as there are, from `needed` to `wanted`; return the decision and the number."""
        while True:
            decision = await policy_limiter.charge("hold", key, wanted, 0.0, keyed_store=keyed_store)
            if decision.allowed or wanted == needed:
                return decision, wanted
            wanted = max(needed, min(wanted // 2, decision.remaining))

    async def commit(self, reservation_id: str, actual: Cost | None = None, call: KeyedCall | None = None) -> None:
        """Replace the estimate with the actual cost (None: the estimate was right)."""
        await self._settle(reservation_id, lambda reservation: reservation.commit(actual), actual, call)

    async def cancel(self, reservation_id: str, call: KeyedCall | None = None) -> None:
        """Refund the estimate."""
        await self._settle(reservation_id, lambda reservation: reservation.cancel(), None, call)

    def cancel_abandoned(self, reservation_id: str) -> None:
        """Cancel a reservation in the background: its caller is gone, and did not get its id."""
        self._background.start(self.cancel(reservation_id))

    async def _settle(
        self, reservation_id: str, settle: Callable[[Any], Any], actual: Cost | None, call: KeyedCall | None
    ) -> None:
        content = await self._reservation_ids.read(reservation_id)
        reservation, policy = self._restore(content)
        if actual is not None:  # an invalid cost is refused before the id is marked as settled
            if isinstance(reservation, AsyncReservation):
                policy.costs(actual)
            else:
                self.provider_permits.check_cost(reservation, policy, actual)
        caller = b"" if call is None else call.caller
        settled = await self._reservation_ids.settle(content, reservation, lambda: settle(reservation), caller)
        if call is not None:
            call.repeated = not settled

    def _restore(self, content: ReservationId) -> tuple[AsyncReservation | AsyncPendingCharge, Policy]:
        """Return the reservation of an id, and its policy."""
        if content.slot.startswith(PROVIDER_SLOT):
            return self.provider_permits.restore(content)
        variant = self.policies.slots.get(content.slot)
        if variant is None:
            raise UnknownReservationError(f"the policy of this reservation no longer exists: {content.slot!r}")
        return content.restore(self._limiter_for(variant).limiter, variant.policy), variant.policy

    async def release(self, subject: Subject, cost: Cost = 1, call: KeyedCall | None = None) -> None:
        """Release slots of concurrency limits."""
        found = self.find(subject)
        if found is not None:
            await self._correct("release", *found, cost, call)

    async def refund(self, subject: Subject, cost: Cost = 1, call: KeyedCall | None = None) -> None:
        """Refund the most recently charged permits."""
        found = self.find(subject)
        if found is not None:
            await self._correct("refund", *found, cost, call)

    async def _correct(
        self, verb: str, policy_limiter: PolicyLimiter, key: Key, cost: Cost, call: KeyedCall | None
    ) -> None:
        """Correct a charge, unless the same call did so before."""
        keyed_store = self._keyed_store(call, policy_limiter, key)
        apply = None if keyed_store is None else keyed_store.apply_async
        await policy_limiter.limiter.correct(verb, key, cost, apply)

    # ---- usage and administration ------------------------------------------------------------------------------------

    async def usage(self, subject: Subject) -> dict[str, Usage]:
        """Return how much of each limit a key has used."""
        found = self.find(subject)
        return {} if found is None else await found[0].limiter.usage(found[1])

    async def reset(self, subject: Subject, origin: Origin = NO_ORIGIN) -> None:
        """Delete the state of a key. The audit log names the `origin`, as for `block` and `unblock`."""
        found = self.find(subject)
        if found is not None:
            await found[0].limiter.reset(found[1])
            self.stats.near_limit.remove(found[0].policy.name, found[1], self.store.clock.ns() // 1000)
            await self.audit.add("reset", found[0].policy.name, found[1], origin)

    async def block(
        self, subject: Subject, duration: float = DEFAULT_BLOCK_SECONDS, origin: Origin = NO_ORIGIN
    ) -> float:
        """Deny a key for `duration` seconds, whatever its limits; return the duration as stored."""
        name, key = self._limited_key(subject)
        duration = await self.blocks.block(name, key, duration)
        await self.audit.add("block", name, key, origin, duration)
        return duration

    async def unblock(self, subject: Subject, origin: Origin = NO_ORIGIN) -> None:
        """Remove the block of a key."""
        name, key = self._limited_key(subject)
        await self.blocks.unblock(name, key)
        await self.audit.add("unblock", name, key, origin)

    def blocked(self) -> list[Block]:
        """List the blocks that this process knows of."""
        return self.blocks.list()

    async def find_blocks(self) -> list[Block]:
        """List the blocks in the store, of all processes and services that share it."""
        return await self.blocks.find_all()

    def _limited_key(self, subject: Subject) -> tuple[str, Key]:
        found = self.find(subject)
        if found is None:
            raise ResourceUnknown("no limit applies to this descriptor, so it cannot be blocked")
        return found[0].policy.name, found[1]

    def describe_policies(self) -> list[dict[str, object]]:
        """Describe every configured policy."""
        described: list[dict[str, object]] = []
        for name, entry in self.policies.entries.items():
            policy = entry.policy
            described.append({
                "name": name,
                "limits": [str(limit) for limit in policy.limits],
                "mode": policy.mode,
                "rollout": entry.rollout,
                "on_store_error": policy.on_store_error,
                "overrides": [
                    {"key": each.key if isinstance(each.key, str) else list(each.key),
                     "limits": [str(limit) for limit in each.limits]}
                    for each in entry.overrides
                ],
            })  # fmt: skip
        return described

    async def probe(self) -> None:
        """Check that the store is available, without changing anything; raise if it is not."""
        decision = (await self.store.apply_async("peek", ((PROBE_POLICY, "ready", (1,)),)))[0]
        if isinstance(decision, LocalDecision):
            raise StoreUnavailable("the store is unavailable: see the logs of the service and of the store")

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a permit."""
        return sum(policy_limiter.limiter.waiting for policy_limiter in self._policy_limiters.copy().values())

    def waiting_by_policy(self) -> dict[str, int]:
        """Return how many calls wait for a permit, for each policy that has been used."""
        found: dict[str, int] = {}
        for policy_limiter in self._policy_limiters.copy().values():  # threads of gRPC may add some meanwhile
            name = policy_limiter.policy.name
            found[name] = found.get(name, 0) + policy_limiter.limiter.waiting
        return found

    async def close(self) -> None:
        """Wake all waiting calls, return leases and close the store."""
        self.closed = True
        for policy_limiter in self._policy_limiters.copy().values():
            await policy_limiter.limiter.close()
        if self._provider_permits is not None:
            await self._provider_permits.close()
        await self._background.finish()
        await self.store.close_async()


__all__ = [
    "MAX_BATCH",
    "MAX_KEY_LENGTH",
    "MAX_KEY_PARTS",
    "PROBE_POLICY",
    "Decider",
    "ReserveResult",
    "Subject",
    "check_key",
]
