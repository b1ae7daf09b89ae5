"""What a Store is: one method that applies a transition of the core at keys, atomically."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol
from weakref import WeakSet

from tidegate.clock import Clock, SystemClock
from tidegate.core.bounds import MAX_INTEGER
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.decision import Decision
    from tidegate.policy import Key, Policy

    Ask = tuple[Policy, Key, tuple[int, ...]]


class WaitQueue(Protocol):
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
        self.wait_queues: WeakSet[WaitQueue] = (
            WeakSet()
        )  # the lines of every limiter here: permits come back to all of them

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
        """Apply without blocking the event loop.

        A call whose task is cancelled is charged nothing in the end, and what corrects or resets is done all the same:
        see `tidegate.stores.cancellation`.
        """
        return self.apply(verb, asks, now, at)

    def wake(self, asks: Sequence[Ask]) -> None:
        """Let whoever waits for these keys ask again: permits may have become free."""
        for lines in tuple(self.wait_queues):
            for _, key, _ in asks:
                lines.wake(key)

    def metrics(self) -> dict[str, int]:
        """Count what an operator may want to watch."""
        return {}

    def close(self) -> None:  # noqa: B027 - most stores hold nothing open
        """Let go of what the store holds open."""

    async def close_async(self) -> None:
        """Let go of what the store holds open, without blocking the event loop."""
        self.close()


def merge(asks: Sequence[Ask]) -> tuple[list[int], Sequence[Ask]]:
    """Let a key that is asked for twice pay both costs at once; return the place of each ask among the merged ones."""
    places: dict[tuple[str, Key], int] = {}
    merged: list[Ask] = []
    for policy, key, costs in asks:
        place = places.setdefault((policy.name, key), len(merged))
        if place == len(merged):
            merged.append((policy, key, costs))
            continue
        first, _, before = merged[place]
        if first is not policy and first != policy:
            raise ConfigError(f"two different policies are called {policy.name!r} in one call", field="policy")
        merged[place] = (
            policy,
            key,
            tuple(min(MAX_INTEGER, old + new) for old, new in zip(before, costs, strict=True)),
        )
    return [places[policy.name, key] for policy, key, _ in asks], merged
