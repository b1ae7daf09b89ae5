"""Adds up the asks of one call that concern the same key, so that a store decides each key once.

Policies are the same if they have the same name. If a call has two of them with different limits, the key is asked
about all limits of both. A limit that both have is charged the sum of both costs; if its quota differs, the smaller one
decides, because the sum must be within both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._limit import Limit
from tidegate.errors import ConfigError
from tidegate.stores._base import Alternatives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy import Key, Policy
    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask

MAX_CACHED: Final = 256  # policies that were combined from several
SIZES: Final = ("quota", "burst")  # the fields in which two limits can be compared


class MergedAsks(NamedTuple):
    """The asks for a store to decide, each about another key; and for every original ask, the index of its own."""

    asks: Sequence[Ask]
    places: Sequence[int]
    originals: Sequence[Ask]

    def split(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Return the decision about every original ask, from the decisions about `asks`."""
        if self.asks is self.originals:
            return list(decisions)
        pairs = zip(self.places, self.originals, strict=True)
        return [own_decision(ask[0], decisions[place]) for place, ask in pairs]


def merge(asks: Sequence[Ask]) -> MergedAsks:
    """Add up asks about the same key. Alternatives stay as they are: each is decided by itself."""
    if isinstance(asks, Alternatives) or len({(policy.name, key) for policy, key, _ in asks}) == len(asks):
        return MergedAsks(asks, range(len(asks)), asks)
    indices: dict[tuple[str, Key], int] = {}
    merged: list[Ask] = []
    places = []
    for ask in asks:
        policy, key, _ = ask
        place = indices.setdefault((policy.name, key), len(merged))
        if place == len(merged):
            merged.append(ask)
        else:
            merged[place] = add_asks(merged[place], ask)
        places.append(place)
    return MergedAsks(merged, places, asks)


def add_asks(first: Ask, second: Ask) -> Ask:
    """Return one ask in place of two about the same key."""
    one, key, costs = first
    other, _, more = second
    policy = one if one is other or one.limits == other.limits else combine(one, other)
    sums = dict.fromkeys((limit.identity for limit in policy.limits), 0)
    for limits, amounts in ((one.limits, costs), (other.limits, more)):
        for limit, amount in zip(limits, amounts, strict=True):
            sums[limit.identity] += amount
    return policy, key, tuple(max(-MAX_INTEGER, min(MAX_INTEGER, total)) for total in sums.values())


@lru_cache(MAX_CACHED)
def combine(one: Policy, other: Policy) -> Policy:
    """Return a policy with the limits of two policies of the same name."""
    limits = {limit.identity: limit for limit in one.limits}
    for limit in other.limits:
        same = limits.setdefault(limit.identity, limit)
        limits[limit.identity] = stricter(one.name, same, limit)
    return one.with_limits(tuple(limits.values()))


def stricter(name: str, one: Limit, other: Limit) -> Limit:
    """Return the stricter of two limits of the same name. Raises ConfigError if neither is."""
    fields = [field for field in Limit.__match_args__ if field not in SIZES]
    if all(getattr(one, field) == getattr(other, field) for field in fields):
        smaller, larger = sorted((one, other), key=lambda limit: (limit.quota, limit.burst))
        if smaller.burst <= larger.burst:
            return smaller
    raise ConfigError(
        f"one call has two policies named {name!r} with different limits named {one.name!r}, '{one}' and '{other}': "
        "rename one of the policies",
        field="policy",
    )


def own_decision(policy: Policy, decision: Decision) -> Decision:
    """Return a decision about the limits of a policy, from one about these and others."""
    if decision.policy_limits is policy.limits or decision.policy_limits == policy.limits:
        return decision
    places = {limit.identity: place for place, limit in enumerate(decision.policy_limits)}
    return decision.about(policy.limits, [places[limit.identity] for limit in policy.limits])
