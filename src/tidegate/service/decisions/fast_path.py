"""The fast path of a policy: decides and counts common calls on a store in memory, without a coroutine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.errors import RateLimitError
from tidegate.service.decisions.policy_limiters import MAX_KEY_LENGTH, check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.policy import Key
    from tidegate.service.dashboard.near_limit import NearLimitKeys
    from tidegate.service.decisions.policy_limiters import PolicyLimiter

    AcquireNow = Callable[[Key, int], Decision]
    RecordDecision = Callable[[PolicyLimiter, Key, int, Decision], Decision]


class FastPath(NamedTuple):
    """Functions that take one permit for a key, or for each of several keys.

    `decide_all` returns None, and does nothing, if a key is not a string or is invalid.
    """

    decide: Callable[[Key], Decision]
    decide_all: Callable[[Sequence[Any]], list[Decision] | None]


def build_fast_path(
    policy_limiter: PolicyLimiter, acquire_now: AcquireNow, record: RecordDecision, near_limit: NearLimitKeys
) -> FastPath:
    """Build the fast path of a policy. `record` counts a decision that is not within the limits."""
    parts = (policy_limiter, acquire_now, record, near_limit)
    return FastPath(_build_decide(*parts), partial(_decide_all, *parts))


def _build_decide(
    policy_limiter: PolicyLimiter, acquire_now: AcquireNow, record: RecordDecision, near_limit: NearLimitKeys
) -> Callable[[Key], Decision]:
    policy, count = policy_limiter.policy.name, policy_limiter.count

    def decide(key: Key) -> Decision:
        if key.__class__ is not str or len(key) > MAX_KEY_LENGTH or not key.isascii():
            key = check_key(key)
        decision = acquire_now(key, 1)
        if decision[0]:  # within the limits
            count.allowed += 1
            if near_limit.samples_left:
                near_limit.record(policy, key, decision)
            return decision
        return record(policy_limiter, key, 1, decision)

    return decide


def _decide_all(
    policy_limiter: PolicyLimiter,
    acquire_now: AcquireNow,
    record: RecordDecision,
    near_limit: NearLimitKeys,
    keys: Sequence[Any],
) -> list[Decision] | None:
    """Do what `decide` does for each key: check the keys together, and count the decisions together."""
    try:
        if not "".join(keys).isascii() or max(map(len, keys)) > MAX_KEY_LENGTH:
            for key in keys:
                check_key(key)
    except (TypeError, RateLimitError):
        return None
    decisions = [acquire_now(key, 1) for key in keys]
    beyond = [pair for pair in zip(keys, decisions, strict=True) if not pair[1][0]]
    policy_limiter.count.allowed += len(decisions) - len(beyond)
    for key, decision in beyond:
        record(policy_limiter, key, 1, decision)
    if near_limit.samples_left:
        for key, decision in zip(keys, decisions, strict=True):
            if decision[0] and near_limit.samples_left:
                near_limit.record(policy_limiter.policy.name, key, decision)
    return decisions
