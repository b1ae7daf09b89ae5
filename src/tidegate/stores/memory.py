"""Keeps states in this process: the fastest store, and the default."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from itertools import count, repeat
from typing import TYPE_CHECKING, Final, Literal

from tidegate.clock import Clock, yield_thread
from tidegate.core.algorithms import State
from tidegate.core.codec import limit_of
from tidegate.core.decision import VERBS, Decision, States, acquire
from tidegate.errors import ConfigError
from tidegate.stores.base import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core.limit import Limit
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores.base import Ask

    TryAcquire = Callable[[Key, Cost], Decision]

log = logging.getLogger(__name__)

Entry = State  # the bare state of a policy of one limit, else (limits, states): the fewest bytes for the usual case
OVERFLOW: Final = ("overflow", "")  # the key, known by its identity, that new keys share when the store is full
FOREVER: Final = 2**62
PATIENCE: Final = 1000
SWEEP: Final = 64  # how many keys a call looks after at most, when some are due
FINEST: Final = 16  # keys are swept in steps no finer than 2**16 microseconds, or a 32nd of their lifetime


class MemoryStore(Store):
    """Keeps states in a dictionary per policy, for all threads and event loops of this process.

    Bounded: at most `max_entries` keys. A key that has nothing left to remember is dropped by the calls that come
    after, a few at a time, at the latest a 32nd of its lifetime late; a live one is never dropped. When the store is
    full of live keys, new keys of a policy share one more bucket (`overflow="share"`) or are denied (`"deny"`), and
    `metrics()` and a warning say so.

    The lock is a token in a deque, whose `pop` and `append` are atomic by contract: it costs a third of a
    `threading.Lock`, and a thread that finds it taken yields instead of queueing, since a queue of threads each woken
    holding the lock but not the interpreter turns every decision into a context switch.
    """

    instant = True

    def __init__(
        self,
        *,
        max_entries: int = 1_000_000,
        overflow: Literal["share", "deny"] = "share",
        clock: Clock | None = None,
    ) -> None:
        """Hold at most `max_entries` keys."""
        super().__init__(clock)
        if not isinstance(max_entries, int) or max_entries < 1:
            raise ConfigError(f"must be a whole number from 1, not {max_entries!r}", field="max_entries")
        if overflow not in ("share", "deny"):
            raise ConfigError(f"must be 'share' or 'deny', not {overflow!r}", field="overflow")
        self.max_entries = max_entries
        self.overflow = overflow
        self._tables: dict[str, Table] = {}
        self._token = deque([None])
        self._take = self._token.pop
        self._give = self._token.append
        self._ns = self.clock.ns
        self._entries = 0
        self._overflowed = 0
        self._warned = False

    def shortcut(self, policy: Policy, otherwise: TryAcquire) -> TryAcquire:
        """Build `try_acquire` for a policy with everything a usual call needs at hand.

        A usual call costs 1 and finds a state of exactly this policy; any other goes to `otherwise`.
        """
        table = self._table(policy)
        entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,) * len(policy.limits)
        take, give, contend, ns = self._take, self._give, self._contend, self._ns
        charges = [(limit.charge, limit) for limit in limits]
        limit = limits[0]
        capacity, rate, scale = limit.capacity, limit.rate, limit.scale

        def one_bucket(key: Key, cost: Cost = 1) -> Decision:
            if cost == 1:
                try:
                    take()
                except IndexError:
                    contend()
                try:
                    now = ns() // 1000
                    owner, level, at = entry = entries[key]
                    if owner is limit and now < table.due:
                        # This is charge_bucket, written out: the call alone would cost a tenth of the decision.
                        if now > at:
                            level += (now - at) * rate
                            if level > capacity:
                                level = capacity
                        else:
                            now = at
                        level -= scale
                        if level < 0:
                            return Decision((False, now, limits, (entry,), one))
                        entries[key] = state = (limit, level, now)
                        return Decision((True, now, limits, (state,), nothing))
                except (KeyError, ValueError, TypeError):
                    pass  # a new key, a state of another shape, or no key at all
                finally:
                    give(None)
            return otherwise(key, cost)

        def one_limit(key: Key, cost: Cost = 1) -> Decision:
            if cost == 1:
                try:
                    take()
                except IndexError:
                    contend()
                try:
                    now = ns() // 1000
                    entry = entries.get(key)
                    if entry is not None and entry[0] is limit and now < table.due:
                        state = limit.charge(entry, limit, 1, now)
                        if state is None:
                            return Decision((False, now, limits, (entry,), one))
                        entries[key] = state
                        return Decision((True, now, limits, (state,), nothing))
                finally:
                    give(None)
            return otherwise(key, cost)

        def several(key: Key, cost: Cost = 1) -> Decision:
            if cost == 1:
                try:
                    take()
                except IndexError:
                    contend()
                try:
                    now = ns() // 1000
                    entry = entries.get(key)
                    if entry is not None and entry[0] is limits and now < table.due:
                        states = []
                        for (charge, limit), state in zip(charges, entry[1], strict=True):
                            states.append(charge(state, limit, 1, now))
                        if None in states:
                            return Decision((False, now, limits, entry[1], one))
                        entries[key] = (limits, states)
                        return Decision((True, now, limits, states, nothing))
                finally:
                    give(None)
            return otherwise(key, cost)

        if 0 in one:
            return otherwise
        if policy.only is None:
            return several
        return one_bucket if limit.algorithm == "token_bucket" else one_limit

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key."""
        try:
            self._take()
        except IndexError:
            self._contend()
        try:
            if now is None:
                now = self._ns() // 1000
            table = self._table(policy)
            entry = table.entries.get(key)
            limits = policy.limits
            if verb == "acquire" and now < table.due:
                # The usual question about a key known by this policy, or new: what _decide does, without the rest.
                if entry is None and self._entries < self.max_entries:
                    before: States = (None,) * len(limits)
                elif entry is not None and entry[0] is policy.only:
                    before = (entry,)
                elif entry is not None and entry[0] is limits:
                    before = entry[1]
                else:
                    return self._decide(verb, ((policy, key, costs),), now, at)[0]
                allowed, states, left = acquire(limits, before, costs, now)
                if allowed:
                    self._write(table, key, policy, states, now)
                return Decision((allowed, now, limits, states, left))
            return self._decide(verb, ((policy, key, costs),), now, at)[0]
        finally:
            self._give(None)

    def apply(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply the verb to every key together."""
        try:
            self._take()
        except IndexError:
            self._contend()
        try:
            return self._decide(verb, asks, self._ns() // 1000 if now is None else now, at)
        finally:
            self._give(None)

    def _contend(self) -> None:
        """Take the token that another thread holds, letting that thread run; sleep if that does not help soon."""
        for attempt in count():
            yield_thread(0 if attempt < PATIENCE else 0.0001)
            try:
                self._take()
            except IndexError:
                continue
            return

    def _decide(self, verb: str, asks: Sequence[Ask], now: int, at: int | None) -> list[Decision]:
        slots = [self._slot(verb, policy, key, now) for policy, key, _ in asks]
        if None in slots:
            return [self._full(policy, now) for policy, _, _ in asks]
        limits: list[Limit] = []
        states: list[State | None] = []
        for (policy, _, _), (table, key) in zip(asks, slots, strict=True):  # type: ignore[misc]  # None was ruled out
            limits += policy.limits
            states += read_entry(table.entries.get(key), policy)
        costs = [cost for ask in asks for cost in ask[2]]
        allowed, changed, left = VERBS[verb](limits, states, costs, now, at)
        decisions, place = [], 0
        for (policy, _, _), (table, key) in zip(asks, slots, strict=True):  # type: ignore[misc]  # None was ruled out
            end = place + len(policy.limits)
            if changed is not states and verb != "peek":
                self._write(table, key, policy, changed[place:end], now)
            decisions.append(Decision((allowed, now, policy.limits, changed[place:end], left[place:end])))
            place = end
        return decisions

    def _table(self, policy: Policy) -> Table:
        table = self._tables.get(policy.name)
        return self._tables.setdefault(policy.name, Table()) if table is None else table

    def _slot(self, verb: str, policy: Policy, key: Key, now: int) -> tuple[Table, Key] | None:
        """Find where a key has its entry: its own place, or the shared one when there is no room; None: denied."""
        table = self._table(policy)
        self._entries -= table.sweep(now)
        if key in table.entries or self._entries < self.max_entries or verb == "reset":
            return table, key
        for other in self._tables.values():
            while self._entries >= self.max_entries and other.due <= now:
                self._entries -= other.sweep(now)
        if self._entries < self.max_entries:
            return table, key
        if verb in ("acquire", "hold"):
            self._overflowed += 1
            if not self._warned:
                self._warned = True
                log.warning(
                    "memory store is full: %d live keys; new keys of a policy are %s until some end (max_entries)",
                    self._entries,
                    "limited together" if self.overflow == "share" else "denied",
                )
        return (table, OVERFLOW) if self.overflow == "share" else None

    def _full(self, policy: Policy, now: int) -> Decision:
        wait = max(1, min(table.due for table in self._tables.values()) - now)
        return Decision((False, now, policy.limits, ((0, wait, wait),) * len(policy.limits), None))

    def _write(self, table: Table, key: Key, policy: Policy, states: States, now: int) -> None:
        """Keep the new states, together with live ones of limits that are not in the policy (any more)."""
        old = table.entries.get(key)
        entry = write_entry(old, policy, states, now)
        if entry is not None:
            table.entries[key] = entry
            if old is None and key is not OVERFLOW:
                self._entries += 1
                self._warned = self._warned and self._entries >= self.max_entries
                table.register(key, expires(entry), now)
        elif old is not None:
            del table.entries[key]
            if key is not OVERFLOW:
                table.ghosts.add(key)
                self._entries -= 1

    def metrics(self) -> dict[str, int]:
        """Count keys kept, and calls that found no room for their key."""
        return {"entries": self._entries, "max_entries": self.max_entries, "overflowed": self._overflowed}


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


# ---- entries: what stands under a key ---------------------------------------------------------------------------------


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
