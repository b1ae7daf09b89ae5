"""A provider of a language model over HTTP, for measurements: it counts requests and tokens in windows of a minute.

It counts the input when a request arrives and the output when it is complete, both at the instant of arrival. It
refuses a request whose input does not fit. So it never refuses output that it has begun, and a client that does not
reserve for output exceeds the quota.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any, Final, NamedTuple

PERIOD: Final = 60.0
BYTES_PER_TOKEN: Final = 4
MIN_OUTPUT: Final = 200
MAX_OUTPUT: Final = 400
MIN_SECONDS: Final = 0.5  # until the output is complete
MAX_SECONDS: Final = 1.5


class ArrivedCall(NamedTuple):
    """When a request arrived, and the tokens that it took."""

    at: float
    tokens: list[int]  # of input, then of output


class TokenProvider:
    """Answers chat completions; `requests` and `tokens` are its quotas per minute."""

    def __init__(self, requests: int, tokens: int, seed: int = 1) -> None:
        """Start without calls."""
        self.requests = requests
        self.tokens = tokens
        self.calls: list[ArrivedCall] = []
        self.refused = 0
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen on a free port; returns it."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def used(self, begin: float, end: float) -> int:
        """Return the tokens of the requests that arrived in an interval."""
        return sum(sum(call.tokens) for call in self.calls if begin <= call.at < end)

    def largest_window(self) -> int:
        """Return the most tokens of any window of a minute."""
        return max((self.used(call.at, call.at + PERIOD) for call in self.calls), default=0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = int(head.partition("content-length:")[2].split("\r\n", 1)[0])
                status, body, headers = await self._answer(json.loads(await reader.readexactly(length)))
                raw = json.dumps(body).encode()
                lines = [
                    f"HTTP/1.1 {status}",
                    "content-type: application/json",
                    f"content-length: {len(raw)}",
                    *headers,
                ]
                writer.write("\r\n".join([*lines, "", ""]).encode() + raw)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, body: dict[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
        now = time.monotonic()
        size = len(json.dumps(body["messages"])) // BYTES_PER_TOKEN
        requests = sum(now - PERIOD < call.at for call in self.calls)
        left = self.tokens - self.used(now - PERIOD, now + 1)
        headers = [f"x-ratelimit-limit-tokens: {self.tokens}", f"x-ratelimit-remaining-tokens: {max(0, left)}"]
        if requests >= self.requests or size > left:
            self.refused += 1
            message = "Rate limit reached on tokens per min (TPM). Please try again in 1s."
            error = {"message": message, "type": "tokens", "param": None, "code": "rate_limit_exceeded"}
            return "429 Too Many Requests", {"error": error}, [*headers, "retry-after: 1"]
        call = ArrivedCall(now, [size, 0])
        self.calls.append(call)
        output = min(self._random.randint(MIN_OUTPUT, MAX_OUTPUT), body.get("max_tokens", MAX_OUTPUT))
        await asyncio.sleep(self._random.uniform(MIN_SECONDS, MAX_SECONDS))
        call.tokens[1] = output
        message = {"role": "assistant", "content": "word " * output}
        usage = {"prompt_tokens": size, "completion_tokens": output, "total_tokens": size + output}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        reply = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return "200 OK", {**reply, "choices": [choice], "usage": usage}, headers
