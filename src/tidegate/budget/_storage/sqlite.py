"""The SQLite store of a budget: completed tasks, written in the transaction that charges them.

A check charges a batch and writes its value (see `open_values`) in one transaction. Settling it deletes the value, in
the transaction that corrects the charge and inserts the completed tasks. If a process is killed, either all of this has
happened or nothing.

Completions are kept for some weeks. Once a day, the writes that follow remove older ones: at most a hundred rows each,
or twice as many as they add if that is more. So no write takes long, and the size of the file stays bounded.
"""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.clock import yield_thread
from tidegate._runtime.files import make_private_folder
from tidegate.budget._storage.document_tables import is_document_database, rename_tables
from tidegate.budget._storage.file_check import check_path, refuse_wrong_path
from tidegate.budget._storage.recount import INSERT_COMPLETION, CountedLimits, count_again
from tidegate.errors import StoreUnavailable
from tidegate.stores._sqlite.async_worker import AsyncWorker, QueuedCall, Writes
from tidegate.stores._sqlite.database import PackageTables, read_schema
from tidegate.stores._sqlite.store import SQLiteStore, decide

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from tidegate._runtime.clock import Clock
    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask
    from tidegate.stores._sqlite.async_worker import StoreCall
    from tidegate.stores._sqlite.rows import StateRows
    from tidegate.stores._sqlite.store import Result, Work
    from tidegate.stores._values import Write

POLICY_PREFIX: Final = "budget:"  # of the names of all policies of budgets
DAY_MICROSECONDS: Final = 86_400_000_000
MAX_REMOVED_PER_TRANSACTION: Final = 100  # completions removed in one transaction
CLEANUP_PAUSE: Final = 0.002  # seconds between two transactions that only clean up

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


class CompletedCall(NamedTuple):
    """What a call of this store adds to a decision: values, and completed tasks."""

    writes: tuple[Write, ...]
    completion: Completion | None


class BudgetStore(SQLiteStore):
    """An SQLite store that also keeps the completed tasks of budgets, and the rows of idle ones."""

    _kept_policies = POLICY_PREFIX

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        retention: int,
        busy_timeout: float = 5.0,
        clock: Clock | None = None,
        limits: CountedLimits,
        only_reads: bool = False,
    ) -> None:
        """Remove completions after `retention` microseconds.

        `limits` are those of the budget; completed tasks are counted again for those that have no state in the file. A
        store that `only_reads` creates no file.
        """
        super().__init__(path, busy_timeout=busy_timeout, clock=clock)
        self._creates = not only_reads
        self._limits = None if only_reads else limits
        self._policy = limits.unlimited.name
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

    def apply_completed(
        self,
        verb: str,
        asks: tuple[Ask, ...],
        at: int | None,
        writes: tuple[Write, ...],
        completion: Completion | None,
    ) -> list[Decision]:
        """Apply a verb, write values and insert completed tasks, in one transaction."""
        return self._transact([completed_call(verb, asks, at, writes, completion)])[0]

    async def apply_completed_async(
        self,
        verb: str,
        asks: tuple[Ask, ...],
        at: int | None,
        writes: tuple[Write, ...],
        completion: Completion | None,
    ) -> list[Decision]:
        """Do what `apply_completed` does, on the thread of the store."""
        call = completed_call(verb, asks, at, writes, completion)
        return await self._get_worker().apply(QueuedCall(call))

    def clean_up(self) -> int:
        """Remove all old completions, a few per transaction; returns how many."""
        total = 0
        while found := self.clean_up_some():
            total += found
            yield_thread(CLEANUP_PAUSE)  # callers that wait for the file go first
        return total

    def clean_up_some(self) -> int:
        """Remove a few old completions, in one transaction; returns how many."""
        found: list[int] = []

        def work(rows: StateRows, _: StoreCall, now: int) -> list[Decision]:
            found.append(self._remove_old(rows, now, MAX_REMOVED_PER_TRANSACTION))
            return []

        self._transact([("clean up", (), None, None, None)], work)
        return found[-1]

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

    def _get_worker(self) -> AsyncWorker:
        return self._worker or self._start_worker()

    # ---- within a transaction ----------------------------------------------------------------------------------------

    def _transact_all(self, calls: Sequence[StoreCall], work: Work | None = None) -> list[Result]:
        return super()._transact_all(calls, work or self._decide)

    def _decide(self, rows: StateRows, call: StoreCall, now: int) -> list[Decision]:
        """Decide as any SQLite store does, and insert completed tasks."""
        verb, asks, given_now, at, extra = call
        if not isinstance(extra, CompletedCall):
            return decide(rows, call, now)
        decisions = decide(rows, (verb, asks, given_now, at, Writes(extra.writes)), now)
        if extra.completion is not None:
            self._insert_completion(rows, extra.completion, now)
        return decisions

    def _insert_completion(self, rows: StateRows, completion: Completion, now: int) -> None:
        """Insert completed tasks; once a day, start to remove old ones."""
        if not completion.tasks:
            return
        completed = now if completion.completed is None else completion.completed
        cost = json.dumps(dict(completion.cost)) if completion.cost else None
        task_ids: tuple[str | None, ...] = completion.task_ids or (None,)
        tasks = 1 if completion.task_ids else completion.tasks
        values = [
            (self._policy, completed, tasks, completion.task_type, task_id, None if index else cost)
            for index, task_id in enumerate(task_ids)
        ]
        rows.cursor.executemany(INSERT_COMPLETION, values)
        if now >= self._next_removal:
            max_rows = max(MAX_REMOVED_PER_TRANSACTION, 2 * len(values))
            if self._remove_old(rows, now, max_rows) < max_rows:
                self._next_removal = now + DAY_MICROSECONDS

    def _remove_old(self, rows: StateRows, now: int, max_rows: int) -> int:
        return rows.execute(DELETE_COMPLETIONS, (now - self._retention, max_rows)).rowcount


def completed_call(
    verb: str, asks: tuple[Ask, ...], at: int | None, writes: tuple[Write, ...], completion: Completion | None
) -> StoreCall:
    """Build a call. Tasks that are recorded late are charged as of their completion, unless the key was since then."""
    now = completion.completed if completion is not None and at is None else None
    return verb, asks, now, at, CompletedCall(writes, completion)
