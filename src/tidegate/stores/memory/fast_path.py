"""The fast path of the memory store: a `try_acquire` specialized for the policy of one limiter.

The fast path serves calls that find a state of exactly their policy, or no state. Their cost is an integer, or a
mapping if the policy has several limits. Every function here does what `MemoryStore.apply_one` does, without the parts
that such calls do not need; tests compare the two. A cost of 1 has its own functions, which saves a few nanoseconds;
they pass other costs on to `_other_costs_of_one` or `_other_costs_of_several`, and these to `_mapped_costs`. All other
calls go to `slow_path`, after the lock is released. `token` explains
how the lock is taken. Decisions are built from tuples: `Decision.of_states` would cost a tenth of the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.clock import yield_thread
from tidegate.core.bounds import MAX_INTEGER, ceil_div
from tidegate.core.decision import Decision
from tidegate.errors import ConfigError
from tidegate.stores.base import NO_COST

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores.base import Disable, T, TryAcquire
    from tidegate.stores.memory.table import Table, TableEntry
    from tidegate.stores.token import Token


class StoreAccess(NamedTuple):
    """The parts of a store that the fast path uses: its lock (see `token`), its clock, and what it does with new keys.

    `insert` adds the entry of a new key if there is room; `has_room` returns whether there is.
    """

    token: Token
    ns: Callable[[], int]
    insert: Callable[[Table, Key, TableEntry, int, int], bool]
    has_room: Callable[[Key], bool]


def build_fast_path(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    """Build the fast path of a policy, and append to `disablers` a function that sends all its calls to `slow_path`."""
    if policy.only is None:
        slow_path = _mapped_costs(policy, table, slow_path, access, disablers)
    if 0 in policy.one:
        return slow_path
    buckets = all(limit.rules.refills for limit in policy.limits)
    if policy.only is None:
        build, other_costs = _several_buckets if buckets else _several, _other_costs_of_several
    else:
        build = _one_bucket if buckets else _one_log if policy.only.rules.rolling else _one_limit
        other_costs = _other_costs_of_one
    slow_path = other_costs(policy, table, slow_path, access, disablers)
    return build(policy, table, slow_path, access, disablers)


def _one_bucket(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    token, ns, insert, _ = access
    release = token.append
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,)
    limit = limits[0]
    capacity, rate, scale = limit.capacity, limit.rate, limit.scale
    first, lifetime = (
        capacity - scale,
        ceil_div(scale, rate),
    )  # the level after the first call, and how long that state lasts

    fast_cost: object = 1

    def disable() -> None:
        nonlocal fast_cost
        fast_cost = NO_COST  # cheaper than a further check in each call

    disablers.append(disable)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision | T:
        if cost is fast_cost:  # not True or 1.0, which are no costs
            while True:
                try:
                    del token[0]
                except IndexError:
                    yield_thread(0)
                else:
                    break
            try:
                now = ns() // 1000
                owner, level, at = entry = entries[key]
                if owner is limit and now < table.due:
                    # charge_bucket, inlined: the function call would cost a tenth of the decision.
                    if now > at:
                        level += (now - at) * rate
                        if level > capacity:  # noqa: PLR1730 - min() would cost a fifth of the decision
                            level = capacity
                        at = now
                    level -= scale
                    if level < 0:
                        return Decision((False, now, limits, (entry,), one))
                    entries[key] = state = (limit, level, at)
                    return Decision((True, now, limits, (state,), nothing))
            except KeyError:
                state = (limit, first, now)
                if key.__class__ is str and now < table.due and insert(table, key, state, now + lifetime, now):
                    return Decision((True, now, limits, (state,), nothing))
            except (ValueError, TypeError):
                pass  # a state of another shape, or not a valid key
            finally:
                release(None)
        return slow_path(key, cost)

    return try_acquire


def _one_log(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    token, ns, _, _ = access
    release = token.append
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,)
    limit = limits[0]
    charge, quota, length = limit.charge, limit.quota, limit.length

    fast_cost: object = 1

    def disable() -> None:
        nonlocal fast_cost
        fast_cost = NO_COST  # cheaper than a further check in each call

    disablers.append(disable)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision | T:
        if cost is fast_cost:  # not True or 1.0, which are no costs
            while True:
                try:
                    del token[0]
                except IndexError:
                    yield_thread(0)
                else:
                    break
            try:
                now = ns() // 1000
                owner, log, head, tail, base = entry = entries[key]
                if owner is limit and now < table.due:
                    times, sums = log
                    # charge_log, inlined for the case that no entry expires and none is overwritten.
                    if times[head] <= now - length or now < times[tail - 1] or len(times) != tail:
                        state = charge(entry, limit, 1, now)
                    elif (total := sums[tail - 1]) - base < quota:
                        times.append(now)
                        sums.append(total + 1)
                        state = (limit, log, head, tail + 1, base)
                    else:
                        state = None
                    if state is None:
                        return Decision((False, now, limits, (entry,), one))
                    entries[key] = state
                    return Decision((True, now, limits, (state,), nothing))
            except (KeyError, ValueError, TypeError):
                pass  # a new key, a state of another shape, or not a valid key
            finally:
                release(None)
        return slow_path(key, cost)

    return try_acquire


def _one_limit(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    token, ns, _, _ = access
    release = token.append
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,)
    limit = limits[0]
    charge = limit.charge

    fast_cost: object = 1

    def disable() -> None:
        nonlocal fast_cost
        fast_cost = NO_COST  # cheaper than a further check in each call

    disablers.append(disable)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision | T:
        if cost is fast_cost:  # not True or 1.0, which are no costs
            while True:
                try:
                    del token[0]
                except IndexError:
                    yield_thread(0)
                else:
                    break
            try:
                now = ns() // 1000
                entry = entries[key]
                if entry[0] is limit and now < table.due:
                    state = charge(entry, limit, 1, now)
                    if state is None:
                        return Decision((False, now, limits, (entry,), one))
                    entries[key] = state
                    return Decision((True, now, limits, (state,), nothing))
            except (KeyError, TypeError):
                pass  # a new key, or not a valid key
            finally:
                release(None)
        return slow_path(key, cost)

    return try_acquire


def _several(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    token, ns, _, _ = access
    release = token.append
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,) * len(policy.limits)
    charges = [(limit.charge, limit) for limit in limits]

    fast_cost: object = 1

    def disable() -> None:
        nonlocal fast_cost
        fast_cost = NO_COST  # cheaper than a further check in each call

    disablers.append(disable)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision | T:
        if cost is fast_cost:  # not True or 1.0, which are no costs
            while True:
                try:
                    del token[0]
                except IndexError:
                    yield_thread(0)
                else:
                    break
            try:
                now = ns() // 1000
                entry = entries[key]
                if entry[0] is limits and now < table.due:
                    before = entry[1]
                    states = []
                    for (charge, limit), state in zip(charges, before, strict=True):
                        state = charge(state, limit, 1, now)  # noqa: PLW2901 - before becomes after
                        if state is None:
                            return Decision((False, now, limits, before, one))
                        states.append(state)
                    entries[key] = (limits, states)
                    return Decision((True, now, limits, states, nothing))
            except (KeyError, TypeError):
                pass  # a new key, or not a valid key
            finally:
                release(None)
        return slow_path(key, cost)

    return try_acquire


def _several_buckets(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    token, ns, insert, _ = access
    release = token.append
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,) * len(policy.limits)
    parameters = [(limit, limit.capacity, limit.rate, limit.scale) for limit in limits]
    lifetime = max(ceil_div(limit.scale, limit.rate) for limit in limits)

    fast_cost: object = 1

    def disable() -> None:
        nonlocal fast_cost
        fast_cost = NO_COST  # cheaper than a further check in each call

    disablers.append(disable)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision | T:
        if cost is fast_cost:  # not True or 1.0, which are no costs
            while True:
                try:
                    del token[0]
                except IndexError:
                    yield_thread(0)
                else:
                    break
            try:
                now = ns() // 1000
                known, before = entries[key]
                if known is limits and now < table.due:
                    states = []
                    # Equal lengths: the entry is of these limits. strict=True would cost a tenth of the decision.
                    for (limit, capacity, rate, scale), (owner, level, at) in zip(parameters, before):  # noqa: B905 - see above
                        if owner is not limit:
                            break
                        if now > at:  # charge_bucket, inlined, as in _one_bucket
                            level += (now - at) * rate  # noqa: PLW2901 - before becomes after
                            if level > capacity:  # noqa: PLR1730 - as in _one_bucket
                                level = capacity  # noqa: PLW2901 - before becomes after
                            at = now  # noqa: PLW2901 - before becomes after
                        level -= scale  # noqa: PLW2901 - before becomes after
                        if level < 0:
                            return Decision((False, now, limits, before, one))
                        states.append((limit, level, at))
                    else:
                        entries[key] = (limits, states)
                        return Decision((True, now, limits, states, nothing))
            except KeyError:
                states = [(limit, capacity - scale, now) for limit, capacity, _, scale in parameters]
                if (
                    key.__class__ is str
                    and now < table.due
                    and insert(table, key, (limits, states), now + lifetime, now)
                ):
                    return Decision((True, now, limits, states, nothing))
            except (ValueError, TypeError):
                pass  # a state of another shape, or not a valid key
            finally:
                release(None)
        return slow_path(key, cost)

    return try_acquire


def _other_costs_of_one(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    token, ns, insert, _ = access
    release = token.append
    entries, limits, nothing = table.entries, policy.limits, (0,)
    limit = limits[0]
    charge, expires = limit.charge, limit.rules.expires

    max_cost = MAX_INTEGER

    def disable() -> None:
        nonlocal max_cost
        max_cost = -1

    disablers.append(disable)

    def try_acquire(key: Key, cost: Cost) -> Decision | T:
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
                entry = entries[key]
                if entry[0] is limit and now < table.due:
                    state = charge(entry, limit, cost, now) if cost else entry
                    if state is None:
                        return Decision((False, now, limits, (entry,), (cost,)))
                    entries[key] = state
                    return Decision((True, now, limits, (state,), nothing))
            except KeyError:
                if key.__class__ is str and cost and now < table.due:
                    state = charge(None, limit, cost, now)
                    if state is not None and insert(table, key, state, expires(state), now):
                        return Decision((True, now, limits, (state,), nothing))
            except TypeError:
                pass  # not a valid key
            finally:
                release(None)
        return slow_path(key, cost)

    return try_acquire


def _other_costs_of_several(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    token, ns, _, _ = access
    release = token.append
    entries, limits, nothing = table.entries, policy.limits, (0,) * len(policy.limits)
    charges = [(limit.charge, limit) for limit in limits]

    max_cost = MAX_INTEGER

    def disable() -> None:
        nonlocal max_cost
        max_cost = -1

    disablers.append(disable)

    def try_acquire(key: Key, cost: Cost) -> Decision | T:
        if cost.__class__ is int and 1 < cost <= max_cost:
            while True:
                try:
                    del token[0]
                except IndexError:
                    yield_thread(0)
                else:
                    break
            try:
                now = ns() // 1000
                entry = entries[key]
                if entry[0] is limits and now < table.due:
                    before = entry[1]
                    states = []
                    for (charge, limit), state in zip(charges, before, strict=True):
                        state = charge(state, limit, cost, now)  # noqa: PLW2901 - before becomes after
                        if state is None:
                            return Decision((False, now, limits, before, (cost,) * len(limits)))
                        states.append(state)
                    entries[key] = (limits, states)
                    return Decision((True, now, limits, states, nothing))
            except (KeyError, TypeError):
                pass  # a new key, or not a valid key
            finally:
                release(None)
        return slow_path(key, cost)

    return try_acquire


def _mapped_costs(
    policy: Policy, table: Table, slow_path: TryAcquire[T], access: StoreAccess, disablers: list[Disable]
) -> TryAcquire[T]:
    token, ns, _, _ = access
    release = token.append
    entries, limits, nothing = table.entries, policy.limits, (0,) * len(policy.limits)
    charges = [(limit.charge, limit) for limit in limits]
    read_costs = policy.costs

    mapping: type | None = dict

    def disable() -> None:
        nonlocal mapping
        mapping = None

    disablers.append(disable)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision | T:
        if cost.__class__ is mapping:
            try:
                costs = read_costs(cost)
            except ConfigError:
                return slow_path(key, cost)  # it may find the key invalid, which is reported first
            while True:
                try:
                    del token[0]
                except IndexError:
                    yield_thread(0)
                else:
                    break
            try:
                now = ns() // 1000
                entry = entries[key]
                if entry[0] is limits and now < table.due:
                    before = entry[1]
                    states = []
                    for (charge, limit), state, own in zip(charges, before, costs, strict=True):
                        if own:
                            state = charge(state, limit, own, now)  # noqa: PLW2901 - before becomes after
                            if state is None:
                                return Decision((False, now, limits, before, costs))
                        states.append(state)
                    entries[key] = (limits, states)
                    return Decision((True, now, limits, states, nothing))
            except (KeyError, TypeError):
                pass  # a new key, or not a valid key
            finally:
                release(None)
        return slow_path(key, cost)

    return try_acquire
