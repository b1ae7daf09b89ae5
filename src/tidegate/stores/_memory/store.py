"""MemoryStore: keeps states in this process; the fastest store, and the default."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Literal

from tidegate._runtime.clock import yield_thread
from tidegate._runtime.fork import at_fork
from tidegate.core._algorithms import NEVER, View
from tidegate.core._decision import VERBS, ZERO_COSTS, Decision, States, acquire
from tidegate.errors import ConfigError
from tidegate.stores._base import Alternatives, Store, decide_in_turn
from tidegate.stores._memory.group_shares import GroupShares, shared_key
from tidegate.stores._memory.single_bucket import StoreAccess, build_try_acquire
from tidegate.stores._memory.table import Table, expires, read_entry, write_entry
from tidegate.stores._memory.values import MemoryValues
from tidegate.stores._merged_asks import merge
from tidegate.stores._token import Token, make_token, release_token, with_token
from tidegate.stores._values import check_listed, check_name

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from tidegate._policy import Key, Policy
    from tidegate._runtime.clock import Clock
    from tidegate.core._algorithms import State
    from tidegate.core._limit import Limit
    from tidegate.stores._base import Ask, T, TryAcquire
    from tidegate.stores._memory.group_shares import GroupOf
    from tidegate.stores._memory.table import TableEntry
    from tidegate.stores._values import Collection, Value, Write

    LocatedAsk = tuple[Policy, Key, tuple[int, ...], Table]  # an ask, and the table of its policy

log: logging.Logger = logging.getLogger("tidegate.stores")

OVERFLOW_KEY: Final = shared_key(None)  # the key that new keys share when the store is full


class MemoryStore(Store):
    """Keeps states in a dictionary per policy, for all threads and event loops of this process.

    It keeps at most `max_entries` keys. Later calls drop expired keys, a few at a time, at the latest 1/32 of their
    lifetime after they expire; live keys are never dropped. When the store is full of live keys, the new keys of a
    policy share one additional bucket (`overflow="share"`) or are denied (`"deny"`); `metrics()` and a log warning
    report it. If `group_of` returns the group of a key, no group can fill the store: once a group has as many keys as
    there are free places, only its own new keys share a bucket (see `memory.group_shares`).

    A signal handler may raise at any instruction, and a process may fork while threads decide: `stores/token` and the
    order of the steps in `Table` keep the store usable. A decision is stored by one assignment, so it is made or not
    made. Changing the number of keys takes several steps; if `_counting` is still set, the keys are counted again.
    """

    instant = True
    decides_alternatives = True
    keeps_values = True

    def __init__(
        self,
        *,
        max_entries: int = 1_000_000,
        overflow: Literal["share", "deny"] = "share",
        clock: Clock | None = None,
        group_of: GroupOf | None = None,
    ) -> None:
        """Keep at most `max_entries` keys; `group_of` returns the group of a key, or None."""
        super().__init__(clock)
        if not isinstance(max_entries, int) or max_entries < 1:
            raise ConfigError(f"must be an integer of at least 1, not {max_entries!r}", field="max_entries")
        if overflow not in ("share", "deny"):
            raise ConfigError(f"must be 'share' or 'deny', not {overflow!r}", field="overflow")
        self.max_entries: int = max_entries
        self.overflow = overflow
        self._tables: dict[str, Table] = {}
        self._values = MemoryValues()
        self._sweep_order: deque[Table] = deque()
        self.token: Token = make_token()
        at_fork(child=self._release_token)
        self._ns = self.clock.ns
        self._entries = 0
        self._counting = False  # a change of the number of keys has started and not ended
        self._overflowed = 0
        self._warned = False
        self._warn = False  # log a warning once the lock is released
        self._full_group: Hashable | None = None  # the group to name in the warning
        self._group_warned = False  # until the store is half empty again
        self._shares: GroupShares | None = None
        if group_of is not None:
            self.limit_groups(group_of)

    def _release_token(self) -> None:
        release_token(self.token)

    @with_token
    def limit_groups(self, group_of: GroupOf) -> None:
        """Limit the share of each group of keys from now on, counting existing keys."""
        self._shares = GroupShares(group_of)
        for table in self._tables.values():
            table.shares = self._shares
        self._recount()

    def limit_entries(self, max_entries: int) -> None:
        """Keep at most this many keys from now on; existing keys are kept."""
        self.max_entries = max_entries

    @with_token
    def clear(self) -> bool:
        """Forget the usage of all keys."""
        for table in self._tables.values():
            for key in tuple(table.entries):
                self._forget(table, key)
        return True

    def specialize(self, policy: Policy, try_acquire: TryAcquire[T]) -> TryAcquire[T]:
        """Return a faster `try_acquire` if the only limit of the policy is a token bucket (`single_bucket`)."""
        limit = policy.only
        if limit is None or not limit.rules.refills:
            return try_acquire
        access = StoreAccess(self.token, self._ns, self._insert)
        return build_try_acquire(limit, policy.limits, self._prepare_table(policy), access, try_acquire)

    def apply_one(  # noqa: C901, PLR0911, PLR0912 - with the lock written out
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key."""
        token = self.token
        while True:
            try:
                del token[0]
            except IndexError:
                yield_thread(0)
            else:
                break
        try:
            if now is None:
                now = self._ns() // 1000
            limit, limits = policy.only, policy.limits
            try:
                table = self._tables[policy.name]
                entry = table.entries[key]
            except KeyError:
                return self._decide(verb, ((policy, key, costs),), now, at)[0]
            if now >= table.due or not (entry[0] is limit or entry[0] is limits):
                return self._decide(verb, ((policy, key, costs),), now, at)[0]
            # A key with a state of exactly this policy: what _decide does, without the rest.
            if verb == "acquire":
                if limit is None:
                    allowed, states, left = acquire(limits, entry[1], costs, now)
                    if allowed:
                        table.entries[key] = (limits, states)
                    return Decision((allowed, now, limits, states, left))
                if costs[0]:  # nor the lists of `acquire`
                    state = limit.charge(entry, limit, costs[0], now)
                    if state is None:
                        return Decision((False, now, limits, (entry,), costs))
                    table.entries[key] = state
                    return Decision((True, now, limits, (state,), ZERO_COSTS[1]))
            traits = VERBS[verb]
            before = entry[1] if limit is None else (entry,)
            allowed, states, left = traits.decide(limits, before, costs, now, at)
            decision = Decision((allowed, now, limits, states, left))
            if not traits.changes:
                return keep_views(decision)
            if traits.clears:
                self._forget(table, key)
            elif allowed and traits.charges:  # it leaves a state for each limit that has one
                table.entries[key] = states[0] if limit is not None else (limits, states)  # type: ignore[assignment]  # by `limit`
            elif allowed:
                self._write(table, key, policy, states, now)
            return decision
        finally:
            token.append(None)
            if self._warn:
                self._warn_full()

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply the verb to all keys together."""
        token = self.token
        while True:
            try:
                del token[0]
            except IndexError:
                yield_thread(0)
            else:
                break
        try:
            if now is None:
                now = self._ns() // 1000
            if not writes and asks.__class__ is not Alternatives:
                return self._decide(verb, asks, now, at)
            self._values.check(writes, now)
            decisions = decide_in_turn(asks, lambda together: self._decide(verb, together, now, at))
            if not decisions or decisions[-1].within_limits:
                self._values.write(writes, now)
            return decisions
        finally:
            token.append(None)
            if self._warn:
                self._warn_full()

    @with_token
    def get_value(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value."""
        check_name(collection, name)
        return self._values.get(collection, name, self._ns() // 1000 if now is None else now)

    @with_token
    def list_values(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection."""
        check_listed(collection)
        return self._values.list(collection, self._ns() // 1000 if now is None else now)

    @with_token
    def _prepare_table(self, policy: Policy) -> Table:
        return self._table(policy)

    def _decide(self, verb: str, asks: Sequence[Ask], now: int, at: int | None) -> list[Decision]:
        """Decide asks together. Requires the lock."""
        if verb not in ("peek", "reset") and asks:
            known = self._decide_known(verb, asks, now, at)
            if known is not None:
                return known
        located: list[LocatedAsk] = []
        for place, (policy, key, costs) in enumerate(asks):
            table = self._tables.get(policy.name)
            if table is None or now >= table.due or key not in table.entries:
                slot = self._slot(verb, policy, key, now, place)
                if slot is None:
                    return [self._deny_full(policy, costs, now) for policy, _, costs in asks]
                table, key = slot  # noqa: PLW2901 - of the entry that decides
            located.append((policy, key, costs, table))
        if len(asks) > 1 and len({(policy.name, key) for policy, key, _, _ in located}) < len(asks):
            # The same key twice, or keys that share one because there is no room: their costs are added up.
            merged = merge([(policy, key, costs) for policy, key, costs, _ in located])
            located = [(*ask, self._table(ask[0])) for ask in merged.asks]
            return merged.split(self._decide_located(verb, located, now, at))
        return self._decide_located(verb, located, now, at)

    def _decide_known(self, verb: str, asks: Sequence[Ask], now: int, at: int | None) -> list[Decision] | None:
        """Charge or correct different keys whose states are exactly of their policies; None if one is not.

        It does what `_decide` does, without the rest. Requires the lock.
        """
        tables, decide = self._tables, VERBS[verb].decide
        rows: list[tuple[Table, Key, TableEntry, TableEntry | None]] = []
        decisions: list[Decision] = []
        try:
            for policy, key, costs in asks:
                table = tables[policy.name]
                entry = table.entries[key]
                limit, limits = policy.only, policy.limits
                if now >= table.due or not (entry[0] is limit or entry[0] is limits):
                    return None
                if limit is not None and decide is acquire and costs[0]:  # without the lists of `acquire`
                    after = limit.charge(entry, limit, costs[0], now)
                    if after is None:
                        return self._deny_known(asks, now)
                    decisions.append(Decision((True, now, limits, (after,), ZERO_COSTS[1])))
                    rows.append((table, key, entry, after))
                    continue
                allowed, states, left = decide(limits, entry[1] if limit is None else (entry,), costs, now, at)
                if not allowed:
                    return self._deny_known(asks, now)
                after = states[0] if limit is not None else (limits, states) if any(states) else None
                decisions.append(Decision((True, now, limits, states, left)))
                rows.append((table, key, entry, after))
        except KeyError:
            return None
        if has_twice(rows):
            return None
        for table, key, _, after in rows:
            if after is None:
                self._forget(table, key)
            else:
                table.entries[key] = after
        return decisions

    def _deny_known(self, asks: Sequence[Ask], now: int) -> list[Decision] | None:
        """Deny different keys that have states, since one of them has no permits left; None if they are not such."""
        decisions: list[Decision] = []
        found: set[int] = set()
        for policy, key, costs in asks:
            entry = self._tables[policy.name].entries[key]  # the caller catches KeyError
            found.add(id(entry))
            states = (entry,) if entry[0] is policy.only else read_entry(entry, policy)
            decisions.append(Decision((False, now, policy.limits, states, costs)))
        return decisions if len(found) == len(asks) else None

    def _decide_located(self, verb: str, located: Sequence[LocatedAsk], now: int, at: int | None) -> list[Decision]:
        limits: list[Limit] = []
        states: list[State | None] = []
        costs: list[int] = []
        for policy, key, own, table in located:
            limits += policy.limits
            costs += own
            entry = table.entries.get(key)
            if entry is not None and entry[0] is policy.only:
                states.append(entry)
            else:
                states += read_entry(entry, policy)
        decide, changes, clears = VERBS[verb][:3]
        allowed, changed, left = decide(limits, states, costs, now, at)
        decisions = []
        end = 0
        for policy, key, _, table in located:
            own_limits, start = policy.limits, end
            end += len(own_limits)
            own_states = changed[start:end]
            decision = Decision((allowed, now, own_limits, own_states, left[start:end]))
            if not changes:
                decision = keep_views(decision)
            elif clears:
                self._forget(table, key)
            elif changed is not states:
                self._write(table, key, policy, own_states, now)
            decisions.append(decision)
        return decisions

    def _table(self, policy: Policy) -> Table:
        table = self._tables.get(policy.name)
        if table is None:
            table = Table(self._shares)
            self._sweep_order.append(table)
            self._tables[policy.name] = table
        return table

    def _slot(self, verb: str, policy: Policy, key: Key, now: int, before: int) -> tuple[Table, Key] | None:
        """Return the table and key of an entry: the key itself, or a shared key if there is no room; None: deny.

        `before` is how many keys of the same call may be inserted before this one.
        """
        if self._counting:
            self._recount()
        table = self._table(policy)
        self._sweep_order.rotate()  # so that keys of unused policies are dropped too
        self._sweep(table, now)
        self._sweep(self._sweep_order[0], now)
        room = self.max_entries - before
        if key in table.entries or self._has_room(key, room) or VERBS[verb].clears:
            return table, key
        for other in self._tables.values():
            while not self._has_room(key, room) and other.due <= now:
                self._sweep(other, now)
        if self._has_room(key, room):
            return table, key
        full_group = self._shares.find_full_group(key, room - self._entries) if self._shares is not None else None
        full = self._entries >= room
        if VERBS[verb].charges:
            self._overflowed += 1
            self._note_overflow(None if full else full_group)
        if self.overflow == "deny":
            return None
        together = shared_key(full_group)
        return table, OVERFLOW_KEY if full_group is None or (full and together not in table.entries) else together

    def _note_overflow(self, full_group: Hashable | None) -> None:
        """Schedule one warning: that a group has no room although others have, or that the store is full."""
        if full_group is None:
            self._warn = self._warn or not self._warned
            self._warned = True
        elif not self._group_warned:
            self._group_warned = self._warn = True
            self._full_group = full_group

    def _has_room(self, key: Key, room: int) -> bool:
        """Return whether a new key may have its own entry, if the store has room for `room` keys in all."""
        free = room - self._entries
        # While less than half of the store is used, no group can have more keys than there are free places.
        return free > 0 and (
            self._shares is None or self._entries < free or self._shares.find_full_group(key, free) is None
        )

    def _sweep(self, table: Table, now: int) -> None:
        if table.due <= now:
            self._counting = True
            self._entries -= table.sweep(now)
            self._counting = False
            self._group_warned = self._group_warned and 2 * self._entries >= self.max_entries

    def _warn_full(self) -> None:
        """Log that the store or a group is full, without the lock: a log handler may be slow, or call this store."""
        self._warn = False
        full_group, self._full_group = self._full_group, None
        count, effect = self._entries, "share one bucket" if self.overflow == "share" else "are denied"
        if full_group is None:
            message = "memory store is full: %d live keys (max_entries); new keys of a policy %s until some expire"
            log.warning(message, count, effect)
        else:
            message = "memory store: %d live keys; group %s is over its share of max_entries, its new keys %s until "
            message += "some expire"
            log.warning(message, count, full_group, effect)

    def _deny_full(self, policy: Policy, costs: Sequence[int], now: int) -> Decision:
        wait = max(1, min(table.due for table in self._tables.values()) - now)
        pairs = zip(policy.limits, costs, strict=True)
        views = tuple(View((0, NEVER if cost > limit.burst else wait, wait)) for limit, cost in pairs)
        return Decision.of_views(now, policy.limits, views, within_limits=False)

    def _write(self, table: Table, key: Key, policy: Policy, states: States, now: int) -> None:
        """Store the new states, together with live states of limits that are no longer in the policy."""
        old = table.entries.get(key)
        if old is not None and any(states):  # the usual cases: a key with a state of exactly this policy
            if old[0] is policy.only:
                table.entries[key] = states[0]  # type: ignore[assignment]  # it is not None
                return
            if old[0] is policy.limits:
                table.entries[key] = (policy.limits, states)
                return
        entry = write_entry(old, policy, states, now)
        if entry is None:
            self._forget(table, key)
            return
        if old is None and key is not OVERFLOW_KEY:
            self._add(table, key, entry, expires(entry), now)  # _slot has checked that there is room
        else:
            table.entries[key] = entry

    def _insert(self, table: Table, key: Key, entry: TableEntry, ends: int, now: int) -> bool:
        """Add the entry of a new key, which expires at `ends`, if there is room; returns whether there was."""
        if self._counting:
            self._recount()
        if not self._has_room(key, self.max_entries):
            return False
        self._add(table, key, entry, ends, now)
        return True

    def _add(self, table: Table, key: Key, entry: TableEntry, ends: int, now: int) -> None:
        self._counting = True
        table.register(key, ends, now)
        table.entries[key] = entry
        self._entries += 1
        self._counting = False
        self._warned = self._warned and self._entries >= self.max_entries

    def _recount(self) -> None:
        """Count the keys again, after a call was interrupted while it changed their number."""
        self._entries = self._count()
        if self._shares is not None:
            wheels = [tuple(table.wheel.values()) for table in self._tables.values()]
            self._shares.recount(key for wheel in wheels for keys in wheel for key in keys)
        self._counting = False

    def _count(self) -> int:
        return sum(len(table.entries) - (OVERFLOW_KEY in table.entries) for table in list(self._tables.values()))

    def _forget(self, table: Table, key: Key) -> None:
        if self._counting:
            self._recount()
        if key is OVERFLOW_KEY:
            table.entries.pop(key, None)
        elif key in table.entries:
            self._counting = True
            table.forget(key)
            self._entries -= 1
            self._counting = False

    def metrics(self) -> dict[str, int]:
        """Return the number of keys, its limit, and the number of calls whose key found no room."""
        entries = self._count() if self._counting else self._entries
        return {"entries": entries, "max_entries": self.max_entries, "overflowed": self._overflowed}


def has_twice(rows: Sequence[tuple[Table, Key, TableEntry, TableEntry | None]]) -> bool:
    """Return whether two rows are of the same entry: a call has the same key twice."""
    if len(rows) == 2:  # noqa: PLR2004 - the usual call; faster than a set
        return rows[0][2] is rows[1][2]
    return len({id(entry) for _, _, entry, _ in rows}) < len(rows)


def keep_views(decision: Decision) -> Decision:
    """Compute the views of a decision whose states are not stored, if the next charge overwrites one: that of a log."""
    for limit in decision.policy_limits:
        if limit.rules.logged:
            return decision.with_views()
    return decision
