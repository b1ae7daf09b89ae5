"""The leases of one policy: its key leases, when each is due to be swept, and the totals."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from tidegate.stores._lease.key_lease import KeyLease, LeaseState
from tidegate.stores._lease.share import NO_SHARE
from tidegate.stores._lease.terms import Lease, compute_terms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate._policy import Key, Policy
    from tidegate.stores._lease.share import Costs, LeasedShare

    Leftover = tuple["PolicyLeases", Key, LeasedShare]


class PolicyLeases:
    """The key leases of one policy. Each is in `due`, with the steady time at which to sweep it."""

    __slots__ = ("closed", "due", "key_leases", "length", "max_keys", "policy", "strict", "totals", "units")
    length: int
    strict: Policy

    def __init__(self, policy: Policy, lease: Lease | None, totals: Counter[str]) -> None:
        """Start empty; count into `totals`. If `lease` is None, the policy is not leased."""
        self.policy: Policy = policy
        self.max_keys: int = lease.max_keys if lease else 0
        self.strict, self.length = compute_terms(policy, lease) if lease else (policy, 0)
        self.key_leases: dict[Key, KeyLease] = {}
        self.due: deque[tuple[int, KeyLease]] = deque()
        self.closed: bool = False
        self.totals: Counter[str] = totals
        # All limits of a unit are charged the same, so one of them is counted.
        self.units: dict[str, int] = {limit.unit: i for i, limit in reversed(list(enumerate(policy.limits)))}

    def count(self, outcome: str, costs: Costs, totals: Counter[str] | None = None) -> None:
        """Count permits by outcome."""
        totals = self.totals if totals is None else totals
        for unit, i in self.units.items():
            if costs:
                totals[f"lease_{outcome}_{unit}"] += costs[i]

    def find_or_add(self, key: Key, now: int) -> KeyLease | None:
        """Return the lease of a key, adding one if there are fewer than `max_keys`; else None."""
        key_lease = self.key_leases.get(key)
        if key_lease is None and len(self.key_leases) < self.max_keys:
            key_lease = KeyLease(key)
            self.due.append((now + self.length, key_lease))
            self.key_leases[key] = key_lease
        return key_lease

    def sweep(self, now: int, max_count: int) -> list[Leftover]:
        """Sweep key leases that are due: remove ended shares, and key leases without a recent call."""
        leftovers: list[Leftover] = []
        while self.due and self.due[0][0] <= now and max_count:
            max_count -= 1
            _, key_lease = self.due[0]
            ended = key_lease.advance(now)
            in_use = key_lease.share is not NO_SHARE or key_lease.is_pending(now)
            if not in_use and not key_lease.called_recently(now, self.length):
                key_lease.drop()
            leftovers += self.retire(key_lease.key, ended)
            if key_lease.state is LeaseState.DROPPED:
                if self.key_leases.get(key_lease.key) is key_lease:
                    del self.key_leases[key_lease.key]
            else:
                self.due.append((now + self.length, key_lease))
            self.due.popleft()  # last, so that an interrupted sweep loses no key lease
        return leftovers

    def retire(self, key: Key, shares: Iterable[LeasedShare]) -> list[Leftover]:
        """Count the used permits of removed shares; return the shares that have unused permits."""
        leftovers: list[Leftover] = []
        for share in shares:
            self.count("used", share.used)
            if any(share.left):
                leftovers.append((self, key, share))
        return leftovers

    def release_all(self) -> list[Leftover]:
        """Close: remove every key lease and return the shares that have unused permits."""
        self.closed = True
        leftovers = [
            leftover
            for key_lease in self.key_leases.values()
            for leftover in self.retire(key_lease.key, key_lease.release_share())
        ]
        self.clear()
        return leftovers

    def clear(self) -> None:
        """Discard every key lease."""
        self.key_leases.clear()
        self.due.clear()

    def count_held(self, totals: Counter[str]) -> None:
        """Add the used and unused permits of current shares to `totals`."""
        for key_lease in self.key_leases.values():
            self.count("used", key_lease.share.used, totals)
            self.count("outstanding", key_lease.share.left, totals)
