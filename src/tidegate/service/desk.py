"""The desk: every verb of the service, whatever carries it. HTTP, gRPC and proxies' checks ask here, and only here.

A desk has one store and, for each policy that its rulebook can name, an AsyncLimiter on it. It counts nothing that
limits anybody: the limiters do. Its verbs take plain values and give Decisions; mistakes are raised (`ConfigError`,
`ResourceUnknown`), and so is a store that is lost where the policy says `deny` (`StoreUnavailable`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tidegate.core.decision import Decision, LocalDecision, ShadowDecision
from tidegate.errors import Denied, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.limiter import seconds
from tidegate.observe import Observer, Record
from tidegate.policy import Policy
from tidegate.reservation import charged_at
from tidegate.service.blocks import DEFAULT, SHOWN, Block, Blocks
from tidegate.service.leases import LATER, PART, Lease, may_lease, terms, was_charged
from tidegate.service.leases import LONGEST as LONGEST_LEASE
from tidegate.service.receipts import Receipts
from tidegate.service.seats import (
    ASK,
    LONGEST_KEY,
    MOST,
    MOST_PARTS,
    PROBE,
    Held,
    Seat,
    Subject,
    check_key,
    lost,
    short_key,
    tell,
)
from tidegate.service.tally import Tally
from tidegate.stores.cancellation import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidegate.limiter import Usage
    from tidegate.policy import Cost, Key
    from tidegate.reservation import AsyncReservation
    from tidegate.service.rulebook import Rulebook, Variant
    from tidegate.stores import Store


class Desk:
    """Answers for one rulebook over one store; see the module."""

    def __init__(
        self,
        rules: Rulebook,
        store: Store,
        *,
        secret: bytes = b"",
        max_wait: float = 30.0,
        observers: Sequence[Observer] = (),
        on_denial: Sequence[Observer] = (),
    ) -> None:
        """Decide by the rules. `secret` signs reservations: processes that share it settle each other's.

        `observers` are told of every decision, at its price; `on_denial` only of those that say no.
        """
        self.rules = rules
        self.store = store
        self.tally = Tally()
        self.max_wait = max_wait
        self._observers = tuple(observers)
        self._on_denial = (*self._observers, *on_denial)
        self._seats: dict[str, Seat] = {}
        self._quick: dict[str, Callable[[Key], Decision]] = {}  # by policy, until the rules change
        self._abandoned = Background()
        self._receipts = Receipts(store, secret, self._abandoned)
        self.blocks = Blocks(store)
        self.closed = False

    # ---- rules -------------------------------------------------------------------------------------------------------

    def adopt(self, rules: Rulebook) -> None:
        """Decide by other rules from now on, all at once; what was consumed stays consumed, who waits keeps waiting."""
        self.rules = rules
        self._quick.clear()
        for slot, seat in list(self._seats.items()):
            variant = rules.slots.get(slot)
            if variant is None:
                del self._seats[slot]
                seat.limiter._close()  # noqa: SLF001 - its store is ours: nothing is left to await
            elif variant.policy != seat.policy:
                seat.take(variant.policy, self.store)

    def find(self, subject: Subject) -> tuple[Seat, Key] | None:
        """Find who decides on somebody, and as which key; None: nobody, it is not limited."""
        if subject.domain:
            found = self.rules.describe(subject.domain, subject.descriptor)
            return None if found is None else (self.seat(found[0]), short_key(found[1]))
        key = subject.key
        if key.__class__ is not str or len(key) > LONGEST_KEY or not key.isascii():
            key = check_key(key)
        return self.seat(self.rules.choose(subject.policy, key)), key

    def seat(self, variant: Variant) -> Seat:
        """Give a variant its seat."""
        found = self._seats.get(variant[0])
        if found is None:
            count = self.tally.count(variant.policy.name)
            found = self._seats[variant.slot] = Seat(variant.slot, variant.policy, self.store, count)
        return found

    # ---- deciding ----------------------------------------------------------------------------------------------------

    async def acquire(
        self, subject: Subject, cost: Cost = 1, wait: float = 0.0, priority: float = 0.0
    ) -> Decision | None:
        """Take permits, waiting up to `wait` seconds; None: not limited."""
        found = self.find(subject)
        if found is None:
            return None
        seat, key = found
        if self.blocks.active and (no := await self._blocked(seat, key, cost)) is not None:
            return no
        if wait:
            return await self._waiting(seat, key, cost, self._wait(wait), priority)
        decision = seat.now(key, cost) if seat.now is not None else await seat.limiter.try_acquire(key, cost)
        return self._seen(seat, key, cost, decision)

    async def _waiting(self, seat: Seat, key: Key, cost: Cost, wait: float, priority: float) -> Decision:
        try:
            decision = await seat.limiter.acquire(key, cost, wait, priority)
        except Denied as denied:
            return self._seen(seat, key, cost, denied.decision)
        try:
            no = await self._blocked(seat, key, cost) if self.blocks.active else None  # meanwhile
        except asyncio.CancelledError:
            self._abandon(seat.policy, key, cost, decision)
            raise
        if no is not None:
            await seat.limiter.refund(key, cost)
            return no
        return self._seen(seat, key, cost, decision)

    def _abandon(self, policy: Policy, key: Key, cost: Cost, decision: Decision | None, verb: str = "acquire") -> None:
        """Give back, in the background, what a decision has charged whose caller is gone."""
        if decision is None or charged_at(decision, policy) is None:
            return
        policy = policy if decision[2] is policy.limits else Policy(policy.name, decision[2], policy.mode)
        self._abandoned.give_back(self.store, verb, ((policy, key, policy.costs(cost)),), (decision,))

    async def _blocked(self, seat: Seat, key: Key, cost: Cost, verb: str = "acquire") -> Decision | None:
        """Give the denial of a key that is blocked, whatever its limits, its policy's mode and its patience."""
        decision = await self.blocks.find(seat.policy.name, key)
        return None if decision is None else self._seen(seat, key, cost, decision, verb)

    def _wait(self, wait: float) -> float:
        return min(self.max_wait, max(0.0, seconds("wait", wait)))

    def _seen(self, seat: Seat, key: Key, cost: Cost, decision: Decision, verb: str = "acquire") -> Decision:
        """Count a decision, and tell whoever observes; raise where the store could not be asked and that is a no."""
        if decision[0]:
            seat.count.allowed += 1
            if self.tally.near.left:
                self.tally.near.note(seat.policy.name, key, decision)
            if self._observers:
                tell(self._observers, Record(verb, seat.policy, key, seat.policy.costs(cost), decision))
            return decision
        if lost(decision, seat.policy):
            seat.count.local += 1
            raise StoreUnavailable(
                f"the store of policy {seat.policy.name!r} cannot be asked, and the policy says deny"
            )
        if decision.allowed:
            seat.count.shadow += 1
        else:
            seat.count.denied += 1
        self.tally.deny(seat.policy.name, key, decision)
        tell(self._on_denial, Record(verb, seat.policy, key, seat.policy.costs(cost), decision))
        return decision

    async def peek(self, subject: Subject, cost: Cost = 1) -> Decision | None:
        """Give the answer that `acquire` would give, and change nothing."""
        found = self.find(subject)
        if found is None:
            return None
        seat, key = found
        if self.blocks.active and (no := await self.blocks.find(seat.policy.name, key)) is not None:
            return no
        decision = await seat.limiter.peek(key, cost)
        if not decision[0] and lost(decision, seat.policy):
            raise StoreUnavailable(f"the store of policy {seat.policy.name!r} cannot be asked")
        return decision

    async def batch(self, asks: Iterable[tuple[Subject, Cost]]) -> list[Decision | RateLimitError | None]:
        """Decide on up to a thousand, each by itself; what is wrong with one is the answer to that one."""
        if self.store.instant:
            return [await self._one(subject, cost) for subject, cost in asks]
        questions = list(asks)
        await self._abandoned.watch()
        answers = [self._from_share(subject, cost) for subject, cost in questions]
        missing = [number for number, answer in enumerate(answers) if answer is ASK]
        tasks = [asyncio.ensure_future(self._one(*questions[number])) for number in missing]
        try:
            asked = await asyncio.gather(*tasks)
        except asyncio.CancelledError:  # nobody gets an answer, not even those who were decided on
            for number, task in zip(missing, tasks, strict=True):
                answers[number] = None if task.cancelled() else task.result()
            self._abandon_all(questions, answers)
            raise
        for number, answer in zip(missing, asked, strict=True):
            answers[number] = answer
        return answers  # type: ignore[return-value]  # nothing is left to be asked

    def _abandon_all(self, questions: list[tuple[Subject, Cost]], answers: list[Any]) -> None:
        for (subject, cost), answer in zip(questions, answers, strict=True):
            found = self.find(subject) if isinstance(answer, Decision) else None
            if found is not None:
                self._abandon(found[0].policy, found[1], cost, answer)

    def _from_share(self, subject: Subject, cost: Cost) -> object:
        """Decide from a share that is leased already, without a task of its own; ASK: the store has to be asked."""
        try:
            found = self.find(subject) if cost == 1 and cost.__class__ is int else None
            if found is None or (self.blocks.active and self.blocks.known(found[0].policy.name, found[1]) is not True):
                return ASK
            shortcut = found[0].limiter._shortcut  # noqa: SLF001 - what `try_acquire` itself looks at first
            decision = None if shortcut is None else shortcut(found[1], 1)
            return ASK if decision is None else self._seen(*found, 1, decision)
        except RateLimitError as error:
            return error

    async def _one(self, subject: Subject, cost: Cost) -> Decision | RateLimitError | None:
        try:
            return await self.acquire(subject, cost)
        except RateLimitError as error:
            return error

    def quick(self, policy: str) -> Callable[[Key], Decision] | None:
        """Give the short way for calls of cost 1 to a policy, if there is one: in memory, and the same for all keys."""
        found = self._quick.get(policy)
        return self._shorten(policy) if found is None else found

    def _shorten(self, policy: str) -> Callable[[Key], Decision] | None:
        entry = self.rules.entries.get(policy)
        if entry is None or entry.plain is None or self._observers or self.blocks.active:
            return None
        seat = self.seat(entry.plain)
        now, count, seen, near = seat.now, seat.count, self._seen, self.tally.near
        if now is None:
            return None

        def decide(key: Key) -> Decision:
            if key.__class__ is not str or len(key) > LONGEST_KEY or not key.isascii():
                key = check_key(key)
            decision = now(key, 1)
            if decision[0]:
                count.allowed += 1
                if near.left:
                    near.note(policy, key, decision)
                return decision
            return seen(seat, key, 1, decision)

        self._quick[policy] = decide
        return decide

    async def together(self, asks: Sequence[tuple[Policy, Key, int]]) -> list[Decision]:
        """Decide on several, all or nothing, for Envoy: a request that one limit refuses is charged to none.

        Those in shadow mode are decided apart, after the others: they refuse nobody.
        """
        if self.blocks.active and (no := await self._one_blocked(asks)) is not None:
            return no
        answers: list[Decision | None] = [None] * len(asks)
        enforced = [number for number, (policy, _, _) in enumerate(asks) if policy.mode == "enforce"]
        for group in (enforced, *([number] for number in range(len(asks)) if number not in enforced)):
            if not group:
                continue
            questions = [(asks[n][0], asks[n][1], asks[n][0].costs(asks[n][2])) for n in group]
            try:
                decisions = await self.store.apply_async("acquire", questions)
            except asyncio.CancelledError:
                for asked, answer in zip(asks, answers, strict=True):
                    self._abandon(*asked, answer)
                raise
            for number, decision in zip(group, decisions, strict=True):
                answers[number] = self._counted(*asks[number], decision)
        return [answer for answer in answers if answer is not None]

    async def _one_blocked(self, asks: Sequence[tuple[Policy, Key, int]]) -> list[Decision] | None:
        """Deny a request of which one key is blocked: that one says no, the others are only looked at."""
        found = [await self.blocks.find(policy.name, key) for policy, key, _ in asks]
        if not any(no is not None for no in found):
            return None
        return [
            await self.look(policy, key) if no is None else self._counted(policy, key, cost, no)
            for (policy, key, cost), no in zip(asks, found, strict=True)
        ]

    async def look(self, policy: Policy, key: Key) -> Decision:
        """Tell whether one more call would be allowed, for Envoy."""
        if self.blocks.active and (no := await self.blocks.find(policy.name, key)) is not None:
            return no
        decision = (await self.store.apply_async("peek", ((policy, key, policy.costs(1)),)))[0]
        if lost(decision, policy):
            raise StoreUnavailable(f"the store of policy {policy.name!r} cannot be asked")
        return ShadowDecision(decision) if policy.mode == "shadow" else decision

    def _counted(self, policy: Policy, key: Key, cost: int, decision: Decision) -> Decision:
        """Count one of several decisions; the ones that only share a refusal are not counted as denied."""
        if lost(decision, policy):
            raise StoreUnavailable(f"the store of policy {policy.name!r} cannot be asked")
        count = self.tally.count(policy.name)
        if decision[0]:
            count.allowed += 1
            if self.tally.near.left:
                self.tally.near.note(policy.name, key, decision)
            return decision
        if policy.mode == "shadow" and decision[2] is not SHOWN:  # a block is one in any mode
            decision = ShadowDecision(decision)
            count.shadow += 1
        elif decision.retry:
            count.denied += 1
        if decision.retry:
            self.tally.deny(policy.name, key, decision)
            tell(self._on_denial, Record("acquire", policy, key, policy.costs(cost), decision))
        return decision

    # ---- reserving ---------------------------------------------------------------------------------------------------

    async def reserve(
        self, subject: Subject, cost: Cost = 1, ttl: float = 60.0, wait: float = 0.0, priority: float = 0.0
    ) -> Held:
        """Charge an estimate now, to be settled within `ttl` seconds by the id that is given."""
        ttl = self._receipts.check_ttl(ttl)
        found = self.find(subject)
        if found is None:
            return Held(None, None)
        seat, key = found
        if self.blocks.active and (no := await self._blocked(seat, key, cost, "hold")) is not None:
            return Held(no, None)
        try:
            held = await seat.limiter.reserve(key, cost, ttl, self._wait(wait), priority)
        except Denied as denied:
            return Held(self._seen(seat, key, cost, denied.decision, "hold"), None)
        try:
            no = await self._blocked(seat, key, cost, "hold") if wait and self.blocks.active else None
        except asyncio.CancelledError:
            self._abandon(held.policy, key, cost, held.decision, "hold")
            raise
        if no is not None:
            await held.cancel()
            return Held(no, None)
        decision = self._seen(seat, key, cost, held.decision, "hold")
        return Held(decision, self._receipts.write(seat.slot, held, ttl))

    async def lease(self, subject: Subject, cost: Cost = 1, most: int = 1, lasting: float = 1.0) -> Lease:
        """Take permits ahead: for a call of this cost, and for further ones up to `most`, for `lasting` seconds.

        Where `leases` knows no safe terms, it is an acquire.
        """
        lasting = min(LONGEST_LEASE, self._receipts.check_ttl(lasting))
        found = self.find(subject)
        if found is None:
            return Lease(None, None, most, lasting, 0.0)
        seat, key = found
        if self.blocks.active or not may_lease(seat.policy, cost):
            decision = await self.acquire(subject, cost)
            return Lease(decision, None, 0, 0.0, 0.0)
        seat.policy.costs(cost)  # says what is wrong with it
        needed = cost if isinstance(cost, int) else 1
        # A part of what there can be: others want some, too.
        bursts = (limit.burst // PART for limit, one in zip(seat.policy.limits, seat.policy.one, strict=True) if one)
        try:
            held = await self._take(seat, key, needed, max(needed, min((most, *bursts))), lasting + LATER)
        except Denied as denied:
            return Lease(self._seen(seat, key, cost, denied.decision, "hold"), None, 0, lasting, 0.0)
        decision = self._seen(seat, key, cost, held.decision, "hold")
        if not was_charged(decision):
            return Lease(decision, None, 0, 0.0, 0.0)
        permits = max(held.costs)
        return Lease(decision, self._receipts.write(seat.slot, held, lasting + LATER), permits,
                     *terms(seat.policy, decision, lasting))  # fmt: skip

    async def _take(self, seat: Seat, key: Key, needed: int, most: int, ttl: float) -> AsyncReservation:
        """Charge as much as there is from `needed` to `most`."""
        while True:
            try:
                return await seat.limiter.reserve(key, most, ttl)
            except Denied as denied:
                if most == needed:
                    raise
                most = max(needed, min(most // 2, denied.decision.remaining))

    async def commit(self, receipt: str, actual: Cost | None = None) -> None:
        """Charge what it really cost instead of the estimate (None: as estimated)."""
        await self._settle(receipt, lambda held: held.commit(actual), actual)

    async def cancel(self, receipt: str) -> None:
        """Give an estimate back."""
        await self._settle(receipt, lambda held: held.cancel(), None)

    async def _settle(self, receipt: str, settle: Callable[[Any], Any], actual: Cost | None) -> None:
        said = self._receipts.read(receipt)
        variant = self.rules.slots.get(said.slot)
        if variant is None:
            raise ResourceUnknown(f"the policy of this reservation is gone: {said.slot!r}")
        if actual is not None:
            variant.policy.costs(actual)  # refused before anything is marked as settled
        held = said.again(self.seat(variant).limiter, variant.policy)
        await self._receipts.settle(said, lambda: settle(held))

    async def release(self, subject: Subject, cost: Cost = 1) -> None:
        """Give slots of concurrency limits back."""
        found = self.find(subject)
        if found is not None:
            await found[0].limiter.release(found[1], cost)

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

    async def block(self, subject: Subject, lasting: float = DEFAULT) -> float:
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
        decision = (await self.store.apply_async("peek", ((PROBE, "ready", (1,)),)))[0]
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


__all__ = ["LONGEST_KEY", "MOST", "MOST_PARTS", "PROBE", "Desk", "Held", "Subject", "check_key"]
