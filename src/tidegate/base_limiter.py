"""The part of Limiter and AsyncLimiter that both share, written once as functions and flows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tidegate.arguments import at_least_zero, check_priority, seconds
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, shadow
from tidegate.errors import Closed, ConfigError
from tidegate.joint import JointCall, LimiterAsk
from tidegate.observe import Observer, Record
from tidegate.policy.key import Key, normal_key
from tidegate.policy.model import Cost, Policy, Rules, read_policy
from tidegate.reservation import ReservedCharge, charged_at
from tidegate.stores.opened import OpenedStore
from tidegate.waiting import MAX_PRIORITY, WaitQueues

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.clock import Clock
    from tidegate.stores import Store
    from tidegate.stores.base import Ask, TryAcquire
    from tidegate.stores.lease import Lease


class Usage(NamedTuple):
    """How much of one limit a key has used. `reset_after` is in seconds."""

    quota: int
    used: int
    remaining: int
    reset_after: float
    unit: str


class BaseLimiter:
    """Base class of Limiter and AsyncLimiter: makes asks, calls observers, and builds fast paths."""

    for_tasks: ClassVar[bool] = False  # whether its methods are coroutines

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
        """Create a limiter for these rules: a string, a Limit, several of these, or a Policy.

        `store` is a URL or a Store; a store opened from a URL is closed with the limiter. `clock` replaces the store's
        clock, for tests. `name` is the name of the policy if the rules are not a Policy. `observer` is called with a
        Record of every decision. `ageing` is how many seconds of waiting count as much as one step of priority.
        `max_priority` bounds the priority of a call, in both directions, so a call is never overtaken by calls that
        arrive more than `2 * max_priority * ageing` seconds after it. `lease` takes permits from the store in advance
        and decides in this process (see `tidegate.stores.lease`): True, the duration of a lease in seconds, or a Lease.
        """
        self.policy: Policy = read_policy(rules, name)
        self._observer = observer
        self.ageing: int = round(at_least_zero("ageing", ageing) * SECOND)  # in microseconds
        self.max_priority: float = at_least_zero("max_priority", max_priority)
        self._opened = OpenedStore.open(store, clock=clock, lease=lease)
        self.store: Store = self._opened.store
        self.clock: Clock = clock or self.store.clock
        self.queues: WaitQueues = WaitQueues()
        self.store.wait_queues.add(self.queues)
        self._fast_path_invalidators: list[Callable[[], None]] = []
        self._now: Callable[[], int] | None = None
        if clock is not None and clock is not self.store.clock:
            self._now = lambda: clock.ns() // 1000
        self._apply: Callable[..., Decision] = self.store.apply_one
        self._instant_store = self.store.instant
        self._set_policy(self.policy)

    def _set_policy(self, policy: Policy) -> None:
        """Replace the policy and its fast paths."""
        self.policy = policy
        while self._fast_path_invalidators:
            self._fast_path_invalidators.pop()()  # callers that still hold an old fast path take the slow one
        # Only shadow policies and observers need each decision after it is made; most limiters have neither.
        self._observed = self._observer is not None or policy.mode == "shadow"
        for name in ("try_acquire", "peek", "usage"):
            self.__dict__.pop(name, None)
        if not self._observed and self._now is None and not self.queues.closed:
            self._use_fast_paths(policy)

    def _use_fast_paths(self, policy: Policy) -> None:
        """Let this object use faster functions that do the same as its methods."""
        raise NotImplementedError

    def _set_fast_path(self, name: str, method: Callable[..., object], fast_path: Callable[..., object] | None) -> None:
        """Use a fast path in place of a method, unless a subclass has another method."""
        if fast_path is not None and getattr(type(self), name) is method:
            self.__dict__[name] = functools.wraps(method)(fast_path)

    def _fast_try_acquire(self, policy: Policy) -> TryAcquire[Decision] | None:
        slow_path = functools.partial(self._ask_key_now, "acquire")
        return self.store.fast_path(policy, slow_path, self._fast_path_invalidators)

    def _fast_peek(self, policy: Policy) -> TryAcquire[Decision] | None:
        if not policy.counted:  # an integer cost is an error
            return None
        return self.store.fast_peek(policy, functools.partial(self._ask_key_now, "peek"), self._fast_path_invalidators)

    def _fast_usage(self, policy: Policy) -> Callable[[Key], dict[str, Usage]] | None:
        def slow_peek(key: Key, _cost: Cost = 0) -> Decision:
            return self._ask_now("peek", self._make_ask(key, {}))

        peek: TryAcquire[Decision] | None = self.store.fast_peek(policy, slow_peek, self._fast_path_invalidators)
        return None if peek is None else fast_usage(policy, peek, slow_peek)

    def update(self, rules: Rules) -> None:
        """Replace the rules; the usage of keys is kept.

        A Policy replaces the current one completely; limits alone keep its name, mode and other settings.
        """
        policy = read_policy(rules, self.policy.name)
        if not isinstance(rules, Policy):
            policy = Policy(self.policy.name, policy.limits, self.policy.mode, self.policy.on_store_error)
        self._set_policy(policy)
        self.queues.wake_all()

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a permit."""
        return len(self.queues)

    @property
    def has_waiting(self) -> bool:
        """Whether a call may be waiting for a permit: faster than counting them."""
        return self.queues.occupied

    def current_time(self) -> int | None:
        """Return the time to decide at; None: that of the store's clock."""
        return None if self._now is None else self._now()

    def check_open(self) -> None:
        """Raise Closed if the limiter is closed."""
        if self.queues.closed:
            raise Closed("the limiter is closed")

    def _ask_now(self, verb: str, ask: Ask, at: int | None = None) -> Decision:
        """Ask the store, in the calling thread."""
        decision = self._apply(verb, *ask, None if self._now is None else self._now(), at)
        return self.observe(verb, ask, decision) if self._observed else decision

    def _ask_key_now(self, verb: str, key: Key, cost: Cost = 1) -> Decision:
        """Ask the store about one key, in the calling thread."""
        policy = self.policy
        return self._ask_now(verb, (policy, normal_key(key), policy.costs(cost)))

    def observe(self, verb: str, ask: Ask, decision: Decision) -> Decision:
        """Return a decision as the caller sees it: a shadow policy allows the call. Calls the observer."""
        if ask[0].mode == "shadow":
            decision = shadow(decision)
        if self._observer is not None:
            self._observer(Record(verb, *ask, decision))
        return decision

    def _make_ask(self, key: Key, cost: Cost) -> Ask:
        """Return what the store is asked, with the current policy."""
        policy = self.policy
        return policy, normal_key(key), policy.costs(cost)

    def _asks_at_once(self, key: Key, timeout: float | None, priority: float) -> bool:
        """Return whether a call may ask before it considers waiting: no other call waits for its key."""
        if timeout is not None:
            seconds("timeout", timeout)
        if priority:
            check_priority(priority, self.max_priority)
        return key not in self.queues

    def _call(self, key: Key, cost: Cost) -> JointCall:
        """Return the call that charges one key; raises Closed."""
        self.check_open()
        return JointCall(((LimiterAsk(self, key, cost),),))

    def _charge(self, key: Key, cost: Cost, decision: Decision) -> ReservedCharge:
        policy = self.policy_of(decision)
        return ReservedCharge(self, policy, normal_key(key), policy.costs(cost), decision)

    def policy_of(self, decision: Decision) -> Policy:
        """Return the policy of a decision: the current one, unless the rules changed meanwhile."""
        policy = self.policy
        limits = decision.policy_limits
        return policy if limits is policy.limits else Policy(policy.name, limits, policy.mode, policy.on_store_error)

    def _refund_ask(self, key: Key, cost: Cost) -> Ask:
        policy, key, costs = self._make_ask(key, cost)
        return policy, key, tuple(-c for c in costs)

    def _release_ask(self, key: Key, cost: Cost, decision: Decision | None) -> tuple[Ask, int | None]:
        """Return what releases slots, and the time of the charge that took them."""
        policy, key, costs = self._make_ask(key, cost)
        slots = slots_of(policy, costs)
        if not any(limit.rules.holds_slots for limit in policy.limits):
            message = f"policy {policy.name!r} has no concurrency limit, so it has no slots to release"
            raise ConfigError(message)
        at = None if decision is None else charged_at(decision, policy)
        if decision is not None and at is None:  # it took none
            slots = (0,) * len(slots)
        return (policy, key, tuple(-slot for slot in slots)), at

    def _reset_ask(self, key: Key) -> Ask:
        return self.policy, normal_key(key), (0,) * len(self.policy.limits)

    def reject_calls(self) -> None:
        """Reject further calls and wake waiting calls with Closed; the store stays open."""

        def closed(*_: object) -> Decision:
            raise Closed("the limiter is closed")

        self._apply = closed  # every later call ends here
        self.queues.close()
        self._set_policy(self.policy)


def slots_of(policy: Policy, costs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the costs at concurrency limits, and 0 at all others."""
    pairs = zip(policy.limits, costs, strict=True)
    return tuple(cost if limit.rules.holds_slots else 0 for limit, cost in pairs)


def usage_of(decision: Decision) -> dict[str, Usage]:
    """Return the usage of each limit from a decision of `peek`, by the name of the limit."""
    triples = zip(decision.policy_limits, decision.views, decision.used, strict=True)
    return {
        limit.name: Usage(limit.quota, used, remaining, reset / SECOND, limit.unit)
        for limit, (remaining, _, reset), used in triples
    }


def fast_usage(
    policy: Policy, peek: Callable[[Key, int], Decision], slow_peek: Callable[[Key], Decision]
) -> Callable[[Key], dict[str, Usage]]:
    """Build a function that returns the usage of a key; a policy with one limit, the common case, gets a faster one.

    The views of a fast peek do not show usage above a limit: if nothing remains, `slow_peek` is called.
    """
    if policy.only is None:

        def usage_of_several(key: Key) -> dict[str, Usage]:
            decision = peek(key, 0)
            return usage_of(decision if decision.remaining else slow_peek(key))

        return usage_of_several
    limit = policy.only
    name, quota, burst, unit, create = limit.name, limit.quota, limit.burst, limit.unit, tuple.__new__

    def usage(key: Key) -> dict[str, Usage]:
        decision = peek(key, 0)
        if decision[2][0] is not limit:  # positions: this is a fast path
            return usage_of(decision)  # the rules changed meanwhile
        ((remaining, _, reset),) = decision.views
        if not remaining:
            return usage_of(slow_peek(key))
        return {name: create(Usage, (quota, burst - remaining, remaining, reset / SECOND, unit))}

    return usage
