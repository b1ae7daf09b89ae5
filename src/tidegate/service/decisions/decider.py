"""The desk: every verb of the service, whatever carries it. HTTP, gRPC and proxies' checks ask here, and only here.

A desk has one store and, for each policy that its rulebook can name, an AsyncLimiter on it. It counts nothing that
limits anybody: the limiters do. Its verbs take plain values and give Decisions; mistakes are raised (`ConfigError`,
`ResourceUnknown`), and so is a store that is lost where the policy says `deny` (`StoreUnavailable`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tidegate.core.decision import LocalDecision
from tidegate.errors import ConfigError, ResourceUnknown, StoreUnavailable
from tidegate.limiter import check_priority
from tidegate.service.decisions.base_decider import BaseDecider
from tidegate.service.decisions.blocks import DEFAULT_BLOCK_SECONDS, Block
from tidegate.service.decisions.idempotency import forget, was_repeated
from tidegate.service.decisions.leases import BURST_DIVISOR, SETTLE_GRACE, GrantedLease, may_lease, terms, was_charged
from tidegate.service.decisions.leases import MAX_LEASE_SECONDS as LONGEST_LEASE
from tidegate.service.decisions.policy_limiters import (
    MAX_BATCH,
    MAX_KEY_LENGTH,
    MAX_KEY_PARTS,
    PROBE_POLICY,
    ReserveResult,
    Subject,
    check_key,
)
from tidegate.service.decisions.reservation_ids import ReservationIds
from tidegate.service.decisions.signing import SigningKeys
from tidegate.waiting import MAX_PRIORITY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.limiter import Usage
    from tidegate.observe import Observer
    from tidegate.policy import Cost, Key
    from tidegate.reservation import AsyncReservation
    from tidegate.service.decisions.idempotency import KeyedCall, KeyedStore
    from tidegate.service.decisions.policies import ServicePolicies
    from tidegate.service.decisions.policy_limiters import PolicyLimiter
    from tidegate.stores import Store


class Decider(BaseDecider):
    """Answers for one rulebook over one store; see the module."""

    def __init__(
        self,
        rules: ServicePolicies,
        store: Store,
        *,
        secrets: Sequence[str] = (),
        max_wait: float = 30.0,
        max_priority: float = MAX_PRIORITY,
        observers: Sequence[Observer] = (),
        on_denial: Sequence[Observer] = (),
    ) -> None:
        """Decide by the rules. `secrets` sign reservation ids (see `signing`); by default, the store keeps one.

        `observers` are called for every decision, which adds their cost; `on_denial` only for those that say no.
        """
        super().__init__(
            rules, store, max_wait=max_wait, max_priority=max_priority, observers=observers, on_denial=on_denial
        )
        self._receipts = ReservationIds(store, SigningKeys(store, secrets), self._abandoned)

    # ---- reserving ---------------------------------------------------------------------------------------------------

    async def reserve(
        self,
        subject: Subject,
        cost: Cost = 1,
        ttl: float = 60.0,
        wait: float = 0.0,
        priority: float = 0.0,
        call: KeyedCall | None = None,
    ) -> ReserveResult:
        """Charge an estimate now, to be settled within `ttl` seconds by the id that is given.

        A `call` is charged once, and gets the same reservation each time: its id may be written anew, but is settled
        once in all.
        """
        ttl = self._receipts.check_ttl(ttl)
        check_priority(priority, self.max_priority)
        found = self.find(subject)
        if found is None:
            return ReserveResult(None, None)
        seat, key = found
        if self.blocks.active and (no := await self._blocked(seat, key, cost, "hold")) is not None:
            return ReserveResult(no, None)
        via = self._via(call)
        decision = await seat.charge("hold", key, cost, self._wait(wait), priority, via)
        if not decision.allowed:
            return ReserveResult(self._seen(seat, key, cost, decision, "hold"), None)
        held = seat.held(key, cost, ttl, decision)
        no = await self._blocked_meanwhile(seat, key, cost, decision, call, "hold") if wait else None
        if no is not None:
            if not was_repeated(call):
                await held.cancel()
                await forget(via)
            return ReserveResult(no, None)
        if not was_repeated(call):
            self._seen(seat, key, cost, decision, "hold")
        number = "" if call is None else call.number_at(decision.at)
        return ReserveResult(decision, await self._write_id(seat, held, ttl, number))

    async def lease(
        self,
        subject: Subject,
        cost: Cost = 1,
        most: int = 1,
        lasting: float = 1.0,
        call: KeyedCall | None = None,
    ) -> GrantedLease:
        """Take permits ahead: for a call of this cost, and for further ones up to `most`, for `lasting` seconds.

        Where `leases` knows no safe terms, it is an acquire. A `call` that was charged before gets no further permits:
        those that were taken ahead with it stay charged.
        """
        lasting = min(LONGEST_LEASE, self._receipts.check_ttl(lasting))
        found = self.find(subject)
        if found is None:
            return GrantedLease(None, None, most, lasting, 0.0)
        seat, key = found
        if self.blocks.active or not may_lease(seat.policy, cost):
            answer = await self.acquire(subject, cost, call=call)
            return GrantedLease(answer, None, 0, 0.0, 0.0)
        seat.policy.costs(cost)  # says what is wrong with it
        needed = cost if isinstance(cost, int) else 1
        # A part of what there can be: others want some, too.
        bursts = (
            limit.burst // BURST_DIVISOR for limit, one in zip(seat.policy.limits, seat.policy.one, strict=True) if one
        )
        decision, permits = await self._take(seat, key, needed, max(needed, min((most, *bursts))), self._via(call))
        if was_repeated(call):
            return GrantedLease(decision, None, 0, lasting, 0.0)
        self._seen(seat, key, cost, decision, "hold")
        if not decision.allowed:
            return GrantedLease(decision, None, 0, lasting, 0.0)
        if not was_charged(decision):
            return GrantedLease(decision, None, 0, 0.0, 0.0)
        held = seat.held(key, permits, lasting + SETTLE_GRACE, decision)
        receipt = await self._write_id(seat, held, lasting + SETTLE_GRACE)
        return GrantedLease(decision, receipt, permits, *terms(seat.policy, decision, lasting))

    async def _write_id(self, seat: PolicyLimiter, reservation: AsyncReservation, ttl: float, number: str = "") -> str:
        """Write the id of a reservation; give the reservation back if the caller leaves meanwhile."""
        try:
            return await self._receipts.write(seat.slot, reservation, ttl, number)
        except asyncio.CancelledError:
            if not number:  # a call with an idempotency key stays charged for its repetition
                self._abandoned.start(reservation.cancel())
            raise

    async def _take(
        self, seat: PolicyLimiter, key: Key, needed: int, most: int, via: KeyedStore | None
    ) -> tuple[Decision, int]:
        """Charge as much as there is from `needed` to `most`; tell how much."""
        while True:
            decision = await seat.charge("hold", key, most, 0.0, via=via)
            if decision.allowed or most == needed:
                return decision, most
            most = max(needed, min(most // 2, decision.remaining))

    async def commit(self, receipt: str, actual: Cost | None = None, call: KeyedCall | None = None) -> None:
        """Charge what it really cost instead of the estimate (None: as estimated)."""
        await self._settle(receipt, lambda held: held.commit(actual), actual, call)

    async def cancel(self, receipt: str, call: KeyedCall | None = None) -> None:
        """Give an estimate back."""
        await self._settle(receipt, lambda held: held.cancel(), None, call)

    async def _settle(
        self, receipt: str, settle: Callable[[Any], Any], actual: Cost | None, call: KeyedCall | None
    ) -> None:
        said = await self._receipts.read(receipt)
        variant = self.rules.slots.get(said.slot)
        if variant is None:
            raise ResourceUnknown(f"the policy of this reservation is gone: {said.slot!r}")
        if actual is not None:
            variant.policy.costs(actual)  # refused before anything is marked as settled
        held = said.again(self.seat(variant).limiter, variant.policy)
        settled = await self._receipts.settle(said, lambda: settle(held), 0 if call is None else call.number)
        if call is not None:
            call.repeated = not settled

    async def release(self, subject: Subject, cost: Cost = 1, call: KeyedCall | None = None) -> None:
        """Give slots of concurrency limits back."""
        found = self.find(subject)
        if found is None:
            return
        via = self._via(call)
        if via is not None and not await via.take():
            return
        try:
            await found[0].limiter.release(found[1], cost)
        except ConfigError:
            await forget(via)
            raise

    # ---- looking and operating ---------------------------------------------------------------------------------------

    async def usage(self, subject: Subject) -> dict[str, Usage]:
        """Tell how much of each limit a key has used."""
        found = self.find(subject)
        return {} if found is None else await found[0].limiter.usage(found[1])

    async def reset(self, subject: Subject) -> None:
        """Forget everything about a key."""
        found = self.find(subject)
        if found is not None:
            await found[0].limiter.reset(found[1])
            self.tally.near.forget(found[0].policy.name, found[1])

    async def block(self, subject: Subject, lasting: float = DEFAULT_BLOCK_SECONDS) -> float:
        """Deny a key for so many seconds, whatever its limits say; give the seconds."""
        name, key = self._limited(subject)
        lasting = await self.blocks.block(name, key, lasting)
        self._quick.clear()
        return lasting

    async def unblock(self, subject: Subject) -> None:
        """Let a key be decided by its limits again."""
        await self.blocks.unblock(*self._limited(subject))

    def blocked(self) -> list[Block]:
        """List the blocks that this process knows of."""
        return self.blocks.list()

    def _limited(self, subject: Subject) -> tuple[str, Key]:
        found = self.find(subject)
        if found is None:
            raise ResourceUnknown("no limit applies to this descriptor, so there is nobody to block")
        return found[0].policy.name, found[1]

    def policies(self) -> list[dict[str, object]]:
        """Describe every policy of the rulebook."""
        described: list[dict[str, object]] = []
        for name, entry in self.rules.entries.items():
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
        """Ask the store something that changes nothing; raise if it cannot be asked."""
        decision = (await self.store.apply_async("peek", ((PROBE_POLICY, "ready", (1,)),)))[0]
        if isinstance(decision, LocalDecision):
            raise StoreUnavailable("the store cannot be asked: see the log of the service, and the store's own")

    @property
    def waiting(self) -> int:
        """How many calls wait for a permit."""
        return sum(seat.limiter.waiting for seat in self._seats.values())

    def waiting_by_policy(self) -> dict[str, int]:
        """Tell how many calls wait for a permit of each policy that anybody has asked for."""
        found: dict[str, int] = {}
        for seat in self._seats.values():
            found[seat.policy.name] = found.get(seat.policy.name, 0) + seat.limiter.waiting
        return found

    async def close(self) -> None:
        """Wake who waits, return leases and let the store go."""
        self.closed = True
        self._quick.clear()
        for seat in self._seats.values():
            await seat.limiter.close()
        await self._abandoned.finish()
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
