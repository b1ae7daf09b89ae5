"""A server that answers as the language-model APIs do: their bodies, streams, rate limit headers and refusals."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.outbound.server import Answer, QuotaServer, Request
from tests.recipes import bodies

if TYPE_CHECKING:
    import ssl

INPUT_TOKENS = 12
OUTPUT_TOKENS = 30
TOKENS_PER_MINUTE = 500_000
JSON = ("Content-Type", "application/json")
SSE = ("Content-Type", "text/event-stream; charset=utf-8")


class ModelServer(QuotaServer):
    """Counts requests over all APIs together; refuses what exceeds `limit` requests per `period` seconds."""

    def __init__(self, limit: int, period: float, tls: ssl.SSLContext | None = None) -> None:
        """Allow so many requests per period."""
        super().__init__(limit, period, self.answer, tls)

    def answer(self, request: Request) -> Answer:
        """Answer a request that is let through."""
        content = json.loads(request.body)
        reply, is_stream = self._reply(request, content)
        headers = self.rate_limit_headers(request)
        if is_stream:
            return Answer(200, (SSE, *headers), tuple(reply))
        return Answer(200, (JSON, *headers), (json.dumps(reply).encode(),))

    @staticmethod
    def _reply(request: Request, content: dict[str, Any]) -> tuple[Any, bool]:
        path, is_stream = request.path.partition("?")[0], bool(content.get("stream"))
        if path.endswith(":generateContent"):
            return bodies.gemini(), False
        if path.endswith(":streamGenerateContent"):
            return bodies.gemini_stream(), True
        models = {
            "/v1/chat/completions": (bodies.chat, bodies.chat_stream),
            "/v1/responses": (bodies.response, bodies.response_stream),
            "/v1/messages": (bodies.message, bodies.message_stream),
        }
        whole, streamed = models[path]
        return (streamed if is_stream else whole)(content), is_stream

    def rate_limit_headers(self, request: Request) -> tuple[tuple[str, str], ...]:
        """Return the headers that the API of this host sends with every response."""
        used = len(self.let_through) * (INPUT_TOKENS + OUTPUT_TOKENS)
        left = max(0, TOKENS_PER_MINUTE - used)
        match request.headers["host"]:
            case "api.openai.com":
                return (
                    ("x-request-id", "req_5f0b1c"),
                    ("openai-processing-ms", "21"),
                    ("openai-version", "2020-10-01"),
                    ("x-ratelimit-limit-requests", str(self.limit)),
                    ("x-ratelimit-limit-tokens", str(TOKENS_PER_MINUTE)),
                    ("x-ratelimit-remaining-requests", str(self.left)),
                    ("x-ratelimit-remaining-tokens", str(left)),
                    ("x-ratelimit-reset-requests", f"{self.period / max(1, self.limit):.3f}s"),
                    ("x-ratelimit-reset-tokens", "12ms"),
                )
            case "api.anthropic.com":
                reset = (datetime.now(UTC) + timedelta(seconds=self.period)).strftime("%Y-%m-%dT%H:%M:%SZ")
                prefix = "anthropic-ratelimit"
                return (
                    ("request-id", "req_011CSHoEeqs5C35K2UUqR7Fy"),
                    (f"{prefix}-requests-limit", str(self.limit)),
                    (f"{prefix}-requests-remaining", str(self.left)),
                    (f"{prefix}-requests-reset", reset),
                    *(
                        (f"{prefix}-{kind}-{what}", value)
                        for kind in ("input-tokens", "output-tokens", "tokens")
                        for what, value in (
                            ("limit", str(TOKENS_PER_MINUTE)),
                            ("remaining", str(left // 1000 * 1000)),
                            ("reset", reset),
                        )
                    ),
                )
            case "api.mistral.ai":
                return (
                    ("x-ratelimit-limit-req-minute", str(self.limit)),
                    ("x-ratelimit-remaining-req-minute", str(self.left)),
                    ("x-ratelimit-limit-tokens-minute", str(TOKENS_PER_MINUTE)),
                    ("x-ratelimit-remaining-tokens-minute", str(left)),
                    ("x-ratelimit-tokens-query-cost", str(INPUT_TOKENS + OUTPUT_TOKENS)),
                )
            case _:  # Gemini sends none
                return ()

    def refuse(self, request: Request) -> Answer:
        """Answer a request that exceeds the limit, with the body that this API sends."""
        host = request.headers["host"]
        wait = max(1, round(self.period))
        headers = [JSON, *self.rate_limit_headers(request)]
        if host in ("api.openai.com", "api.anthropic.com"):
            headers.append(("retry-after", str(wait)))
        if host == "api.openai.com":
            headers.append(("retry-after-ms", str(wait * 1000)))
        return Answer(429, tuple(headers), (json.dumps(bodies.refusal(host, self.limit, wait)).encode(),))
