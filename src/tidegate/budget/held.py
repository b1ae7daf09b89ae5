"""A batch under way: what was reserved for it, and how much of that is still open."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from tidegate.core.bounds import ceil_div
from tidegate.fork import fork_safe

if TYPE_CHECKING:
    from tidegate.budget.terms import Terms


class Part(NamedTuple):
    """What settling some tasks of a batch changes, for each limit."""

    held: tuple[int, ...]  # was open before
    deltas: tuple[int, ...]  # corrects the charge
    left: tuple[int, ...]  # is open after
    actual: tuple[int, ...]  # what the tasks cost; counted if the batch was given back meanwhile
    fresh: tuple[int, ...]  # what they cost at limits that the batch had not asked: tasks of a type, told too late
    returned: int  # tasks given back


class Held:
    """A batch that was checked and not settled."""

    def __init__(
        self,
        tasks: int,
        task_type: str | None,
        cost: dict[str, int],
        priority: int,
        terms: Terms,
        costs: tuple[int, ...],
        at: int,
        ends: int,
        memory_at: int,
    ) -> None:
        """Hold what was reserved at the instant `at`, until the steady instant `ends`."""
        self.tasks = self.left = tasks
        self.task_type = task_type
        self.cost = cost  # the estimate for what is left
        self.priority = priority
        self.terms = terms
        self.held = costs
        self.at = at
        self.ends = ends
        self.memory_at = memory_at
        self.charged = True  # to the database; false for what was admitted while that was lost
        self.number = -1  # of those reserved at the same instant
        self.bound = False  # a `with` block settles it, nobody else
        self._lock = fork_safe(threading.Lock())
        self._free = [True]  # emptied by whoever settles the last of it, and only by one

    @property
    def settled(self) -> bool:
        """Whether somebody settles it, or has."""
        return not self._free

    def take(self) -> bool:
        """Become the one who settles it, if nobody is."""
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def cost_of(self, count: int) -> dict[str, int]:
        """Estimate what some of the tasks left have cost, where nobody says."""
        if count >= self.left:
            return dict(self.cost)
        return {unit: ceil_div(amount * count, self.left) for unit, amount in self.cost.items()}

    def settle(self, used: tuple[int, ...], count: int, *, last: bool) -> Part:
        """Settle `count` tasks that cost so much at each limit; slots are free when the last ones are."""
        with self._lock:  # threads may work on one batch
            return self._settle(used, count, last=last)

    def _settle(self, used: tuple[int, ...], count: int, *, last: bool) -> Part:
        limits = self.terms.policy.limits
        slots = tuple(limit.algorithm == "concurrency" for limit in limits)
        held = self.held
        fresh = tuple(
            cost if cost and not have and not slot else 0 for cost, have, slot in zip(used, held, slots, strict=True)
        )
        used = tuple(0 if slot or new else cost for cost, slot, new in zip(used, slots, fresh, strict=True))
        left = tuple(
            0 if last else have if slot else max(0, have - cost)
            for have, cost, slot in zip(held, used, slots, strict=True)
        )
        deltas = tuple(cost + rest - have for cost, rest, have in zip(used, left, held, strict=True))
        actual = tuple(cost + new for cost, new in zip(used, fresh, strict=True))
        for unit, amount in self.cost_of(count).items():
            self.cost[unit] -= amount
        returned = max(0, self.left - count) if last else 0
        self.left = 0 if last else max(0, self.left - count)
        self.held = left
        return Part(held, deltas, left, actual, fresh, returned)
