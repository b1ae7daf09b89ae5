"""Websockets in FastAPI and Starlette: three messages an hour; connects are not limited."""

from fastapi import FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

from tidegate.inbound.asgi import RateLimitMiddleware

CONFIG = {
    "unmatched": None,
    "categories": {
        "chat": {"limit": 3, "window": "1h", "endpoints": [{"path": "/ws/{room}", "methods": ["MESSAGE"]}]},
    },
}


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(text)


closing = FastAPI()
closing.add_api_websocket_route("/ws/{room}", echo)
closing.add_middleware(RateLimitMiddleware, config=CONFIG)

dropping = Starlette(routes=[WebSocketRoute("/ws/{room}", echo)])
dropping.add_middleware(RateLimitMiddleware, config=CONFIG, on_message="drop")
