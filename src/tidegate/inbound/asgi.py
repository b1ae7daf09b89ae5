"""RateLimitMiddleware for ASGI: Starlette, FastAPI, Quart, Django under ASGI, or any other application.

    app = RateLimitMiddleware(app, config="config.yaml")

Pure ASGI: it looks at the request, adds fields to the first message of the response and passes everything else through
untouched, so streams, background tasks and websockets work as without it. A denied request never reaches the
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
    Scope = Any  # whatever a framework calls a mapping that it may change
    Message = Any
    Receive = Callable[[], Awaitable[Any]]
    Send = Callable[[Any], Awaitable[None]]
    App = Callable[[Any, Any, Any], Awaitable[None]]
    Writer = Callable[[Decision], RawFields]

POLICY_VIOLATION: Final = 1008  # how a websocket is closed when it has sent too much
OVERRIDES: Final = frozenset(name.encode() for name in METHOD_OVERRIDES)
LONGEST_STACK: Final = 32  # applications that are looked through, one behind the other
START_MESSAGES: Final = frozenset(("http.response.start", "websocket.accept", "websocket.http.response.start"))


class RateLimitMiddleware:
    """Limits the requests that an ASGI application receives."""

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
        """Limit by a configuration: the path of a file, a mapping, or None for the spec's defaults."""
        self.app = app
        self.guard = RequestLimiter(config, store, trusted_proxies, headers, clock, tasks=True, **options)
        self._own_root = self.guard.root_path or own_root(app)
        self._blank = any(type(part).__module__.startswith("quart.") for part in stack(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: C901, PLR0912 - a call for each branch would cost every request
        """Let a request in, or answer it."""
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
            )  # for limits of single routes
            if kind == "http":
                await self.app(scope, receive, sending(visit, send))
            else:  # its messages may be limited all the same
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
            seen[key] = decision  # a client that is known is allowed once more: this is all there is to note
            gate.allowed += 1
        elif not guard.told(gate, key, cost, decision, method, path):
            await self._deny(scope, receive, send, gate, visitor, decision)
            return
        visit = scope[STATE_KEY] = RequestState(guard, visitor, decision, scope.get(STATE_KEY))
        if kind == "http":
            await self.app(scope, receive, sending(visit, send, gate.fields))
        else:
            await self._websocket(scope, receive, sending(visit, send, gate.fields), visitor)

    # ---- what is not usual -------------------------------------------------------------------------------------------

    def _target(self, scope: Scope, method: str, path: str) -> RequestTarget | None:
        """Tell where a request goes; None: it is not limited."""
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
        """Give the literal readings of the path."""
        root = scope.get("root_path") or ""
        return asgi_routes(scope["path"], root, self._own_root, fixed=is_fixed(scope), blank=self._blank)

    async def _seldom(
        self, scope: Scope, receive: Receive, send: Send, target: RequestTarget, visitor: RequestClient
    ) -> None:
        """Let in or answer a request with something special about it."""
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
        """Do what was decided."""
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
        """Answer a request that is not let in. No coroutine of its own: a flood of these should cost little."""
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
        """Answer the operator."""
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
        """Tell who sent a request."""
        peer = scope.get("client")
        return self.guard.clients.find(peer[0] if peer else None, scope["headers"])

    async def _websocket(self, scope: Scope, receive: Receive, send: Send, visitor: RequestClient) -> None:
        """Let a websocket in; each of its messages is limited too, where the configuration says so."""
        target = self.guard.message_target(self._routes(scope))
        if target is None or visitor.key is None:
            await self.app(scope, receive, send)
            return
        key = self.guard.clients.key_of(request_of(scope, visitor), visitor.key)
        messages = _LimitedMessages(self.guard, scope["path"], target, visitor, key, receive, send)
        await self.app(scope, messages.receive, messages.send)

    async def close(self) -> None:
        """Let the store go, if it was opened here."""
        self.guard.flush()
        if self.guard.owns_store:
            await self.guard.store.close_async()


def sending(visit: RequestState, send: Send, write: Writer | None = None) -> Send:
    """Give a `send` for the application that adds the fields to the first message of a response.

    The scope must not lead to it: the server's `send` leads back to the scope, and such a circle would be left to the
    garbage collector with every request, which costs more than all the rest.
    """
    if visit.nested:  # the middleware in front adds them
        return send

    def passing(message: Message) -> Awaitable[None]:
        # Not a coroutine itself, and a function rather than an object: it costs next to nothing.
        if message["type"] in START_MESSAGES:
            decision = visit.decision if visit.inner is None else visit.told
            if decision is not None:
                fields = (write or visit.guard.answers.raw_fields)(decision)
                message = {**message, "headers": [*message.get("headers", ()), *fields]}
        return send(message)

    return passing


class _SettlingSend:
    """Corrects the charge of a request before its response begins, so that whoever has that may count on it."""

    __slots__ = ("_send", "_settlement", "_visit")

    def __init__(self, send: Send, visit: RequestState, settlement: ResponseCharge) -> None:
        self._send = send
        self._visit = visit
        self._settlement = settlement

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] in START_MESSAGES:
            self._settlement.status = message.get("status", 101)
            if self._settlement.at_the_start:
                self._visit.look_again(await drive_async(self._settlement.starting()))
        await self._send(message)


class _LimitedMessages:
    """Limits the messages of one websocket: too many close it, or are dropped."""

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
        """Give the application the next message that is not one too many."""
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
        """Pass on what the application sends, until the websocket is closed."""
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
    """Send a whole answer, over HTTP or in place of a websocket."""
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
    """Give the request as keys and answers are chosen by."""
    method = scope.get("method", "GET")
    return Request(method, asgi_path(scope), visitor.address, scope, lambda name: asgi_header(scope, name))


def template_of(scope: Scope) -> str | None:
    """Tell the route that the framework has found, if it has found one before us."""
    route = scope.get("route")
    if route is None or not hasattr(route, "endpoint"):
        return None  # none, or a mount: which route it leads to is still open
    # FastAPI leaves out the prefix that a router is included with, and tells the whole elsewhere.
    included = scope.get("fastapi", {}).get("effective_route_context")
    if getattr(included, "original_route", None) is route:
        route = getattr(included, "starlette_route", None) or included
    template = getattr(route, "path", None)
    return template if isinstance(template, str) else None


def is_fixed(scope: Scope) -> bool:
    """Tell whether no part of the mount point was chosen by the client, as in Starlette's Mount("/{tenant}")."""
    root, parts = scope.get("root_path"), scope.get("path_params")
    return not root or not parts or not any(str(part) in root for part in parts.values())


def stack(app: Any) -> Iterator[Any]:  # noqa: ANN401 - any application
    """Give an application and those that it wraps, as far as can be seen."""
    for _ in range(LONGEST_STACK):
        yield getattr(app, "__self__", app)  # of a method, whose it is
        app = getattr(app, "app", None)


def own_root(app: Any) -> str:  # noqa: ANN401 - any application
    """Tell which prefix an application puts in place of `root_path`: FastAPI(root_path=…) does so behind us."""
    return next((str(part.root_path) for part in stack(app) if hasattr(part, "root_path_in_servers")), "")


def method_overrides(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """Tell the methods that a request asks to be taken for; some applications do."""
    return tuple(value.decode("latin-1").strip()[:LONGEST_METHOD] for name, value in headers if name in OVERRIDES)
