"""A store in PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlencode, urlunsplit

from tidegate._policy.key import join_key
from tidegate._runtime.flow import run as run_flow
from tidegate._runtime.flow import run_async as run_flow_async
from tidegate._runtime.urls import server_url, unknown_option
from tidegate.core._bounds import SECOND
from tidegate.core._decision import VERBS
from tidegate.errors import Closed, ConfigError, RateLimitError, StoreUnavailable
from tidegate.stores._base import Store
from tidegate.stores._cancellation import BackgroundTasks, corrections, report_lost
from tidegate.stores._merged_asks import merge

try:
    from psycopg import pq
except ImportError as _error:
    message = "postgresql:// needs psycopg: pip install 'tidegate[postgres]'"
    raise ConfigError(message, field="store") from _error

from tidegate.stores._postgres import io_flow, values
from tidegate.stores._postgres.call import (
    APPLY,
    MISSING,
    StoreCall,
    decode_decisions,
    encode_array,
    encode_limit,
    encode_name,
    quote,
)
from tidegate.stores._postgres.connection import Connection, ConnectionTarget, ServerError
from tidegate.stores._postgres.heartbeat import Heartbeat
from tidegate.stores._postgres.io_flow import SYSTEM_CLOCK, Caller, IOFlow, TaskCaller, finish
from tidegate.stores._postgres.pool import ConnectionPool
from tidegate.stores._postgres.schema import Schema, read_schema
from tidegate.stores._postgres.values import encode_collection, encode_value_name
from tidegate.stores._values import changes_values, check_listed, check_name, check_writes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.pq.abc import PGresult

    from tidegate._policy import Policy
    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import Flow
    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask
    from tidegate.stores._values import Collection, Value, Write

T = TypeVar("T")

SCHEMA_TIMEOUT: Final = 60 * SECOND  # for creating the schema
MAX_CALLS_PER_STATEMENT: Final = 64  # calls in one statement
SWEEP_EVERY: Final = 16  # calls of this process between two sweeps
SWEEP_PER_CALL: Final = 4  # keys checked per call since the last sweep
MAX_WINDOW_RETRIES: Final = 5  # how often a call is sent again because calendar windows were missing
MAX_CACHED_POLICIES: Final = 1000  # encoded policies in the cache
SYNCHRONOUS_COMMIT_VALUES: Final = ("on", "off", "local", "remote_write", "remote_apply")


class PostgresStore(Store):
    """Keeps states in a PostgreSQL database, shared by any number of processes on any number of machines.

    The core runs in the server, in PL/pgSQL: a call with any number of limits and keys is one round trip and one
    transaction. It uses the server's clock, read after the keys are locked. Keys are locked in a fixed order, so that
    calls never deadlock. Denied calls and `peek` write nothing. Calls that find every connection busy share the next
    transaction, which decides them one after another.

    `timeout` is how many seconds the server may take for a call that was sent, `connect_timeout` for opening a
    connection. With `silence`, a server that sends nothing for that many seconds while a reply is due is checked with a
    heartbeat, and the store is unavailable if that fails. Waiting for a connection does not count as long as
    connections become free. `pool_size` connections serve all threads and event loops of this process; a forked process
    opens its own. For tests, `clock` replaces the server's clock.
    """

    decides_alternatives = True
    keeps_values = True

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
        """Check the options. The first call connects, and creates the schema."""
        super().__init__(clock)
        times = (("timeout", timeout), ("connect_timeout", connect_timeout), ("silence", silence or timeout))
        for name, seconds in times:
            if not 0 < seconds < SCHEMA_TIMEOUT // SECOND:
                raise ConfigError(f"must be a number of seconds above 0 and below 60, not {seconds!r}", field=name)
        if not isinstance(pool_size, int) or pool_size < 1:
            raise ConfigError(f"must be an integer of at least 1, not {pool_size!r}", field="pool_size")
        if synchronous_commit not in (None, *SYNCHRONOUS_COMMIT_VALUES):
            message = f"must be one of {', '.join(SYNCHRONOUS_COMMIT_VALUES)}, not {synchronous_commit!r}"
            raise ConfigError(message, field="synchronous_commit")
        self.target: ConnectionTarget = read_target(url)
        self.schema: Schema = read_schema(schema, unlogged=unlogged)
        self._server_clock = clock is None
        self._timeout = round(timeout * SECOND)
        self._connect_timeout = round(connect_timeout * SECOND)
        self._settings = (
            f"set statement_timeout = {max(1, self._timeout // 1000)}; "
            "set lock_timeout = 0; "
            # A call must see what was committed while it waited for a key.
            "set default_transaction_isolation = 'read committed'; "
            # Plans made for small tables must also fit large ones: always use an index.
            "set enable_seqscan = off; set enable_bitmapscan = off; set jit = off"
        )
        if synchronous_commit is not None:
            self._settings += f"; set synchronous_commit = {synchronous_commit}"
        self._heartbeat: Heartbeat | None = None
        if silence is not None:
            self._heartbeat = Heartbeat(self.target, round(silence * SECOND), self._connect_timeout)
        self._pool: ConnectionPool[StoreCall] = ConnectionPool(pool_size, self._timeout, self._open_flow)
        self._background = BackgroundTasks()
        self._closed = False
        self._refunded = 0
        self._refunds_failed = 0
        self._encoded_policies: dict[int, PolicyParameters] = {}
        self._clock_offset = 0  # microseconds by which the server's clock is ahead of ours, as last known
        self._unswept = 0  # calls since the last sweep; approximate, since threads do not lock it

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply the verb to every key together."""
        self._check_open()
        return run_flow(self._apply_flow(verb, asks, now, at, Caller(), writes), io_flow.perform)

    async def apply_async(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply without blocking the event loop; the charge of a cancelled call without writes is refunded."""
        self._check_open()
        await self._background.watch()
        began = SYSTEM_CLOCK.steady()
        caller = TaskCaller()
        run = caller.run(self._apply_flow(verb, asks, now, at, caller, writes))
        try:
            return await run.result
        except asyncio.CancelledError:
            keeps = changes_values(writes)
            if keeps or not VERBS[verb].asks or not run.stop():
                call = CancelledCall(verb, asks, now, at, began, keeps=keeps)
                self._background.start(self._give_back_cancelled(run.detach(), call))
            raise

    # ---- values ------------------------------------------------------------------------------------------------------

    def get_value(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value."""
        return self._run_read(self._get_flow(collection, name, now))

    async def get_value_async(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value, without blocking the event loop."""
        return await self._run_read_async(self._get_flow(collection, name, now))

    def list_values(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection."""
        return self._run_read(self._list_flow(collection, now))

    async def list_values_async(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection, without blocking the event loop."""
        return await self._run_read_async(self._list_flow(collection, now))

    def _run_read(self, flow: Flow[Query, T]) -> T:
        self._check_open()

        def perform(query: Query) -> PGresult:
            return run_flow(self._query_flow(query, Caller()), io_flow.perform)

        return run_flow(flow, perform)

    async def _run_read_async(self, flow: Flow[Query, T]) -> T:
        self._check_open()
        await self._background.watch()

        async def perform(query: Query) -> PGresult:
            caller = TaskCaller()
            run = caller.run(self._query_flow(query, caller))
            try:
                return await run.result
            except asyncio.CancelledError:
                run.stop()
                raise

        return await run_flow_async(flow, perform)

    def _get_flow(self, collection: Collection, name: str, now: int | None) -> Flow[Query, Value | None]:
        check_name(collection, name)
        parameters = (encode_collection(collection).encode(), encode_value_name(name), self._instant(now))
        result = yield Query("read a value", values.GET, parameters)
        return values.read_value(result, 0) if result.ntuples else None

    def _list_flow(self, collection: Collection, now: int | None) -> Flow[Query, dict[str, Value]]:
        check_listed(collection)
        found: dict[str, Value] = {}
        last = b"\\x"
        while True:
            parameters = (encode_collection(collection).encode(), last, self._instant(now), b"%d" % values.PAGE_SIZE)
            result = yield Query("list values", values.LIST, parameters)
            found |= values.read_page(result)
            if result.ntuples < values.PAGE_SIZE:
                return found
            last = result.get_value(result.ntuples - 1, 0)

    def _instant(self, now: int | None) -> bytes | None:
        if now is None and not self._server_clock:
            now = self.clock.ns() // 1000
        return None if now is None else b"%d" % now

    def _query_flow(self, query: Query, caller: Caller) -> IOFlow[PGresult]:
        """Run SQL on a connection of its own."""
        connection = yield from self._pool.acquire_flow(None, caller)
        assert connection is not None  # noqa: S101 - no other caller can send a query
        try:
            result = yield from connection.parameters_flow(*query, SYSTEM_CLOCK.steady() + self._timeout)
        except ServerError as error:
            self._pool.release(caller)
            raise connection.explain(query.what, str(error), error.code) from None
        except BaseException:
            self._pool.drop(caller)
            raise
        self._pool.release(caller)
        return result

    def outdated(self, *, drop: bool = False) -> dict[str, bool]:
        """Return the schemas of functions of older versions, and whether a process uses them; `drop` the others."""
        self._check_open()
        return run_flow(self._outdated_flow(Caller(), drop=drop), io_flow.perform)

    def _outdated_flow(self, caller: Caller, *, drop: bool) -> IOFlow[dict[str, bool]]:
        connection = yield from self._pool.acquire_flow(None, caller)
        assert connection is not None  # noqa: S101 - as above
        try:
            found = yield from self.schema.outdated_flow(connection, SYSTEM_CLOCK.steady() + self._timeout, drop=drop)
        except BaseException:
            self._pool.drop(caller)
            raise
        self._pool.release(caller)
        return found

    # ---- decisions ---------------------------------------------------------------------------------------------------

    async def _give_back_cancelled(self, result: asyncio.Future[list[Decision]], call: CancelledCall) -> None:
        """Wait for the answer to a call whose task was cancelled, and refund its charge unless it `keeps` it."""
        verb, asks, now, at, began, keeps = call
        try:
            decisions = await finish(result)
        except RateLimitError as error:
            self.outage_log.debug("a cancelled call failed: %s", error)
            if not keeps:
                report_lost(self, verb, asks, now, at, error)
            return
        if VERBS[verb].charges and not keeps:
            for back, instant in corrections(verb, asks, decisions, SYSTEM_CLOCK.steady() - began):
                await self._give_back(back, now, instant)
        elif VERBS[verb].changes:
            self.wake(asks)

    async def _give_back(self, asks: Sequence[Ask], now: int | None, at: int | None) -> None:
        caller = TaskCaller()
        try:
            await finish(caller.run(self._apply_flow("adjust", asks, now, at, caller)).result)
        except RateLimitError as error:
            self._refunds_failed += 1
            self.outage_log.warning("could not refund the permits of a cancelled call: %s", error)
        else:
            self._refunded += 1
            self.wake(asks)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the store is closed")

    def _apply_flow(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None,
        at: int | None,
        caller: Caller,
        writes: Sequence[Write] = (),
    ) -> IOFlow[list[Decision]]:
        if writes:
            check_writes(writes)
        if len(asks) == 1:
            return (yield from self._decide_flow(verb, asks, now, at, caller, writes))
        merged = merge(asks)
        return merged.split((yield from self._decide_flow(verb, merged.asks, now, at, caller, writes)))

    def _decide_flow(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, caller: Caller, writes: Sequence[Write]
    ) -> IOFlow[list[Decision]]:
        if now is None and not self._server_clock:
            now = self.clock.ns() // 1000
        around = SYSTEM_CLOCK.ns() // 1000 + self._clock_offset if now is None else now
        call = self._encode_call(verb, asks, now, at, around)
        for _ in range(MAX_WINDOW_RETRIES):
            if writes:
                yield from self._write_flow(call, caller, writes)
                if not asks:
                    return []
            else:
                yield from self._call_flow(call, caller)
            answers = call.result()
            answer, instant, *numbers = answers[-1]
            if answer != MISSING:
                groups = zip(call.groups, answers, strict=False)  # of alternatives, some are not decided
                return [decision for group, decided in groups for decision in decode_decisions(group, decided)]
            if now is None:
                self._clock_offset = instant - SYSTEM_CLOCK.ns() // 1000
            limits = [limit for policy, _, _ in asks for limit in policy.limits]
            before = sum(call.limit_counts[: len(answers) - 1])  # limits of alternatives that were denied
            missing = [0] * before + numbers + [0] * (len(limits) - before - len(numbers))
            encoded = (encode_limit(limit, found or instant) for limit, found in zip(limits, missing, strict=True))
            call = self._encode_call(verb, asks, now, at, around)
            call.limits = ",".join(encoded)
        raise StoreUnavailable(f"PostgreSQL {self.target.name} could not {verb}: the server's clock jumps: check it")

    def _write_flow(self, call: StoreCall, caller: Caller, writes: Sequence[Write]) -> IOFlow[None]:
        """Send a call that writes values, alone."""
        parameters = [*self._parameters([call]), *values.encode_writes(writes)]
        result = yield from self._query_flow(Query(call.verb, values.APPLY, parameters), caller)
        numbers = values.check_written(writes, result)
        if numbers:
            call.take_answers(numbers, 0)

    def _call_flow(self, call: StoreCall, caller: Caller) -> IOFlow[None]:
        """Send a call together with queued ones, or let another caller send it.

        Its timeout starts when it is sent: waiting for a connection does not count.
        """
        connection = yield from self._pool.acquire_flow(call, caller)
        if connection is None:
            return
        try:
            requests = yield from self._pool.gather_flow(caller, MAX_CALLS_PER_STATEMENT - 1)
        except BaseException:
            self._pool.release(caller)
            raise
        until = SYSTEM_CLOCK.steady() + self._timeout
        calls = [call, *(request.call for request in requests if request.call is not None)]
        error: Exception = StoreUnavailable(
            f"PostgreSQL {self.target.name} did not decide: the caller that sent this call was cancelled"
        )
        try:
            result = yield from connection.call_flow(call.verb, self._parameters(calls), until)
            numbers = list(map(int, (result.get_value(0, 0) or b"")[1:-1].split(b",")))
            taken = 0
            for each in calls:
                taken = each.take_answers(numbers, taken)
        except ServerError as error_reply:
            self._pool.release(caller)
            error = connection.explain(call.verb, str(error_reply), error_reply.code)
            raise error from None
        except BaseException as raised:
            self._pool.drop(caller)
            error = raised if isinstance(raised, StoreUnavailable) else error
            raise
        else:
            self._pool.release(caller)
        finally:
            for each in calls:
                each.error = error
            self._pool.settle(requests)

    def _open_flow(self) -> IOFlow[Connection]:
        """Connect, and create the schema if necessary."""
        connection = Connection(self.target, self._heartbeat)
        until = SYSTEM_CLOCK.steady() + self._connect_timeout
        try:
            yield from connection.connect_flow(until)
            settings = f"{self._settings}; {self.schema.session_settings}"
            yield from connection.query_flow("set up a session", settings, until)
            if not (yield from self.schema.check_flow(connection, until)):
                yield from self.schema.create_flow(connection, SYSTEM_CLOCK.steady() + SCHEMA_TIMEOUT)
                until = SYSTEM_CLOCK.steady() + self._connect_timeout
                yield from self.schema.check_flow(connection, until)
            yield from connection.prepare_flow(APPLY, until)
        except ServerError as error:
            connection.close()
            raise connection.explain("set up a session", str(error), error.code) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _encode_call(self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, around: int) -> StoreCall:
        call = StoreCall(verb, asks)
        encoded = [self._encode_policy(ask[0], around) for ask in asks]
        call.policies = ",".join([each.name for each in encoded])
        call.keys = ",".join([quote(encode_name(join_key(key), escaped=True)) for _, key, _ in asks])
        call.counts = ",".join([each.size for each in encoded])
        call.limits = ",".join([each.limits for each in encoded])
        call.costs = ",".join([str(cost) for _, _, costs in asks for cost in costs])
        call.now = call.repeat("NULL" if now is None else str(now))
        call.at = call.repeat("NULL" if at is None else str(at))
        return call

    def _parameters(self, calls: Sequence[StoreCall]) -> list[bytes]:
        return [
            encode_array([call.verbs for call in calls]),
            encode_array([call.sizes for call in calls]),
            encode_array([call.policies for call in calls]),
            encode_array([call.keys for call in calls]),
            encode_array([call.counts for call in calls]),
            encode_array([call.limits for call in calls]),
            encode_array([call.costs for call in calls]),
            encode_array([call.now for call in calls]),
            encode_array([call.at for call in calls]),
            str(self._sweep_size(len(calls))).encode(),
        ]

    def _sweep_size(self, calls: int) -> int:
        """Return how many keys to sweep with these calls: usually none, then more than were added since."""
        self._unswept += calls
        if self._unswept < SWEEP_EVERY:
            return 0
        calls, self._unswept = self._unswept, 0
        return SWEEP_PER_CALL * calls

    def _encode_policy(self, policy: Policy, around: int) -> PolicyParameters:
        """Return the encoded name and limits of a policy, with the calendar windows around an instant."""
        cached = self._encoded_policies.get(id(policy))
        if cached is not None and cached.policy is policy and cached.since <= around < cached.until:
            return cached
        windows = [limit.calendar.window(around) for limit in policy.limits if limit.calendar is not None]
        since = max((start for start, _ in windows), default=-(2**63))
        until = min((end for _, end in windows), default=2**63)
        name, limits = quote(encode_name(policy.name)), [encode_limit(limit, around) for limit in policy.limits]
        if len(self._encoded_policies) >= MAX_CACHED_POLICIES:
            self._encoded_policies.clear()
        cached = PolicyParameters(policy, name, str(len(limits)), ",".join(limits), since, until)
        self._encoded_policies[id(policy)] = cached
        return cached

    def metrics(self) -> dict[str, int]:
        """Return the numbers of connections, waiting calls, and refunds of cancelled calls, done or failed."""
        return {
            **self._pool.metrics(),
            "refunded": self._refunded,
            "refunds_failed": self._refunds_failed,
        }

    def close(self) -> None:
        """Close the connections as soon as the charges of all cancelled calls are refunded."""
        self._closed = True
        self._background.when_done(self._close_connections)

    async def close_async(self) -> None:
        """Wait until cancelled calls are refunded, for at most MAX_CLOSING seconds, and close the connections."""
        self._closed = True
        await self._background.finish()
        self._close_connections()

    def _close_connections(self) -> None:
        self._pool.close()
        if self._heartbeat is not None:
            self._heartbeat.close()


class Query(NamedTuple):
    """SQL with parameters, and what it does, for messages."""

    what: str
    sql: bytes
    parameters: Sequence[bytes | None]


class CancelledCall(NamedTuple):
    """A call whose task was cancelled after it was sent; it `keeps` its charge if it wrote values."""

    verb: str
    asks: Sequence[Ask]
    now: int | None
    at: int | None
    began: int
    keeps: bool


class PolicyParameters(NamedTuple):
    """The encoded name, number of limits and limits of a policy, valid from one instant to another."""

    policy: Policy
    name: str
    size: str
    limits: str
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
    """Parse a URL with libpq. Raises ConfigError if it is invalid; the message never contains the password."""
    libpq_options = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    for name, _ in parse_qsl(server_url(url, "store").query, keep_blank_values=True):
        if name not in libpq_options:
            message = f"postgresql://: {unknown_option(name, OPTIONS, sorted(libpq_options))}"
            raise ConfigError(message, field="store")
    try:
        settings = {option.keyword: option.val for option in pq.Conninfo.parse(url.encode())}
    except Exception:  # noqa: BLE001 - its message may contain the password
        message = (
            "cannot parse the PostgreSQL URL: write postgresql://user:password@host:port/database, "
            "with special characters as %xx"
        )
        raise ConfigError(message, field="store") from None
    host, port, database = (
        (settings.get(name) or default).decode(errors="replace")
        for name, default in ((b"host", b"localhost"), (b"port", b"5432"), (b"dbname", b""))
    )
    separator = "&" if "?" in url else "?"
    return ConnectionTarget(f"{url}{separator}fallback_application_name=tidegate".encode(), f"{host}:{port}/{database}")
