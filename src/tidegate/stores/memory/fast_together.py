"""Charges one key of each of several policies in one step: the limits that apply to one request, usually two.

It makes the same decisions as `MemoryStore.apply`, for policies with one limit each, keys that have a state of exactly
their policy, and a cost of 1, if all limits allow it. In all other cases it charges nothing and returns None; then
`apply` decides. `tidegate.lock` explains how the lock is taken and why `held` is set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.core.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.policy import Key, Policy
    from tidegate.stores.base import AcquireTogether
    from tidegate.stores.memory.fast_path import StoreAccess
    from tidegate.stores.memory.table import Table

ZERO_COST = (0,)  # the cost for which an allowed decision computes its views
PAIR = 2


def build_fast_together(
    policies: Sequence[Policy], tables: Sequence[Table], access: StoreAccess
) -> AcquireTogether | None:
    """Build the function that charges a key of each policy; None if these policies need `apply`."""
    if any(policy.only is None or policy.one != (1,) for policy in policies):
        return None
    if len({policy.name for policy in policies}) < len(policies):
        return None  # two keys could be the same entry
    logs = all(policy.limits[0].rules.rolling for policy in policies)
    build = _two_logs if logs and len(policies) == PAIR else _several
    return build(policies, tables, access)


def _several(policies: Sequence[Policy], tables: Sequence[Table], access: StoreAccess) -> AcquireTogether:
    lock, ns, _, _ = access
    token, release, contend = lock.token, lock.release, lock.contend
    parts = [
        (table, table.entries, policy.limits[0], policy.limits[0].charge, policy.limits)
        for policy, table in zip(policies, tables, strict=True)
    ]

    def acquire(keys: Sequence[Key]) -> Sequence[Decision] | None:
        held = token
        try:
            del held[0]
        except IndexError:
            contend()
        try:
            now = ns() // 1000
            decisions = []
            for (table, entries, limit, charge, limits), key in zip(parts, keys, strict=True):
                entry = entries[key]
                state = charge(entry, limit, 1, now) if entry[0] is limit and now < table.due else None
                if state is None:
                    return None
                decisions.append(Decision((True, now, limits, (state,), ZERO_COST)))
            for (_, entries, _, _, _), key, decision in zip(parts, keys, decisions, strict=True):
                entries[key] = decision[3][0]  # type: ignore[assignment]  # the state of an allowed decision
        except (KeyError, TypeError):
            return None  # a new key, or not a valid key
        else:
            return decisions
        finally:
            release(None)

    return acquire


def _two_logs(policies: Sequence[Policy], tables: Sequence[Table], access: StoreAccess) -> AcquireTogether:  # noqa: C901 - see below
    """Unroll the loop for two logs, which are the defaults of a category and a route: that takes half of the time."""
    lock, ns, _, _ = access
    token, release, contend = lock.token, lock.release, lock.contend
    (table_1, table_2), (limits_1, limits_2) = tables, [policy.limits for policy in policies]
    entries_1, entries_2, (limit_1,), (limit_2,) = table_1.entries, table_2.entries, limits_1, limits_2
    charge_1, length_1, quota_1 = limit_1.charge, limit_1.length, limit_1.quota
    charge_2, length_2, quota_2 = limit_2.charge, limit_2.length, limit_2.quota

    def acquire(keys: Sequence[Key]) -> Sequence[Decision] | None:  # noqa: PLR0911 - one for each reason
        key_1, key_2 = keys
        held = token
        try:
            del held[0]
        except IndexError:
            contend()
        try:
            now = ns() // 1000
            owner_1, log_1, head_1, tail_1, base_1 = state_1 = entries_1[key_1]
            owner_2, log_2, head_2, tail_2, base_2 = state_2 = entries_2[key_2]
            if owner_1 is not limit_1 or owner_2 is not limit_2 or now >= table_1.due or now >= table_2.due:
                return None
            # charge_log, inlined for the case that no entry expires and none is overwritten, as in fast_path.
            times, sums = log_1
            if times[head_1] <= now - length_1 or now < times[tail_1 - 1] or len(times) != tail_1:
                charged = charge_1(state_1, limit_1, 1, now)
                if charged is None:
                    return None
                state_1 = charged
            else:
                total = sums[tail_1 - 1]
                if total - base_1 >= quota_1:
                    return None
                times.append(now)
                sums.append(total + 1)
                state_1 = (limit_1, log_1, head_1, tail_1 + 1, base_1)
            times, sums = log_2
            if times[head_2] <= now - length_2 or now < times[tail_2 - 1] or len(times) != tail_2:
                charged = charge_2(state_2, limit_2, 1, now)
                if charged is None:
                    return None
                state_2 = charged
            else:
                total = sums[tail_2 - 1]
                if total - base_2 >= quota_2:
                    return None
                times.append(now)
                sums.append(total + 1)
                state_2 = (limit_2, log_2, head_2, tail_2 + 1, base_2)
            entries_1[key_1], entries_2[key_2] = state_1, state_2
            return (
                Decision((True, now, limits_1, (state_1,), ZERO_COST)),
                Decision((True, now, limits_2, (state_2,), ZERO_COST)),
            )
        except (LookupError, ValueError, TypeError):
            return None  # a new key, a state of another shape, or not a valid key
        finally:
            release(None)

    return acquire
