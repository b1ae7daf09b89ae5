"""Blocks with limits inside WebSocket endpoints: each message is a decision of its own."""

from typing import Any

import pytest
import quart as quart_module
from aiohttp import web
from aiohttp.test_utils import TestClient as AiohttpClient
from aiohttp.test_utils import TestServer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse

from tests.inbound.test_one_decision import rules
from tidegate.inbound import aiohttp, asgi, fastapi, quart, starlette
from tidegate.inbound._limiting.request_state import STATE_KEY

NO_CATEGORY = {"defaults": False, "unmatched": None}


def chat_site(limit):
    async def chat(websocket):
        await websocket.accept()
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                async with limit.check(websocket):
                    await websocket.send_text("ok")
            except HTTPException:
                await websocket.send_text("denied")

    return Starlette(routes=[WebSocketRoute("/chat", chat)])


@pytest.mark.parametrize("config", [None, NO_CATEGORY, rules(1)], ids=["alone", "no-category", "category"])
@pytest.mark.parametrize("module", [starlette, fastapi], ids=["starlette", "fastapi"])
def test_a_denied_message_of_a_websocket_refunds_no_earlier_ones(clock, config, module):
    options = {}
    app: Any = chat_site(module.limit("2/1m", scope="messages", **options))
    if config:
        app = asgi.RateLimitMiddleware(app, config, clock=clock)
    with TestClient(app, client=("203.0.113.9", 1)).websocket_connect("/chat") as socket:
        assert exchange(socket, 5) == ["ok", "ok", "denied", "denied", "denied"]
        clock.advance(60)
        assert exchange(socket, 3) == ["ok", "ok", "denied"]


def test_a_denied_message_does_not_refund_the_request_that_opened_the_websocket(clock):
    app = asgi.RateLimitMiddleware(chat_site(starlette.limit("1/1m", scope="messages")), rules(1), clock=clock)
    client = TestClient(app, client=("203.0.113.9", 1))
    with client.websocket_connect("/chat") as socket:
        assert exchange(socket, 2) == ["ok", "denied"]
    with pytest.raises(WebSocketDenialResponse), client.websocket_connect("/chat"):
        pass


def exchange(socket, messages):
    found = []
    for _ in range(messages):
        socket.send_text("hello")
        found.append(socket.receive_text())
    return found


def test_the_messages_of_a_websocket_leave_nothing_in_its_state(clock):
    app = asgi.RateLimitMiddleware(chat_site(starlette.limit("100/1m", scope="messages")), rules(9), clock=clock)
    scopes = []

    async def site(scope, receive, send):
        scopes.append(scope)
        await app(scope, receive, send)

    with TestClient(site, client=("203.0.113.9", 1)).websocket_connect("/chat") as socket:
        assert exchange(socket, 50) == ["ok"] * 50
    assert [made.charge.policy.name for made in scopes[0][STATE_KEY].made] == ["all"]


@pytest.mark.parametrize("config", [None, NO_CATEGORY], ids=["alone", "no-category"])
async def test_a_denied_message_of_a_websocket_in_quart_refunds_no_earlier_ones(clock, config):
    app: Any = quart_module.Quart(__name__)
    messages = quart.limit("2/1m", scope="messages")

    @app.websocket("/chat")
    async def chat():
        websocket = quart_module.websocket
        while True:
            await websocket.receive()
            try:
                async with messages.check(websocket):
                    await websocket.send("ok")
            except quart.RateLimitExceeded:
                await websocket.send("denied")

    if config:
        app.asgi_app = asgi.RateLimitMiddleware(app.asgi_app, config, clock=clock)
    found = []
    async with app.test_client().websocket("/chat", scope_base={"client": ("203.0.113.9", 1234)}) as socket:
        for _ in range(5):
            await socket.send("hello")
            found.append(await socket.receive())
    assert found == ["ok", "ok", "denied", "denied", "denied"]


async def test_a_denied_message_of_a_websocket_in_aiohttp_refunds_no_earlier_ones(clock):
    messages = aiohttp.limit("2/1m", scope="messages")

    async def chat(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            try:
                async with messages.check(request):
                    await socket.send_str("ok")
            except web.HTTPTooManyRequests:
                await socket.send_str("denied")
        return socket

    app = web.Application(middlewares=[aiohttp.RateLimitMiddleware(NO_CATEGORY, clock=clock)])
    app.router.add_get("/chat", chat)
    async with AiohttpClient(TestServer(app)) as client, client.ws_connect("/chat") as socket:
        found = []
        for _ in range(5):
            await socket.send_str("hello")
            found.append(await socket.receive_str())
    assert found == ["ok", "ok", "denied", "denied", "denied"]
