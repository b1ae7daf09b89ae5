"""The storage of a budget: opens it, and settles what was reserved there."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from tidegate._runtime.background_thread import BackgroundThread
from tidegate._runtime.clock import SystemClock
from tidegate._runtime.flow import run, run_async
from tidegate._runtime.urls import split_url
from tidegate.budget._storage.file_check import check_path
from tidegate.budget._storage.open_values import ApplyValues, ListValues, OpenValues, renewal_interval
from tidegate.budget._storage.sqlite import BudgetStore, Completion
from tidegate.core._bounds import SECOND
from tidegate.core._decision import LocalDecision
from tidegate.errors import Closed, ConfigError, StoreUnavailable
from tidegate.stores._opened import OpenedStore
from tidegate.stores._outage import GuardedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tidegate._policy import Key, Policy
    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import Flow
    from tidegate.budget._open_batch import BatchShare
    from tidegate.budget._settings.model import BudgetSettings
    from tidegate.budget._storage.open_values import ValueStep
    from tidegate.budget._storage.recount import CountedLimits
    from tidegate.stores._base import Store
    from tidegate.stores._values import Write

DAY_SECONDS: Final = 86_400


class Settlement(NamedTuple):
    """How to correct the charge of a batch, which was made at the instant `at`; its value has this name.

    If the batch was returned meanwhile, its actual cost is charged again under the policy `unlimited`, even if that
    exceeds a quota.
    """

    policy: Policy
    unlimited: Policy
    key: Key
    at: int
    name: str
    share: BatchShare
    completion: Completion | None


class Settlements:
    """Settles batches, for threads and for tasks. Raises StoreUnavailable if a call has to be repeated later.

    Without `values` (in memory, and in stores that keep none), the batch of a killed process stays charged.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock | None,
        values: OpenValues | None = None,
        file: tuple[BudgetStore, GuardedStore] | None = None,
    ) -> None:
        """Settle with this store; `clock` replaces its own, for tests.

        A `file` is used directly: while it is unavailable, the budget queues and retries the calls.
        """
        self._store = store
        self._clock = clock
        self._values = values
        self._closed = False
        self._renewals = BackgroundThread(self._renew, "tidegate-budget-lease", delay=renewal_interval())
        self.budget_store: BudgetStore | None = None if file is None else file[0]
        self._observe_call: Callable[[], AbstractContextManager[None]] = (
            nullcontext if file is None else file[1].observe_call
        )

    # ---- check -------------------------------------------------------------------------------------------------------

    def reserve(self, policy: Policy, costs: tuple[int, ...]) -> tuple[str, tuple[Write, ...]]:
        """Name a batch that is going to be charged; returns the writes of the step that charges it."""
        if self._values is None or not any(costs):
            return "", ()
        self._renewals.start()
        return self._values.reserve(policy, costs)

    def confirm(self, writes: tuple[Write, ...], began: int) -> None:
        """Remember that a check with these writes, which began at this steady instant, was charged."""
        if self._values is not None:
            self._values.confirm(writes, began)

    def release(self, name: str) -> None:
        """Forget a batch that was denied or cancelled."""
        if self._values is not None:
            self._values.release(name)

    # ---- settle ------------------------------------------------------------------------------------------------------

    def settle(self, settlement: Settlement) -> None:
        """Correct the charge of a batch."""
        run(self._settle_flow(settlement), self._perform)

    async def settle_async(self, settlement: Settlement) -> None:
        """Correct the charge of a batch."""
        await run_async(self._settle_flow(settlement), self._perform_async)

    def _settle_flow(self, settlement: Settlement) -> Flow[ValueStep, None]:
        if self._values is not None and settlement.name:
            return self._values.settle_flow(settlement)
        return self._correct_flow(settlement)

    def _correct_flow(self, settlement: Settlement) -> Flow[ValueStep, None]:
        """Correct the charge alone; the guarded store repeats a correction that a lost store misses."""
        policy, _, key, at, _, share, completion = settlement
        yield ApplyValues("adjust", ((policy, key, share.corrections),), at, (), completion)

    def record(self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None) -> None:
        """Charge tasks that were not reserved."""
        run(self._record_flow(unlimited, key, costs, completion), self._perform)

    async def record_async(
        self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None
    ) -> None:
        """Charge tasks that were not reserved."""
        await run_async(self._record_flow(unlimited, key, costs, completion), self._perform_async)

    def _record_flow(
        self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None
    ) -> Flow[ValueStep, None]:
        yield ApplyValues("acquire", ((unlimited, key, costs),), None, (), completion)

    # ---- open batches of other processes -----------------------------------------------------------------------------

    def return_ended(self, policy: Policy, key: Key) -> int:
        """Refund the batches of processes that have ended; returns how many."""
        if self._values is not None:
            with suppress(StoreUnavailable):
                return run(self._values.return_ended_flow(policy, key, self._wall()), self._perform)
        return 0

    async def return_ended_async(self, policy: Policy, key: Key) -> int:
        """Refund the batches of processes that have ended; returns how many."""
        if self._values is not None:
            with suppress(StoreUnavailable):
                return await run_async(self._values.return_ended_flow(policy, key, self._wall()), self._perform_async)
        return 0

    def list_open(self, policy: Policy) -> list[tuple[int, tuple[int, ...]]]:
        """Return the instant of each open batch of all processes, and what is still reserved for it at each limit."""
        return [] if self._values is None else run(self._values.list_flow(policy), self._perform)

    def clean_up(self, policy: Policy, key: Key) -> int:
        """Refund the batches of processes that have ended, and remove old completions; returns how many."""
        total = 0
        if self._values is not None:
            total = run(self._values.return_ended_flow(policy, key, self._wall(), at_once=True), self._perform)
        return total + (0 if self.budget_store is None else self.budget_store.clean_up())

    def _renew(self) -> int | None:
        """Renew the lease of this process, if it has open batches; returns when to do it again."""
        if self._values is None or self._closed:
            return None
        due = SystemClock.steady() + round(renewal_interval() * SECOND)
        try:
            return due if run(self._values.renew_flow(), self._perform) else None
        except StoreUnavailable:
            return due

    def close(self) -> None:
        """Stop to renew the lease, and end it."""
        self._closed = True
        self._renewals.stop()
        if self._values is not None:
            with suppress(StoreUnavailable, Closed):
                run(self._values.leave_flow(), self._perform)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _now(self) -> int | None:
        return None if self._clock is None else self._clock.ns() // 1000

    def _wall(self) -> int:
        return (self._clock or self._store.clock).ns() // 1000

    def _perform(self, step: ValueStep) -> Any:  # noqa: ANN401 - what a step returns
        if isinstance(step, ListValues):
            return self._store.list_values(step.collection, self._now())
        if self.budget_store is not None:
            with self._observe_call():
                return self.budget_store.apply_completed(*step)
        arguments = step.verb, step.asks, self._now(), step.at
        return self._charged(step, self._store.apply(*arguments, *((step.writes,) if step.writes else ())))

    async def _perform_async(self, step: ValueStep) -> Any:  # noqa: ANN401 - what a step returns
        if isinstance(step, ListValues):
            return await self._store.list_values_async(step.collection, self._now())
        if self.budget_store is not None:
            with self._observe_call():
                return await self.budget_store.apply_completed_async(*step)
        arguments = step.verb, step.asks, self._now(), step.at
        return self._charged(step, await self._store.apply_async(*arguments, *((step.writes,) if step.writes else ())))

    @staticmethod
    def _charged(step: ApplyValues, decisions: Any) -> Any:  # noqa: ANN401 - the decisions
        """Raise StoreUnavailable if the store has not charged completed tasks: the guarded store answered."""
        if step.verb == "acquire" and decisions and isinstance(decisions[0], LocalDecision):
            raise StoreUnavailable("could not record completed tasks; they are recorded when the store is available")
        return decisions


def open_storage(
    settings: BudgetSettings, clock: Clock | None, limits: CountedLimits, *, only_reads: bool = False
) -> tuple[Store, Settlements]:
    """Open the storage: a guarded store that decides, and the storage of settlements.

    Raises ConfigError if a path can never work. With `only_reads`, no file is created.
    """
    text, path = str(settings.store), find_path(settings.store)
    if path is None:
        store = OpenedStore.open(with_deadline(text, settings.deadline), clock=clock).store
        test_clock = clock if clock is not None and clock is not store.clock else None
        if store.instant or not store.keeps_values:  # in memory: no other process shares it
            return store, Settlements(store, test_clock)
        return store, Settlements(store, test_clock, open_values(settings, limits, clock or store.clock))
    options: dict[str, Any] = {
        "retention": round(settings.retention_days * DAY_SECONDS * SECOND),
        "busy_timeout": settings.deadline,
        "clock": clock,
        "limits": limits,
        "only_reads": only_reads,
    }
    budget_store = BudgetStore(path, **options)
    guarded = GuardedStore(budget_store)
    if budget_store.open():
        with guarded.observe_call():  # the file is connected
            pass
    values = open_values(settings, limits, budget_store.clock)
    return guarded, Settlements(guarded, None, values, (budget_store, guarded))


def open_values(settings: BudgetSettings, limits: CountedLimits, clock: Clock) -> OpenValues:
    """Return the open batches of a budget."""
    return OpenValues(limits.unlimited.name, limits.key, settings.batch_ttl_microseconds, clock)


def find_path(store: str | Path) -> Path | None:
    """Return the path of an SQLite file; None for the URL of another store."""
    text = str(store)
    if "://" not in text:
        return Path(text)
    if split_url(text, "store").scheme != "sqlite":
        return None
    return Path(unquote(text.partition("?")[0].removeprefix("sqlite:///")))


def check_storage(settings: BudgetSettings) -> None:
    """Raise ConfigError if the path of the store can never work. Changes nothing."""
    path = find_path(settings.store)
    if path is not None:
        check_path(path)


@contextmanager
def locate_storage_errors(field: str = "store", file: str | None = None) -> Iterator[None]:
    """Name the variable or the file that configured a storage that can never work."""
    try:
        yield
    except ConfigError as error:
        if error.field != "store" or error.file is not None:
            raise
        raise ConfigError(error.detail, file=file, field=field) from None


def with_deadline(url: str, seconds: float) -> str:
    """Add the deadline of the guarded store to a URL, unless it has one."""
    if url.startswith("memory:") or "deadline=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}deadline={seconds:g}"
