"""RateLimitMiddleware for ASGI: Starlette, FastAPI, Quart, Django under ASGI, or any other application.

    app = RateLimitMiddleware(app, config="config.yaml")

Pure ASGI: it reads the request, adds header fields to the first message of the response and passes everything else
through unchanged, so streams, background tasks and websockets keep working. A denied request never reaches the
application.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import RateLimitError
from tidegate.inbound.client.request import LONGEST_METHOD, METHOD_OVERRIDES, Request, asgi_header, asgi_path
from tidegate.inbound.limiting.flow import drive_async
from tidegate.inbound.limiting.request_limiter import MISSING, LimitOutcome, RequestLimiter
from tidegate.inbound.limiting.request_state import STATE_KEY, RequestState
from tidegate.inbound.responses import admin
from tidegate.inbound.responses.response import (
    PLAIN_DENIAL,
    RAW_PLAIN_HEADERS,
    Response,
    asks_for_json,
    plain_denial,
    raw,
    worked_out,
)
from tidegate.inbound.rules.path_readings import Route, asgi_routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Unpack

    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.headers import Style
    from tidegate.headers.problem_details import Kind
    from tidegate.inbound.client.address import TrustedProxies
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter, ResponseCharge
    from tidegate.inbound.limiting.options import Options
    from tidegate.inbound.limiting.request_limiter import RequestTarget
    from tidegate.policy import Key
    from tidegate.stores import Store

    RawFields = list[tuple[bytes, bytes]]
    Scope = Any  # a mutable mapping; frameworks have different types for it
    Message = Any
    Receive = Callable[[], Awaitable[Any]]
    Send = Callable[[Any], Awaitable[None]]
    App = Callable[[Any, Any, Any], Awaitable[None]]
    Writer = Callable[[Decision], RawFields]

POLICY_VIOLATION: Final = 1008  # the close code of a websocket that exceeds its limit
OVERRIDES: Final = frozenset(name.encode() for name in METHOD_OVERRIDES)
LONGEST_STACK: Final = 32  # wrapped applications that are inspected
START_MESSAGES: Final = frozenset(("http.response.start", "websocket.accept", "websocket.http.response.start"))


class RateLimitMiddleware:
    """Limits the requests of an ASGI application."""

    def __init__(
        self,
        app: App,
        config: str | Path | Mapping[str, object] | None = None,
        store: str | Store = "memory://",
        trusted_proxies: TrustedProxies | Iterable[str] = (),
        headers: Style = "x",
        clock: Clock | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Read `config`: the path of a file, a mapping, or None for the defaults of the API limiting spec."""
        self.app = app
        self.guard = RequestLimiter(config, store, trusted_proxies, headers, clock, tasks=True, **options)
        self._own_root = self.guard.root_path or own_root(app)
        self._blank = any(type(part).__module__.startswith("quart.") for part in stack(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: C901, PLR0912 - extra function calls would slow down every request
        """Pass a request to the application, or deny it."""
        kind = scope["type"]
        if kind != "http" and kind != "websocket":  # noqa: PLR1714 - twice as fast
            await self.app(scope, receive, _ClosingLifespan(self, send).send if kind == "lifespan" else send)
            return
        guard = self.guard
        method, path = scope["method"] if kind == "http" else "GET", scope["path"]
        target = MISSING
        if not scope.get("root_path") and "route" not in scope and not guard.by_method:
            target = guard.targets.get((method, path), MISSING)
        if target is MISSING:
            target = self._target(scope, method, path)
        if target is None:
            if guard.idle:
                guard.idle_chores()
            visit = scope[STATE_KEY] = RequestState(
                guard, None, None, scope.get(STATE_KEY)
            )  # read by route limits
            if kind == "http":
                await self.app(scope, receive, sending(visit, send))
            else:  # its messages may still be limited
                await self._websocket(scope, receive, sending(visit, send), self._visitor(scope))
            return
        gate, cost, special, _, _ = target
        peer = scope.get("client")
        host = peer[0] if peer else None
        visitor = guard.met.get(host)
        if visitor is None:
            visitor = guard.clients.find(host, scope["headers"])
        key = visitor[0]
        if special or visitor[2] or guard.special or gate is None or key is None:
            await self._seldom(scope, receive, send, target, visitor)
            return
        try:
            decision = gate.decide(key, cost)
            if gate.awaited:
                decision = await decision
        except RateLimitError as error:
            await self._after(guard.lost(gate, error), scope, receive, send, target, visitor)
            return
        seen = gate.seen
        if decision[0] and decision[1] < guard.quiet and key in seen:
            seen[key] = decision  # fast path: a known client is allowed again
            gate.allowed += 1
        elif not guard.told(gate, key, cost, decision, method, path):
            await self._deny(scope, receive, send, gate, visitor, decision)
            return
        visit = scope[STATE_KEY] = RequestState(guard, visitor, decision, scope.get(STATE_KEY))
        if kind == "http":
            await self.app(scope, receive, sending(visit, send, gate.fields))
        else:
            await self._websocket(scope, receive, sending(visit, send, gate.fields), visitor)

    # ---- slow paths --------------------------------------------------------------------------------------------------

    def _target(self, scope: Scope, method: str, path: str) -> RequestTarget | None:
        """Find the target of a request; None if it is not limited."""
        overrides = method_overrides(scope["headers"]) if self.guard.by_method else ()
        root, template = scope.get("root_path") or "", template_of(scope)
        if not root and template is None and not overrides:
            place: tuple[str | None, ...] = (method, path)
        else:
            place = (method, path, root, template, "fixed" if is_fixed(scope) else None, *overrides)
        target: RequestTarget | None = self.guard.targets.get(place, MISSING)
        if target is MISSING:
            target = self.guard.target(place, (method, *overrides), self._routes(scope), template)
        return target

    def _routes(self, scope: Scope) -> tuple[Route, ...]:
        """Return the literal readings of the path."""
        root = scope.get("root_path") or ""
        return asgi_routes(scope["path"], root, self._own_root, fixed=is_fixed(scope), blank=self._blank)

    async def _seldom(
        self, scope: Scope, receive: Receive, send: Send, target: RequestTarget, visitor: RequestClient
    ) -> None:
        """Handle a request that needs more than one plain decision."""
        outcome = LimitOutcome(let_in=True)
        if target.gate is not None and visitor.key is not None:
            request = request_of(scope, visitor)
            outcome = await drive_async(self.guard.admitting(request, target, visitor))
        await self._after(outcome, scope, receive, send, target, visitor)

    async def _after(
        self,
        outcome: LimitOutcome,
        scope: Scope,
        receive: Receive,
        send: Send,
        target: RequestTarget,
        visitor: RequestClient,
    ) -> None:
        """Pass the request on or deny it, as decided."""
        decision, settlement = outcome.decision, outcome.settlement
        if not outcome.let_in and outcome.gate is not None and decision is not None:
            await self._deny(scope, receive, send, outcome.gate, visitor, decision, outcome.kind)
            return
        visit = scope[STATE_KEY] = RequestState(self.guard, visitor, decision, scope.get(STATE_KEY))
        plain = sending(visit, send)
        settling = plain if settlement is None else _SettlingSend(plain, visit, settlement)
        try:
            if target.admin:
                await self._admin(scope, receive, settling)
            elif scope["type"] == "http":
                await self.app(scope, receive, settling)
            else:
                await self._websocket(scope, receive, settling, visitor)
        finally:
            if settlement is not None:
                await drive_async(settlement.ending())

    def _deny(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        gate: CategoryLimiter,
        visitor: RequestClient,
        decision: Decision,
        kind: Kind = "quota-exceeded",
    ) -> Awaitable[None]:
        """Send the response to a denied request. Not a coroutine itself, so that floods of denials stay cheap."""
        answers, policy = self.guard.answers, gate.category.policy
        decision = worked_out(decision)
        if answers.own is None and not asks_for_json(scope["headers"]):
            answer = plain_denial(decision, policy, kind)
        else:
            answer = answers.denial(request_of(scope, visitor), decision, policy, kind)
        outer: RequestState | None = scope.get(STATE_KEY)
        if outer is not None:
            outer.add(decision)
        return respond(scope, receive, send, answer, answers.raw_fields(decision) if outer is None else [])

    async def _admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the admin endpoint."""
        request = request_of(scope, scope[STATE_KEY].visitor)
        peer = scope.get("client")
        answer = admin.forbidden(self.guard, request, peer[0] if peer else None)
        if answer is None:
            body = b""
            more = request.method == "POST"
            while more and len(body) <= admin.MAX_BODY_BYTES:
                message = await receive()
                body += message.get("body", b"")
                more = message["type"] == "http.request" and message.get("more_body", False)
            query = scope.get("query_string", b"").decode("latin-1")
            answer = await drive_async(admin.answering(self.guard, request, query, body))
        await respond(scope, receive, send, answer, [])

    def _visitor(self, scope: Scope) -> RequestClient:
        """Identify the client of a request."""
        peer = scope.get("client")
        return self.guard.clients.find(peer[0] if peer else None, scope["headers"])

    async def _websocket(self, scope: Scope, receive: Receive, send: Send, visitor: RequestClient) -> None:
        """Pass a websocket to the application, with limits on its messages if the rules define them."""
        target = self.guard.message_target(self._routes(scope))
        if target is None or visitor.key is None:
            await self.app(scope, receive, send)
            return
        key = self.guard.clients.key_of(request_of(scope, visitor), visitor.key)
        messages = _LimitedMessages(self.guard, scope["path"], target, visitor, key, receive, send)
        await self.app(scope, messages.receive, messages.send)

    async def close(self) -> None:
        """Close the store, if this middleware opened it."""
        self.guard.flush()
        if self.guard.owns_store:
            await self.guard.store.close_async()


def sending(visit: RequestState, send: Send, write: Writer | None = None) -> Send:
    """Return a `send` for the application that adds the header fields to the first message of a response.

    The scope must not refer to it: the server's `send` refers to the scope, and a reference cycle per request would
    make the garbage collector cost more than the decision.
    """
    if visit.nested:  # the outer middleware adds the fields
        return send

    def passing(message: Message) -> Awaitable[None]:
        # A plain function: cheaper than a coroutine or an object with __call__.
        if message["type"] in START_MESSAGES:
            decision = visit.decision if visit.inner is None else visit.told
            if decision is not None:
                fields = (write or visit.guard.answers.raw_fields)(decision)
                message = {**message, "headers": [*message.get("headers", ()), *fields]}
        return send(message)

    return passing


class _SettlingSend:
    """Corrects the charge of a request before its response starts, so the client sees the corrected limits."""

    __slots__ = ("_send", "_settlement", "_visit")

    def __init__(self, send: Send, visit: RequestState, settlement: ResponseCharge) -> None:
        self._send = send
        self._visit = visit
        self._settlement = settlement

    async def __call__(self, message: Message) -> None:
        """Forward a message."""
        if message["type"] in START_MESSAGES:
            self._settlement.status = message.get("status", 101)
            if self._settlement.at_the_start:
                self._visit.look_again(await drive_async(self._settlement.starting()))
        await self._send(message)


class _LimitedMessages:
    """Limits the messages of one websocket: closes it at the limit, or drops messages."""

    __slots__ = ("_closed", "_guard", "_key", "_path", "_receive", "_send", "_target", "_visitor")

    def __init__(
        self,
        guard: RequestLimiter,
        path: str,
        target: RequestTarget,
        visitor: RequestClient,
        key: Key,
        receive: Receive,
        send: Send,
    ) -> None:
        self._guard = guard
        self._path = path
        self._target = target
        self._visitor = visitor
        self._key = key
        self._receive = receive
        self._send = send
        self._closed = False

    async def receive(self) -> Message:
        """Return the next message within the limit."""
        while not self._closed:
            message = await self._receive()
            if message["type"] != "websocket.receive" or await self._allowed():
                return message
            if not self._guard.drops_messages:
                self._closed = True
                await self._send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "Rate limit exceeded"})
        return {"type": "websocket.disconnect", "code": POLICY_VIOLATION, "reason": "Rate limit exceeded"}

    async def _allowed(self) -> bool:
        steps = self._guard.admitting_message(self._target, self._visitor, self._key, self._path)
        return await drive_async(steps)

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


async def respond(scope: Scope, receive: Receive, send: Send, answer: Response, fields: RawFields) -> None:
    """Send a complete response, to an HTTP request or to a websocket handshake."""
    headers = [*(RAW_PLAIN_HEADERS if answer is PLAIN_DENIAL else raw(answer.headers)), *fields]
    if scope["type"] == "http":
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return
    await receive()  # websocket.connect
    if "websocket.http.response" in scope.get("extensions", ()):
        await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": answer.body})
    else:
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "Rate limit exceeded"})


def request_of(scope: Scope, visitor: RequestClient) -> Request:
    """Build the Request that key, count and denial functions receive."""
    method = scope.get("method", "GET")
    return Request(method, asgi_path(scope), visitor.address, scope, lambda name: asgi_header(scope, name))


def template_of(scope: Scope) -> str | None:
    """Return the template of the route that the framework has already matched, or None."""
    route = scope.get("route")
    if route is None or not hasattr(route, "endpoint"):
        return None  # no route, or a mount, whose route is not matched yet
    # For included routers, FastAPI keeps the path with its prefix in another object.
    included = scope.get("fastapi", {}).get("effective_route_context")
    if getattr(included, "original_route", None) is route:
        route = getattr(included, "starlette_route", None) or included
    template = getattr(route, "path", None)
    return template if isinstance(template, str) else None


def is_fixed(scope: Scope) -> bool:
    """Return whether the mount point is constant, unlike Starlette's Mount("/{tenant}"), which the client chooses."""
    root, parts = scope.get("root_path"), scope.get("path_params")
    return not root or not parts or not any(str(part) in root for part in parts.values())


def stack(app: Any) -> Iterator[Any]:  # noqa: ANN401 - any application
    """Yield an application and the applications that it wraps, as far as attributes show them."""
    for _ in range(LONGEST_STACK):
        yield getattr(app, "__self__", app)  # the instance of a bound method
        app = getattr(app, "app", None)


def own_root(app: Any) -> str:  # noqa: ANN401 - any application
    """Return the prefix that the application uses instead of the scope's `root_path`, as FastAPI(root_path=…) does."""
    return next((str(part.root_path) for part in stack(app) if hasattr(part, "root_path_in_servers")), "")


def method_overrides(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """Return the methods of method-override headers, which some applications use instead of the request's method."""
    return tuple(value.decode("latin-1").strip()[:LONGEST_METHOD] for name, value in headers if name in OVERRIDES)
