"""RateLimitMiddleware for ASGI: Starlette, FastAPI, Quart, Django under ASGI, or any other application.

    app = RateLimitMiddleware(app, config="config.yaml")

Pure ASGI: it reads the request, adds header fields to the first message of the response and passes everything else
through unchanged, so streams, background tasks and websockets keep working. A denied request never reaches the
application.
"""

from __future__ import annotations

from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.decision import Decision
from tidegate.errors import ConfigError, RateLimitError
from tidegate.flow import run_async
from tidegate.inbound.client.address import FORWARDING_FIELDS
from tidegate.inbound.client.request import MAX_METHOD_LENGTH, METHOD_OVERRIDES
from tidegate.inbound.limiting.asgi_responses import (
    POLICY_VIOLATION,
    add_fields,
    decide_pending,
    finish,
    make_request,
    respond,
)
from tidegate.inbound.limiting.matched_route import find_template, has_fixed_mount
from tidegate.inbound.limiting.request_limiter import LimitOutcome, RequestLimiter
from tidegate.inbound.limiting.request_state import STATE_KEY, RequestState, make_state
from tidegate.inbound.limiting.request_targets import MISSING, MessageTarget
from tidegate.inbound.limiting.route_hooks import AsgiRouteHooks, wrapped_apps
from tidegate.inbound.responses import admin
from tidegate.inbound.responses.response import Response, fit_to_status, plain_denial
from tidegate.inbound.rules.path_readings import Route, asgi_routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Unpack

    from tidegate.clock import Clock
    from tidegate.flow import CallFlow
    from tidegate.headers import Style
    from tidegate.headers.problem_details import Kind
    from tidegate.inbound.client.address import TrustedProxies
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter
    from tidegate.inbound.limiting.charges import RequestCharge
    from tidegate.inbound.limiting.options import Options
    from tidegate.inbound.limiting.request_targets import RequestTarget
    from tidegate.policy import Cost, Key
    from tidegate.stores import Store

    RawFields = list[tuple[bytes, bytes]]
    Scope = Any  # a mutable mapping; frameworks have different types for it
    Message = Any
    Receive = Callable[[], Awaitable[Any]]
    Send = Callable[[Any], Awaitable[None]]
    App = Callable[..., Awaitable[None]]

__all__ = ["RateLimitMiddleware"]

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
        # Public name: docs/inbound.md uses `middleware.request_limiter.store`.
        self.request_limiter: RequestLimiter = RequestLimiter(
            config, store, trusted_proxies, headers, clock, tasks=True, raw=True, **options
        )
        self._own_root = self.request_limiter.root_path or find_root_path(app)
        self._route_hooks = self.request_limiter.route_hooks = AsgiRouteHooks(app, decide_pending, self.request_limiter)
        self._blank = any(type(wrapped).__module__.startswith("quart.") for wrapped in wrapped_apps(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: C901, PLR0911, PLR0912, PLR0915 - extra function calls would slow down every request
        """Pass a request to the application, or deny it."""
        kind = scope["type"]
        if kind == "http":
            method = scope["method"]
        elif kind == "websocket":
            method = "GET"
        else:
            await self.app(scope, receive, _ClosingLifespan(self, send).send if kind == "lifespan" else send)
            return
        request_limiter, path, peer = self.request_limiter, scope["path"], scope.get("client")
        target = None
        if not scope.get("root_path") and "route" not in scope:
            target = request_limiter.plain_targets.get((method, path))
        client = request_limiter.plain_clients.get(peer[0]) if peer else None
        if target is None or client is None:
            target = target or self._find_target(scope, method, path)
            if target is None:
                await self._pass(scope, receive, send)
                return
            client = request_limiter.client_identifier.find(peer[0] if peer else None, scope["headers"])
            if target.special or client.special or request_limiter.special:
                await self._handle_special(scope, receive, send, target, client)
                return
            self._route_hooks.update()
        else:
            identifier = request_limiter.client_identifier
            if identifier.watches_headers and peer[0] not in identifier.examined_peers:
                for name, _ in scope["headers"]:
                    if name in FORWARDING_FIELDS:
                        identifier.find(peer[0], scope["headers"])  # warns
                        break
        cost = target.cost
        category_limiter: CategoryLimiter = target.category_limiter  # type: ignore[assignment]  # None is special
        key: Key = client.key  # type: ignore[assignment]  # as above
        request_state = RequestState()
        request_state.request_limiter = request_limiter
        request_state.client = client
        outer = scope.get(STATE_KEY)
        last_decisions = category_limiter.last_decisions
        has_route_limits = self._route_hooks.limited
        if has_route_limits or (outer is not None and outer.is_pending):
            # This limit is decided together with those of the route; a client that is still over it is denied now.
            last = last_decisions.get(key)
            if last is not None and not last[0]:
                still_denied = await self._find_denial(category_limiter, key, cost, method, path)
                if still_denied is not None:
                    await self._deny(scope, receive, send, category_limiter, client, still_denied)
                    return
            if cost == 1:
                request_state.deferred, request_state.key = category_limiter, key
            else:
                request_state.pending = request_limiter.make_charges(target, key)
        else:
            last = last_decisions.get(key)
            known = last is not None and last[0] and cost == 1
            charged = category_limiter.acquire((key,)) if known else None
            if charged is not None:
                now, views = charged
                decision = Decision((True, now, category_limiter.limits, views, None))
                if now < request_limiter.fast_path_until:
                    last_decisions[key] = decision  # `record_decision`, inlined
                    category_limiter.allowed += 1
                else:
                    request_limiter.record_decision(category_limiter, key, cost, decision, method, path)
                request_state.write, request_state.written = category_limiter.write, charged
            else:
                try:
                    decision = category_limiter.decide(key, cost)
                    if category_limiter.is_async:
                        decision = await decision
                except RateLimitError as error:
                    outcome = request_limiter.handle_store_error(category_limiter, error)
                    await self._apply_outcome(outcome, scope, receive, send, target, client)
                    return
                if not request_limiter.record_decision(category_limiter, key, cost, decision, method, path):
                    await self._deny(scope, receive, send, category_limiter, client, decision)
                    return
                if decision[0]:
                    request_state.write, request_state.written = request_limiter.write, decision
                request_state.cost = cost
            request_state.decision, request_state.charged, request_state.key = decision, category_limiter, key
        scope[STATE_KEY] = request_state
        sending = add_fields(request_state, scope, receive, send)
        if outer is not None:
            request_state.nest(outer)
            if not has_route_limits and not await decide_pending(scope, receive, sending):
                return
        try:
            if kind == "http":
                await self.app(scope, receive, sending)
            else:
                await self._websocket(scope, receive, sending, client)
        except BaseException as error:
            await finish(scope, request_state, cancelled=not isinstance(error, Exception))
            raise
        if request_state.write is None:
            await finish(scope, request_state)

    # ---- slow paths --------------------------------------------------------------------------------------------------

    def _find_target(self, scope: Scope, method: str, path: str) -> RequestTarget | None:
        """Find the target of a request; None if it is not limited."""
        overrides = read_method_overrides(scope["headers"]) if self.request_limiter.by_method else ()
        root, template = scope.get("root_path") or "", find_template(scope)
        if not root and template is None and not overrides:
            cache_key: tuple[str | None, ...] = (method, path)
        else:
            cache_key = (method, path, root, template, "fixed" if has_fixed_mount(scope) else None, *overrides)
        target: RequestTarget | None = self.request_limiter.targets.cached.get(cache_key, MISSING)
        if target is MISSING:
            target = self.request_limiter.targets.find(cache_key, (method, *overrides), self._routes(scope), template)
        return target

    def _routes(self, scope: Scope) -> tuple[Route, ...]:
        """Return the paths that routers may compare with their routes (see `rules.path_readings`)."""
        root = scope.get("root_path") or ""
        return asgi_routes(scope["path"], root, self._own_root, fixed=has_fixed_mount(scope), blank=self._blank)

    async def _handle_special(
        self, scope: Scope, receive: Receive, send: Send, target: RequestTarget, client: RequestClient
    ) -> None:
        """Handle a request that needs more than one plain decision."""
        outcome = LimitOutcome(allowed=True)
        request = make_request(scope, client)
        if self.request_limiter.client_identifier.awaits_key:
            await self.request_limiter.client_identifier.await_key_function(request)
        client = self.request_limiter.exempt_client(request, client)
        if target.category_limiter is not None and client.key is not None:
            if not target.admin and self._route_hooks.update():
                prepared = await run_async(self.request_limiter.prepare_flow(request, target, client), call)
                if not isinstance(prepared, LimitOutcome):
                    await self._defer(scope, receive, send, client, prepared)
                    return
                outcome = prepared
            else:
                outcome = await run_async(self.request_limiter.check_flow(request, target, client), call)
        await self._apply_outcome(outcome, scope, receive, send, target, client)

    async def _find_denial(
        self, category_limiter: CategoryLimiter, key: Key, cost: Cost, method: str, path: str
    ) -> Decision | None:
        """Return the denial of a client that was denied before and is still over the limit; None: it may pass."""
        if self._route_hooks.may_be_exempt(method, path):
            return None  # the route decides
        try:
            decision = category_limiter.limiter.peek(key, cost)
            if not isinstance(decision, Decision):
                decision = await decision
        except RateLimitError:
            return None  # the decision itself handles store errors
        passes = bool(decision) or self.request_limiter.record_decision(
            category_limiter, key, cost, decision, method, path
        )
        return None if passes else decision

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that no category limits; limits of routes and of websocket messages may apply."""
        if self.request_limiter.idle:
            self.request_limiter.run_idle_maintenance()
        client = self._find_client(scope) if self.request_limiter.special or scope["type"] != "http" else None
        exempt = False
        if client is not None:
            request = make_request(scope, client)
            if self.request_limiter.client_identifier.awaits_key:
                await self.request_limiter.client_identifier.await_key_function(request)
            client = self.request_limiter.exempt_client(request, client)
            exempt = client.key is None
        request_state = make_state(self.request_limiter, client if exempt else None, None, scope.get(STATE_KEY))
        await self._call_app(scope, receive, send, request_state, client)

    async def _defer(
        self, scope: Scope, receive: Receive, send: Send, client: RequestClient, charges: Sequence[RequestCharge]
    ) -> None:
        """Pass a request to the application; its charges are decided together with the limits of its route."""
        request_state = make_state(self.request_limiter, client, None, scope.get(STATE_KEY), charges)
        await self._call_app(scope, receive, send, request_state, client)

    async def _call_app(
        self, scope: Scope, receive: Receive, send: Send, request_state: RequestState, client: RequestClient | None
    ) -> None:
        """Call the application; what is pending is decided, and what depends on the response settled, at its end."""
        scope[STATE_KEY] = request_state
        sending = add_fields(request_state, scope, receive, send)
        try:
            if scope["type"] == "http" or client is None:
                await self.app(scope, receive, sending)
            else:
                await self._websocket(scope, receive, sending, client)
        except BaseException as error:
            await finish(scope, request_state, cancelled=not isinstance(error, Exception))
            raise
        await finish(scope, request_state)

    async def _apply_outcome(
        self,
        outcome: LimitOutcome,
        scope: Scope,
        receive: Receive,
        send: Send,
        target: RequestTarget,
        client: RequestClient,
    ) -> None:
        """Pass the request on or deny it, as decided."""
        decision, response_charge = outcome.decision, outcome.response_charge
        if not outcome.allowed and outcome.category_limiter is not None and decision is not None:
            await self._deny(scope, receive, send, outcome.category_limiter, client, decision, outcome.kind)
            return
        outer = scope.get(STATE_KEY)
        request_state = make_state(self.request_limiter, client, None if outcome.made else decision, outer)
        request_state.made, request_state.response_charge = outcome.made, response_charge
        if not target.admin:
            await self._call_app(scope, receive, send, request_state, client)
            return
        scope[STATE_KEY] = request_state
        try:
            await self._admin(scope, receive, add_fields(request_state, scope, receive, send))
        finally:
            await finish(scope, request_state)

    def _deny(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        category_limiter: CategoryLimiter,
        client: RequestClient,
        decision: Decision,
        kind: Kind = "quota-exceeded",
    ) -> Awaitable[None]:
        """Send the response to a denied request. Not a coroutine itself, so that floods of denials stay cheap."""
        writer, policy = self.request_limiter.response_writer, category_limiter.category.policy
        decision = decision.with_views()  # a denial reads them several times
        if writer.is_plain(scope["headers"]):
            response = plain_denial(decision, policy, kind)
        else:
            response = writer.write_denial(make_request(scope, client), decision, policy, kind)
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
        await run_async(outer.deny_flow(decision, tasks=True), call)
        await respond(scope, receive, send, response, [])

    async def _admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the admin endpoint."""
        request = make_request(scope, scope[STATE_KEY].client)
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
            response = await run_async(admin.handle_flow(self.request_limiter, request, query, body), call)
        await respond(scope, receive, send, response, [])

    def _find_client(self, scope: Scope) -> RequestClient:
        """Identify the client of a request."""
        peer = scope.get("client")
        return self.request_limiter.client_identifier.find(peer[0] if peer else None, scope["headers"])

    async def _websocket(self, scope: Scope, receive: Receive, send: Send, client: RequestClient) -> None:
        """Pass a websocket to the application, with limits on its messages if the rules define them."""
        request_limiter, request = self.request_limiter, make_request(scope, client)
        target = MessageTarget(request, self._routes(scope))
        if client.key is None or target.find(request_limiter.targets, request_limiter.plan_limiters) is None:
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

    def __init__(self, check_flow: Callable[[], CallFlow[bool]], receive: Receive, send: Send, *, drops: bool) -> None:
        self._check_flow = check_flow
        self._receive = receive
        self._send = send
        self._drops = drops
        self._closed = False

    async def receive(self) -> Message:
        """Return the next message within the limit."""
        while not self._closed:
            message = await self._receive()
            if message["type"] != "websocket.receive" or await run_async(self._check_flow(), call):
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
