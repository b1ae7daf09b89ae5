"""The part of Limiter and AsyncLimiter that both share, written once as functions and flows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from tidegate._limiter.joint import JointCall, LimiterAsk
from tidegate._limiter.reservation import ReservedCharge, charged_at
from tidegate._limiter.waiting import MAX_PRIORITY, WaitQueues
from tidegate._policy.key import Key, normal_key
from tidegate._policy.model import Cost, Policy, Rules, read_policy
from tidegate._runtime.arguments import at_least_zero, check_priority, seconds
from tidegate.core._bounds import SECOND
from tidegate.core._decision import Decision, LocalDecision, shadow
from tidegate.errors import Closed, ConfigError
from tidegate.observe import Observer, Record
from tidegate.stores._opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate.stores import Store
    from tidegate.stores._base import Ask, TryAcquire
    from tidegate.stores._lease import Lease


ONE: Final[object] = 1  # the cost of most calls: comparing objects is faster, and leaves out True and 1.0


class Usage(NamedTuple):
    """How much of one limit a key has used. `reset_after` is in seconds."""

    quota: int
    used: int
    remaining: int
    reset_after: float
    unit: str


class BaseLimiter:
    """Base class of Limiter and AsyncLimiter: makes asks, and calls observers."""

    for_tasks: ClassVar[bool] = False  # whether its methods are coroutines
    node: str | None = None  # the node of a run whose limits these are

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
        and decides in this process (see `tidegate.Lease`): True, the duration of a lease in seconds, or a Lease.
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
        self._now: Callable[[], int] | None = None
        if clock is not None and clock is not self.store.clock:
            self._now = lambda: clock.ns() // 1000
        self._apply: Callable[..., Decision] = self.store.apply_one
        self._instant_store = self.store.instant
        self._set_policy(self.policy)

    def _set_policy(self, policy: Policy) -> None:
        """Replace the policy."""
        self.policy = policy
        # Only shadow policies and observers need each decision after it is made; most limiters have neither.
        self.observed: bool = self._observer is not None or policy.mode == "shadow"
        self._try_acquire: TryAcquire[Any] = self._prepare_try_acquire(policy)

    def _prepare_try_acquire(self, policy: Policy) -> TryAcquire[Any]:
        """Return the function that `try_acquire` calls: a specialized one of the store, if no option prevents that."""
        if self.observed or self._now is not None or self.queues.closed:
            return self._acquire_now
        return self.store.specialize(policy, self._acquire_now)

    def update(self, rules: Rules) -> None:
        """Replace the rules; the usage of keys is kept.

        A Policy replaces the current one completely; limits alone keep its name, mode and other settings.
        """
        policy = read_policy(rules, self.policy.name)
        if not isinstance(rules, Policy):
            policy = self.policy.with_limits(policy.limits)
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

    def charge_now(self, key: Key, cost: Cost) -> Decision:
        """Charge a key, in the calling thread; for a store that is `instant`."""
        decision: Decision = self._try_acquire(key, cost)
        return decision

    def hold_now(self, key: Key, cost: Cost) -> Decision:
        """Charge a key so that the charge can be corrected exactly; for a store that is `instant`."""
        return self._ask_now("hold", self._make_ask(key, cost))

    def _ask_now(self, verb: str, ask: Ask, at: int | None = None) -> Decision:
        """Ask the store, in the calling thread."""
        decision = self._apply(verb, *ask, None if self._now is None else self._now(), at)
        return self.observe(verb, ask, decision) if self.observed else decision

    def _acquire_now(self, key: Key, cost: Cost) -> Decision:
        """Ask the store for permits of one key, in the calling thread."""
        policy = self.policy
        if key.__class__ is not str:
            key = normal_key(key)
        costs = policy.one if cost is ONE and policy.counted else policy.costs(cost)
        decision = self._apply("acquire", policy, key, costs, None if self._now is None else self._now())
        return self.observe("acquire", (policy, key, costs), decision) if self.observed else decision

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
        """Return the policy of a decision: the current one, unless the rules changed meanwhile.

        A decision without the store is about this process's part of the limits; the store counts the limits themselves.
        """
        policy = self.policy
        limits = decision.policy_limits
        if limits is policy.limits or isinstance(decision, LocalDecision):
            return policy
        return policy.with_limits(limits)

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
    pairs = zip(decision.policy_limits, decision.views, strict=True)
    return {
        limit.name: Usage(limit.quota, limit.burst - left, max(0, left), reset / SECOND, limit.unit)
        for limit, (left, _, reset) in pairs
    }
