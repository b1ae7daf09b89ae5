"""The SQLite file of a budget: what is reserved and what was completed, written in the transaction that charges it.

A batch is charged when it is checked, and noted as open in the same transaction. Whoever settles it removes the note in
the transaction that corrects the charge and writes down what was completed. So whenever a process is killed, either
both have happened or neither. What it left open is given back by whoever needs it first: a check that would be refused
looks for owners that have ended (see `owners`), and every check for batches that are overdue.

Completions are kept for some weeks. Once a day the writes that follow remove what is older, a hundred rows each at most
(or twice what they add, if that is more), so none of them takes long and the file stays as large as what it holds.
"""

from __future__ import annotations

import json
import secrets
import threading
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.budget.owners import Owner
from tidegate.clock import yield_thread
from tidegate.fork import fork_safe
from tidegate.stores.sqlite.store import SQLiteStore, decide
from tidegate.stores.sqlite.worker import Question, Worker

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.policy import Key, Policy
    from tidegate.stores.sqlite.rows import Rows
    from tidegate.stores.sqlite.store import Work
    from tidegate.stores.sqlite.worker import Asked

PREFIX: Final = "budget:"  # of the names of all policies of budgets
DAY: Final = 86_400_000_000
REMOVED: Final = 100  # completions removed in one transaction
PAUSE: Final = 0.002  # seconds between two transactions that only tidy up
RETURNED: Final = 16  # overdue batches given back in one transaction

OPEN: Final = "INSERT INTO budget_open (owner, at, number, policy, expires, costs) VALUES (?, ?, ?, ?, ?, ?)"
OVERDUE: Final = (
    "SELECT owner, at, number, costs FROM budget_open WHERE policy = ? AND expires <= ? ORDER BY expires LIMIT ?"
)
FIND: Final = "SELECT costs FROM budget_open WHERE owner = ? AND at = ? AND number = ?"
CLOSE: Final = "DELETE FROM budget_open WHERE owner = ? AND at = ? AND number = ?"
KEEP_OPEN: Final = "UPDATE budget_open SET costs = ?, expires = ? WHERE owner = ? AND at = ? AND number = ?"
COMPLETED: Final = (
    "INSERT INTO budget_completion (policy, completed, tasks, task_type, task_id, cost) VALUES (?, ?, ?, ?, ?, ?)"
)
CLEAN: Final = (
    "DELETE FROM budget_completion WHERE id IN "
    "(SELECT id FROM budget_completion WHERE completed < ? ORDER BY completed LIMIT ?)"
)


class Note(NamedTuple):
    """Tasks that were completed: how many, of which type, their names if they have some, what they cost."""

    tasks: int
    task_type: str | None = None
    task_ids: tuple[str, ...] = ()
    cost: Mapping[str, int] | None = None
    completed: int | None = None  # microseconds since 1970; None: now


class Settlement(NamedTuple):
    """How a charge is to be corrected.

    `at` and `number` say which. `held` is what was open of it so far, `deltas` corrects it, `left` stays open; `fresh`
    was not part of it at all. What was given back meanwhile, because it took too long, is charged anew: `actual`, under
    `vast`, room or not.
    """

    policy: Policy
    vast: Policy
    key: Key
    at: int
    number: int
    held: tuple[int, ...]
    deltas: tuple[int, ...]
    left: tuple[int, ...]
    actual: tuple[int, ...]
    fresh: tuple[int, ...]
    note: Note | None


def settling(told: Settlement) -> Asked:
    """Ask the file to settle a batch."""
    return "adjust", ((told.policy, told.key, told.deltas),), None, told.at, told


def recording(vast: Policy, key: Key, costs: tuple[int, ...], note: Note | None) -> Asked:
    """Ask the file to charge what was completed without having been reserved, room or not.

    What is told late is charged as of when it was completed, unless others have been charged since.
    """
    return "acquire", ((vast, key, costs),), note.completed if note else None, None, note


class Ledger(SQLiteStore):
    """An SQLite store that keeps the books of budgets beside their states."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        lasting: int,
        retention: int,
        busy_timeout: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Keep batches open for so many microseconds at most, and completions for as many as `retention` says."""
        super().__init__(path, busy_timeout=busy_timeout, clock=clock)
        self.owner = secrets.randbits(53)
        self._me = Owner(self.path, self.owner)
        self._numbers = count()
        self._ticketing = fork_safe(threading.Lock())
        self._issued: list[tuple[int, str, int]] = []  # within the transaction under way
        self._tickets: dict[int, list[tuple[str, int]]] = {}  # of those reserved at an instant: how much, which number
        self._buried: list[int] = []  # within the transaction under way
        self.removals: int = 0  # completions removed so far
        self.behind = False  # whether more batches may be overdue than one transaction gives back
        self._lasting = lasting
        self._retention = retention
        self._clean_from = 0

    def ticket(self, policy: Policy, at: int, costs: tuple[int, ...]) -> int:
        """Give the number of a batch that was just reserved: with its instant, it is known by that.

        Several may have been reserved at one instant; those that reserved as much are as good as each other.
        """
        with self._ticketing:
            tickets = self._tickets.get(at)
            if not tickets:
                return -1
            chosen = tickets[0]
            if len(tickets) > 1:
                text = write_costs(policy, costs)
                chosen = next((ticket for ticket in tickets if ticket[0] == text), chosen)
            tickets.remove(chosen)
            if not tickets:
                del self._tickets[at]
        return chosen[1]

    def settle(self, settlement: Settlement) -> None:
        """Settle a batch, or a part of it."""
        self._transact([settling(settlement)])

    async def settle_async(self, settlement: Settlement) -> None:
        """Settle on the store's thread."""
        await self._working().ask(Question(settling(settlement)))

    def record(self, vast: Policy, key: Key, costs: tuple[int, ...], note: Note | None) -> None:
        """Charge what was completed without a reservation."""
        self._transact([recording(vast, key, costs, note)])

    async def record_async(self, vast: Policy, key: Key, costs: tuple[int, ...], note: Note | None) -> None:
        """Charge on the store's thread."""
        await self._working().ask(Question(recording(vast, key, costs, note)))

    def tidy(self, policy: Policy, key: Key) -> int:
        """Give back every overdue batch and remove every old completion, a few in each transaction; count both."""
        total = 0
        while found := self.tidy_some(policy, key):
            total += found
            yield_thread(PAUSE)  # whoever waits for the file comes first
        return total

    def tidy_some(self, policy: Policy, key: Key) -> int:
        """Give back and remove a few, in one transaction."""
        found: list[int] = []

        def work(rows: Rows, _: Asked, now: int) -> list[Decision]:
            found.append(self._give_back(rows, policy, key, now) + self._remove(rows, now, REMOVED))
            return []

        self._transact([("tidy", ((policy, key, ()),), None, None, None)], work)
        return found[-1]

    def close(self) -> None:
        """Close the file; nobody needs to ask whether this process is alive any more."""
        super().close()
        self._me.end()

    def _take_over(self) -> None:
        """Be another in a forked process: what the parent holds is the parent's."""
        super()._take_over()
        self._me.leave()
        self.owner = secrets.randbits(53)
        self._me = Owner(self.path, self.owner)

    def _working(self) -> Worker:
        return self._worker or self._start_worker()

    # ---- within a transaction ----------------------------------------------------------------------------------------

    def _transact(self, asked: Sequence[Asked], work: Work | None = None) -> list[list[Decision]]:
        return super()._transact(asked, work or self._decide)

    def _attempt(self, asked: Sequence[Asked], work: Work) -> list[list[Decision]]:
        self._buried.clear()
        self._issued.clear()
        answers = super()._attempt(asked, work)
        with self._ticketing:
            for at, text, number in self._issued:
                self._tickets.setdefault(at, []).append((text, number))
        for owner in self._buried:  # only now: before, a kill would have left them neither alive nor known to be dead
            self._me.forget(owner)
        return answers

    def _decide(self, rows: Rows, asked: Asked, now: int) -> list[Decision]:
        """Decide as any SQLite store does, and keep the books."""
        verb, asks, given, charged, more = asked
        policy, key, costs = asks[0]
        moment = now if given is None else given
        if verb == "peek" or not policy.name.startswith(PREFIX):
            return decide(rows, asked, now)
        if isinstance(more, Settlement):
            return self._settle(rows, more, moment)
        if verb != "adjust":
            self._give_back(rows, policy, key, moment)
        answers = decide(rows, asked, now)
        in_need = verb != "adjust" and not (answers[0][0] and any(costs))  # refused, or a look at what is used
        if in_need and self._find_dead(rows, policy) and self._give_back(rows, policy, key, moment):
            answers = decide(rows, asked, now)
        if verb == "hold" and answers[0][0] and any(costs):
            if self._me.is_new:
                self._me.live()
                self._bury(rows, self._me.dead())
            # Under the instant of the decision, by which a charge is known.
            at, number, text = answers[0].at, next(self._numbers), write_costs(policy, costs)
            rows.execute(OPEN, (self.owner, at, number, policy.name, moment + self._lasting, text))
            self._issued.append((at, text, number))
        elif verb == "adjust" and charged is not None:  # a check that nobody waited for is undone
            held = tuple(-cost for cost in costs)
            place = (self.owner, charged, self.ticket(policy, charged, held))
            self._close_open(rows, policy, place, held, (), moment)
        elif isinstance(more, Note):
            self._complete(rows, policy, more, moment)
        return answers

    def _settle(self, rows: Rows, told: Settlement, now: int) -> list[Decision]:
        answers: list[Decision] = []
        anew = told.actual
        if self._close_open(rows, told.policy, (self.owner, told.at, told.number), told.held, told.left, now):
            if any(told.deltas):
                answers = decide(rows, settling(told), now)
            anew = told.fresh
        if any(anew):
            answers = decide(rows, recording(told.vast, told.key, anew, None), now)
        self._complete(rows, told.policy, told.note, now)
        return answers

    def _close_open(
        self,
        rows: Rows,
        policy: Policy,
        place: tuple[int, int, int],
        held: tuple[int, ...],
        left: tuple[int, ...],
        now: int,
    ) -> bool:
        """Note that a batch is settled, or what of it is still open; tell whether it was open."""
        found = rows.execute(FIND, place).fetchone()
        if found is None:
            return False
        if any(left):
            # By what is settled, not to what is left: threads may settle parts of a batch in any order.
            is_open = json.loads(found[0])
            for limit, before, after in zip(policy.limits, held, left, strict=True):
                is_open[limit.name] = max(0, is_open.get(limit.name, 0) - (before - after))
            costs = json.dumps({name: cost for name, cost in is_open.items() if cost}, separators=(",", ":"))
            expires = now + self._lasting  # it is being worked on
            rows.execute(KEEP_OPEN, (costs, expires, *place))
        else:
            rows.execute(CLOSE, place)
        return True

    def _find_dead(self, rows: Rows, policy: Policy) -> bool:
        """Call overdue what processes left open that have ended; tell whether there was any."""
        query = "SELECT DISTINCT owner FROM budget_open WHERE policy = ? AND expires > 0"
        dead = [owner for (owner,) in rows.execute(query, (policy.name,)).fetchall() if self._me.is_dead(owner)]
        self._bury(rows, dead)
        return bool(dead)

    def _bury(self, rows: Rows, dead: list[int]) -> None:
        """Call overdue what the dead left open."""
        for owner in dead:
            rows.execute("UPDATE budget_open SET expires = 0 WHERE owner = ?", (owner,))
        self._buried += dead

    def _give_back(self, rows: Rows, policy: Policy, key: Key, now: int) -> int:
        """Give back what overdue batches hold."""
        overdue = rows.execute(OVERDUE, (policy.name, now, RETURNED)).fetchall()
        self.behind = len(overdue) == RETURNED
        for owner, at, number, text in overdue:
            held = json.loads(text)
            deltas = tuple(-held.get(limit.name, 0) for limit in policy.limits)
            decide(rows, ("adjust", ((policy, key, deltas),), now, at, None), now)
            rows.execute(CLOSE, (owner, at, number))
        return len(overdue)

    def _complete(self, rows: Rows, policy: Policy, note: Note | None, now: int) -> None:
        """Write down what was completed; once a day, begin to remove what is old."""
        if note is None or not note.tasks:
            return
        when = now if note.completed is None else note.completed
        cost = json.dumps(dict(note.cost)) if note.cost else None
        names: tuple[str | None, ...] = note.task_ids or (None,)
        each = 1 if note.task_ids else note.tasks
        lines = [
            (policy.name, when, each, note.task_type, name, None if number else cost)
            for number, name in enumerate(names)
        ]
        rows.cursor.executemany(COMPLETED, lines)
        if now >= self._clean_from:
            most = max(REMOVED, 2 * len(lines))
            if self._remove(rows, now, most) < most:
                self._clean_from = now + DAY

    def _remove(self, rows: Rows, now: int, most: int) -> int:
        removed = rows.execute(CLEAN, (now - self._retention, most)).rowcount
        self.removals += removed
        return removed


def write_costs(policy: Policy, costs: tuple[int, ...]) -> str:
    """Write what is held of each limit, by its name."""
    held = {limit.name: cost for limit, cost in zip(policy.limits, costs, strict=True) if cost}
    return json.dumps(held, separators=(",", ":"))
