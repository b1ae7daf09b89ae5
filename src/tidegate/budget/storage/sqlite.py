"""The SQLite store of a budget: open batches and completed tasks, written in the transaction that charges them.

A check charges a batch and inserts a row for the open batch, in one transaction. Settling it deletes this row, in the
transaction that corrects the charge and inserts the completed tasks. If a process is killed, either all of this has
happened or nothing. Its open batches are returned when another caller needs them: every check returns batches that have
expired, and a check that would be denied also looks for owners that have ended (see `process_lock`).

Completions are kept for some weeks. Once a day, the writes that follow remove older ones: at most a hundred rows each,
or twice as many as they add if that is more. So no write takes long, and the size of the file stays bounded.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.budget.storage.document_tables import is_document_database, rename_tables
from tidegate.budget.storage.file_check import check_path, refuse_wrong_path
from tidegate.budget.storage.process_lock import ProcessLock
from tidegate.budget.storage.recount import INSERT_COMPLETION, CountedLimits, count_again
from tidegate.clock import yield_thread
from tidegate.errors import StoreUnavailable
from tidegate.files import make_private_folder
from tidegate.fork import fork_safe
from tidegate.stores.sqlite.async_worker import AsyncWorker, QueuedCall
from tidegate.stores.sqlite.database import PackageTables, read_schema
from tidegate.stores.sqlite.store import SQLiteStore, decide

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from tidegate.budget.open_batch import BatchShare
    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.policy import Key, Policy
    from tidegate.stores.sqlite.async_worker import StoreCall
    from tidegate.stores.sqlite.rows import StateRows
    from tidegate.stores.sqlite.store import Result, Work

POLICY_PREFIX: Final = "budget:"  # of the names of all policies of budgets
DAY_MICROSECONDS: Final = 86_400_000_000
MAX_REMOVED_PER_TRANSACTION: Final = 100  # completions removed in one transaction
CLEANUP_PAUSE: Final = 0.002  # seconds between two transactions that only clean up
MAX_RETURNED_PER_TRANSACTION: Final = 16  # expired batches returned in one transaction

INSERT_OPEN: Final = "INSERT INTO budget_open (owner, at, number, policy, expires, costs) VALUES (?, ?, ?, ?, ?, ?)"
SELECT_OVERDUE: Final = (
    "SELECT owner, at, number, costs FROM budget_open WHERE policy = ? AND expires <= ? ORDER BY expires LIMIT ?"
)
SELECT_OPEN: Final = "SELECT costs FROM budget_open WHERE owner = ? AND at = ? AND number = ?"
DELETE_OPEN: Final = "DELETE FROM budget_open WHERE owner = ? AND at = ? AND number = ?"
UPDATE_OPEN: Final = "UPDATE budget_open SET costs = ?, expires = ? WHERE owner = ? AND at = ? AND number = ?"
DELETE_COMPLETIONS: Final = (
    "DELETE FROM budget_completion WHERE id IN "
    "(SELECT id FROM budget_completion WHERE completed < ? ORDER BY completed LIMIT ?)"
)


class Completion(NamedTuple):
    """Completed tasks: how many, their type, their ids if they have any, and their cost."""

    tasks: int
    task_type: str | None = None
    task_ids: tuple[str, ...] = ()
    cost: Mapping[str, int] | None = None
    completed: int | None = None  # microseconds since 1970; None: now


class Settlement(NamedTuple):
    """How to correct the charge of a batch, which `at` and `number` identify.

    If the batch expired and was returned meanwhile, its actual cost is charged again under the policy `unlimited`, even
    if that exceeds a quota.
    """

    policy: Policy
    unlimited: Policy
    key: Key
    at: int
    number: int
    share: BatchShare
    completion: Completion | None


def settle_call(settlement: Settlement) -> StoreCall:
    """Build the call of the store that settles a batch."""
    asks = ((settlement.policy, settlement.key, settlement.share.corrections),)
    return "adjust", asks, None, settlement.at, settlement


def record_call(unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None) -> StoreCall:
    """Build the call of the store that charges completed tasks without a reservation, even beyond a quota.

    Tasks that are recorded late are charged as of their completion, unless the key was charged since then.
    """
    return "acquire", ((unlimited, key, costs),), completion.completed if completion else None, None, completion


class BudgetStore(SQLiteStore):
    """An SQLite store that also keeps the open batches and completed tasks of budgets, and the rows of idle ones."""

    _kept_policies = POLICY_PREFIX

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        batch_ttl: int,
        retention: int,
        busy_timeout: float = 5.0,
        clock: Clock | None = None,
        limits: CountedLimits | None = None,
        only_reads: bool = False,
    ) -> None:
        """Return batches after `batch_ttl`, and remove completions after `retention`, both in microseconds.

        `limits` are those of the budget; completed tasks are counted again for those that have no state in the file. A
        store that `only_reads` creates no file.
        """
        super().__init__(path, busy_timeout=busy_timeout, clock=clock)
        self._creates = not only_reads
        self._limits = None if only_reads else limits
        self.owner: int = secrets.randbits(53)
        self._process_lock = ProcessLock(self.path, self.owner)
        self._numbers = count()
        self._reservations_lock = fork_safe(threading.Lock())
        self._reservations: dict[int, list[tuple[str, int]]] = {}  # by instant: the costs and number of each batch
        self._new_reservations: list[tuple[int, str, int]] = []  # of the current transaction
        self._ended: list[int] = []  # owners that the current transaction found to have ended
        self.has_more_expired: bool = False  # whether more batches may have expired than the last transaction returned
        self._batch_ttl = batch_ttl
        self._retention = retention
        self._next_removal = 0

    def open(self) -> bool:
        """Open the file, and create it and its folder. Raises ConfigError if the path can never work.

        Returns false if the file is unavailable for another reason: then the first call opens it.
        """
        check_path(self.path, creates=self._creates)
        try:
            if self._creates:
                make_private_folder(self.path.parent)
            self._exclusively(self._open)
        except (StoreUnavailable, sqlite3.Error, OSError) as error:
            self._close_locked()
            refuse_wrong_path(error, self.path, creates=self._creates)
            return False
        return True

    @property
    def awaits_file(self) -> bool:
        """Whether this store only reads, and no program has created the file so far."""
        return not self._creates and self._inode == (0, 0) and not self.path.exists()

    def take_number(self, policy: Policy, at: int, costs: tuple[int, ...]) -> int:
        """Return the number of a batch that was just reserved; together with its instant it identifies the batch.

        Batches that reserved the same costs at the same instant are interchangeable.
        """
        with self._reservations_lock:
            candidates = self._reservations.get(at)
            if not candidates:
                return -1
            chosen = candidates[0]
            if len(candidates) > 1:
                text = costs_to_json(policy, costs)
                chosen = next((candidate for candidate in candidates if candidate[0] == text), chosen)
            candidates.remove(chosen)
            if not candidates:
                del self._reservations[at]
        return chosen[1]

    def settle(self, settlement: Settlement) -> None:
        """Settle a batch, or a part of it."""
        self._transact([settle_call(settlement)])

    async def settle_async(self, settlement: Settlement) -> None:
        """Settle a batch on the thread of the store."""
        await self._get_worker().apply(QueuedCall(settle_call(settlement)))

    def record(self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None) -> None:
        """Charge tasks that were completed without a reservation."""
        self._transact([record_call(unlimited, key, costs, completion)])

    async def record_async(
        self, unlimited: Policy, key: Key, costs: tuple[int, ...], completion: Completion | None
    ) -> None:
        """Charge tasks on the thread of the store."""
        await self._get_worker().apply(QueuedCall(record_call(unlimited, key, costs, completion)))

    def clean_up(self, policy: Policy, key: Key) -> int:
        """Refund all expired batches and remove all old completions, a few per transaction; returns how many."""
        total = 0
        while found := self.clean_up_some(policy, key):
            total += found
            yield_thread(CLEANUP_PAUSE)  # callers that wait for the file go first
        return total

    def clean_up_some(self, policy: Policy, key: Key) -> int:
        """Refund a few expired batches and remove a few old completions, in one transaction; returns how many."""
        found: list[int] = []

        def work(rows: StateRows, _: StoreCall, now: int) -> list[Decision]:
            found.append(
                self._return_expired(rows, policy, key, now) + self._remove_old(rows, now, MAX_REMOVED_PER_TRANSACTION)
            )
            return []

        self._transact([("clean up", ((policy, key, ()),), None, None, None)], work)
        return found[-1]

    def list_open(self, policy: Policy, key: Key) -> list[tuple[int, tuple[int, ...]]]:
        """Return the instant of each open batch, and what is still reserved for it at each limit."""
        found: list[tuple[int, str]] = []

        def work(rows: StateRows, _: StoreCall, __: int) -> list[Decision]:
            found[:] = rows.execute("SELECT at, costs FROM budget_open WHERE policy = ?", (policy.name,)).fetchall()
            return []

        self._transact([("peek", ((policy, key, ()),), None, None, None)], work)
        reserved = [(at, json.loads(text)) for at, text in found]
        return [(at, tuple(costs.get(limit.name, 0) for limit in policy.limits)) for at, costs in reserved]

    def close(self) -> None:
        """Close the file and release the lock of this process."""
        super().close()
        self._process_lock.release()

    def _schemas(self) -> list[PackageTables]:
        return [*super()._schemas(), read_schema(__package__)]

    def _adopt(self, db: sqlite3.Connection) -> None:
        """Take over a database with the tables of the document; `count_again` imports them."""
        if not is_document_database(db):
            return
        if not self._creates:
            raise StoreUnavailable(f"{self.path} is not imported yet: the first program that uses the budget does that")
        rename_tables(db)

    def _open(self) -> StateRows:
        rows = super()._open()
        if self._limits is not None:
            try:
                count_again(rows, self._limits, self.clock.ns() // 1000)
            except BaseException:
                self._rows = None  # the next call opens the file again
                raise
        return rows

    def _reset_after_fork(self) -> None:
        """Become another owner in a forked process: the open batches of the parent stay with the parent."""
        super()._reset_after_fork()
        self._process_lock.close_inherited()
        self.owner = secrets.randbits(53)
        self._process_lock = ProcessLock(self.path, self.owner)

    def _get_worker(self) -> AsyncWorker:
        return self._worker or self._start_worker()

    # ---- within a transaction ----------------------------------------------------------------------------------------

    def _transact_all(self, calls: Sequence[StoreCall], work: Work | None = None) -> list[Result]:
        return super()._transact_all(calls, work or self._decide)

    def _attempt(self, calls: Sequence[StoreCall], work: Work) -> list[Result]:
        self._ended.clear()
        self._new_reservations.clear()
        decisions = super()._attempt(calls, work)
        with self._reservations_lock:
            for at, text, number in self._new_reservations:
                self._reservations.setdefault(at, []).append((text, number))
        # Only after the commit: without its file, an owner cannot be found to have ended.
        for owner in self._ended:
            self._process_lock.remove_file(owner)
        return decisions

    def _decide(self, rows: StateRows, call: StoreCall, now: int) -> list[Decision]:
        """Decide as any SQLite store does, and keep the tables of budgets up to date."""
        verb, asks, given_now, charged_at, extra = call
        if verb == "peek" or not asks or not asks[0][0].name.startswith(POLICY_PREFIX):
            return decide(rows, call, now)
        policy, key, costs = asks[0]
        instant = now if given_now is None else given_now
        if isinstance(extra, Settlement):
            return self._settle(rows, extra, instant)
        if verb != "adjust":
            self._return_expired(rows, policy, key, instant)
        decisions = decide(rows, call, now)
        # A denied call, or one that only reads usage, needs to know what owners that have ended left open.
        needs_ended = verb != "adjust" and not (decisions[0].within_limits and any(costs))
        if needs_ended and self._expire_ended(rows, policy) and self._return_expired(rows, policy, key, instant):
            decisions = decide(rows, call, now)
        if verb == "hold" and decisions[0].within_limits and any(costs):
            self._insert_open(rows, policy, costs, decisions[0].at, instant)
        elif verb == "adjust" and charged_at is not None:  # undoes a check whose caller was cancelled
            reserved = tuple(-cost for cost in costs)
            batch = (self.owner, charged_at, self.take_number(policy, charged_at, reserved))
            self._close_batch(rows, policy, batch, reserved, (), instant)
        elif isinstance(extra, Completion):
            self._insert_completion(rows, policy, extra, instant)
        return decisions

    def _insert_open(self, rows: StateRows, policy: Policy, costs: tuple[int, ...], at: int, now: int) -> None:
        """Insert a batch as open; `at` is the instant of the decision, which identifies its charge."""
        if self._process_lock.is_new:
            self._process_lock.acquire()
            self._expire_batches_of(rows, self._process_lock.find_ended())
        number, text = next(self._numbers), costs_to_json(policy, costs)
        rows.execute(INSERT_OPEN, (self.owner, at, number, policy.name, now + self._batch_ttl, text))
        self._new_reservations.append((at, text, number))

    def _settle(self, rows: StateRows, settlement: Settlement, now: int) -> list[Decision]:
        decisions: list[Decision] = []
        policy, unlimited, key, at, number, share, completion = settlement
        charge = share.actual
        if self._close_batch(rows, policy, (self.owner, at, number), share.before, share.after, now):
            if any(share.corrections):
                decisions = decide(rows, settle_call(settlement), now)
            charge = share.unreserved
        if any(charge):
            decisions = decide(rows, record_call(unlimited, key, charge, None), now)
        self._insert_completion(rows, policy, completion, now)
        return decisions

    def _close_batch(
        self,
        rows: StateRows,
        policy: Policy,
        batch: tuple[int, int, int],
        before: tuple[int, ...],
        after: tuple[int, ...],
        now: int,
    ) -> bool:
        """Delete an open batch, or update what is still reserved for it; returns whether it was open."""
        found = rows.execute(SELECT_OPEN, batch).fetchone()
        if found is None:
            return False
        if any(after):
            # Subtract what is settled instead of storing what is left: threads may settle parts in any order.
            reserved = json.loads(found[0])
            for limit, cost_before, cost_after in zip(policy.limits, before, after, strict=True):
                reserved[limit.name] = max(0, reserved.get(limit.name, 0) - (cost_before - cost_after))
            costs = json.dumps({name: cost for name, cost in reserved.items() if cost}, separators=(",", ":"))
            expires = now + self._batch_ttl  # its tasks are being processed
            rows.execute(UPDATE_OPEN, (costs, expires, *batch))
        else:
            rows.execute(DELETE_OPEN, batch)
        return True

    def _expire_ended(self, rows: StateRows, policy: Policy) -> bool:
        """Mark the open batches of owners that have ended as expired; returns whether there were any."""
        query = "SELECT DISTINCT owner FROM budget_open WHERE policy = ? AND expires > 0"
        owners = [owner for (owner,) in rows.execute(query, (policy.name,)).fetchall()]
        ended = [owner for owner in owners if self._process_lock.has_ended(owner)]
        self._expire_batches_of(rows, ended)
        return bool(ended)

    def _expire_batches_of(self, rows: StateRows, owners: list[int]) -> None:
        """Mark the open batches of these owners as expired."""
        for owner in owners:
            rows.execute("UPDATE budget_open SET expires = 0 WHERE owner = ?", (owner,))
        self._ended += owners

    def _return_expired(self, rows: StateRows, policy: Policy, key: Key, now: int) -> int:
        """Refund expired batches; returns how many."""
        expired = rows.execute(SELECT_OVERDUE, (policy.name, now, MAX_RETURNED_PER_TRANSACTION)).fetchall()
        self.has_more_expired = len(expired) == MAX_RETURNED_PER_TRANSACTION
        for owner, at, number, text in expired:
            reserved = json.loads(text)
            corrections = tuple(-reserved.get(limit.name, 0) for limit in policy.limits)
            decide(rows, ("adjust", ((policy, key, corrections),), now, at, None), now)
            rows.execute(DELETE_OPEN, (owner, at, number))
        return len(expired)

    def _insert_completion(self, rows: StateRows, policy: Policy, completion: Completion | None, now: int) -> None:
        """Insert completed tasks; once a day, start to remove old ones."""
        if completion is None or not completion.tasks:
            return
        completed = now if completion.completed is None else completion.completed
        cost = json.dumps(dict(completion.cost)) if completion.cost else None
        task_ids: tuple[str | None, ...] = completion.task_ids or (None,)
        tasks = 1 if completion.task_ids else completion.tasks
        values = [
            (policy.name, completed, tasks, completion.task_type, task_id, None if index else cost)
            for index, task_id in enumerate(task_ids)
        ]
        rows.cursor.executemany(INSERT_COMPLETION, values)
        if now >= self._next_removal:
            max_rows = max(MAX_REMOVED_PER_TRANSACTION, 2 * len(values))
            if self._remove_old(rows, now, max_rows) < max_rows:
                self._next_removal = now + DAY_MICROSECONDS

    def _remove_old(self, rows: StateRows, now: int, max_rows: int) -> int:
        return rows.execute(DELETE_COMPLETIONS, (now - self._retention, max_rows)).rowcount


def costs_to_json(policy: Policy, costs: tuple[int, ...]) -> str:
    """Write the reserved costs as JSON, by the name of each limit."""
    reserved = {limit.name: cost for limit, cost in zip(policy.limits, costs, strict=True) if cost}
    return json.dumps(reserved, separators=(",", ":"))
