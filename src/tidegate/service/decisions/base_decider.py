"""How the service decides: who is asked about, by which policy, and what is counted of the answer.

The part of the desk (see `desk`) that takes permits or looks at them. Each policy that the rulebook can name has an
AsyncLimiter on the one store. Nothing here limits anybody: the limiters do.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tidegate.core.decision import Decision, ShadowDecision
from tidegate.errors import RateLimitError, StoreUnavailable
from tidegate.limiter import check_priority, seconds
from tidegate.observe import Observer, Record
from tidegate.policy import Policy
from tidegate.reservation import charged_at
from tidegate.service.decisions.blocks import BLOCKED_LIMITS, Blocks
from tidegate.service.decisions.idempotency import KeyedStore, forget, was_repeated
from tidegate.service.decisions.policy_limiters import (
    ASK_STORE,
    MAX_KEY_LENGTH,
    PolicyLimiter,
    Subject,
    check_key,
    lost,
    short_key,
    tell,
)
from tidegate.service.decisions.stats import Stats
from tidegate.stores.cancellation import BackgroundTasks
from tidegate.waiting import MAX_PRIORITY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidegate.policy import Cost, Key
    from tidegate.service.decisions.idempotency import KeyedCall
    from tidegate.service.decisions.policies import PolicyVariant, ServicePolicies
    from tidegate.stores import Store


class BaseDecider:
    """Decides by one rulebook over one store; see the module."""

    def __init__(
        self,
        rules: ServicePolicies,
        store: Store,
        *,
        max_wait: float = 30.0,
        max_priority: float = MAX_PRIORITY,
        observers: Sequence[Observer] = (),
        on_denial: Sequence[Observer] = (),
    ) -> None:
        """Decide by the rules.

        `observers` are called for every decision, which adds their cost; `on_denial` only for those that say no.
        """
        self.rules = rules
        self.store = store
        self.tally = Stats()
        self.max_wait = max_wait
        self.max_priority = max_priority
        self._observers = tuple(observers)
        self._on_denial = (*self._observers, *on_denial)
        self._seats: dict[str, PolicyLimiter] = {}
        self._quick: dict[str, Callable[[Key], Decision]] = {}  # by policy, until the rules change
        self.blocks = Blocks(store)
        self._abandoned = BackgroundTasks()
        self.closed = False

    # ---- rules -------------------------------------------------------------------------------------------------------

    def adopt(self, rules: ServicePolicies) -> None:
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

    def find(self, subject: Subject) -> tuple[PolicyLimiter, Key] | None:
        """Find who decides on somebody, and as which key; None: nobody, it is not limited."""
        if subject.domain:
            found = self.rules.describe(subject.domain, subject.descriptor)
            return None if found is None else (self.seat(found[0]), short_key(found[1]))
        key = subject.key
        if key.__class__ is not str or len(key) > MAX_KEY_LENGTH or not key.isascii():
            key = check_key(key)
        return self.seat(self.rules.choose(subject.policy, key)), key

    def seat(self, variant: PolicyVariant) -> PolicyLimiter:
        """Give a variant its seat."""
        found = self._seats.get(variant[0])
        if found is None:
            count = self.tally.count(variant.policy.name)
            found = self._seats[variant.slot] = PolicyLimiter(
                variant.slot, variant.policy, self.store, count, self.max_priority
            )
        return found

    # ---- deciding ----------------------------------------------------------------------------------------------------

    async def acquire(
        self,
        subject: Subject,
        cost: Cost = 1,
        wait: float = 0.0,
        priority: float = 0.0,
        call: KeyedCall | None = None,
    ) -> Decision | None:
        """Take permits, waiting up to `wait` seconds; None: not limited. A `call` is charged once."""
        if priority:
            check_priority(priority, self.max_priority)
        found = self.find(subject)
        if found is None:
            return None
        seat, key = found
        if self.blocks.active and (no := await self._blocked(seat, key, cost)) is not None:
            return no
        if wait or call is not None:
            return await self._charged(seat, key, cost, self._wait(wait) if wait else None, priority, call)
        decision = seat.now(key, cost) if seat.now is not None else await seat.limiter.try_acquire(key, cost)
        return self._seen(seat, key, cost, decision)

    async def _charged(
        self, seat: PolicyLimiter, key: Key, cost: Cost, wait: float | None, priority: float, call: KeyedCall | None
    ) -> Decision:
        """Take permits for a call that may wait, or may have been made before."""
        via = self._via(call)
        decision = await seat.charge("acquire", key, cost, wait, priority, via)
        if wait and decision.allowed:
            no = await self._blocked_meanwhile(seat, key, cost, decision, call)
            if no is not None:
                if charged_at(decision, seat.policy) is not None and not was_repeated(call):
                    await seat.limiter.refund(key, cost)
                    await forget(via)
                return no
        return decision if was_repeated(call) else self._seen(seat, key, cost, decision)

    async def _blocked_meanwhile(
        self,
        seat: PolicyLimiter,
        key: Key,
        cost: Cost,
        decision: Decision,
        call: KeyedCall | None,
        verb: str = "acquire",
    ) -> Decision | None:
        """Return the denial of a key that was blocked while a call of it waited; give back if the caller leaves now."""
        if not self.blocks.active:
            return None
        try:
            return await self._blocked(seat, key, cost, verb)
        except asyncio.CancelledError:
            if not was_repeated(call):
                self._abandon(seat.policy, key, cost, decision, verb)
                self._abandoned.start(forget(self._via(call)))
            raise

    def _abandon(self, policy: Policy, key: Key, cost: Cost, decision: Decision | None, verb: str = "acquire") -> None:
        """Give back, in the background, what a decision has charged whose caller is gone."""
        if decision is None or charged_at(decision, policy) is None:
            return
        policy = policy if decision[2] is policy.limits else Policy(policy.name, decision[2], policy.mode)
        self._abandoned.give_back(self.store, verb, ((policy, key, policy.costs(cost)),), (decision,))

    def _via(self, call: KeyedCall | None) -> KeyedStore | None:
        return None if call is None else KeyedStore(self.store, call)

    async def _blocked(self, seat: PolicyLimiter, key: Key, cost: Cost, verb: str = "acquire") -> Decision | None:
        """Give the denial of a key that is blocked, whatever its limits, its policy's mode and its patience."""
        decision = await self.blocks.find(seat.policy.name, key)
        return None if decision is None else self._seen(seat, key, cost, decision, verb)

    def _wait(self, wait: float) -> float:
        return min(self.max_wait, max(0.0, seconds("wait", wait)))

    def _seen(self, seat: PolicyLimiter, key: Key, cost: Cost, decision: Decision, verb: str = "acquire") -> Decision:
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

    async def batch(
        self, asks: Iterable[tuple[Subject, Cost]], call: KeyedCall | None = None
    ) -> list[Decision | RateLimitError | None]:
        """Decide on up to a thousand, each by itself; what is wrong with one is the answer to that one."""
        if self.store.instant:
            return [await self._one(subject, cost) for subject, cost in asks]
        if call is not None:
            return await self._keyed(list(asks), call)
        questions = list(asks)
        await self._abandoned.watch()
        answers = [self._from_share(subject, cost) for subject, cost in questions]
        missing = [number for number, answer in enumerate(answers) if answer is ASK_STORE]
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
                return ASK_STORE
            shortcut = found[0].limiter._fast_path  # noqa: SLF001 - what `try_acquire` itself looks at first
            decision = None if shortcut is None else shortcut(found[1], 1)
            return ASK_STORE if decision is None else self._seen(*found, 1, decision)
        except RateLimitError as error:
            return error

    async def _keyed(self, asks: list[tuple[Subject, Cost]], call: KeyedCall) -> list[Decision | RateLimitError | None]:
        """Decide on the calls of one request with an idempotency key: each is charged once."""
        parts = [call.part(number) for number in range(len(asks))]
        asking = (self._one(subject, cost, part) for (subject, cost), part in zip(asks, parts, strict=True))
        answers = await asyncio.gather(*asking)
        call.repeated = all(part.repeated for part in parts)
        return answers

    async def _one(
        self, subject: Subject, cost: Cost, call: KeyedCall | None = None
    ) -> Decision | RateLimitError | None:
        try:
            return await self.acquire(subject, cost, call=call)
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
            if key.__class__ is not str or len(key) > MAX_KEY_LENGTH or not key.isascii():
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
        if policy.mode == "shadow" and decision[2] is not BLOCKED_LIMITS:  # a block is one in any mode
            decision = ShadowDecision(decision)
            count.shadow += 1
        elif decision.retry:
            count.denied += 1
        if decision.retry:
            self.tally.deny(policy.name, key, decision)
            tell(self._on_denial, Record("acquire", policy, key, policy.costs(cost), decision))
        return decision
