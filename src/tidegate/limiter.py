"""The engine users hold: Limiter for threads, AsyncLimiter for tasks, one implementation of what they do.

What both need is written once in `_Engine`, as plain functions and as the generator of `waiting`; the two classes below
differ only in how they ask the store, sleep and return.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from tidegate.clock import Clock, TaskSignal, ThreadSignal
from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import MAX_DURATION, SECOND
from tidegate.core.decision import Decision, ShadowDecision
from tidegate.errors import Closed, ConfigError, Denied
from tidegate.limited import AsyncLimited, Limited
from tidegate.observe import Observer, Record
from tidegate.policy.key import Key, normal_key
from tidegate.policy.model import Cost, Policy, Rules, read_policy
from tidegate.reservation import AsyncReservation, Reservation, Reserving
from tidegate.stores import MemoryStore, Store
from tidegate.stores.lease import Lease, LeasedStore, read_lease
from tidegate.stores.outage import open_guarded
from tidegate.waiting import MAX_PRIORITY, Ask, Steps, TaskCall, ThreadCall, WaitQueues, wait_in_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.clock import Signal
    from tidegate.waiting import Call

    AsyncApply = Callable[..., Awaitable[list[Decision]]]  # as Store.apply_async

MAX_SECONDS: Final = 3e10


class Usage(NamedTuple):
    """How much of one limit a key has used. `reset_after` is in seconds."""

    quota: int
    used: int
    remaining: int
    reset_after: float
    unit: str


class _Engine:
    """What Limiter and AsyncLimiter share."""

    def __init__(
        self,
        rules: Rules,
        *,
        store: str | Store = "memory://",
        clock: Clock | None = None,
        name: str = "default",
        observer: Observer | None = None,
        ageing: float = 5.0,
        max_priority: float = MAX_PRIORITY,
        lease: bool | float | Lease | None = None,
    ) -> None:
        """Decide by these rules: text, a Limit, several of these, or a Policy.

        `store` is a URL or a Store; one opened here is closed with the limiter. `clock` replaces the store's clock, for
        tests. `name` names the policy when the rules are not one. `observer` is told of every decision. `ageing` is how
        many seconds of waiting weigh as much as one step of priority, and `max_priority` how many steps up or down a
        call may ask for: so no call is passed by those that come more than twice that much waiting later. `lease`
        takes permits from the store ahead and decides here (see `tidegate.stores.lease`): True, for how many seconds at
        most, or a Lease.
        """
        self.policy = read_policy(rules, name)
        terms = read_lease(lease)
        self._owns_store = isinstance(store, str)
        self.store = open_guarded(store, clock=clock) if isinstance(store, str) else store
        if terms is not None:
            self.store = LeasedStore(self.store, terms, owns=self._owns_store)
            self._owns_store = True
        self.clock = clock or self.store.clock
        self._observer = observer
        self._ageing = round(at_least_zero("ageing", ageing) * SECOND)
        self._max_priority = at_least_zero("max_priority", max_priority)
        self._lines = WaitQueues()
        self.store.waited_on.add(self._lines)
        self._retire: list[Callable[[], None]] = []
        self._now: Callable[[], int] | None = None
        if clock is not None and clock is not self.store.clock:
            self._now = lambda: clock.ns() // 1000
        self._apply: Callable[..., Decision] = self.store.apply_one
        self._instant_store = self.store.instant
        self._take_over(self.policy)

    def _take_over(self, policy: Policy) -> None:
        """Decide by this policy from now on."""
        self.policy = policy
        while self._retire:
            self._retire.pop()()  # whoever holds an earlier short way is sent the long one
        # Shadows and observers see each decision on its way out; most limiters have neither.
        self._watched = self._observer is not None or policy.mode == "shadow"

    def update(self, rules: Rules) -> None:
        """Decide by other rules from now on; what keys have consumed stays consumed.

        A policy takes the place of the present one as a whole; limits alone keep its name, mode and other settings.
        """
        policy = read_policy(rules, self.policy.name)
        if not isinstance(rules, Policy):
            policy = Policy(self.policy.name, policy.limits, self.policy.mode, self.policy.on_store_error)
        self._take_over(policy)
        self._lines.wake_all()

    @property
    def waiting(self) -> int:
        """How many calls wait for a permit right now."""
        return len(self._lines)

    def _instant(self) -> int | None:
        return None if self._now is None else self._now()

    def _seen(self, ask: Ask, decision: Decision) -> Decision:
        """Let a shadow policy allow, and tell the observer."""
        if ask.policy.mode == "shadow":
            decision = ShadowDecision(decision)
        if self._observer is not None:
            self._observer(Record(ask.verb, ask.policy, ask.key, ask.costs, decision))
        return decision

    def _question(self, verb: str, key: Key, cost: Cost) -> Ask:
        """Word a question by the rules of this moment."""
        policy = self.policy
        return Ask(verb, policy, key, policy.costs(cost))

    def _acquiring(self, call: Call, verb: str, key: Key, cost: Cost, timeout: float | None, priority: float) -> Steps:
        """Ask at once where nobody waits; otherwise, or when denied, stand in line until the deadline."""
        key = normal_key(key)
        timeout = None if timeout is None else seconds("timeout", timeout)
        ahead = round(self._steps(priority) * self._ageing)
        ask = self._question(verb, key, cost)
        impossible = any(c > limit.burst for limit, c in zip(ask.policy.limits, ask.costs, strict=True))
        if key not in self._lines or impossible:
            decision: Decision = yield ask
            if decision.allowed or decision.retry == NEVER or (timeout is not None and timeout <= 0):
                return self._permit(decision, key, timeout)
        now = self.clock.steady()
        deadline = None if timeout is None else now + max(0, round(timeout * SECOND))
        waiter = self._lines.join(key, now - ahead, self._signal(), call)
        ask_as = functools.partial(self._question, key=key, cost=cost)
        # Another process may release a slot long before its lease ends, and cannot wake us.
        slots = any(limit.algorithm == "concurrency" for limit in ask.policy.limits)
        longest = SECOND if slots and not self._instant_store else MAX_DURATION
        steps = wait_in_line(self._lines, waiter, verb, ask_as, deadline, longest, self.clock.steady)
        decision = yield from steps
        return self._permit(decision, key, timeout)

    def _steps(self, priority: float) -> float:
        """Refuse a priority that would let a call pass others for ever."""
        steps = seconds("priority", priority)
        if abs(steps) > self._max_priority:
            most = f"{self._max_priority:g}"
            raise ConfigError(f"must be from -{most} to {most} (max_priority), not {priority!r}", field="priority")
        return steps

    def _permit(self, decision: Decision, key: Key, timeout: float | None) -> Decision:
        """Pass on a decision that allows; raise the one that does not."""
        if decision.allowed:
            return decision
        names = ", ".join(decision.violated)
        if decision.retry == NEVER:
            message = f"{key!r}: the cost exceeds what {names} can ever allow"
        elif decision.retry:
            message = f"{key!r} got no permit within {timeout} s: {names} would allow it in {decision.retry_after} s"
        else:
            message = f"{key!r} got no permit within {timeout} s: other calls are ahead of it in the queue"
        raise Denied(message, decision)

    def _policy_of(self, decision: Decision) -> Policy:
        """Give the policy a decision was made by: the present one, unless the rules changed meanwhile."""
        policy = self.policy
        same = decision[2] is policy.limits
        return policy if same else Policy(policy.name, decision[2], policy.mode, policy.on_store_error)

    def _adjusting(self, ask: Ask) -> Steps:
        """Correct what was charged, and let the first in line look whether that is enough for it."""
        decision: Decision = yield ask
        for lines in tuple(self.store.waited_on):
            lines.wake(ask.key)
        return decision

    def _refunding(self, key: Key, cost: Cost) -> Steps:
        ask = self._question("adjust", normal_key(key), cost)
        return self._adjusting(ask._replace(costs=tuple(-c for c in ask.costs)))

    def _releasing(self, key: Key, cost: Cost, decision: Decision | None) -> Steps:
        ask = self._question("adjust", normal_key(key), cost)
        slots = slots_of(ask.policy, ask.costs)
        if not any(limit.algorithm == "concurrency" for limit in ask.policy.limits):
            message = f"policy {ask.policy.name!r} has no concurrency limit to release: use refund to give permits back"
            raise ConfigError(message)
        at = None if decision is None else decision.at
        return self._adjusting(ask._replace(costs=tuple(-slot for slot in slots), at=at))

    def _resetting(self, key: Key) -> Steps:
        return self._adjusting(Ask("reset", self.policy, normal_key(key), (0,) * len(self.policy.limits)))

    def _looking(self, key: Key) -> Ask:
        return self._question("peek", normal_key(key), {})

    def _close(self) -> None:
        def closed(*_: object) -> Decision:
            raise Closed("the limiter is closed")

        self._apply = closed  # every further call ends here
        self._lines.close()
        self._take_over(self.policy)

    def _signal(self) -> Signal:
        raise NotImplementedError


def seconds(name: str, value: object) -> float:
    """Take a number of seconds, or a timedelta; what is as good as endless ends in a thousand years."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:  # noqa: PLR0124 - not NaN
        return max(-MAX_SECONDS, min(MAX_SECONDS, value))
    raise ConfigError(f"must be a number of seconds, not {value!r}", field=name)


def at_least_zero(name: str, value: object) -> float:
    """Take a number that is neither negative nor endless."""
    number = seconds(name, value)
    if not 0 <= number < MAX_SECONDS:
        raise ConfigError(f"must be a finite number >= 0, not {value!r}", field=name)
    return number


def slots_of(policy: Policy, costs: tuple[int, ...]) -> tuple[int, ...]:
    """Keep of a cost only what holds slots."""
    pairs = zip(policy.limits, costs, strict=True)
    return tuple(cost if limit.algorithm == "concurrency" else 0 for limit, cost in pairs)


def usage_of(decision: Decision) -> dict[str, Usage]:
    """Read a look at a key as how much of each limit is used."""
    return {
        said.name: Usage(said.quota, said.limit.burst - said.remaining, said.remaining, said.reset_after, said.unit)
        for said in decision.limits
    }


class Limiter(_Engine):
    """Decides for threads. Safe to share between them; a context manager that closes itself."""

    _signal = staticmethod(ThreadSignal)

    def _take_over(self, policy: Policy) -> None:
        super()._take_over(policy)
        self.__dict__.pop("try_acquire", None)
        plain = not self._watched and self._now is None and not self._lines.closed
        if not plain or type(self).try_acquire is not Limiter.try_acquire:
            return
        long_way = functools.partial(Limiter.try_acquire, self)
        if isinstance(self.store, MemoryStore):
            short_way = self.store.shortcut(policy, long_way, self._retire)
        elif isinstance(self.store, LeasedStore):
            short_way = self.store.shortcut(policy, long_way)
        else:
            return
        self.__dict__["try_acquire"] = functools.wraps(Limiter.try_acquire)(short_way)  # the same, faster

    def try_acquire(self, key: Key, cost: Cost = 1) -> Decision:
        """Take permits if there are enough, and say so either way; never waits.

        Takes what is free even if others wait for the key.
        """
        return self._ask(self._question("acquire", normal_key(key), cost))

    def peek(self, key: Key, cost: Cost = 1) -> Decision:
        """Give the answer that `try_acquire` would give, and change nothing."""
        return self._ask(self._question("peek", normal_key(key), cost))

    def acquire(self, key: Key, cost: Cost = 1, timeout: float | None = None, priority: float = 0) -> Decision:
        """Wait until there are enough permits, and take them.

        Raises Denied when `timeout` seconds have passed, and at once when the cost can never fit. Waiting is fair:
        larger `priority` first, in order of arrival among equals, ageing between them (see `tidegate.waiting`).
        """
        call = ThreadCall()
        return call.run(self._drive, self._acquiring(call, "acquire", key, cost, timeout, priority))

    def reserve(
        self, key: Key, cost: Cost = 1, ttl: float = 60.0, timeout: float | None = 0.0, priority: float = 0
    ) -> Reservation:
        """Charge an estimate now and settle it later: `commit` the actual cost, or `cancel`.

        As a context manager it commits the estimate at the end, or cancels after an exception, unless settled before.
        Not settled within `ttl` seconds, the estimate stands. Waits up to `timeout` seconds, raises Denied then.
        """
        ttl = seconds("ttl", ttl)
        call = ThreadCall()
        decision = call.run(self._drive, self._acquiring(call, "hold", key, cost, timeout, priority))
        policy = self._policy_of(decision)
        return Reservation(self._settle, self.clock, policy, normal_key(key), policy.costs(cost), decision, ttl)

    def _settle(self, ask: Ask) -> None:
        self._drive(self._adjusting(ask))

    def refund(self, key: Key, cost: Cost = 1) -> None:
        """Give permits back that were taken last."""
        self._drive(self._refunding(key, cost))

    def release(self, key: Key, cost: Cost = 1, decision: Decision | None = None) -> None:
        """Give slots of concurrency limits back: those that `decision` took, or the ones whose lease ends first."""
        self._drive(self._releasing(key, cost, decision))

    def reset(self, key: Key) -> None:
        """Forget everything about a key."""
        self._drive(self._resetting(key))

    def usage(self, key: Key) -> dict[str, Usage]:
        """Tell how much of each limit a key has used, by the limit's name."""
        return usage_of(self._ask(self._looking(key)))

    def limited(
        self,
        key: Key | Callable[..., Key],
        cost: Cost | Callable[..., Cost] = 1,
        timeout: float | None = None,
        priority: float = 0,
    ) -> Limited:
        """Wait for a permit around a block (`with`) or every call of a function (as decorator); slots are released.

        As decorator, `key` and `cost` may be functions of the call's arguments.
        """
        return Limited(self, key, cost, timeout, priority)

    def close(self) -> None:
        """Refuse further calls, wake waiters with Closed, and let the store go if it was opened here."""
        self._close()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _ask(self, ask: Ask) -> Decision:
        verb, policy, key, costs, at = ask
        decision = self._apply(verb, policy, key, costs, self._instant(), at)
        return self._seen(ask, decision) if self._watched else decision

    def _drive(self, steps: Steps) -> Decision:
        """Ask and sleep for a generator of steps."""
        answer = None
        try:
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]  # a Decision, by the type of Steps
                if isinstance(step, Ask):
                    answer = self._ask(step)
                else:
                    self.clock.wait(*step)
        finally:
            steps.close()


class AsyncLimiter(_Engine):
    """Decides for tasks: the names of Limiter, awaited. An async context manager that closes itself."""

    _signal = staticmethod(TaskSignal)
    _shortcut: Callable[[Key, Cost], Decision | None] | None = None

    def _take_over(self, policy: Policy) -> None:
        super()._take_over(policy)
        plain = not self._watched and self._now is None and not self._lines.closed
        self._shortcut = None
        self.__dict__.pop("try_acquire", None)
        plain = plain and type(self).try_acquire is AsyncLimiter.try_acquire
        if plain and isinstance(self.store, MemoryStore):
            decide = self.store.shortcut(policy, self._long_way, self._retire)

            @functools.wraps(AsyncLimiter.try_acquire)
            async def try_acquire(key: Key, cost: Cost = 1) -> Decision:
                return decide(key, cost)

            self.__dict__["try_acquire"] = try_acquire  # the same, faster
        elif plain and isinstance(self.store, LeasedStore):
            self._shortcut = self.store.shortcut(policy, lambda _key, _cost: None)  # the store has to be awaited

    def _long_way(self, key: Key, cost: Cost) -> Decision:
        _, policy, key, costs, _ = self._question("acquire", normal_key(key), cost)
        return self._apply("acquire", policy, key, costs)

    async def try_acquire(self, key: Key, cost: Cost = 1) -> Decision:
        """Take permits if there are enough, and say so either way; never waits.

        Takes what is free even if others wait for the key.
        """
        if self._shortcut is not None and (decision := self._shortcut(key, cost)) is not None:
            return decision
        if self._watched or self._instant_store or self._lines.closed:
            return await self._ask(self._question("acquire", normal_key(key), cost))
        policy = self.policy  # what _ask does, with one coroutine less
        asks = ((policy, normal_key(key), policy.costs(cost)),)
        return (await self.store.apply_async("acquire", asks, self._instant()))[0]

    async def peek(self, key: Key, cost: Cost = 1) -> Decision:
        """Give the answer that `try_acquire` would give, and change nothing."""
        return await self._ask(self._question("peek", normal_key(key), cost))

    async def acquire(self, key: Key, cost: Cost = 1, timeout: float | None = None, priority: float = 0) -> Decision:  # noqa: ASYNC109 - the deadline is part of the contract
        """Wait until there are enough permits, and take them; see `Limiter.acquire`."""
        return await self._wait_for("acquire", key, cost, timeout, priority)

    async def _wait_for(
        self,
        verb: str,
        key: Key,
        cost: Cost,
        timeout: float | None,  # noqa: ASYNC109 - as above
        priority: float,
        apply: AsyncApply | None = None,
    ) -> Decision:
        """Charge a cost, waiting for it; `apply` replaces the store's own `apply_async`."""
        call = TaskCall()
        steps = self._acquiring(call, verb, key, cost, timeout, priority)
        return await call.run(functools.partial(self._drive, apply=apply), steps)

    def reserve(
        self, key: Key, cost: Cost = 1, ttl: float = 60.0, timeout: float | None = 0.0, priority: float = 0
    ) -> Reserving:
        """Charge an estimate now and settle it later: await it, or use it in `async with`; see `Limiter.reserve`."""
        return Reserving(lambda: self._reserve(key, cost, ttl, timeout, priority))

    async def _reserve(
        self,
        key: Key,
        cost: Cost,
        ttl: float,
        timeout: float | None,  # noqa: ASYNC109 - as above
        priority: float,
    ) -> AsyncReservation:
        ttl = seconds("ttl", ttl)
        decision = await self._wait_for("hold", key, cost, timeout, priority)
        policy = self._policy_of(decision)
        return AsyncReservation(self._settle, self.clock, policy, normal_key(key), policy.costs(cost), decision, ttl)

    async def _settle(self, ask: Ask) -> None:
        await self._drive(self._adjusting(ask))

    async def refund(self, key: Key, cost: Cost = 1) -> None:
        """Give permits back that were taken last."""
        await self._drive(self._refunding(key, cost))

    async def release(self, key: Key, cost: Cost = 1, decision: Decision | None = None) -> None:
        """Give slots of concurrency limits back: those that `decision` took, or the ones whose lease ends first."""
        await self._drive(self._releasing(key, cost, decision))

    async def reset(self, key: Key) -> None:
        """Forget everything about a key."""
        await self._drive(self._resetting(key))

    async def usage(self, key: Key) -> dict[str, Usage]:
        """Tell how much of each limit a key has used, by the limit's name."""
        return usage_of(await self._ask(self._looking(key)))

    def limited(
        self,
        key: Key | Callable[..., Key],
        cost: Cost | Callable[..., Cost] = 1,
        timeout: float | None = None,
        priority: float = 0,
    ) -> AsyncLimited:
        """Wait for a permit around a block (`async with`) or every call of a coroutine function (as decorator)."""
        return AsyncLimited(self, key, cost, timeout, priority)

    async def close(self) -> None:
        """Refuse further calls, wake waiters with Closed, and let the store go if it was opened here."""
        self._close()
        if self._owns_store:
            await self.store.close_async()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    async def _ask(self, ask: Ask, apply: AsyncApply | None = None) -> Decision:
        verb, policy, key, costs, at = ask
        if self._instant_store or self._lines.closed:
            decision = self._apply(verb, policy, key, costs, self._instant(), at)
        else:
            apply = apply or self.store.apply_async
            decision = (await apply(verb, ((policy, key, costs),), self._instant(), at))[0]
        return self._seen(ask, decision) if self._watched else decision

    async def _drive(self, steps: Steps, apply: AsyncApply | None = None) -> Decision:
        """Ask and sleep for a generator of steps; `apply` replaces the store's own `apply_async`."""
        answer = None
        try:
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]  # a Decision, by the type of Steps
                if isinstance(step, Ask):
                    answer = await self._ask(step, apply)
                else:
                    await self.clock.wait_async(*step)
        finally:
            steps.close()
