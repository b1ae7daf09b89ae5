"""One HTTP/1 connection: requests in every form, and refused input."""

import json

import pytest

from tests.cases import cases
from tests.service.connection_harness import (
    CHUNKED,
    GET,
    HEALTHY,
    IDLE,
    OK,
    READ,
    acquire_body,
    chunked,
    post,
    running,
)
from tests.service.harness import ADMIN, DECISION
from tidegate.service._http.protocol import MAX_HEAD

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
            most = max(most, it.service.app.in_flight)
            await it.settle()
        assert set(client.statuses()) == {OK}
        bodies = [body for _, _, body in client.responses()]
        assert bodies[5:] == [HEALTHY] * count
        assert all(b"remaining" in body for body in bodies[:5])
        assert most == 1
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


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "localhost:", "127.0.0.1", "[::1]", "[::1]:80"])
async def test_valid_host_fields(host):
    async with running() as it:
        assert (await it.ask(GET.replace(b"localhost", host.encode()))).statuses() == [OK]
        assert (await it.ask(b"GET /healthz HTTP/1.0\r\n\r\n")).statuses() == [OK]


async def test_responses_of_a_draining_service_close_their_connections():
    async with running() as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        usual = it.connect(post(acquire_body()))
        waiting = await it.ask(post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode()))
        half = await it.ask(post(acquire_body())[:-5])
        it.server.begin_drain()
        usual.send(post(acquire_body()) * 2)
        half.send(post(acquire_body())[-5:])
        refused = await it.ask(post(b"", "Content-Length: 5000"))  # while the client is still sending
        it.service.clock.advance(30)
        await it.settle(100)
        for client, statuses in ((usual, [OK, OK]), (waiting, [OK]), (half, [OK]), (refused, [413])):
            assert client.statuses() == statuses
            assert [fields.get("connection") for _, fields, _ in client.responses()][-1] == "close"
            assert client.state == "closed" or (client is refused and client.eof)


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


@cases("size", [1, 50, 5000])
@cases("body", ["none", "length", "chunked"])
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


@pytest.mark.parametrize("fields", [{}, {"timeout": 0.5}], ids=["answered-at-once", "answered-by-a-task"])
async def test_trailer_fields_do_not_change_what_a_request_does(fields):
    trailer = b"Idempotency-Key: same\r\nExpect: 100-continue\r\nHost: evil.example\r\n"
    async with running() as it:
        for _ in range(2):
            client = await it.ask(post(chunked(acquire_body(**fields), trailer=trailer), CHUNKED))
            assert client.statuses() == [OK]
        usage = await it.service.post("usage", {"policy": "api", "key": "k"})
        assert usage.json()["limits"][0]["used"] == 2  # a replayed response would not be charged


# ---- what is refused -------------------------------------------------------------------------------------------------


@cases(
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
        post(chunked(acquire_body()), "Transfer-Encoding: gzip, chunked"),
        post(acquire_body(), "Authorization: Bearer one", "Authorization: Bearer two"),
        post(acquire_body(), "Content-Type: application/json", "Content-Type: text/plain"),
        post(acquire_body(), "Idempotency-Key: one", "Idempotency-Key: two"),
        b"GET /healthz HTTP/2.0\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        GET[:-2] + b"Host: localhost\r\n\r\n",
        post(acquire_body(), "Host: localhost"),
        *(GET.replace(b"localhost", host) for host in (b"a b", b"a/b", b"user@a", b"a:b", b"[::1", b"a\xff")),
    ],
)
async def test_input_that_is_not_http_1_is_refused(sent):
    async with running() as it:
        client = await it.ask(sent)
        assert (client.statuses(), client.problems()) == ([400], ["bad-request"])
        assert (client.eof, it.service.decider.stats.errors.totals()["bad-request"]) == (True, 1)
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


@cases("size", [4096, 100_000])
@cases(
    "head",
    [
        b"GET /" + b"x" * (MAX_HEAD + 2 * 4096) + b" HTTP/1.1\r\n\r\n",
        GET[:-2] + b"x: " + b"y" * (MAX_HEAD + 2 * 4096) + b"\r\n\r\n",
        GET[:-2] + b"z" * (MAX_HEAD + 2 * 4096) + b": y\r\n\r\n",
        GET[:-2] + b"a: b\r\n" * (MAX_HEAD // 5) + b"\r\n",
    ],
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
        client = await it.ask(GET + GET[:-2] + b"x: " + b"y" * (MAX_HEAD - 2 * 4096) + b"\r\n\r\n" + GET)
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
