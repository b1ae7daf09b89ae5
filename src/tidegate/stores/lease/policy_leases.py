"""What a process holds under one policy: the holders of its keys, when to look after each, and the sums."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from tidegate.stores.lease.share import NO_SHARE, KeyLease
from tidegate.stores.lease.terms import Lease, terms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.policy import Key, Policy
    from tidegate.stores.lease.share import Costs, LeasedShare

    Leftover = tuple["PolicyLeases", Key, LeasedShare]


class PolicyLeases:
    """The holders of one policy's keys. Every one of them stands in `due`, and is looked after at that instant."""

    __slots__ = ("closed", "due", "holders", "length", "most", "policy", "strict", "totals", "units")

    def __init__(self, policy: Policy, lease: Lease | None, totals: Counter[str]) -> None:
        """Start empty; count into `totals`. Without a lease nothing is held."""
        self.policy = policy
        self.most = lease.max_keys if lease else 0
        self.strict, self.length = terms(policy, lease) if lease else (policy, 0)
        self.holders: dict[Key, KeyLease] = {}
        self.due: deque[tuple[int, KeyLease]] = deque()
        self.closed = False
        self.totals = totals
        # All limits of a unit are charged the same, so one of them counts for it.
        self.units = {limit.unit: i for i, limit in reversed(list(enumerate(policy.limits)))}

    def count(self, what: str, costs: Costs, totals: Counter[str] | None = None) -> None:
        """Count permits by what became of them."""
        totals = self.totals if totals is None else totals
        for unit, i in self.units.items():
            if costs:
                totals[f"lease_{what}_{unit}"] += costs[i]

    def holder(self, key: Key, now: int) -> KeyLease | None:
        """Find a key's holder, or make one if there is room."""
        holder = self.holders.get(key)
        if holder is None and len(self.holders) < self.most:
            holder = KeyLease(key)
            self.due.append((now + self.length, holder))
            self.holders[key] = holder
        return holder

    def sweep(self, now: int, most: int) -> list[Leftover]:
        """Look after holders that are due: end what has ended, forget who was not asked about for long."""
        gone: list[Leftover] = []
        while self.due and self.due[0][0] <= now and most:
            most -= 1
            _, holder = self.due[0]
            ended = holder.advance(now)
            recent = holder.seen is not None and now - holder.seen < self.length
            if holder.share is NO_SHARE and not recent and holder.asking <= now:
                holder.forgotten = True
            gone += self.retire(holder.key, ended)
            if holder.forgotten:
                if self.holders.get(holder.key) is holder:
                    del self.holders[holder.key]
            else:
                self.due.append((now + self.length, holder))
            self.due.popleft()  # last, so that an interrupted sweep leaves no holder without its place
        return gone

    def retire(self, key: Key, shares: Iterable[LeasedShare]) -> list[Leftover]:
        """Count shares that are of no more use; give those of which something is left, to be returned."""
        gone: list[Leftover] = []
        for share in shares:
            self.count("used", share.used)
            if any(share.left):
                gone.append((self, key, share))
        return gone

    def strip(self) -> list[Leftover]:
        """Let go of everything, for good."""
        self.closed = True
        gone = [left for holder in self.holders.values() for left in self.retire(holder.key, holder.strip())]
        self.clear()
        return gone

    def clear(self) -> None:
        """Forget every holder."""
        self.holders.clear()
        self.due.clear()

    def count_held(self, totals: Counter[str]) -> None:
        """Count what was used of shares still held, and what is left of them."""
        for holder in self.holders.values():
            for share in (holder.share, holder.after):
                self.count("used", share.used, totals)
                self.count("outstanding", share.left, totals)
