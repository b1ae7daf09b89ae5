"""DelegatingStore: the base class of stores that wrap another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.stores._base import Store

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Hashable, Sequence

    from tidegate._policy import Key, Policy
    from tidegate._runtime.clock import Clock
    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask, LostCorrection, WaitQueueRefs
    from tidegate.stores._memory.group_shares import GroupOf
    from tidegate.stores._values import Collection, Value, Write


class DelegatingStore(Store):
    """Forwards everything to `inner`. A subclass overrides what it changes; all other traits are those of `inner`.

    Fast paths are not forwarded: they would bypass the `apply` of the subclass.
    """

    def __init__(self, inner: Store, clock: Clock | None = None) -> None:
        """Wrap a store; `clock` replaces its clock."""
        super().__init__(clock or inner.clock)
        self.wait_queues: WaitQueueRefs = inner.wait_queues
        self.inner = inner
        self.instant: bool = inner.instant  # type: ignore[misc]  # here and below: a trait of the wrapped store
        self.decides_alternatives: bool = inner.decides_alternatives  # type: ignore[misc]  # a trait of this object, as of the store that it wraps
        self.keeps_values: bool = inner.keeps_values  # type: ignore[misc]  # a trait of this object, as of the store that it wraps
        self.has_fallback: bool = inner.has_fallback  # type: ignore[misc]  # a trait of this object, as of the store that it wraps

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply the verb to all keys together."""
        return self.inner.apply(verb, asks, now, at, writes) if writes else self.inner.apply(verb, asks, now, at)

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key."""
        return self.apply(verb, ((policy, key, costs),), now, at)[0]

    async def apply_async(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply without blocking the event loop."""
        if writes:
            return await self.inner.apply_async(verb, asks, now, at, writes)
        return await self.inner.apply_async(verb, asks, now, at)

    def ask_store(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply, but never decide without the store."""
        return self.inner.ask_store(verb, asks, now, at)

    async def ask_store_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply, but never decide without the store."""
        return await self.inner.ask_store_async(verb, asks, now, at)

    def get_value(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value."""
        return self.inner.get_value(collection, name, now)

    async def get_value_async(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value, without blocking the event loop."""
        return await self.inner.get_value_async(collection, name, now)

    def list_values(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection."""
        return self.inner.list_values(collection, now)

    async def list_values_async(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection, without blocking the event loop."""
        return await self.inner.list_values_async(collection, now)

    def key_slots(self, asks: Sequence[Ask]) -> Sequence[int]:
        """Return the slot of the key of each ask."""
        return self.inner.key_slots(asks)

    async def wait_for_shares(self, asks: Sequence[Ask]) -> bool:
        """Wait for permits that the wrapped store takes in advance."""
        return await self.inner.wait_for_shares(asks)

    def shard(self, asks: Sequence[Ask], values: Sequence[tuple[Collection, str]] = ()) -> Hashable:
        """Return the part of the wrapped store that has these keys."""
        return self.inner.shard(asks, values)

    @property
    def unavailable(self) -> bool:
        """Whether calls are decided without the store now."""
        return self.inner.unavailable

    def log_outages(self, logger: logging.Logger) -> None:
        """Log outages of the wrapped store with this logger."""
        super().log_outages(logger)
        self.inner.log_outages(logger)

    def handle_lost_corrections(self, handle: LostCorrection) -> None:
        """Call `handle` with corrections of cancelled tasks that the wrapped store has not answered."""
        super().handle_lost_corrections(handle)
        self.inner.handle_lost_corrections(handle)

    def report_outages(self, report: Callable[[str | None], object]) -> None:
        """Call `report` in place of logging."""
        self.inner.report_outages(report)

    def limit_groups(self, group_of: GroupOf) -> None:
        """Limit the share of each group of keys of the wrapped store."""
        self.inner.limit_groups(group_of)

    def limit_entries(self, max_entries: int) -> None:
        """Bound the number of keys of the wrapped store."""
        self.inner.limit_entries(max_entries)

    def clear(self) -> bool:
        """Forget the usage of all keys, if the wrapped store serves only this process."""
        return self.inner.clear()

    def outdated(self, *, drop: bool = False) -> dict[str, bool]:
        """Return, or remove, what only older versions use in the wrapped store."""
        return self.inner.outdated(drop=drop)

    def metrics(self) -> dict[str, int]:
        """Return the counters of the wrapped store."""
        return self.inner.metrics()

    def close(self) -> None:
        """Close the wrapped store."""
        self.inner.close()

    async def close_async(self) -> None:
        """Close the wrapped store, without blocking the event loop."""
        await self.inner.close_async()
