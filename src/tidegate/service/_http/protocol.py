"""One HTTP/1 connection: an asyncio protocol that parses with httptools, with bounds on the size and time of requests.

- A connection handles one request at a time (see `State` for what happens in which state): its head is parsed,
  checked and authenticated once, its body is decoded once, and the App answers at once or in a task. Input that arrives
  meanwhile is kept, and no more is read.
- A request has to be complete within `read_timeout`, and an idle connection is closed after `idle_timeout`.
- A client that does not read its responses is disconnected after `read_timeout`; until then, nothing more is decided.
- A head has at most `MAX_HEAD` bytes, a whole request at most `MAX_OVERHEAD` times `max_body`, including its framing.
- A request that is refused by its head is answered before its body arrives; the body is then discarded.
- A request for another protocol (`Upgrade`, as Java's client sends it) is handled like any other, including its body.
- If the client disconnects, its request is cancelled, so that it is not charged without a response.
- Trailer fields are dropped: they could replace header fields that were checked.
- A head that a proxy may have read in another way is refused, as RFC 9112 demands or allows (`auth.check_fields`).
- While the service drains, each response has `Connection: close`, and the connection is closed after it.
- Invalid input gets problem details as the last response, after those to the requests before it. The client can read
  it although it may still be sending: further input is discarded, until the client closes or `read_timeout` has passed.

The parser gets the input in pieces that end where a request may end, so a piece never contains parts of two requests.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from tidegate.errors import ConfigError
from tidegate.service._api.problems import HTTPReply, ProblemError
from tidegate.service._http.auth import check_fields
from tidegate.service._http.connections import NEVER_TICKS
from tidegate.service._http.encoding import CONTINUE, write_fields
from tidegate.service._http.request_head import OTHER, RequestHead

try:
    import httptools
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("the service needs httptools: pip install 'tidegate[service]'") from _error

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from tidegate.service._http.app import App
    from tidegate.service._http.connections import Connections
    from tidegate.service._http.encoding import HttpWriter
    from tidegate.service._http.request_head import KnownHeads, Reply

log: logging.Logger = logging.getLogger("tidegate.service")

MAX_HEAD: Final = 64 * 1024  # bytes of the request line and the header fields
MAX_OVERHEAD: Final = 8  # bytes sent for each byte of a body: a chunk of 1 byte has 6
MAX_TURN: Final = 64  # pipelined requests answered at once, so that other connections get their turn; or one batch
MIN_SENT: Final = 16 * 1024  # bytes of a long response that a client has to read within `read_timeout`
END: Final = b"\r\n\r\n"  # of a head, and of a chunked body
FRAMING_HEADERS: Final = (b"content-length", b"transfer-encoding")


class State(NamedTuple):
    """What a connection is doing, and what happens meanwhile.

    `waits_for` is who has to act next: if there are too many connections, the longest wait for a client is ended.
    `seconds` is how long it may last: as `idle_timeout` or `read_timeout` says, or "unlimited". `input` is what becomes
    of further input. `late`, `invalid` and `stop` are the reactions to the end of that time, to input that is not HTTP,
    and to the stop of the service: "close" after what was sent, "drop" at once, "refuse" with a last response, "finish"
    the request first, "ignore".
    """

    name: str
    waits_for: str
    seconds: str
    input: str
    late: str
    invalid: str
    stop: str


# IDLE: waits for a request; HEAD, BODY: receives it; HANDLING: in a task; SKIPPING: receives the rest of a request that
# was answered; FINISHED: has sent the last response, until the client closes; CLOSING: until the client has read it.
IDLE, HEAD, BODY, HANDLING, SKIPPING, FINISHED, CLOSING = (
    #     name        waits for  seconds      input        late      invalid   stop
    State("idle",     "client",  "idle",      "parsed",    "close",  "refuse", "close"),
    State("head",     "client",  "read",      "parsed",    "close",  "refuse", "close"),
    State("body",     "service", "read",      "parsed",    "refuse", "refuse", "refuse"),
    State("handling", "service", "unlimited", "kept",      "ignore", "ignore", "finish"),
    State("skipping", "client",  "read",      "parsed",    "close",  "drop",   "close"),
    State("finished", "client",  "read",      "discarded", "drop",   "ignore", "ignore"),
    State("closing",  "client",  "read",      "discarded", "drop",   "ignore", "ignore"),
)  # fmt: skip


class HttpConnection(asyncio.Protocol):
    """One connection of a client."""

    transport: asyncio.Transport

    def __init__(
        self,
        app: App,
        connections: Connections,
        heads: KnownHeads,
        writer: HttpWriter,
        tasks: set[asyncio.Task[Any]],
    ) -> None:
        """Serve this app, within the bounds of these connections; `tasks` gets the running requests."""
        self.ticks_left: int = connections.read_ticks
        self.address: str = ""
        self.timed_as: str = ""
        self.state: State = IDLE
        self._app = app
        self._connections = connections
        self._idle_ticks = connections.idle_ticks
        self._heads = heads
        self._find_head = heads.find
        self._writer = writer
        self._tasks = tasks
        self._steady = app.decider.store.clock.steady
        self._latency = app.decider.stats.latency
        self._parser = httptools.HttpRequestParser(self)
        self._unparsed = b""
        self._position = 0  # of the first byte in `_unparsed` that was not parsed
        self._turn_left = MAX_TURN  # requests that may be answered before other connections get their turn
        self._next_turn: asyncio.Handle | None = None
        self._paused = False  # reading
        self._write_paused = False
        self._unsent = 0  # bytes that the client had not read at the last check
        self._stopping = False  # the service stops: close after the requests that have arrived
        self._task: asyncio.Task[None] | None = None  # handles the request
        # The request that is being received or handled:
        self._counted = False  # as active; a request that is answered at once is not
        self._start = 0  # when it began, in steady time
        self._head: RequestHead | None = None
        self._size = 0  # bytes so far
        self._body_left = 0  # bytes that are missing in a body with a Content-Length
        self._body: list[bytes] = []
        self._body_size = 0
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._method = ""
        self._version = ""
        self._keep_alive = self._upgrade = False
        self._head_complete = self._complete = self._overrun = False  # what the parser has found
        self._body_skipped = False  # the parser expects another protocol instead of the body

    # ---- the transport -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        self.transport = transport  # type: ignore[assignment]  # a stream
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - as asyncio calls it
        """Cancel the request of a client that is gone."""
        self._connections.remove(self)
        self._abandon()

    def eof_received(self) -> None:
        """Cancel the request that is being handled; then the transport closes, and what is written is dropped."""
        self._abandon()

    def _abandon(self) -> None:
        self.state = CLOSING
        self._unparsed = b""
        self._end_request()
        if self._task is not None:
            self._task.cancel()  # the store refunds what was charged

    def data_received(self, data: bytes) -> None:
        """Answer a complete request with a known head; parse other input, unless a request is being handled."""
        if self.state is IDLE and not self._unparsed and not self._write_paused:
            size = data.find(END) + len(END)
            head = self._find_head(data[:size])
            if (
                head is not None
                and len(data) == size + head.body_size  # type: ignore[operator]  # as remembered
                and not self._app.is_busy
            ):
                self._complete = True
                self.timed_as = OTHER
                self._handle(head, data[size:])
                return
        elif self.state.input == "discarded":
            return
        self._unparsed = self._unparsed + data if self._unparsed else data
        if self._next_turn is None:
            self._turn_left = MAX_TURN
            self._parse()

    def pause_writing(self) -> None:
        """Decide nothing more until the client has read what was sent; it has `read_timeout` to continue."""
        self._write_paused = True
        self.ticks_left = min(self.ticks_left, self._connections.read_ticks)

    def resume_writing(self) -> None:
        """Continue."""
        self._write_paused = False
        self._unsent = 0
        self.ticks_left = self._connections.read_ticks  # nothing was read from the client meanwhile
        self._enter(self.state)
        self._continue()

    def _limit_input(self) -> None:
        """Stop reading while requests wait for an earlier one, or for the client; continue afterwards."""
        waits = self.state is HANDLING or self._write_paused or self._next_turn is not None
        pause = bool(self._unparsed) and waits
        if pause == self._paused or self.transport.is_closing():
            return
        self._paused = pause
        if pause:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # ---- parsing -----------------------------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Parse the input, up to a request that has to be handled in a task."""
        while self.state.input == "parsed" and not self._write_paused and self._position < len(self._unparsed):
            if not self._turn_left:
                self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)
                break
            if not self._take_piece():
                break
        if self.state.input == "discarded":
            self._unparsed = b""
        elif self._position:
            self._unparsed = self._unparsed[self._position :]
        self._position = 0
        if self._unparsed or self._paused:
            self._limit_input()
        if self._stopping and self._next_turn is None:
            self.shutdown()

    def _take_turn(self) -> None:
        self._next_turn = None
        self._continue()

    def _continue(self) -> None:
        """Parse the input that has arrived meanwhile."""
        if self._next_turn is None:
            self._turn_left = MAX_TURN
            self._parse()

    def _take_piece(self) -> bool:
        """Pass input to the parser, at most up to where a request may end; returns whether there was any."""
        data, start = self._unparsed, self._position
        if self._body_left:
            end = min(len(data), start + self._body_left)
            self._body_left -= end - start
        else:  # a head and a chunked body end with an empty line
            found = data.find(END, start)
            end = len(data) - begun_end(data[start:]) if found < 0 else found + len(END)
        piece = data[start:end]
        self._position = end
        if piece:
            self._feed(piece)
        return bool(piece)

    def _feed(self, piece: bytes) -> None:
        """Pass a piece to the parser, and react to what it found."""
        self._head_complete = False
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            if self._body_skipped:
                self._parse_body_anyway()
        except httptools.HttpParserError as error:
            self._refuse(ProblemError("bad-request", f"this is not an HTTP/1 request: {error}"[:200]))
            return
        if self.state is not IDLE:
            self._size += len(piece)
        if self._overrun:
            self._refuse(ProblemError("bad-request", "a request must end with an empty line, or after its body"))
        elif self._size > (MAX_HEAD if self.state is HEAD else self._max_request):
            self._refuse(self._too_large())
        else:
            self._advance(piece)

    def _advance(self, piece: bytes) -> None:
        """Go on after a piece."""
        if self._head_complete:
            self._begin_request(piece)
        if self.state is BODY:
            if self._body_size > self._app.settings.max_body:
                self._answer(self._app.refuse(self._app.too_large))
            elif self._complete:
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._handle(self._head, body)  # type: ignore[arg-type]  # set with the state
        elif self.state is SKIPPING and self._complete:
            self._enter(IDLE)

    @property
    def _max_request(self) -> int:
        return MAX_HEAD + MAX_OVERHEAD * self._app.settings.max_body

    def _too_large(self) -> ProblemError:
        if self.state is HEAD:
            return ProblemError("head-too-large", f"the head of a request must not exceed {MAX_HEAD} bytes")
        detail = f"a request must not exceed {self._max_request} bytes, including its framing"
        return ProblemError("too-large", detail)

    def _parse_body_anyway(self) -> None:
        """Parse the body of a request for another protocol: the parser assumes that there is none."""
        self._parser = httptools.HttpRequestParser(self)
        framing = [field for field in self._fields if field[0] in FRAMING_HEADERS]
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % write_fields(framing))
        self._body_skipped = False

    # ---- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Record that a request begins."""
        if self._body_skipped:
            return
        if self.state is not IDLE:
            self._overrun = True
            return
        self._url = b""
        self._fields = []
        self._body = []
        self._size = self._body_size = 0
        self._complete = False
        self._enter(HEAD)

    def on_url(self, url: bytes) -> None:
        """Keep a part of the URL."""
        if not self._body_skipped:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header field; drop a trailer field, which could otherwise replace a checked header field."""
        if self.state is HEAD and not self._body_skipped:
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Keep what the parser knows about the head."""
        if self._body_skipped:
            return
        parser = self._parser
        self._method, self._version = parser.get_method().decode("ascii"), parser.get_http_version()
        self._upgrade = parser.should_upgrade()
        self._keep_alive = self._version != "1.0" and parser.should_keep_alive()
        self._head_complete = True

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, unless the request was answered already or it is too large."""
        if self.state is not SKIPPING and self._body_size <= self._app.settings.max_body:
            self._body.append(body)
            self._body_size += len(body)

    def on_message_complete(self) -> None:
        """Record that the request is complete."""
        if self._body_skipped:  # the body has no bytes
            self._complete = True
        else:
            self._body_skipped = self._parser.should_upgrade() and any(
                name in FRAMING_HEADERS for name, _ in self._fields
            )
            self._complete = not self._body_skipped

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _begin_request(self, piece: bytes) -> None:
        """Check the head of a request, and answer it now or when its body is complete."""
        app = self._app
        headers = dict(self._fields)
        length = headers.get(b"content-length", b"0")
        chunked = b"transfer-encoding" in headers
        self._body_left = 0 if chunked or self._complete else int(length)
        self._counted = True
        app.in_flight += 1
        self._start = self._steady()
        self.timed_as = OTHER
        expects = self._version != "1.0" and headers.get(b"expect", b"").lower() == b"100-continue"
        try:
            check_fields(self._fields, self._version)
            path, query = split_url(self._url)
        except ProblemError as problem:
            self._refuse(problem)
            return
        method, keep_alive = self._method, self._keep_alive
        head = self._head = RequestHead(None, method, path, query, headers, None, keep_alive)
        route = None
        try:
            route = app.find_route(path)
            app.check_head(route, method, headers)
        except ProblemError as problem:
            self.timed_as = OTHER if route is None else route.name
            # A client that expects 100 may send the body or not, so nothing can follow. Nor after a very long body.
            if expects or self._body_left > self._max_request:
                self._head = head._replace(keep_alive=False)
            self._answer(app.refuse(problem))
            return
        head = self._head = head._replace(route=route, body_size=None if chunked else int(length))
        if keep_alive and not chunked and not expects and not self._upgrade and self._size == len(piece):
            self._heads.remember(piece, head)
        if route.verb is None:
            self._handle(head, b"")
        else:
            if expects and not self._complete:
                self.transport.write(CONTINUE)
            self._enter(BODY)

    def _handle(self, head: RequestHead, body: bytes) -> None:
        """Answer a complete request, at once if possible. This is the path of nearly all requests."""
        app, route = self._app, head.route
        start = self._steady()
        try:
            reply = route.run(head, body, self)  # type: ignore[union-attr]  # the head was checked
        except Exception as error:  # noqa: BLE001 - any error becomes a response
            reply = app.refuse(error, head.path)
        if reply.__class__ is bytes and self.state is IDLE and not app.draining:  # its head is known
            self._latency[route.name].add(self._steady() - start)  # type: ignore[union-attr]  # as above
            if self.ticks_left != self._idle_ticks:  # once in a tick is enough
                self.ticks_left = self._idle_ticks  # before the write, which may shorten it
                self._connections.renew_wait(self)
            self.transport.write(b"%b%d\r\n\r\n%b" % (self._writer.json_start, len(reply), reply))
            return
        self._head, self._start = head, start
        if self.timed_as is OTHER:
            self.timed_as = route.name  # type: ignore[union-attr]  # as above
        self._turn_left -= MAX_TURN if self.timed_as == "batch" else 1
        if reply.__class__ is bytes or reply.__class__ is HTTPReply:
            self._answer(reply)
            return
        self._enter(HANDLING)
        if not self._counted:
            self._counted = True
            app.in_flight += 1
        task = self._task = asyncio.get_running_loop().create_task(self._respond(reply))  # type: ignore[arg-type]  # as checked
        self._tasks.add(task)
        task.add_done_callback(self._handled)

    async def _respond(self, running: Awaitable[Reply]) -> None:
        """Send the response as soon as it is known, and go on.

        Not in a callback of the task: if the client disconnected before it ran, the call would be charged without a
        response, and could no longer be cancelled.
        """
        try:
            reply = await running
        except Exception as error:  # noqa: BLE001 - any error becomes a response
            reply = self._app.refuse(error, self._head.path if self._head else "")
        self._task = None
        if self.state is HANDLING:
            self._answer(reply)
            self._continue()

    def _handled(self, task: asyncio.Task[None]) -> None:
        """Forget a task that has ended."""
        self._tasks.discard(task)
        if task.cancelled():
            self._task = None
            if self.state is HANDLING:  # the event loop ends
                self.drop()

    def _end_request(self) -> None:
        """Count the request as no longer active."""
        if self._counted:
            self._counted = False
            self._app.end_request(self.timed_as, self._start)

    # ---- responses ---------------------------------------------------------------------------------------------------

    def _answer(self, reply: Reply) -> None:
        """Send the response to the current request."""
        head = self._head
        if self._counted:
            self._end_request()
        else:
            self._latency[self.timed_as].add(self._steady() - self._start)
        last = self._app.draining or head is None or not head.keep_alive
        if reply.__class__ is bytes and not last and head.method != "HEAD":  # type: ignore[union-attr]  # else it is the last
            data = b"%b%d\r\n\r\n%b" % (self._writer.json_start, len(reply), reply)
        else:
            found = HTTPReply(200, reply) if isinstance(reply, bytes) else reply
            data = self._writer.write(found, head=head is not None and head.method == "HEAD", last=last)
        if last:
            self.transport.write(data)
            if self._complete:
                self._close()
            else:
                self._finish()
            return
        self._enter(IDLE if self._complete else SKIPPING)
        self.transport.write(data)

    def _refuse(self, problem: ProblemError) -> None:
        """Send a problem as the last response; what follows it is unknown or not wanted."""
        if self.state.invalid == "drop":
            self._app.decider.stats.errors.add(problem.kind)
            self.drop()  # the response to this request was sent before
            return
        reply = self._app.refuse(problem)
        self._end_request()
        self.transport.write(self._writer.write(reply, last=True))
        self._finish()

    def _finish(self) -> None:
        """Send nothing more, and discard input until the client closes the connection or times out."""
        self._enter(FINISHED)
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        if not self.transport.is_closing() and self.transport.can_write_eof():
            self.transport.write_eof()

    def _close(self) -> None:
        """Close as soon as the client has read what was sent."""
        self._enter(CLOSING)
        self._unparsed = b""
        self.transport.close()

    def drop(self) -> None:
        """Close at once."""
        self._end_request()
        self._enter(CLOSING)
        self._unparsed = b""
        self.transport.abort()

    def shutdown(self) -> None:
        """Close after the requests that have arrived, because the service stops; refuse an incomplete request."""
        reaction = "finish" if self._next_turn is not None else self.state.stop
        if reaction == "finish":
            self._stopping = True
        elif reaction == "close":
            self._close()
        elif reaction == "refuse":
            self._refuse(ProblemError("stopping"))

    # ---- time --------------------------------------------------------------------------------------------------------

    def _enter(self, state: State) -> None:
        """Change the state, and bound its time."""
        before, self.state = self.state, state
        connections = self._connections
        if state.waits_for == "service":
            connections.begin_request(self)
        elif before.waits_for == "service":
            connections.begin_wait(self)
        elif state is IDLE:
            connections.renew_wait(self)
        if state.seconds == "unlimited":
            ticks = NEVER_TICKS
        elif state.seconds == "idle":
            ticks = connections.idle_ticks
        elif state is before or state.input == "discarded" or (before, state) == (HEAD, BODY):
            ticks = min(self.ticks_left, connections.read_ticks)  # of the same request, or at the end
        else:
            ticks = connections.read_ticks
        self.ticks_left = min(ticks, connections.read_ticks) if self._write_paused else ticks

    def expire(self) -> None:
        """React to a client that took too long."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and (not self._unsent or unsent <= self._unsent - MIN_SENT):
            self._unsent = unsent
            self.ticks_left = self._connections.read_ticks  # slow, but still reading
            return
        reaction = "drop" if unsent else self.state.late
        if reaction == "drop":
            self.drop()
        elif reaction == "refuse":
            detail = f"the request was not received within {self._connections.read_timeout:g} s"
            self._refuse(ProblemError("timeout", detail))
        elif reaction == "close":
            self._close()


def begun_end(data: bytes) -> int:
    """Return how many bytes at the end of the input may be the beginning of END."""
    return next((size for size in (3, 2, 1) if data.endswith(END[:size])), 0)


def split_url(url: bytes) -> tuple[str, bytes]:
    """Return the path and the query of the target of a request."""
    try:
        parsed = httptools.parse_url(url)
        path = parsed.path.decode("ascii")
    except (httptools.HttpParserInvalidURLError, AttributeError, ValueError):
        raise ProblemError("bad-request", "the target of the request must be a path") from None
    return unquote(path) if "%" in path else path, parsed.query or b""
