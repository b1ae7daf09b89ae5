"""The fast path of `peek` and `usage` in the memory store: the same as `memory.fast_path`, without changing a state.

Decisions are built from tuples, as in `memory.fast_path`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.clock import yield_thread
from tidegate.core.bounds import MAX_INTEGER
from tidegate.core.decision import Decision, acquire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.decision import States
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores.base import Disable, T, TryAcquire
    from tidegate.stores.memory.fast_path import StoreAccess
    from tidegate.stores.memory.table import Table


def build_fast_peek(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    """Build the fast path of a policy, and append to `disablers` a function that sends all its calls to `slow_path`.

    It serves integer costs, at keys with a state of exactly this policy and at new keys for which there is room. The
    views are computed at once, since the next charge may overwrite a log.
    """
    build = _several if policy.only is None else _one_limit
    return build(policy, table, slow_path, access, disablers)


def _one_limit(  # noqa: C901 - with the lock written out
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    token, ns, _, has_room = access
    release = token.append
    entries, limits = table.entries, policy.limits
    limit = limits[0]
    charge, view = limit.charge, limit.view

    max_cost = MAX_INTEGER

    def disable() -> None:
        nonlocal max_cost
        max_cost = -1

    disablers.append(disable)

    def peek(key: Key, cost: Cost = 1) -> Decision | T:
        if cost.__class__ is int and 0 <= cost <= max_cost:
            while True:
                try:
                    del token[0]
                except IndexError:
                    yield_thread(0)
                else:
                    break
            try:
                now = ns() // 1000
                entry = entries.get(key)
                known = entry[0] is limit if entry is not None else key.__class__ is str and has_room(key)
                if known and now < table.due:
                    if not cost:
                        return Decision((True, now, limits, (view(entry, limit, 0, now),), None))
                    state = charge(entry, limit, cost, now)
                    if state is None:
                        return Decision((False, now, limits, (view(entry, limit, cost, now),), None))
                    return Decision((True, now, limits, (view(state, limit, 0, now),), None))
            except TypeError:
                pass  # not a valid key
            finally:
                release(None)
        return slow_path(key, cost)

    return peek


def _several(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    token, ns, _, has_room = access
    release = token.append
    entries, limits, ones = table.entries, policy.limits, policy.one
    no_states: States = (None,) * len(limits)
    nothing: Sequence[int] = (0,) * len(limits)

    max_cost = MAX_INTEGER if policy.counted else 0  # without a unit to count, an integer other than 0 is an error

    def disable() -> None:
        nonlocal max_cost
        max_cost = -1

    disablers.append(disable)

    def peek(key: Key, cost: Cost = 1) -> Decision | T:
        if cost.__class__ is int and 0 <= cost <= max_cost:
            while True:
                try:
                    del token[0]
                except IndexError:
                    yield_thread(0)
                else:
                    break
            try:
                now = ns() // 1000
                entry = entries.get(key)
                known = entry[0] is limits if entry is not None else key.__class__ is str and has_room(key)
                if known and now < table.due:
                    states: States = no_states if entry is None else entry[1]
                    allowed, costs = True, nothing
                    if cost:
                        allowed, states, costs = acquire(limits, states, [cost * one for one in ones], now)
                    triples = zip(limits, states, costs, strict=True)
                    views = [limit.view(state, limit, each, now) for limit, state, each in triples]
                    return Decision((allowed, now, limits, views, None))
            except TypeError:
                pass  # not a valid key
            finally:
                release(None)
        return slow_path(key, cost)

    return peek
