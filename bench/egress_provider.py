"""Providers of language models with hidden limits, for bench/egress_proof.py: `python -m bench.egress_provider PORT …`.

They count every window exactly, by their own clock: a request is refused if `limit` others arrived within `period`
before it. They send no rate limit headers. `/counts` tells what was counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from collections import deque
from typing import Any

from aiohttp import web

from tidegate._runtime.event_loop import run_loop

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'


class HiddenLimit:
    """The quota of one provider, and what was counted."""

    def __init__(self, limit: int, period: float) -> None:
        """Allow so many requests in any window of this length."""
        self.limit, self.period = limit, period
        self.recent: deque[float] = deque()
        self.arrivals: list[float] = []
        self.refused: list[float] = []
        self.input_tokens = self.output_tokens = 0

    def admit(self) -> bool:
        """Count a request; return whether it is within the limit."""
        now = time.monotonic()
        while self.recent and now - self.recent[0] >= self.period:
            self.recent.popleft()
        if len(self.recent) >= self.limit:
            self.refused.append(now)
            return False
        self.recent.append(now)
        self.arrivals.append(now)
        return True

    def use_tokens(self) -> tuple[int, int]:
        """Count the tokens of a call: another number than anybody could estimate."""
        used = random.randint(5, 60), random.randint(1, 100)
        self.input_tokens += used[0]
        self.output_tokens += used[1]
        return used

    def describe(self) -> dict[str, Any]:
        """Return all that was counted."""
        tokens = {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens}
        return {"limit": self.limit, "arrivals": self.arrivals, "refused": self.refused, **tokens}


class HiddenProviders:
    """The APIs of OpenAI and Anthropic, each with a limit of its own."""

    def __init__(self, openai: int, anthropic: int, period: float) -> None:
        """Allow so many requests to each."""
        self.limits = {"openai": HiddenLimit(openai, period), "anthropic": HiddenLimit(anthropic, period)}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Count a request and answer it."""
        if request.path == "/counts":
            return web.json_response({name: limit.describe() for name, limit in self.limits.items()})
        body = await request.read()
        if request.path == "/stream":
            return await stream(request)
        name = "anthropic" if request.path == "/v1/messages" else "openai"
        limit = self.limits[name]
        if not limit.admit():
            return web.Response(status=429, text="slow down")
        tokens = limit.use_tokens()
        if name == "anthropic":
            return web.json_response(anthropic_answer(*tokens))
        return await openai_answer(request, json.loads(body), *tokens)


def anthropic_answer(prompt: int, output: int) -> dict[str, Any]:
    """Return the answer to a message."""
    content = [{"type": "text", "text": "Hello"}]
    usage = {"input_tokens": prompt, "output_tokens": output}
    answer = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-haiku-4-5", "content": content}
    return {**answer, "stop_reason": "end_turn", "stop_sequence": None, "usage": usage}


async def openai_answer(request: web.BaseRequest, body: dict[str, Any], prompt: int, output: int) -> web.StreamResponse:
    """Answer a chat completion, as a stream if it asks for one."""
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    head = {"id": "chatcmpl-1", "created": 1, "model": "gpt-4o-mini"}
    if not body.get("stream"):
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello"}}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chunk = {**head, "object": "chat.completion.chunk"}
    delta = {"index": 0, "delta": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    for each in ({**chunk, "choices": [delta]}, {**chunk, "choices": [], "usage": usage}):
        await response.write(b"data: " + json.dumps(each).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def stream(request: web.BaseRequest) -> web.StreamResponse:
    """Answer with a stream of twenty seconds."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(200):
        await response.write(EVENT * 8)
        await asyncio.sleep(0.1)
    await response.write_eof()
    return response


async def serve(port: int, openai: int, anthropic: int, period: float) -> None:
    """Serve until killed."""
    listener = socket.create_server(("127.0.0.1", port), backlog=4096)
    server = web.Server(HiddenProviders(openai, anthropic, period).handle, access_log=None)
    await asyncio.get_running_loop().create_server(server, sock=listener, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    run_loop(serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
