"""A site in Starlette: streams, background tasks, mounts and websockets."""

import asyncio

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute

from tests.inbound.sites.config import CONFIG
from tidegate.inbound.asgi import RateLimitMiddleware

done = []


async def hello(request):
    return PlainTextResponse(f"hello {request.path_params.get('name', '')}")


async def stream(request):
    async def parts():
        for number in range(5):
            yield f"part {number}\n"
            await asyncio.sleep(0)

    return StreamingResponse(parts(), media_type="text/plain")


async def later():
    done.append("later")


async def background(request):
    return PlainTextResponse("now", background=BackgroundTask(later))


async def health(request):
    return JSONResponse(done)


async def echo(websocket):
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(text)


app = Starlette(
    routes=[
        Route("/hello", hello),
        Route("/hello/{name}", hello),
        Route("/stream", stream),
        Route("/background", background),
        Route("/health", health),
        WebSocketRoute("/ws", echo),
        Mount("/mounted", routes=[Route("/hello", hello)]),
    ],
    middleware=[Middleware(RateLimitMiddleware, config=CONFIG)],
)
