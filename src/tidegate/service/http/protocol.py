"""One HTTP/1 connection: uvicorn's httptools protocol, with bounds on the size and the time of requests.

uvicorn itself never closes a connection whose client is silent or sends a request byte by byte. It does not limit the
size of a head, and it starts an unlimited number of pipelined requests. Here:

- a request has to be complete within `read_timeout`, and an idle connection is closed after `idle_timeout`;
- a client that does not read its responses is disconnected after `read_timeout`;
- a head has at most `MAX_HEAD` bytes, a whole request at most `MAX_OVERHEAD` times `max_body`, including its framing;
- pipelined requests are read a few at a time, and answered in order;
- a request for another protocol (`Upgrade`, as Java's client sends it) is handled like any other, including its body;
- a request whose client disconnects is cancelled, so that it is not charged without a response;
- trailer fields are dropped: uvicorn would add them to the header fields of the request;
- a request with two Host fields, an invalid one, or (since HTTP/1.1) none is refused, as RFC 9112 demands;
- while the service drains, each response has `Connection: close`, and the connection is closed after it;
- an invalid request gets problem details as its response, after the requests before it;
- a client that is refused while it is still sending can read the response: the connection stays open, and further input
  is discarded, until the client closes it or `read_timeout` has passed;
- a common acquire or batch is answered as soon as its last byte is parsed, without a task, a coroutine or an ASGI
  message (`App.find_immediate`), if it arrived whole and no earlier request waits for its response. Its head is parsed
  only the first time (`known_heads`). Everything else goes to the same App.

The attributes of uvicorn's classes that are used here are not documented: tests/service/test_protocol.py lists them,
and pyproject.toml bounds the version.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from tidegate.errors import ConfigError
from tidegate.service.http.app import CANCELS_KEY, CONNECTION_CLOSE, DISCONNECTED_KEY, TASK_KEY, App
from tidegate.service.http.auth import check_host_fields
from tidegate.service.http.connections import NEVER_TICKS, Connections
from tidegate.service.http.encoding import encode, write_fields
from tidegate.service.http.problems import HTTPReply, ProblemError
from tidegate.service.http.response_transport import ResponseTransport

try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("the service needs uvicorn and httptools: pip install 'tidegate[service]'") from error

if TYPE_CHECKING:
    import asyncio

    from uvicorn._types import ASGI3Application
    from uvicorn.config import Config
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

    from tidegate.service.http.app import ImmediateVerb
    from tidegate.service.http.encoding import Fields
    from tidegate.service.http.known_heads import KnownHeads

log: logging.Logger = logging.getLogger("tidegate.service")

PARSE_BYTES: Final = 4096  # bytes passed to the parser at once: bounds the number of active pipelined requests
MAX_HEAD: Final = 64 * 1024  # bytes of the request line and the header fields, exact to PARSE_BYTES
MAX_OVERHEAD: Final = 8  # bytes sent for each byte of a body: a chunk of 1 byte has 6
MAX_IMMEDIATE: Final = 64  # pipelined requests answered at once, so that other connections get their turn; or one batch
MIN_SENT: Final = 16 * 1024  # bytes of a long response that a client has to read within `read_timeout`
FRAMING_HEADERS: Final = (b"content-length", b"transfer-encoding")


class HttpConnection(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(
        self, config: Config, state: ServerState, app: App, connections: Connections, heads: KnownHeads
    ) -> None:
        """Serve this app, within the bounds of these connections."""
        super().__init__(config, state, {})
        self.logger: logging.Logger = log
        self.ticks_left: int = connections.read_ticks
        self._problems = app.decider.stats.errors
        self._app = app
        self._heads = heads
        self._input = b""  # what is being parsed, if it began with a new request
        self._find_immediate = app.find_immediate
        self._max_body = app.settings.max_body
        self._immediate: ImmediateVerb | None = None  # the verb of the request that is being received
        self._body = b""  # of that request
        self._immediate_left = MAX_IMMEDIATE  # requests that may be answered at once, of the input of one event
        self._connections = connections
        self._max_request = MAX_HEAD + MAX_OVERHEAD * app.settings.max_body
        self._receiving = False  # a request has begun and is not complete
        self._in_head = False
        self._body_skipped = False  # the parser expects another protocol instead of the body
        self._size = 0  # bytes of the request that is being received
        self._unanswered = 0  # requests whose head is complete and whose response is not
        self._unparsed = b""  # input after pipelined requests
        self._discarding = False  # further input is discarded
        self._last_reply: HTTPReply | None = None  # sent after the active requests
        self._finished = False  # the last response was sent
        self._current_cycle: RequestResponseCycle | None = None  # the request that the app began to handle last
        self._unsent = 0  # bytes that the client had not read at the last check

    # ---- the transport -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Count the connection."""
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection, and notify the app."""
        self._connections.remove(self)
        self._finish()
        super().connection_lost(exc)
        self._cancel_request()

    def eof_received(self) -> None:
        """Cancel the request that is being handled; then the transport closes, and what is written is dropped."""
        self._cancel_request()

    def _cancel_request(self) -> None:
        """Cancel the request that is being handled, once: its client is gone."""
        cycle = self._current_cycle
        if cycle is not None and not cycle.response_started and DISCONNECTED_KEY not in cycle.scope:
            cycle.scope[DISCONNECTED_KEY] = True  # type: ignore[typeddict-unknown-key]  # read by the app
            cycle.disconnected = True  # else uvicorn logs that there is no response
            task = cycle.scope.get(TASK_KEY)
            if task is not None:
                task.cancel()  # type: ignore[attr-defined]  # the app put its task there

    def data_received(self, data: bytes) -> None:
        """Answer a known request, or parse the input, unless earlier requests have to be answered first."""
        is_new = not (self._receiving or self._unanswered or self._discarding)
        if self._discarding or (is_new and self._answer_known(data)):
            return
        self._immediate_left = MAX_IMMEDIATE
        if self.pipeline or self._unparsed:
            self._unparsed += data
            self.flow.pause_reading()
        else:
            self._input = data if is_new else b""
            self._parse(data)
            self._input = b""

    def _answer_known(self, data: bytes) -> bool:
        """Answer a common request at once, without parsing its head, if the head is known."""
        known = self._heads.find(data)
        if known is None or self._app.is_busy or self.flow.write_paused:
            return False
        return self._answer_now(known.verb, data[known.size :])

    def _parse(self, data: bytes) -> None:
        """Parse chunk by chunk, until requests have to wait for earlier ones."""
        for start in range(0, len(data), PARSE_BYTES):
            if self.pipeline:
                self._unparsed = data[start:]
                self.flow.pause_reading()
                return
            chunk = data[start : start + PARSE_BYTES]
            self._feed(chunk)
            if self._discarding:
                return
            if self._receiving:
                self._size += len(chunk)
                if self._size > (MAX_HEAD if self._in_head else self._max_request):
                    self._refuse_size()
                    return
        if self._immediate is not None:
            self._continue_in_cycle()  # the rest of the body has not arrived yet

    def _feed(self, chunk: bytes) -> None:
        """Pass a chunk to the parser; refuse input that is not HTTP/1."""
        while chunk:
            try:
                self.parser.feed_data(chunk)
            except httptools.HttpParserUpgrade as upgrade:
                chunk = chunk[upgrade.args[0] :]  # no other protocol is supported: continue with HTTP/1
                self._parse_body_anyway()
            except httptools.HttpParserError as error:
                found = error.__context__  # what a callback has raised
                problem = found if isinstance(found, ProblemError) else None
                self.refuse(problem or ProblemError("bad-request", f"this is not an HTTP/1 request: {error}"[:200]))
                return
            else:
                return

    def _parse_body_anyway(self) -> None:
        """Parse the body of a request for another protocol: the parser assumes that there is none."""
        if self._body_skipped:
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % write_fields(self._framing()))
            self._body_skipped = False

    def _framing(self) -> Fields:
        return [(name, value) for name, value in self.scope["headers"] if name in FRAMING_HEADERS]

    def _refuse_size(self) -> None:
        if self._in_head:
            self.refuse(ProblemError("head-too-large", f"the head of a request must not exceed {MAX_HEAD} bytes"))
        else:
            self.refuse(
                ProblemError("too-large", f"a request must not exceed {self._max_request} bytes, including its framing")
            )

    def pause_writing(self) -> None:
        """Stop sending until the client has read what was sent; the client has `read_timeout` to continue."""
        super().pause_writing()
        self._limit_wait()

    def resume_writing(self) -> None:
        """Continue sending."""
        super().resume_writing()
        self._unsent = 0
        self._limit_wait()

    # ---- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Record that a request begins."""
        if self._body_skipped:
            return
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._receiving = self._in_head = True
        self._size = 0
        if not self._unanswered:
            self.ticks_left = self._connections.read_ticks

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header field; drop a trailer field, which could otherwise replace a checked header field."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to handle the request, unless it can be answered at once when it is complete."""
        if self._body_skipped:
            return
        parser = self.parser
        check_host_fields(self.headers, parser.get_http_version())
        if (
            not self._unanswered
            and self._immediate_left > 0
            and not self.transport.is_closing()
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self.expect_100_continue
            and not self.flow.write_paused
            and (verb := self._find_immediate(self.url, self.headers)) is not None
        ):
            self._immediate = verb
            self._body = b""
            self._in_head = False
        else:
            self._start_cycle()

    def _start_cycle(self) -> None:
        """Start to handle the request as an ASGI application does, in a task."""
        self._immediate = None
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # creates the scope
        self.url, self.headers, self.expect_100_continue = url, headers, expect
        self.scope["headers"] = headers
        super().on_headers_complete()
        self._in_head = False
        self._unanswered += 1
        self._connections.begin_request(self)
        # Any response may be the last one: that of a request that is active when the service begins to drain, too.
        self.cycle.transport = ResponseTransport(self)  # type: ignore[assignment]  # has all methods that are used
        if self.expect_100_continue:
            self.cycle.keep_alive = False  # whether the client still sends the body is unknown
        if self._unanswered > 1:
            self._limit_wait()

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        if self._immediate is None:
            super().on_body(body)
        elif len(self._body) + len(body) <= self._max_body:
            self._body += body
        else:
            self._continue_in_cycle(body)

    def _continue_in_cycle(self, more: bytes = b"") -> None:
        """Handle a request in a task after all: with the body so far, and `more`."""
        body, self._body = self._body + more, b""
        self._start_cycle()
        if body:
            super().on_body(body)

    def _answer_now(self, verb: ImmediateVerb, body: bytes) -> bool:
        """Answer a complete request at once, if that is possible."""
        try:
            response = verb.reply(body)
        except ProblemError as problem:  # the request failed, and may have been charged
            self._immediate, self._receiving = None, False
            self.refuse(problem)
            return True
        if response is None:
            return False
        if self.ticks_left != self._connections.idle_ticks:  # once in a tick is enough
            self.ticks_left = self._connections.idle_ticks  # before the write, which may shorten it
            self._connections.renew_wait(self)
        self.transport.write(b"%b%d\r\n\r\n%b" % (self._heads.response_start, len(response), response))
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._current_cycle = cycle
        cycle.scope[CANCELS_KEY] = True  # type: ignore[typeddict-unknown-key]  # read by the app
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        """Record that a request is complete."""
        verb, body = self._immediate, self._body
        if verb is not None:
            if self._answer_now(verb, body):
                self._immediate, self._body, self._receiving = None, b"", False
                self._immediate_left -= MAX_IMMEDIATE if verb.verb.name == "batch" else 1
                if self._input:
                    self._heads.remember(self._input, verb, len(body))
                return
            self._continue_in_cycle()
        self._body_skipped = self.parser.should_upgrade() and bool(self._framing())
        if self._body_skipped:
            return
        super().on_message_complete()
        self._receiving = False
        self._limit_wait()

    # ---- responses ---------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Continue with the next request."""
        self._unanswered -= 1
        if self._finished or self.transport.is_closing():
            self._finish()
        elif self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            self._resume_parsing()
        elif self._last_reply is not None:
            self._send_last(self._last_reply)
        else:
            self._connections.begin_wait(self)
            self._resume_parsing()

    def _resume_parsing(self) -> None:
        """Read the input that arrived meanwhile, unless requests have to wait for earlier ones."""
        if not self.pipeline and not self._discarding:
            self.flow.resume_reading()
            rest, self._unparsed = self._unparsed, b""
            self._parse(rest)
        self._limit_wait()

    # ---- closing -----------------------------------------------------------------------------------------------------

    def refuse(self, problem: ProblemError) -> None:
        """Send a problem as the last response, after the earlier requests; then close."""
        self._problems[problem.kind] += 1
        if self._immediate is not None:
            self._continue_in_cycle()  # the rest of its body is invalid
        self._discarding = True
        if self._receiving and not self._in_head:  # the body of a request is invalid
            if not self._unanswered or self.cycle.response_started:
                self.drop()  # its response was sent before
                return
            self._unanswered -= 1
            if self.pipeline:
                self.pipeline.popleft()  # the latest request, which the app has not seen yet
            else:
                self.cycle.disconnected = True
                self.cycle.message_event.set()  # the app need not respond to it
        if self._unanswered:
            self._last_reply = problem.reply()
        else:
            self._send_last(problem.reply())

    def _send_last(self, reply: HTTPReply) -> None:
        self.transport.write(encode(reply, (*self.server_state.default_headers, CONNECTION_CLOSE)))
        self._discard_input()

    def _discard_input(self) -> None:
        """Send nothing more, and discard input until the client closes the connection or times out."""
        self._finish()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def _finish(self) -> None:
        """Drop unanswered requests; from now on the connection can be closed at any time."""
        self._discarding = self._finished = True
        self._unparsed = b""
        self.pipeline.clear()
        self._connections.begin_wait(self)
        self._limit_wait()

    def close_after_response(self) -> None:
        """Close; if the client is still sending, only after it had time to read the response."""
        if self._receiving:
            self._discard_input()
        else:
            self._close()

    def _close(self) -> None:
        """Close as soon as the client has read what was sent."""
        self.transport.close()
        self._finish()

    def drop(self) -> None:
        """Close at once."""
        self.transport.abort()
        self._finish()

    def shutdown(self) -> None:
        """Close after the active requests, because the service stops; refuse an incomplete request."""
        if not self._unanswered:
            self._close()
        elif self._receiving and not self._in_head and not self._discarding:
            self.refuse(ProblemError("stopping"))
        elif self._last_reply is None:
            self._discarding = True
            self.cycle.keep_alive = False  # the latest

    # ---- time --------------------------------------------------------------------------------------------------------

    def _limit_wait(self) -> None:
        """Bound the time for the next action of the client."""
        next_to_read = 1 if self._in_head else 2  # a later request is not read now
        if (
            self._finished
            or self.flow.write_paused
            or self.transport.is_closing()
            or (self._receiving and self._unanswered < next_to_read)
        ):
            self.ticks_left = min(self.ticks_left, self._connections.read_ticks)
        else:
            self.ticks_left = NEVER_TICKS if self._unanswered else self._connections.idle_ticks

    def expire(self) -> None:
        """Close the connection of a client that took too long."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and (not self._unsent or unsent <= self._unsent - MIN_SENT):
            self._unsent = unsent
            self.ticks_left = self._connections.read_ticks  # slow, but still reading
        elif unsent or self._finished:
            self.drop()
        elif self._unanswered:
            self.refuse(
                ProblemError("timeout", f"the request was not received within {self._connections.read_timeout:g} s")
            )
        else:
            self._close()
