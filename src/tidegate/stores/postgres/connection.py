"""A connection to a PostgreSQL server, by libpq: sends, waits by steps, and says in our words what went wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from psycopg import pq

from tidegate.errors import StoreUnavailable
from tidegate.stores.postgres.io_flow import SYSTEM_CLOCK, Steps, WaitForSocket, readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.stores.postgres.heartbeat import Heartbeat

STATEMENT: Final = b"tidegate_apply"
FAILED_STATUSES: Final = (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE)

# What to do, by the server's code for what is wrong (or the beginning of it)...
ADVICE: Final = {
    "25006": "this server is read-only: use the primary, or several hosts with target_session_attrs=read-write",
    "28": "check the user and password in the store's URL",
    "3D000": "create the database, or use another one in the store's URL",
    "42501": "let the owner of the database grant CREATE on it, or create the schema as docs/stores-postgres.md shows",
    "53100": "the server's disk is full: free some space",
    "53300": "raise the server's max_connections or lower pool_size in the store's URL",
    "57014": "the server is overloaded or the key is locked: raise timeout in the store's URL if that is normal",
    "57P": "the server is stopping or starting: the next call connects again",
}
# ... and by its words where it gives no code: while connecting.
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
    """What to connect to: as libpq wants it, and as people may read it, without the password."""

    conninfo: bytes
    name: str

    def __repr__(self) -> str:
        """Show no password."""
        return f"<Target {self.name}>"


class ServerError(Exception):
    """The server answered with an error: it did nothing of what was asked."""

    def __init__(self, result: pq.abc.PGresult) -> None:
        """Keep the code and the words."""
        self.code = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        words = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
        super().__init__(words.decode("utf-8", "replace"))


class Connection:
    """One session at the server; in use by one caller at a time."""

    def __init__(self, target: ConnectionTarget, pulse: Heartbeat | None = None) -> None:
        """Not connected yet: `connecting` does that. `pulse` is told when the server is heard."""
        self.target = target
        self.pulse = pulse
        self.pgconn: pq.abc.PGconn | None = None

    def connecting(self, until: int) -> Steps[None]:
        """Connect; resolving the host's name blocks."""
        try:
            pgconn = self.pgconn = pq.PGconn.connect_start(self.target.conninfo)
            while True:
                if pgconn.status == pq.ConnStatus.BAD:
                    raise self.failed("connect", pgconn.get_error_message())
                polled = pgconn.connect_poll()
                if polled == pq.PollingStatus.OK:
                    break
                if polled != pq.PollingStatus.FAILED:
                    self._in_time("connect", until)
                    yield WaitForSocket(pgconn.socket, polled == pq.PollingStatus.WRITING, until)
            pgconn.nonblocking = 1
        except psycopg.Error as error:
            raise self.failed("connect", str(error)) from None

    def preparing(self, statement: bytes, until: int) -> Steps[None]:
        """Let the server parse, once, the statement that `calling` runs."""
        self._pgconn.send_prepare(STATEMENT, statement)
        yield from self._answers("prepare", until)

    def asking(self, what: str, sql: str, until: int) -> Steps[list[pq.abc.PGresult]]:
        """Run any SQL without parameters: several statements, in one transaction unless they say otherwise."""
        try:
            self._pgconn.send_query(sql.encode())
            return (yield from self._answers(what, until))
        except psycopg.Error as error:
            raise self.failed(what, str(error)) from None

    def calling(self, what: str, parameters: Sequence[bytes | None], until: int) -> Steps[pq.abc.PGresult]:
        """Run the prepared statement."""
        try:
            self._pgconn.send_query_prepared(STATEMENT, parameters)
            return (yield from self._answers(what, until, self.pulse))[0]
        except psycopg.Error as error:
            raise self.failed(what, str(error)) from None

    def _answers(self, what: str, until: int, pulse: Heartbeat | None = None) -> Steps[list[pq.abc.PGresult]]:
        """Send what is to be sent and wait for the results; with a pulse, only for as long as the server is alive."""
        pgconn = self._pgconn
        beat = until if pulse is None else pulse.expected(until)
        while pgconn.flush():
            yield WaitForSocket(pgconn.socket, write=True, until=until)
            self._in_time(what, until)
            pgconn.consume_input()
        results = []
        while True:
            while pgconn.is_busy():
                yield WaitForSocket(pgconn.socket, write=False, until=beat)
                pgconn.consume_input()
                if not pgconn.is_busy():
                    break
                self._in_time(what, until)
                if pulse is not None and SYSTEM_CLOCK.steady() >= beat:
                    yield from pulse.checking()
                    beat = pulse.expected(until)
            result = pgconn.get_result()
            if result is None:
                break
            results.append(result)
        if pulse is not None:
            pulse.note()
        for result in results:
            if result.status in FAILED_STATUSES:
                raise ServerError(result)
        return results

    @property
    def _pgconn(self) -> pq.abc.PGconn:
        if self.pgconn is None:
            raise StoreUnavailable(f"the connection to PostgreSQL {self.target.name} is closed")
        return self.pgconn

    def usable(self) -> bool:
        """Tell whether an idle connection can be used: if a server says anything on it, then that it goes away."""
        pgconn = self._pgconn
        return pgconn.status == pq.ConnStatus.OK and not readable(pgconn.socket)

    def close(self) -> None:
        """Hang up, without waiting for anything."""
        if self.pgconn is not None:
            self.pgconn.finish()
            self.pgconn = None

    def _in_time(self, what: str, until: int) -> None:
        if SYSTEM_CLOCK.steady() >= until:
            raise StoreUnavailable(f"PostgreSQL {self.target.name} did not answer in time to {what}: {TIMEOUT_ADVICE}")

    def failed(self, what: str, words: str, code: str = "") -> StoreUnavailable:
        """Put an error in our words: what was attempted, what happened, what to do."""
        advice = next((text for start, text in ADVICE.items() if code.startswith(start)), None)
        advice = advice or next((text for part, text in ADVICE_BY_TEXT.items() if part in words), DEFAULT_ADVICE)
        happened = " ".join(words.split())
        return StoreUnavailable(f"PostgreSQL {self.target.name} could not {what}: {happened}; {advice}")
