"""The short way through the memory store: `try_acquire` with everything a usual call needs at hand.

A usual call costs 1 and finds a state of exactly its policy, or none. Every function here is `MemoryStore.apply_one`
with what such a call does not need left out, built once per limiter; tests drive both and compare. Any other call goes
to `otherwise`, after the lock is given back. How it is taken, and why `held` is set and unset, says `tidegate.lock`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.core.bounds import ceil_div
from tidegate.core.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.lock import Lock
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores.memory.table import Entry, Table

    TryAcquire = Callable[[Key, Cost], Decision]
    Retire = Callable[[], None]


class StoreAccess(NamedTuple):
    """What the functions here need of a store: its lock, its clock, and how it keeps a new key."""

    lock: Lock
    ns: Callable[[], int]
    insert: Callable[[Table, Key, Entry, int, int], bool]


def shortcut(
    policy: Policy, table: Table, otherwise: TryAcquire, guard: StoreAccess, retire: list[Retire]
) -> TryAcquire:
    """Choose the short way for a policy, and add to `retire` what ends its use, for whoever still holds it."""
    if 0 in policy.one:
        return otherwise
    buckets = all(limit.algorithm == "token_bucket" for limit in policy.limits)
    if policy.only is None:
        build = _several_buckets if buckets else _several
    else:
        logs = policy.limits[0].algorithm == "sliding_log"
        build = _one_bucket if buckets else _one_log if logs else _one_limit
    return build(policy, table, otherwise, guard, retire)


def _one_bucket(
    policy: Policy, table: Table, otherwise: TryAcquire, guard: StoreAccess, retire: list[Retire]
) -> TryAcquire:
    lock, ns, insert = guard
    token, give, contend = lock.token, lock.give, lock.contend
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,)
    limit = limits[0]
    capacity, rate, scale = limit.capacity, limit.rate, limit.scale
    first, lasts = capacity - scale, ceil_div(scale, rate)  # what a call leaves in a full bucket, and for how long

    usual: int | None = 1

    def end() -> None:
        nonlocal usual
        usual = None  # no cost is usual any more: cheaper than another question at each call

    retire.append(end)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision:
        if cost == usual:
            held = token
            try:
                del held[0]
            except IndexError:
                contend()
            try:
                now = ns() // 1000
                owner, level, at = entry = entries[key]
                if owner is limit and now < table.due:
                    # This is charge_bucket, written out: the call alone would cost a tenth of the decision.
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
                if key.__class__ is str and now < table.due and insert(table, key, state, now + lasts, now):
                    return Decision((True, now, limits, (state,), nothing))
            except (ValueError, TypeError):
                pass  # a state of another shape, or no key at all
            finally:
                give(None)
            del held
        return otherwise(key, cost)

    return try_acquire


def _one_log(
    policy: Policy, table: Table, otherwise: TryAcquire, guard: StoreAccess, retire: list[Retire]
) -> TryAcquire:
    lock, ns, _ = guard
    token, give, contend = lock.token, lock.give, lock.contend
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,)
    limit = limits[0]
    charge, quota, length = limit.charge, limit.quota, limit.length

    usual: int | None = 1

    def end() -> None:
        nonlocal usual
        usual = None  # no cost is usual any more: cheaper than another question at each call

    retire.append(end)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision:
        if cost == usual:
            held = token
            try:
                del held[0]
            except IndexError:
                contend()
            try:
                now = ns() // 1000
                owner, log, head, tail, base = entry = entries[key]
                if owner is limit and now < table.due:
                    times, sums = log
                    # This is charge_log, written out, where no entry leaves and none is to be overwritten.
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
                pass  # a new key, a state of another shape, or no key at all
            finally:
                give(None)
            del held
        return otherwise(key, cost)

    return try_acquire


def _one_limit(
    policy: Policy, table: Table, otherwise: TryAcquire, guard: StoreAccess, retire: list[Retire]
) -> TryAcquire:
    lock, ns, _ = guard
    token, give, contend = lock.token, lock.give, lock.contend
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,)
    limit = limits[0]
    charge = limit.charge

    usual: int | None = 1

    def end() -> None:
        nonlocal usual
        usual = None  # no cost is usual any more: cheaper than another question at each call

    retire.append(end)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision:
        if cost == usual:
            held = token
            try:
                del held[0]
            except IndexError:
                contend()
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
                pass  # a new key, or no key at all
            finally:
                give(None)
            del held
        return otherwise(key, cost)

    return try_acquire


def _several(
    policy: Policy, table: Table, otherwise: TryAcquire, guard: StoreAccess, retire: list[Retire]
) -> TryAcquire:
    lock, ns, _ = guard
    token, give, contend = lock.token, lock.give, lock.contend
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,) * len(policy.limits)
    charges = [(limit.charge, limit) for limit in limits]

    usual: int | None = 1

    def end() -> None:
        nonlocal usual
        usual = None  # no cost is usual any more: cheaper than another question at each call

    retire.append(end)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision:
        if cost == usual:
            held = token
            try:
                del held[0]
            except IndexError:
                contend()
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
                pass  # a new key, or no key at all
            finally:
                give(None)
            del held
        return otherwise(key, cost)

    return try_acquire


def _several_buckets(
    policy: Policy, table: Table, otherwise: TryAcquire, guard: StoreAccess, retire: list[Retire]
) -> TryAcquire:
    lock, ns, insert = guard
    token, give, contend = lock.token, lock.give, lock.contend
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,) * len(policy.limits)
    numbers = [(limit, limit.capacity, limit.rate, limit.scale) for limit in limits]
    lasts = max(ceil_div(limit.scale, limit.rate) for limit in limits)

    usual: int | None = 1

    def end() -> None:
        nonlocal usual
        usual = None  # no cost is usual any more: cheaper than another question at each call

    retire.append(end)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision:
        if cost == usual:
            held = token
            try:
                del held[0]
            except IndexError:
                contend()
            try:
                now = ns() // 1000
                known, before = entries[key]
                if known is limits and now < table.due:
                    states = []
                    # One for each limit, since the entry is of these; strict=True would be a tenth of the decision.
                    for (limit, capacity, rate, scale), (owner, level, at) in zip(numbers, before):  # noqa: B905 - see above
                        if owner is not limit:
                            break
                        if now > at:  # charge_bucket, written out, as in _one_bucket
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
                states = [(limit, capacity - scale, now) for limit, capacity, _, scale in numbers]
                if key.__class__ is str and now < table.due and insert(table, key, (limits, states), now + lasts, now):
                    return Decision((True, now, limits, states, nothing))
            except (ValueError, TypeError):
                pass  # a state of another shape, or no key at all
            finally:
                give(None)
            del held
        return otherwise(key, cost)

    return try_acquire
