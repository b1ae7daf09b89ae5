"""The specialized `try_acquire` of the default limit: a policy with one token bucket.

It decides what `MemoryStore.apply_one` would decide, in about half of the time, and is the only such function: the
lock, the look-ups and `charge_bucket` are written out. It serves integer costs at keys that have a state of exactly
this limit, and at new keys for which there is room. All other calls go to the `try_acquire` that it was built from,
after the lock is released; tests compare the two. `stores.token` explains how the lock is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.clock import yield_thread
from tidegate.core._decision import Decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._policy import Cost, Key
    from tidegate.core._limit import Limit
    from tidegate.stores._base import T, TryAcquire
    from tidegate.stores._memory.table import Table, TableEntry
    from tidegate.stores._token import Token


ONE: Final[object] = 1


class StoreAccess(NamedTuple):
    """The parts of a store that it uses: its lock, its clock, and what adds the entry of a new key if there is room."""

    token: Token
    ns: Callable[[], int]
    insert: Callable[[Table, Key, TableEntry, int, int], bool]


def build_try_acquire(  # noqa: C901 - with the lock written out
    limit: Limit, limits: tuple[Limit, ...], table: Table, access: StoreAccess, other_calls: TryAcquire[T]
) -> TryAcquire[T]:
    """Build it for the only limit of a policy, whose limits are `limits`, and the keys of that policy."""
    token, ns, insert = access
    release = token.append
    entries, capacity, rate, scale = table.entries, limit.capacity, limit.rate, limit.scale
    burst, round_up, one, charged = limit.burst, rate - 1, ONE, (0,)

    def try_acquire(key: Key, cost: Cost = 1) -> Decision | T:  # noqa: C901 - as above
        # True and 1.0 are no costs. `is` is faster than `==`, for the cost of most calls.
        taken = scale if cost is one else cost * scale if cost.__class__ is int and 0 < cost <= burst else 0
        if taken:
            while True:
                try:
                    del token[0]
                except IndexError:
                    yield_thread(0)
                else:
                    break
            try:
                now = ns() // 1000
                owner, level, at, marks = entry = entries[key]
                if owner is limit and not marks and now < table.due:
                    # charge_bucket, inlined: the function call would cost a tenth of the decision.
                    if now > at:
                        level += (now - at) * rate
                        if level > capacity:  # noqa: PLR1730 - min() would cost a fifth of the decision
                            level = capacity
                        at = now
                    level -= taken
                    if level < 0:
                        return Decision((False, now, limits, (entry,), (cost,)))  # type: ignore[arg-type]  # an integer
                    entries[key] = state = (limit, level, at, marks)
                    return Decision((True, now, limits, (state,), charged))
            except KeyError:
                state = (limit, capacity - taken, now, ())
                ends = now + (taken + round_up) // rate
                if key.__class__ is str and now < table.due and insert(table, key, state, ends, now):
                    return Decision((True, now, limits, (state,), charged))
            except (ValueError, TypeError):
                pass  # a state of another shape, or not a valid key
            finally:
                release(None)
        return other_calls(key, cost)

    return try_acquire
