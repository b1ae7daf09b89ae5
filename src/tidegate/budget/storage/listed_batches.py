"""Lists the open batches of a budget in a shared store, so that those of a killed process are returned.

The call that reserves a batch also writes an entry with the same costs; the call that settles the batch also corrects
the entry. So the entry always has what is still reserved, and its window opened at the instant of the charge. Its key
is a slot of the owner (see `owners`), which the owner reuses after the batch is settled.

A check that is denied, or a call that reads usage, finds the owners that have ended, and returns what their entries
have reserved. A process claims a batch, with a window of one permit, before it returns it. So a batch is returned only
once, even if several processes try. If a process is killed between the claim and the refund, the refund is lost; that
exceeds no limit.

If an owner was suspended, or could not reach the store, for about one lease, others may have treated it as ended. It
then claims each of its batches before it settles it. If another process was first, the actual cost is charged again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.budget.storage import owners
from tidegate.budget.storage.owners import CLAIMS, MAX_COUNT, Owner, Owners, StoreStep
from tidegate.core.bounds import SECOND
from tidegate.core.decision import LocalDecision
from tidegate.core.limit import Limit
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.fork import at_fork, fork_safe
from tidegate.policy import Policy

if TYPE_CHECKING:
    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.flow import Flow
    from tidegate.policy import Key
    from tidegate.stores.base import Ask

log: logging.Logger = logging.getLogger("tidegate.budget")

ENTRY_AGE: Final = "40d"  # of an entry: longer than the longest tier, after which there is nothing to return
FIRST_SLOTS: Final = 16
MAX_LIMITS_PER_PEEK: Final = 500
RETURN_INTERVAL: Final = SECOND  # between two searches for owners that have ended


class Slot(NamedTuple):
    """A slot of an owner, for one open batch at a time."""

    owner: Owner
    number: int

    @property
    def key(self) -> Key:
        """The key of the entry of the batch."""
        return self.owner.key(self.number)


class Entry(NamedTuple):
    """The entry of an open batch: its slot, and the instant of its charge."""

    slot: Slot
    at: int

    @property
    def claim(self) -> Ask:
        """The ask that only one process can acquire: the right to return the batch, or to settle it late."""
        return CLAIMS, self.slot.owner.key(self.slot.number, self.at), (1,)


class ListedBatches:
    """The open batches of this process, and those of ended owners. Methods that end in `_flow` yield StoreSteps."""

    def __init__(self, budget: str, clock: Clock) -> None:
        """List the batches of the budget with this name."""
        self._budget = budget
        self._clock = clock
        self.lease: int = round(owners.LEASE_SECONDS * SECOND)
        self._owners = Owners(budget, owners.LEASE_SECONDS)
        self._policies: dict[tuple[str, ...], Policy] = {}
        self._lock = fork_safe(threading.Lock())
        self._last_return: int | None = None
        self._unlisted_reason = ""
        self._reset()
        at_fork(child=self._reset_after_fork)

    def _reset(self) -> None:
        self.owner: Owner | None = None
        self._heartbeat_at = 0  # when the last heartbeat began, in steady time
        self._free: deque[Slot] = deque()
        self._suspended: deque[tuple[int, Slot]] = deque()  # slots of failed checks, and when each may be used again
        self._slots = 0
        self._numbers = count()
        self._entries: dict[int, Entry] = {}  # of open batches, by their number
        self._reserved: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # numbers not taken yet, by instant and costs
        self._in_doubt: set[int] = set()  # batches that other processes may have returned
        self._returned: set[int] = set()  # batches that others have returned
        self._claimed: set[int] = set()  # batches that were in doubt, and that others cannot return any more
        self._late_closings: deque[tuple[Ask, int]] = deque()  # changes of entries that the store has missed

    def _reset_after_fork(self) -> None:
        """Become another owner in a forked process: the open batches of the parent stay with the parent."""
        entries, numbers = self._entries, self._numbers
        self._reset()
        self._entries, self._numbers, self._in_doubt = entries, numbers, set(entries)

    # ---- check -------------------------------------------------------------------------------------------------------

    def slot_flow(self, policy: Policy, key: Key) -> Flow[StoreStep, Slot | None]:
        """Return a free slot of this owner, for a new batch; None if the batch cannot be listed."""
        if self._unlisted_reason:
            return None
        try:
            if self.owner is not None and not self.lease_holds:
                yield from self.heartbeat_flow()
            if self.owner is None:
                yield from self._register_flow(policy, key)
            while True:
                try:
                    return self._free.popleft()
                except IndexError:
                    if self.owner is None:
                        return None
                    if (suspended := self._take_suspended()) is not None:
                        yield from self._free_if_empty_flow(policy, suspended)
                        continue
                    owner = self.owner
                    more = yield from self._owners.add_slots_flow(owner, self._slots)
                    self._slots += len(more)
                    self._free.extend(Slot(owner, number) for number in more)
        except StoreUnavailable:
            return None
        except ConfigError as error:  # a cluster whose keys are in different slots
            self._stop_listing(f"{error}")
            return None

    def _register_flow(self, policy: Policy, key: Key) -> Flow[StoreStep, None]:
        began = self._clock.steady()
        owner = yield from self._owners.register_flow(FIRST_SLOTS)
        if owner is None:  # all places are taken, perhaps by owners that have ended
            yield from self._return_all_flow(policy, key)
            owner = yield from self._owners.register_flow(FIRST_SLOTS)
        if owner is None:
            self._stop_listing(f"the budget has more than {owners.MAX_OWNERS} processes")
            return
        with self._lock:
            if self.owner is None:
                self.owner, self._heartbeat_at, self._slots = owner, began, FIRST_SLOTS
                self._free = deque(Slot(owner, number) for number in range(FIRST_SLOTS))
                return
        yield from self._owners.end_flow(owner)  # another thread was first

    def _stop_listing(self, reason: str) -> None:
        self._unlisted_reason = reason
        log.warning("cannot record open batches in the store; if this process is killed, they stay charged: %s", reason)

    def entry_ask(self, policy: Policy, slot: Slot, costs: tuple[int, ...]) -> Ask:
        """Return the ask that lists a batch."""
        return self._entry_policy(policy), slot.key, (1, *costs)

    def add(self, slot: Slot, at: int, costs: tuple[int, ...]) -> None:
        """Add a batch that was reserved and listed."""
        number = next(self._numbers)
        self._entries[number] = Entry(slot, at)
        with self._lock:
            self._reserved.setdefault((at, costs), []).append(number)

    def free(self, slot: Slot) -> None:
        """Reuse a slot."""
        if slot.owner == self.owner:
            self._free.append(slot)

    def suspend(self, slot: Slot) -> None:
        """Suspend the slot of a check that was cancelled or failed: it is reused after a lease, if its entry is empty.

        The check may still write the entry. If another batch used it then, it would have the instant of that charge.
        """
        self._suspended.append((self._clock.steady() + self.lease, slot))

    def _take_suspended(self) -> Slot | None:
        with self._lock:
            if self._suspended and self._suspended[0][0] <= self._clock.steady():
                return self._suspended.popleft()[1]
        return None

    def _free_if_empty_flow(self, policy: Policy, slot: Slot) -> Flow[StoreStep, None]:
        entry_policy = self._entry_policy(policy)
        [entry] = yield StoreStep("peek", ((entry_policy, slot.key, (0,) * len(entry_policy.limits)),))
        if not entry.used[0]:
            self.free(slot)

    def take_number(self, at: int, costs: tuple[int, ...]) -> int:
        """Return the number of a batch that was just reserved, or -1 if it is not listed."""
        with self._lock:
            numbers = self._reserved.get((at, costs))
            if not numbers:
                return -1
            number = numbers.pop()
            if not numbers:
                del self._reserved[at, costs]
        return number

    # ---- settle ------------------------------------------------------------------------------------------------------

    def was_returned_flow(self, number: int) -> Flow[StoreStep, bool]:
        """Return whether another process has returned a batch; if it may have done so, claim the batch first."""
        if number in self._returned:
            return True
        entry = self._entries.get(number)
        if entry is None or number in self._claimed or (self.lease_holds and number not in self._in_doubt):
            return False
        [claim] = yield StoreStep("acquire", (entry.claim,))
        (self._claimed if claim.within_limits else self._returned).add(number)
        return not claim.within_limits

    def closing_asks(
        self, number: int, policy: Policy, before: tuple[int, ...], after: tuple[int, ...]
    ) -> tuple[Ask, ...]:
        """Return the ask that updates the entry of a batch, or removes it if nothing is reserved `after` this.

        Returns none if the batch is not listed.
        """
        entry = self._entries.get(number)
        if entry is None:
            return ()
        changes = tuple(rest - reserved for reserved, rest in zip(before, after, strict=True))
        return ((self._entry_policy(policy), entry.slot.key, (-1 if not any(after) else 0, *changes)),)

    def close_batch(self, number: int, asks: tuple[Ask, ...], decisions: list[Decision], *, last: bool) -> None:
        """Record that a batch was settled; a change of its entry that the store has missed is made later."""
        entry = self._entries.get(number)
        if entry is None:
            return
        if asks and isinstance(decisions[-1], LocalDecision):
            self._late_closings.append((asks[0], entry.at))
        if last:
            del self._entries[number]
            for numbers in (self._in_doubt, self._returned, self._claimed):
                numbers.discard(number)
            self.free(entry.slot)

    # ---- heartbeats --------------------------------------------------------------------------------------------------

    @property
    def lease_holds(self) -> bool:
        """Whether no other process can have treated this one as ended; false in the last quarter of the lease."""
        return self.owner is not None and self._clock.steady() - self._heartbeat_at < self.lease * 3 // 4

    def is_listed(self, number: int) -> bool:
        """Return whether a batch is open and has an entry."""
        return number in self._entries

    def heartbeat_flow(self) -> Flow[StoreStep, None]:
        """Add a heartbeat. After a lapsed lease, every open batch is in doubt."""
        owner, began = self.owner, self._clock.steady()
        if owner is None:
            return
        while self._late_closings:
            ask, at = self._late_closings[0]
            yield StoreStep("adjust", (ask,), at)
            self._late_closings.popleft()
        lapsed = not self.lease_holds
        keeps_place = yield from self._owners.heartbeat_flow(owner)
        if lapsed or not keeps_place:
            self._in_doubt |= set(self._entries)
        if keeps_place:
            self._heartbeat_at = began
        elif self.owner == owner:
            self.owner = None

    def leave_flow(self) -> Flow[StoreStep, None]:
        """Free the place of this process, if it has settled its batches; otherwise others return them."""
        owner = self.owner
        if owner is not None and not self._late_closings and all(e.slot.owner != owner for e in self._entries.values()):
            self.owner = None
            yield from self._owners.end_flow(owner)

    # ---- return the batches of ended owners --------------------------------------------------------------------------

    def return_ended_flow(self, policy: Policy, key: Key) -> Flow[StoreStep, int]:
        """Refund the batches of owners that have ended, at most once per second; returns how many."""
        now = self._clock.steady()
        if self._last_return is not None and now - self._last_return < RETURN_INTERVAL:
            return 0
        self._last_return = now
        try:
            return (yield from self._return_all_flow(policy, key))
        except ConfigError as error:
            self._stop_listing(f"{error}")
            return 0

    def _return_all_flow(self, policy: Policy, key: Key) -> Flow[StoreStep, int]:
        total = 0
        for owner in (yield from self._owners.find_ended_flow()):
            if owner != self.owner:
                total += yield from self._return_batches_flow(owner, policy, key)
        return total

    def _return_batches_flow(self, owner: Owner, policy: Policy, key: Key) -> Flow[StoreStep, int]:
        entry_policy, total = self._entry_policy(policy), 0
        for entry, open_batches, reserved in (yield from self._entries_flow(owner, policy)):
            if (yield StoreStep("acquire", (entry.claim,)))[0].within_limits:
                back = tuple(-cost for cost in reserved)
                asks = ((policy, key, back), (entry_policy, entry.slot.key, (-open_batches, *back)))
                yield StoreStep("adjust", asks, entry.at)
                total += 1
        yield from self._owners.end_flow(owner)
        if total:
            log.info("returned %d batches of a process that has ended", total)
        return total

    def list_open_flow(self, policy: Policy) -> Flow[StoreStep, list[tuple[int, tuple[int, ...]]]]:
        """Return the instant of each listed batch of all owners, and what is still reserved for it at each limit."""
        found = []
        for owner in (yield from self._owners.find_all_flow()):
            found += [(entry.at, reserved) for entry, _, reserved in (yield from self._entries_flow(owner, policy))]
        return found

    def _entries_flow(self, owner: Owner, policy: Policy) -> Flow[StoreStep, list[tuple[Entry, int, tuple[int, ...]]]]:
        """Read the entries of an owner's open batches: each with its count, and what is reserved at each limit."""
        slots = yield from self._owners.count_slots_flow(owner)
        entry_policy, found = self._entry_policy(policy), []
        no_costs = (0,) * len(entry_policy.limits)
        size = max(1, MAX_LIMITS_PER_PEEK // len(no_costs))
        for start in range(0, slots, size):
            part = [Slot(owner, number) for number in range(start, min(slots, start + size))]
            entries = yield StoreStep("peek", tuple((entry_policy, slot.key, no_costs) for slot in part))
            for slot, decision in zip(part, entries, strict=True):
                open_batches, *reserved = decision.used
                if open_batches:
                    found.append((Entry(slot, opened_at(decision)), open_batches, tuple(reserved)))
        return found

    def _entry_policy(self, policy: Policy) -> Policy:
        names = tuple(limit.name for limit in policy.limits)
        found = self._policies.get(names)
        if found is None:
            limits = (Limit(MAX_COUNT, ENTRY_AGE, "fixed_window", name=name) for name in ("open", *names))
            # Without the store, a batch is not listed; the policy of the budget decides about it.
            found = self._policies[names] = Policy("tidegate.budget.open", tuple(limits), on_store_error="allow")
        return found


def opened_at(decision: Decision) -> int:
    """Return when the window of an entry was opened: at the instant of the charge, by the store's clock."""
    return decision.at + decision.views[0][2] - decision.policy_limits[0].length
