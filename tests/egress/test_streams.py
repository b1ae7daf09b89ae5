"""Streams in both directions: chunk by chunk, with backpressure; who goes away, and what is settled then."""

import asyncio
import gzip
import io
import json

import aiohttp
import pytest
from aiohttp import web

from tests.egress.harness import TOKEN, running, settled, used_by
from tests.recipes import bodies

OPTIONS = {"stream": True, "stream_options": {"include_usage": True}}
CONTENT = {"model": "gpt-4o-mini", "max_tokens": 500, "messages": [], **OPTIONS}
METERED = {"limits": ["1000/1m", "100_000/1m unit=tokens name=tpm"], "profile": "openai"}


class Provider:
    """A provider in the event loop of the test, whose answers the test controls."""

    def __init__(self):
        self.step = asyncio.Semaphore(0)
        self.received = 0
        self.ended = []
        self.url = ""

    async def handle(self, request):
        try:
            return await self._handle(request)
        except asyncio.CancelledError:
            self.ended.append("gone")
            raise

    async def _handle(self, request):
        if request.path == "/upload":
            async for piece in request.content.iter_any():
                self.received += len(piece)
                await asyncio.sleep(0)
            return web.json_response({"received": self.received})
        if request.path == "/hold":
            await self.step.acquire()
        body = json.loads(await request.read() or b"{}")
        if request.path == "/whole":
            packed = gzip.compress(json.dumps(bodies.chat(body)).encode())
            return web.Response(body=packed, headers={"Content-Type": "application/json", "Content-Encoding": "gzip"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if request.path == "/endless":
            while True:
                await response.write(b"x" * 65536)
                self.received += 65536
        for piece in bodies.chat_stream({"model": "m", **body}):
            await self.step.acquire()
            await response.write(piece)
        if request.path == "/cut":
            request.transport.abort()
        await response.write_eof()
        return response


@pytest.fixture
async def upstream():
    provider = Provider()
    server = web.Server(provider.handle, handler_cancellation=True, access_log=None)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    provider.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield provider
    listening.close()
    await server.shutdown(0.1)


async def used(gateway):
    (account,) = gateway.gateway.gate.accounts
    return {name: usage.used for name, usage in (await account.limiter.usage(account.key)).items()}


async def test_each_event_arrives_before_the_next_is_sent_and_the_usage_is_settled(upstream):
    async with running(upstream.url, **METERED) as gateway:
        async with gateway.client.post(f"{gateway.url}/up/events", json=CONTENT) as response:
            assert response.headers["X-Tidegate-Cost"].startswith("requests=1, tokens=5")
            for piece in bodies.chat_stream(CONTENT):
                upstream.step.release()
                assert await response.content.readexactly(len(piece)) == piece
            assert await response.content.read() == b""
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
        assert await used(gateway) == {"1m": 1, "tpm": 42}
        counts = gateway.gateway.stats.counts("local", "up")
        assert (counts.input_tokens, counts.output_tokens) == (12, 30)


async def test_the_usage_of_a_compressed_answer_is_read_and_the_bytes_stay_as_they_are(upstream):
    async with running(upstream.url, **METERED) as gateway:
        headers = {"Accept-Encoding": "br, gzip"}
        status, answer, body = await gateway.send("POST", "/up/whole", json=CONTENT, headers=headers)
        assert (status, answer["Content-Encoding"]) == (200, "gzip")
        assert json.loads(gzip.decompress(body))["usage"] == bodies.CHAT_USAGE
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
        assert await used(gateway) == {"1m": 1, "tpm": 42}


async def test_a_client_that_closes_right_after_its_response_is_settled_and_not_gone(upstream, tmp_path):
    settings = {"callers": {"a": {"token": TOKEN, "limits": ["100_000/1h unit=tokens name=own"]}}}
    body = json.dumps({"model": "gpt-4o-mini", "max_tokens": 500, "messages": []}).encode()
    head = f"POST /up/whole HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    async with running(upstream.url, settings, store=f"sqlite:///{tmp_path}/quota.db", **METERED) as gateway:
        counts = gateway.gateway.stats.counts("a", "up")
        for number in range(1, 11):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            length = int((await reader.readuntil(b"\r\n\r\n")).lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
            writer.transport.abort()
            await settled(lambda: counts.active == 0)
            await settled(lambda number=number: counts.output_tokens == 30 * number)
        status, _, estimate = await gateway.send(
            "POST", "/v1/egress/estimate", json={"url": "/up/whole"}, headers={"X-Tidegate-Token": TOKEN}
        )
        assert (status, json.loads(estimate)["remaining"]["1m"]) == (200, 989)
        assert await used(gateway) == {"1m": 10, "tpm": 420}
        assert await used_by(gateway, "a") == {"own": 420}
        assert counts.gone == 0


async def test_a_client_that_goes_away_ends_the_call_and_keeps_its_reservation(upstream):
    async with running(upstream.url, **METERED) as gateway:
        response = await gateway.client.post(f"{gateway.url}/up/events", json=CONTENT)
        upstream.step.release()
        await response.content.readany()
        response.close()
        upstream.step.release()
        await settled(lambda: upstream.ended == ["gone"])
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
        await gateway.gateway.background.finish()
        found = await used(gateway)
        assert found["1m"] == 1
        assert 500 <= found["tpm"] <= 560  # the provider may have produced all of it
        assert gateway.gateway.stats.counts("local", "up").gone == 1


async def test_a_client_that_goes_away_before_the_answer_begins_is_settled(upstream):
    async with running(upstream.url, limits=["1000/1m"], concurrency=1) as gateway:
        call = asyncio.create_task(gateway.send("POST", "/up/hold", json=CONTENT))
        await settled(lambda: gateway.gateway.gate.metrics()["sent"] == 1)
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
        await settled(lambda: upstream.ended == ["gone"])
        found = await used(gateway)
        assert found == {"1m": 1, "concurrency": 0}  # it may have arrived; its slot is free


async def test_a_provider_that_goes_away_ends_the_answer_visibly_and_is_settled(upstream):
    async with running(upstream.url, **METERED) as gateway:
        for _ in bodies.chat_stream(CONTENT):
            upstream.step.release()
        with pytest.raises(aiohttp.ClientError):
            await gateway.send("POST", "/up/cut", json=CONTENT)
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
        assert (await used(gateway))["1m"] == 1


async def test_a_slow_reader_slows_the_provider_down_and_is_ended_in_time(upstream):
    async with running(upstream.url, {"first_byte_timeout": 1}) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        writer.write(b"GET /up/endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await settled(lambda: upstream.received > 0)
        await settled(lambda: upstream.ended == ["gone"])
        assert upstream.received < 64 * 2**20  # what the buffers of the sockets take, not all that could be sent
        writer.close()
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)


async def test_an_upload_is_passed_on_without_being_held(upstream):
    async def pieces():
        for _ in range(160):
            yield b"y" * 2**16

    async with running(upstream.url) as gateway:
        status, _, body = await gateway.send("POST", "/up/upload", data=pieces())
        assert (status, json.loads(body)) == (200, {"received": 160 * 2**16})


async def test_a_body_that_is_too_large_is_refused(upstream):
    async def pieces():
        for _ in range(100):
            yield b"y" * 1024

    async with running(upstream.url, {"max_body": 10_000, "max_metered_body": 2000}) as gateway:
        assert (await gateway.send("POST", "/up/upload", data=b"y" * 10_001))[0] == 413
        assert (await gateway.send("POST", "/up/upload", data=pieces()))[0] == 413
    async with running(upstream.url, {"max_metered_body": 2000}, **METERED) as gateway:
        assert (await gateway.send("POST", "/up/whole", json={"a": "b" * 3000}))[0] == 413


async def test_curls_expectation_is_answered_before_the_body_is_sent(upstream):
    async with running(upstream.url) as gateway:
        headers = {"Expect": "100-continue"}
        status, _, body = await gateway.send("POST", "/up/upload", data=b"z" * 5000, headers=headers, expect100=True)
        assert (status, json.loads(body)) == (200, {"received": 5000})


async def test_a_client_that_stops_sending_its_body_is_answered(upstream):
    async with running(upstream.url, {"first_byte_timeout": 0.2}) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /up/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_a_client_that_goes_away_while_a_whole_answer_is_sent_is_no_failure(upstream, caplog):
    async with running(upstream.url, limits=["1000/1m"]) as gateway:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            head = b"POST /up/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nab"
            writer.write(head)
            await writer.drain()
            writer.transport.abort()
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
        assert (await gateway.get("/healthz"))[0] == 200
    assert "the gateway failed" not in caplog.text


async def test_a_whole_answer_that_cannot_be_sent_ends_quietly(upstream, caplog, monkeypatch):
    async def lost(*_arguments):
        raise ConnectionResetError

    monkeypatch.setattr("tidegate.egress._relay.send_whole", lost)
    async with running(upstream.url) as gateway:
        with pytest.raises(aiohttp.ClientError):
            await gateway.send("POST", "/up/upload", data=b"ab")
    assert "the gateway failed" not in caplog.text


@pytest.mark.parametrize(
    "kind", ["application/json", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", None]
)
async def test_json_is_metered_even_if_its_type_is_not_declared(upstream, kind):
    """What fetch (text/plain) and curl (a form) send with a body, if nobody tells them its type."""
    async with running(upstream.url, **METERED) as gateway:
        body = json.dumps({"model": "gpt-4o-mini", "max_tokens": 5000, "messages": []}).encode()
        headers = {} if kind is None else {"Content-Type": kind}
        _, answer, _ = await gateway.send(
            "POST", "/up/whole", data=body, headers=headers, skip_auto_headers=["Content-Type"]
        )
        assert int(answer["X-Tidegate-Cost"].rpartition("=")[2]) > 5000


async def test_a_large_body_in_memory_is_sent_in_pieces_with_its_length(upstream):
    async with running(upstream.url, **METERED) as gateway:
        content = io.BytesIO(json.dumps({"messages": ["x" * 5_000_000]}).encode())
        headers = {"Content-Type": "application/json"}
        status, _, body = await gateway.send("POST", "/up/upload", data=content, headers=headers)
        assert (status, json.loads(body)) == (200, {"received": 5_000_018})
