"""RateLimitMiddleware for ASGI: Starlette, FastAPI, Quart, Django under ASGI, or any other application.

    app = RateLimitMiddleware(app, config="config.yaml")

Pure ASGI: it reads the request, adds header fields to the first message of the response and passes everything else
through unchanged, so streams, background tasks and websockets keep working. A denied request never reaches the
application.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.flow import run_async
from tidegate.errors import ConfigError
from tidegate.inbound._client.address import is_forwarded
from tidegate.inbound._client.request import MAX_METHOD_LENGTH, METHOD_OVERRIDES
from tidegate.inbound._limiting.asgi_responses import POLICY_VIOLATION, add_fields, finish, respond
from tidegate.inbound._limiting.charges import ALLOWED, perform_async
from tidegate.inbound._limiting.find_routes import AppRoutes
from tidegate.inbound._limiting.matched_route import find_template, has_fixed_mount, wrapped_apps
from tidegate.inbound._limiting.native_requests import asgi_request
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.request_state import STATE_KEY, RequestState
from tidegate.inbound._limiting.request_targets import MISSING, MessageTarget
from tidegate.inbound._responses import admin
from tidegate.inbound._responses.response import fit_to_status, plain_denial
from tidegate.inbound._rules.path_readings import Route, asgi_routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from pathlib import Path
    from typing import Unpack

    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import Flow
    from tidegate.core._decision import Decision
    from tidegate.headers import Style
    from tidegate.inbound._client.address import TrustedProxies
    from tidegate.inbound._client.identify import RequestClient
    from tidegate.inbound._limiting.charges import ChargeResult
    from tidegate.inbound._limiting.options import Options
    from tidegate.inbound._limiting.request_targets import RequestTarget
    from tidegate.inbound._responses.response import Response
    from tidegate.stores import Store

    Scope = Any  # a mutable mapping; frameworks have different types for it
    Message = Any
    Receive = Callable[[], Awaitable[Any]]
    Send = Callable[[Any], Awaitable[None]]
    App = Callable[..., Awaitable[None]]

__all__ = ["RateLimitMiddleware"]

WEBSOCKET: Final = "WEBSOCKET"  # in place of a method: what a WebSocket and a GET to the same path are charged differs
OVERRIDE_FIELDS: Final = frozenset(name.encode() for name in METHOD_OVERRIDES)


class RateLimitMiddleware:
    """Limits the requests of an ASGI application."""

    def __init__(
        self,
        app: App,
        config: str | Path | Mapping[str, object] | None = None,
        store: str | Store = "memory://",
        trusted_proxies: TrustedProxies | Iterable[str] = (),
        headers: Style | Mapping[str, str] = "x",
        clock: Clock | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Read `config`: the path of a file, a mapping, or None for the defaults of the API limiting spec."""
        self.app = app
        if store == "memory://":
            check_is_shared(app)
        # Public name: docs/reference/inbound.md uses `middleware.request_limiter.store`.
        self.request_limiter: RequestLimiter = RequestLimiter(
            config, store, trusted_proxies, headers, clock, tasks=True, raw=True, **options
        )
        self._own_root = self.request_limiter.root_path or find_root_path(app)
        self._routes = self.request_limiter.routes = AppRoutes(app, self.request_limiter.has_default_limits)
        self._blank = any(type(wrapped).__module__.startswith("quart.") for wrapped in wrapped_apps(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: C901, PLR0912, PLR0915 - further coroutines would slow down every request
        """Pass a request to the application, or deny it."""
        kind = scope["type"]
        if kind == "http":
            method = scope["method"]
        elif kind == "websocket":
            method = WEBSOCKET
        else:
            await self.app(scope, receive, _ClosingLifespan(self, send).send if kind == "lifespan" else send)
            return
        request_limiter, target = self.request_limiter, MISSING
        provider = self._routes.provider
        overrides = provider is not None and provider.dependency_overrides
        if not overrides and not scope.get("root_path") and "route" not in scope:
            target = request_limiter.targets.plain.get((method, scope["path"]), MISSING)
        if target is MISSING:
            target = self._find_target(scope, method)
        if target is None and request_limiter.idle:
            request_limiter.run_idle_maintenance()
        client = request = found = None
        result = ALLOWED
        if target is not None or request_limiter.needs_request or kind == "websocket":
            client = found = self._find_client(scope)
            if request_limiter.needs_request or (target is not None and target.needs_request):
                request = asgi_request(scope, client.address)
                if request_limiter.client_identifier.awaits_key:
                    await request_limiter.client_identifier.await_key_function(request)
                client = found = request_limiter.exempt_client(request, client)
            if target is not None:
                asked = "GET" if method is WEBSOCKET else method
                decided = request_limiter.decide_now(target, client, asked, scope["path"], request)
                if decided is None:
                    flow = request_limiter.check_flow(request or asgi_request(scope, client.address), target, client)
                    decided = await run_async(flow, perform_async)
                result = decided
                if not result.allowed and not result.by_route:
                    await self._deny(scope, receive, send, client, result)
                    return
            elif client.key is not None:
                client = None  # the limits of the endpoint identify it
        request_state = RequestState()
        request_state.request_limiter, request_state.client = request_limiter, client
        if STATE_KEY in scope:
            request_state.nest(scope[STATE_KEY])
        request_state.start(result, target)
        scope[STATE_KEY] = request_state
        sending = add_fields(request_state, scope, receive, send)
        try:
            if found is not None and kind == "websocket":
                await self._websocket(scope, receive, sending, found)
            elif target is None or not target.admin:
                await self.app(scope, receive, sending)
            else:
                await self._admin(scope, receive, sending)
        finally:
            if request_state.is_open:
                await finish(scope, request_state)

    def _find_target(self, scope: Scope, method: str) -> RequestTarget | None:
        """Find the target of a request; None if it is not limited."""
        request_limiter, path = self.request_limiter, scope["path"]
        asked = "GET" if method is WEBSOCKET else method
        overrides = read_method_overrides(scope["headers"]) if request_limiter.by_method else ()
        root, template = scope.get("root_path") or "", find_template(scope)
        if not root and template is None and not overrides:
            cache_key: tuple[str | None, ...] = (method, path)
        else:
            cache_key = (method, path, root, template, "fixed" if has_fixed_mount(scope) else None, *overrides)
        overridden = bool(self._routes.overrides)
        target: RequestTarget | None = MISSING if overridden else request_limiter.targets.cached.get(cache_key, MISSING)
        if target is MISSING:
            if self._routes.update():
                request_limiter.targets.clear()
            route = None if overridden or not self._routes.limited else self._routes.find(asked, path, scope)
            key = () if overridden else cache_key
            target = request_limiter.targets.find(key, (asked, *overrides), self._path_readings(scope), template, route)
        return target

    def _path_readings(self, scope: Scope) -> tuple[Route, ...]:
        """Return the paths that routers may compare with their routes (see `rules.path_readings`)."""
        root = scope.get("root_path") or ""
        return asgi_routes(scope["path"], root, self._own_root, fixed=has_fixed_mount(scope), blank=self._blank)

    def _deny(
        self, scope: Scope, receive: Receive, send: Send, client: RequestClient, result: ChargeResult
    ) -> Awaitable[None]:
        """Send the response to a denied request. Not a coroutine itself, so that floods of denials stay cheap."""
        writer, decision = self.request_limiter.response_writer, result.decision
        assert decision is not None  # noqa: S101 - a denial has a decision
        decision = decision.with_views()  # a denial reads them several times
        if writer.is_plain(scope["headers"]):
            response = plain_denial(decision, result.denials[0].charge.policy)
        else:
            response = writer.write_denial(
                asgi_request(scope, client.address), decision, result.denials[0].charge.policy
            )
        outer: RequestState | None = scope.get(STATE_KEY)
        if outer is not None:
            return self._deny_nested(scope, receive, send, response, outer, decision)
        return respond(scope, receive, send, response, fit_to_status(writer.raw_fields(decision), response.status))

    async def _deny_nested(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        response: Response,
        outer: RequestState,
        decision: Decision,
    ) -> None:
        """Deny a request inside another middleware, which adds the headers: refund what it has charged."""
        await run_async(outer.deny_flow(decision), perform_async)
        await respond(scope, receive, send, response, [])

    async def _admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the admin endpoint."""
        request = asgi_request(scope, scope[STATE_KEY].address)
        peer = scope.get("client")
        response = admin.check_access(self.request_limiter, request, peer[0] if peer else None)
        if response is None:
            body = b""
            more = request.method == "POST"
            while more and len(body) <= admin.MAX_BODY_BYTES:
                message = await receive()
                body += message.get("body", b"")
                more = message["type"] == "http.request" and message.get("more_body", False)
            query = scope.get("query_string", b"").decode("latin-1")
            response = await run_async(admin.handle_flow(self.request_limiter, request, query, body), perform_async)
        await respond(scope, receive, send, response, [])

    def _find_client(self, scope: Scope) -> RequestClient:
        """Identify the client of a request."""
        peer, identifier = scope.get("client"), self.request_limiter.client_identifier
        if peer:
            client = identifier.by_peer.get(peer[0])
            if client is not None and not (identifier.watches_headers and is_forwarded(scope["headers"])):
                return client
        return identifier.find(peer[0] if peer else None, scope["headers"])

    async def _websocket(self, scope: Scope, receive: Receive, send: Send, client: RequestClient) -> None:
        """Pass a websocket to the application, with limits on its messages if the rules define them."""
        request_limiter, request = self.request_limiter, asgi_request(scope, client.address)
        target = MessageTarget(request, self._path_readings(scope))
        if client.key is None or not target.find(request_limiter.targets, request_limiter.plan_limiters):
            await self.app(scope, receive, send)
            return
        key = request_limiter.client_identifier.choose_key(request, client.key)
        check_flow = partial(request_limiter.check_message_flow, target, client, key, scope["path"])
        messages = _LimitedMessages(check_flow, receive, send, drops=request_limiter.drops_messages)
        await self.app(scope, messages.receive, messages.send)

    async def close(self) -> None:
        """Close the store, if this middleware opened it."""
        self.request_limiter.flush()
        await self.request_limiter.opened_store.close_async()


class _LimitedMessages:
    """Limits the messages of one websocket: closes it at the limit, or drops messages."""

    __slots__ = ("_check_flow", "_closed", "_drops", "_receive", "_send")

    def __init__(self, check_flow: Callable[[], Flow[Any, bool]], receive: Receive, send: Send, *, drops: bool) -> None:
        self._check_flow = check_flow
        self._receive = receive
        self._send = send
        self._drops = drops
        self._closed = False

    async def receive(self) -> Message:
        """Return the next message within the limit."""
        while not self._closed:
            message = await self._receive()
            if message["type"] != "websocket.receive" or await run_async(self._check_flow(), perform_async):
                return message
            if not self._drops:
                self._closed = True
                await self._send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "Rate limit exceeded"})
        return {"type": "websocket.disconnect", "code": POLICY_VIOLATION, "reason": "Rate limit exceeded"}

    async def send(self, message: Message) -> None:
        """Forward messages of the application until the websocket is closed."""
        if not self._closed:
            await self._send(message)


class _ClosingLifespan:
    """Closes the store when the application has shut down."""

    __slots__ = ("_middleware", "_send")

    def __init__(self, middleware: RateLimitMiddleware, send: Send) -> None:
        self._middleware = middleware
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "lifespan.shutdown.complete":
            await self._middleware.close()
        await self._send(message)


def check_is_shared(app: Any) -> None:  # noqa: ANN401 - any application
    """Raise ConfigError if the framework creates a middleware for each route: each would have its own counts."""
    if any(type(wrapped).__module__.startswith("litestar.middleware.") for wrapped in wrapped_apps(app)):
        raise ConfigError(
            "Litestar creates the middlewares of `middleware=` once for each route, and each would count in its own "
            "memory: wrap the application instead, as in RateLimitMiddleware(Litestar(…))",
            field="store",
        )


def find_root_path(app: Any) -> str:  # noqa: ANN401 - any application
    """Return the prefix that the application uses instead of the scope's `root_path`, as FastAPI(root_path=…) does."""
    return next(
        (str(wrapped.root_path) for wrapped in wrapped_apps(app) if hasattr(wrapped, "root_path_in_servers")), ""
    )


def read_method_overrides(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """Return the methods of method-override headers, which some applications use instead of the request's method."""
    return tuple(
        value.decode("latin-1").strip()[:MAX_METHOD_LENGTH] for name, value in headers if name in OVERRIDE_FIELDS
    )
