"""How a limiter keeps to a capacity that changes: nothing while frozen, and waits that notice a recovery.

A limiter whose store is a GatedStore answers a frozen policy with a denial that says how long; waiters wait for it in
line like for permits. A limiter whose clock is a RecoveringClock looks for a recovery that is due while its waiters
sleep, so that nothing needs a thread of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.core.algorithms import NEVER
from tidegate.core.decision import Decision
from tidegate.stores.base import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.clock import Clock, Signal
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Ask

ASKING = frozenset(("acquire", "hold", "peek"))


class GatedStore(Store):
    """Passes everything on to another store, except what is asked of a policy that is shut.

    `shut(name, until)` shuts the policy of that name until an instant of the clock's steady time. Corrections (refunds,
    settlements) pass at any time.

    `later(name)` may tell of a policy of one limit how much that will hold once recovered, and the instant at which it
    will hold more: a cost that is too large only for now is not refused for ever, but told to ask again then.
    """

    def __init__(self, inner: Store, *, owns: bool = False) -> None:
        """Stand before `inner`; close it with this store if it `owns` it."""
        super().__init__(inner.clock)
        self.wait_queues = inner.wait_queues
        self.inner = inner
        self.instant = inner.instant  # type: ignore[misc]  # as the other one does
        self._owns = owns
        self._shut: dict[str, int] = {}
        self.later: Callable[[str], tuple[int, int] | None] = lambda _name: None

    def shut(self, name: str, until: int) -> None:
        """Answer no for a policy until then."""
        self._shut[name] = until

    def open(self, name: str) -> None:
        """Ask for the policy again."""
        self._shut.pop(name, None)

    def frozen(self, name: str) -> int:
        """Tell for how many microseconds yet a policy is shut."""
        until = self._shut.get(name)
        if until is None:
            return 0
        left = until - self.clock.steady()
        if left <= 0:
            self._shut.pop(name, None)
        return max(0, left)

    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        """Apply, unless one of the policies is shut."""
        wait = self._wait(verb, asks) if self._shut else 0
        if wait:
            return self._denied(asks, wait, now)
        return self._patiently(self.inner.apply(verb, asks, now, at), asks)

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply to one key, unless its policy is shut."""
        if self._shut:
            asks = ((policy, key, costs),)
            wait = self._wait(verb, asks)
            if wait:
                return self._denied(asks, wait, now)[0]
        decision = self.inner.apply_one(verb, policy, key, costs, now, at)
        return decision if decision[0] else self._patient(decision, policy, key, costs)

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply without blocking the event loop, unless one of the policies is shut."""
        wait = self._wait(verb, asks) if self._shut else 0
        if wait:
            return self._denied(asks, wait, now)
        return self._patiently(await self.inner.apply_async(verb, asks, now, at), asks)

    def _patiently(self, decisions: list[Decision], asks: Sequence[Ask]) -> list[Decision]:
        return [self._patient(decision, *ask) for decision, ask in zip(decisions, asks, strict=True)]

    def _patient(self, decision: Decision, policy: Policy, _key: Key, costs: tuple[int, ...]) -> Decision:
        """Let a cost wait for a recovery that will make room for it."""
        if decision[0] or decision.retry != NEVER:
            return decision
        told = self.later(policy.name)
        if told is None or max(costs) > told[0]:
            return decision
        wait = max(1, told[1] - self.clock.steady())
        views = tuple((left, wait if retry == NEVER else retry, reset) for left, retry, reset in decision.views)
        return Decision((False, decision.at, decision[2], views, None))

    def _wait(self, verb: str, asks: Sequence[Ask]) -> int:
        return max(self.frozen(policy.name) for policy, _, _ in asks) if verb in ASKING else 0

    def _denied(self, asks: Sequence[Ask], wait: int, now: int | None) -> list[Decision]:
        instant = self.clock.ns() // 1000 if now is None else now
        return [
            Decision((False, instant, policy.limits, tuple(_view(*pair, wait) for pair in _pairs(policy, costs)), None))
            for policy, _, costs in asks
        ]

    def metrics(self) -> dict[str, int]:
        """Count what the other store counts, and the policies that are shut."""
        return {**self.inner.metrics(), "frozen": len(self._shut)}

    def close(self) -> None:
        """Close the other store, if it is ours."""
        if self._owns:
            self.inner.close()

    async def close_async(self) -> None:
        """Close the other store, if it is ours."""
        if self._owns:
            await self.inner.close_async()


def _pairs(policy: Policy, costs: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(limit.burst, cost) for limit, cost in zip(policy.limits, costs, strict=True)]


def _view(burst: int, cost: int, wait: int) -> tuple[int, int, int]:
    return 0, NEVER if cost > burst else wait, wait


class RecoveringClock:
    """A clock whose waits end early where a recovery is due, and have it done.

    `due()` tells the instant of steady time at which `recover()` is to be called next, or None.
    """

    def __init__(self, clock: Clock, due: Callable[[], int | None], recover: Callable[[], object]) -> None:
        """Tell the time of `clock`."""
        self._clock = clock
        self._due = due
        self._recover = recover
        self.ns = clock.ns
        self.steady = clock.steady

    def wait(self, signal: Signal, until: int | None) -> None:
        """Block this thread until the signal is set or steady time reaches `until`."""
        while not signal.is_set() and (due := self._before(until)) is not None:
            self._clock.wait(signal, due)
            self._look(due)
        if not signal.is_set():
            self._clock.wait(signal, until)

    async def wait_async(self, signal: Signal, until: int | None) -> None:
        """Suspend this task until the signal is set or steady time reaches `until`."""
        while not signal.is_set() and (due := self._before(until)) is not None:
            await self._clock.wait_async(signal, due)
            self._look(due)
        if not signal.is_set():
            await self._clock.wait_async(signal, until)

    def _before(self, until: int | None) -> int | None:
        due = self._due()
        return due if due is not None and (until is None or due <= until) else None

    def _look(self, due: int) -> None:
        if self.steady() >= due:
            self._recover()
