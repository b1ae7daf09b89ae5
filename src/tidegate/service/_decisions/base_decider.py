"""Decides on calls: finds the policy and key of a subject, asks the store, and counts the decision.

`BaseDecider` holds the verbs that take or check permits; `decider` adds reservations, leases and administration. Each
policy that the configuration can select has one AsyncLimiter on the shared store. The limiters do all limiting.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate._limiter.limiter import check_priority, seconds
from tidegate._limiter.reservation import charged_at
from tidegate._limiter.waiting import MAX_PRIORITY
from tidegate._policy import Policy
from tidegate.core._decision import Decision
from tidegate.errors import Closed, RateLimitError
from tidegate.observe import Observer, Record
from tidegate.service._decisions.blocks import Blocks
from tidegate.service._decisions.idempotency import KeyedStore, forget_call, was_repeated
from tidegate.service._decisions.policy_limiters import (
    ASK_STORE,
    MAX_KEY_LENGTH,
    CountedPolicy,
    PolicyLimiter,
    Subject,
    apply_mode,
    bound_key,
    check_key,
    is_store_lost,
    notify_observers,
    store_lost_error,
)
from tidegate.service._decisions.stats import ALLOWED, DENIED, LOCAL, SHADOW, Stats
from tidegate.stores._cancellation import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate._policy import Cost, Key
    from tidegate.service._decisions.idempotency import KeyedCall
    from tidegate.service._decisions.policies import PolicyVariant, ServicePolicies
    from tidegate.stores import Store
    from tidegate.stores._base import Ask


MAX_LEASE_WAITS: Final = 3  # how often a batch waits for leases before it asks the store itself


class BaseDecider:
    """Decides by one set of policies over one store; see the module."""

    def __init__(
        self,
        policies: ServicePolicies,
        store: Store,
        *,
        max_wait: float = 30.0,
        max_priority: float = MAX_PRIORITY,
        observers: Sequence[Observer] = (),
        on_denial: Sequence[Observer] = (),
        stats: Stats | None = None,
    ) -> None:
        """Decide by these policies.

        `observers` are called for every decision, which adds their cost; `on_denial` only for denials.
        """
        self.policies: ServicePolicies = policies
        self.store = store
        self.stats: Stats = Stats() if stats is None else stats
        self._near_limit = self.stats.near_limit
        self.max_wait = max_wait
        self.max_priority = max_priority
        self._observers = tuple(observers)
        self._on_denial = (*self._observers, *on_denial)
        self._policy_limiters: dict[str, PolicyLimiter] = {}  # by slot
        self._plain_limiters: dict[str, PolicyLimiter] = {}  # by policy: those without overrides and rollout
        self.blocks: Blocks = Blocks(store)
        self._background = BackgroundTasks()
        self.closed = False

    # ---- policies ----------------------------------------------------------------------------------------------------

    def update_policies(self, policies: ServicePolicies) -> None:
        """Replace all policies at once. Used permits stay used, and waiting calls keep waiting."""
        self.policies = policies
        self._plain_limiters.clear()
        for slot, policy_limiter in self._policy_limiters.copy().items():
            variant = policies.slots.get(slot)
            if variant is None:
                del self._policy_limiters[slot]
                policy_limiter.limiter.reject_calls()
            elif variant.policy != policy_limiter.policy:
                policy_limiter.update(variant.policy, self.store)

    def find(self, subject: Subject) -> tuple[PolicyLimiter, Key] | None:
        """Return the limiter and the key for a subject; None if the subject is not limited."""
        if subject.domain:
            match = self.policies.match_descriptor(subject.domain, subject.descriptor)
            return None if match is None else (self._limiter_for(match[0]), bound_key(match[1]))
        key = subject.key
        if key.__class__ is not str or len(key) > MAX_KEY_LENGTH or not key.isascii():
            key = check_key(key)
        found = self._plain_limiters.get(subject.policy)
        return (self._choose_limiter(subject.policy, key) if found is None else found), key

    def _choose_limiter(self, name: str, key: Key) -> PolicyLimiter:
        """Return the limiter of the variant of a policy for a key."""
        found = self._limiter_for(self.policies.choose(name, key))
        if self.policies.entries[name].only_variant is not None:
            self._plain_limiters[name] = found
        return found

    def _limiter_for(self, variant: PolicyVariant) -> PolicyLimiter:
        """Return the limiter of a variant; create it on first use."""
        found = self._policy_limiters.get(variant[0])
        if found is None:
            count = self.stats.count(variant.policy.name)
            created = PolicyLimiter(variant.slot, variant.policy, self.store, count, self.max_priority)
            found = self._policy_limiters.setdefault(variant.slot, created)  # another thread may have been faster
        return found

    # ---- deciding ----------------------------------------------------------------------------------------------------

    async def acquire(
        self,
        subject: Subject,
        cost: Cost = 1,
        timeout: float = 0.0,  # noqa: ASYNC109 - the deadline is part of the contract
        priority: float = 0.0,
        call: KeyedCall | None = None,
    ) -> Decision | None:
        """Take permits, waiting up to `timeout` seconds; None if the subject is not limited.

        A `call` is charged once.
        """
        if priority:
            check_priority(priority, self.max_priority)
        found = self.find(subject)
        if found is None:
            return None
        policy_limiter, key = found
        waits = bool(timeout) or call is not None
        if not waits and (decided := self._decide_found(policy_limiter, key, cost)) is not ASK_STORE:
            return decided  # type: ignore[return-value]  # a decision
        if self.blocks.active and (denial := await self._deny_if_blocked(policy_limiter, key, cost)) is not None:
            return denial
        if waits:
            bounded = self._bound_timeout(timeout) if timeout else None
            return await self._charge(policy_limiter, key, cost, bounded, priority, call)
        if self.closed:
            raise Closed("the service is stopping")
        policy = policy_limiter.policy  # as try_acquire of a limiter, with two coroutines less
        costs = policy.one if cost == 1 and cost.__class__ is int else policy.costs(cost)
        decision = apply_mode(policy, (await self.store.apply_async("acquire", ((policy, key, costs),)))[0])
        return self._finish(policy_limiter, key, cost, decision)

    async def _charge(
        self,
        policy_limiter: PolicyLimiter,
        key: Key,
        cost: Cost,
        timeout: float | None,  # noqa: ASYNC109 - the deadline is part of the contract
        priority: float,
        call: KeyedCall | None,
    ) -> Decision:
        """Take permits for a call that may wait or may be a repetition."""
        keyed_store = self._keyed_store(call, policy_limiter, key)
        decision = await policy_limiter.charge("acquire", key, cost, timeout, priority, keyed_store)
        if timeout and decision.allowed:
            denial = await self._deny_if_blocked_meanwhile(policy_limiter, key, cost, decision, call)
            if denial is not None:
                if charged_at(decision, policy_limiter.policy) is not None and not was_repeated(call):
                    await policy_limiter.limiter.refund(key, cost)
                    await forget_call(keyed_store)
                return denial
        return decision if was_repeated(call) else self._finish(policy_limiter, key, cost, decision)

    async def _deny_if_blocked_meanwhile(
        self,
        policy_limiter: PolicyLimiter,
        key: Key,
        cost: Cost,
        decision: Decision,
        call: KeyedCall | None,
        verb: str = "acquire",
    ) -> Decision | None:
        """Return a denial if the key was blocked while the call waited; refund the call if it is cancelled here."""
        if not self.blocks.active:
            return None
        try:
            return await self._deny_if_blocked(policy_limiter, key, cost, verb)
        except asyncio.CancelledError:
            if not was_repeated(call):
                self.refund_abandoned(policy_limiter.policy, key, cost, decision, verb)
                self._background.start(forget_call(self._keyed_store(call, policy_limiter, key)))
            raise

    def refund_abandoned(
        self, policy: Policy, key: Key, cost: Cost, decision: Decision | None, verb: str = "acquire"
    ) -> None:
        """Refund, in the background, what a decision charged if its caller was cancelled."""
        if decision is None or charged_at(decision, policy) is None:
            return
        policy = (
            policy
            if decision.policy_limits is policy.limits
            else Policy(policy.name, decision.policy_limits, policy.mode)
        )
        self._background.give_back(self.store, verb, ((policy, key, policy.costs(cost)),), (decision,))

    def _keyed_store(self, call: KeyedCall | None, policy_limiter: PolicyLimiter, key: Key) -> KeyedStore | None:
        return None if call is None else KeyedStore(self.store, call, policy_limiter.policy.name, key)

    async def _deny_if_blocked(
        self, policy_limiter: PolicyLimiter, key: Key, cost: Cost, verb: str = "acquire"
    ) -> Decision | None:
        """Return a denial if the key is blocked, whatever its limits, its policy's mode and its timeout."""
        decision = await self.blocks.find(policy_limiter.policy.name, key)
        return None if decision is None else self._finish(policy_limiter, key, cost, decision, verb)

    def _bound_timeout(self, timeout: float) -> float:
        return min(self.max_wait, max(0.0, seconds("timeout", timeout)))

    def _finish(
        self,
        counted: PolicyLimiter | CountedPolicy,
        key: Key,
        cost: Cost,
        decision: Decision,
        verb: str = "acquire",
    ) -> Decision:
        """Count a decision and notify observers; raise if the store was unavailable and the policy denies then.

        Every decision that takes permits passes through here: over HTTP and RESP, from Envoy, and in batches.
        """
        if decision.within_limits:
            counted.count.row[ALLOWED] += 1
            if self._near_limit.samples_left:
                self._near_limit.record(counted.policy.name, key, decision)
            if self._observers:
                record = Record(verb, counted.policy, key, counted.policy.costs(cost), decision)
                notify_observers(self._observers, record)
            return decision
        policy, stats = counted.policy, self.stats
        if is_store_lost(decision, policy):
            counted.count.row[LOCAL] += 1
            raise store_lost_error(policy)
        counted.count.row[SHADOW if decision.allowed else DENIED] += 1
        stats.record_denial(policy.name, key, decision)
        notify_observers(self._on_denial, Record(verb, policy, key, policy.costs(cost), decision))
        return decision

    def _finish_all(self, counted: PolicyLimiter, keys: Sequence[Key], decisions: list[Decision]) -> list[Any]:
        """Do what `_finish` does for decisions about one permit each: those that only need a count together."""
        others: Iterable[tuple[Key, Decision]] = zip(keys, decisions, strict=True)
        if not self._near_limit.samples_left and not self._observers:
            within = [decision[0] for decision in decisions]
            counted.count.row[ALLOWED] += within.count(True)
            others = () if all(within) else [pair for pair in others if not pair[1][0]]
        for key, decision in others:
            self._finish(counted, key, 1, decision)
        return decisions

    async def peek(self, subject: Subject, cost: Cost = 1) -> Decision | None:
        """Return the decision that `acquire` would return, without changing anything."""
        found = self.find(subject)
        return None if found is None else await self.peek_policy(found[0].policy, found[1], cost)

    async def batch(
        self, asks: Iterable[tuple[Subject, Cost]], call: KeyedCall | None = None
    ) -> list[Decision | RateLimitError | None]:
        """Decide on up to a thousand asks, each independently; an invalid ask gets its error as its result."""
        listed = list(asks)
        if self.store.instant:
            return [self._decide_or_error(subject, cost) for subject, cost in listed]
        if call is not None:
            return await self._batch_with_key(listed, call)
        await self._background.watch()
        results = [self._decide_or_error(subject, cost) for subject, cost in listed]
        missing = [number for number, result in enumerate(results) if result is ASK_STORE]
        try:
            missing = await self._wait_for_leases(listed, results, missing)
        except asyncio.CancelledError:
            self._refund_all_abandoned(listed, results)
            raise
        tasks = [asyncio.ensure_future(self._acquire_or_error(*listed[number])) for number in missing]
        try:
            decided = await asyncio.gather(*tasks)
        except asyncio.CancelledError:  # the caller gets no result, so the decided asks are refunded too
            # Without awaiting, since this task may be cancelled again. The tasks were cancelled; some may have ended.
            self._refund_all_abandoned(listed, results)
            for number, task in zip(missing, tasks, strict=True):
                task.add_done_callback(partial(self._refund_ended, listed[number]))
            raise
        for number, result in zip(missing, decided, strict=True):
            results[number] = result
        return results

    async def _wait_for_leases(
        self, asks: list[tuple[Subject, Cost]], results: list[Any], missing: list[int]
    ) -> list[int]:
        """Wait for leases of the keys that are missing, and decide on those again; returns what is still missing."""
        for _ in range(MAX_LEASE_WAITS):
            store_asks = [ask for number in missing if (ask := self._lease_ask(*asks[number])) is not None]
            if not store_asks or not await self.store.wait_for_shares(store_asks):
                break
            for number in missing:
                results[number] = self._decide_or_error(*asks[number])
            missing = [number for number in missing if results[number] is ASK_STORE]
        return missing

    def _lease_ask(self, subject: Subject, cost: Cost) -> Ask | None:
        """Return the ask if it is for one permit that may be leased; None otherwise."""
        if cost != 1 or cost.__class__ is not int:
            return None
        found = self.find(subject)
        return None if found is None else (found[0].policy, found[1], found[0].policy.one)

    def _refund_ended(self, ask: tuple[Subject, Cost], task: asyncio.Task[Any]) -> None:
        """Refund what a task of a cancelled batch has charged, if it was not cancelled itself."""
        if not task.cancelled() and task.exception() is None:
            self._refund_all_abandoned([ask], [task.result()])

    def _refund_all_abandoned(self, asks: list[tuple[Subject, Cost]], results: list[Any]) -> None:
        for (subject, cost), result in zip(asks, results, strict=True):
            found = self.find(subject) if isinstance(result, Decision) else None
            if found is not None:
                self.refund_abandoned(found[0].policy, found[1], cost, result)

    def _decide_or_error(self, subject: Subject, cost: Cost) -> Any:  # noqa: ANN401 - as acquire_subject_now, or an error
        try:
            return self.acquire_subject_now(subject, cost)
        except RateLimitError as error:
            return error

    async def _batch_with_key(
        self, asks: list[tuple[Subject, Cost]], call: KeyedCall
    ) -> list[Decision | RateLimitError | None]:
        """Decide on the asks of one request with an idempotency key: each is charged once."""
        parts = [call.part(number) for number in range(len(asks))]
        calls = (self._acquire_or_error(subject, cost, part) for (subject, cost), part in zip(asks, parts, strict=True))
        results = await asyncio.gather(*calls)
        call.repeated = all(part.repeated for part in parts)
        return results

    async def _acquire_or_error(
        self, subject: Subject, cost: Cost, call: KeyedCall | None = None
    ) -> Decision | RateLimitError | None:
        try:
            return await self.acquire(subject, cost, call=call)
        except RateLimitError as error:
            return error

    # ---- at once -----------------------------------------------------------------------------------------------------
    #
    # These functions decide without a coroutine. If that is not possible, they do nothing and return ASK_STORE; the
    # caller then awaits the function in the last column.
    #
    # called for                           function              possible with                otherwise
    # HTTP acquire, checks, TG.ACQUIRE     acquire_now           memory, or permits of leases acquire
    # asks of a batch, descriptors         acquire_subject_now   memory, or permits of leases acquire
    # HTTP batches, pipelined TG.ACQUIRE   batch_now             memory                       batch
    # CL.THROTTLE                          acquire_policy_now    memory                       acquire_policy
    # Envoy, one descriptor, in a thread   acquire_in_thread     memory                       acquire_together

    def acquire_now(self, policy: str, key: Key, cost: Cost = 1) -> Decision | object | None:
        """Take permits of a key."""
        found = self._plain_limiters.get(policy)
        if found is None or key.__class__ is not str or len(key) > MAX_KEY_LENGTH or not key.isascii():
            return self.acquire_subject_now(Subject(policy, key), cost)
        if found.decide_now is None or self.blocks.latest_end:
            return self._decide_found(found, key, cost)
        decision = found.decide_now(key, cost)
        return ASK_STORE if decision is None else self._finish(found, key, cost, decision)

    def acquire_subject_now(self, subject: Subject, cost: Cost = 1) -> Decision | object | None:
        """Take permits of any subject; None if it is not limited."""
        found = self.find(subject)
        return None if found is None else self._decide_found(*found, cost)

    def _decide_found(self, policy_limiter: PolicyLimiter, key: Key, cost: Cost) -> Decision | object | None:
        decide_now = policy_limiter.decide_now
        if decide_now is None:
            return ASK_STORE
        if self.blocks.active:
            known = self.blocks.known(policy_limiter.policy.name, key)
            if known is not True:
                return ASK_STORE if known is False else self._finish(policy_limiter, key, cost, known)
        decision = decide_now(key, cost)
        return ASK_STORE if decision is None else self._finish(policy_limiter, key, cost, decision)

    def batch_now(
        self, policies: Sequence[str], keys: Sequence[Key], costs: Sequence[Cost]
    ) -> list[Decision | RateLimitError] | object:
        """Decide on keys of policies, each independently; errors are results."""
        if not self.store.instant:
            return ASK_STORE
        found = self._plain_limiters.get(policies[0])
        if found is not None and found.decide_now is not None and not self.blocks.latest_end:
            one_policy = policies.count(policies[0]) == len(policies) and costs.count(1) == len(costs)
            if one_policy and "".join(keys).isascii() and max(map(len, keys)) <= MAX_KEY_LENGTH:  # type: ignore[arg-type]  # strings
                decide = found.decide_now
                return self._finish_all(found, keys, [decide(key, 1) for key in keys])  # type: ignore[misc]  # it decides
        asks = zip(policies, keys, costs, strict=True)
        return [self._decide_or_error(Subject(policy, key), cost) for policy, key, cost in asks]

    def acquire_policy_now(self, counted: CountedPolicy, key: Key, cost: int) -> Decision | object:
        """Take permits of a policy that is not in the file. Its keys cannot be blocked."""
        if not self.store.instant:
            return ASK_STORE
        policy = counted.policy
        return self._finish(counted, key, cost, self.store.apply_one("acquire", policy, key, policy.costs(cost)))

    def acquire_in_thread(
        self, loop: asyncio.AbstractEventLoop, variant: PolicyVariant, key: Key, cost: int
    ) -> Decision | object:
        """Take permits of a valid key from a thread that is not the one of the event loop, which owns this object.

        CPython does not switch threads while an allowed call is counted; the event loop records all others.
        """
        policy_limiter = self._limiter_for(variant)
        if self.policies.slots.get(variant.slot) is not variant:  # the policies have changed meanwhile
            if policy_limiter.policy is variant.policy:  # perhaps added after the change
                self._policy_limiters.pop(variant.slot, None)
            return ASK_STORE
        decide_now = policy_limiter.decide_now
        if decide_now is None or not self.store.instant or self.blocks.active:
            return ASK_STORE
        decision = decide_now(key, cost)
        if decision is None:  # pragma: no cover - a store in memory always decides
            return ASK_STORE
        if decision.within_limits and not self._observers:
            return self._finish(policy_limiter, key, cost, decision)
        loop.call_soon_threadsafe(self._finish, policy_limiter, key, cost, decision.with_views())
        return decision

    # ---- policies that are not in the file, and several together -----------------------------------------------------

    async def acquire_policy(self, counted: CountedPolicy, key: Key, cost: int) -> Decision:
        """Take permits of a policy that is not in the file. Its keys cannot be blocked."""
        policy = counted.policy
        (decision,) = await self.store.apply_async("acquire", ((policy, key, policy.costs(cost)),))
        return self._finish(counted, key, cost, decision)

    async def acquire_together(self, asks: Sequence[tuple[Policy, Key, int]]) -> list[Decision]:
        """Take permits of several policies, all or nothing: if one limit denies, nothing is charged.

        Policies in shadow mode are decided one by one, after the others: they never deny.
        """
        if self.blocks.active and (denials := await self._deny_if_one_is_blocked(asks)) is not None:
            return denials
        found: list[Decision | None] = [None] * len(asks)
        enforced = [number for number, (policy, _, _) in enumerate(asks) if policy.mode == "enforce"]
        for group in (enforced, *([number] for number in range(len(asks)) if number not in enforced)):
            if not group:
                continue
            store_asks = [(asks[n][0], asks[n][1], asks[n][0].costs(asks[n][2])) for n in group]
            try:
                decisions = await self.store.apply_async("acquire", store_asks)
            except asyncio.CancelledError:
                for ask, earlier in zip(asks, found, strict=True):
                    self.refund_abandoned(*ask, earlier)
                raise
            for number, decision in zip(group, decisions, strict=True):
                found[number] = self._record_one_of_group(*asks[number], decision)
        return [decision for decision in found if decision is not None]

    async def _deny_if_one_is_blocked(self, asks: Sequence[tuple[Policy, Key, int]]) -> list[Decision] | None:
        """Deny a request if one of its keys is blocked; the other keys are only peeked at."""
        denials = [await self.blocks.find(policy.name, key) for policy, key, _ in asks]
        if not any(denial is not None for denial in denials):
            return None
        return [
            await self.peek_policy(policy, key)
            if denial is None
            else self._finish(self._counted(policy), key, cost, denial)
            for (policy, key, cost), denial in zip(asks, denials, strict=True)
        ]

    async def peek_policy(self, policy: Policy, key: Key, cost: Cost = 1) -> Decision:
        """Return whether a call would be allowed, without charging it."""
        if self.closed:
            raise Closed("the service is stopping")
        if self.blocks.active and (denial := await self.blocks.find(policy.name, key)) is not None:
            return denial
        decision = (await self.store.apply_async("peek", ((policy, key, policy.costs(cost)),)))[0]
        decision = apply_mode(policy, decision)
        if is_store_lost(decision, policy):
            raise store_lost_error(policy)
        return decision

    def _record_one_of_group(self, policy: Policy, key: Key, cost: int, decision: Decision) -> Decision:
        """Record a decision that was made together with others, unless it only shares the denial of another one."""
        decision = apply_mode(policy, decision)
        if not decision.allowed and not decision.retry and not is_store_lost(decision, policy):
            return decision
        return self._finish(self._counted(policy), key, cost, decision)

    def _counted(self, policy: Policy) -> CountedPolicy:
        return CountedPolicy(policy, self.stats.count(policy.name))
