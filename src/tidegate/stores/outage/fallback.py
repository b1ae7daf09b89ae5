"""Deciding without the store, as each policy says: what is allowed, denied, or spent of this process's share."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from tidegate.core.decision import Decision
from tidegate.errors import StoreUnavailable
from tidegate.stores.memory.store import MemoryStore
from tidegate.stores.outage.local_share import MAX_KEYS, may_fit, permission, preload, refusal, shared_costs, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.clock import Clock
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Ask
    from tidegate.stores.outage.breaker import CircuitBreaker
    from tidegate.stores.outage.local_share import LocalShare, SharePolicy
    from tidegate.stores.outage.server_clock import ServerClock

MAX_PENDING_CORRECTIONS: Final = (
    10_000  # corrections kept until the store is back; further ones are dropped, and counted
)
MIN_RETRY: Final = 1000  # microseconds after which a call that fell between two stools may ask again


class Fallback:
    """What a process decides, and remembers to settle, while its store is lost.

    `lock` is held for each decision, and by whoever changes between with and without the store.
    """

    def __init__(self, breaker: CircuitBreaker, reckoning: ServerClock, clock: Clock, steady: Clock) -> None:
        """Decide by the store's time as far as it is known (`reckoning`), else by `clock`."""
        self.lock = threading.Lock()
        self.memory = MemoryStore(max_entries=2 * MAX_KEYS)
        self.shares: dict[str, LocalShare] = {}
        self.later: deque[tuple[Policy, Key, tuple[int, ...], int | None]] = deque()
        self.modes: dict[str, str] = {}
        self.allowed = self.denied = self.dropped = 0
        self._breaker = breaker
        self._reckoning = reckoning
        self._clock = clock
        self._steady = steady

    def decide(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, *, in_doubt: bool = False
    ) -> list[Decision]:
        """Apply a verb as the policies say for this case.

        A correction that is `in_doubt` was sent to the store and not answered. It may have been made, so what it gives
        back is not given back again.
        """
        if verb == "reset":
            names = ", ".join(repr(key) for _, key, _ in asks)
            raise StoreUnavailable(f"could not reset {names}: the store is unavailable; try again when it is back")
        with self.lock:
            steady = self._steady.steady()
            wait = max(MIN_RETRY, self._breaker.due - steady)
            if now is not None or not self._reckoning.known:
                earliest = latest = self._clock.ns() // 1000 if now is None else now
            else:
                earliest, latest = self._reckoning.earliest(steady), self._reckoning.latest(steady)
            if verb == "adjust":
                return [self._correct(ask, earliest, at, in_doubt=in_doubt) for ask in asks]
            decisions = self._decide(verb, asks, earliest, latest, wait)
            if verb != "peek":
                allowed = sum(decision.allowed for decision in decisions)
                self.allowed += allowed
                self.denied += len(decisions) - allowed
            for policy, _, _ in asks:
                self.modes.setdefault(policy.name, policy.on_store_error)
        return decisions

    def _decide(self, verb: str, asks: Sequence[Ask], earliest: int, latest: int, wait: int) -> list[Decision]:
        """Decide all asks together: one that is denied denies them all."""
        local: dict[int, SharePolicy] = {}
        for place, (policy, key, costs) in enumerate(asks):
            if policy.on_store_error == "allow":
                continue
            terms = self._terms(policy, key, earliest, latest) if policy.on_store_error == "local" else None
            if terms is None or not may_fit(terms, costs, earliest, latest):
                until = self._until_share(policy, earliest, wait)
                return [refusal(other, asked, earliest, until) for other, _, asked in asks]
            local[place] = terms
        answers = self._decide_shares(verb, asks, local, earliest)
        allowed = all(answers.values())
        decisions: list[Decision] = []
        for place, (policy, key, costs) in enumerate(asks):
            terms = local.get(place)
            if terms is not None:
                if allowed and verb != "peek" and terms.share is not None:
                    self.shares[policy.name].spent.setdefault(key, {})[terms.share.name] = terms
                decisions.append(tell(terms, costs, answers[place], wait))
            elif allowed:
                decisions.append(permission(policy, costs, earliest))
            else:
                decisions.append(refusal(policy, costs, earliest, wait))
        return decisions

    def _terms(self, policy: Policy, key: Key, earliest: int, latest: int) -> SharePolicy | None:
        """Find what may be spent of a share; nothing when the store is back, or too many keys are remembered."""
        share = self.shares.get(policy.name)
        if share is None or not self._breaker.lost:
            return None
        terms = share.terms(policy, earliest, latest)
        if terms is None or terms.share is None:
            return terms
        if len(share.spent) >= MAX_KEYS and key not in share.spent:
            return None
        return terms

    def _until_share(self, policy: Policy, now: int, wait: int) -> int:
        """Tell how long a refused call had better wait: until there is a share, or the next look for the store."""
        share = self.shares.get(policy.name)
        if share is None or policy.on_store_error != "local" or not self._breaker.lost:
            return wait
        return max(MIN_RETRY, min(wait, share.start() - now)) if share.start() > now else wait

    def _decide_shares(
        self, verb: str, asks: Sequence[Ask], local: dict[int, SharePolicy], now: int
    ) -> dict[int, Decision]:
        """Ask this process's memory, all shares together."""
        places, questions = [], []
        for place, terms in local.items():
            if terms.share is not None:
                _, key, costs = asks[place]
                preload(self.memory, key, terms)
                places.append(place)
                questions.append((terms.share, key, shared_costs(terms, costs)))
        answers = self.memory.apply(verb, questions, now) if questions else []
        nothing = Decision((True, now, (), (), None))
        return dict.fromkeys(local, nothing) | dict(zip(places, answers, strict=True))

    def _correct(self, ask: Ask, now: int, at: int | None, *, in_doubt: bool) -> Decision:
        """Correct what was charged here; what was charged to the store, when that is back."""
        policy, key, costs = ask
        share = self.shares.get(policy.name)
        if share is not None and at is not None:
            for terms in share.spent.get(key, {}).values():
                if at >= terms.since and terms.share is not None:
                    self.memory.apply_one("adjust", terms.share, key, shared_costs(terms, costs), now, at)
                    return permission(policy, (0,) * len(costs), now)
        if in_doubt:
            self.dropped += any(cost < 0 for cost in costs)
            costs = only_charges(costs)
            if not any(costs):
                return permission(policy, costs, now)
        if len(self.later) < MAX_PENDING_CORRECTIONS:
            self.later.append((policy, key, costs, at))
        else:
            self.dropped += 1
        return permission(policy, (0,) * len(costs), now)


def only_charges(costs: tuple[int, ...]) -> tuple[int, ...]:
    """Keep of a correction what charges more, without what gives back."""
    return tuple(max(0, cost) for cost in costs)
