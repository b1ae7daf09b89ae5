"""Processes of bench/egress.py: a provider, a bare aiohttp proxy, a gateway, and a load generator.

    python -m bench.egress_parts provider|bare|gateway PORT UPSTREAM_PORT [STORE]

The provider answers GET /small with 200 bytes, POST /stream?chunks=N&pause=S with N server-sent events, and counts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys

import aiohttp
from aiohttp import web

from tidegate._runtime.event_loop import freeze_heap, run_loop
from tidegate.egress import load_egress
from tidegate.egress._gateway import EgressGateway
from tidegate.egress._server import EgressServer
from tidegate.outbound import AsyncGate, Providers

HOP_BY_HOP = frozenset(("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host"))
EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
CHAT = json.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1_741_569_952, "model": "fake",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 100}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 30, "total_tokens": 42},
}).encode()  # fmt: skip
SMALL = json.dumps({"answer": "x" * 180}).encode()


async def provide(request: web.BaseRequest) -> web.StreamResponse:
    """Answer as a provider."""
    if request.path == "/small":
        await request.read()
        return web.Response(body=SMALL, content_type="application/json")
    if request.path == "/v1/chat/completions":
        await request.read()
        return web.Response(body=CHAT, content_type="application/json")
    chunks, pause = int(request.query.get("chunks", "20")), float(request.query.get("pause", "0"))
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(chunks):
        await response.write(EVENT)
        await asyncio.sleep(pause)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


class BareProxy:
    """What a minimal proxy on aiohttp does: no permits, no keys, no counts."""

    def __init__(self, upstream: str) -> None:
        """Send everything to one server."""
        self._upstream = upstream
        self.session: aiohttp.ClientSession | None = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Pass a request on."""
        assert self.session is not None  # noqa: S101 - opened by `serve`
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        body = await request.read() if request.can_read_body else None
        url = self._upstream + request.raw_path.removeprefix("/up")
        async with self.session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as found:
            kept = {name: value for name, value in found.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=found.status, headers=kept)
            await response.prepare(request)
            async for piece in found.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


async def serve(role: str, port: int, upstream: int, store: str) -> None:
    """Run one process until it is killed."""
    listener = socket.create_server(("127.0.0.1", port), backlog=4096)
    url = f"http://127.0.0.1:{upstream}"
    loop = asyncio.get_running_loop()
    if role == "provider":
        await loop.create_server(web.Server(provide, access_log=None), sock=listener, backlog=4096)
        await asyncio.Event().wait()
    elif role == "bare":
        proxy = BareProxy(url)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as proxy.session:
            server = web.Server(proxy.handle, access_log=None, auto_decompress=False)
            await loop.create_server(server, sock=listener, backlog=4096)
            await asyncio.Event().wait()
    else:
        limits = ["100_000_000/1m", "1_000_000_000/1h"]
        gate = AsyncGate(Providers.of({"domain": "127.0.0.1", "name": "up", "limits": limits}), store)
        settings = load_egress(
            {"upstreams": {"up": url}, "allow_private": ["127.0.0.1"], "listen": f"127.0.0.1:{port}"}
        )
        async with EgressGateway(gate, settings) as gateway, EgressServer(gateway, listener):
            freeze_heap()  # as `tidegate egress` does
            await asyncio.Event().wait()


if __name__ == "__main__":
    run_loop(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "memory://"))
