"""A connection to a PostgreSQL server through libpq: sends, waits in steps, and translates errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from psycopg import pq

from tidegate.errors import StoreUnavailable
from tidegate.stores._postgres.io_flow import SYSTEM_CLOCK, IOFlow, WaitForSocket, readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.stores._postgres.heartbeat import Heartbeat

STATEMENT: Final = b"tidegate_apply"
FAILED_STATUSES: Final = (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE)

# What to do, by the SQLSTATE of the server's error, or its beginning...
ADVICE: Final = {
    "25006": "this server is read-only: use the primary, or several hosts with target_session_attrs=read-write",
    "28": "check the user and password in the store's URL",
    "3D000": "create the database, or use another one in the store's URL",
    "42501": "let its owner grant CREATE on it, or create the schema: docs/reference/stores-postgres.md",
    "53100": "the server's disk is full: free some space",
    "53300": "raise the server's max_connections or lower pool_size in the store's URL",
    "57014": "the server is overloaded or the key is locked: raise timeout in the store's URL if that is normal",
    "57P": "the server is stopping or starting: the next call connects again",
}
# ... and by its message if there is no code: while connecting.
ADVICE_BY_TEXT: Final = {
    "authentication failed": ADVICE["28"],
    "no password supplied": ADVICE["28"],
    "does not exist": ADVICE["3D000"],
    "too many clients": ADVICE["53300"],
    "starting up": ADVICE["57P"],
    "shutting down": ADVICE["57P"],
    "Connection refused": "start the server, or check the host and port in the store's URL",
    "translate host name": "check the host in the store's URL",
    "read-only": ADVICE["25006"],
}
DEFAULT_ADVICE: Final = "check the server and the store's URL"
TIMEOUT_ADVICE: Final = "check whether the server hangs, or raise timeout in the store's URL"


class ConnectionTarget(NamedTuple):
    """What to connect to: as libpq needs it, and as messages show it, without the password."""

    conninfo: bytes
    name: str

    def __repr__(self) -> str:
        """Show no password."""
        return f"<ConnectionTarget {self.name}>"


class ServerError(Exception):
    """The server answered with an error and has changed nothing."""

    def __init__(self, result: pq.abc.PGresult) -> None:
        """Keep the SQLSTATE and the message."""
        self.code: str = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        message = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
        super().__init__(message.decode("utf-8", "replace"))


class Connection:
    """One session with the server, used by one caller at a time."""

    def __init__(self, target: ConnectionTarget, heartbeat: Heartbeat | None = None) -> None:
        """Prepare a connection that `connect_flow` opens. `heartbeat` records when the server answers."""
        self.target = target
        self.heartbeat = heartbeat
        self.pgconn: pq.abc.PGconn | None = None

    def connect_flow(self, until: int) -> IOFlow[None]:
        """Connect; resolving the host name blocks."""
        try:
            pgconn = self.pgconn = pq.PGconn.connect_start(self.target.conninfo)
            while True:
                if pgconn.status == pq.ConnStatus.BAD:
                    raise self.explain("connect", pgconn.get_error_message())
                polled = pgconn.connect_poll()
                if polled == pq.PollingStatus.OK:
                    break
                if polled != pq.PollingStatus.FAILED:
                    self._check_deadline("connect", until)
                    yield WaitForSocket(pgconn.socket, polled == pq.PollingStatus.WRITING, until)
            pgconn.nonblocking = 1
        except psycopg.Error as error:
            raise self.explain("connect", str(error)) from None

    def prepare_flow(self, statement: bytes, until: int) -> IOFlow[None]:
        """Prepare the statement that `call_flow` runs."""
        try:
            self._pgconn.send_prepare(STATEMENT, statement)
            yield from self._results_flow("prepare", until)
        except psycopg.Error as error:
            raise self.explain("prepare", str(error)) from None

    def query_flow(self, what: str, sql: str, until: int) -> IOFlow[list[pq.abc.PGresult]]:
        """Run SQL without parameters. Several statements are one transaction unless they control it themselves."""
        try:
            self._pgconn.send_query(sql.encode())
            return (yield from self._results_flow(what, until))
        except psycopg.Error as error:
            raise self.explain(what, str(error)) from None

    def parameters_flow(
        self, what: str, sql: bytes, parameters: Sequence[bytes | None], until: int
    ) -> IOFlow[pq.abc.PGresult]:
        """Run SQL with parameters."""
        try:
            self._pgconn.send_query_params(sql, parameters)
            return (yield from self._results_flow(what, until, self.heartbeat))[0]
        except psycopg.Error as error:
            raise self.explain(what, str(error)) from None

    def call_flow(self, what: str, parameters: Sequence[bytes | None], until: int) -> IOFlow[pq.abc.PGresult]:
        """Run the prepared statement."""
        try:
            self._pgconn.send_query_prepared(STATEMENT, parameters)
            return (yield from self._results_flow(what, until, self.heartbeat))[0]
        except psycopg.Error as error:
            raise self.explain(what, str(error)) from None

    def _results_flow(self, what: str, until: int, heartbeat: Heartbeat | None = None) -> IOFlow[list[pq.abc.PGresult]]:
        """Send pending data and wait for the results; with a heartbeat, only while the server is alive."""
        pgconn = self._pgconn
        heartbeat_due = until if heartbeat is None else heartbeat.due_at(until)
        while pgconn.flush():
            yield WaitForSocket(pgconn.socket, write=True, until=until)
            self._check_deadline(what, until)
            pgconn.consume_input()
        results = []
        while True:
            while pgconn.is_busy():
                yield WaitForSocket(pgconn.socket, write=False, until=heartbeat_due)
                pgconn.consume_input()
                if not pgconn.is_busy():
                    break
                self._check_deadline(what, until)
                if heartbeat is not None and SYSTEM_CLOCK.steady() >= heartbeat_due:
                    yield from heartbeat.check_flow()
                    heartbeat_due = heartbeat.due_at(until)
            result = pgconn.get_result()
            if result is None:
                break
            results.append(result)
        if heartbeat is not None:
            heartbeat.record_answer()
        for result in results:
            if result.status in FAILED_STATUSES:
                raise ServerError(result)
        return results

    @property
    def _pgconn(self) -> pq.abc.PGconn:
        if self.pgconn is None:
            raise StoreUnavailable(f"the connection to PostgreSQL {self.target.name} is closed")
        return self.pgconn

    def is_usable(self) -> bool:
        """Return whether an idle connection can be used: data on it means that the server closes it."""
        pgconn = self._pgconn
        return pgconn.status == pq.ConnStatus.OK and not readable(pgconn.socket)

    def close(self) -> None:
        """Close the connection without waiting."""
        if self.pgconn is not None:
            self.pgconn.finish()
            self.pgconn = None

    def _check_deadline(self, what: str, until: int) -> None:
        if SYSTEM_CLOCK.steady() >= until:
            raise StoreUnavailable(f"PostgreSQL {self.target.name} could not {what} in time: {TIMEOUT_ADVICE}")

    def explain(self, what: str, message: str, code: str = "") -> StoreUnavailable:
        """Return an error that says what was attempted, what happened and what to do."""
        advice = next((text for start, text in ADVICE.items() if code.startswith(start)), None)
        advice = advice or next((text for part, text in ADVICE_BY_TEXT.items() if part in message), DEFAULT_ADVICE)
        reason = " ".join(message.split())
        return StoreUnavailable(f"PostgreSQL {self.target.name} could not {what}: {reason}; {advice}")
