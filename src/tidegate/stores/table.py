"""The keys of one policy in memory: what stands under each, and when it can go."""

from __future__ import annotations

import heapq
from itertools import repeat
from typing import TYPE_CHECKING, Final

from tidegate.core.algorithms import State
from tidegate.core.codec import limit_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.decision import States
    from tidegate.policy import Key, Policy

Entry = State  # the bare state of a policy of one limit, else (limits, states): the fewest bytes for the usual case
FOREVER: Final = 2**62
SWEEP: Final = 64  # how many keys a call looks after at most, when some are due
FINEST: Final = 16  # keys are swept in steps no finer than 2**16 microseconds, or a 32nd of their lifetime


class Table:
    """The keys of one policy, and when to look whether each can go.

    Every key stands in one list of `wheel`, under an instant soon after its state ends; when that instant comes, the
    key is dropped, or put under a later one if it was used meanwhile. So a key costs nothing between its first call
    and then, and nothing ever scans all of them.
    """

    __slots__ = ("due", "dues", "entries", "ghosts", "wheel")

    def __init__(self) -> None:
        """Start empty."""
        self.entries: dict[Key, Entry] = {}
        self.wheel: dict[int, list[Key]] = {}
        self.dues: list[int] = []
        self.due: int = FOREVER
        self.ghosts: set[Key] = set()  # keys that stand in the wheel but were reset

    def register(self, key: Key, ends: int, now: int) -> None:
        """Look at the key again soon after `ends`."""
        if key in self.ghosts:
            self.ghosts.remove(key)
            return
        step = max(FINEST, (ends - now).bit_length() - 5)
        due = ((ends >> step) + 1) << step
        keys = self.wheel.get(due)
        if keys is None:
            self.wheel[due] = [key]
            heapq.heappush(self.dues, due)
            self.due = self.dues[0]
        else:
            keys.append(key)

    def sweep(self, now: int) -> int:
        """Drop keys that have ended, looking at a bounded number of those that are due; tell how many went."""
        dropped = 0
        for _ in repeat(None, SWEEP):
            if self.due > now:
                break
            keys = self.wheel[self.due]
            key = keys.pop()
            if not keys:
                del self.wheel[heapq.heappop(self.dues)]
                self.due = self.dues[0] if self.dues else FOREVER
            entry = self.entries.get(key)
            if entry is None:
                self.ghosts.discard(key)
            elif (ends := expires(entry)) <= now:
                del self.entries[key]
                dropped += 1
            else:
                self.register(key, ends, now)
        return dropped


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
