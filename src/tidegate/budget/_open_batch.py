"""Open batches: what was reserved for each one, and how much of that is not settled yet."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tidegate._runtime.fork import fork_safe
from tidegate._runtime.urls import redact
from tidegate.core._bounds import ceil_div
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.budget._result import RateLimitResult
    from tidegate.budget._settings.tier_policies import TierPolicy


class BatchShare(NamedTuple):
    """What changes when some tasks of a batch are settled, for each limit."""

    before: tuple[int, ...]  # reserved before
    corrections: tuple[int, ...]  # added to the charge
    after: tuple[int, ...]  # still reserved afterwards
    actual: tuple[int, ...]  # what the tasks cost; charged again if the batch was returned meanwhile
    unreserved: tuple[int, ...]  # cost at limits that were not reserved: the task type was given only when recording
    returned: int  # tasks returned to the budget
    first: bool  # whether nothing of the batch was settled before


class OpenBatch:
    """A batch that was checked and is not settled yet."""

    def __init__(
        self,
        tasks: int,
        task_type: str | None,
        cost: dict[str, int],
        priority: int,
        tier_policy: TierPolicy,
        reserved: tuple[int, ...],
        at: int,
        expires: int,
        memory_at: int,
    ) -> None:
        """Keep what was reserved at the instant `at`, until the steady instant `expires`."""
        self.tasks: int = tasks
        self.left: int = tasks
        self.task_type = task_type
        self.cost = cost  # the estimate for the tasks left
        self.priority = priority
        self.tier_policy = tier_policy
        self.reserved: tuple[int, ...] = reserved
        self.at = at
        self.expires = expires
        self.memory_at = memory_at  # the instant of the charge to the short-term limits in memory
        self.in_database = True  # whether it was charged there; false if the database was lost at the check
        self.name = ""  # of its value in the store; empty: it has none
        self.budget: tuple[str, str] = ("", "")  # name and store of the budget that it belongs to
        self._is_new = True  # whether nothing of it was settled
        self.in_block = False  # whether only its `with` block may settle it
        self._lock = fork_safe(threading.Lock())
        self._claims = [True]  # popped by the one caller that settles the rest of the batch

    @property
    def claimed(self) -> bool:
        """Whether a caller is settling the rest of the batch, or has settled it."""
        return not self._claims

    def claim(self) -> bool:
        """Become the caller that settles the rest of the batch; returns false if there is one already."""
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    def estimate(self, count: int) -> dict[str, int]:
        """Estimate the cost of some of the tasks left, from the estimate for all of them."""
        if count >= self.left:
            return dict(self.cost)
        return {unit: ceil_div(amount * count, self.left) for unit, amount in self.cost.items()}

    def settle(self, used: tuple[int, ...], count: int, *, last: bool) -> BatchShare:
        """Settle `count` tasks that cost `used` at each limit. Slots are freed with the last tasks."""
        with self._lock:  # several threads may record tasks of one batch
            return self._settle(used, count, last=last)

    def _settle(self, used: tuple[int, ...], count: int, *, last: bool) -> BatchShare:
        limits = self.tier_policy.policy.limits
        slots = tuple(limit.rules.holds_slots for limit in limits)
        before = self.reserved
        unreserved = tuple(
            cost if cost and not reserved and not slot else 0
            for cost, reserved, slot in zip(used, before, slots, strict=True)
        )
        used = tuple(0 if slot or new else cost for cost, slot, new in zip(used, slots, unreserved, strict=True))
        after = tuple(
            0 if last else reserved if slot else max(0, reserved - cost)
            for reserved, cost, slot in zip(before, used, slots, strict=True)
        )
        corrections = tuple(cost + rest - reserved for cost, rest, reserved in zip(used, after, before, strict=True))
        actual = tuple(cost + new for cost, new in zip(used, unreserved, strict=True))
        for unit, amount in self.estimate(count).items():
            self.cost[unit] -= amount
        returned = max(0, self.left - count) if last else 0
        self.left = 0 if last else max(0, self.left - count)
        self.reserved = after
        first, self._is_new = self._is_new, False
        return BatchShare(before, corrections, after, actual, unreserved, returned, first)


class OpenBatches:
    """The open batches of a budget, oldest first."""

    def __init__(self, name: str, store: str) -> None:
        """Start with none. Name and store of the budget tell its batches from those of others."""
        self._budget = (name, store)
        self._batches: deque[OpenBatch] = deque()

    def add(self, batch: OpenBatch) -> None:
        """Add a batch that was just reserved."""
        batch.budget = self._budget
        self._batches.append(batch)

    def remove(self, batch: OpenBatch) -> None:
        """Remove a batch that is settled, or was removed already."""
        with suppress(ValueError):
            self._batches.remove(batch)

    def claim_expired(self, now: int) -> Iterator[OpenBatch]:
        """Claim the batches that expired by the steady instant `now`; those of a `with` block stay with it."""
        for batch in list(self._batches):
            if batch.expires > now:  # so do the later ones
                return
            if not batch.in_block and batch.claim():
                yield batch

    def claim(self, count: int, task_type: str | None, result: RateLimitResult | None) -> OpenBatch | None:
        """Claim the batch of `result`; without one, a batch of `count` tasks of this type, or the oldest.

        Raises ConfigError if `result` is of another budget, whose limits and database its batch belongs to.
        """
        if result is not None:
            batch = result.batch
            if not isinstance(batch, OpenBatch):
                return None
            if batch.budget != self._budget:
                name, store = batch.budget
                message = f"it is of the budget {name} in {redact(store)}: give it to the budget that checked it"
                raise ConfigError(message, field="result")
            return batch if batch.claim() else None
        while (chosen := self._choose(count, task_type)) is not None:
            if chosen.claim():
                return chosen
        return None

    def _choose(self, count: int, task_type: str | None) -> OpenBatch | None:
        """Return an unclaimed batch: of this type if there is one, and of `count` tasks if there is one."""
        oldest: dict[bool, OpenBatch] = {}  # by whether it has the type
        fits: OpenBatch | None = None  # of another type
        for batch in list(self._batches):
            if batch.in_block or batch.claimed:
                continue
            has_type = task_type is None or batch.task_type == task_type
            if batch.left == count:
                if has_type:
                    return batch
                fits = fits or batch
            oldest.setdefault(has_type, batch)
        return oldest.get(True) or fits or oldest.get(False)
