"""Demonstration traffic of the egress gateway: a fake provider of a language model, and callers that use it."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

from aiohttp import ClientError, ClientSession, web

from tidegate.egress._settings import Upstream

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable
    from contextlib import AsyncExitStack

    from tidegate.egress._gateway import EgressGateway

PROVIDER: Final = "model"  # in examples/demo/providers
WORDS: Final = ("The", " gateway", " passes", " each", " word", " on", ".")
# Calls per minute of each caller, whose token is that of examples/demo/egress.yaml.
CALLS: Final = {"notebook": 12, "agents": 40, "nightly-job": 10}


async def start_provider(gateway: EgressGateway, stack: AsyncExitStack) -> None:
    """Run the fake provider, and make the gateway send its requests there."""
    server = web.Server(answer, access_log=None)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    stack.push_async_callback(server.shutdown, 0.1)
    stack.callback(listening.close)
    gateway.routes.set_upstream(PROVIDER, Upstream("http", "127.0.0.1", listening.sockets[0].getsockname()[1]))


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """Answer a call, as a stream if it asks for one."""
    try:
        content = json.loads(await request.read())
    except ValueError:
        content = {}
    usage = {"prompt_tokens": 60, "completion_tokens": 140, "total_tokens": 200}
    if not isinstance(content, dict) or not content.get("stream"):
        message = {"role": "assistant", "content": "".join(WORDS)}
        return web.json_response({"model": "demo", "choices": [{"index": 0, "message": message}], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    with suppress(ConnectionError):  # the gateway stops
        for word in WORDS:
            await response.write(event({"choices": [{"index": 0, "delta": {"content": word}}]}))
            await asyncio.sleep(0.1)
        await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        await response.write_eof()
    return response


def event(data: dict[str, Any]) -> bytes:
    """Write a server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def run_caller(
    url: str, caller: str, rate: int, pause: Callable[[float], Awaitable[None]], rng: random.Random
) -> NoReturn:
    """Call the provider through the gateway, again and again."""
    headers = {"Authorization": f"Bearer demo-token-of-the-{caller}"}
    content: dict[str, Any] = {"model": "demo", "max_tokens": 300, "messages": [{"role": "user", "content": "Hello"}]}
    async with ClientSession(headers=headers) as session:
        while True:
            await pause(60 / rate)
            try:
                body = {**content, "stream": rng.random() < 0.5}  # noqa: PLR2004 - half of the calls
                async with session.post(f"{url}/{PROVIDER}/v1/chat/completions", json=body) as response:
                    await response.read()
            except ClientError:
                continue  # the gateway stops
