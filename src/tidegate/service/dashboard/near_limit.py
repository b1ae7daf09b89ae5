"""Which keys are near a limit: a note of the last decision about some of them. Nothing is decided by it.

Denied keys are always noted. Of the calls that are allowed, so many a second are while somebody watches (`left` is
filled up by whoever shows it), and none otherwise: then it costs them a look at one attribute.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, zero_costs

if TYPE_CHECKING:
    from tidegate.policy import Key

MAX_KEYS: Final = 256  # keys
DROPPED_WHEN_FULL: Final = 32  # at once when there are more: to find the first of a dictionary takes time
MAX_NOTES_PER_SECOND: Final = 200  # calls


class KeyNearLimit(NamedTuple):
    """How a key stands at the limit that it has used most of."""

    policy: str
    key: Key
    limit: str
    unit: str
    quota: int
    used: int
    remaining: int
    reset_after: float


class NearLimitKeys:
    """The last decision about each of the keys that were noted."""

    __slots__ = ("left", "seen")

    def __init__(self) -> None:
        """Know nobody."""
        self.seen: dict[tuple[str, Key], Decision] = {}
        self.left = 0  # calls that are allowed and noted still

    def note(self, policy: str, key: Key, decision: Decision) -> None:
        """Remember the decision; those noted first go when there are too many."""
        self.left -= self.left > 0
        self.seen.pop((policy, key), None)
        self.seen[policy, key] = decision
        if len(self.seen) > MAX_KEYS:
            for each in list(islice(self.seen, DROPPED_WHEN_FULL)):
                del self.seen[each]

    def forget(self, policy: str, key: Key) -> None:
        """Forget a key that was reset."""
        self.seen.pop((policy, key), None)

    def nearest(self, now: int, most: int) -> list[KeyNearLimit]:
        """Tell who has the smallest part of a limit left, the smallest first."""
        found: list[tuple[float, KeyNearLimit]] = []
        for (policy, key), decision in list(self.seen.items()):
            if decision.at + max(view[2] for view in decision.views) <= now:
                del self.seen[policy, key]  # its windows are over
                continue
            near = at_present(policy, key, decision, now)
            if near is not None:
                found.append(near)
        found.sort(key=lambda pair: pair[0])
        return [near for _, near in found[:most]]


def at_present(policy: str, key: Key, decision: Decision, now: int) -> tuple[float, KeyNearLimit] | None:
    """Tell how a key stands; None: it has used nothing that is not back by now.

    Where the states are at hand they are looked at as of now. Otherwise it is what was left then, with the time that is
    left of it.
    """
    at, costs = decision.at, decision[4]
    passed = 0 if costs is not None else now - at
    if costs is not None:
        at = max(at, now)
        decision = Decision((True, at, decision[2], decision[3], zero_costs(decision[2])))
    pairs = zip(decision[2], decision.views, strict=True)
    limit, (remaining, _, reset) = min(pairs, key=lambda pair: pair[1][0] / pair[0].burst)
    if remaining >= limit.burst:
        return None
    after = max(0, reset - passed) / SECOND
    near = KeyNearLimit(policy, key, limit.name, limit.unit, limit.quota, limit.burst - remaining, remaining, after)
    return remaining / limit.burst, near
