"""The Store that keeps its states in PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlunsplit

from tidegate.clock import TaskSignal, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import Closed, ConfigError, RateLimitError, StoreUnavailable
from tidegate.policy.key import join_key
from tidegate.stores.base import Store, merge
from tidegate.stores.cancellation import CHARGING, DROPPABLE, BackgroundTasks, corrections
from tidegate.urls import server_url, unknown_option

try:
    from psycopg import pq
except ImportError as error:
    message = "postgresql:// needs psycopg: pip install 'tidegate[postgres]'"
    raise ConfigError(message, field="store") from error

from tidegate.stores.postgres.call import MISSING, StoreCall, array_of, decisions_of, describe, quoted, text_of
from tidegate.stores.postgres.connection import Connection, ConnectionTarget, ServerError
from tidegate.stores.postgres.heartbeat import Heartbeat
from tidegate.stores.postgres.io_flow import SYSTEM_CLOCK, AsyncRun, Steps, drive
from tidegate.stores.postgres.pool import Pool
from tidegate.stores.postgres.schema import Schema, read_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.clock import Clock, Signal
    from tidegate.core.decision import Decision
    from tidegate.policy import Policy
    from tidegate.stores.base import Ask

log = logging.getLogger(__name__)

SCHEMA_TIMEOUT: Final = 60 * SECOND  # how long creating or migrating the schema may take
MAX_CALLS_PER_STATEMENT: Final = 64  # calls that go together
SWEEP_EVERY: Final = 16  # calls of this process, between two that also sweep
SWEEP_PER_CALL: Final = 4  # how many keys are looked after for each of them
MAX_WINDOW_RETRIES: Final = 5  # how often a call is sent again because calendar windows were missing
MAX_DESCRIPTIONS: Final = 1000  # policies whose description is remembered
SYNCHRONOUS_COMMIT_VALUES: Final = ("on", "off", "local", "remote_write", "remote_apply")


class PostgresStore(Store):
    """Keeps states in a PostgreSQL database, shared by any number of processes on any number of machines.

    The core runs in the server, in PL/pgSQL: a call of any number of limits and keys is one round trip and one
    transaction, by the server's clock, read while nobody else can decide on these keys. Keys are locked in one order,
    so that calls never deadlock. Denied calls and looks write nothing. Calls that find every connection busy go
    together in the next transaction, decided one after another.

    `timeout` is how many seconds the server may take for a call that was sent to it, `connect_timeout` for opening a
    connection. With `silence`, a server that says nothing for so many seconds while it has something to answer is asked
    for a sign of life, and is lost at once if it gives none. Waiting for a connection does not count as long as
    connections come back. `pool_size` connections serve all threads and event loops of this process; one that forks
    opens its own. A given clock, for tests, decides instead of the server's.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = "tidegate",
        timeout: float = 1.0,
        connect_timeout: float = 2.0,
        silence: float | None = None,
        pool_size: int = 4,
        synchronous_commit: str | None = None,
        unlogged: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Check what is given; connect with the first call, and create or migrate the schema then."""
        super().__init__(clock)
        times = (("timeout", timeout), ("connect_timeout", connect_timeout), ("silence", silence or timeout))
        for name, seconds in times:
            if not 0 < seconds < SCHEMA_TIMEOUT // SECOND:
                raise ConfigError(f"must be a number of seconds above 0 and below 60, not {seconds!r}", field=name)
        if not isinstance(pool_size, int) or pool_size < 1:
            raise ConfigError(f"must be an integer from 1, not {pool_size!r}", field="pool_size")
        if synchronous_commit not in (None, *SYNCHRONOUS_COMMIT_VALUES):
            message = f"must be one of {', '.join(SYNCHRONOUS_COMMIT_VALUES)}, not {synchronous_commit!r}"
            raise ConfigError(message, field="synchronous_commit")
        self.target = read_target(url)
        self.schema: Schema = read_schema(schema, unlogged=unlogged)
        self._own_clock = clock is None
        self._timeout = round(timeout * SECOND)
        self._connect_timeout = round(connect_timeout * SECOND)
        self._settings = (
            f"set statement_timeout = {max(1, self._timeout // 1000)}; "
            "set lock_timeout = 0; set search_path = pg_catalog; "
            # What was committed while this call waited for a key must be seen.
            "set default_transaction_isolation = 'read committed'; "
            # A plan made while the tables were small must do when they are large: always by an index.
            "set enable_seqscan = off; set enable_bitmapscan = off; set jit = off"
        )
        if synchronous_commit is not None:
            self._settings += f"; set synchronous_commit = {synchronous_commit}"
        self._pulse: Heartbeat | None = None
        if silence is not None:
            self._pulse = Heartbeat(self.target, round(silence * SECOND), self._connect_timeout)
        self._pool: Pool[StoreCall] = Pool(pool_size, self._timeout, self._opening)
        self._background = BackgroundTasks()
        self._closed = False
        self._given_back = 0
        self._not_given_back = 0
        self._descriptions: dict[int, Description] = {}
        self._ahead = 0  # by how many microseconds the server's clock was ahead of ours, when that mattered
        self._unswept = 0  # calls since the last that swept; two threads may lose one, which does not matter

    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        """Apply the verb to every key together."""
        self._refuse_if_closed()
        return drive(self._applying(verb, asks, now, at, ThreadSignal))

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply without blocking the event loop; a call whose task is cancelled gives back what it was charged."""
        self._refuse_if_closed()
        await self._background.watch()
        began = SYSTEM_CLOCK.steady()
        run = AsyncRun(self._applying(verb, asks, now, at, TaskSignal))
        try:
            return await run.finish()
        except asyncio.CancelledError:
            if verb not in DROPPABLE or not run.stop():
                self._background.start(self._abandoned(run, verb, asks, now, began))
            raise

    async def _abandoned(
        self, run: AsyncRun[list[Decision]], verb: str, asks: Sequence[Ask], now: int | None, began: int
    ) -> None:
        """Wait for the answer to a call whose task was cancelled, and give back what it was charged."""
        try:
            decisions = await run.finish_anyway()
        except RateLimitError as error:
            log.debug("a cancelled call failed: %s", error)
            return
        if verb in CHARGING:
            for back, at in corrections(verb, asks, decisions, SYSTEM_CLOCK.steady() - began):
                await self._give_back(back, now, at)
        elif verb != "peek":
            self.wake(asks)

    async def _give_back(self, asks: Sequence[Ask], now: int | None, at: int | None) -> None:
        try:
            await AsyncRun(self._applying("adjust", asks, now, at, TaskSignal)).finish_anyway()
        except RateLimitError as error:
            self._not_given_back += 1
            log.warning("a cancelled call could not give its permits back: %s", error)
        else:
            self._given_back += 1
            self.wake(asks)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Closed("the store is closed")

    def _applying(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, new_signal: Callable[[], Signal]
    ) -> Steps[list[Decision]]:
        if len(asks) == 1:
            return (yield from self._asking(verb, asks, now, at, new_signal))
        places, merged = merge(asks)
        decisions = yield from self._asking(verb, merged, now, at, new_signal)
        return [decisions[place] for place in places]

    def _asking(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, new_signal: Callable[[], Signal]
    ) -> Steps[list[Decision]]:
        if now is None and not self._own_clock:
            now = self.clock.ns() // 1000
        around = SYSTEM_CLOCK.ns() // 1000 + self._ahead if now is None else now
        call = self._worded(verb, asks, now, at, around)
        for _ in range(MAX_WINDOW_RETRIES):
            yield from self._calling(call, new_signal)
            answer, instant, *numbers = call.answered()
            if answer != MISSING:
                return decisions_of(asks, answer == 1, instant, numbers)
            if now is None:
                self._ahead = instant - SYSTEM_CLOCK.ns() // 1000
            limits = [limit for policy, _, _ in asks for limit in policy.limits]
            described = (describe(limit, missing or instant) for limit, missing in zip(limits, numbers, strict=True))
            call = self._worded(verb, asks, now, at, around)
            call.limits = ",".join(described)
        raise StoreUnavailable(
            f"PostgreSQL {self.target.name} could not {verb}: the clock of the server jumps; check it"
        )

    def _calling(self, call: StoreCall, new_signal: Callable[[], Signal]) -> Steps[None]:
        """Put a call to the server, together with those that wait meanwhile; or let somebody else take it along.

        Its time begins when it is sent: waiting for a connection says nothing about the server.
        """
        connection = yield from self._pool.taking(call, new_signal)
        if connection is None:
            return
        until = SYSTEM_CLOCK.steady() + self._timeout
        turns = self._pool.companions(MAX_CALLS_PER_STATEMENT - 1)
        calls = [call, *(turn.what for turn in turns)]
        error: Exception = StoreUnavailable(
            f"PostgreSQL {self.target.name} gave no answer: the call that carried this one was cancelled"
        )
        try:
            result = yield from connection.calling(call.verb, self._parameters(calls), until)
            numbers = list(map(int, (result.get_value(0, 0) or b"")[1:-1].split(b",")))
            for each in calls:
                numbers = each.take(numbers)
        except ServerError as told:
            self._pool.give(connection)
            error = connection.failed(call.verb, str(told), told.code)
            raise error from None
        except BaseException as raised:
            self._pool.drop(connection)
            error = raised if isinstance(raised, StoreUnavailable) else error
            raise
        else:
            self._pool.give(connection)
        finally:
            for each in calls:
                each.error = error
            self._pool.settle(turns)

    def _opening(self) -> Steps[Connection]:
        """Connect, and make sure of the schema."""
        connection = Connection(self.target, self._pulse)
        until = SYSTEM_CLOCK.steady() + self._connect_timeout
        try:
            yield from connection.connecting(until)
            yield from connection.asking("set up a session", self._settings, until)
            if not (yield from self.schema.checking(connection, until)):
                yield from self.schema.migrating(connection, SYSTEM_CLOCK.steady() + SCHEMA_TIMEOUT)
                until = SYSTEM_CLOCK.steady() + self._connect_timeout
            yield from connection.preparing(self.schema.statement, until)
        except ServerError as error:
            connection.close()
            raise connection.failed("set up a session", str(error), error.code) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _worded(self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, around: int) -> StoreCall:
        call = StoreCall(verb, len(asks))
        call.policies = ",".join([quoted(text_of(policy.name)) for policy, _, _ in asks])
        call.keys = ",".join([quoted(text_of(join_key(key), escaped=True)) for _, key, _ in asks])
        call.counts = ",".join([str(len(policy.limits)) for policy, _, _ in asks])
        call.limits = ",".join([self._described(policy, around).text for policy, _, _ in asks])
        costs = [str(cost) for _, _, costs in asks for cost in costs]
        call.places = len(costs)
        call.costs = ",".join(costs)
        call.now = "NULL" if now is None else str(now)
        call.at = "NULL" if at is None else str(at)
        return call

    def _parameters(self, calls: Sequence[StoreCall]) -> list[bytes]:
        return [
            array_of([call.verb for call in calls]),
            array_of([str(call.size) for call in calls]),
            array_of([call.policies for call in calls]),
            array_of([call.keys for call in calls]),
            array_of([call.counts for call in calls]),
            array_of([call.limits for call in calls]),
            array_of([call.costs for call in calls]),
            array_of([call.now for call in calls]),
            array_of([call.at for call in calls]),
            str(self._sweeps(len(calls))).encode(),
        ]

    def _sweeps(self, calls: int) -> int:
        """Tell how many keys these calls should look after: none mostly, then more than can have come since."""
        self._unswept += calls
        if self._unswept < SWEEP_EVERY:
            return 0
        calls, self._unswept = self._unswept, 0
        return SWEEP_PER_CALL * calls

    def _described(self, policy: Policy, around: int) -> Description:
        """Give a policy's limits as the server wants them, with the calendar windows around an instant."""
        known = self._descriptions.get(id(policy))
        if known is not None and known.policy is policy and known.since <= around < known.until:
            return known
        windows = [limit.calendar.window(around) for limit in policy.limits if limit.calendar is not None]
        since = max((start for start, _ in windows), default=-(2**63))
        until = min((end for _, end in windows), default=2**63)
        text = ",".join(describe(limit, around) for limit in policy.limits)
        if len(self._descriptions) >= MAX_DESCRIPTIONS:
            self._descriptions.clear()
        known = self._descriptions[id(policy)] = Description(policy, text, since, until)
        return known

    def metrics(self) -> dict[str, int]:
        """Count connections, idle ones, calls that wait for one, and charges of cancelled calls given back, or not."""
        return {
            **self._pool.metrics(),
            "given_back": self._given_back,
            "not_given_back": self._not_given_back,
        }

    def close(self) -> None:
        """Close the connections, as soon as nothing is to be given back over them."""
        self._closed = True
        self._background.finally_do(self._hang_up)

    async def close_async(self) -> None:
        """Wait for what is to be given back, but not for long, and close the connections."""
        self._closed = True
        await self._background.finish()
        self._hang_up()

    def _hang_up(self) -> None:
        self._pool.close()
        if self._pulse is not None:
            self._pulse.close()


class Description(NamedTuple):
    """A policy's limits as the server wants them, good from one instant to another."""

    policy: Policy
    text: str
    since: int
    until: int


# ---- the URL -------------------------------------------------------------------------------------------------------

OPTIONS: Final = ("schema", "timeout", "connect_timeout", "silence", "pool_size", "synchronous_commit", "unlogged")


def open_postgres(url: str, clock: Clock | None) -> Store:
    """Open a PostgresStore with the options of the URL's query; libpq takes the others."""
    parts = server_url(url, "store")
    query = parse_qsl(parts.query, keep_blank_values=True)
    options: dict[str, object] = {name: value for name, value in query if name in OPTIONS}
    rest = urlencode([(name, value) for name, value in query if name not in OPTIONS])
    try:
        for name, read in (("timeout", float), ("connect_timeout", float), ("silence", float), ("pool_size", int)):
            if name in options:
                options[name] = read(str(options[name]))
    except ValueError:
        expected = "an integer" if name == "pool_size" else "a number of seconds"
        raise ConfigError(f"must be {expected}, not {options[name]!r}", field=name) from None
    if "unlogged" in options:
        if options["unlogged"] not in ("true", "false"):
            raise ConfigError(f"must be true or false, not {options['unlogged']!r}", field="unlogged")
        options["unlogged"] = options["unlogged"] == "true"
    address = urlunsplit(parts._replace(query=rest))
    return PostgresStore(address, **options, clock=clock)  # type: ignore[arg-type]  # PostgresStore checks its options


def read_target(url: str) -> ConnectionTarget:
    """Check a URL as libpq does, without ever repeating its password."""
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    for name, _ in parse_qsl(server_url(url, "store").query, keep_blank_values=True):
        if name not in known:
            message = f"postgresql://: {unknown_option(name, OPTIONS, sorted(known))}"
            raise ConfigError(message, field="store")
    try:
        found = {option.keyword: option.val for option in pq.Conninfo.parse(url.encode())}
    except Exception:  # noqa: BLE001 - whatever it says may hold the password
        message = (
            "cannot parse the PostgreSQL URL: write postgresql://user:password@host:port/database, "
            "with special characters as %xx"
        )
        raise ConfigError(message, field="store") from None
    host, port, database = (
        (found.get(name) or default).decode(errors="replace")
        for name, default in ((b"host", b"localhost"), (b"port", b"5432"), (b"dbname", b""))
    )
    separator = "&" if "?" in url else "?"
    return ConnectionTarget(f"{url}{separator}fallback_application_name=tidegate".encode(), f"{host}:{port}/{database}")
