"""Resets the usage of all clients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.flow import CallFlow
    from tidegate.inbound.limiting.request_limiter import RequestLimiter


def reset_all_flow(request_limiter: RequestLimiter, apply: Callable[..., object]) -> CallFlow[int]:
    """Reset the usage of all clients and unblock clients that were denied too often; return how many were known.

    A memory store that the middleware opened is cleared, including the counts of route limits. In other stores, the
    clients that this process has seen recently are reset, in all categories. `apply` is `Store.apply` or
    `Store.apply_async`.
    """
    known = 0
    blocks = request_limiter.denial_blocks
    now = request_limiter.now() if request_limiter.own_clock is not None else None  # None: by the store's clock
    cleared = request_limiter.opened_store.owned and request_limiter.store.clear()
    for name, base in request_limiter.category_limiters.items():
        policies = [limiter.policy for limiter in request_limiter.all_limiters_of(name)]
        policies += blocks.policies if blocks is not None else ()
        keys = tuple(base.last_decisions)
        base.last_decisions.clear()
        known += len(keys)
        for key in () if cleared else keys:
            for policy in policies:
                yield partial(apply, "reset", ((policy, key, (0,) * len(policy.limits)),), now)
    if blocks is not None:
        blocks.listed.clear()
    return known
