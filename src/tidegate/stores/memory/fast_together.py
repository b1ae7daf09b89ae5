"""Charges one key of each policy in one step: the limits that apply to one request, usually one or two.

It makes the same decisions as `MemoryStore.apply`, for policies with one limit each, keys that have a state of exactly
their policy, and a cost of 1, if all limits allow it. In all other cases it charges nothing and returns None; then
`apply` decides. `token` explains how the lock is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.clock import yield_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.algorithms import State, View
    from tidegate.core.limit import Limit
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import AcquireTogether
    from tidegate.stores.memory.fast_path import StoreAccess
    from tidegate.stores.memory.table import Table


def build_fast_together(
    policies: Sequence[Policy], tables: Sequence[Table], access: StoreAccess
) -> AcquireTogether | None:
    """Build the function that charges a key of each policy; None if these policies need `apply`."""
    if any(policy.only is None or policy.one != (1,) for policy in policies):
        return None
    if len({policy.name for policy in policies}) < len(policies):
        return None  # two keys could be the same entry
    logs = all(policy.limits[0].rules.rolling for policy in policies)
    build = {1: _one_log, 2: _two_logs}.get(len(policies), _several) if logs else _several
    return build(policies, tables, access)


def _several(policies: Sequence[Policy], tables: Sequence[Table], access: StoreAccess) -> AcquireTogether:
    token, ns, _, _ = access
    release = token.append
    parts = [
        (table, table.entries, limit, limit.charge)
        for policy, table in zip(policies, tables, strict=True)
        for limit in policy.limits
    ]

    def acquire(keys: Sequence[Key]) -> tuple[int, Sequence[View]] | None:
        while True:
            try:
                del token[0]
            except IndexError:
                yield_thread(0)
            else:
                break
        try:
            now = ns() // 1000
            states = []
            for (table, entries, limit, charge), key in zip(parts, keys, strict=True):
                entry = entries[key]
                state = charge(entry, limit, 1, now) if entry[0] is limit and now < table.due else None
                if state is None:
                    return None
                states.append(state)
            for (_, entries, _, _), key, state in zip(parts, keys, states, strict=True):
                entries[key] = state
        except (KeyError, TypeError):
            return None  # a new key, or not a valid key
        else:
            return now, [view_state(state, now) for state in states]
        finally:
            release(None)

    return acquire


def view_state(state: State, now: int) -> View:
    """Return the view of a state that was just charged."""
    limit: Limit = state[0]
    return limit.view(state, limit, 0, now)


def _one_log(policies: Sequence[Policy], tables: Sequence[Table], access: StoreAccess) -> AcquireTogether:
    """Charge a single log, in half of the time of `_several`."""
    token, ns, _, _ = access
    release = token.append
    (table,), (limit,) = tables, policies[0].limits
    entries, charge, length, quota = table.entries, limit.charge, limit.length, limit.quota

    def acquire(keys: Sequence[Key]) -> tuple[int, Sequence[View]] | None:
        (key,) = keys
        while True:
            try:
                del token[0]
            except IndexError:
                yield_thread(0)
            else:
                break
        try:
            now = ns() // 1000
            owner, log, head, tail, base = state = entries[key]
            if owner is not limit or now >= table.due:
                return None
            # charge_log, inlined for the case that no entry expires and none is overwritten, as in fast_path.
            times, sums = log
            last = tail - 1
            if times[head] <= now - length or now < times[last] or len(times) != tail:
                charged = charge(state, limit, 1, now)
                if charged is None:
                    return None
                entries[key] = charged
                return now, (view_state(charged, now),)
            total = sums[last] + 1
            left = quota - total + base
            if left < 0:
                return None
            times.append(now)
            sums.append(total)
            entries[key] = (limit, log, head, tail + 1, base)
            return now, ((left, 0, length),)  # noqa: TRY300 - an else clause would cost more
        except (LookupError, ValueError, TypeError):
            return None  # a new key, a state of another shape, or not a valid key
        finally:
            release(None)

    return acquire


def _two_logs(policies: Sequence[Policy], tables: Sequence[Table], access: StoreAccess) -> AcquireTogether:  # noqa: C901, PLR0915 - see below
    """Unroll the loop for two logs, which are the defaults of a category and a route: that takes half of the time."""
    token, ns, _, _ = access
    release = token.append
    (table_1, table_2), (limit_1, limit_2) = tables, [policy.limits[0] for policy in policies]
    entries_1, entries_2 = table_1.entries, table_2.entries
    charge_1, length_1, quota_1 = limit_1.charge, limit_1.length, limit_1.quota
    charge_2, length_2, quota_2 = limit_2.charge, limit_2.length, limit_2.quota

    def acquire(keys: Sequence[Key]) -> tuple[int, Sequence[View]] | None:  # noqa: C901, PLR0911, PLR0912 - one for each reason, and the lock written out
        key_1, key_2 = keys
        while True:
            try:
                del token[0]
            except IndexError:
                yield_thread(0)
            else:
                break
        try:
            now = ns() // 1000
            owner_1, log_1, head_1, tail_1, base_1 = state_1 = entries_1[key_1]
            owner_2, log_2, head_2, tail_2, base_2 = state_2 = entries_2[key_2]
            if owner_1 is not limit_1 or owner_2 is not limit_2 or now >= table_1.due or now >= table_2.due:
                return None
            # charge_log, inlined for the case that no entry expires and none is overwritten, as in fast_path.
            times, sums = log_1
            last = tail_1 - 1
            if times[head_1] <= now - length_1 or now < times[last] or len(times) != tail_1:
                charged = charge_1(state_1, limit_1, 1, now)
                if charged is None:
                    return None
                state_1, view_1 = charged, view_state(charged, now)
            else:
                total = sums[last] + 1
                left = quota_1 - total + base_1
                if left < 0:
                    return None
                times.append(now)
                sums.append(total)
                state_1, view_1 = (limit_1, log_1, head_1, tail_1 + 1, base_1), (left, 0, length_1)
            times, sums = log_2
            last = tail_2 - 1
            if times[head_2] <= now - length_2 or now < times[last] or len(times) != tail_2:
                charged = charge_2(state_2, limit_2, 1, now)
                if charged is None:
                    return None
                state_2, view_2 = charged, view_state(charged, now)
            else:
                total = sums[last] + 1
                left = quota_2 - total + base_2
                if left < 0:
                    return None
                times.append(now)
                sums.append(total)
                state_2, view_2 = (limit_2, log_2, head_2, tail_2 + 1, base_2), (left, 0, length_2)
            entries_1[key_1], entries_2[key_2] = state_1, state_2
            return now, (view_1, view_2)  # noqa: TRY300 - an else clause would cost more
        except (LookupError, ValueError, TypeError):
            return None  # a new key, a state of another shape, or not a valid key
        finally:
            release(None)

    return acquire
