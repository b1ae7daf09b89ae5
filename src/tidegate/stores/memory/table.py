"""The keys of one policy in memory: what stands under each, and when it can go."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Final

from tidegate.core.algorithms import State
from tidegate.core.codec import limit_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.decision import States
    from tidegate.policy import Key, Policy
    from tidegate.stores.memory.group_shares import GroupShares

Entry = State  # the bare state of a policy of one limit, else (limits, states): the fewest bytes for the usual case
FOREVER: Final = 2**62
SWEEP_PER_CALL: Final = (
    32  # how many keys of its policy, and of one other, a call looks after at most, when some are due
)
MIN_FORGOTTEN: Final = 64  # so many forgotten keys in the wheel are not worth looking for
SCRUB_PER_CALL: Final = (
    8  # how many places in the wheel a call looks at for keys that were forgotten, when there are many
)
MIN_SWEEP_SHIFT: Final = 16  # keys are swept in steps no finer than 2**16 microseconds, or a 32nd of their lifetime


class Table:
    """The keys of one policy, and when to look whether each can go.

    Every key stands in one queue of `wheel`, under an instant soon after its state ends; when that instant comes, the
    key is dropped, or put under a later one if it was used meanwhile. So a key costs nothing between its first call
    and then, and nothing ever scans all of them. A key that is forgotten before stays in the wheel, as a ghost; where
    ghosts outnumber the others, each new one pays for a look at a few places, round and round.

    A signal handler may raise between any two steps. So every method first says where to look and then puts something
    there, takes a key out of the wheel last, and finds each of its steps done or not done: what an interrupted call
    left is finished by the next.
    """

    __slots__ = ("due", "dues", "entries", "ghosts", "place", "scrubbed", "shares", "turns", "wheel")

    def __init__(self, shares: GroupShares | None = None) -> None:
        """Start empty; `shares` counts the keys in the wheel by group."""
        self.shares = shares
        self.entries: dict[Key, Entry] = {}
        self.wheel: dict[int, deque[Key]] = {}
        self.dues: list[int] = []
        self.due: int = FOREVER
        self.ghosts: set[Key] = set()  # keys that stand in the wheel but were forgotten
        self.scrubbed: deque[Key] = deque()  # the queue that is looked through for ghosts, its place, what is left
        self.place = 0
        self.turns = 0

    def register(self, key: Key, ends: int, now: int) -> None:
        """Look at the key again soon after `ends`."""
        if key in self.ghosts:
            self.ghosts.remove(key)
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
        """Drop keys that have ended, looking at a bounded number of those that are due; tell how many went."""
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
                self.ghosts.discard(key)
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
        """Drop a key before its time."""
        del self.entries[key]
        self.ghosts.add(key)
        if len(self.ghosts) > len(self.entries) + MIN_FORGOTTEN:
            self.scrub()

    def scrub(self) -> None:
        """Take ghosts out of the wheel, looking at a few places."""
        for _ in repeat(None, SCRUB_PER_CALL):
            if not self.turns or not self.scrubbed:
                if not self.dues:
                    break
                self.place = (self.place + 1) % len(self.dues)
                self.scrubbed = self.wheel.get(self.dues[self.place]) or deque()
                self.turns = len(self.scrubbed)
                continue
            self.turns -= 1
            if self.scrubbed[0] in self.ghosts:
                self.ghosts.remove(self.scrubbed[0])
                gone = self.scrubbed.popleft()
                if self.shares is not None:
                    self.shares.remove(gone)
            else:
                self.scrubbed.rotate(-1)


def states_of(entry: Entry) -> list[State]:
    """Give the states in an entry."""
    return [state for state in entry[1] if state is not None] if entry[0].__class__ is tuple else [entry]


def expires(entry: Entry) -> int:
    """Tell when all states of an entry answer like no state."""
    if entry[0].__class__ is not tuple:
        return limit_of(entry).rules.expires(entry)
    return max(limit_of(state).rules.expires(state) for state in states_of(entry))


def read_entry(entry: Entry | None, policy: Policy) -> Sequence[State | None]:
    """Give the states of the policy's limits, in its order, known by name and algorithm."""
    if entry is None:
        return [None] * len(policy.limits)
    if entry[0] is policy.limits:
        return entry[1]  # type: ignore[no-any-return]  # the states of exactly these limits
    known = {(limit_of(state).name, limit_of(state).algorithm): state for state in states_of(entry)}
    return [known.get((limit.name, limit.algorithm)) for limit in policy.limits]


def write_entry(old: Entry | None, policy: Policy, states: States, now: int) -> Entry | None:
    """Build the entry of new states, keeping live ones of limits that are not in the policy (any more)."""
    if old is not None and old[0] is not policy.limits and old[0] is not policy.only:
        names = {(limit.name, limit.algorithm) for limit in policy.limits}
        known = [(limit_of(state), state) for state in states_of(old)]
        others = [s for limit, s in known if (limit.name, limit.algorithm) not in names and expires(s) > now]
        if others:
            return ((), [*states, *others])  # of no policy's limits exactly
    if policy.only is not None:
        return states[0]
    return (policy.limits, states) if any(states) else None
