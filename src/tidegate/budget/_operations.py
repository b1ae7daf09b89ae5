"""Every operation of a budget, written once as a flow (see `_runtime.flow`) for TaskBudget and AsyncTaskBudget.

check     the limiter reserves a batch on all tiers at once; the batch is open until it is settled
record    settles a batch: completed tasks stay charged, the rest is returned
lost      while the database is unavailable, the limits per minute and hour decide in memory; tasks completed meanwhile
          are queued, and charged to the database when it is available again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from tidegate._limiter.joint import JointCall, LimiterAsk, acquire_flow
from tidegate._limiter.waiting import Step
from tidegate._policy.model import check_cost
from tidegate._runtime.arguments import check_priority
from tidegate._runtime.clock import SystemClock, TaskSignal, ThreadSignal
from tidegate._runtime.flow import Flow
from tidegate.budget._open_batch import OpenBatch, OpenBatches
from tidegate.budget._result import BudgetHealth, RateLimitResult, instant, result_of, usage_of
from tidegate.budget._settings.model import storable
from tidegate.budget._settings.tier_policies import TierPolicies, TierPolicy, idle
from tidegate.budget._short_term import ShortTermLimits
from tidegate.budget._storage.recount import CountedLimits
from tidegate.budget._storage.retry_queue import RetryQueue
from tidegate.budget._storage.settlements import Settlement, Settlements, open_storage
from tidegate.budget._storage.sqlite import Completion
from tidegate.budget.alerts._monitor import BudgetMonitor, log
from tidegate.core._decision import Decision, LocalDecision
from tidegate.errors import CollectionFull, ConfigError, Denied, RateLimitError, StoreUnavailable
from tidegate.spending._ledger import Ledger
from tidegate.spending._webhook import Webhook
from tidegate.stores._values import MAX_LISTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._limiter.limiter import AsyncLimiter, Limiter, Usage
    from tidegate._runtime.clock import Clock
    from tidegate.budget._settings.model import BudgetSettings
    from tidegate.budget._settings.tiers import TierPlan
    from tidegate.stores._base import Store

KEY: Final = "tasks"  # of all states of a budget


class BudgetStep(NamedTuple):
    """A call that may wait.

    limiter     a method of the limiter, which AsyncTaskBudget awaits
    storage     a method with an `_async` form, which is completed even if the task that awaits it is cancelled
    blocking    a method that AsyncTaskBudget calls in a thread
    """

    kind: Literal["limiter", "storage", "blocking"]
    target: Any
    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}


T = TypeVar("T")
BudgetFlow = Flow[BudgetStep | Step, T]


class BudgetOperations:
    """The operations of a budget. Methods whose names do not end in `_flow` do not wait."""

    settlements: Settlements
    store: Store

    def __init__(
        self,
        settings: BudgetSettings,
        limiter_type: type[Limiter | AsyncLimiter],
        clock: Clock | None,
        load: Callable[[], float] | None,
        *,
        only_reads: bool = False,
    ) -> None:
        """Open the storage, unless the budget is disabled; with `only_reads`, no file is created."""
        self.settings: BudgetSettings = settings
        self.plan: TierPlan = settings.plan
        self.webhook: Webhook | None = Webhook(settings.webhook, settings.secret) if settings.webhook else None
        self.monitor: BudgetMonitor = BudgetMonitor(
            settings.name,
            settings.milestones,
            self.webhook.send if self.webhook else None,
            fixed=settings.strategy == "fixed",
            on_store_error=settings.on_store_error,
        )
        self.ledger: Ledger | None = None
        self._open_batches = OpenBatches(settings.name, str(settings.store))
        self._last_usage: dict[str, Usage] = {}  # as the database last reported it
        self._load = idle if load is None and only_reads else load
        self._closed = False
        if settings.enabled:
            for message in settings.unreachable_tiers:
                log.warning("%s", message)
            self._tier_policies = TierPolicies(settings, self.plan, self._load)
            first = self._tier_policies.current((clock or SystemClock()).ns() // 1000, SystemClock.steady())
            limits = CountedLimits(
                first.unlimited,
                KEY,
                lambda count, task_type, cost: first.costs(self.plan.charges(count, task_type, cost, 0)),
            )
            self.store, self.settlements = open_storage(settings, clock, limits, only_reads=only_reads)
            self.store.report_outages(self._report_outage)
            self.clock: Clock = clock or self.store.clock
            test_clock = None if self.clock is self.store.clock else self.clock
            self._local_settlements = Settlements(self.store, test_clock)
            self._short_term = ShortTermLimits(KEY, self.clock)
            self._retry_queue = RetryQueue(self.settlements, lambda: self.lost, self._now)
            self._tier_policy = self._tier_policies.current(self._now(), self.clock.steady())
            self.limiter: AsyncLimiter | Limiter = limiter_type(
                self._tier_policy.policy, store=self.store, clock=test_clock
            )
            if settings.ledger is not None:
                self.ledger = Ledger(settings.ledger, timezone=settings.timezone, clock=clock)

    # ---- check -------------------------------------------------------------------------------------------------------

    def check_flow(
        self,
        task_count: int,
        task_type: str | None = None,
        cost: Mapping[str, int] | None = None,
        priority: int = 0,
        timeout: float | None = 0.0,
        *,
        in_block: bool = False,
    ) -> BudgetFlow[RateLimitResult]:
        """Reserve a batch on all tiers, or on none; if it is `in_block`, only its `with` block settles it."""
        check_cost(task_count, "task_count")
        estimate = read_cost(cost)
        if not self.settings.enabled:
            return RateLimitResult(allowed=True, task_count=task_count)
        self.settings.check_task(task_type, estimate)
        check_priority(priority, self.limiter.max_priority)
        yield from self._maintain_flow()
        tier_policy = self.refresh_policy()
        started = SystemClock.steady()
        charges = self.plan.charges(task_count, task_type, estimate, priority)
        reservation_cost = tier_policy.reservation_cost(charges, task_count)
        decision, costs, name = yield from self._reserve_flow(tier_policy, reservation_cost, timeout, priority)
        local, short_term = isinstance(decision, LocalDecision), self.settings.on_store_error == "short-term"
        if not local:
            usage = self._last_usage = usage_of(decision)
            memory_at = self._short_term.charge(tier_policy, costs) if decision.allowed else 0
        else:
            usage, memory_at = self._last_usage, decision.at
            if short_term:
                decision = self._short_term.reserve(tier_policy, costs, task_count)
                usage, memory_at = usage | usage_of(decision), decision.at
        batch = None
        if decision.allowed and task_count:
            expires = self.clock.steady() + self.settings.batch_ttl_microseconds
            batch = OpenBatch(
                task_count, task_type, estimate, priority, tier_policy, costs, decision.at, expires, memory_at
            )
            batch.in_database, batch.in_block = not local, in_block
            batch.name = "" if local else name
            self._open_batches.add(batch)
        by_tiers = not local or short_term
        decided = tier_policy.short_term_costs(costs) if local else costs
        result = result_of(
            decision, task_count, usage, by_tiers=by_tiers, costs=decided, cost=estimate, local=local, batch=batch
        )
        self.monitor.record_check(result, None if timeout else SystemClock.steady() - started)
        return result

    def _reserve_flow(
        self, tier_policy: TierPolicy, cost: dict[str, int], timeout: float | None, priority: int
    ) -> BudgetFlow[tuple[Decision, tuple[int, ...], str]]:
        """Reserve a batch, with its value; returns the decision, the costs, and the name of the value."""
        make_signal = TaskSignal if self.limiter.for_tasks else ThreadSignal
        while True:
            costs, began = tier_policy.costs(cost), self.clock.steady()
            name, writes = self.settlements.reserve(tier_policy.policy, costs)
            call = JointCall([[LimiterAsk(self.limiter, KEY, cost, writes)]])
            try:
                decision = yield from acquire_flow(call, "hold", timeout, priority, make_signal)
            except Denied as denied:
                self.settlements.release(name)
                if not (yield from self._returned_more_flow()):
                    return denied.decision, costs, ""
            except BaseException as error:
                self.settlements.release(name)
                if isinstance(error, CollectionFull):
                    message = f"the budget {self.settings.name} has {MAX_LISTED} open batches: record or cancel them"
                    raise RateLimitError(message) from None
                raise
            else:
                if isinstance(decision, LocalDecision):
                    self.settlements.release(name)
                else:
                    self.settlements.confirm(writes, began)
                return decision, costs, name

    def _returned_more_flow(self) -> BudgetFlow[bool]:
        """Refund the batches of processes that have ended; returns whether an earlier decision may be out of date."""
        if self.lost:
            return False
        arguments = (self._tier_policy.policy, KEY)
        ended: int = yield BudgetStep("storage", self.settlements, "return_ended", arguments)
        return bool(ended)

    # ---- record and cancel -------------------------------------------------------------------------------------------

    def record_flow(
        self,
        task_count: int | None = None,
        task_type: str | None = None,
        task_ids: Iterable[str] | None = None,
        cost: Mapping[str, int] | None = None,
        result: RateLimitResult | None = None,
    ) -> BudgetFlow[None]:
        """Settle the batch of `result`, or the open batch that fits best."""
        ids = read_task_ids(task_ids)
        count = task_count if task_count is not None else len(ids) or 1
        check_cost(count, "task_count")
        if ids and len(ids) != count:
            raise ConfigError(f"expected one ID for each of {count} tasks, not {len(ids)} IDs", field="task_ids")
        if not self.settings.enabled:
            return
        self.settings.check_task(task_type, read_cost(cost))
        started = SystemClock.steady()
        batch = self._open_batches.claim(count, task_type, result)
        if batch is not None:
            yield from self.settle_flow(batch, count, task_type, ids, cost, last=True)
        elif count:
            yield from self._record_unreserved_flow(count, task_type, ids, read_cost(cost))
        self.monitor.count_record(count, SystemClock.steady() - started)

    def cancel_flow(self, result: RateLimitResult | None = None) -> BudgetFlow[None]:
        """Return the batch of `result`, or the oldest open batch."""
        if not self.settings.enabled:
            return
        batch = self._open_batches.claim(0, None, result)
        if batch is not None:
            yield from self._return_flow(batch)

    def settle_flow(
        self,
        batch: OpenBatch,
        count: int,
        task_type: str | None,
        task_ids: tuple[str, ...],
        cost: Mapping[str, int] | None,
        *,
        last: bool,
    ) -> BudgetFlow[None]:
        """Settle `count` tasks of a batch as completed; with the `last` ones, the rest of it is returned."""
        actual = batch.estimate(count) | read_cost(cost)
        task_type = batch.task_type if task_type is None else task_type
        tier_policy = batch.tier_policy
        used = tier_policy.costs(self.plan.charges(count, task_type, actual, batch.priority))
        share = batch.settle(used, count, last=last)
        completion = Completion(count, task_type, task_ids, actual or None) if count else None
        self.monitor.count_settled(count, share.returned)
        self._record_spending(count, task_type, actual)
        self._short_term.correct(tier_policy, share.corrections, batch.memory_at)
        if any(share.unreserved):
            self._short_term.charge(tier_policy, share.unreserved)
        if last:
            self._open_batches.remove(batch)
        policy, unlimited = tier_policy.policy, tier_policy.unlimited
        settlement = Settlement(policy, unlimited, KEY, batch.at, batch.name, share, completion)
        if batch.in_database:
            yield from self._submit_flow("settle", settlement)
            if any(share.unreserved):
                yield from self._submit_flow("record", unlimited, KEY, share.unreserved, None)
        else:
            charge = share.actual
            if self.settings.on_store_error == "local":
                # Charged to the local share of this process, which the guarded store settles with the database.
                settled = settlement._replace(completion=None)
                yield BudgetStep("storage", self._local_settlements, "settle", (settled,))
                charge = share.unreserved
            if count:
                yield from self._submit_flow("record", unlimited, KEY, charge, completion)
        self.store.wait_queues.wake(KEY)

    def _return_flow(self, batch: OpenBatch) -> BudgetFlow[None]:
        return self.settle_flow(batch, 0, None, (), None, last=True)

    def _record_spending(self, count: int, task_type: str | None, cost: Mapping[str, int]) -> None:
        """Record completed tasks, and what they cost, in the ledger."""
        if self.ledger is not None and count:
            for unit, amount in {"tasks": count, **cost}.items():
                self.ledger.add(self.settings.name, unit, amount, model=task_type or "", calls=count)

    def _record_unreserved_flow(
        self, count: int, task_type: str | None, task_ids: tuple[str, ...], cost: dict[str, int]
    ) -> BudgetFlow[None]:
        """Charge tasks without a reservation, even beyond a quota: they were completed, so they count."""
        tier_policy = self.refresh_policy()
        costs = tier_policy.costs(self.plan.charges(count, task_type, cost, 0))
        self._short_term.charge(tier_policy, costs)
        self.monitor.count_settled(count, 0)
        self._record_spending(count, task_type, cost)
        completion = Completion(count, task_type, task_ids, cost or None)
        yield from self._submit_flow("record", tier_policy.unlimited, KEY, costs, completion)

    def _submit_flow(self, method: str, *arguments: Any) -> BudgetFlow[None]:  # noqa: ANN401 - those of the method
        """Call a method of the settlement storage, or queue the call while the database is unavailable."""
        if self._retry_queue or self.lost:
            self._retry_queue.add(method, arguments)
        else:
            yield BudgetStep("storage", self._retry_queue, "call", (method, *arguments))

    # ---- usage -------------------------------------------------------------------------------------------------------

    def usage_flow(self) -> BudgetFlow[dict[str, Usage]]:
        """Read the usage of each tier, after expired batches are returned."""
        if not self.settings.enabled:
            return {}
        yield from self._maintain_flow()
        self.refresh_policy()
        while True:
            decision = yield BudgetStep("limiter", self.limiter, "try_acquire", (KEY, {}))
            if not (yield from self._returned_more_flow()):
                return self._read_usage(decision)

    def snapshot(self) -> dict[str, Usage]:
        """Read the usage of each tier without changing anything. Blocks while the database is read."""
        if not self.settings.enabled:
            return {}
        policy = self.refresh_policy().policy
        return self._read_usage(self.store.apply_one("peek", policy, KEY, (0,) * len(policy.limits), self.given_now()))

    def _read_usage(self, decision: Decision) -> dict[str, Usage]:
        """Read usage from a decision; while the database is lost, long tiers have their last known usage."""
        usage = usage_of(decision)
        lost = isinstance(decision, LocalDecision)
        if not lost:
            self._last_usage = usage
            self.monitor.record_usage(usage, instant(decision.at))
        elif self.settings.on_store_error == "short-term" and self._tier_policy.short_term is not None:
            return usage | self._last_usage | self._short_term.usage(self._tier_policy)
        return usage

    def health_flow(self) -> BudgetFlow[BudgetHealth]:
        """Describe the state of the budget, for a health endpoint."""
        usage = yield from self.usage_flow()
        if not self.settings.enabled:
            return {"status": "disabled", "database": {"connected": None}, "tiers": {}}
        lost = self.lost
        exhausted = [name for name, each in usage.items() if not each.remaining]
        return {
            "status": "degraded" if lost else "limited" if exhausted else "ok",
            "database": {
                "connected": not lost,
                "losses": self.losses,
                "waiting": self.backlog,
                "on_error": self.settings.on_store_error,
            },
            "exhausted": exhausted,
            "tiers": {name: each._asdict() for name, each in usage.items()},
        }

    # ---- maintenance -------------------------------------------------------------------------------------------------

    def _maintain_flow(self) -> BudgetFlow[int]:
        """Send queued settlements to the database, and return expired batches; returns how many."""
        expired = 0
        if self._retry_queue and not self.lost:
            yield BudgetStep("blocking", self._retry_queue, "catch_up")
        for batch in self._open_batches.claim_expired(self.clock.steady()):
            yield from self._return_flow(batch)
            expired += 1
        return expired

    def reset_expired_flow(self) -> BudgetFlow[int]:
        """Return expired batches and remove old completions; expired windows need no cleaning."""
        if not self.settings.enabled:
            return 0
        expired = yield from self._maintain_flow()
        removed: int = yield BudgetStep("blocking", self, "clean_up")
        return expired + removed

    def clean_up(self) -> int:
        """Clean up the storage; returns how many batches were returned and completions removed. Blocks."""
        try:
            return self.settlements.clean_up(self._tier_policy.policy, KEY)
        except StoreUnavailable as error:
            log.warning("could not clean up the database of the budget; the next call tries again: %s", error)
            return 0

    def close_flow(self) -> BudgetFlow[None]:
        """Return open batches, send queued settlements if possible, and close the storage."""
        if not self.settings.enabled or self._closed:
            return
        while (batch := self._open_batches.claim(0, None, None)) is not None:
            yield from self._return_flow(batch)
        self._closed = True
        yield BudgetStep("blocking", self._retry_queue, "close")
        yield BudgetStep("blocking", self.settlements, "close")
        yield BudgetStep("limiter", self.limiter, "close")
        for each in (self.webhook, self.ledger):
            if each is not None:
                yield BudgetStep("blocking", each, "close")
        yield BudgetStep("blocking", self.store, "close")

    # ---- the database ------------------------------------------------------------------------------------------------

    def _report_outage(self, reason: str | None) -> None:
        """Report that the database is unavailable, with the reason, or available again (None)."""
        self.monitor.record_database(lost=self.lost, reason=reason, waiting=self.backlog)

    @property
    def lost(self) -> bool:
        """Whether the database is unavailable."""
        return self.settings.enabled and bool(self.store.metrics().get("store_lost"))

    @property
    def nothing_counted(self) -> bool:
        """Whether this budget only reads, and its file does not exist yet: no program has counted a task."""
        file = self.settlements.budget_store if self.settings.enabled else None
        return file is not None and file.awaits_file

    @property
    def losses(self) -> int:
        """How often the database became unavailable."""
        return self.store.metrics().get("losses", 0) if self.settings.enabled else 0

    @property
    def backlog(self) -> int:
        """How many settlements are queued for the database."""
        return len(self._retry_queue) if self.settings.enabled else 0

    def catch_up(self) -> bool:
        """Send queued settlements to the database; returns whether none are left. Blocks."""
        return self._retry_queue.catch_up() if self.settings.enabled else True

    def use_limits(self, settings: BudgetSettings, plan: TierPlan) -> None:
        """Use the limits of these settings from now on; `plan` has the same tiers as before. Usage is kept."""
        if self.settings.enabled:
            self._tier_policies = TierPolicies(settings, plan, self._load)
        self.settings, self.plan = settings, plan
        if settings.enabled:
            self.refresh_policy()  # wakes waiting batches

    def refresh_policy(self) -> TierPolicy:
        """Return the current policy; if it has changed, pass it to the limiter first."""
        tier_policy = self._tier_policies.current(self._now(), self.clock.steady())
        if tier_policy is not self._tier_policy:
            self._tier_policy = tier_policy
            self.limiter.update(tier_policy.policy)
        return tier_policy

    def given_now(self) -> int | None:
        """Return the instant to pass to the store; None if the store uses its own clock."""
        return None if self.clock is self.store.clock else self._now()

    def _now(self) -> int:
        return self.clock.ns() // 1000


def read_cost(cost: Mapping[str, int] | None) -> dict[str, int]:
    """Check a cost by unit, and copy it."""
    if cost is None:
        return {}
    if not isinstance(cost, Mapping):
        message = f"expected a mapping of units to integers such as {{'tokens': 1800}}, not {cost!r}"
        raise ConfigError(message, field="cost")
    for unit, amount in cost.items():
        check_cost(amount, f"cost.{unit}")
    return dict(cost)


def read_task_ids(task_ids: Iterable[str] | None) -> tuple[str, ...]:
    """Return task IDs as a tuple of strings; a single string is one ID."""
    ids = () if task_ids is None else (task_ids,) if isinstance(task_ids, str) else tuple(task_ids)
    return tuple(storable("task_ids", str(task_id)) for task_id in ids)
