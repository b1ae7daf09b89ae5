"""One HTTP/1 connection and hostile clients: the test controls what is sent, and when."""

import asyncio
import inspect
import json
from contextlib import asynccontextmanager
from importlib.metadata import requires, version

import httptools
import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from tests.service.harness import ADMIN, DECISION, InProcessService
from tidegate.service.http.app import FREE_SHARE_DIVISOR
from tidegate.service.http.connections import NEVER_TICKS, Connections, connections_for_requests, fit_connections
from tidegate.service.http.protocol import MAX_HEAD, MIN_SENT, PARSE_BYTES, HttpConnection
from tidegate.service.http.server import HttpServer

READ, IDLE = 100, 300  # seconds, which are ticks
POLICIES = {"api": "100000/1h", "slow": "1/1h"}
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
OK, HEALTHY = 200, b'{"ok":true}'
HIGH_WATER = 64 * 1024


class ClientTransport(asyncio.Transport):
    """The connection as the client sees it: the bytes that were written, and whether it was closed."""

    def __init__(self, protocol):
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.unsent = None  # None: the client reads everything at once
        self.state = "open"
        self.eof = self.paused = False
        self._inbox = b""
        protocol.connection_made(self)

    # what the protocol does

    def write(self, data):
        assert not self.eof
        if self.state == "open":
            self.written += data
            if self.unsent is not None:
                self.unsent += len(data)
                if self.unsent > HIGH_WATER:
                    self.protocol.pause_writing()

    def write_eof(self):
        self.eof = True

    def can_write_eof(self):
        return True

    def get_write_buffer_size(self):
        return self.unsent or 0

    def is_closing(self):
        return self.state != "open"

    def close(self):
        if self.state == "open":
            self.state = "closing"
            if not self.unsent:
                self._lose(None)

    def abort(self):
        if self.state != "closed":
            self._lose(None)

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False
        asyncio.get_running_loop().call_soon(self.send, b"")

    def _lose(self, error):
        self.state = "closed"
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    # what the client does

    def send(self, data):
        self._inbox += data
        if self._inbox and not self.paused and self.state == "open":
            data, self._inbox = self._inbox, b""
            self.protocol.data_received(data)

    def take(self, count):
        """Read so many of the written bytes."""
        self.unsent = max(0, self.unsent - count)
        if self.unsent < HIGH_WATER // 4:
            self.protocol.resume_writing()
        if self.state == "closing" and not self.unsent:
            self._lose(None)

    def responses(self):
        """Return the responses so far: status, header fields, body."""
        found, data = [], bytes(self.written)
        while data:
            head, _, data = data.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in lines[1:])
            length = int(fields.get("content-length", 0))
            found.append((int(lines[0].split()[1]), fields, data[:length]))
            data = data[length:]
        return found

    def statuses(self):
        return [status for status, _, _ in self.responses()]

    def problems(self):
        """Return the kinds of the problems among the responses."""
        found = []
        for status, fields, body in self.responses():
            if fields.get("content-type") == "application/problem+json":
                assert json.loads(body)["status"] == status
                found.append(json.loads(body)["type"].removeprefix("urn:tidegate:problem:"))
        return found


class SocketlessServer:
    """A server without a socket: the test creates its connections."""

    def __init__(self, service, max_connections):
        self.service = service
        self.connections = Connections(max_connections, READ, IDLE)
        self.server = HttpServer(service.app, self.connections, service.clock)

    def connect(self, data=b""):
        client = ClientTransport(self.server.connect())
        client.send(data)
        return client

    async def ask(self, data):
        """Send on a new connection, and run the app until it has responded."""
        client = self.connect(data)
        await self.settle()
        return client

    async def settle(self, turns=30):
        for _ in range(turns):
            await asyncio.sleep(0)

    async def ticks(self, count):
        for _ in range(count):
            self.connections.tick()
        await self.settle()


@asynccontextmanager
async def running(max_connections=100, **settings):
    async with InProcessService(**{"policies": POLICIES, "max_body": 4096, **settings}) as service:
        it = SocketlessServer(service, max_connections)
        try:
            yield it
        finally:
            await it.server.stop(0)
            await it.settle()
        assert (service.app.in_flight, len(it.connections)) == (0, 0)


def post(body, *fields, path="/v1/acquire"):
    """Write a request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *fields]
    if not any(field.startswith(("Transfer-Encoding", "Content-Length")) for field in fields):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body


def acquire_body(key="k", **more):
    return json.dumps({"policy": "api", "key": key, **more}).encode()


def chunked(body, size=7, trailer=b""):
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


CHUNKED = "Transfer-Encoding: chunked"


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n\r\n", b"G", b"GET /hea", b"GET / HTTP/1.1\r\nHost", GET[:-2]],
    ids=["silent", "empty lines", "one byte", "half a line", "half a field", "half a head"],
)
async def test_a_client_that_sends_no_request_is_disconnected(sent):
    async with running() as it:
        client = await it.ask(sent)
        await it.ticks(READ)
        assert client.state == "open"
        await it.ticks(1)
        assert (client.state, client.written) == ("closed", b"")


@pytest.mark.parametrize("sent", [b"\r\n" * 500, GET[:-2] + b"x: y\r\n" * 100], ids=["empty lines", "a head"])
async def test_a_client_that_sends_byte_by_byte_is_disconnected(sent):
    async with running() as it:
        client = it.connect()
        await it.ticks(READ // 2)
        client.send(sent[:1])
        for byte in sent[1 : 2 * READ]:
            await it.ticks(1)
            client.send(bytes((byte,)))
        assert (client.state, client.written) == ("closed", b"")


@pytest.mark.parametrize(
    "request_", [post(acquire_body()), post(chunked(acquire_body()), CHUNKED)], ids=["length", "chunked"]
)
@pytest.mark.parametrize("dripping", [False, True])
async def test_an_incomplete_body_times_out(request_, dripping):
    async with running() as it:
        client = it.connect(request_[:-20])
        for number in range(READ + 1):
            assert client.written == b""
            await it.ticks(1)
            if dripping and number % 10 == 0:
                client.send(request_[-20 + number // 10 :][:1])
        assert (client.statuses(), client.problems()) == ([408], ["timeout"])
        assert client.responses()[0][1]["connection"] == "close"
        assert it.service.app.in_flight == 0
        assert it.service.decider.stats.errors["timeout"] == 1
        # The client may read that before the connection is closed, but cannot keep it open.
        assert (client.state, client.eof) == ("open", True)
        client.send(b"more")
        await it.ticks(READ + 1)
        assert client.state == "closed"


async def test_an_incomplete_body_of_an_answered_request():
    async with running() as it:
        client = await it.ask(GET[:-2] + b"Content-Length: 10\r\n\r\n1")
        assert client.statuses() == [OK]
        await it.ticks(READ)
        assert client.state == "open"
        await it.ticks(1)
        assert (client.state, client.statuses()) == ("closed", [OK])


async def test_idle_connections_are_closed():
    async with running() as it:
        client = await it.ask(GET)
        await it.ticks(IDLE)
        client.send(GET)
        await it.settle()
        await it.ticks(IDLE)
        assert (client.state, client.statuses()) == ("open", [OK, OK])
        client.send(b"\r\n")  # is no request
        await it.ticks(1)
        assert client.state == "closed"


async def test_each_request_has_its_own_timeout():
    async with running() as it:
        client = await it.ask(GET)
        await it.ticks(IDLE)
        client.send(GET[:10])
        await it.ticks(READ)
        client.send(GET[10:])
        await it.settle()
        assert (client.state, client.statuses()) == ("open", [OK, OK])


async def test_a_waiting_request_does_not_time_out():
    async with running() as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        client = await it.ask(post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode()))
        client.send(GET[:10])  # a second request, not read to its end before the first is answered
        await it.ticks(10 * IDLE)
        assert (client.state, client.written) == ("open", b"")
        it.service.clock.advance(30)
        await it.settle()
        assert client.statuses() == [OK]
        await it.ticks(READ)
        client.send(GET[10:])
        await it.settle()
        assert client.statuses() == [OK, OK]


async def test_an_incomplete_pipelined_request():
    async with running() as it:
        late = await it.ask(GET + post(acquire_body())[:-5])
        assert late.statuses() == [OK]
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode())
        patient = await it.ask(GET + waiting + GET[:10])
        await it.ticks(READ + 1)
        assert late.statuses() == [OK, 408]
        assert patient.statuses() == [OK]  # what is behind a request that waits need not come before its answer
        it.service.clock.advance(30)
        await it.settle()
        patient.send(GET[10:])
        await it.settle()
        assert patient.statuses() == [OK] * 3


async def test_a_client_that_reads_no_responses_is_disconnected():
    async with running(max_body=2**20) as it:
        client = it.connect()
        client.unsent = 0
        asks = json.dumps({"policy": "api", "keys": [str(number) for number in range(900)]}).encode()
        for _ in range(3):
            client.send(post(asks, path="/v1/batch"))
            await it.settle()
        assert client.unsent > HIGH_WATER
        for _ in range(4):  # slow
            await it.ticks(READ)
            client.take(MIN_SENT)
        assert client.state == "open"
        await it.ticks(2 * READ + 2)
        assert client.state == "closed"


async def test_a_client_that_does_not_read_its_last_response():
    async with running() as it:
        client = it.connect()
        client.unsent = 0
        client.send(GET[:-2] + b"Connection: close\r\n\r\n")
        await it.settle()
        assert (client.state, client.statuses()) == ("closing", [OK])
        await it.ticks(2 * READ + 2)
        assert client.state == "closed"


# ---- requests in every form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 50, 1000])
async def test_requests_in_chunks_of_any_size(size):
    sent = GET + post(acquire_body()) + post(chunked(acquire_body()), CHUNKED) + GET
    async with running() as it:
        client = it.connect()
        for start in range(0, len(sent), size):
            client.send(sent[start : start + size])
            await it.settle(3)
        await it.settle()
        assert client.statuses() == [OK] * 4
        remaining = [json.loads(body)["remaining"] for _, _, body in client.responses()[1:3]]
        assert remaining == [99_999, 99_998]
        assert client.state == "open"


async def test_pipelined_requests_are_answered_in_order_and_bounded():
    async with running() as it:
        count = 3000
        client = it.connect(b"".join(post(acquire_body(), "Idempotency-Key: 1") for _ in range(5)) + GET * count)
        most = 0
        while client.written.count(b"HTTP/1.1 ") < count + 5:
            most = max(most, len(client.protocol.pipeline))
            await it.settle()
        assert set(client.statuses()) == {OK}
        bodies = [body for _, _, body in client.responses()]
        assert bodies[5:] == [HEALTHY] * count
        assert all(b"remaining" in body for body in bodies[:5])
        assert most <= 2 * PARSE_BYTES // len(GET)
        await it.ticks(IDLE)
        assert client.state == "open"


async def test_requests_after_one_that_waits():
    async with running() as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode())
        client = await it.ask(waiting + GET + post(acquire_body()))
        for _ in range(100):
            client.send(GET)
            await it.settle(2)
        assert client.paused  # what comes behind them stays in the system's buffers
        assert client.written == b""
        it.service.clock.advance(30)
        await it.settle(400)
        assert client.statuses() == [OK] * 103


async def test_http_1_0_and_close():
    async with running() as it:
        for request in (GET.replace(b"1.1", b"1.0"), GET[:-2] + b"Connection: close\r\n\r\n"):
            client = await it.ask(request + GET)
            assert (client.statuses(), client.state) == ([OK], "closed")
            assert client.responses()[0][1]["connection"] == "close"
        client = await it.ask(b"HEAD /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert client.written.endswith(b"\r\n\r\n")
        assert b"content-length: 11" in client.written


async def test_expect_100_continue():
    async with running() as it:
        head, body = post(acquire_body(), "Expect: 100-continue").split(b"\r\n\r\n")
        client = await it.ask(head + b"\r\n\r\n")
        assert client.written == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        await it.settle()
        assert b'"allowed":true' in client.written
        # One that is refused is not asked for its body. Whether it comes nevertheless is unknown: nothing may follow.
        client = await it.ask(post(b"", "Expect: 100-continue", "Content-Length: 5000"))
        assert (client.problems(), client.eof) == (["too-large"], True)
        assert client.responses()[0][1]["connection"] == "close"
        client.send(GET)
        await it.settle()
        assert client.statuses() == [413]


@pytest.mark.parametrize("size", [1, 50, 5000])
@pytest.mark.parametrize("body", ["none", "length", "chunked"])
async def test_upgrade_requests_are_answered_in_http_1(body, size):
    """As curl --http2 and Java's client ask on each connection."""
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
    request = {
        "none": GET[:-2] + "\r\n".join((*upgrade, "", "")).encode() + b"\r\n",
        "length": post(acquire_body(), *upgrade),
        "chunked": post(chunked(acquire_body()), CHUNKED, *upgrade),
    }[body]
    async with running() as it:
        client = it.connect()
        sent = request + GET + request + request + GET
        for start in range(0, len(sent), size):
            client.send(sent[start : start + size])
            await it.settle(3)
        await it.settle()
        assert client.statuses() == [OK] * 5
        preface = await it.ask(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert preface.problems() == ["bad-request"]
        websocket = await it.ask(GET[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert websocket.statuses() == [OK]


async def test_trailer_fields_are_dropped():
    async with running(decision_token=DECISION, admin_token=ADMIN) as it:
        trailer = f"X-Tidegate-Token: {DECISION}\r\n".encode()
        client = await it.ask(post(chunked(acquire_body(), trailer=trailer), CHUNKED, "Trailer: X-Tidegate-Token"))
        assert client.problems() == ["unauthorized"]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\x03",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\na: b\x00c\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n",
        post(acquire_body(), CHUNKED, "Content-Length: 5"),  # request smuggling
        post(acquire_body(), "Content-Length: 5", "Content-Length: 6"),
        post(acquire_body(), "Content-Length: -1"),
        post(acquire_body(), "Content-Length: 1_0"),
        post(acquire_body(), "Transfer-Encoding: chunked, identity"),
    ],
)
async def test_input_that_is_not_http_1_is_refused(sent):
    async with running() as it:
        client = await it.ask(sent)
        assert (client.statuses(), client.problems()) == ([400], ["bad-request"])
        assert (client.eof, it.service.decider.stats.errors["bad-request"]) == (True, 1)
        client.send(GET)
        await it.settle()
        assert client.statuses() == [400]


async def test_a_refusal_follows_the_earlier_responses():
    async with running() as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode())
        bad_chunk = post(b"zzz\r\n", CHUNKED)
        for bad in (b"\x00garbage", GET + b"\x00garbage", bad_chunk, GET + bad_chunk, GET * 2 + bad_chunk):
            client = await it.ask(waiting + bad)
            await it.ticks(READ + 1)
            assert (client.written, client.state) == (b"", "open")
            it.service.clock.advance(30)
            await it.settle(100)
            assert client.statuses() == [OK] * (1 + bad.count(GET)) + [400]
            assert client.eof


async def test_an_invalid_chunk_is_refused():
    async with running() as it:
        client = await it.ask(post(chunked(acquire_body())[:24], CHUNKED))
        client.send(b"zz\r\n\r\n")
        await it.settle()
        assert (client.problems(), it.service.app.in_flight) == (["bad-request"], 0)
        # ... of a request that is answered already: a second answer would be taken for that of the next request
        client = await it.ask(GET[:-2] + b"Transfer-Encoding: chunked\r\n\r\n")
        assert client.statuses() == [OK]
        client.send(b"zz\r\n")
        await it.settle()
        assert (client.statuses(), client.state) == ([OK], "closed")


@pytest.mark.parametrize("size", [PARSE_BYTES, 100_000])
@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * (MAX_HEAD + 2 * PARSE_BYTES) + b" HTTP/1.1\r\n\r\n",
        GET[:-2] + b"x: " + b"y" * (MAX_HEAD + 2 * PARSE_BYTES) + b"\r\n\r\n",
        GET[:-2] + b"z" * (MAX_HEAD + 2 * PARSE_BYTES) + b": y\r\n\r\n",
        GET[:-2] + b"a: b\r\n" * (MAX_HEAD // 5) + b"\r\n",
    ],
    ids=["line", "value", "name", "fields"],
)
async def test_a_head_that_is_too_large_is_refused(head, size):
    async with running() as it:
        client = await it.ask(GET)
        for start in range(0, len(head), size):
            client.send(head[start : start + size])
            await it.settle(3)
        assert (client.statuses(), client.problems()) == ([OK, 431], ["head-too-large"])
        assert (client.state, client.eof) == ("open", True)  # it may still be sending


async def test_a_large_head_is_accepted():
    async with running() as it:
        client = await it.ask(GET + GET[:-2] + b"x: " + b"y" * (MAX_HEAD - 2 * PARSE_BYTES) + b"\r\n\r\n" + GET)
        assert client.statuses() == [OK] * 3


@pytest.mark.parametrize("fields", [(), ("Connection: close",)], ids=["keep-alive", "close"])
async def test_a_body_that_is_too_large_is_refused(fields):
    async with running() as it:
        large = b" " * 6000
        for request in (post(large, *fields), post(chunked(large, 5000), CHUNKED, *fields)):
            client = it.connect()
            for start in range(0, len(request), 100):
                client.send(request[start : start + 100])
                await it.settle(5)
            assert (client.statuses(), client.problems()) == ([413], ["too-large"])
            assert client.state == "open"  # until the client has read that
            client.send(GET)
            await it.settle()
            assert client.statuses() == ([413] if fields else [413, OK])


async def test_the_framing_of_a_body_is_bounded():
    async with running() as it:
        head = post(b"", CHUNKED)
        client = await it.ask(head + b"1\r\n \r\n" * 4096)  # 1 byte in 6
        assert client.written == b""
        client.send(b"0\r\n")
        for _ in range(MAX_HEAD // 1000 + 20):
            client.send(b"trailer: " + b"x" * 1000 + b"\r\n")
            await it.settle(3)
        assert client.problems() == ["too-large"]


# ---- how many --------------------------------------------------------------------------------------------------------


async def test_the_connection_that_waited_longest_is_closed():
    async with running(max_connections=20) as it:
        silent = [it.connect() for _ in range(18)]
        served = await it.ask(GET)  # idle since now
        half = it.connect(GET[:5])
        new = await it.ask(GET)
        assert [client.state for client in silent] == ["closed"] + ["open"] * 17
        for _ in range(17):
            await it.ask(GET)
        assert {client.state for client in silent} == {"closed"}
        assert (half.state, served.state, new.statuses()) == ("open", "open", [OK])
        await it.ask(GET)  # `half` has waited longer than `served`: it began before that was answered
        assert (half.state, served.state, len(it.connections)) == ("open", "closed", 20)


async def test_requests_leave_connections_for_health_metrics_and_admin():
    bound = connections_for_requests(20)
    tokens = {"decision_token": DECISION, "admin_token": ADMIN}
    async with running(max_connections=20, max_concurrency=bound, **tokens) as it:
        decision, admin = f"X-Tidegate-Token: {DECISION}", f"X-Tidegate-Token: {ADMIN}"
        slow = json.dumps({"policy": "slow", "key": "k"}).encode()
        await it.ask(post(slow, decision))
        waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode(), decision)
        callers = [await it.ask(waiting) for _ in range(bound + 3)]
        may_wait = bound - bound // FREE_SHARE_DIVISOR
        assert [client.problems() for client in callers] == [[]] * may_wait + [["busy"]] * (bound + 3 - may_wait)
        silent = [it.connect() for _ in range(50)]
        assert (await it.ask(GET)).statuses() == [OK]
        assert (await it.ask(GET.replace(b"healthz", b"readyz"))).statuses() == [OK]
        metrics = GET.replace(b"healthz", b"metrics")[:-2] + decision.encode() + b"\r\n\r\n"
        assert (await it.ask(metrics)).statuses() == [OK]
        assert (await it.ask(post(acquire_body(), decision))).statuses() == [OK]  # calls that wait leave room for it
        assert len(it.connections) == 20
        assert sum(client.state == "open" for client in silent) < 6
        assert (await it.ask(post(slow, admin, path="/v1/reset"))).statuses() == [OK]
        await it.settle(100)
        assert callers[0].statuses() == [OK]  # after the reset, the first caller has its permit
        it.service.clock.advance(30)
        await it.settle(100)


async def test_connections_with_active_requests_are_not_closed():
    async with running(max_connections=16, policies=POLICIES) as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode())
        callers = [await it.ask(waiting) for _ in range(16)]
        late = await it.ask(waiting)
        assert (late.state, {client.state for client in callers}) == ("closed", {"open"})
        it.service.clock.advance(30)
        await it.settle(100)
        assert [client.statuses() for client in callers] == [[OK]] * 16


def test_connections_fit_below_the_limit_of_open_files():
    assert fit_connections(8192, None) == 8192
    assert fit_connections(8192, 1_048_576) == 8192
    assert fit_connections(8192, 1024) == 896
    assert fit_connections(500, 1024) == 500
    assert fit_connections(500, 1024, addresses=2) == 448
    assert fit_connections(8192, 64) == 16
    assert [connections_for_requests(count) for count in (16, 100, 896, 8192)] == [12, 75, 864, 8160]


def test_ticks_are_short_enough_for_the_timeouts():
    for read, idle in ((5, 75), (0.05, 75), (3600, 7200), (75, 0.4)):
        bounds = Connections(10, read, idle)
        assert 0 < bounds.tick_seconds <= 1
        assert bounds.read_ticks * bounds.tick_seconds >= read
        assert bounds.idle_ticks * bounds.tick_seconds >= idle
        assert (bounds.read_ticks + 1) * bounds.tick_seconds <= read * 1.25 + 1e-9
        assert bounds.idle_ticks < NEVER_TICKS


def test_a_failing_connection_does_not_keep_others_open(caplog):
    class Late:
        ticks_left = 0
        ended = False

        def __init__(self, fails):
            self.fails = fails

        def expire(self):
            assert not self.fails, "planted"
            self.ended = True

    bounds = Connections(100, READ, IDLE)
    late = [Late(fails=number % 3 == 0) for number in range(30)]
    for connection in late:
        bounds.add(connection)
    bounds.tick()
    assert [connection.ended for connection in late] == [not connection.fails for connection in late]
    assert len(bounds) == 20
    assert caplog.text.count("planted") >= 10


# ---- the end ---------------------------------------------------------------------------------------------------------


async def test_stopping_finishes_active_requests():
    async with running() as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        silent, half_head, idle = it.connect(), it.connect(GET[:9]), await it.ask(GET)
        half_body = await it.ask(post(acquire_body())[:-5])
        caller = await it.ask(post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode()) + GET)
        behind = await it.ask(GET + post(acquire_body())[:-5])
        stopping = asyncio.create_task(it.server.stop(20))
        await it.settle()
        assert {client.state for client in (silent, half_head, idle)} == {"closed"}
        assert half_body.problems() == ["stopping"]
        assert behind.statuses() == [OK, 503]
        assert caller.state == "open"
        it.service.clock.advance(30)
        await it.settle(100)
        assert (caller.statuses(), caller.state) == ([OK, OK], "closed")
        for client in (half_body, behind):
            assert client.eof
            client.close()  # the clients have read their answers
        await stopping
        assert len(it.connections) == 0


async def test_a_client_that_disconnects_before_its_responses():
    async with running() as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode())
        for behind in (b"", GET * 5, GET * 5000, post(acquire_body())[:-5], b"\x00"):
            client = await it.ask(waiting + behind)
            client.abort()
            it.service.clock.advance(30)
            await it.settle(100)
            assert (it.service.app.in_flight, client.written) == (0, b"")


# ---- what is taken from uvicorn --------------------------------------------------------------------------------------


async def test_the_uvicorn_attributes_in_use_exist():
    """None of this is documented: a version in which it has moved must not be allowed by pyproject.toml."""
    async with running() as it:
        client = await it.ask(GET)
        connection = client.protocol
        for name in ("pipeline", "cycle", "flow", "parser", "scope", "headers", "server_state", "expect_100_continue"):
            assert hasattr(connection, name), name
        assert connection.scope["headers"] is not connection.headers
        for name in ("keep_alive", "transport", "disconnected", "message_event", "response_started"):
            assert hasattr(connection.cycle, name), name
        assert isinstance(connection.flow, FlowControl)
        assert connection.flow.write_paused is False
        assert {"tasks", "connections", "default_headers", "total_requests"} <= set(vars(ServerState()))
        base = httptools_impl.HttpToolsProtocol
        for name in [
            "connection_made",
            "connection_lost",
            "data_received",
            "pause_writing",
            "resume_writing",
            "on_message_begin",
            "on_headers_complete",
            "on_body",
            "on_message_complete",
            "on_response_complete",
            "shutdown",
        ]:
            assert callable(getattr(base, name)), name
            assert inspect.signature(getattr(base, name)) is not None
            assert name in vars(HttpConnection), name
        assert list(inspect.signature(base._start_asgi_task).parameters) == ["self", "cycle", "app"]  # noqa: SLF001 - the point
        cycle = inspect.getsource(httptools_impl.RequestResponseCycle)
        used = {name for name in ("write", "close", "is_closing", "write_eof", "abort") if f"transport.{name}" in cycle}
        assert used == {"write", "close", "is_closing"}  # what LastResponseTransport has
        assert issubclass(httptools.HttpParserCallbackError, httptools.HttpParserError)
        assert not issubclass(httptools.HttpParserUpgrade, httptools.HttpParserError)


def test_the_version_of_uvicorn_is_bounded():
    needed = [Requirement(text) for text in requires("tidegate")]
    (uvicorn,) = [each for each in needed if each.name == "uvicorn" and each.marker.evaluate({"extra": "service"})]
    installed = Version(version("uvicorn"))
    assert uvicorn.specifier.contains(installed)
    following = f"{installed.major}.{installed.minor + 1}.0"
    assert not uvicorn.specifier.contains(following), "the next version may have moved what is used of it"
