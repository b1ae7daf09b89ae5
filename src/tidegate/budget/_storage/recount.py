"""Counts completed tasks again, for limits that have no state of their own in the file.

That is so after the strategy was changed (a rolling and a fixed window have different states), after a tier was added,
and after a database was imported. The completions in the file and its open batches are charged to these limits, at the
times at which they happened. Completions are added up in steps of a second, those that are older than an hour in steps
of ten minutes; a step counts from its last completion, so a limit may count a task for longer, but never for less time.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.budget._storage.document_tables import has_renamed_tables, take_renamed_tables
from tidegate.budget._storage.open_values import RETURNED, decode, open_collection
from tidegate.core._bounds import SECOND
from tidegate.stores._sqlite.rows import KeyRow
from tidegate.stores._sqlite.store import decide, key_text
from tidegate.stores._sqlite.value_rows import list_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tidegate._policy import Key, Policy
    from tidegate.stores._sqlite.rows import StateRows

    Costs = tuple[int, ...]

log: logging.Logger = logging.getLogger("tidegate.budget")

HOUR: Final = 3600 * SECOND
MAX_PERIOD: Final = 31 * 24 * HOUR
RECENT_STEP: Final = SECOND
OLDER_STEP: Final = 600 * SECOND

INSERT_COMPLETION: Final = (
    "INSERT INTO budget_completion (policy, completed, tasks, task_type, task_id, cost) VALUES (?, ?, ?, ?, ?, ?)"
)
SELECT_COMPLETIONS: Final = (
    "SELECT completed, tasks, task_type, cost FROM budget_completion WHERE policy = ? AND completed > ? "
    "ORDER BY completed"
)


class CountedLimits(NamedTuple):
    """The limits of a budget, and what tasks of a type cost at each of them."""

    unlimited: Policy  # the limits without their quotas
    key: Key
    costs: Callable[[int, str | None, Mapping[str, int]], Costs]


def count_again(rows: StateRows, limits: CountedLimits, now: int) -> None:
    """Import the tables of the document, and charge what the file knows to limits without a state; see above."""
    if not has_renamed_tables(rows.cursor.connection) and not _changed(rows, limits):
        return
    rows.execute("BEGIN IMMEDIATE")
    imported = _import_tables(rows, limits, now)
    policy, name = limits.unlimited, key_text(limits.key)
    row = rows.read(policy, name)
    if imported or _changed(rows, limits):
        stored = {limit.identity for limit in row.limits} if row.id else set()
        lacking = [limit.identity not in stored for limit in policy.limits]
        if row.id:  # states of limits that the budget no longer has would be out of date when they come back
            rows.write(policy, name, KeyRow(row.id, row.states, (), (), row.logs), row.states, now)
        counted = 0
        for at, costs in sorted(_charges(rows, limits, now)):
            charge = tuple(cost if lacks else 0 for cost, lacks in zip(costs, lacking, strict=True))
            if any(charge):
                decide(rows, ("acquire", ((policy, limits.key, charge),), at, None, None), at)
                counted += 1
        names = ", ".join(limit.name for limit, lacks in zip(policy.limits, lacking, strict=True) if lacks)
        if counted:
            log.info("the tiers %s are new in the database: counted the completed tasks in it", names)
    rows.execute("COMMIT")


def _changed(rows: StateRows, limits: CountedLimits) -> bool:
    """Return whether the file has states of the budget, and not of exactly these limits."""
    row = rows.read(limits.unlimited, key_text(limits.key))
    if not row.id:
        return False
    return {limit.identity for limit in row.limits} != {limit.identity for limit in limits.unlimited.limits}


def _import_tables(rows: StateRows, limits: CountedLimits, now: int) -> bool:
    db = rows.cursor.connection
    if not has_renamed_tables(db):
        return False
    tasks = take_renamed_tables(db, now)
    values = [(limits.unlimited.name, *each, None) for each in tasks]
    rows.cursor.executemany(INSERT_COMPLETION, values)
    log.warning("imported the tables of the database: completed tasks %d", sum(each.tasks for each in tasks))
    return True


def _charges(rows: StateRows, limits: CountedLimits, now: int) -> Iterator[tuple[int, Costs]]:
    """Yield what completions and open batches cost at each limit, with their times."""
    name = limits.unlimited.name
    steps: dict[int, tuple[int, Costs]] = {}
    for at, tasks, task_type, cost in rows.execute(SELECT_COMPLETIONS, (name, now - MAX_PERIOD)):
        costs = limits.costs(tasks, task_type, json.loads(cost) if cost else {})
        step = RECENT_STEP if at > now - HOUR else OLDER_STEP
        _, before = steps.get(at // step * step, (0, ()))
        total = tuple(one + more for one, more in zip(before, costs, strict=True)) if before else costs
        steps[at // step * step] = at, total
    yield from steps.values()
    for value in list_values(rows.execute, open_collection(name, limits.key), now).values():
        if value.data != RETURNED:
            at, reserved = decode(value)
            yield at, tuple(reserved.get(limit.name, 0) for limit in limits.unlimited.limits)
