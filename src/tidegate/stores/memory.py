"""Keeps states in this process: the fastest store, and the default."""

from __future__ import annotations

import logging
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Final, Literal

from tidegate.clock import Clock, yield_thread
from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import MAX
from tidegate.core.decision import VERBS, Decision, States, acquire
from tidegate.errors import ConfigError
from tidegate.stores.base import Store
from tidegate.stores.shortcut import Guard, shortcut
from tidegate.stores.table import Table, expires, read_entry, write_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.algorithms import State
    from tidegate.core.limit import Limit
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Ask
    from tidegate.stores.shortcut import Retire, TryAcquire
    from tidegate.stores.table import Entry

log = logging.getLogger(__name__)

# The key that new keys share when the store is full; equal to nobody's, since parts of those are strings.
OVERFLOW: Final[Key] = ("overflow", None)  # type: ignore[assignment]  # see above
PATIENCE: Final = 1000  # how often a thread yields to the one that decides before it sleeps


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
        self._rota: deque[Table] = deque()
        self._token = deque([None])
        self._give = self._token.append
        self._ns = self.clock.ns
        self._entries = 0
        self._overflowed = 0
        self._warned = False
        self._warn = False  # to be told once the token is given back

    def shortcut(self, policy: Policy, otherwise: TryAcquire, retire: list[Retire]) -> TryAcquire:
        """Build a faster `try_acquire` for usual calls; others go to `otherwise`, and all once it is retired."""
        try:
            del self._token[0]
        except IndexError:
            self._contend()
        try:
            table = self._table(policy)
        finally:
            self._give(None)
        return shortcut(
            policy, table, otherwise, Guard(self._token, self._give, self._contend, self._ns, self._insert), retire
        )

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key."""
        try:
            del self._token[0]
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
        except BaseException:
            self._recount()
            raise
        finally:
            self._give(None)
            if self._warn:
                self._warn_full()

    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        """Apply the verb to every key together."""
        try:
            del self._token[0]
        except IndexError:
            self._contend()
        try:
            return self._decide(verb, asks, self._ns() // 1000 if now is None else now, at)
        except BaseException:
            self._recount()
            raise
        finally:
            self._give(None)
            if self._warn:
                self._warn_full()

    def _contend(self) -> None:
        """Take the token that another thread holds, letting that thread run; sleep if that does not help soon."""
        for attempt in count():
            yield_thread(0 if attempt < PATIENCE else 0.0001)
            try:
                del self._token[0]
            except IndexError:
                continue
            return

    def _decide(self, verb: str, asks: Sequence[Ask], now: int, at: int | None) -> list[Decision]:
        slots = [self._slot(verb, policy, key, now, place) for place, (policy, key, _) in enumerate(asks)]
        if None in slots:
            return [self._full(policy, costs, now) for policy, _, costs in asks]
        limits: list[Limit] = []
        states: list[State | None] = []
        costs: list[int] = []
        places: dict[object, int] = {}  # where in these lists each key stands; asked for twice, it pays both costs
        for (policy, _, cost), slot in zip(asks, slots, strict=True):
            table, key = slot  # type: ignore[misc]  # None was ruled out
            place = places.setdefault((slot, id(policy)), len(limits))
            if place < len(limits):
                end = place + len(cost)
                costs[place:end] = [min(MAX, old + new) for old, new in zip(costs[place:end], cost, strict=True)]
                continue
            limits += policy.limits
            states += read_entry(table.entries.get(key), policy)
            costs += cost
        allowed, changed, left = VERBS[verb](limits, states, costs, now, at)
        decisions = []
        for (policy, _, _), slot in zip(asks, slots, strict=True):
            table, key = slot  # type: ignore[misc]  # None was ruled out
            place = places[slot, id(policy)]
            end = place + len(policy.limits)
            decision = Decision((allowed, now, policy.limits, changed[place:end], left[place:end]))
            if verb == "peek":  # what a log would be like is overwritten by the next charge, so it is told at once
                decision = Decision((allowed, now, policy.limits, decision.views, None))
            elif verb == "reset":
                self._forget(table, key)
            elif changed is not states:
                self._write(table, key, policy, changed[place:end], now)
            decisions.append(decision)
        return decisions

    def _table(self, policy: Policy) -> Table:
        table = self._tables.get(policy.name)
        if table is None:
            table = self._tables[policy.name] = Table()
            self._rota.append(table)
        return table

    def _slot(self, verb: str, policy: Policy, key: Key, now: int, before: int) -> tuple[Table, Key] | None:
        """Find where a key has its entry: its own place, or the shared one when there is no room; None: denied.

        `before` keys may find a place before this one, in the same call.
        """
        table = self._table(policy)
        self._rota.rotate()  # so that the keys of a policy that nobody asks about go, too
        self._entries -= table.sweep(now) + self._rota[0].sweep(now)
        room = self.max_entries - before
        if key in table.entries or self._entries < room or verb == "reset":
            return table, key
        for other in self._tables.values():
            while self._entries >= room and other.due <= now:
                self._entries -= other.sweep(now)
        if self._entries < room:
            return table, key
        if verb in ("acquire", "hold"):
            self._overflowed += 1
            self._warn = self._warn or not self._warned
            self._warned = True
        return (table, OVERFLOW) if self.overflow == "share" else None

    def _warn_full(self) -> None:
        """Say once that the store is full, after the token was given back: a handler may take its time, or ask us."""
        self._warn = False
        log.warning(
            "memory store is full: %d live keys; new keys of a policy are %s until some end (max_entries)",
            self._entries,
            "limited together" if self.overflow == "share" else "denied",
        )

    def _full(self, policy: Policy, costs: Sequence[int], now: int) -> Decision:
        wait = max(1, min(table.due for table in self._tables.values()) - now)
        pairs = zip(policy.limits, costs, strict=True)
        views = tuple((0, NEVER if cost > limit.burst else wait, wait) for limit, cost in pairs)
        return Decision((False, now, policy.limits, views, None))

    def _write(self, table: Table, key: Key, policy: Policy, states: States, now: int) -> None:
        """Keep the new states, together with live ones of limits that are not in the policy (any more)."""
        old = table.entries.get(key)
        entry = write_entry(old, policy, states, now)
        if entry is None:
            self._forget(table, key)
            return
        if old is None and key is not OVERFLOW:
            table.register(key, expires(entry), now)
            self._entries += 1
            self._warned = self._warned and self._entries >= self.max_entries
        table.entries[key] = entry

    def _insert(self, table: Table, key: Key, entry: Entry, ends: int, now: int) -> bool:
        """Keep the entry of a new key, which ends then, if there is room; tell whether there was."""
        if self._entries >= self.max_entries:
            return False
        try:
            table.register(key, ends, now)
            self._entries += 1
            self._warned = self._warned and self._entries >= self.max_entries
            table.entries[key] = entry
        except BaseException:
            self._recount()
            raise
        return True

    def _recount(self) -> None:
        """Count the keys again after a signal handler has raised between two steps."""
        self._entries = sum(len(table.entries) - (OVERFLOW in table.entries) for table in self._tables.values())

    def _forget(self, table: Table, key: Key) -> None:
        if key is OVERFLOW:
            table.entries.pop(key, None)
        elif key in table.entries:
            table.forget(key)
            self._entries -= 1

    def metrics(self) -> dict[str, int]:
        """Count keys kept, and calls that found no room for their key."""
        return {"entries": self._entries, "max_entries": self.max_entries, "overflowed": self._overflowed}
