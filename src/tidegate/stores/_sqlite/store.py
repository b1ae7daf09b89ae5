"""SQLiteStore: runs the Python core inside a write transaction."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal, ParamSpec, TypeVar, get_args
from urllib.parse import parse_qsl, unquote

from tidegate._policy.key import join_key
from tidegate._runtime.clock import Clock, SystemClock, yield_thread
from tidegate._runtime.fork import abandon, at_fork, fork_safe
from tidegate._runtime.lock import locked
from tidegate._runtime.urls import redact, split_url, unknown_option
from tidegate.core._bounds import SECOND
from tidegate.core._decision import VERBS, Decision
from tidegate.core._limit import parse_period
from tidegate.errors import Closed, CollectionFull, ConfigError, RateLimitError, StoreUnavailable, ValueConflict
from tidegate.stores._base import Store, decide_in_turn
from tidegate.stores._merged_asks import merge
from tidegate.stores._sqlite.async_worker import AsyncWorker, QueuedCall, Writes
from tidegate.stores._sqlite.database import (
    BUSY_CODES,
    DAMAGED_CODES,
    PackageTables,
    connect,
    discard,
    error_code,
    explain,
    prepare,
    read_schema,
)
from tidegate.stores._sqlite.rows import KeyRow, StateRows, storable
from tidegate.stores._sqlite.value_rows import check_conditions, get_value, list_values, sweep_values, write_values
from tidegate.stores._values import check_listed, check_name, check_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._policy import Key, Policy
    from tidegate.core._decision import States
    from tidegate.stores._base import Ask
    from tidegate.stores._sqlite.async_worker import StoreCall
    from tidegate.stores._values import Collection, Value, Write

    Result = list[Decision] | RateLimitError
    Work = Callable[[StateRows, StoreCall, int], list[Decision]]

P = ParamSpec("P")
R = TypeVar("R")
Synchronous = Literal["normal", "full", "extra"]

OPTIONS: Final = ("synchronous", "busy_timeout")  # of the URL
# After this many transactions, the next write removes expired rows.
CALLS_BETWEEN_SWEEPS: Final = 16
# Seconds between attempts while other processes keep the file locked. A single transaction ends soon, so the first
# pause is short. When many processes use the file constantly, pauses of milliseconds let each run several transactions
# in a row: 1.5 times as many decisions as when processes alternate after every transaction.
FIRST_LOCK_PAUSE: Final = 0.00002
MAX_LOCK_PAUSE: Final = 0.003
MAX_FORK: Final = SECOND  # how long no connection is opened before a fork


class InUseError(sqlite3.OperationalError):
    """Other threads of this process used the connection for too long."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY

    def __str__(self) -> str:
        """Return the message."""
        return "other threads of this process are using the connection"


class SQLiteStore(Store):
    """Keeps states in one SQLite file, for all processes and threads of this machine.

    Each call of `apply` is one write transaction (BEGIN IMMEDIATE, in WAL mode), so processes decide one after another
    and none sees half a decision. A process that is killed loses no decision that was returned, and does not block
    other processes: the operating system releases its lock.

    `synchronous` controls what a power failure may lose. "normal": the charges since the file was last synchronized
    (the file stays intact); killed processes lose nothing. "full": nothing, but each decision waits for a disk write.
    `busy_timeout` is how long a call waits while other processes keep the file locked.

    A process has one connection, which its threads share under a lock; after a fork, each process opens its own. The
    first call opens the file, and the first call after an error opens it again, so the store works as soon as the disk
    does. The same holds after a call that a signal handler interrupted: `_unfinished` is set during a transaction, and
    a call that finds it set discards the connection.

    If the file is removed or replaced while it is in use, the next call raises StoreUnavailable. A removed file is not
    created again; the file that replaced it is used from then on, but not beside the write-ahead log of the former one.
    """

    decides_alternatives = True
    keeps_values = True

    _kept_policies: ClassVar[str | None] = None  # the prefix of policies whose rows are never deleted

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Synchronous = "normal",
        busy_timeout: str | float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Use this file; the first call opens it."""
        super().__init__(clock)
        if synchronous not in get_args(Synchronous):
            raise ConfigError(f"must be 'normal', 'full' or 'extra', not {synchronous!r}", field="synchronous")
        self.path: Path = Path(path).absolute()
        self._path_text = str(self.path)
        self._creates = True  # whether a missing file is created
        self.synchronous = synchronous
        self._busy_timeout = read_timeout(busy_timeout)
        self.lock: threading.Lock = fork_safe(threading.Lock())
        self._db: sqlite3.Connection | None = None
        self._rows: StateRows | None = None
        self._unfinished = False
        self._inode = (0, 0)  # of the file in use
        self._log_inode = (0, 0)  # of its write-ahead log
        self._removed = False  # whether it was found to be removed
        self._forking = 0  # steady time before which no connection is opened
        self._workers: list[AsyncWorker] = []
        self._worker: AsyncWorker | None = None
        self._closed = False
        self._transactions = 0
        self._sweep_due = False
        self._waits = 0
        self._failures = 0
        at_fork(before=self._prepare_fork, parent=self._resume, child=self._reset_after_fork)

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply the verb to all keys together, in one transaction."""
        if not asks and not writes:
            return []
        merged = merge(asks)
        return merged.split(self._transact((store_call(verb, merged.asks, now, at, writes),))[0])

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key."""
        return self._transact(((verb, ((policy, key, costs),), now, at, None),))[0][0]

    async def apply_async(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply in the thread of the store; concurrent calls of many tasks share transactions."""
        if not asks and not writes:
            return []
        merged = merge(asks)  # here: an error concerns this call, and not those that are queued with it
        worker = self._worker or self._start_worker()
        return merged.split(await worker.apply(QueuedCall(store_call(verb, merged.asks, now, at, writes))))

    def get_value(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value."""
        check_name(collection, name)
        return self._read(lambda rows, instant: get_value(rows.execute, collection, name, instant), now)

    async def get_value_async(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value, in another thread."""
        return await asyncio.to_thread(self.get_value, collection, name, now)

    def list_values(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection."""
        check_listed(collection)
        return self._read(lambda rows, instant: list_values(rows.execute, collection, instant), now)

    async def list_values_async(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection, in another thread."""
        return await asyncio.to_thread(self.list_values, collection, now)

    def _read(self, read: Callable[[StateRows, int], R], now: int | None) -> R:
        """Read rows in a transaction of its own."""
        found: list[R] = []

        def work(rows: StateRows, _: StoreCall, instant: int) -> list[Decision]:
            found[:] = [read(rows, instant if now is None else now)]
            return []

        self._transact((("peek", (), now, None, None),), work)
        return found[0]

    def _start_worker(self) -> AsyncWorker:
        self._workers.append(AsyncWorker(self._apply_queued, self))
        self._worker = self._workers[0]  # if several threads start one at once, all use the first
        return self._worker

    def label(self, policy: Policy, key: Key, at: int, task_type: str | None, task_id: str | None) -> None:
        """Set type and id of the tasks charged to a key's logs at time `at`, shown by the view `task_completions`."""
        name = key_text(key)

        def work(rows: StateRows, _: StoreCall, now: int) -> list[Decision]:
            return rows.label(policy, name, at, task_type, task_id, now)

        self._transact((("label", ((policy, key, ()),), None, None, None),), work)

    def metrics(self) -> dict[str, int]:
        """Return the number of transactions, of those that found the file locked, and of those that failed."""
        return {"transactions": self._transactions, "waits": self._waits, "failures": self._failures}

    def close(self) -> None:
        """Complete pending calls, then close the file."""
        self._closed = True
        if self._worker is not None:
            self._worker.close()
        self._close_locked()

    async def close_async(self) -> None:
        """Close without blocking the event loop."""
        await asyncio.to_thread(self.close)

    # ---- transactions ------------------------------------------------------------------------------------------------

    def _apply_queued(self, queued_calls: list[QueuedCall]) -> None:
        """Apply all calls in one transaction; an error becomes the result of each."""
        try:
            results = self._transact_all([queued_call.arguments for queued_call in queued_calls])
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            for queued_call in queued_calls:
                queued_call.results = error
            return
        for queued_call, decisions in zip(queued_calls, results, strict=True):
            queued_call.results = decisions

    def _transact(self, calls: Sequence[StoreCall], work: Work | None = None) -> list[list[Decision]]:
        """Apply all calls in one transaction; raise the first error."""
        results = self._transact_all(calls, work)
        for result in results:
            if isinstance(result, RateLimitError):
                raise result
        return results  # type: ignore[return-value]  # without errors

    def _transact_all(self, calls: Sequence[StoreCall], work: Work | None = None) -> list[Result]:
        """Apply all calls in one transaction, retried while other processes keep the file locked.

        The result of a call whose conditions failed is the error: it has changed nothing.
        """
        try:
            return self._exclusively(self._retry_while_busy, calls, work or decide)
        except InUseError as error:
            raise self._failed(error, calls) from None

    def _exclusively(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function while no other thread uses the connection.

        A thread holds the lock for at most `busy_timeout`. Threads that waited as long as that behind others do not try
        themselves, so that none waits much longer.
        """
        deadline = SystemClock.steady() + self._busy_timeout
        with self.lock:
            if SystemClock.steady() > deadline:
                raise InUseError
            return function(*args, **kwargs)

    def _retry_while_busy(self, calls: Sequence[StoreCall], work: Work) -> list[Result]:
        deadline = None
        attempts = 0
        while True:
            try:
                return self._attempt(calls, work)
            except sqlite3.Error as error:
                self._recover(error)
                if error_code(error) not in BUSY_CODES:
                    raise self._failed(error, calls) from error
                steady = SystemClock.steady()
                deadline = deadline or steady + self._busy_timeout
                if steady >= deadline:
                    raise self._failed(error, calls) from error
            except BaseException:
                self._recover(None)
                raise
            attempts += 1
            self._waits += attempts == 1
            yield_thread(FIRST_LOCK_PAUSE if attempts == 1 else MAX_LOCK_PAUSE)

    def _attempt(self, calls: Sequence[StoreCall], work: Work) -> list[Result]:
        """Apply all calls in one transaction, once."""
        if self._unfinished:
            self._close()
        self._transactions += 1
        if self._transactions % CALLS_BETWEEN_SWEEPS == 1:
            self._sweep_due = True
        self._check_file()
        self._unfinished = True
        rows = self._rows or self._open()
        read_only = all(call[0] in VERBS and not VERBS[call[0]].changes for call in calls)
        rows.execute("BEGIN" if read_only else "BEGIN IMMEDIATE")
        now = self.clock.ns() // 1000
        results: list[Result] = []
        for call in calls:
            try:
                results.append(work(rows, call, now))
            except (ValueConflict, CollectionFull) as error:
                results.append(error.with_traceback(None))
        if self._sweep_due and not read_only:
            self._sweep_due = False
            instant = min([now, *(call[2] for call in calls if call[2] is not None)])
            rows.sweep(instant)
            sweep_values(rows.execute, instant)
        rows.execute("COMMIT")
        self._unfinished = False
        return results

    def _failed(self, error: sqlite3.Error, calls: Sequence[StoreCall]) -> StoreUnavailable:
        self._failures += 1
        verb, asks, *_ = calls[0]
        others = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        what = f"{verb} {asks[0][1]!r} of policy {asks[0][0].name!r}" if asks else "read or write a value"
        return explain(error, f"{what}{others}", self.path)

    # ---- the connection ----------------------------------------------------------------------------------------------

    def _open(self) -> StateRows:
        if self._closed:
            raise Closed("the store is closed")
        while SystemClock.steady() < self._forking:
            yield_thread(MAX_LOCK_PAUSE)
        self._db = db = connect(self.path, create=self._creates)
        self._adopt(db)
        prepare(db, self.path, self.synchronous, self._schemas())
        self._inode, self._log_inode, self._removed = inode(self._path_text), inode(log_path(self._path_text)), False
        self._rows = rows = StateRows(db.cursor(), self._kept_policies)
        return rows

    def _schemas(self) -> list[PackageTables]:
        """Return the tables of the file; a subclass adds its own."""
        return [read_schema("tidegate.stores._sqlite")]

    def _adopt(self, db: sqlite3.Connection) -> None:
        """Prepare a file of another program for the tables of this one, in a subclass that can read it."""

    def _close(self) -> None:
        """Close the connection. `_db` is cleared last, so that an interrupted close is repeated."""
        self._rows = None
        if self._db is not None:
            discard(self._db)
        self._db = None
        self._unfinished = False

    def _recover(self, error: sqlite3.Error | None) -> None:
        """Roll back a failed transaction; unless the file was only locked, the next call opens it again."""
        if error is not None and error_code(error) in DAMAGED_CODES:
            self._inode = (0, 0)  # reported: to move the file away is how to start with an empty store
        if self._rows is not None and self._db is not None and (error is None or error_code(error) in BUSY_CODES):
            try:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            except sqlite3.Error:
                pass
            else:
                self._unfinished = False
                return
        self._close()

    def _check_file(self) -> None:
        """Raise StoreUnavailable if the file in use was removed, or once if another one was put in its place."""
        if self._inode == (0, 0):
            return
        try:
            stat = os.stat(self._path_text)  # noqa: PTH116 - half as long as Path.stat, for every transaction
        except OSError as error:
            self._close()
            self._removed = True
            self._failures += 1
            raise StoreUnavailable(
                f"{self.path} was removed while it was in use ({error.strerror}), and no new file is created in its "
                "place; nothing was charged. Restore the file; to start with an empty store, create an empty file or "
                "restart the program"
            ) from None
        if (stat.st_dev, stat.st_ino) == self._inode:
            return
        self._close()
        if stat.st_size and inode(log_path(self._path_text)) == self._log_inode != (0, 0):
            # SQLite would copy pages of the former file from its log into the new file, and so damage it.
            self._removed = True
            self._failures += 1
            raise StoreUnavailable(
                f"{self.path} was replaced by another file while it was in use, and the write-ahead log of the former "
                f"file is still there; nothing was charged. Remove {self.path}-wal and {self.path}-shm: opened with "
                "them, the new file would be damaged"
            )
        self._inode = (0, 0)
        if not self._removed:
            self._failures += 1
            raise StoreUnavailable(
                f"{self.path} was replaced by another file while it was in use; nothing was charged. The next call "
                "uses that file, whose counts may be lower"
            )

    @locked
    def _close_locked(self) -> None:
        self._close()

    # ---- forks -------------------------------------------------------------------------------------------------------

    def _prepare_fork(self) -> None:
        """Close the connection, so that the child inherits none, and open no other before the fork."""
        with suppress(InUseError):  # the child abandons it, then
            self._exclusively(self._close_for_fork)

    def _close_for_fork(self) -> None:
        # Only now, in the lock: a thread that holds it while it waits to open a connection would keep the fork waiting.
        self._close()
        self._forking = SystemClock.steady() + MAX_FORK

    def _resume(self) -> None:
        self._forking = 0

    def _reset_after_fork(self) -> None:
        """Start without a connection in a forked process: using it is unsafe, and closing it would drop locks."""
        self._forking = 0
        abandon(self._db)
        self._db = self._rows = self._worker = None
        self._workers.clear()
        self._unfinished = False


def inode(path: str) -> tuple[int, int]:
    """Return device and number of a file; zeros if there is none."""
    try:
        stat = os.stat(path)  # noqa: PTH116 - as above
    except OSError:
        return 0, 0
    return stat.st_dev, stat.st_ino


def log_path(path: str) -> str:
    """Return the path of the write-ahead log of a database."""
    return f"{path}-wal"


def store_call(verb: str, asks: Sequence[Ask], now: int | None, at: int | None, writes: Sequence[Write]) -> StoreCall:
    """Check and build a call."""
    if not writes:
        return verb, asks, now, at, None
    check_writes(writes)
    return verb, asks, now, at, Writes(writes)


def decide(rows: StateRows, call: StoreCall, now: int) -> list[Decision]:
    """Read the states of every key, apply the verb to all of them, and write them back, with the values of the call."""
    verb, asks, given, at, extra = call
    if given is not None:
        now = given
    if not isinstance(extra, Writes):
        return decide_asks(rows, verb, asks, now, at)
    check_conditions(rows.execute, rows.room, extra, now)
    decisions = decide_asks(rows, verb, asks, now, at)
    if not decisions or decisions[-1].within_limits:
        write_values(rows.execute, extra, now)
    return decisions


def decide_asks(rows: StateRows, verb: str, asks: Sequence[Ask], now: int, at: int | None) -> list[Decision]:
    """Decide the asks of a call."""
    if len(asks) != 1:
        return decide_in_turn(asks, lambda together: decide_together(rows, verb, together, now, at))
    ((policy, key, costs),) = asks
    name = key_text(key)
    row = rows.read(policy, name)
    allowed, changed, left = VERBS[verb].decide(policy.limits, row.states, costs, now, at)
    decision = build_decision(row, allowed, now, policy, changed, left)
    if changed is not row.states:
        write_changes(rows, verb, policy, name, row, changed, now)
    return [decision]


def decide_together(rows: StateRows, verb: str, asks: Sequence[Ask], now: int, at: int | None) -> list[Decision]:
    """Decide several asks together, each about another key."""
    found = [rows.read(policy, key_text(key)) for policy, key, _ in asks]
    limits = [limit for policy, _, _ in asks for limit in policy.limits]
    states = [state for row in found for state in row.states]
    costs = [cost for _, _, costs in asks for cost in costs]
    allowed, changed, left = VERBS[verb].decide(limits, states, costs, now, at)
    decisions, slices, place = [], [], 0
    for row, (policy, _, _) in zip(found, asks, strict=True):
        own = slice(place, place := place + len(policy.limits))
        slices.append(own)
        decisions.append(build_decision(row, allowed, now, policy, changed[own], left[own]))
    if changed is not states:
        for row, own, (policy, key, _) in zip(found, slices, asks, strict=True):
            write_changes(rows, verb, policy, key_text(key), row, changed[own], now)
    return decisions


def write_changes(
    rows: StateRows, verb: str, policy: Policy, name: str | bytes, row: KeyRow, states: States, now: int
) -> None:
    """Write the states that a verb has changed."""
    if VERBS[verb].clears:
        rows.reset(policy, name, row, now)
    elif VERBS[verb].changes:
        rows.write(policy, name, row, states, now)


def build_decision(
    row: KeyRow,
    allowed: bool,  # noqa: FBT001 - the parts of a Decision, in order
    now: int,
    policy: Policy,
    states: States,
    left: Sequence[int],
) -> Decision:
    """Build a Decision; views of logs are computed now, before the next transaction changes them."""
    decision = Decision.of_states(now, policy.limits, states, left, within_limits=allowed)
    return decision.with_views() if row.logs else decision


def key_text(key: Key) -> str | bytes:
    """Return a key as one string, as SQLite stores it."""
    if key.__class__ is str and key.isascii() and "/" not in key and "%" not in key:
        return key
    return storable(join_key(key))


def read_timeout(busy_timeout: str | float) -> int:
    """Return a timeout in microseconds, given as a string with a unit or as seconds."""
    if isinstance(busy_timeout, str) and busy_timeout.replace(".", "").isdecimal():
        raise ConfigError(f"needs a unit, such as {busy_timeout}s or {busy_timeout}ms", field="busy_timeout")
    try:
        return parse_period(busy_timeout)
    except ConfigError as error:
        raise ConfigError(str(error), field="busy_timeout") from None


def open_sqlite(url: str, clock: Clock | None) -> Store:
    """Open the store of a URL: `sqlite:///relative.db`, `sqlite:////absolute.db`, options after a `?`."""
    parts = split_url(url, "store")
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path or parts.fragment or path.endswith("/"):
        message = f"expected sqlite:///relative.db or sqlite:////absolute.db, not {redact(url)!r}"
        raise ConfigError(message, field="store")
    if path == ":memory:":
        raise ConfigError("SQLite databases in memory are not supported: use memory://", field="store")
    options: dict[str, str] = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise ConfigError(unknown_option(unknown[0], OPTIONS), field="store")
    return SQLiteStore(path, **options, clock=clock)  # type: ignore[arg-type]  # SQLiteStore checks its options
