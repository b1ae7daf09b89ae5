"""The short way through the memory store: `try_acquire` with everything a usual call needs at hand.

A usual call costs 1 and finds a state of exactly its policy. Every function here is `MemoryStore.apply_one` with what
such a call does not need left out, built once per limiter; tests drive both and compare. Any other call goes to
`otherwise`, after the token is given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.core.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores.table import Table

    TryAcquire = Callable[[Key, Cost], Decision]


class Guard(NamedTuple):
    """How a store is entered and left, and its clock: take the token, or contend for it; give it back."""

    take: Callable[[], object]
    give: Callable[[None], object]
    contend: Callable[[], object]
    ns: Callable[[], int]


def shortcut(policy: Policy, table: Table, otherwise: TryAcquire, guard: Guard) -> TryAcquire:
    """Choose the short way for a policy."""
    if 0 in policy.one:
        return otherwise
    if policy.only is None:
        return _several(policy, table, otherwise, guard)
    build = _one_bucket if policy.only.algorithm == "token_bucket" else _one_limit
    return build(policy, table, otherwise, guard)


def _one_bucket(policy: Policy, table: Table, otherwise: TryAcquire, guard: Guard) -> TryAcquire:
    take, give, contend, ns = guard
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,)
    limit = limits[0]
    capacity, rate, scale = limit.capacity, limit.rate, limit.scale

    def try_acquire(key: Key, cost: Cost = 1) -> Decision:
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
                        level = min(level, capacity)
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

    return try_acquire


def _one_limit(policy: Policy, table: Table, otherwise: TryAcquire, guard: Guard) -> TryAcquire:
    take, give, contend, ns = guard
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,)
    limit = limits[0]
    charge = limit.charge

    def try_acquire(key: Key, cost: Cost = 1) -> Decision:
        if cost == 1:
            try:
                take()
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
        return otherwise(key, cost)

    return try_acquire


def _several(policy: Policy, table: Table, otherwise: TryAcquire, guard: Guard) -> TryAcquire:
    take, give, contend, ns = guard
    entries, limits, one, nothing = table.entries, policy.limits, policy.one, (0,) * len(policy.limits)
    charges = [(limit.charge, limit) for limit in limits]

    def try_acquire(key: Key, cost: Cost = 1) -> Decision:
        if cost == 1:
            try:
                take()
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
        return otherwise(key, cost)

    return try_acquire
