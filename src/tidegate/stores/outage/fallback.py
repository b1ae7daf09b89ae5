"""Decides calls without the store, as `on_store_error` of each policy says."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from tidegate.core.decision import Decision
from tidegate.errors import StoreUnavailable
from tidegate.stores.base import decide_in_turn
from tidegate.stores.memory.store import MemoryStore
from tidegate.stores.outage.local_share import (
    MAX_KEYS,
    allow_locally,
    deny_locally,
    may_fit,
    preload,
    share_decision,
    shared_costs,
)
from tidegate.stores.outage.peers import WHOLE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.clock import Clock
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Ask
    from tidegate.stores.outage.breaker import CircuitBreaker
    from tidegate.stores.outage.local_share import LocalShare, SharePolicy
    from tidegate.stores.outage.server_clock import ServerClock

MAX_PENDING_CORRECTIONS: Final = 10_000  # until the store is available again; further ones are dropped and counted
MIN_RETRY: Final = 1000  # microseconds after which a call that was denied during a change of state may retry


class Fallback:
    """Decides calls during an outage, and keeps what has to be settled with the store afterwards.

    `lock` is held for each decision, and when an outage starts or ends.
    """

    allowed: int
    denied: int
    dropped_corrections: int

    def __init__(self, breaker: CircuitBreaker, server_clock: ServerClock, clock: Clock, steady: Clock) -> None:
        """Decide by the server's time if it is known, else by `clock`."""
        self.lock: threading.Lock = threading.Lock()
        self.memory: MemoryStore = MemoryStore(max_entries=2 * MAX_KEYS)
        self.shares: dict[str, LocalShare] = {}
        self.pending_corrections: deque[tuple[Policy, Key, tuple[int, ...], int | None]] = deque()
        self.modes: dict[str, str] = {}
        self.allowed = self.denied = self.dropped_corrections = 0
        self._breaker = breaker
        self._server_clock = server_clock
        self._clock = clock
        self._steady = steady

    def describe_modes(self) -> str:
        """Describe, for the log, how calls are decided during the outage."""
        outcomes = {"deny": "are denied", "allow": "are allowed without limit"}
        described = []
        for name, mode in sorted(self.modes.items()):
            if mode == "local" and name in self.shares:
                latest = self._server_clock.latest(self._steady.steady())
                part = 100 * self.shares[name].peers.claimed_share(latest)[0] / WHOLE_LIMIT
                described.append(
                    f"calls to policy {name!r} are decided by this process's share, {part:.3g} % of the limit"
                )
            else:
                described.append(f"calls to policy {name!r} {outcomes.get(mode, 'are denied')}")
        return ", ".join(described) or "calls are decided by on_store_error of their policies"

    def decide(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, *, in_doubt: bool = False
    ) -> list[Decision]:
        """Apply a verb without the store.

        A correction that is `in_doubt` was sent to the store and not answered. The store may have made it, so its
        refunds are not repeated.
        """
        if verb == "reset":
            names = ", ".join(repr(key) for _, key, _ in asks)
            raise StoreUnavailable(f"could not reset {names}: the store is unavailable; try again later")
        with self.lock:
            steady = self._steady.steady()
            wait = max(MIN_RETRY, self._breaker.retry_after(steady))
            if now is not None or not self._server_clock.known:
                earliest = latest = self._clock.ns() // 1000 if now is None else now
            else:
                earliest, latest = self._server_clock.earliest(steady), self._server_clock.latest(steady)
            if verb == "adjust":
                return [self._correct(ask, earliest, at, in_doubt=in_doubt) for ask in asks]
            decisions = decide_in_turn(asks, lambda together: self._decide(verb, together, earliest, latest, wait))
            if verb != "peek":
                allowed = sum(decision.allowed for decision in decisions)
                self.allowed += allowed
                self.denied += len(decisions) - allowed
            for policy, _, _ in asks:
                self.modes.setdefault(policy.name, policy.on_store_error)
        return decisions

    def _decide(self, verb: str, asks: Sequence[Ask], earliest: int, latest: int, wait: int) -> list[Decision]:
        """Decide all asks together: if one is denied, all are."""
        local: dict[int, SharePolicy] = {}
        for index, (policy, key, costs) in enumerate(asks):
            if policy.on_store_error == "allow":
                continue
            share_policy = (
                self._share_policy(policy, key, earliest, latest) if policy.on_store_error == "local" else None
            )
            if share_policy is None or not may_fit(share_policy, costs, earliest, latest):
                until = self._retry_after(policy, earliest, wait)
                return [deny_locally(other, asked, earliest, until) for other, _, asked in asks]
            local[index] = share_policy
        local_decisions = self._decide_shares(verb, asks, local, earliest)
        allowed = all(local_decisions.values())
        decisions: list[Decision] = []
        for index, (policy, key, costs) in enumerate(asks):
            share_policy = local.get(index)
            if share_policy is not None:
                if allowed and verb != "peek" and share_policy.share is not None:
                    self.shares[policy.name].spent.setdefault(key, {})[share_policy.share.name] = share_policy
                decisions.append(share_decision(share_policy, costs, local_decisions[index], wait))
            elif allowed:
                decisions.append(allow_locally(policy, costs, earliest))
            else:
                decisions.append(deny_locally(policy, costs, earliest, wait))
        return decisions

    def _share_policy(self, policy: Policy, key: Key, earliest: int, latest: int) -> SharePolicy | None:
        """Return the share that may be spent; None if the outage is over or too many keys are remembered."""
        share = self.shares.get(policy.name)
        if share is None or not self._breaker.is_open:
            return None
        share_policy = share.share_policy(policy, earliest, latest)
        if share_policy is None or share_policy.share is None:
            return share_policy
        if len(share.spent) >= MAX_KEYS and key not in share.spent:
            return None
        return share_policy

    def _retry_after(self, policy: Policy, now: int, wait: int) -> int:
        """Return how long a denied call should wait: until the share starts, or the next probe of the store."""
        share = self.shares.get(policy.name)
        if share is None or policy.on_store_error != "local" or not self._breaker.is_open:
            return wait
        return max(MIN_RETRY, min(wait, share.starts_at() - now)) if share.starts_at() > now else wait

    def _decide_shares(
        self, verb: str, asks: Sequence[Ask], local: dict[int, SharePolicy], now: int
    ) -> dict[int, Decision]:
        """Decide by the shares in this process's memory, all together."""
        indexes, share_asks = [], []
        for index, share_policy in local.items():
            if share_policy.share is not None:
                _, key, costs = asks[index]
                preload(self.memory, key, share_policy)
                indexes.append(index)
                share_asks.append((share_policy.share, key, shared_costs(share_policy, costs)))
        local_decisions = self.memory.apply(verb, share_asks, now) if share_asks else []
        nothing = Decision.of_views(now, (), (), within_limits=True)
        return dict.fromkeys(local, nothing) | dict(zip(indexes, local_decisions, strict=True))

    def _correct(self, ask: Ask, now: int, at: int | None, *, in_doubt: bool) -> Decision:
        """Correct a charge made here now; queue the correction of a charge made by the store."""
        policy, key, costs = ask
        share = self.shares.get(policy.name)
        if share is not None and at is not None:
            for share_policy in share.spent.get(key, {}).values():
                if at >= share_policy.since and share_policy.share is not None:
                    self.memory.apply_one("adjust", share_policy.share, key, shared_costs(share_policy, costs), now, at)
                    return allow_locally(policy, (0,) * len(costs), now)
        if in_doubt:
            self.dropped_corrections += any(cost < 0 for cost in costs)
            costs = only_charges(costs)
            if not any(costs):
                return allow_locally(policy, costs, now)
        if len(self.pending_corrections) < MAX_PENDING_CORRECTIONS:
            self.pending_corrections.append((policy, key, costs, at))
        else:
            self.dropped_corrections += 1
        return allow_locally(policy, (0,) * len(costs), now)


def only_charges(costs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the part of a correction that charges, without its refunds."""
    return tuple(max(0, cost) for cost in costs)
