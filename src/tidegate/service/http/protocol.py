"""One HTTP/1 connection: uvicorn's httptools protocol, with bounds on what a client may send and how long it may take.

uvicorn by itself keeps a connection open for ever whose client is silent, or sends the head or the body of a request
byte by byte; it has no limit for the size of a head, and starts an unlimited number of pipelined requests. Here

- a request has to be complete within `read_timeout`, an idle connection is closed after `idle_timeout`;
- a client that does not take its answers is disconnected after `read_timeout`;
- a head has at most `MAX_HEAD` bytes, a whole request at most `MAX_OVERHEAD` times `max_body` with all its framing;
- pipelined requests are read a few at a time, and answered in order;
- a request for another protocol (`Upgrade`, as Java's client sends it) is answered like any other, body included;
- a request whose client hangs up is cancelled, so that nothing stays charged that nobody was answered;
- trailer fields are dropped: uvicorn would add them to the header fields of the request;
- a request that cannot be read is answered with problem details, after the requests before it;
- a client that is refused while it is still sending gets to read the answer: the connection stays open, and what
  arrives is thrown away, until the client closes it or `read_timeout` has passed.

The attributes of uvicorn's classes that are used here are not documented: tests/service/test_protocol.py names them,
and pyproject.toml bounds the version.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from tidegate.errors import ConfigError
from tidegate.service.http.app import HUNG_UP_KEY, SECURITY_HEADERS, TASK_KEY, App
from tidegate.service.http.connections import NEVER_TICKS, Connections
from tidegate.service.http.problems import HTTPReply, ProblemError

try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("the service needs uvicorn and httptools: pip install 'tidegate[service]'") from error

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from uvicorn._types import ASGI3Application
    from uvicorn.config import Config
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

    Fields = Iterable[tuple[bytes, bytes]]

log = logging.getLogger("tidegate.service")

PARSE_BYTES: Final = 4096  # bytes given to the parser at once: bounds how many pipelined requests can be under way
MAX_HEAD: Final = 64 * 1024  # bytes of the request line and the header fields, give or take a piece
MAX_OVERHEAD: Final = 8  # bytes sent for each byte of a body: a chunk of 1 byte has 6
MIN_SENT: Final = 16 * 1024  # bytes that a client has to take of a long answer within `read_timeout`
FRAMING_HEADERS: Final = (b"content-length", b"transfer-encoding")
CONNECTION_CLOSE: Final = (b"connection", b"close")


class HttpConnection(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, config: Config, state: ServerState, app: App, connections: Connections) -> None:
        """Answer by this app, within the bounds of these connections."""
        super().__init__(config, state, {})
        self.logger = log
        self.ticks_left = connections.read_ticks
        self._problems = app.decider.stats.errors
        self._all = connections
        self._max_request = MAX_HEAD + MAX_OVERHEAD * app.settings.max_body
        self._receiving = False  # a request has begun and is not complete
        self._in_head = False
        self._body_skipped = False  # the parser expects another protocol in place of the body
        self._size = 0  # bytes of the request that is being received
        self._unanswered = 0  # requests whose head is complete and whose answer is not
        self._unparsed = b""  # what came behind pipelined requests
        self._discarding = False  # what the client sends is thrown away
        self._last_answer: HTTPReply | None = None  # to be sent after the requests under way
        self._finished = False  # the last answer was sent
        self._answering: RequestResponseCycle | None = None  # the request that the app has begun to answer last
        self._unsent = 0  # bytes that the client had not taken when that was last looked at

    # ---- the transport -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Count the connection."""
        super().connection_made(transport)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and tell the app."""
        self._all.remove(self)
        self._finish()
        super().connection_lost(exc)
        self._cancel_answer()

    def _cancel_answer(self) -> None:
        """Cancel the request that is being answered: nobody will read its answer."""
        cycle = self._answering
        if cycle is not None and not cycle.response_started:
            cycle.scope[HUNG_UP_KEY] = True  # type: ignore[typeddict-unknown-key]  # read by the app
            task = cycle.scope.get(TASK_KEY)
            if task is not None:
                task.cancel()  # type: ignore[attr-defined]  # the app put its task there

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless requests before it have to be answered first."""
        if self._discarding:
            return
        if self.pipeline or self._unparsed:
            self._unparsed += data
            self.flow.pause_reading()
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parse piece by piece, until requests have to wait for those before them."""
        for start in range(0, len(data), PARSE_BYTES):
            if self.pipeline:
                self._unparsed = data[start:]
                self.flow.pause_reading()
                return
            piece = data[start : start + PARSE_BYTES]
            self._feed(piece)
            if self._discarding:
                return
            if self._receiving:
                self._size += len(piece)
                if self._size > (MAX_HEAD if self._in_head else self._max_request):
                    self._refuse_size()
                    return

    def _feed(self, piece: bytes) -> None:
        """Give the parser a piece; refuse what is not HTTP/1."""
        while piece:
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                piece = piece[upgrade.args[0] :]  # no other protocol is spoken here: go on with this one
                self._parse_body_anyway()
            except httptools.HttpParserError as error:
                self.refuse(ProblemError("bad-request", f"this is not a request of HTTP/1: {error}"[:200]))
                return
            else:
                return

    def _parse_body_anyway(self) -> None:
        """Go on with the body of a request that asked for another protocol: the parser thinks that it has none."""
        if self._body_skipped:
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % fields_of(self._framing()))
            self._body_skipped = False

    def _framing(self) -> Fields:
        return [(name, value) for name, value in self.scope["headers"] if name in FRAMING_HEADERS]

    def _refuse_size(self) -> None:
        if self._in_head:
            self.refuse(ProblemError("head-too-large", f"the head of a request may have {MAX_HEAD} bytes"))
        else:
            self.refuse(ProblemError("too-large", f"a request may have {self._max_request} bytes with its framing"))

    def pause_writing(self) -> None:
        """Stop answering until the client has taken what it was sent; the client has to go on within `read_timeout`."""
        super().pause_writing()
        self._limit_wait()

    def resume_writing(self) -> None:
        """Go on answering."""
        super().resume_writing()
        self._unsent = 0
        self._limit_wait()

    # ---- what the parser finds ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        if self._body_skipped:
            return
        super().on_message_begin()
        self._receiving = self._in_head = True
        self._size = 0
        if not self._unanswered:
            self.ticks_left = self._all.read_ticks

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if self._body_skipped:
            return
        self.scope["headers"] = self.headers[:]  # trailer fields go into the list that is left behind
        super().on_headers_complete()
        self._in_head = False
        self._unanswered += 1
        self._all.begin_answer(self)
        if self.expect_100_continue or not self.cycle.keep_alive:
            # Whether the client still sends the body it asked about cannot be known, so nothing may follow it.
            self.cycle.keep_alive = False
            self.cycle.transport = LastResponseTransport(self)  # type: ignore[assignment]  # has what is used of a transport
        if self._unanswered > 1:
            self._limit_wait()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        """Note that a request is complete."""
        self._body_skipped = self.parser.should_upgrade() and bool(self._framing())
        if self._body_skipped:
            return
        super().on_message_complete()
        self._receiving = False
        self._limit_wait()

    # ---- what the app says -------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        self.server_state.total_requests += 1
        self._unanswered -= 1
        if self._finished or self.transport.is_closing():
            self._finish()
        elif self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            self._read_on()
        elif self._last_answer is not None:
            self._send_last(self._last_answer)
        else:
            self._all.begin_wait(self)
            self._read_on()

    def _read_on(self) -> None:
        """Read what the client has sent meanwhile, unless requests have to wait for those before them."""
        if not self.pipeline and not self._discarding:
            self.flow.resume_reading()
            rest, self._unparsed = self._unparsed, b""
            self._parse(rest)
        self._limit_wait()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def refuse(self, problem: ProblemError) -> None:
        """Answer what cannot be read, after the requests before it; then close."""
        self._problems[problem.kind] += 1
        self._discarding = True
        if self._receiving and not self._in_head:  # the body of a request is at fault
            if not self._unanswered or self.cycle.response_started:
                self.drop()  # the answer to it was sent before
                return
            self._unanswered -= 1
            if self.pipeline:
                self.pipeline.popleft()  # the latest request; the app does not know of it yet
            else:
                self.cycle.disconnected = True
                self.cycle.message_event.set()  # the app need not answer it
        if self._unanswered:
            self._last_answer = problem.reply()
        else:
            self._send_last(problem.reply())

    def _send_last(self, reply: HTTPReply) -> None:
        self.transport.write(encode(reply, (*self.server_state.default_headers, CONNECTION_CLOSE)))
        self._discard_input()

    def _discard_input(self) -> None:
        """Send nothing more, and throw away what comes until the client closes the connection or its time is over."""
        self._finish()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def _finish(self) -> None:
        """Forget what is not answered; from now on the connection can be closed at any time."""
        self._discarding = self._finished = True
        self._unparsed = b""
        self.pipeline.clear()
        self._all.begin_wait(self)
        self._limit_wait()

    def end_after_answer(self) -> None:
        """Close; if the client is still sending, only after it has had time to read the answer."""
        if self._receiving:
            self._discard_input()
        else:
            self._close()

    def _close(self) -> None:
        """Close as soon as the client has taken what it was sent."""
        self.transport.close()
        self._finish()

    def drop(self) -> None:
        """Close at once."""
        self.transport.abort()
        self._finish()

    def shutdown(self) -> None:
        """Close after the requests under way; refuse the one that is not complete: the service stops."""
        if not self._unanswered:
            self._close()
        elif self._receiving and not self._in_head and not self._discarding:
            self.refuse(ProblemError("stopping"))
        elif self._last_answer is None:
            self._discarding = True
            self.cycle.keep_alive = False  # the latest

    # ---- time --------------------------------------------------------------------------------------------------------

    def _limit_wait(self) -> None:
        """Bound how long the client may take for what it has to do next."""
        next_to_read = 1 if self._in_head else 2  # a request behind this one is not read now
        if (
            self._finished
            or self.flow.write_paused
            or self.transport.is_closing()
            or (self._receiving and self._unanswered < next_to_read)
        ):
            self.ticks_left = min(self.ticks_left, self._all.read_ticks)
        else:
            self.ticks_left = NEVER_TICKS if self._unanswered else self._all.idle_ticks

    def expire(self) -> None:
        """End the connection of a client that took too long."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and (not self._unsent or unsent <= self._unsent - MIN_SENT):
            self._unsent = unsent
            self.ticks_left = self._all.read_ticks  # slow, but not dead
        elif unsent or self._finished:
            self.drop()
        elif self._unanswered:
            self.refuse(ProblemError("timeout", f"not received within {self._all.read_timeout:g} s"))
        else:
            self._close()


class LastResponseTransport:
    """The transport of a request that is the last one of its connection."""

    __slots__ = ("_connection", "is_closing", "write")

    def __init__(self, connection: HttpConnection) -> None:
        """Write to this connection."""
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """End the connection, as soon as the client can have read the answer."""
        self._connection.end_after_answer()


def encode(reply: HTTPReply, more: Fields = ()) -> bytes:
    """Write an answer as HTTP/1."""
    status, body, kind, headers = reply
    fields: tuple[tuple[bytes, bytes], ...] = (
        (b"content-type", kind),
        (b"content-length", b"%d" % len(body)),
        *SECURITY_HEADERS,
        *headers,
        *more,
    )
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, HTTPStatus(status).phrase.encode(), fields_of(fields), body)


def fields_of(fields: Fields) -> bytes:
    """Write header fields."""
    return b"".join(b"%s: %s\r\n" % field for field in fields)
