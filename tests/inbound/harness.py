"""Test applications behind both middlewares with one interface, so that each test covers both."""

from __future__ import annotations

import asyncio
import io
from typing import Any, NamedTuple

from tidegate.inbound import asgi, wsgi
from tidegate.inbound._rules.path_readings import asgi_routes
from tidegate.testing import ManualClock

START = 1_728_000_000
PEER = "203.0.113.9"


def matches(rules, path, method="GET", template=None, root=""):
    """Return everything that a request is charged to."""
    return rules.matches(asgi_routes(path, root), [method], template)


def only_match(rules, path, method="GET"):
    """Return the only category that a request is charged to; None if it is not limited."""
    found = matches(rules, path, method)
    assert len(found) <= 1
    return found[0] if found else None


class Reply(NamedTuple):
    status: int
    fields: list[tuple[str, str]]
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.fields}

    def __getitem__(self, name):  # type: ignore[override]  # by name or, as a tuple, by number
        return self.headers[name] if isinstance(name, str) else tuple.__getitem__(self, name)

    @property
    def remaining(self) -> int:
        return int(self.headers["x-ratelimit-remaining"])


class Harness:
    """A middleware in front of an application that responds with the status in X-Status."""

    def __init__(
        self, config: Any = None, *, app: Any = None, clock: ManualClock | None = None, **options: Any
    ) -> None:
        self.clock = clock or ManualClock(start=START)
        self.reached: list[str] = []  # paths that reached the application
        self.middleware = self.build(app or self.app, config, clock=self.clock, **options)
        self.limiter = self.middleware.request_limiter

    build: Any
    app: Any

    def request(self, path="/api/feeds", method="GET", headers=(), peer=PEER, body=b"", **more) -> Reply:
        raise NotImplementedError

    def statuses(self, count, path="/api/feeds", **more) -> list[int]:
        return [self.request(path, **more).status for _ in range(count)]

    def flood(self, peers) -> None:
        for peer in peers:
            self.request(peer=peer)

    def close(self) -> None:
        raise NotImplementedError


class AsgiHarness(Harness):
    build = asgi.RateLimitMiddleware

    def __init__(self, *args: Any, **options: Any) -> None:
        self.runner = asyncio.Runner()
        super().__init__(*args, **options)

    async def app(self, scope, receive, send):
        self.reached.append(scope["path"])
        status = next((int(value) for name, value in scope["headers"] if name == b"x-status"), 200)
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-app", b"yes")]})
        await send({"type": "http.response.body", "body": b"hello"})

    def request(self, path="/api/feeds", method="GET", headers=(), peer=PEER, body=b"", **more) -> Reply:
        return self.runner.run(self.request_async(path, method, headers, peer, body, **more))

    async def request_async(self, path="/api/feeds", method="GET", headers=(), peer=PEER, body=b"", **more) -> Reply:
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode("utf-8", "replace"), "query_string": query.encode(), "root_path": "",
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
            "client": (peer, 4711) if peer is not None else None, "server": ("127.0.0.1", 80), **more,
        }  # fmt: skip
        sent: list[Any] = []

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        await self.middleware(scope, receive, send)
        first = sent[0]
        fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in first["headers"]]
        return Reply(first["status"], fields, b"".join(message.get("body", b"") for message in sent[1:]))

    def flood(self, peers) -> None:
        async def ask():
            for peer in peers:
                await self.request_async(peer=peer)

        self.runner.run(ask())

    def close(self) -> None:
        self.runner.run(self.middleware.close())
        self.runner.close()


class WsgiHarness(Harness):
    build = wsgi.RateLimitMiddleware

    def app(self, environ, start_response):
        self.reached.append(environ["PATH_INFO"])
        start_response(f"{environ.get('HTTP_X_STATUS', 200)} Status", [("X-App", "yes")])
        return [b"hello"]

    def request(self, path="/api/feeds", method="GET", headers=(), peer=PEER, body=b"", **more) -> Reply:
        path, _, query = path.partition("?")
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method, "SCRIPT_NAME": "", "PATH_INFO": path.encode("utf-8", "replace").decode("latin-1"),
            "QUERY_STRING": query, "SERVER_NAME": "test", "SERVER_PORT": "80", "wsgi.input": io.BytesIO(body),
            "CONTENT_LENGTH": str(len(body)), **more,
        }  # fmt: skip
        if peer is not None:
            environ["REMOTE_ADDR"] = peer
        for name, value in headers:
            field = f"HTTP_{name.upper().replace('-', '_')}"
            environ[field] = f"{environ[field]},{value}" if field in environ else value
        found: list[Any] = []
        parts = self.middleware(environ, lambda *args: found.append(args))
        try:
            content = b"".join(parts)
        finally:
            if hasattr(parts, "close"):
                parts.close()
        status, fields = found[-1][:2]
        return Reply(int(status[:3]), fields, content)

    def close(self) -> None:
        self.middleware.close()


HARNESSES = (AsgiHarness, WsgiHarness)


async def run_websocket(middleware, texts, path="/ws/a", extensions=(), peer="203.0.113.9", **more):
    """Connect, send messages, disconnect; return the messages to the client."""
    events = [{"type": "websocket.connect"}]
    events += [{"type": "websocket.receive", "text": text} for text in texts]
    events += [{"type": "websocket.disconnect", "code": 1000}]
    coming = iter(events)
    sent = []

    async def receive():
        return next(coming)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "websocket", "path": path, "headers": [], "client": (peer, 1), "root_path": "", "query_string": b"",
        "extensions": {name: {} for name in extensions}, **more,
    }  # fmt: skip
    await middleware(scope, receive, send)
    return sent
