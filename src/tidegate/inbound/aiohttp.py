"""Limits for aiohttp.web: RateLimitMiddleware for whole applications, `limit` for single handlers.

    app = web.Application(middlewares=[RateLimitMiddleware("config.yaml", store="redis://localhost")])

    @routes.get("/items/{number}")
    @limit("5/1m")
    async def item(request): ...

`limit` decorates a handler function, a `web.View` class or one of its methods. The categories of the middleware and the
limits of the handler are decided together. aiohttp sends the headers of a response that a handler prepares itself (a
stream, a WebSocket) before the middleware can add its own, so these responses have no rate limit headers.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Final

from tidegate._runtime.flow import run_async
from tidegate.errors import ConfigError
from tidegate.inbound._client.request import MAX_METHOD_LENGTH, METHOD_OVERRIDES, Request, read_header
from tidegate.inbound._limiting.charges import ALLOWED, perform_async
from tidegate.inbound._limiting.limited_call import FrameworkLimit, FrameworkLimits, decorate
from tidegate.inbound._limiting.limited_functions import exempt, is_exempt, route_name, stack_of
from tidegate.inbound._limiting.matched_route import MatchedRoute, class_handler
from tidegate.inbound._limiting.native_requests import requests_of
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.request_state import STATE_KEY, RequestState
from tidegate.inbound._limiting.request_targets import MISSING
from tidegate.inbound._responses import admin, exceeded
from tidegate.inbound._responses.response import fit_to_status
from tidegate.inbound._rules.path_readings import asgi_routes

try:
    from aiohttp import web
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.aiohttp requires aiohttp: pip install aiohttp") from _error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from pathlib import Path
    from typing import Unpack

    from tidegate._runtime.clock import Clock
    from tidegate.core._decision import Decision
    from tidegate.headers import Style
    from tidegate.inbound._client.address import TrustedProxies
    from tidegate.inbound._limiting.charges import ChargeResult
    from tidegate.inbound._limiting.limited_functions import F
    from tidegate.inbound._limiting.options import Options
    from tidegate.inbound._limiting.request_targets import RequestTarget
    from tidegate.inbound._responses.response import Response
    from tidegate.stores import Store

    Fields = list[tuple[str, str]]
    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

__all__ = ["Limits", "RateLimitExceeded", "RateLimitMiddleware", "exempt", "limit"]

MIDDLEWARE_VERSION: Final = 1  # as `aiohttp.web.middleware` marks functions
# Where a request keeps the mapping with the state. aiohttp 3.14 and later warn about keys that are strings.
REQUEST_KEY: Final[Any] = web.RequestKey(STATE_KEY, dict) if hasattr(web, "RequestKey") else STATE_KEY


class RateLimitExceeded(exceeded.RateLimitExceeded, web.HTTPTooManyRequests):
    """Raised by a limited block; `decision` has the reason. It is the response to the denied request."""

    def __init__(self, denial: Response, decision: Decision) -> None:
        """Become the response to the denied request."""
        web.HTTPTooManyRequests.__init__(self)
        self.set_status(denial.status)
        self.body = denial.body
        self.headers.update(denial.headers)
        self.denial = denial
        self.decision = decision


@read_header.register
def find_header(request: web.Request, name: str) -> str | None:
    """Find a header in a request."""
    return ", ".join(request.headers.getall(name, ())) or None


class AiohttpFramework:
    """Requests and responses of aiohttp."""

    request_type: Final = web.Request

    def find_request(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> web.Request:  # noqa: ANN401 - any function
        """Find the request among the arguments of a handler: itself, or that of a view."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, web.Request):
                return value
            if isinstance(value, web.View):
                return value.request
        message = f"{route_name(function)} has no request argument: add one, as in `async def handler(request)`"
        raise ConfigError(message)

    def mapping(self, native: web.Request) -> dict[str, Any]:
        """Return the mapping that holds the state."""
        found: dict[str, Any] | None = native.get(REQUEST_KEY)
        if found is None:
            found = native[REQUEST_KEY] = {}
        return found

    def sender(self, native: web.Request, mapping: object) -> tuple[str | None, Any]:
        """Return the address of the peer, and the headers."""
        del mapping
        return native.remote, native.headers

    def common(self, native: web.Request, mapping: Any, address: str | None) -> Request:  # noqa: ANN401 - any mapping
        """Return the Request that is the same for all frameworks."""
        header = functools.partial(find_header, native)
        return Request(native.method, native.path, address, native, header, mapping)

    def make_response(self, response: Response) -> web.Response:
        """Return the response to a denied request."""
        return web.Response(body=response.body, status=response.status, headers=list(response.headers))

    def add_fields(self, response: Any, fields: Fields) -> Any:  # noqa: ANN401 - any response
        """Add header fields to a response, unless it has been sent already."""
        if not response.prepared:
            response.headers.update(fit_to_status(fields, response.status))
        return response

    def error_response(self, error: Exception) -> Any:  # noqa: ANN401 - any response
        """Return the exception if it is a response."""
        return error if isinstance(error, web.HTTPException) else None

    def status(self, response: Any) -> int:  # noqa: ANN401 - as above
        """Return the status of a response."""
        return response.status  # type: ignore[no-any-return]  # of any response

    def deny_call(self, response: Response, decision: Decision, native: object) -> web.Response:
        """Return the response to a call that its own limits deny."""
        del decision, native
        return self.make_response(response)

    def make_error(self, response: Response, decision: Decision, native: object) -> Exception:
        """Return the exception for a denied request."""
        del native
        return RateLimitExceeded(response, decision)

    def is_websocket(self, native: web.Request) -> bool:
        """Return whether the request opens a WebSocket."""
        return native.headers.get("Upgrade", "").lower() == "websocket"


FRAMEWORK: Final = AiohttpFramework()
requests_of.register(web.Request, lambda _: FRAMEWORK)


class RateLimitMiddleware:
    """Limits the requests of an aiohttp application; it is one of its `middlewares`."""

    __middleware_version__ = MIDDLEWARE_VERSION

    def __init__(
        self,
        config: str | Path | Mapping[str, object] | None = None,
        store: str | Store = "memory://",
        trusted_proxies: TrustedProxies | Iterable[str] = (),
        headers: Style | Mapping[str, str] = "x",
        clock: Clock | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Read `config`: the path of a file, a mapping, or None for the defaults of the API limiting spec."""
        if "on_message" in options:
            raise ConfigError("needs the ASGI middleware: messages are not limited here", field="on_message")
        self.request_limiter: RequestLimiter = RequestLimiter(
            config, store, trusted_proxies, headers, clock, tasks=True, **options
        )

    async def __call__(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Pass a request to the application, or deny it."""
        request_limiter = self.request_limiter
        target = self._find_target(request)
        if target is None and request_limiter.idle:
            request_limiter.run_idle_maintenance()
        mapping = FRAMEWORK.mapping(request)
        outer: RequestState | None = mapping.get(STATE_KEY)
        client, result = None, ALLOWED
        if target is not None or request_limiter.needs_request:
            client = request_limiter.client_identifier.find(*FRAMEWORK.sender(request, mapping))
            seen = FRAMEWORK.common(request, mapping, client.address)
            if request_limiter.client_identifier.awaits_key:
                await request_limiter.client_identifier.await_key_function(seen)
            client = request_limiter.exempt_client(seen, client)
            if target is not None:
                decided = request_limiter.decide_now(target, client, request.method, request.path, seen)
                if decided is None:
                    decided = await run_async(request_limiter.check_flow(seen, target, client, request), perform_async)
                result = decided
                if not result.allowed and not result.by_route:
                    return await self._deny(seen, result, outer)
            elif client.key is not None:
                client = None  # the limits of the handler identify it
        request_state = mapping[STATE_KEY] = RequestState.of(request_limiter, client, outer)
        request_state.start(result, target)
        return await self._call(request, self._admin if target is not None and target.admin else handler, request_state)

    async def _call(self, request: web.Request, handler: Handler, request_state: RequestState) -> web.StreamResponse:
        """Call the handler, correct the charges by its response, and add the headers."""
        seen = FRAMEWORK.common(request, FRAMEWORK.mapping(request), request_state.address)
        try:
            try:
                response = await handler(request)
            except web.HTTPException as raised:  # it is a response, too
                if request_state.denied is None:
                    await self._finish(seen, raised, request_state)
                    raise
                response = raised
            if request_state.denied is not None and not response.prepared:  # the handler was not reached
                denied = await run_async(request_state.take_denial_flow(), perform_async)
                response = FRAMEWORK.make_response(denied.write_denial(seen, request))  # type: ignore[union-attr]  # see above
            await self._finish(seen, response, request_state)
            return response
        finally:
            await run_async(request_state.settle_flow(seen), perform_async)

    async def _finish(self, seen: Request, response: web.StreamResponse, request_state: RequestState) -> None:
        """Settle what depends on the response, and add the headers."""
        await run_async(request_state.settle_start_flow(seen, response.status), perform_async)
        FRAMEWORK.add_fields(response, request_state.fields(response.status))

    def _find_target(self, request: web.Request) -> RequestTarget | None:
        """Find the target of a request; None if it is not limited."""
        request_limiter = self.request_limiter
        overrides: tuple[str, ...] = ()
        if request_limiter.by_method:
            values = [value for name in METHOD_OVERRIDES for value in request.headers.getall(name, ())]
            overrides = tuple(value.strip()[:MAX_METHOD_LENGTH] for value in values)
        resource = request.match_info.route.resource
        template = None if resource is None else resource.canonical
        handler = request.match_info.handler
        matched = request.match_info.http_exception is None
        cache_key: tuple[Any, ...] = (request.method, request.path, template, *overrides)
        target: RequestTarget | None = request_limiter.targets.cached.get(cache_key, MISSING)
        if target is MISSING:
            routes = asgi_routes(request.path, "", request_limiter.root_path)
            route = find_route(handler, request.method) if matched else None
            target = request_limiter.targets.find(cache_key, (request.method, *overrides), routes, template, route)
        return target

    async def _deny(self, seen: Request, result: ChargeResult, outer: RequestState | None) -> web.Response:
        """Build the response to a request that the middleware denies."""
        decision = result.decision
        assert decision is not None  # noqa: S101 - a denial has a decision
        response = FRAMEWORK.make_response(result.write_denial(seen, seen))
        if outer is None:
            FRAMEWORK.add_fields(response, self.request_limiter.response_writer.fields(decision))
        else:
            await run_async(outer.deny_flow(decision), perform_async)
        return response

    async def _admin(self, request: web.Request) -> web.StreamResponse:
        """Serve the admin endpoint."""
        mapping = FRAMEWORK.mapping(request)
        seen = FRAMEWORK.common(request, mapping, mapping[STATE_KEY].address)
        response = admin.check_access(self.request_limiter, seen, request.remote)
        if response is None:
            body = b""
            while request.method == "POST" and len(body) <= admin.MAX_BODY_BYTES:
                piece = await request.content.read(admin.MAX_BODY_BYTES + 1)
                if not piece:
                    break
                body += piece
            flow = admin.handle_flow(self.request_limiter, seen, request.query_string, body)
            response = await run_async(flow, perform_async)
        return FRAMEWORK.make_response(response)

    async def close(self, app: web.Application | None = None) -> None:
        """Close the store, if this middleware opened it: `app.on_cleanup.append(middleware.close)`."""
        del app
        self.request_limiter.flush()
        await self.request_limiter.opened_store.close_async()


class limit(FrameworkLimit):  # noqa: N801 - used as a decorator
    """Limits the handlers that it decorates."""

    _framework: ClassVar = FRAMEWORK

    def __call__(self, handler: F) -> F:
        """Decorate a handler function, a `web.View` class, or a method of one."""
        limited: Any = handler
        if not inspect.iscoroutinefunction(handler):
            proceed: Any = handler

            @functools.wraps(handler, updated=())
            async def handle(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the handler's
                return await proceed(*args, **kwargs)

            limited = handle
        return decorate(self, limited, FRAMEWORK)  # type: ignore[no-any-return]  # wraps keeps what callers see


class Limits(FrameworkLimits["limit"]):
    """One limiter for an application without a middleware: `limits = Limits(store=…)`, then `@limits.limit("5/1m")`."""

    _limit: ClassVar = limit


def find_route(handler: Any, method: str) -> MatchedRoute:  # noqa: ANN401 - any handler
    """Return what is known about a route that was matched."""
    stack = stack_of(class_handler(handler, method) if isinstance(handler, type) else handler)
    stacks = () if stack is None else (stack, *stack.covers)
    uses = () if stack is None else stack.uses
    marks = [mark for each in stacks for mark in each.marks]
    return MatchedRoute.of(route_name(handler), uses, marks, method, exempt=is_exempt(handler), together=True)
