"""The Store that keeps its states in PostgreSQL."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlunsplit

from tidegate.clock import TaskSignal, ThreadSignal
from tidegate.core.bounds import MAX, SECOND
from tidegate.core.decision import Decision
from tidegate.errors import ConfigError, RateLimitError, StoreUnavailable
from tidegate.policy.key import join_key
from tidegate.stores.base import Store
from tidegate.urls import server_url

try:
    from psycopg import pq
except ImportError as error:
    message = "postgresql:// needs psycopg: pip install 'tidegate[postgres]'"
    raise ConfigError(message, field="store") from error

from tidegate.stores.postgres.connection import Connection, ServerError, Target
from tidegate.stores.postgres.pool import Pool
from tidegate.stores.postgres.schema import Schema, read_schema
from tidegate.stores.postgres.steps import CLOCK, Steps, drive, drive_async

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidegate.clock import Clock, Signal
    from tidegate.core.algorithms import View
    from tidegate.core.limit import Limit
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Ask

log = logging.getLogger(__name__)

SETTING_UP: Final = 60 * SECOND  # how long creating or migrating the schema may take
MOST: Final = 64  # calls that go together
SWEEP_EVERY: Final = 16  # calls of this process, between two that also sweep
SWEEP: Final = 4  # how many keys are looked after for each of them
MISSING: Final = -1  # instead of an answer: calendar windows are missing
TRIES: Final = 5  # how often a call is sent again because calendar windows were missing
LONGEST_NAME: Final = 500  # bytes of a name that the index takes as it is
DESCRIBED: Final = 1000  # policies whose description is remembered
DURABLE: Final = ("on", "off", "local", "remote_write", "remote_apply")


class PostgresStore(Store):
    """Keeps states in a PostgreSQL database, shared by any number of processes on any number of machines.

    The core runs in the server, in PL/pgSQL: a call of any number of limits and keys is one round trip and one
    transaction, by the server's clock, read while nobody else can decide on these keys. Keys are locked in one order,
    so that calls never deadlock. Denied calls and looks write nothing. Calls that find every connection busy go
    together in the next transaction, decided one after another.

    `timeout` bounds every call, in seconds; `connect_timeout` what comes before it when a connection has to be opened.
    `pool_size` connections serve all threads and event loops of this process; one that forks opens its own. A given
    clock, for tests, decides instead of the server's.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = "tidegate",
        timeout: float = 1.0,
        connect_timeout: float = 2.0,
        pool_size: int = 4,
        synchronous_commit: str | None = None,
        unlogged: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Check what is given; connect with the first call, and create or migrate the schema then."""
        super().__init__(clock)
        for name, seconds in (("timeout", timeout), ("connect_timeout", connect_timeout)):
            if not 0 < seconds < SETTING_UP // SECOND:
                raise ConfigError(f"must be seconds, more than 0 and less than 60, not {seconds!r}", field=name)
        if not isinstance(pool_size, int) or pool_size < 1:
            raise ConfigError(f"must be a whole number from 1, not {pool_size!r}", field="pool_size")
        if synchronous_commit not in (None, *DURABLE):
            message = f"must be one of {', '.join(DURABLE)}, not {synchronous_commit!r}"
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
        self._pool: Pool[Call] = Pool(pool_size, self._opening)
        self._descriptions: dict[int, Description] = {}
        self._ahead = 0  # by how many microseconds the server's clock was ahead of ours, when that mattered
        self._unswept = 0  # calls since the last that swept; two threads may lose one, which does not matter

    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        """Apply the verb to every key together."""
        return drive(self._applying(verb, asks, now, at, ThreadSignal))

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply without blocking the event loop; a caller that is cancelled leaves no charge behind."""
        decisions, cancelled = await drive_async(self._applying(verb, asks, now, at, TaskSignal))
        if cancelled is not None:
            if verb in ("acquire", "hold") and all(decision.allowed for decision in decisions):
                await self._give_back(verb, asks, now, decisions[0].at)
            raise cancelled
        return decisions

    async def _give_back(self, verb: str, asks: Sequence[Ask], now: int | None, at: int) -> None:
        """Undo a charge: where it stands under its instant, there; a bucket that has no mark of it, just so."""
        marked = verb == "hold"
        for bucket, instant in ((False, at), (True, at if marked else None)):
            back = [
                (policy, key, tuple(
                    -cost if (limit.algorithm == "token_bucket") is bucket else 0
                    for limit, cost in zip(policy.limits, costs, strict=True)
                ))
                for policy, key, costs in asks
            ]  # fmt: skip
            if any(any(costs) for _, _, costs in back):
                try:
                    await drive_async(self._applying("adjust", back, now, instant, TaskSignal), stubborn=True)
                except RateLimitError as error:
                    log.warning("a cancelled call could not give its permits back: %s", error)

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
        until = CLOCK.steady() + self._timeout
        if now is None and not self._own_clock:
            now = self.clock.ns() // 1000
        around = CLOCK.ns() // 1000 + self._ahead if now is None else now
        call = self._worded(verb, asks, now, at, around)
        for _ in range(TRIES):
            yield from self._calling(call, until, new_signal)
            answer, instant, *numbers = call.answered()
            if answer != MISSING:
                return decisions_of(asks, answer == 1, instant, numbers)
            if now is None:
                self._ahead = instant - CLOCK.ns() // 1000
            limits = [limit for policy, _, _ in asks for limit in policy.limits]
            described = (describe(limit, missing or instant) for limit, missing in zip(limits, numbers, strict=True))
            call = self._worded(verb, asks, now, at, around)
            call.limits = ",".join(described)
        raise StoreUnavailable(f"PostgreSQL {self.target.name} could not {verb}: its clock jumps; check its clock")

    def _calling(self, call: Call, until: int, new_signal: Callable[[], Signal]) -> Steps[None]:
        """Put a call to the server, together with those that wait meanwhile; or let somebody else take it along."""
        connection = yield from self._pool.taking(call, until, new_signal)
        if connection is None:
            return
        if connection.fresh:  # opening it had a deadline of its own
            connection.fresh = False
            until = CLOCK.steady() + self._timeout
        turns = self._pool.companions(MOST - 1)
        calls = [call, *(turn.what for turn in turns)]
        error: Exception = StoreUnavailable(
            f"PostgreSQL {self.target.name} was not asked: the call that went was ended"
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
        connection = Connection(self.target)
        until = CLOCK.steady() + self._connect_timeout
        try:
            yield from connection.connecting(until)
            yield from connection.asking("set up a session", self._settings, until)
            if not (yield from self.schema.checking(connection, until)):
                yield from self.schema.migrating(connection, CLOCK.steady() + SETTING_UP)
                until = CLOCK.steady() + self._connect_timeout
            yield from connection.preparing(self.schema.statement, until)
        except ServerError as error:
            connection.close()
            raise connection.failed("set up a session", str(error), error.code) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _worded(self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, around: int) -> Call:
        call = Call(verb, len(asks))
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

    def _parameters(self, calls: Sequence[Call]) -> list[bytes]:
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
        return SWEEP * calls

    def _described(self, policy: Policy, around: int) -> Description:
        """Give a policy's limits as the server wants them, with the calendar windows around an instant."""
        known = self._descriptions.get(id(policy))
        if known is not None and known.policy is policy and known.since <= around < known.until:
            return known
        windows = [limit.calendar.window(around) for limit in policy.limits if limit.calendar is not None]
        since = max((start for start, _ in windows), default=-(2**63))
        until = min((end for _, end in windows), default=2**63)
        text = ",".join(describe(limit, around) for limit in policy.limits)
        if len(self._descriptions) >= DESCRIBED:
            self._descriptions.clear()
        known = self._descriptions[id(policy)] = Description(policy, text, since, until)
        return known

    def metrics(self) -> dict[str, int]:
        """Count connections, idle ones, and calls that wait for one."""
        return self._pool.metrics()

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()


class Call:
    """What is asked of the server, as elements of its arrays; and what it answered."""

    __slots__ = (
        "answer",
        "at",
        "costs",
        "counts",
        "error",
        "keys",
        "limits",
        "now",
        "places",
        "policies",
        "size",
        "verb",
    )

    def __init__(self, verb: str, size: int) -> None:
        """Ask about so many keys."""
        self.verb = verb
        self.size = size
        self.places = 0
        self.policies = self.keys = self.counts = self.limits = self.costs = self.now = self.at = ""
        self.answer: list[int] = []
        self.error: Exception | None = None

    def take(self, numbers: list[int]) -> list[int]:
        """Take the answer off the front of several; give the rest."""
        end = 2 + self.places * (1 if numbers[0] == MISSING else 3)
        self.answer = numbers[:end]
        return numbers[end:]

    def answered(self) -> list[int]:
        """Give the answer, or raise what came instead."""
        if not self.answer and self.error is not None:
            raise self.error
        return self.answer


class Description(NamedTuple):
    """A policy's limits as the server wants them, good from one instant to another."""

    policy: Policy
    text: str
    since: int
    until: int


def merge(asks: Sequence[Ask]) -> tuple[list[int], list[Ask]]:
    """Let a key that is asked for twice pay both costs at once; tell where each ask has gone."""
    places: dict[tuple[str, Key], int] = {}
    merged: list[Ask] = []
    for policy, key, costs in asks:
        place = places.setdefault((policy.name, key), len(merged))
        if place == len(merged):
            merged.append((policy, key, costs))
            continue
        first, _, before = merged[place]
        if first != policy:
            raise ConfigError(f"two different policies are called {policy.name!r} in one call", field="policy")
        merged[place] = (policy, key, tuple(min(MAX, old + new) for old, new in zip(before, costs, strict=True)))
    return [places[policy.name, key] for policy, key, _ in asks], merged


def decisions_of(
    asks: Sequence[Ask],
    allowed: bool,  # noqa: FBT001 - data
    at: int,
    numbers: list[int],
) -> list[Decision]:
    """Read the server's answer."""
    views: list[View] = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
    decisions, place = [], 0
    for policy, _, _ in asks:
        end = place + len(policy.limits)
        decisions.append(Decision((allowed, at, policy.limits, views[place:end], None)))
        place = end
    return decisions


# ---- texts for the server ------------------------------------------------------------------------------------------


def describe(limit: Limit, around: int) -> str:
    """Write a limit as an element of an array of limit_t."""
    names = (limit.name, limit.algorithm, limit.unit, str(limit))
    numbers = (limit.quota, limit.burst, limit.length, limit.rate, limit.scale, limit.capacity, limit.floor, limit.tick)
    bounds = "" if limit.calendar is None else quoted(array_of(map(str, edges(limit, around))).decode())
    fields = [*(quoted(text_of(name)) for name in names), *map(str, numbers), bounds]
    return quoted(f"({','.join(fields)})")


def edges(limit: Limit, around: int) -> tuple[int, int, int, int]:
    """Give the edges of three calendar windows: the one around an instant, and its neighbours."""
    window = limit.calendar.window  # type: ignore[union-attr]  # asked of calendar windows only
    start, end = window(around)
    return window(start - 1)[0], start, end, window(end)[1]


def array_of(elements: Iterable[str]) -> bytes:
    """Write an array."""
    return f"{{{','.join(elements)}}}".encode()


def quoted(text: str) -> str:
    """Write a text as an element of an array or a row."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def text_of(name: str, *, escaped: bool = False) -> str:
    """Write a name so that PostgreSQL can keep and index it: without NUL and half characters, and not too long.

    These are escaped by '%', which is escaped itself, so that different names stay different.
    """
    if not escaped and "%" in name:
        name = name.replace("%", "%25")
    if name.isascii() and "\0" not in name and len(name) <= LONGEST_NAME:
        return name
    name = "".join(f"%u{ord(char):04X}" if char == "\0" or "\ud800" <= char <= "\udfff" else char for char in name)
    whole = name.encode()
    if len(whole) <= LONGEST_NAME:
        return name
    start = whole[: LONGEST_NAME // 2].decode(errors="ignore")
    return f"{start}%~{hashlib.sha256(whole).hexdigest()}"


# ---- the URL -------------------------------------------------------------------------------------------------------

OPTIONS: Final = ("schema", "timeout", "connect_timeout", "pool_size", "synchronous_commit", "unlogged")


def open_postgres(url: str, clock: Clock | None) -> Store:
    """Open a PostgresStore with the options of the URL's query; libpq takes the others."""
    parts = server_url(url, "store")
    query = parse_qsl(parts.query, keep_blank_values=True)
    options: dict[str, object] = {name: value for name, value in query if name in OPTIONS}
    rest = urlencode([(name, value) for name, value in query if name not in OPTIONS])
    try:
        for name, read in (("timeout", float), ("connect_timeout", float), ("pool_size", int)):
            if name in options:
                options[name] = read(str(options[name]))
    except ValueError:
        raise ConfigError(f"must be a number, not {options[name]!r}", field=name) from None
    if "unlogged" in options:
        if options["unlogged"] not in ("true", "false"):
            raise ConfigError(f"must be true or false, not {options['unlogged']!r}", field="unlogged")
        options["unlogged"] = options["unlogged"] == "true"
    address = urlunsplit(parts._replace(query=rest))
    return PostgresStore(address, **options, clock=clock)  # type: ignore[arg-type]  # PostgresStore checks its options


def read_target(url: str) -> Target:
    """Check a URL as libpq does, without ever repeating its password."""
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    for name, _ in parse_qsl(server_url(url, "store").query, keep_blank_values=True):
        if name not in known:
            message = f"postgresql:// has no option {name!r}: use {', '.join(OPTIONS)}, or one of libpq's"
            raise ConfigError(message, field="store")
    try:
        found = {option.keyword: option.val for option in pq.Conninfo.parse(url.encode())}
    except Exception:  # noqa: BLE001 - whatever it says may hold the password
        message = (
            "PostgreSQL cannot read the URL: write postgresql://user:password@host:port/database, "
            "with special characters as %xx"
        )
        raise ConfigError(message, field="store") from None
    host, port, database = (
        (found.get(name) or default).decode(errors="replace")
        for name, default in ((b"host", b"localhost"), (b"port", b"5432"), (b"dbname", b""))
    )
    separator = "&" if "?" in url else "?"
    return Target(f"{url}{separator}fallback_application_name=tidegate".encode(), f"{host}:{port}/{database}")
