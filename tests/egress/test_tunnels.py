"""Forward mode, tunnels (CONNECT) and upgraded connections."""

import asyncio

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from tests.egress.harness import TOKEN, raw, running, settled, used_by
from tidegate import StoreUnavailable
from tidegate.egress._addresses import AddressCheck
from tidegate.stores import MemoryStore

PRICES = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 10}}}


async def echo(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write(b"<end>")
        writer.close()
    except OSError:
        pass


@pytest.fixture
async def echo_port():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture
async def web_url():
    async def handle(request):
        if request.headers.get("Upgrade"):
            socket = web.WebSocketResponse(protocols=("chat",))
            await socket.prepare(request)
            async for message in socket:
                if message.type == WSMsgType.TEXT and message.data == "bye":
                    await socket.close(code=4000)
                elif message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                    await (socket.send_str if message.type == WSMsgType.TEXT else socket.send_bytes)(message.data)
            return socket
        return web.json_response({"path": request.path_qs, "host": request.headers["Host"]})

    server = web.Server(handle, access_log=None)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    listening.close()
    await server.shutdown(0.1)


async def connect(port, authority):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
    return await reader.readuntil(b"\r\n\r\n"), reader, writer


async def test_tunnels_are_refused_unless_allowed_and_the_answer_says_why(echo_port):
    async with running(f"http://127.0.0.1:{echo_port}") as gateway:
        head, reader, writer = await connect(gateway.port, f"127.0.0.1:{echo_port}")
        assert head.startswith(b"HTTP/1.1 403 ")
        assert b"sees no requests, models or tokens inside a tunnel" in await reader.readuntil(b"}}")
        writer.close()


async def test_a_tunnel_is_counted_once_and_holds_its_slot_until_it_is_closed(echo_port):
    settings = {"tunnels": "allow"}
    async with running(f"http://127.0.0.1:{echo_port}", settings, limits=["10/1m"], concurrency=1) as gateway:
        head, reader, writer = await connect(gateway.port, f"127.0.0.1:{echo_port}")
        assert head.startswith(b"HTTP/1.1 200 Connection established")
        assert b"X-Tidegate-Note: only the connection is counted" in head
        assert b"Transfer-Encoding" not in head
        for size in (10, 1_000_000):
            data = b"a" * size
            writer.write(data)
            assert await reader.readexactly(size) == data
        fields = "Host: x\r\nX-Tidegate-Timeout: 0\r\nConnection: close\r\n\r\n"
        request = f"CONNECT 127.0.0.1:{echo_port} HTTP/1.1\r\n{fields}"
        assert b" 429 " in (await raw(gateway.port, request.encode()))[:20]
        writer.write_eof()  # half-closed: what the other side still sends arrives
        assert await reader.read() == b"<end>"
        writer.close()
        (account,) = gateway.gateway.gate.accounts
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
        await gateway.gateway.background.finish()
        usage = await account.limiter.usage(account.key)
        assert {name: each.used for name, each in usage.items()} == {"1m": 1, "concurrency": 0}
        assert gateway.gateway.stats.counts("local", "up").tunnels == 1


@pytest.mark.parametrize("authority", ["evil.example:443", "127.0.0.1:1", "127.0.0.1:22"])
async def test_a_tunnel_leads_only_to_configured_hosts_and_ports(echo_port, authority):
    async with running(f"http://127.0.0.1:{echo_port}", {"tunnels": "allow"}) as gateway:
        head, _, writer = await connect(gateway.port, authority)
        assert head.startswith(b"HTTP/1.1 403 ")
        writer.close()


async def test_a_tunnel_that_cannot_be_opened_returns_its_permit():
    async with running("http://127.0.0.1:9", {"tunnels": "allow"}, limits=["1/1h"]) as gateway:
        for _ in range(3):
            head, _, writer = await connect(gateway.port, "127.0.0.1:9")
            assert head.startswith(b"HTTP/1.1 502 ")
            writer.close()


async def test_forward_mode_serves_http_proxy(web_url):
    async with running(web_url) as gateway, gateway.client.get(f"{web_url}/a?b=c", proxy=gateway.url) as response:
        assert await response.json() == {"path": "/a?b=c", "host": web_url.removeprefix("http://")}
        assert response.headers["X-Tidegate-Provider"] == "up"
        assert gateway.gateway.gate.metrics()["sent"] == 1
        assert b" 403 " in (
            await raw(gateway.port, b"GET http://evil.example/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        )


async def test_a_websocket_is_passed_on_and_counts_as_one_request(web_url):
    async with running(web_url, limits=["10/1m"]) as gateway:
        async with gateway.client.ws_connect(f"{gateway.url}/up/socket", protocols=("chat",)) as socket:
            assert socket.protocol == "chat"
            await socket.send_str("hello")
            assert (await socket.receive_str()) == "hello"
            await socket.send_bytes(b"x" * 500_000)
            assert (await socket.receive_bytes()) == b"x" * 500_000
            await socket.send_str("bye")
            assert (await socket.receive()).type == WSMsgType.CLOSE
            assert socket.close_code == 4000
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
        assert gateway.gateway.gate.metrics()["sent"] == 1
        assert gateway.gateway.stats.counts("local", "up").tunnels == 1


async def test_a_websocket_without_a_permit_is_refused(web_url):
    async with running(web_url, {"timeout": 0.01}, limits=["1/1h"]) as gateway:
        await gateway.get("/up/x")
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await gateway.client.ws_connect(f"{gateway.url}/up/socket")
        assert caught.value.status == 429


async def test_a_client_that_leaves_a_websocket_ends_it(web_url):
    async with running(web_url) as gateway:
        socket = await gateway.client.ws_connect(f"{gateway.url}/up/socket")
        await socket.send_str("hello")
        await socket.receive_str()
        socket._response.close()  # noqa: SLF001 - the connection is lost without a closing frame
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)


async def test_tunnels_count_against_the_limits_of_their_caller(echo_port):
    callers = {"a": {"token": TOKEN, "limits": ["2/1h"]}}
    authority = f"127.0.0.1:{echo_port}"
    async with running(f"http://{authority}", {"tunnels": "allow", "callers": callers}) as gateway:
        heads = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            fields = f"Host: {authority}\r\nX-Tidegate-Timeout: 0\r\nProxy-Authorization: Bearer {TOKEN}"
            writer.write(f"CONNECT {authority} HTTP/1.1\r\n{fields}\r\n\r\n".encode())
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.close()
        assert [head.split(b" ")[1] for head in heads] == [b"200", b"200", b"429"]


@pytest.mark.parametrize(
    ("callers", "fields"),
    [
        ({"a": {"token": TOKEN, "limits": ["1000/1h unit=tokens"]}}, {}),
        ({"a": {"token": TOKEN}}, {"profile": "openai", "price": PRICES, "spend": ["25/day unit=usd"]}),
    ],
    ids=["tokens of the caller", "money of the provider"],
)
async def test_a_tunnel_is_refused_if_its_traffic_would_have_to_be_counted(echo_port, callers, fields):
    authority = f"127.0.0.1:{echo_port}"
    async with running(f"http://{authority}", {"tunnels": "allow", "callers": callers}, **fields) as gateway:
        head = f"CONNECT {authority} HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Bearer {TOKEN}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head.encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 403 ")
        assert b"cannot be counted inside a tunnel" in await reader.readuntil(b"}}")
        writer.close()


async def test_a_client_that_leaves_while_its_tunnel_is_opened_returns_its_permits(echo_port):
    looked_up = asyncio.Event()

    class Slow(AddressCheck):
        async def addresses(self, host, port):
            looked_up.set()
            await asyncio.Event().wait()

    authority = f"127.0.0.1:{echo_port}"
    settings = {"tunnels": "allow", "callers": {"a": {"token": TOKEN, "limits": ["2/1h"]}}}
    async with running(f"http://{authority}", settings, Slow(()), limits=["5/1h"], concurrency=1) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = f"CONNECT {authority} HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Bearer {TOKEN}\r\n\r\n"
        writer.write(head.encode())
        await looked_up.wait()
        (account,) = gateway.gateway.gate.accounts
        assert [each.used for each in (await account.limiter.usage(account.key)).values()] == [1, 1]
        writer.transport.abort()
        await settled(lambda: gateway.gateway.stats.counts("a", "up").active == 0)
        await gateway.gateway.background.finish()
        assert [each.used for each in (await account.limiter.usage(account.key)).values()] == [0, 0]
        assert [*(await used_by(gateway, "a")).values()] == [0]


async def test_a_tunnel_without_a_store_is_a_503(echo_port):
    class Lost(MemoryStore):
        def apply(self, *_arguments):
            raise StoreUnavailable("the store is gone")

        apply_one = apply

    authority = f"127.0.0.1:{echo_port}"
    async with running(f"http://{authority}", {"tunnels": "allow"}, store=Lost(), concurrency=1) as gateway:
        head, _, writer = await connect(gateway.port, authority)
        assert head.startswith(b"HTTP/1.1 503 ")
        writer.close()
