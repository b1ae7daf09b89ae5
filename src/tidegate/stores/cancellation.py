"""Gives back the charge of a call whose task was cancelled, the same for every store.

A decision charges when it is made; the caller of a cancelled task never reads it. Every store therefore promises:

- A call that has not been sent is not sent (`DROPPABLE`). Corrections and resets are sent all the same.
- A call that is under way, or answered but not read yet, goes on in the background. The cancelled task ends at once;
  when the answer is there, its charge is corrected (`corrections`), and waiters of the key are woken.
- A call whose answer is lost may have been charged. It stays charged: nobody can tell, and this is the safe side.

Closing a store waits for what is under way in the background, for `MAX_CLOSING` seconds at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.stores.base import merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.core.limit import Limit
    from tidegate.stores.base import Ask

CHARGING: Final = frozenset(("acquire", "hold"))
DROPPABLE: Final = frozenset(("acquire", "hold", "peek"))  # nothing is missing if a call of these is never made
MAX_CLOSING: Final = 1.0  # seconds that closing a store waits for calls under way
TRANSIT: Final = SECOND  # microseconds that a correction may take to reach the store


class Correction(NamedTuple):
    """What `Store.apply` is asked to give a charge back: `adjust`, these asks, and when they were charged."""

    asks: list[Ask]
    at: int | None


def corrections(verb: str, asks: Sequence[Ask], decisions: Sequence[Decision], passed: int) -> list[Correction]:
    """Return what gives back the charge of a call that was made `passed` microseconds ago; nothing if it was denied.

    Windows, logs and marked buckets correct the charge of the decision's instant. A bucket that was charged without
    a mark does not remember it: it gets back what it cannot have refilled meanwhile (see `bucket_credit`).
    """
    if verb not in CHARGING or not decisions or not decisions[0][0]:
        return []
    places, merged = merge(asks)
    answers = dict(zip(places, decisions, strict=True))
    marked: list[Ask] = []
    unmarked: list[Ask] = []
    for place, (policy, key, costs) in enumerate(merged):
        decision = answers[place]
        rows = list(zip(policy.limits, costs, decision.views, strict=True))
        buckets = [verb != "hold" and limit.algorithm == "token_bucket" for limit in policy.limits]
        marked.append((policy, key, tuple(0 if bucket else -cost for cost, bucket in zip(costs, buckets, strict=True))))
        credits = [bucket_credit(limit, cost, view[2], passed + TRANSIT) for limit, cost, view in rows]
        unmarked.append((policy, key, tuple(-c if bucket else 0 for c, bucket in zip(credits, buckets, strict=True))))
    found = (Correction(_needed(marked), decisions[0].at), Correction(_needed(unmarked), None))
    return [correction for correction in found if correction.asks]


def _needed(asks: Iterable[Ask]) -> list[Ask]:
    return [ask for ask in asks if any(ask[2])]


def bucket_credit(limit: Limit, cost: int, reset: int, passed: int) -> int:
    """Return how many permits an unmarked bucket gets back of a charge that left it `reset` microseconds from full.

    Had the charge not been made, the bucket might have been full within `passed` microseconds, and what it refills
    then is lost. That part is not given back, down to less than one permit: the bucket has refilled it by itself.
    """
    if limit.algorithm != "token_bucket" or not cost:
        return 0
    missing = max(0, (reset - 1) * limit.rate - cost * limit.scale)  # at least, before the charge
    overflow = max(0, passed * limit.rate - missing) // limit.scale
    return max(0, cost - overflow)
