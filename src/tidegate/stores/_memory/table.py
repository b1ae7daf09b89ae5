"""The keys of one policy in memory: the states of each, and when it expires."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Final

from tidegate.core._algorithms import State
from tidegate.core.codec import limit_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy import Key, Policy
    from tidegate.core._decision import States
    from tidegate.stores._memory.group_shares import GroupShares

TableEntry = State  # the state itself if the policy has one limit (saves memory), else (limits, states)
FOREVER: Final = 2**62
SWEEP_PER_CALL: Final = 32  # due keys that a call sweeps at most, of its policy and of one other
EXTRA_STALE_KEYS: Final = 64  # stale keys in the wheel that are tolerated in addition to the number of live keys
SCRUB_PER_CALL: Final = 8  # places in the wheel that a call checks for stale keys, when there are too many
MIN_SWEEP_SHIFT: Final = 16  # keys are swept in steps no finer than 2**16 microseconds, or a 32nd of their lifetime


class Table:
    """The keys of one policy, and when to check whether each has expired.

    Every key is in one queue of `wheel`, under a time soon after its state expires. At that time the key is dropped, or
    moved to a later time if it was used meanwhile. So calls in between do not update the wheel, and nothing ever scans
    all keys. A key that is removed earlier stays in the wheel and is recorded in `stale`; when stale keys outnumber the
    others, each further removal checks a few places of the wheel, in rotation, and takes stale keys out.

    A signal handler may raise between any two steps. So every method updates the index before the data, removes a key
    from the wheel last, and can be repeated: the next call completes an interrupted one.
    """

    __slots__ = ("due", "dues", "entries", "scrub_index", "scrub_left", "scrub_queue", "shares", "stale", "wheel")

    def __init__(self, shares: GroupShares | None = None) -> None:
        """Start empty; `shares` counts the keys of the wheel by group."""
        self.shares: GroupShares | None = shares
        self.entries: dict[Key, TableEntry] = {}
        self.wheel: dict[int, deque[Key]] = {}
        self.dues: list[int] = []
        self.due: int = FOREVER
        self.stale: set[Key] = set()  # keys of the wheel that have no entry
        self.scrub_queue: deque[Key] = (
            deque()
        )  # the queue being checked for stale keys, its index in `dues`, keys left to check
        self.scrub_index: int = 0
        self.scrub_left: int = 0

    def register(self, key: Key, ends: int, now: int) -> None:
        """Add the key to the wheel, due soon after `ends`."""
        if key in self.stale:
            self.stale.remove(key)
            return
        step = max(MIN_SWEEP_SHIFT, (ends - now).bit_length() - 6)
        due = ((ends >> step) + 1) << step
        keys = self.wheel.get(due)
        if keys is None:
            heapq.heappush(self.dues, due)
            self.due = self.dues[0]
            self.wheel[due] = deque((key,))
        else:
            keys.append(key)
        if self.shares is not None:
            self.shares.add(key)

    def sweep(self, now: int) -> int:
        """Drop expired keys among a bounded number of due ones; returns how many were dropped."""
        dropped = 0
        for _ in repeat(None, SWEEP_PER_CALL):
            if self.due > now:
                break
            keys = self.wheel.get(self.due)
            if not keys:
                self.wheel.pop(self.due, None)
                if self.dues and self.dues[0] == self.due:
                    heapq.heappop(self.dues)
                self.due = self.dues[0] if self.dues else FOREVER
                continue
            key = keys[-1]
            entry = self.entries.get(key)
            if entry is None:
                self.stale.discard(key)
            elif (ends := expires(entry)) <= now:
                del self.entries[key]
                dropped += 1
            else:
                self.register(key, ends, now)
            keys.pop()
            if self.shares is not None:
                self.shares.remove(key)
        return dropped

    def forget(self, key: Key) -> None:
        """Remove a key before it expires."""
        del self.entries[key]
        self.stale.add(key)
        if len(self.stale) > len(self.entries) + EXTRA_STALE_KEYS:
            self.remove_stale()

    def remove_stale(self) -> None:
        """Remove stale keys from a few places of the wheel."""
        for _ in repeat(None, SCRUB_PER_CALL):
            if not self.scrub_left or not self.scrub_queue:
                if not self.dues:
                    break
                self.scrub_index = (self.scrub_index + 1) % len(self.dues)
                self.scrub_queue = self.wheel.get(self.dues[self.scrub_index]) or deque()
                self.scrub_left = len(self.scrub_queue)
                continue
            self.scrub_left -= 1
            if self.scrub_queue[0] in self.stale:
                self.stale.remove(self.scrub_queue[0])
                removed = self.scrub_queue.popleft()
                if self.shares is not None:
                    self.shares.remove(removed)
            else:
                self.scrub_queue.rotate(-1)


def states_of(entry: TableEntry) -> list[State]:
    """Return the states in an entry."""
    return [state for state in entry[1] if state is not None] if entry[0].__class__ is tuple else [entry]


def expires(entry: TableEntry) -> int:
    """Return when all states of an entry have expired: from then on they are equivalent to no state."""
    if entry[0].__class__ is not tuple:
        return limit_of(entry).rules.expires(entry)
    return max(limit_of(state).rules.expires(state) for state in states_of(entry))


def read_entry(entry: TableEntry | None, policy: Policy) -> Sequence[State | None]:
    """Return the states of the policy's limits, in its order, matched by name and algorithm."""
    if entry is None:
        return [None] * len(policy.limits)
    if entry[0] is policy.limits:
        return entry[1]  # type: ignore[no-any-return]  # the states of exactly these limits
    known = {limit_of(state).identity: state for state in states_of(entry)}
    return [known.get(limit.identity) for limit in policy.limits]


def write_entry(old: TableEntry | None, policy: Policy, states: States, now: int) -> TableEntry | None:
    """Build an entry of new states, keeping live states of limits that are no longer in the policy."""
    if old is not None and old[0] is not policy.limits and old[0] is not policy.only:
        names = {limit.identity for limit in policy.limits}
        known = [(limit_of(state), state) for state in states_of(old)]
        others = [s for limit, s in known if limit.identity not in names and expires(s) > now]
        if others:
            return ((), [*states, *others])  # does not match the limits of any policy
    if policy.only is not None:
        return states[0]
    return (policy.limits, states) if any(states) else None
