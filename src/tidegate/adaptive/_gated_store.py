"""How a limiter applies a capacity that changes: it denies everything while frozen, and waiters notice a recovery.

A limiter whose store is a GatedStore denies a frozen policy, with the remaining time; waiters stay in the queue as for
permits. A limiter whose clock is a RecoveringClock applies a recovery that is due while its waiters sleep, so no extra
thread is needed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidegate._runtime.fork import fork_safe
from tidegate.core._algorithms import NEVER, View
from tidegate.core._decision import VERBS, Decision
from tidegate.stores._delegating import DelegatingStore
from tidegate.stores._opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._policy import Cost, Key, Policy
    from tidegate._runtime.clock import Clock, Signal
    from tidegate.stores._base import Ask, Store, T, TryAcquire
    from tidegate.stores._values import Write


@dataclass(slots=True)
class Share:
    """The permits that a policy may still grant until an instant, and how many it has granted."""

    left: int
    until: int
    granted: int = 0


class GatedStore(DelegatingStore):
    """Forwards everything to another store, except requests for permits of a frozen policy.

    `freeze(name, until)` freezes the policy of that name until an instant of the clock's steady time. Corrections
    (refunds, settlements) are always forwarded.

    `set_share(name, permits, until)` grants only that many permits of a policy until that instant, or `end_shares`.

    `recovery_of(name)` may return, for a policy that was reduced, the maximum of each limit after recovery and the
    instant of its next recovery step: a cost that is too large only for now gets a retry time instead of a permanent
    denial.
    """

    def __init__(self, inner: Store, *, owns: bool = False) -> None:
        """Wrap `inner`; close it with this store if it `owns` it."""
        super().__init__(inner)
        self._opened = OpenedStore(inner, owns)
        self._frozen: dict[str, int] = {}
        self._shares: dict[str, Share] = {}
        self._sharing = fork_safe(threading.Lock())
        self.recovery_of: Callable[[str], tuple[tuple[int, ...], int] | None] = lambda _name: None

    def freeze(self, name: str, until: int) -> None:
        """Deny a policy until an instant."""
        self._frozen[name] = until

    def unfreeze(self, name: str) -> None:
        """Stop denying a policy."""
        self._frozen.pop(name, None)

    def frozen_for(self, name: str) -> int:
        """Return for how many more microseconds a policy is frozen."""
        until = self._frozen.get(name)
        if until is None:
            return 0
        left = until - self.clock.steady()
        if left <= 0:
            self._frozen.pop(name, None)
        return max(0, left)

    def set_share(self, name: str, permits: int, until: int) -> None:
        """Grant at most this many permits of a policy until an instant."""
        with self._sharing:
            self._shares[name] = Share(permits, until)

    def end_shares(self) -> dict[str, int]:
        """Grant permits of all policies again; returns how many were granted of each."""
        with self._sharing:
            granted = {name: share.granted for name, share in self._shares.items()}
            self._shares.clear()
        return granted

    def _take(self, verb: str, asks: Sequence[Ask]) -> int:
        """Take the costs from the shares of their policies; returns the wait in microseconds if one does not fit."""
        if not VERBS[verb].charges:
            return 0
        now = self.clock.steady()
        with self._sharing:
            for name in [name for name, share in self._shares.items() if share.until <= now]:
                del self._shares[name]
            found = [(self._shares.get(policy.name), sum(costs)) for policy, _, costs in asks]
            active = [(share, cost) for share, cost in found if share is not None]
            for share, cost in active:
                if cost > share.left:
                    return share.until - now
            for share, cost in active:
                share.left -= cost
                share.granted += cost
        return 0

    def _return_denied(self, verb: str, asks: Sequence[Ask], decisions: Sequence[Decision]) -> None:
        """Return the costs of denied asks to the shares of their policies."""
        if not VERBS[verb].charges:
            return
        with self._sharing:
            for (policy, _, costs), decision in zip(asks, decisions, strict=True):
                share = self._shares.get(policy.name)
                if share is not None and not decision.allowed:
                    share.left += sum(costs)
                    share.granted -= sum(costs)

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply, unless one of the policies is frozen."""
        wait = self._gate(verb, asks)
        if wait:
            return self._denied(asks, wait, now)
        decisions = super().apply(verb, asks, now, at, writes)
        if self._shares:
            self._return_denied(verb, asks, decisions)
        return self._with_retry_times(decisions, asks)

    def _gate(self, verb: str, asks: Sequence[Ask]) -> int:
        """Return for how many microseconds the asks are denied: a policy is frozen, or its share is used up."""
        wait = self._wait(verb, asks) if self._frozen else 0
        return wait or (self._take(verb, asks) if self._shares else 0)

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply to one key, unless its policy is frozen."""
        if self._frozen or self._shares:
            return self.apply(verb, ((policy, key, costs),), now, at)[0]
        decision = self.inner.apply_one(verb, policy, key, costs, now, at)
        return decision if decision[0] else self.with_retry_time(decision, policy, key, costs)

    def specialize(self, policy: Policy, try_acquire: TryAcquire[T]) -> TryAcquire[T]:
        """Specialize it as the wrapped store does; `try_acquire` decides while a policy is frozen or has a share.

        It also decides on a cost that may fit after recovery.
        """
        specialized = self.inner.specialize(policy, try_acquire)
        if specialized is try_acquire:
            return try_acquire
        frozen, shares = self._frozen, self._shares

        def try_gated(key: Key, cost: Cost = 1) -> Decision | T:
            if frozen or shares:
                return try_acquire(key, cost)
            decision = specialized(key, cost)
            if not isinstance(decision, Decision) or decision[0] or decision.retry != NEVER:
                return decision
            return try_acquire(key, cost)

        return try_gated

    async def apply_async(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply without blocking the event loop, unless one of the policies is frozen."""
        wait = self._gate(verb, asks)
        if wait:
            return self._denied(asks, wait, now)
        decisions = await super().apply_async(verb, asks, now, at, writes)
        if self._shares:
            self._return_denied(verb, asks, decisions)
        return self._with_retry_times(decisions, asks)

    def _with_retry_times(self, decisions: list[Decision], asks: Sequence[Ask]) -> list[Decision]:
        return [self.with_retry_time(decision, *ask) for decision, ask in zip(decisions, asks, strict=True)]

    def with_retry_time(self, decision: Decision, policy: Policy, _key: Key, costs: tuple[int, ...]) -> Decision:
        """Replace a permanent denial with a retry time if the cost will fit after recovery."""
        if decision.within_limits or decision.retry != NEVER:
            return decision
        recovery = self.recovery_of(policy.name)
        if recovery is None or any(cost > most for cost, most in zip(costs, recovery[0], strict=False)):
            return decision
        return retry_after_recovery(decision, max(1, recovery[1] - self.clock.steady()))

    def _wait(self, verb: str, asks: Sequence[Ask]) -> int:
        return max((self.frozen_for(policy.name) for policy, _, _ in asks), default=0) if VERBS[verb].asks else 0

    def _denied(self, asks: Sequence[Ask], wait: int, now: int | None) -> list[Decision]:
        instant = self.clock.ns() // 1000 if now is None else now
        return [deny_paused(policy, costs, wait, instant) for policy, _, costs in asks]

    def metrics(self) -> dict[str, int]:
        """Return the counters of the wrapped store, and the number of frozen policies."""
        return {**self.inner.metrics(), "frozen": len(self._frozen)}

    def close(self) -> None:
        """Close the wrapped store, if this store owns it."""
        self._opened.close()

    async def close_async(self) -> None:
        """Close the wrapped store, if this store owns it."""
        await self._opened.close_async()


def deny_paused(policy: Policy, costs: Sequence[int], wait: int, instant: int) -> Decision:
    """Return the denial of a policy that is paused for `wait` microseconds."""
    pairs = zip(policy.limits, costs, strict=True)
    views = [View((0, NEVER if cost > limit.burst else wait, wait)) for limit, cost in pairs]
    return Decision.of_views(instant, policy.limits, views, within_limits=False)


def retry_after_recovery(denied: Decision, wait: int) -> Decision:
    """Return a permanent denial as one that may end after `wait` microseconds, when a capacity has recovered."""
    views = tuple(View((left, wait if retry == NEVER else retry, reset)) for left, retry, reset in denied.views)
    return type(denied).of_views(denied.at, denied.policy_limits, views, within_limits=False)


class RecoveringClock:
    """A clock whose waits end early when a recovery is due, and apply it.

    `due()` returns the instant of steady time at which `recover()` is called next, or None.
    """

    def __init__(self, clock: Clock, due: Callable[[], int | None], recover: Callable[[], object]) -> None:
        """Wrap `clock`."""
        self._clock = clock
        self._due = due
        self._recover = recover
        self.ns: Callable[[], int] = clock.ns
        self.steady: Callable[[], int] = clock.steady

    def wait(self, signal: Signal, until: int | None) -> None:
        """Block this thread until the signal is set or steady time reaches `until`."""
        while not signal.is_set() and (due := self._due_before(until)) is not None:
            self._clock.wait(signal, due)
            self._recover_if_due(due)
        if not signal.is_set():
            self._clock.wait(signal, until)

    async def wait_async(self, signal: Signal, until: int | None) -> None:
        """Suspend this task until the signal is set or steady time reaches `until`."""
        while not signal.is_set() and (due := self._due_before(until)) is not None:
            await self._clock.wait_async(signal, due)
            self._recover_if_due(due)
        if not signal.is_set():
            await self._clock.wait_async(signal, until)

    def _due_before(self, until: int | None) -> int | None:
        due = self._due()
        return due if due is not None and (until is None or due <= until) else None

    def _recover_if_due(self, due: int) -> None:
        if self.steady() >= due:
            self._recover()
