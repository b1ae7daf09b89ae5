"""What TaskBudget and AsyncTaskBudget share: every operation as steps, for whoever can ask.

check     the limiter reserves, on all tiers at once; the batch is held here until it is settled
record    a batch is settled: what was completed stays charged, what was not is given back
lost      while the database is lost, the limits of minutes and hours are decided in memory, where they are kept
          up to date all the time; what is completed meanwhile is charged to the database when it is back
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.budget.accounts import KEY, Accounts, Step, Steps, read_cost
from tidegate.budget.held import Held
from tidegate.budget.result import RateLimitResult, instant, result_of, usage_of
from tidegate.budget.watch import log
from tidegate.clock import SystemClock
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import Denied, StoreUnavailable
from tidegate.policy.model import check_cost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.budget.terms import Terms
    from tidegate.limiter import Usage


class Budget(Accounts):
    """What can be done with a budget."""

    # ---- checking ----------------------------------------------------------------------------------------------------

    def _checking(
        self,
        task_count: int,
        task_type: str | None = None,
        cost: Mapping[str, int] | None = None,
        priority: int = 0,
        timeout: float | None = 0.0,
        *,
        bound: bool = False,
    ) -> Steps:
        """Reserve a batch on all tiers, or on none; one that is `bound` is settled by its block, and nobody else."""
        check_cost(task_count, "task_count")
        cost = read_cost(cost)
        if not self.settings.enabled:
            return RateLimitResult(allowed=True, task_count=task_count)
        yield from self._tending()
        terms = self._refresh()
        begun = SystemClock.steady()
        charges = self.plan.charges(task_count, task_type, cost, priority)
        decision, costs = yield from self._reserving(terms, terms.known(charges, task_count), timeout, priority)
        local, usage, memory_at = False, usage_of(decision), decision.at
        if isinstance(decision, LocalDecision):
            self.watch.database(lost=True, waiting=len(self._backlog))
            local = True
            usage = self._known
            if self.settings.on_database_error == "short-term":
                decision = self._decide_here(terms, costs, task_count)
                usage = usage | usage_of(decision)
                memory_at = decision.at
        else:
            self.watch.database(lost=False, waiting=len(self._backlog))
            self._known = usage
            if decision.allowed:
                memory_at = self._mirror("acquire", terms, costs)
        held = None
        if decision.allowed and task_count:
            ends = self.clock.steady() + self.settings.lasting
            held = Held(task_count, task_type, dict(cost), priority, terms, costs, decision.at, ends, memory_at)
            held.charged, held.bound = not local, bound
            held.number = -1 if local else self.books.ticket(terms.policy, decision.at, costs)
            self._open.append(held)
        by_tiers = not local or self.settings.on_database_error == "short-term"
        result = result_of(decision, task_count, usage, by_tiers=by_tiers, local=local, batch=held)
        self.watch.checked(result, None if timeout else SystemClock.steady() - begun)
        return result

    def _reserving(self, terms: Terms, known: dict[str, int], timeout: float | None, priority: int) -> Steps:
        options = {"ttl": self.settings.lasting / SECOND, "timeout": timeout, "priority": priority}
        while True:
            try:
                reservation = yield Step("limiter", "reserve", (KEY, known), options)
            except Denied as denied:
                if not self.books.behind or self.lost:
                    return denied.decision, terms.costs(known)
            else:
                return reservation.decision, reservation.costs

    def _decide_here(self, terms: Terms, costs: tuple[int, ...], tasks: int) -> Decision:
        """Decide by the short-term limits, in memory."""
        if terms.short is None or not tasks:
            return Decision((True, self._now(), (), (), None))
        return self._memory.apply_one("hold", terms.short, KEY, terms.short_costs(costs))

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def _tending(self) -> Steps:
        """Do what is due before a question: tell the database what it missed, give back what took too long."""
        if self._backlog and not self.lost:
            yield Step("run", self.catch_up)
        now = self.clock.steady()
        for held in list(self._open):
            if held.ends > now or held.bound or not held.take():
                continue
            if self.books.keeps_open:  # the file gives it back by itself
                self._forget(held)
                self._mirror("adjust", held.terms, tuple(-cost for cost in held.held), held.memory_at)
            else:
                yield from self._settling(held, 0, None, (), None, last=True)

    def _using(self) -> Steps:
        """Look how much of each tier is used; overdue batches are given back first."""
        if not self.settings.enabled:
            return {}
        yield from self._tending()
        self._refresh()
        decision = yield Step("limiter", "try_acquire", (KEY, {}))
        while self.books.behind and not self.lost:
            decision = yield Step("limiter", "try_acquire", (KEY, {}))
        return self._usage(decision)

    def _usage(self, decision: Decision) -> dict[str, Usage]:
        """Read a look at the tiers; while the database is lost, the long ones are as they were seen last."""
        usage = usage_of(decision)
        lost = isinstance(decision, LocalDecision)
        self.watch.database(lost=lost, waiting=len(self._backlog))
        if not lost:
            self._known = usage
            self.watch.looked(usage, instant(decision.at))
        elif self.settings.on_database_error == "short-term" and self._terms.short is not None:
            nothing = (0,) * len(self._terms.places)
            here = usage_of(self._memory.apply_one("peek", self._terms.short, KEY, nothing))
            return usage | self._known | here
        return usage

    def snapshot(self) -> dict[str, Usage]:
        """Look how much of each tier is used, and change nothing: what metrics show. Blocks for a moment."""
        if not self.settings.enabled:
            return {}
        policy = self._refresh().policy
        now = None if self.clock is self.store.clock else self._now()
        return self._usage(self.store.apply_one("peek", policy, KEY, (0,) * len(policy.limits), now))

    def _resetting(self) -> Steps:
        """Tidy up: windows that ended count for nothing in any case; this gives back, and removes what is old."""
        if not self.settings.enabled:
            return 0
        yield from self._tending()
        return (yield Step("run", self._tidy))

    def _tidy(self) -> int:
        try:
            return self.books.tidy(self._terms.policy, KEY)
        except StoreUnavailable as error:
            log.warning("the budget could not be tidied up, which can wait: %s", error)
            return 0

    def _examining(self) -> Steps:
        """Say how the budget is, for a health endpoint."""
        usage: dict[str, Usage] = yield from self._using()
        if not self.settings.enabled:
            return {"status": "disabled", "database": {"connected": None}, "tiers": {}}
        lost = self.lost
        full = [name for name, each in usage.items() if not each.remaining]
        return {
            "status": "degraded" if lost else "limited" if full else "ok",
            "database": {
                "connected": not lost,
                "losses": self.store.metrics().get("losses", 0),
                "waiting": len(self._backlog),
                "on_error": self.settings.on_database_error,
            },
            "exhausted": full,
            "tiers": {name: each._asdict() for name, each in usage.items()},
        }

    def _cancelling(self, result: RateLimitResult | None = None) -> Steps:
        """Give a batch back."""
        if not self.settings.enabled:
            return
        held = self._find(0, None, result)
        if held is not None:
            yield from self._settling(held, 0, None, (), None, last=True)

    def _closing(self) -> Steps:
        """Give back what is open, tell what can be told, and let everything go."""
        if not self.settings.enabled or self._closed:
            return
        while (held := self._find(0, None, None)) is not None:
            yield from self._settling(held, 0, None, (), None, last=True)
        self._closed = True
        yield Step("run", self._backlog.close)
        yield Step("limiter", "close")
        if self.webhook is not None:
            yield Step("run", self.webhook.close)
        yield Step("run", self.store.close)
