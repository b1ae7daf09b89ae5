"""SQLiteStore: the Python core inside a write transaction."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, ParamSpec, TypeVar, get_args
from urllib.parse import parse_qsl, unquote

from tidegate.clock import Clock, SystemClock, yield_thread
from tidegate.core.bounds import MAX_INTEGER, SECOND
from tidegate.core.decision import VERBS, Decision
from tidegate.core.limit import parse_period
from tidegate.errors import Closed, ConfigError, StoreUnavailable
from tidegate.fork import abandon, at_fork
from tidegate.lock import Lock, locked, threads_holding
from tidegate.policy.key import join_key
from tidegate.stores.base import Store
from tidegate.stores.sqlite.async_worker import AsyncWorker, QueuedCall
from tidegate.stores.sqlite.database import (
    BUSY_CODES,
    Migration,
    connect,
    discard,
    error_code,
    explain,
    prepare,
    read_migrations,
)
from tidegate.stores.sqlite.rows import KeyRow, StateRows, storable
from tidegate.urls import redact, split_url

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from tidegate.core.algorithms import State
    from tidegate.core.decision import States
    from tidegate.core.limit import Limit
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Ask
    from tidegate.stores.sqlite.async_worker import Asked

    Work = Callable[[StateRows, Asked, int], list[Decision]]

P = ParamSpec("P")
R = TypeVar("R")
Synchronous = Literal["normal", "full", "extra"]

# Every so many transactions, one sees whether the file was replaced, and the next that writes removes what ended.
CALLS_BETWEEN_SWEEPS: Final = 16
# Seconds between tries while others keep the file locked. A single transaction ends soon. Where many processes want the
# file all the time, they do half as much again in runs of milliseconds as when each wakes the others at every decision.
FIRST_LOCK_PAUSE: Final = 0.00002
MAX_LOCK_PAUSE: Final = 0.003
REST: Final = 0.0002  # seconds between tries while another thread of this process uses the connection
MAX_GATE: Final = 0.05  # seconds to wait for other threads before looking whether one is there
MAX_FORK: Final = SECOND  # how long no connection is opened since a fork is about to happen


class InUseError(sqlite3.OperationalError):
    """Other threads of this process used the connection for too long."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY

    def __str__(self) -> str:
        """Say so."""
        return "other threads of this process are using it"


class SQLiteStore(Store):
    """Keeps states in one SQLite file, for all processes and threads of this machine.

    Each call of `apply` is one write transaction (BEGIN IMMEDIATE, in WAL mode), so processes decide one after another
    and none ever sees half a decision. A process that is killed at any moment loses nothing it was told, and blocks
    nobody: the operating system takes its lock away.

    `synchronous` says what a power cut may lose. "normal": the charges of the last moments, since the file was last
    synchronised (it stays sound); killed processes lose nothing. "full": nothing, at the price of a disk write per
    decision. `busy_timeout` is how long a call waits while others keep the file locked.

    A process has one connection, which its threads share under a lock; after a fork, each side opens its own. The file
    is opened by the first call, and again after an error, so the store works again as soon as the disk does. So it is
    after a call that a signal handler interrupted: `_unsure` is set while a transaction is under way, and whoever finds
    it set discards the connection.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Synchronous = "normal",
        busy_timeout: str | float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Use this file; it is opened by the first call."""
        super().__init__(clock)
        if synchronous not in get_args(Synchronous):
            raise ConfigError(f"must be normal, full or extra, not {synchronous!r}", field="synchronous")
        self.path = Path(path).absolute()
        self.synchronous = synchronous
        self._patience = read_timeout(busy_timeout)
        self.lock = Lock(spins=0, rest=REST)
        self._gate = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._rows: StateRows | None = None
        self._unsure = False
        self._inode = (0, 0)
        self._forking = 0  # until then no connection is opened, in steady time
        self._workers: list[AsyncWorker] = []
        self._worker: AsyncWorker | None = None
        self._closed = False
        self._count = 0
        self._untended = False
        self._waits = 0
        self._failures = 0
        at_fork(before=self._prepare_fork, parent=self._resume, child=self._take_over)

    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        """Apply the verb to every key together, in one transaction."""
        return self._transact(((verb, asks, now, at, None),))[0]

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key."""
        return self._transact(((verb, ((policy, key, costs),), now, at, None),))[0][0]

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply on the store's own thread; calls of many tasks at once share transactions."""
        worker = self._worker or self._start_worker()
        return await worker.ask(QueuedCall((verb, asks, now, at, None)))

    def _start_worker(self) -> AsyncWorker:
        self._workers.append(AsyncWorker(self._answer, self.wake))
        self._worker = self._workers[0]  # of several threads that come at once, all use the first
        return self._worker

    def label(self, policy: Policy, key: Key, at: int, task_type: str | None, task_id: str | None) -> None:
        """Name the tasks charged to a key's logs at the instant `at`, for those who read `task_completions`."""
        name = text_of(key)

        def work(rows: StateRows, _: Asked, now: int) -> list[Decision]:
            return rows.label(policy, name, at, task_type, task_id, now)

        self._transact((("label", ((policy, key, ()),), None, None, None),), work)

    def metrics(self) -> dict[str, int]:
        """Count transactions, how often one found the file locked, and how many failed."""
        return {"transactions": self._count, "waits": self._waits, "failures": self._failures}

    def close(self) -> None:
        """Answer what was asked, then close the file."""
        self._closed = True
        if self._worker is not None:
            self._worker.close()
        self._release()

    async def close_async(self) -> None:
        """Close without blocking the event loop."""
        await asyncio.to_thread(self.close)

    # ---- transactions ------------------------------------------------------------------------------------------------

    def _answer(self, questions: list[QueuedCall]) -> None:
        """Answer all questions in one transaction; an error is the answer to each."""
        try:
            answers = self._transact([question.asked for question in questions])
        except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
            for question in questions:
                question.answers = error
            return
        for question, answer in zip(questions, answers, strict=True):
            question.answers = answer

    def _transact(self, asked: Sequence[Asked], work: Work | None = None) -> list[list[Decision]]:
        """Answer all of it in one transaction, tried as often as it takes while others keep the file locked."""
        try:
            return self._exclusively(self._attempt_until_free, asked, work or decide)
        except InUseError as error:
            raise self._failed(error, asked) from None

    def _exclusively(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function while no other thread uses the connection.

        `lock` alone decides who does. The gate in front of it lets threads wait in turn and without polling.
        """
        deadline = SystemClock.steady() + self._patience
        gate = self._gate
        if not gate.acquire(blocking=False):
            gate = self._wait_at_gate(deadline)
        held = gate  # what `_wait_at_gate` looks for in other threads
        try:
            return self._use_connection(deadline, function, *args, **kwargs)
        finally:
            held.release()

    def _wait_at_gate(self, deadline: int) -> threading.Lock:
        """Pass the gate. One that a call left shut because it was interrupted is replaced."""
        while True:
            gate = self._gate
            if gate.acquire(timeout=MAX_GATE):
                return gate
            if SystemClock.steady() >= deadline:
                raise InUseError
            if not threads_holding(gate):
                self._gate = threading.Lock()

    def _use_connection(self, deadline: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        lock = self.lock
        held = lock.token
        try:
            del held[0]
        except IndexError:
            if not lock.contend(lambda: SystemClock.steady() >= deadline):
                raise InUseError from None
        try:
            return function(*args, **kwargs)
        finally:
            lock.give(None)

    def _attempt_until_free(self, asked: Sequence[Asked], work: Work) -> list[list[Decision]]:
        deadline = None
        attempts = 0
        while True:
            try:
                return self._attempt(asked, work)
            except sqlite3.Error as error:
                self._recover(error)
                if error_code(error) not in BUSY_CODES:
                    raise self._failed(error, asked) from error
                steady = SystemClock.steady()
                deadline = deadline or steady + self._patience
                if steady >= deadline:
                    raise self._failed(error, asked) from error
            except BaseException:
                self._recover(None)
                raise
            attempts += 1
            self._waits += attempts == 1
            yield_thread(FIRST_LOCK_PAUSE if attempts == 1 else MAX_LOCK_PAUSE)

    def _attempt(self, asked: Sequence[Asked], work: Work) -> list[list[Decision]]:
        """Answer in one transaction."""
        if self._unsure:
            self._close()
        self._count += 1
        if self._count % CALLS_BETWEEN_SWEEPS == 1:
            self._untended = True
            if self._db is not None and self._replaced():
                self._close()
        self._unsure = True
        rows = self._rows or self._open()
        looking = asked[0][0] == "peek" and all(each[0] == "peek" for each in asked)
        rows.execute("BEGIN" if looking else "BEGIN IMMEDIATE")
        now = self.clock.ns() // 1000
        answers = [work(rows, each, now) for each in asked]
        if self._untended and not looking:
            self._untended = False
            rows.sweep(min([now, *(each[2] for each in asked if each[2] is not None)]))
        rows.execute("COMMIT")
        self._unsure = False
        return answers

    def _failed(self, error: sqlite3.Error, asked: Sequence[Asked]) -> StoreUnavailable:
        self._failures += 1
        verb, asks, *_ = asked[0]
        policy, key, _ = asks[0]
        others = f" and {len(asked) - 1} more" if len(asked) > 1 else ""
        return explain(error, f"{verb} {key!r} of policy {policy.name!r}{others}", self.path)

    # ---- the connection ----------------------------------------------------------------------------------------------

    def _open(self) -> StateRows:
        if self._closed:
            raise Closed("the store is closed")
        while SystemClock.steady() < self._forking:
            yield_thread(MAX_LOCK_PAUSE)
        self._db = db = connect(self.path)
        prepare(db, self.path, self.synchronous, self._migrations())
        stat = self.path.stat()
        self._inode = (stat.st_dev, stat.st_ino)
        self._rows = rows = StateRows(db.cursor())
        return rows

    def _migrations(self) -> list[Migration]:
        """Return the migrations of the schema; a subclass with tables of its own adds theirs."""
        return read_migrations("tidegate.stores.sqlite")

    def _close(self) -> None:
        """Close the connection. Interrupted, it is done again: so it is forgotten last."""
        self._rows = None
        if self._db is not None:
            discard(self._db)
        self._db = None
        self._unsure = False

    def _recover(self, error: sqlite3.Error | None) -> None:
        """End a failed transaction; after anything but a lock held by others, open the file again next time."""
        if self._rows is not None and self._db is not None and (error is None or error_code(error) in BUSY_CODES):
            try:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            except sqlite3.Error:
                pass
            else:
                self._unsure = False
                return
        self._close()

    def _replaced(self) -> bool:
        """Tell whether the path leads to another file by now, or to none."""
        try:
            stat = self.path.stat()
        except OSError:
            return True
        return (stat.st_dev, stat.st_ino) != self._inode

    @locked
    def _release(self) -> None:
        self._close()

    # ---- forks -------------------------------------------------------------------------------------------------------

    def _prepare_fork(self) -> None:
        """Close the connection, so that the child inherits none, and open no other before the fork."""
        self._forking = SystemClock.steady() + MAX_FORK
        with suppress(InUseError):  # the child abandons it, then
            self._exclusively(self._close)

    def _resume(self) -> None:
        self._forking = 0

    def _take_over(self) -> None:
        """Start afresh in a forked process: a connection must not be used there, nor closed, which would drop locks."""
        self._forking = 0
        abandon(self._db)
        self._db = self._rows = self._worker = None
        self._workers.clear()
        self._gate = threading.Lock()
        self._unsure = False


def decide(rows: StateRows, asked: Asked, now: int) -> list[Decision]:
    """Read the states of every key, apply the verb to all of them, and write them back."""
    verb, asks, given, at, _ = asked
    if given is not None:
        now = given
    if len(asks) > 1:
        return decide_together(rows, verb, asks, now, at)
    ((policy, key, costs),) = asks
    name = text_of(key)
    row = rows.read(policy, name)
    allowed, changed, left = VERBS[verb](policy.limits, row.states, costs, now, at)
    decision = tell(row, allowed, now, policy, changed, left)
    if changed is not row.states:
        keep(rows, verb, policy, name, row, changed, now)
    return [decision]


def decide_together(rows: StateRows, verb: str, asks: Sequence[Ask], now: int, at: int | None) -> list[Decision]:
    """Decide on several asks; a key that is asked for twice pays both costs."""
    found: dict[tuple[int, str | bytes], tuple[KeyRow, int]] = {}
    limits: list[Limit] = []
    states: list[State | None] = []
    costs: list[int] = []
    for policy, key, cost in asks:
        name = text_of(key)
        if (id(policy), name) in found:
            place = found[id(policy), name][1]
            for i, more in enumerate(cost, place):
                costs[i] = min(MAX_INTEGER, costs[i] + more)
            continue
        row = rows.read(policy, name)
        found[id(policy), name] = row, len(limits)
        limits += policy.limits
        states += row.states
        costs += cost
    allowed, changed, left = VERBS[verb](limits, states, costs, now, at)
    decisions = []
    for policy, key, _ in asks:
        row, place = found[id(policy), text_of(key)]
        end = place + len(policy.limits)
        decisions.append(tell(row, allowed, now, policy, changed[place:end], left[place:end]))
    if changed is not states:
        for policy, key, _ in asks:
            name = text_of(key)
            if (id(policy), name) in found:
                row, place = found.pop((id(policy), name))
                keep(rows, verb, policy, name, row, changed[place : place + len(policy.limits)], now)
    return decisions


def keep(rows: StateRows, verb: str, policy: Policy, name: str | bytes, row: KeyRow, states: States, now: int) -> None:
    """Write what a verb has changed."""
    if verb == "reset":
        rows.delete(row)
    elif verb != "peek":
        rows.write(policy, name, row, states, now)


def tell(row: KeyRow, allowed: bool, now: int, policy: Policy, states: States, left: Sequence[int]) -> Decision:  # noqa: FBT001 - a Decision's parts, in their order
    """Build a Decision; what logs say is looked up now, while it is true."""
    decision = Decision((allowed, now, policy.limits, states, left))
    return Decision((allowed, now, policy.limits, decision.views, None)) if row.logs else decision


def text_of(key: Key) -> str | bytes:
    """Write a key as one text; most are one already."""
    if key.__class__ is str and key.isascii() and "/" not in key and "%" not in key:
        return key
    return storable(join_key(key))


def read_timeout(busy_timeout: str | float) -> int:
    """Read a timeout as microseconds: text with its unit, or seconds."""
    if isinstance(busy_timeout, str) and busy_timeout.replace(".", "").isdecimal():
        raise ConfigError(f"needs a unit: {busy_timeout}s or {busy_timeout}ms", field="busy_timeout")
    try:
        return parse_period(busy_timeout)
    except ConfigError as error:
        raise ConfigError(str(error), field="busy_timeout") from None


def open_sqlite(url: str, clock: Clock | None) -> Store:
    """Open the store of a URL: `sqlite:///relative.db`, `sqlite:////absolute.db`, options after a `?`."""
    parts = split_url(url, "store")
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path or parts.fragment or path.endswith("/"):
        message = f"an SQLite store is named sqlite:///relative.db or sqlite:////absolute.db, not {redact(url)!r}"
        raise ConfigError(message, field="store")
    if path == ":memory:":
        raise ConfigError("for a store in memory use memory://", field="store")
    options: dict[str, str] = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - {"synchronous", "busy_timeout"})
    if unknown:
        raise ConfigError(f"sqlite:// has no option {unknown[0]!r}: use synchronous or busy_timeout", field="store")
    return SQLiteStore(path, **options, clock=clock)  # type: ignore[arg-type]  # SQLiteStore checks its options
