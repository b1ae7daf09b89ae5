"""Shared by the swarm's limiters: resources with a bucket each, reduced by 429s, recovering by themselves.

A resource is a Limiter over a common store. `adaptive.Capacities` holds its capacity; whenever that changes
(`_apply_capacity`), the limiter's policy is updated, which wakes its waiters. There is no background thread: a recovery
that is due is applied by the next call, or by waiting callers (`RecoveringClock`).
"""

from __future__ import annotations

import functools
import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Generic, TypeVar
from weakref import WeakSet

from tidegate._limiter.limiter import AsyncLimiter, Limiter, seconds
from tidegate._policy import Policy
from tidegate._runtime.fork import at_fork, fork_safe
from tidegate.adaptive import Capacities, GatedStore, RecoveringClock, RecoverySettings, read_recovery_settings
from tidegate.adaptive._capacities import subject_in
from tidegate.bus import Bus, open_bus
from tidegate.core._bounds import SECOND, ceil_div
from tidegate.core._limit import Limit, parse_period
from tidegate.errors import Closed, ConfigError, ResourceUnknown
from tidegate.stores._opened import OpenedStore
from tidegate.swarm._arguments import check_swarm, is_nothing, process_name, read_retry_after
from tidegate.swarm._bus_sync import SYNC_TIMEOUT, BusSync
from tidegate.swarm._capacity import Capacity
from tidegate.swarm._presence import Presence

if TYPE_CHECKING:
    from tidegate._limiter.reservation import AsyncReservation, Reservation
    from tidegate._runtime.clock import Clock
    from tidegate.adaptive import CapacityUpdate, Listener, Recovery
    from tidegate.adaptive._capacities import CapacitySnapshot
    from tidegate.stores import Store
    from tidegate.stores._lease import Lease
    from tidegate.swarm._arguments import Window

L = TypeVar("L", Limiter, AsyncLimiter)
POLICY_PREFIX: Final = "swarm/"
SPREAD_STEPS: Final = 20  # in a window, in which a shared capacity grows back after a freeze
log: logging.Logger = logging.getLogger("tidegate.swarm")


class Resource(Generic[L]):
    """One resource of an agent: its limiter, and the number of calls in progress."""

    def __init__(self, name: str, policy: Policy, window: int, limiter: L) -> None:
        self.name = name
        self.policy = policy
        self.window = window
        self.limiter: L = limiter
        self.changing: threading.Lock = fork_safe(threading.Lock())  # one change of capacity at a time
        self.original = 0
        self.due: int | None = None  # when the capacity changes next
        self.paused_until = 0  # the bucket does not refill before that instant
        self.spread_until = 0  # a shared log grows back to the capacity until then, so that calls are spread
        self._lock = fork_safe(threading.Lock())
        self._calls = 0
        self._reservations: WeakSet[Reservation | AsyncReservation] = WeakSet()

    def next_step(self) -> int | None:
        """Return when the next recovery step is due."""
        return self.due

    def begin_call(self) -> None:
        """Count a call that begins."""
        with self._lock:
            self._calls += 1

    def end_call(self) -> bool:
        """Count a call that ends; returns whether there was one."""
        with self._lock:
            if self._calls == 0:
                return False
            self._calls -= 1
            return True

    def track(self, reservation: Reservation | AsyncReservation) -> None:
        """Count a reservation until it is settled."""
        with self._lock:
            self._reservations.add(reservation)

    @property
    def in_flight(self) -> int:
        """The calls in progress."""
        with self._lock:
            return self._calls + sum(not (entry.settled or entry.expired) for entry in self._reservations)


class SwarmResources(Generic[L]):
    """The part of a swarm limiter that neither waits nor awaits."""

    def __init__(
        self,
        *,
        agent_id: str,
        settings: RecoverySettings,
        bus: str | Bus | None = None,
        namespace: str = "",
        secret: str | bytes | None = None,
        store: str | Store | None = None,
        lease: bool | float | Lease | None = None,
        clock: Clock | None = None,
        sync_timeout: float | timedelta = SYNC_TIMEOUT,
    ) -> None:
        """Keep buckets in memory, or share them in `store`."""
        subject_in(namespace, "")  # refuses an invalid one before anything is opened
        self._policy_prefix = f"swarm:{namespace}/" if namespace else POLICY_PREFIX
        self._resources: dict[str, Resource[L]] = {}
        self._listeners: list[Listener] = []
        self._lock = fork_safe(threading.RLock())  # one change of the set of resources at a time
        self._closed = False
        self.shared: bool = store is not None
        if lease is not None and store is None:
            raise ConfigError("a lease needs a shared store: pass its URL as store=", field="lease")
        self._clock = clock
        opened = OpenedStore.open("memory://" if store is None else store, clock=clock, lease=lease)
        self._store = GatedStore(opened.store, owns=opened.owned)
        self._store.recovery_of = self._recovery_of
        self.clock: Clock = clock or self._store.clock
        self._owns_bus = isinstance(bus, str)
        self._sync = BusSync(None if bus is None else seconds("sync_timeout", sync_timeout))
        self._bus = open_bus(bus, clock=clock) if isinstance(bus, str) else bus
        try:
            self._capacities = Capacities(
                agent_id,
                settings=settings,
                clock=self.clock,
                bus=self._bus,
                secret=secret,
                namespace=namespace,
                changed=self._apply_capacity,
                received=self._notify,
                synced=self._on_synced,
            )
        except ConfigError:
            if self._owns_bus and self._bus is not None:
                self._bus.close()
            self._store.close()
            raise
        self._presence = None if self._bus is None else Presence(self._bus, agent_id, secret, self._describe, namespace)

    def _open(self, policy: Policy) -> L:
        """Create the limiter of a resource."""
        raise NotImplementedError

    # ---- resources ---------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> Resource[L] | None:
        """Return a resource, after applying a recovery that is due; None if it is unknown."""
        resource = self._resources.get(name)
        if resource is not None and resource.due is not None and self.clock.steady() >= resource.due:
            self._apply_capacity(name)
        return resource

    def _require(self, name: str) -> Resource[L]:
        """Return a resource, or raise."""
        resource = self._find(name)
        if resource is None:
            raise self._missing_error(name)
        return resource

    def _missing_error(self, name: str) -> Closed | ResourceUnknown:
        if self._closed:
            return Closed("the limiter is closed")
        return ResourceUnknown(f"no capacity is set for {name!r}: call set_capacity({name!r}, 60, window=60) first")

    def _set(self, name: str, capacity: int, window: Window) -> Resource[L] | None:
        """Set, change or remove a resource; returns a removed one, whose limiter the caller closes."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"must be a non-empty string, not {name!r}", field="resource")
        if not isinstance(capacity, int) or isinstance(capacity, bool):
            raise ConfigError(f"must be an integer number of permits per window, not {capacity!r}", field="capacity")
        with self._lock:
            if self._closed:
                raise Closed("the limiter is closed")
            if capacity <= 0 or is_nothing(window):
                return self._remove(name)
            length = parse_period(window)
            resource = self._resources.get(name)
            if resource is not None and self._is_unchanged(resource, capacity, length):
                return None
            policy = self._policy(name, capacity, length)  # validates before anything changes
            self._capacities.set(name, capacity, length / SECOND)
            if resource is None:
                snapshot = self._capacities.snapshot(name)
                policy = self._policy(name, capacity if snapshot is None else snapshot.current, length)
                resource = self._resources[name] = Resource(name, policy, length, self._open(policy))
                resource.limiter.clock = RecoveringClock(
                    resource.limiter.clock, resource.next_step, lambda: self._apply_capacity(name)
                )
                if not self._sync.over:
                    share = self._capacities.settings.reduced(policy.limits[0].quota)
                    until = self.clock.steady() + round(self._sync.timeout * SECOND)
                    self._store.set_share(policy.name, share, until)
            resource.window, resource.original = length, capacity
        self._apply_capacity(name)
        return None

    def _is_unchanged(self, resource: Resource[L], capacity: int, window: int) -> bool:
        """Return whether a resource has these values. Reductions then stay, unless only `set_capacity` ends them."""
        recovers = self._capacities.settings.interval is not None
        return recovers and (resource.original, resource.window) == (capacity, window)

    def _remove(self, name: str) -> Resource[L] | None:
        resource = self._resources.pop(name, None)
        self._capacities.remove(name)
        if resource is not None:
            self._store.unfreeze(resource.policy.name)
            if not self.shared:  # in a shared store, others use the same state
                self._store.apply_one("reset", resource.policy, name, (0,))
        return resource

    def _policy(self, name: str, capacity: int, window: int) -> Policy:
        return _policy_of(self._policy_prefix + name, capacity, window, self.shared)

    # ---- joining -----------------------------------------------------------------------------------------------------

    def _on_synced(self) -> None:
        """Use the state of the bus, which was read: the shares end, and permits granted from them count."""
        with self._lock:
            granted = self._store.end_shares()
            self._sync.finish()
            early = [(each, granted.get(each.policy.name, 0)) for each in self._resources.values()]
        for resource, permits in early:
            if permits and not self.shared:  # a shared store counts them as used
                self._charge_early(resource, permits)

    def _charge_early(self, resource: Resource[L], permits: int) -> None:
        """Leave a reduced bucket as if it had been reduced before these permits were granted."""
        with resource.changing:
            quota = resource.policy.limits[0].quota
            excess = self._available(resource) - max(0, quota - permits)
            if quota < resource.original and excess > 0:
                self._store.inner.apply_one("acquire", resource.policy, resource.name, (excess,))

    def _after_join(self, timeout: float | None, started: int) -> float | None:
        """Return what is left of a timeout after waiting for the state of the bus."""
        left = self._sync.left_of(timeout, started)
        if self._sync.over and not self._sync.synced:
            self._store.end_shares()
        return left

    # ---- capacity ----------------------------------------------------------------------------------------------------

    def _apply_capacity(self, name: str) -> None:
        """Update a resource's limiter to its current capacity."""
        resource = self._resources.get(name)
        if resource is None:
            return
        with resource.changing:
            self._apply_missed_steps(resource)
            snapshot = self._capacities.snapshot(name)
            if snapshot is None:
                return
            if snapshot.frozen_until is None:
                self._store.unfreeze(resource.policy.name)
            else:
                self._store.freeze(resource.policy.name, snapshot.frozen_until)
            steady = self.clock.steady()
            if self.shared:
                snapshot = self._spread(resource, snapshot, steady)
            self._change(resource, snapshot.current, steady)
            self._pause(resource, snapshot.frozen_until)
            resource.due = snapshot.due
            resource.limiter.update(resource.policy)  # also wakes waiters

    def _spread(self, resource: Resource[L], snapshot: CapacitySnapshot, steady: int) -> CapacitySnapshot:
        """Return a capacity that grows back over what a freeze left empty of the window, so that calls are spread.

        If all agents called at once when a freeze ends, the delays of these calls would let more of them arrive within
        a window than were granted in one. Calls that start together start together again in each later window.
        """
        window = resource.window
        if snapshot.frozen_until is not None and snapshot.frozen_until != resource.paused_until:
            resource.paused_until = snapshot.frozen_until
            resource.spread_until = snapshot.frozen_until + min(window, snapshot.frozen_until - steady)
        left = resource.spread_until - max(steady, resource.paused_until)
        if left <= 0:
            return snapshot
        steps = ceil_div(left * SPREAD_STEPS, window)
        due = resource.spread_until - (steps - 1) * window // SPREAD_STEPS
        return snapshot._replace(
            current=max(1, snapshot.current * (SPREAD_STEPS + 1 - steps) // SPREAD_STEPS),
            due=due if snapshot.due is None else min(due, snapshot.due),
        )

    def _apply_missed_steps(self, resource: Resource[L]) -> None:
        """Apply missed recovery steps one by one: permits were refilled at the rate of each step."""
        now = self.clock.steady()
        while resource.due is not None and resource.due < now and not self.shared:
            snapshot = self._capacities.snapshot(resource.name, resource.due)
            if snapshot is None:
                return
            self._change(resource, snapshot.current, resource.due)
            resource.due = snapshot.due

    def _change(self, resource: Resource[L], capacity: int, instant: int) -> None:
        """Change a bucket so that the available permits stay, or are capped; none are added.

        Until that instant permits were refilled at the old rate; from then on the new rate applies.
        """
        old, new, key = resource.policy, self._policy(resource.name, capacity, resource.window), resource.name
        if new == old:
            return
        resource.policy = new
        if self.shared:
            return
        store, now = self._store.inner, self.clock.ns() // 1000 - (self.clock.steady() - instant)
        _settle(store, old, key, now)
        before = store.apply_one("peek", old, key, (0,), now).remaining
        gained = store.apply_one("peek", new, key, (0,), now).remaining - before
        if gained > 0:
            store.apply_one("acquire", new, key, (gained,), now)
        else:
            _settle(store, new, key, now)

    def _pause(self, resource: Resource[L], until: int | None) -> None:
        """Refill a bucket only after a freeze, or again: agents do not all start with full buckets at its end.

        The next permit is available at the end of the freeze, or when it would be without one: an agent that waits
        longer than the freeze loses nothing.
        """
        steady, key, policy = self.clock.steady(), resource.name, resource.policy
        end = steady if until is None else until
        if self.shared or end == resource.paused_until or max(end, resource.paused_until) <= steady:
            return
        store, now = self._store.inner, self.clock.ns() // 1000
        quota = policy.limits[0].quota
        available = store.apply_one("peek", policy, key, (0,), now).remaining
        if until is not None and self._capacities.settings.is_long(until - steady):
            # The rate is what is remembered; a burst of saved permits would be refused at a rate that is not.
            store.apply_one("acquire", policy, key, (available,), now)
            available = 0
        shortened = end < resource.paused_until  # then the bucket would refill only after the previous end
        is_refilling = available < quota and not shortened
        wait = store.apply_one("peek", policy, key, (available + 1,), now).retry if is_refilling else 0
        start = now + max(end - steady, wait) - (resource.window // quota if wait else 0)
        store.apply_one("reset", policy, key, (0,))
        store.apply_one("acquire", policy, key, (quota - available,), start)
        if available == quota:
            _settle(store, policy, key, start)
        resource.paused_until = end

    def _recovery_of(self, policy: str) -> tuple[tuple[int, ...], int] | None:
        """Return the capacity of a reduced resource after recovery, and the instant of its next step."""
        resource = self._resources.get(policy.removeprefix(self._policy_prefix))
        return None if resource is None or resource.due is None else ((resource.original,), resource.due)

    def _reduce(
        self, name: str, reason: str, retry_after: float | timedelta | str | None, began: float | None
    ) -> CapacityUpdate | None:
        wait = read_retry_after(retry_after, self.clock.ns() / 1e9)
        began = None if began is None else seconds("began", began)
        return None if self._closed else self._capacities.reduce(name, reason, wait, began)

    def _notify(self, update: CapacityUpdate) -> None:
        for listener in tuple(self._listeners):
            try:
                self._call(listener, update)
            except Exception:
                log.exception("a callback of on_capacity_change failed")

    def _call(self, listener: Listener, update: CapacityUpdate) -> None:
        listener(update)

    def _add_listener(self, callback: Listener) -> None:
        if not callable(callback):
            raise ConfigError(f"must be a function that takes a CapacityUpdate, not {callback!r}", field="callback")
        self._listeners.append(callback)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _capacity(self, resource: Resource[L], available: int) -> Capacity | None:
        snapshot = self._capacities.snapshot(resource.name)
        if snapshot is None:
            return None
        frozen = self._store.frozen_for(resource.policy.name)
        return Capacity(
            resource.name,
            0 if frozen else available,
            resource.policy.limits[0].quota,
            resource.window / SECOND,
            resource.in_flight,
            snapshot.original,
            frozen / SECOND,
        )

    def _available(self, resource: Resource[L]) -> int:
        """Read the available permits from a store in memory."""
        return self._store.apply_one("peek", resource.policy, resource.name, (0,)).remaining

    def _describe(self) -> list[Capacity]:
        """Return the state of all resources; without the available permits of shared ones, which need a store call."""
        found = []
        for name in list(self._resources):
            resource = self._find(name)
            if resource is not None:
                capacity = self._capacity(resource, 0 if self.shared else self._available(resource))
                found += [capacity] if capacity is not None else []
        return found

    def metrics(self) -> dict[str, int]:
        """Return counters of updates sent, applied and ignored (by reason), and the number of frozen resources."""
        return {**self._capacities.metrics(), "frozen": self._store.metrics()["frozen"]}

    def _close(self) -> list[Resource[L]]:
        """Refuse further calls; returns the resources whose limiters the caller closes."""
        with self._lock:
            if self._closed:
                raise Closed("the limiter is already closed")
            self._closed = True
            resources, self._resources = list(self._resources.values()), {}
        self._sync.close()
        self._capacities.close()
        if self._presence is not None:
            self._presence.close()
        if self._owns_bus and self._bus is not None:
            self._bus.close()
        return resources


class MemoryResources(SwarmResources[L]):
    """The resources of a limiter without a swarm. A reduction leaves 75 % and stays until the capacity is set again."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        """Start without resources."""
        super().__init__(agent_id="memory", settings=read_recovery_settings(0.75, recovery_interval=None), clock=clock)

    def _reduce(
        self, name: str, reason: str, retry_after: float | timedelta | str | None, began: float | None
    ) -> CapacityUpdate | None:
        update = super()._reduce(name, reason, retry_after, began)
        if update is not None:
            self._notify(update)  # there is no other agent to send it
        return update


class AgentResources(SwarmResources[L]):
    """The resources of one agent of a swarm."""

    def __init__(
        self,
        bus: str | Bus | None = None,
        *,
        agent_id: str | None = None,
        reduce_factor: float = 0.5,
        recovery_interval: float | timedelta = 30.0,
        recovery_factor: float = 1.1,
        max_recovery: bool = True,
        cooldown: float | timedelta = 0.0,
        recovery: Recovery = "gradual",
        namespace: str = "",
        secret: str | bytes | None = None,
        store: str | Store | None = None,
        lease: bool | float | Lease | None = None,
        clock: Clock | None = None,
        sync_timeout: float | timedelta = SYNC_TIMEOUT,
    ) -> None:
        """Join the swarm on `bus` (a Bus, or a URL: then the bus is closed with the limiter) as `agent_id`.

        By default, the agent is named after its host and process, with a random part.
        """
        check_swarm(bus, agent_id)
        settings = read_recovery_settings(
            reduce_factor,
            recovery_factor,
            recovery_interval,
            max_recovery=max_recovery,
            cooldown=cooldown,
            recovery=recovery,
        )
        super().__init__(
            agent_id=process_name() if agent_id is None else agent_id,
            settings=settings,
            bus=bus,
            namespace=namespace,
            secret=secret,
            store=store,
            lease=lease,
            clock=clock,
            sync_timeout=sync_timeout,
        )
        self._is_named_by_default = agent_id is None
        at_fork(child=self._join_after_fork)

    def _join_after_fork(self) -> None:
        """Join as another agent in a forked process, since an agent ignores its own messages."""
        if self._presence is None or self._closed:
            return
        if self._is_named_by_default:
            self._capacities.agent_id = process_name()
        self._presence.rejoin(self._capacities.agent_id)


@functools.lru_cache(4096)
def _policy_of(name: str, capacity: int, window: int, shared: bool) -> Policy:  # noqa: FBT001 - a part of the cache's key
    """Return the policy with this name: the same object for the same capacity, so that stores can cache it."""
    # A shared resource guarantees the capacity of all agents together in every window, not only on average.
    algorithm = "sliding_log" if shared else "token_bucket"
    limit = Limit(capacity, timedelta(microseconds=window), algorithm, name="capacity")
    return Policy(name, (limit,))


def _settle(store: Store, policy: Policy, key: str, now: int) -> None:
    """Write the state of a bucket at an instant, by this policy: take a permit and return it."""
    for difference in (1, -1):
        store.apply_one("adjust", policy, key, (difference,), now)
