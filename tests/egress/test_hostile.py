"""Providers that lie, drip or break off, and clients that do: every call ends, and is settled."""

import asyncio
import io
import json
import logging

import aiohttp
import pytest

from tests.egress.harness import KEY, TOKEN, raw, running, settled, used_by

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


class RawProvider:
    """Reads the head of a request, and does what the test says."""

    def __init__(self):
        self.script = None
        self.heads = []
        self.url = ""

    async def connected(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head)
                if await self.script(reader, writer) == "close":
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def upstream():
    provider = RawProvider()
    server = await asyncio.start_server(provider.connected, "127.0.0.1", 0)
    provider.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield provider
    server.close()


def sends(*pieces, end=None):
    async def script(reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        return end

    return script


async def count(gateway):
    await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
    (account,) = gateway.gateway.gate.accounts
    return (await account.limiter.usage(account.key))["1m"].used


async def outcome(gateway):
    """Return the status of a complete answer, or that it was broken off."""
    try:
        return (await gateway.get("/up/x"))[0]
    except aiohttp.ClientError:
        return "broken"


@pytest.mark.parametrize(
    "script",
    [
        sends(HEAD + b"Content-Length: 100\r\n\r\nshort", end="close"),
        sends(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n", end="close"),
        sends(HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n", end="close"),
    ],
    ids=["content-length too large", "chunks without an end", "malformed chunk"],
)
async def test_an_incomplete_answer_is_never_passed_on_as_complete(upstream, script):
    upstream.script = script
    async with running(upstream.url) as gateway:
        assert await outcome(gateway) in ("broken", 502)
        assert await count(gateway) == 1
        upstream.script = sends(HEAD + b"Content-Length: 2\r\n\r\nok")
        assert (await gateway.get("/up/x"))[0] == 200  # the gateway works on


async def test_bytes_after_the_declared_length_reach_nobody(upstream):
    upstream.script = sends(HEAD + b"Content-Length: 2\r\n\r\nok" + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
    async with running(upstream.url) as gateway:
        for _ in range(3):
            status, _, body = await gateway.get("/up/x")
            assert (status, body) == (200, b"ok")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(5000)),
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"",
    ],
    ids=["endless field", "endless fields", "no HTTP", "two lengths", "negative length", "nothing"],
)
async def test_a_malformed_head_is_a_502(upstream, answer):
    upstream.script = sends(answer, end="close")
    async with running(upstream.url) as gateway:
        status, _, body = await gateway.get("/up/x")
        assert (status, json.loads(body)["error"]["type"]) == (502, "upstream-failed")
        assert await count(gateway) == 1  # it may have arrived
        assert gateway.gateway.stats.counts("local", "up").failed == 1


async def test_a_callers_own_permit_stays_charged_if_the_request_may_have_arrived(upstream, unused_tcp_port):
    callers = {"callers": {"a": {"token": TOKEN, "limits": ["5/1h name=own"]}}}
    upstream.script = sends(b"", end="close")
    for url, used in ((upstream.url, 1), (f"http://127.0.0.1:{unused_tcp_port}", 0)):
        async with running(url, callers) as gateway:
            status, _, _ = await gateway.get("/up/x", headers={"X-Tidegate-Token": TOKEN})
            assert status == 502
            assert await used_by(gateway, "a") == {"own": used}


async def test_a_provider_that_drips_its_head_or_says_nothing_times_out(upstream):
    async def drip(_reader, writer):
        for letter in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 1000:
            writer.write(bytes([letter]))
            await asyncio.sleep(0.02)

    upstream.script = drip
    async with running(upstream.url, {"first_byte_timeout": 0.3}) as gateway:
        status, _, body = await gateway.get("/up/x")
        assert (status, json.loads(body)["error"]["type"]) == (504, "upstream-timeout")
        assert await count(gateway) == 1


async def test_a_call_that_takes_too_long_is_ended(upstream):
    async def drip(_reader, writer):
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")
        while not writer.transport.is_closing():
            writer.write(b"a")
            await asyncio.sleep(0.02)

    async def silent(reader, _writer):
        await reader.read()  # the request, then nothing until the gateway closes the connection

    async with running(upstream.url, {"whole_timeout": 0.5}) as gateway:
        upstream.script = silent
        status, _, body = await gateway.get("/up/x")
        assert (status, json.loads(body)["error"]["type"]) == (504, "call-timeout")
        upstream.script = drip
        with pytest.raises(aiohttp.ClientError):
            await gateway.get("/up/x")
        assert await count(gateway) == 2


async def test_a_provider_that_cannot_be_reached_costs_nothing():
    async with running("http://127.0.0.1:9", limits=["1/1m"]) as gateway:
        for _ in range(3):
            status, _, body = await gateway.get("/up/x", headers={"X-Tidegate-Timeout": "0"})
            assert (status, json.loads(body)["error"]["type"]) == (502, "upstream-unreachable")
        assert await count(gateway) == 0


async def test_a_connection_that_is_lost_is_repeated_only_if_that_is_safe(upstream):
    answers = []

    async def script(_reader, writer):
        answers.append(1)
        if len(answers) % 2:
            return "close"
        writer.write(HEAD + b"Content-Length: 2\r\n\r\nok")
        return None

    upstream.script = script
    async with running(upstream.url, retries=1) as gateway:
        assert (await gateway.get("/up/x"))[0] == 200
        assert await count(gateway) == len(answers) == 2  # each attempt has a permit of its own
        assert (await gateway.send("POST", "/up/x", data=b"once"))[0] == 502
        assert len(answers) == 3
    async with running(upstream.url) as gateway:  # no retries in the provider's file
        answers.clear()
        assert (await gateway.get("/up/x"))[0] == 502


async def test_a_refusal_with_an_endless_body_is_passed_on_and_learned_from(upstream):
    async def script(_reader, writer):
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            await writer.drain()

    upstream.script = script
    async with running(upstream.url, profile="openai") as gateway:
        async with gateway.client.get(f"{gateway.url}/up/x") as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "7")
            assert await response.content.readexactly(300_000) == b"x" * 300_000
        assert gateway.gateway.stats.counts("local", "up").refused == 1


async def test_bad_requests_of_clients_are_answered_or_closed(upstream, caplog):
    caplog.set_level(logging.DEBUG)
    upstream.script = sends(HEAD + b"Content-Length: 2\r\n\r\nok")
    settings = {"callers": {"a": {"token": TOKEN}}, "max_header": 4096, "whole_timeout": 0.5}
    async with running(upstream.url, settings, api_key=KEY, key={"header": "Authorization"}) as gateway:
        token = f"Authorization: Bearer {TOKEN}\r\n".encode()
        for request in (
            b"GET /up/x HTTP/1.1\r\nHost: a\r\n" + token + b"Bad Header\r\n\r\n",
            b"GET /up/x HTTP/1.1\r\nHost: a\r\n" + token + b"X: " + b"a" * 10_000 + b"\r\n\r\n",
            b"GET /up/x HTTP/1.1\r\nHost: a\r\n" + token + b"".join(b"X-%d: 1\r\n" % i for i in range(500)) + b"\r\n",
            b"NONSENSE\r\n\r\n",
            b"GET /up/x HTTP/1.1\r\nHost: a\r\nX: half",
        ):
            answer = await raw(gateway.port, request)
            assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.0 400", b"")
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert (await gateway.get("/up/x", headers=headers))[0] == 200
    assert TOKEN not in caplog.text
    assert KEY not in caplog.text


async def test_keys_never_appear_in_logs_errors_or_answers(upstream, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    log = tmp_path / "access.log"
    settings = {"callers": {"a": {"token": TOKEN}}, "access_log": str(log), "metrics_token": "metrics-token-123456"}
    upstream.script = sends(b"nonsense\r\n\r\n", end="close")
    async with running(upstream.url, settings, api_key=KEY, key={"query": "apikey"}) as gateway:
        paths = (f"/up/x?key={TOKEN}", f"/up/x?key={TOKEN}&apikey=mine", f"/nowhere?key={TOKEN}")
        seen = [await gateway.get(path) for path in paths]
        for path in ("/metrics", "/v1/overview"):
            assert (await gateway.get(path))[0] == 401
            seen.append(await gateway.get(path, headers={"Authorization": "Bearer metrics-token-123456"}))
            assert seen[-1][0] == 200
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["caller"], line["status"], line["problem"]) for line in lines] == [
        ("a", 502, "upstream-failed"),
        ("a", 502, "upstream-failed"),
        ("a", 404, "unknown-provider"),
    ]
    assert KEY.encode() in upstream.heads[0]
    for text in (str(seen), caplog.text, log.read_text(), repr(gateway.gateway.settings)):
        assert KEY not in text
        assert TOKEN not in text


async def test_a_provider_that_does_not_read_an_upload_times_out(upstream):
    held = asyncio.Event()

    async def script(reader, writer):
        writer.transport.pause_reading()
        await held.wait()
        return "close"

    async def upload():
        for _ in range(1000):
            yield b"x" * 2**16

    upstream.script = script
    async with running(upstream.url, {"first_byte_timeout": 0.3}, concurrency=1) as gateway:
        status, _, body = await gateway.send("POST", "/up/x", data=upload())
        assert (status, json.loads(body)["error"]["type"]) == (504, "upstream-timeout")
        assert await count(gateway) == 1
        (account,) = gateway.gateway.gate.accounts
        assert (await account.limiter.usage(account.key))["concurrency"].used == 0
        held.set()


async def test_a_provider_that_switches_protocols_unasked_is_a_502(upstream):
    upstream.script = sends(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: any\r\n\r\nbytes")
    async with running(upstream.url) as gateway:
        status, _, body = await gateway.get("/up/x")
        assert (status, json.loads(body)["error"]["type"]) == (502, "upstream-failed")
        assert await count(gateway) == 1


async def test_only_a_websocket_is_an_upgrade(upstream):
    """A connection that carries HTTP/2 (h2c) would carry requests that nobody counts."""
    upstream.script = sends(HEAD + b"Content-Length: 2\r\n\r\nok")
    async with running(upstream.url) as gateway:
        headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAM"}
        assert (await gateway.get("/up/x", headers=headers))[0] == 200
    (head,) = upstream.heads
    assert b"h2c" not in head
    assert b"Upgrade" not in head


async def test_a_response_that_breaks_off_is_counted_and_logged(upstream, tmp_path):
    log = tmp_path / "access.log"
    upstream.script = sends(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n", end="close")
    async with running(upstream.url, {"access_log": str(log)}) as gateway:
        assert await outcome(gateway) == "broken"
        assert await count(gateway) == 1
        counts = gateway.gateway.stats.counts("local", "up")
        assert (counts.requests, counts.failed, counts.gone) == (1, 1, 0)
    (line,) = map(json.loads, log.read_text().splitlines())
    assert (line["status"], line["problem"]) == (200, "upstream-failed")


@pytest.mark.parametrize(
    "line",
    [f"Authorization: Bearer {TOKEN}\x00", f"Authorization : {TOKEN}", f"Transfer-Encoding: {TOKEN}", TOKEN],
    ids=["value", "name", "coding", "no field"],
)
async def test_the_answer_to_malformed_http_quotes_nothing(upstream, line, caplog):
    caplog.set_level(logging.DEBUG)
    async with running(upstream.url) as gateway:
        answer = await raw(gateway.port, f"POST /up/x HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"400"
    assert json.loads(body)["error"]["type"] == "bad-request"
    assert TOKEN not in answer.decode()
    assert TOKEN not in caplog.text
    assert not upstream.heads


async def test_a_token_that_is_not_text_is_refused(upstream):
    settings = {"callers": {"a": {"token": TOKEN}}, "metrics_token": "metrics-token-123456"}
    async with running(upstream.url, settings) as gateway:
        for path in (b"/metrics", b"/up/x"):
            head = b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
            assert (await raw(gateway.port, head % path)).startswith(b"HTTP/1.1 401 ")


async def test_an_estimate_of_a_large_or_odd_body_is_answered(upstream):
    async with running(upstream.url, {"max_metered_body": 3_000_000}) as gateway:
        large = json.dumps({"url": "/up/x", "body": "x" * 2_000_000}).encode()
        for body, status in ((large, 200), (b'{"url": "/up/x", "body": "\\ud800"}', 200), (large + large, 413)):
            assert (await gateway.send("POST", "/v1/egress/estimate", data=io.BytesIO(body)))[0] == status


@pytest.mark.parametrize(
    "body", [b"Content-Length: 2\r\n\r\nok", b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"]
)
async def test_a_reason_phrase_that_contains_the_key_is_not_passed_on(upstream, body):
    upstream.script = sends(b"HTTP/1.1 401 no such key: %s\r\n" % KEY.encode() + body)
    async with running(upstream.url, api_key=KEY, key={"header": "X-Api-Key"}) as gateway:
        request = b"GET /up/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = await raw(gateway.port, request)
    assert answer.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
    assert KEY.encode() not in answer
