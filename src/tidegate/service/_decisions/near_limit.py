"""The keys that are near a limit, from their last recorded decisions. For display only: no decision depends on it.

Denied calls are always recorded. Allowed calls are recorded only while a dashboard is open, and only a bounded number
per second: each request for the overview sets `samples_left`. Otherwise an allowed call only reads that attribute.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._policy.limit_text import describe_limit
from tidegate._runtime.lock import locked
from tidegate.core._bounds import SECOND
from tidegate.core._decision import Decision, zero_costs
from tidegate.service._decisions.row_selection import select_rows

if TYPE_CHECKING:
    from tidegate._policy import Key

MAX_KEYS: Final = 256
DROPPED_WHEN_FULL: Final = 32  # keys at once, because finding the oldest key of a dictionary is slow
MAX_SAMPLES_PER_SECOND: Final = 200  # allowed calls
MAX_REMOVED: Final = 64  # keys that were reset recently
MILLISECOND: Final = 1000  # microseconds


class KeyNearLimit(NamedTuple):
    """The usage of a key at the limit of which it has the smallest part left."""

    policy: str
    key: Key
    limit: str
    text: str  # the limit in words
    unit: str
    quota: int
    used: int
    remaining: int
    reset_after: float
    at: int  # of the decision, in milliseconds since 1970


class NearLimitKeys:
    """The last decision for each recorded key. Thread-safe."""

    __slots__ = ("_removed", "decisions", "lock", "samples_left")

    def __init__(self) -> None:
        """Start without keys."""
        self.lock: threading.Lock = threading.Lock()
        self.decisions: dict[tuple[str, Key], Decision] = {}
        self.samples_left: int = 0  # allowed calls that are still recorded
        # Other workers of the service may have recorded these keys: when they were reset, in milliseconds since 1970.
        self._removed: deque[tuple[str, Key, int]] = deque(maxlen=MAX_REMOVED)

    @locked
    def record(self, policy: str, key: Key, decision: Decision) -> None:
        """Record a decision; if there are too many keys, the oldest are dropped."""
        self.samples_left -= self.samples_left > 0
        self.decisions.pop((policy, key), None)
        self.decisions[policy, key] = decision
        if len(self.decisions) > MAX_KEYS:
            for oldest in list(islice(self.decisions, DROPPED_WHEN_FULL)):
                del self.decisions[oldest]

    @locked
    def remove(self, policy: str, key: Key, now: int) -> None:
        """Remove a key that was reset."""
        self.decisions.pop((policy, key), None)
        self._removed.append((policy, key, now // MILLISECOND))

    @locked
    def removed(self) -> list[tuple[str, Key, int]]:
        """Return the keys that were reset recently, and when."""
        return list(self._removed)

    @locked
    def nearest(self, now: int, max_keys: int) -> list[KeyNearLimit]:
        """Return the keys with the smallest part of a limit left, the smallest first."""
        found: list[tuple[float, str, Key, Decision]] = []
        for (policy, key), decision in list(self.decisions.items()):
            left = part_left(decision, now)
            if left < 1.0:
                found.append((left, policy, key, decision))
            else:
                del self.decisions[policy, key]  # all its limits have reset
        nearest = select_rows(found, lambda row: -row[0], lambda row: row[1], max_keys)
        return [current_usage(policy, key, decision, now) for _, policy, key, decision in nearest]


def part_left(decision: Decision, now: int) -> float:
    """Return the part that is left of the limit with the smallest part left: 1.0 if all limits have reset.

    It decides which keys are described, so it is computed for all recorded keys, and `current_usage` for few of them.
    """
    limits, states, at = decision.policy_limits, decision.states, max(decision.at, now)
    if states is not None:
        pairs = zip(limits, states, strict=True)
        return min([limit.remaining_of(state, limit, at) / limit.burst for limit, state in pairs])
    views = decision.views
    if decision.at + max([view[2] for view in views]) <= now:
        return 1.0
    return min([view[0] / limit.burst for limit, view in zip(limits, views, strict=True)])


def current_usage(policy: str, key: Key, decision: Decision, now: int) -> KeyNearLimit:
    """Return the usage of a key at the limit with the smallest part left.

    If the decision holds states, the usage is computed for `now`. Otherwise it is the usage at the time of the
    decision, with the time until the reset reduced by the time that has passed.
    """
    limits, states, recorded_at = decision.policy_limits, decision.states, decision.at
    passed = 0 if states is not None else now - decision.at
    if states is not None:
        at = max(decision.at, now)
        decision = Decision.of_states(at, limits, states, zero_costs(limits), within_limits=True)
    triples = zip(limits, decision.views, decision.used, strict=True)
    limit, (left, _, reset), used = min(triples, key=lambda triple: triple[1][0] / triple[0].burst)
    after = max(0, reset - passed) / SECOND
    at = recorded_at // MILLISECOND
    return KeyNearLimit(
        policy, key, limit.name, describe_limit(limit), limit.unit, limit.quota, used, max(0, left), after, at
    )
