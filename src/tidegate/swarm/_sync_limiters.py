"""MemoryLimiter and SwarmLimiter, for threads."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from tidegate._limiter.limiter import Limiter, seconds
from tidegate.errors import Closed
from tidegate.swarm._limited_calls import LimitedCall
from tidegate.swarm._resources import AgentResources, MemoryResources, SwarmResources

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from tidegate._limiter.reservation import Reservation
    from tidegate._policy import Policy
    from tidegate.adaptive import CapacityUpdate, Listener
    from tidegate.core._decision import Decision
    from tidegate.swarm._arguments import Window
    from tidegate.swarm._capacity import Capacity
    from tidegate.swarm._resources import Resource


class _Limiter(SwarmResources[Limiter]):
    """The operations, for threads."""

    def _open(self, policy: Policy) -> Limiter:
        return Limiter(policy, store=self._store, clock=self._clock)

    def set_capacity(self, resource: str, capacity: int, window: Window) -> None:
        """Allow `capacity` permits per `window` (seconds, a timedelta, or a string such as '1m').

        A new resource starts full. For a known one, the available permits stay or are capped, and reductions end. A
        capacity or window of 0 removes the resource. Raises Closed after `close`, and changes nothing then.
        """
        removed = self._set(resource, capacity, window)
        if removed is not None:
            removed.limiter.close()

    def acquire(self, resource: str, *, cost: int = 1, timeout: float | None = None, priority: float = 0) -> Decision:
        """Wait for a permit and take it; call `release` when the work is done.

        Raises Denied after `timeout` seconds, ResourceUnknown if no capacity is set, Closed if the limiter is closed.
        """
        entry = self._require(resource)
        if not self._sync.over:
            timeout = self._join(timeout)
        try:
            decision = entry.limiter.acquire(resource, cost, timeout, priority)
        except Closed:
            raise self._missing_error(resource) from None
        entry.begin_call()
        return decision

    def wait_until_synced(self, timeout: float | None = None) -> bool:
        """Wait until the state of the bus was read, at most `timeout` seconds; returns whether it was.

        From then on, this agent knows the reductions that other agents announced before it joined. True at once without
        a bus. Raises Closed if the limiter is closed.
        """
        synced = self._sync.wait(None if timeout is None else seconds("timeout", timeout))
        if self._closed:
            raise Closed("the limiter is closed")
        return synced

    def _join(self, timeout: float | None) -> float | None:
        """Wait for the state of the bus; returns what is left of the timeout of a call."""
        timeout = None if timeout is None else seconds("timeout", timeout)
        started = self._sync.started()
        self._sync.wait(self._sync.bounded(timeout))
        return self._after_join(timeout, started)

    def try_acquire(self, resource: str, *, cost: int = 1) -> bool:
        """Take a permit if one is free; returns whether it did, never waits."""
        entry = self._find(resource)
        if entry is None or not self._try(entry, cost):
            return False
        entry.begin_call()
        return True

    @staticmethod
    def _try(entry: Resource[Limiter], cost: int) -> bool:
        try:
            return entry.limiter.try_acquire(entry.name, cost).allowed
        except Closed:
            return False

    def release(self, resource: str, *, cost: int = 1, return_token: bool = True) -> None:
        """End a call and return its permit to the bucket.

        Always returning permits limits how many calls run concurrently, not how many are made per window: pass
        `return_token=False` to end the call and refill the permit over time.
        """
        entry = self._find(resource)
        if entry is not None and entry.end_call() and return_token:
            with suppress(Closed):  # the resource was removed at the same time
                entry.limiter.refund(resource, cost)

    def reserve(
        self, resource: str, *, cost: int = 1, ttl: float = 60.0, timeout: float | None = 0.0, priority: float = 0
    ) -> Reservation:
        """Charge an estimate now and settle it later: `commit` the actual cost, or `cancel`; see `Limiter.reserve`."""
        entry = self._require(resource)
        if not self._sync.over and timeout != 0:
            timeout = self._join(timeout)
        try:
            reservation = entry.limiter.reserve(resource, cost, ttl, timeout, priority)
        except Closed:
            raise self._missing_error(resource) from None
        entry.track(reservation)
        return reservation

    def limited(
        self,
        resource: str | Callable[..., str],
        *,
        cost: int | Callable[..., int] = 1,
        timeout: float | None = None,
        return_token: bool = False,
        announce: bool = True,
    ) -> LimitedCall:
        """Wait for a permit before a block (`with`) or before each call of a function (as a decorator).

        An exception with status 429 (or 503 with Retry-After), as HTTP and AI clients raise, is announced to the swarm
        unless `announce` is False.
        """
        return LimitedCall(self, resource, timeout, cost, return_token=return_token, announce=announce)

    def announce_reduced(
        self,
        resource: str,
        reason: str = "",
        *,
        retry_after: float | timedelta | str | None = None,
        began: float | None = None,
    ) -> CapacityUpdate | None:
        """Reduce a resource for all agents. With `retry_after`, no agent makes calls for that time.

        `retry_after` is a number of seconds, a timedelta, or the string of a Retry-After field (seconds or a date).
        `began` is the `time.monotonic()` at which the refused call began. If that was before the latest reduction took
        effect here, the refusal has the same cause and reduces no further. Returns None if it did not reduce, and
        after `close`.
        """
        return self._reduce(resource, reason, retry_after, began)

    def get_capacity(self, resource: str) -> Capacity | None:
        """Return the state of a resource; None if no capacity is set."""
        entry = self._find(resource)
        if entry is None:
            return None
        try:
            usage = entry.limiter.usage(resource)
        except Closed:
            return None
        return self._capacity(entry, usage["capacity"].remaining)

    def on_capacity_change(self, callback: Listener) -> None:
        """Call a function with each CapacityUpdate of another agent that took effect here. Keep it short."""
        self._add_listener(callback)

    def close(self) -> None:
        """Refuse further calls and wake waiters with Closed. A second call raises Closed."""
        for resource in self._close():
            resource.limiter.close()
        self._store.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close, unless it is already closed."""
        if not self._closed:
            self.close()


class MemoryLimiter(_Limiter, MemoryResources[Limiter]):
    """Token buckets in this process, without a swarm. A reduction leaves 75 % and stays until set_capacity."""


class SwarmLimiter(_Limiter, AgentResources[Limiter]):
    """Token buckets of one agent, whose capacities are reduced and recover together with those of the other agents.

    A 429 that any agent announces multiplies the capacity of all agents by `reduce_factor`; every `recovery_interval`
    seconds it is multiplied by `recovery_factor`, up to the original (`max_recovery=False` lets the last step exceed
    it). Announcements of this agent within `cooldown` seconds of a reduction are treated as duplicates. With
    `recovery="remember"`, the capacity returns quickly to just below where calls were refused, and then grows slowly.
    Agents with different namespaces do not affect each other. With a `secret`, only messages signed with it are
    accepted.

    By default each agent has its own bucket. With a `store` (and usually `lease=True`) the agents share one, and
    together never exceed the capacity in any window.
    """

    def __repr__(self) -> str:
        """Show the agent and its resources."""
        names: list[Any] = list(self._resources)
        return f"<{type(self).__name__} {self._capacities.agent_id!r} {names}>"
