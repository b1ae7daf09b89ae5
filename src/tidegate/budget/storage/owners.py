"""Lists the processes that have open batches in a shared store, so that others notice when one of them has ended.

A Store has one method, which decides, so every entry here is the count of a window (as in `stores/outage/peers`):

place        an entry for one process; each budget has MAX_OWNERS. It counts generations: an odd number means that a
             process uses the place. An Owner is a place and its generation, so no two processes are the same owner.
transition   a window of one permit for each generation, acquired together with the next generation of the place. So
             only one process can start or end a generation, even if several try at the same time.
heartbeat    a log of the last LEASE_SECONDS. The owner adds an entry several times per lease; a log without an entry
             means that the owner has ended, or could not reach the store for that time.
slots        how many slots the owner uses. Each open batch has one (see `listed_batches`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.limit import Limit
from tidegate.policy import Policy

if TYPE_CHECKING:
    from tidegate.flow import Flow
    from tidegate.policy import Key
    from tidegate.stores.base import Ask

LEASE_SECONDS: Final = 30.0  # seconds without a heartbeat after which an owner counts as ended
MAX_OWNERS: Final = 64  # of one budget; batches of further processes are not listed
MAX_COUNT: Final = 2**52
MAX_AGE: Final = "3650d"  # of a place
CLAIM_AGE: Final = "1d"  # of a transition or claim: far longer than a process may take between reading and claiming

PLACES: Final = Policy("tidegate.budget.places", (Limit(MAX_COUNT, MAX_AGE, "fixed_window", name="generation"),))
CLAIMS: Final = Policy("tidegate.budget.claims", (Limit(1, CLAIM_AGE, "fixed_window", name="claimed"),))
SLOTS: Final = Policy("tidegate.budget.slots", (Limit(MAX_COUNT, MAX_AGE, "fixed_window", name="slots"),))


class StoreStep(NamedTuple):
    """A call of the store: the verb, the asks, and for corrections the instant of the charge."""

    verb: str
    asks: tuple[Ask, ...]
    at: int | None = None
    has_fallback: bool = False  # whether the guarded store may decide it without the store


class Owner(NamedTuple):
    """A process with open batches: its budget, its place, and the generation of that place."""

    budget: str
    place: int
    generation: int

    def key(self, *parts: object) -> Key:
        """Return the key of an entry of this owner."""
        return (self.budget, str(self.place), str(self.generation), *map(str, parts))


class Owners:
    """The owners of one budget. Every method is a flow of StoreSteps."""

    def __init__(self, budget: str, lease: float) -> None:
        """List the owners of the budget with this name; `lease` is in seconds."""
        self._budget = budget
        # A heartbeat stays in the log for one lease.
        log = Limit(MAX_COUNT, f"{round(lease * 1000)}ms", "sliding_log", name="heartbeats")
        self._heartbeats = Policy("tidegate.budget.heartbeats", (log,))

    def register_flow(self, slots: int) -> Flow[StoreStep, Owner | None]:
        """Take a free place, with this many slots; returns None if there is none."""
        generations = yield from self._generations_flow()
        for place, generation in enumerate(generations):
            if generation % 2:
                continue
            owner = Owner(self._budget, place, generation + 1)
            further = (SLOTS, owner.key(), (slots,)), (self._heartbeats, owner.key(), (1,))
            if (yield from self._advance_flow(place, generation, *further)):
                return owner
        return None

    def heartbeat_flow(self, owner: Owner) -> Flow[StoreStep, bool]:
        """Add a heartbeat; returns whether the owner still has its place. It has not if others treated it as ended."""
        yield StoreStep("acquire", ((self._heartbeats, owner.key(), (1,)),))
        [place] = yield StoreStep("peek", ((PLACES, self._place(owner.place), (0,)),))
        return bool(place.used[0] == owner.generation)

    def find_all_flow(self) -> Flow[StoreStep, list[Owner]]:
        """Return the owners that have a place."""
        generations = yield from self._generations_flow()
        return [
            Owner(self._budget, place, generation) for place, generation in enumerate(generations) if generation % 2
        ]

    def find_ended_flow(self) -> Flow[StoreStep, list[Owner]]:
        """Return the owners that have a place and no heartbeat."""
        owners = yield from self.find_all_flow()
        if not owners:
            return []
        logs = yield StoreStep("peek", tuple((self._heartbeats, owner.key(), (0,)) for owner in owners))
        return [owner for owner, log in zip(owners, logs, strict=True) if not log.used[0]]

    def end_flow(self, owner: Owner) -> Flow[StoreStep, bool]:
        """Free the place of an owner; returns whether it was still taken by that owner."""
        return (yield from self._advance_flow(owner.place, owner.generation))

    def add_slots_flow(self, owner: Owner, count: int) -> Flow[StoreStep, range]:
        """Add this many slots to those of the owner; returns their numbers."""
        [decision] = yield StoreStep("acquire", ((SLOTS, owner.key(), (count,)),))
        total = decision.used[0]
        return range(total - count, total)

    def count_slots_flow(self, owner: Owner) -> Flow[StoreStep, int]:
        """Return how many slots the owner uses."""
        [decision] = yield StoreStep("peek", ((SLOTS, owner.key(), (0,)),))
        return int(decision.used[0])

    def _generations_flow(self) -> Flow[StoreStep, list[int]]:
        asks = tuple((PLACES, self._place(place), (0,)) for place in range(MAX_OWNERS))
        decisions = yield StoreStep("peek", asks)
        return [decision.used[0] for decision in decisions]

    def _advance_flow(self, place: int, generation: int, *further: Ask) -> Flow[StoreStep, bool]:
        """Start the next generation of a place; returns whether this caller was the first."""
        key = self._place(place)
        transition = (CLAIMS, (*key, str(generation)), (1,))
        decisions = yield StoreStep("acquire", ((PLACES, key, (1,)), transition, *further))
        return bool(decisions[0].within_limits)

    def _place(self, place: int) -> tuple[str, str]:
        return self._budget, str(place)
