"""Decides calls without the store, as `on_store_error` of each policy says."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from tidegate.core._decision import VERBS, Decision
from tidegate.errors import StoreUnavailable
from tidegate.stores._base import decide_in_turn
from tidegate.stores._memory.store import MemoryStore
from tidegate.stores._outage.local_share import (
    MAX_KEYS,
    LocalUsage,
    allow_locally,
    charge_store,
    deny_locally,
    divide_policy,
    has_share,
    longest_window,
    read_usage,
    share_decision,
    shared_costs,
)
from tidegate.stores._outage.process_share import WHOLE_PARTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy import Key, Policy
    from tidegate._runtime.clock import Clock
    from tidegate.stores._base import Ask
    from tidegate.stores._outage.breaker import ShardBreakers
    from tidegate.stores._outage.local_share import AskStore, SharePolicy
    from tidegate.stores._outage.process_share import ProcessShare

MAX_PENDING_CORRECTIONS: Final = 10_000  # until the store is available again; further ones are dropped and counted
MIN_RETRY: Final = 1000  # microseconds after which a call that was denied during a change of state may retry


class Fallback:
    """Decides calls during an outage, and keeps what has to be charged to the store afterwards.

    `lock` is held for each decision, and when an outage starts or ends.
    """

    allowed: int
    denied: int
    dropped_corrections: int

    def __init__(self, breakers: ShardBreakers, share: ProcessShare, clock: Clock, steady: Clock) -> None:
        """Decide `local` policies by the part of this process."""
        self.lock: threading.Lock = threading.Lock()
        self.memory: MemoryStore = MemoryStore(max_entries=2 * MAX_KEYS)
        self.spending: dict[tuple[str, Key], LocalUsage] = {}
        self.pending_corrections: deque[tuple[Policy, Key, tuple[int, ...], int | None]] = deque()
        self.modes: dict[str, str] = {}
        self.allowed = self.denied = self.dropped_corrections = 0
        self._held_until = 0  # when all that was admitted here has left its window, in steady time
        self._breakers = breakers
        self._share = share
        self._clock = clock
        self._steady = steady

    @property
    def held(self) -> bool:
        """Whether something that was admitted here is still in its window."""
        return self._steady.steady() < self._held_until

    def describe_modes(self) -> str:
        """Describe, for the log, how calls are decided during the outage."""
        outcomes = {"deny": "are denied", "allow": "are allowed without limit"}
        if part := self._share.usable():
            outcomes["local"] = f"are decided by this process's share, {100 * part / WHOLE_PARTS:.3g} % of the limit"
        else:
            outcomes["local"] = "are denied, because this process does not know how many processes share the limit"
        found = (f"calls to policy {name!r} {outcomes[mode]}" for name, mode in sorted(self.modes.items()))
        return ", ".join(found) or "calls are decided by on_store_error of their policies"

    def decide(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None,
        at: int | None,
        *,
        in_doubt: bool = False,
        wait: int = MIN_RETRY,
    ) -> list[Decision]:
        """Apply a verb without the store.

        A correction that is `in_doubt` was sent to the store and not answered. The store may have made it, so its
        refunds are not repeated. A denied call may be repeated after `wait`, at the earliest.
        """
        if VERBS[verb].clears:
            names = ", ".join(repr(key) for _, key, _ in asks)
            raise StoreUnavailable(f"could not reset {names}: the store is unavailable; try again later")
        with self.lock:
            wait = max(wait, self._breakers.retry_after(self._steady.steady()))
            now = self._clock.ns() // 1000 if now is None else now
            if VERBS[verb].corrects:
                return [self._correct(ask, now, at, in_doubt=in_doubt) for ask in asks]
            decisions = decide_in_turn(asks, lambda together: self._decide(verb, together, now, wait))
            if VERBS[verb].changes:
                allowed = sum(decision.allowed for decision in decisions)
                self.allowed += allowed
                self.denied += len(decisions) - allowed
            for policy, _, _ in asks:
                self.modes.setdefault(policy.name, policy.on_store_error)
        return decisions

    def _decide(self, verb: str, asks: Sequence[Ask], now: int, wait: int) -> list[Decision]:
        """Decide all asks together: if one is denied, all are."""
        shares: dict[int, SharePolicy] = {}
        for index, (policy, key, costs) in enumerate(asks):
            if policy.on_store_error == "allow":
                continue
            share_policy = self._share_policy(policy, key, now) if policy.on_store_error == "local" else None
            if share_policy is None or not has_share(share_policy, costs):
                return [deny_locally(other, asked, now, wait) for other, _, asked in asks]
            shares[index] = share_policy
        by_share = self._decide_shares(verb, asks, shares, now)
        allowed = all(by_share.values())
        decisions: list[Decision] = []
        for index, (policy, key, costs) in enumerate(asks):
            share_policy = shares.get(index)
            if share_policy is not None:
                if allowed and VERBS[verb].changes and any(costs):
                    self._spend(share_policy, key, costs, now)
                    reset = max(view[2] for view in by_share[index].views)
                    self._held_until = max(self._held_until, self._steady.steady() + reset)
                decisions.append(share_decision(share_policy, costs, by_share[index], wait))
            else:
                local = allow_locally(policy, costs, now) if allowed else deny_locally(policy, costs, now, wait)
                decisions.append(local)
        return decisions

    def _share_policy(self, policy: Policy, key: Key, now: int) -> SharePolicy | None:
        """Return this process's part of a policy; None if the outage is over or too many keys are remembered."""
        if not self._breakers.is_open or not (part := self._share.usable(longest_window(policy, now))):
            return None
        if len(self.spending) >= MAX_KEYS and (policy.name, key) not in self.spending:
            return None
        return divide_policy(policy, part)

    def _decide_shares(
        self, verb: str, asks: Sequence[Ask], shares: dict[int, SharePolicy], now: int
    ) -> dict[int, Decision]:
        """Decide by the parts in this process's memory, all together."""
        indexes, share_asks = [], []
        for index, share_policy in shares.items():
            if share_policy.share is not None:
                _, key, costs = asks[index]
                indexes.append(index)
                share_asks.append((share_policy.share, key, shared_costs(share_policy, costs)))
        decisions = self.memory.apply(verb, share_asks, now) if share_asks else []
        nothing = Decision.of_views(now, (), (), within_limits=True)
        return dict.fromkeys(shares, nothing) | dict(zip(indexes, decisions, strict=True))

    def _spend(self, share_policy: SharePolicy, key: Key, costs: Sequence[int], now: int) -> None:
        """Record what has to be charged to the store."""
        place = (share_policy.policy.name, key)
        spending = self.spending.get(place)
        if spending is None or len(spending.uncharged) != len(costs):
            spending = self.spending[place] = LocalUsage(share_policy, [0] * len(costs))
        spending.share_policy = share_policy
        spending.uncharged = [total + cost for total, cost in zip(spending.uncharged, costs, strict=True)]
        spending.instants.add(now)

    def has_charged(self, asks: Sequence[Ask], at: int | None) -> bool:
        """Return whether the charge of an ask was made here, and not charged to the store yet: it is corrected here."""
        for policy, key, _ in asks if self.spending else ():
            spending = self.spending.get((policy.name, key))
            if spending is not None and at in spending.instants:
                return True
        return False

    def _correct(self, ask: Ask, now: int, at: int | None, *, in_doubt: bool) -> Decision:
        """Correct a charge made here now; queue the correction of a charge made by the store."""
        policy, key, costs = ask
        spending = self.spending.get((policy.name, key))
        if spending is not None and at in spending.instants and spending.share_policy.share is not None:
            share_policy, share = spending.share_policy, spending.share_policy.share
            self.memory.apply_one("adjust", share, key, shared_costs(share_policy, costs), now, at)
            spending.uncharged = [max(0, left + cost) for left, cost in zip(spending.uncharged, costs, strict=True)]
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

    # ---- after the outage --------------------------------------------------------------------------------------------

    def settle(self, ask: AskStore) -> None:
        """Send queued corrections to the store, and charge it what was spent here and is still in its window."""
        while self.pending_corrections:
            policy, key, costs, at = self.pending_corrections.popleft()
            if any(charges := only_charges(costs)):  # a refund is sent once: it may have arrived unanswered
                self.pending_corrections.appendleft((policy, key, charges, at))
            try:
                ask("adjust", policy, key, costs, at)
            except StoreUnavailable as error:
                if not error.concerns_key:
                    raise
                self.dropped_corrections += 1
            if any(charges):
                self.pending_corrections.popleft()
        for place in list(self.spending):
            self._settle_key(ask, place)

    def _settle_key(self, ask: AskStore, place: tuple[str, Key]) -> None:
        with self.lock:
            spending = self.spending.pop(place)  # what is spent from now on is charged later
            used = read_usage(self.memory, place[1], spending.share_policy, self._clock.ns() // 1000)
            spending.uncharged = [min(left, most) for left, most in zip(spending.uncharged, used, strict=True)]
        try:
            charge_store(ask, place[1], spending.share_policy.policy, spending.uncharged)
        except BaseException as error:
            if isinstance(error, StoreUnavailable) and error.concerns_key:
                self.dropped_corrections += 1
                return
            with self.lock:
                later = self.spending.setdefault(place, spending)
                if later is not spending:
                    pairs = zip(later.uncharged, spending.uncharged, strict=True)
                    later.uncharged = [one + other for one, other in pairs]
                    later.instants |= spending.instants
            raise


def only_charges(costs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the part of a correction that charges, without its refunds."""
    return tuple(max(0, cost) for cost in costs)
