"""What a service asks of its store beside decisions: whether others share its values, and its time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._policy import Policy
from tidegate.core import Limit
from tidegate.core._decision import LocalDecision
from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from tidegate.stores import Store

CLOCK_POLICY: Final = Policy("tidegate._runtime.clock", (Limit(1, "1s", "fixed_window"),), on_store_error="allow")


def is_shared(store: Store) -> bool:
    """Return whether a store keeps values that other processes, or this one after a restart, can read."""
    return store.keeps_values and not store.instant


async def read_time(store: Store) -> int:
    """Return the time by the clock of the store, in microseconds since 1970; raises StoreUnavailable."""
    decision = (await store.apply_async("peek", ((CLOCK_POLICY, "clock", (0,)),)))[0]
    if isinstance(decision, LocalDecision):
        raise StoreUnavailable("could not read the time: the store is unavailable; try again later")
    return decision.at
