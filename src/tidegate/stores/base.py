"""What a Store is: one method that applies a transition of the core at keys, atomically."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol
from weakref import WeakSet

from tidegate.clock import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.decision import Decision
    from tidegate.policy import Key, Policy

    Ask = tuple[Policy, Key, tuple[int, ...]]


class Wakes(Protocol):
    """Whoever waits for keys of a store."""

    def wake(self, key: Key) -> None:
        """Permits of the key may have become free."""


class Store(ABC):
    """Keeps the states of keys and decides on them.

    A store has one job: `apply` a verb of `tidegate.core.decision` (`acquire`, `peek`, `hold`, `adjust`, `reset`) to
    the states of the keys it is asked about, as if nothing else happened meanwhile. All asks of one call are decided
    together: if one limit says no, nothing is charged anywhere.
    """

    instant: ClassVar[bool] = False  # whether `apply` answers without waiting for anything, so that a task may call it

    def __init__(self, clock: Clock | None = None) -> None:
        """Tell the time by the given clock (the machine's by default)."""
        self.clock: Clock = clock or SystemClock()
        self.waited_on: WeakSet[Wakes] = WeakSet()  # the lines of every limiter here: permits come back to all of them

    @abstractmethod
    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        """Apply the verb to every (policy, key, costs) together and answer each.

        `now` is the instant to decide at, in microseconds; None, the usual case, means by the store's own clock, read
        while no one else can decide. `at` tells `adjust` when the charge that it corrects was made.
        """

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key: the common case, which a store may shorten."""
        return self.apply(verb, ((policy, key, costs),), now, at)[0]

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply without blocking the event loop."""
        return self.apply(verb, asks, now, at)

    def metrics(self) -> dict[str, int]:
        """Count what an operator may want to watch."""
        return {}

    def close(self) -> None:  # noqa: B027 - most stores hold nothing open
        """Let go of what the store holds open."""

    async def close_async(self) -> None:
        """Let go of what the store holds open, without blocking the event loop."""
        self.close()
